// Casts of a matrix to E4M3, with its transpose; ops/casting.py has the rule. A kernel is
// cast_kernel<Source>, or calls cast_tile(): the source says where the numbers come from.
//
//   values    [rows, columns]   x / scale in E4M3
//   transpose [columns, pitch]  pitch: rows rounded up to a multiple of 16, with zeros at the end
//   amax, saturated             statistics, updated by atomic operations; not if only the transpose
//                               is wanted, as another cast has noted the same numbers
//   partials                    if wanted: column sums of x before the cast, for add_partials()
//
//   determinism   the maximum of floats and the sum of integers do not depend on the order; that of
//                 the column sums depends only on the sizes
//
// A block casts 128 rows of 128 columns, so it writes whole cache lines of values and of the
// transpose. A thread has 8 rows of 8 columns. It transposes 4 x 4 bytes at a time in registers;
// shared memory has words of 4 rows by columns. All accesses to global memory have 16 bytes.
//
// x / scale is exact, because scale is a power of two. It is computed as x * (1 / scale), which is
// exact too.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <optional>
#include <type_traits>

#include "common/check.h"
#include "common/columns.cuh"
#include "common/launch.cuh"
#include "common/reduce.cuh"

namespace lightseq {

constexpr int kCastThreads = 256;
constexpr int kCastTile = 128;  // rows and columns of a block
constexpr int kCastRows = 8;    // of a thread
constexpr int kCastHalf = 4;    // rows that a thread transposes at a time
constexpr int kCastGroups = kCastTile / kColumnsPerDraw;
constexpr int kCastWarps = kCastThreads / kWarp;
constexpr int64_t kFp8Alignment = 16;  // rows of operands are multiples of it
constexpr float kMostE4m3 = 448.0f;
static_assert(kCastThreads * kCastRows * kColumnsPerDraw == kCastTile * kCastTile);

// Two numbers in E4M3; the first is in the low byte. NaN becomes 0x7f, numbers beyond +-448 become
// +-448.
__device__ __forceinline__ uint32_t pack_e4m3(float first, float second) {
  uint16_t pair = 0;
#if __CUDA_ARCH__ >= 890
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(second), "f"(first));
#endif
  return pair;
}

// The inverse for the lower two bytes; it is exact.
__device__ __forceinline__ float2 unpack_e4m3(uint32_t pair) {
  uint32_t halves = 0;
#if __CUDA_ARCH__ >= 890
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(static_cast<uint16_t>(pair)));
#endif
  return unpack_pair<__half>(halves);
}

// Eight numbers, multiplied by the inverse of their scale.
__device__ __forceinline__ uint2 pack_e4m3(const float (&x)[kColumnsPerDraw], float inverse) {
  uint32_t pairs[kColumnsPerDraw / 2];
#pragma unroll
  for (int i = 0; i < kColumnsPerDraw / 2; ++i) {
    pairs[i] = pack_e4m3(x[2 * i] * inverse, x[2 * i + 1] * inverse);
  }
  return {pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16};
}

// Bit 7 of each byte of the result: whether the E4M3 number is positive or NaN. Other bits are 0.
__device__ __forceinline__ uint32_t positive_or_nan(uint32_t four) {
  const uint32_t size = four & 0x7f7f7f7fu;  // so a sum of two bytes does not carry
  const uint32_t is_not_zero = size + 0x7f7f7f7fu, is_nan = size + 0x01010101u;
  return is_not_zero & (~four | is_nan) & 0x80808080u;
}

// in[i]: four bytes of row i. out[i]: the bytes of column i.
__device__ __forceinline__ void transpose_bytes(const uint32_t (&in)[4], uint32_t (&out)[4]) {
  const uint32_t low01 = __byte_perm(in[0], in[1], 0x5140);
  const uint32_t low23 = __byte_perm(in[2], in[3], 0x5140);
  const uint32_t high01 = __byte_perm(in[0], in[1], 0x7362);
  const uint32_t high23 = __byte_perm(in[2], in[3], 0x7362);
  out[0] = __byte_perm(low01, low23, 0x5410);
  out[1] = __byte_perm(low01, low23, 0x7632);
  out[2] = __byte_perm(high01, high23, 0x5410);
  out[3] = __byte_perm(high01, high23, 0x7632);
}

struct Cast;

// The statistics of some of the numbers.
struct CastStatistics {
  float amax;
  unsigned saturated;

  // Those of a warp's lanes.
  __device__ __forceinline__ CastStatistics of_warp() const {
    return {__uint_as_float(__reduce_max_sync(kAllLanes, __float_as_uint(amax))),
            __reduce_add_sync(kAllLanes, saturated)};
  }
  // Adds them to those of the cast.
  __device__ __forceinline__ void publish(const Cast& cast) const;

  // Adds those of groups of numbers; a group that does not exist is ignored. Infinity becomes NaN.
  template <int kGroups, int kCount>
  __device__ __forceinline__ void note(float (&x)[kGroups][kCount], float inverse,
                                       const bool (&exist)[kGroups]) {
    float most = 0.0f;
#pragma unroll
    for (int i = 0; i < kGroups; ++i) {
      float of_group = 0.0f;
#pragma unroll
      for (const float number : x[i]) of_group = fmaxf(of_group, fabsf(number));  // ignores NaN
      if (exist[i]) most = fmaxf(most, of_group);
    }
    if (most * inverse > kMostE4m3) {  // rare: a number saturates or is infinite
      most = 0.0f;
#pragma unroll
      for (int i = 0; i < kGroups; ++i) {
#pragma unroll
        for (float& number : x[i]) {
          number = fmaf(number, 0.0f, number);
          if (!exist[i]) continue;
          most = fmaxf(most, fabsf(number));
          saturated += fabsf(number * inverse) > kMostE4m3;
        }
      }
    }
    amax = fmaxf(amax, most);
  }

  // Returns the eight numbers in E4M3. Zeros that are not counted if they do not exist.
  __device__ __forceinline__ uint2 cast(const float (&x)[kColumnsPerDraw], float inverse,
                                        bool exist) {
    float noted[1][kColumnsPerDraw];
#pragma unroll
    for (int e = 0; e < kColumnsPerDraw; ++e) noted[0][e] = x[e];
    note(noted, inverse, {exist});
    const uint2 bytes = pack_e4m3(noted[0], inverse);
    return exist ? bytes : uint2{0, 0};
  }
};

// Adds the statistics of a block's threads to those of the cast, in two steps with a barrier of the
// block between. Threads are numbered along rows of warps.
template <int kWarps>
struct BlockStatistics {
  CastStatistics of_warp[kWarps];

  // Instead of note(), if a warp has statistics several times: the warp clears its own, then adds.
  __device__ __forceinline__ void clear() {
    if (threadIdx.x % kWarp == 0) of_warp[threadIdx.x / kWarp] = {};
  }
  __device__ __forceinline__ void add(const CastStatistics& mine) {
    const CastStatistics all = mine.of_warp();
    if (threadIdx.x % kWarp != 0) return;
    CastStatistics& sum = of_warp[threadIdx.x / kWarp];
    sum = {fmaxf(sum.amax, all.amax), sum.saturated + all.saturated};
  }

  __device__ __forceinline__ void note(const CastStatistics& mine, int thread) {
    const CastStatistics all = mine.of_warp();
    if (thread % kWarp == 0) of_warp[thread / kWarp] = all;
  }

  // Only one thread calls it.
  __device__ __forceinline__ void publish(const Cast& cast) const {
    CastStatistics all = of_warp[0];
#pragma unroll
    for (int i = 1; i < kWarps; ++i) {
      all.amax = fmaxf(all.amax, of_warp[i].amax);
      all.saturated += of_warp[i].saturated;
    }
    all.publish(cast);
  }
};

// Results and scalars of a cast.
struct Cast {
  uint8_t* values;
  uint8_t* transpose;
  const float* scale;
  int* amax;  // the bits of a float; numbers >= 0 are ordered as their bits
  unsigned long long* saturated;
  int64_t rows, columns, pitch;
  unsigned tiles_across;
  float* partials = nullptr;  // [tiles of rows, columns]; null: not wanted

  int64_t tiles_down() const { return blocks_for(rows, kCastTile); }
};

__device__ __forceinline__ void CastStatistics::publish(const Cast& cast) const {
  atomicMax(cast.amax, __float_as_int(amax));
  if (saturated > 0) atomicAdd(cast.saturated, saturated);
}

// What a block and a thread cast.
struct CastPlace {
  int64_t first_row, first_column;  // of the block
  int rows, columns;                // of the block: how many exist
  int group, octet;  // which 8 columns and which 8 rows of the block are the thread's
  int thread_rows;   // of the thread: how many exist; 0 if its columns do not

  // block: number of the block's tile; tiles are counted along rows.
  __device__ __forceinline__ CastPlace(const Cast& cast, unsigned block)
      : first_row(static_cast<int64_t>(block / cast.tiles_across) * kCastTile),
        first_column(static_cast<int64_t>(block % cast.tiles_across) * kCastTile),
        rows(static_cast<int>(min(cast.rows - first_row, int64_t{kCastTile}))),
        columns(static_cast<int>(min(cast.columns - first_column, int64_t{kCastTile}))),
        group(threadIdx.x % kCastGroups),
        octet(threadIdx.x / kCastGroups),
        thread_rows(group * kColumnsPerDraw < columns
                        ? max(0, min(rows - octet * kCastRows, kCastRows))
                        : 0) {}

  __device__ __forceinline__ bool is_full() const {
    return rows == kCastTile && columns == kCastTile;
  }
  // The thread's first ones.
  __device__ __forceinline__ int64_t row() const { return first_row + octet * kCastRows; }
  __device__ __forceinline__ int64_t column() const {
    return first_column + group * kColumnsPerDraw;
  }
};

// The bytes of a block by columns, in shared memory: 8 quads of 16 rows in each column. Groups of 8
// columns order their quads differently, and the upper 8 groups swap two neighbouring words. So
// neither accesses of words nor those of quads have bank conflicts.
struct CastTile {
  static constexpr int kQuadRows = sizeof(uint4);
  static constexpr int kQuads = kCastTile / kQuadRows;  // of a column
  static constexpr int kThreadQuads = kCastTile * kQuads / kCastThreads;
  uint4 quads[kCastTile * kQuads];

  // The thread's rows of this half in its column e; the first row is in the lowest byte.
  __device__ __forceinline__ uint32_t& word(const CastPlace& place, int half, int e) {
    const int column = place.group * kColumnsPerDraw + e;
    uint4& quad = quads[column * kQuads + (place.octet / 2 ^ place.group % kQuads)];
    return reinterpret_cast<uint32_t*>(&quad)[place.octet % 2 * 2 + (half ^ place.group / kQuads)];
  }

  // Calls copy(i, global, shared, swap) for all quads; the threads share them, i counts a thread's.
  // `transpose` has the layout of Cast::transpose. If `swap`, shared is the `swapped` quad.
  template <typename Byte, typename Copy>
  __device__ __forceinline__ void for_each_quad(const CastPlace& place, Byte* transpose,
                                                int64_t pitch, Copy&& copy) {
    constexpr int kStep = kCastThreads / kQuads;  // columns
    const int quad = threadIdx.x % kQuads, first = threadIdx.x / kQuads;
    const int row = quad * kQuadRows;
    const int columns = row < place.rows ? place.columns : 0;
    Byte* const global = transpose + (place.first_column + first) * pitch + place.first_row + row;
#pragma unroll
    for (int i = 0; i < kThreadQuads; ++i) {
      const int column = first + i * kStep, group = column / kColumnsPerDraw;
      if (column < columns) {
        copy(i, global + i * kStep * pitch, quads[column * kQuads + (quad ^ group % kQuads)],
             group >= kQuads);
      }
    }
  }

  __device__ __forceinline__ static uint4 swapped(const uint4& x, bool swap) {
    return swap ? uint4{x.y, x.x, x.w, x.z} : x;
  }
};

// Which results of a cast are wanted.
enum class CastOf { kBoth, kValues, kTranspose };

// A source is a kernel parameter with these members:
//
//   kBlocks       resident blocks per SM; this limits the registers per thread
//   kRowsAhead    rows of a thread whose loads are in flight together: 4 or 8
//   kSums         whether column sums may be wanted
//   Row           what is loaded of a row: 8 columns; uint2 if they are E4M3 already. Zeros stand
//                 for a row that does not exist
//   State         what a thread needs for all its rows. All threads of a block call the constructor
//                 State(source, cast, place, tile) while the first loads are in flight. Before it,
//                 a thread accesses no shared memory; after it, no words of the tile but its own
//   at(place, row)              the addresses of rows of the thread, from `row` on
//   load(at, i)                 loads the i-th of them
//   numbers(state, row, i, x)   the eight numbers x of row i of the thread. If the row does not
//                               exist, they are ignored, but added to the column sums
//
// Casts the block's tile. All threads of a block must call it.
template <CastOf kOf = CastOf::kBoth, typename Source>
__device__ __forceinline__ void cast_tile(const Source& source, const Cast& cast,
                                          const CastPlace& place) {
  constexpr bool kValues = kOf == CastOf::kBoth;
  static_assert(kOf != CastOf::kValues);
  __shared__ CastTile tile;
  const float scale = *cast.scale;
  constexpr int kRowsAhead = Source::kRowsAhead;
  typename Source::Row rows[kRowsAhead];
  const auto load_from = [&](int first) {
    const auto at = source.at(place, first);
    if (place.is_full()) {  // without predicates, nvcc puts no computation between the loads
#pragma unroll
      for (int i = 0; i < kRowsAhead; ++i) rows[i] = source.load(at, i);
    } else {
#pragma unroll
      for (int i = 0; i < kRowsAhead; ++i) {
        rows[i] = {};
        if (first + i < place.thread_rows) rows[i] = source.load(at, i);
      }
    }
  };
  load_from(0);
  const typename Source::State state(source, cast, place, tile);

  const float inverse = 1.0f / scale;
  const bool odd = place.group % 2 == 1;
  uint8_t* const values = cast.values + place.row() * cast.columns + place.first_column +
                          place.group / 2 * sizeof(uint4);
  CastStatistics statistics = {};
  float sums[kColumnsPerDraw] = {};
  constexpr int kUnroll = kRowsAhead / kCastHalf;
#pragma unroll kUnroll
  for (int half = 0; half < kCastRows / kCastHalf; ++half) {
    const int first = half * kCastHalf;
    if (half > 0 && kRowsAhead == kCastHalf) load_from(first);
    uint2 bytes[kCastHalf];
#pragma unroll
    for (int i = 0; i < kCastHalf; ++i) {
      float x[kColumnsPerDraw];
      source.numbers(state, rows[half % kUnroll * kCastHalf + i], first + i, x);
      if constexpr (Source::kSums) {
#pragma unroll
        for (int e = 0; e < kColumnsPerDraw; ++e) sums[e] += x[e];
      }
      if constexpr (std::is_same_v<typename Source::Row, uint2>) {
        bytes[i] = rows[half % kUnroll * kCastHalf + i];
      } else {
        bytes[i] = statistics.cast(x, inverse, first + i < place.thread_rows);
      }
    }

    // Two neighbours exchange two rows, so that each stores two rows of 16 columns.
#pragma unroll
    for (int i = 0; i < (kValues ? kCastHalf / 2 : 0); ++i) {
      const uint2 mine = odd ? bytes[2 + i] : bytes[i], sent = odd ? bytes[i] : bytes[2 + i];
      const uint2 got = {__shfl_xor_sync(kAllLanes, sent.x, 1),
                         __shfl_xor_sync(kAllLanes, sent.y, 1)};
      const uint4 both =
          odd ? uint4{got.x, got.y, mine.x, mine.y} : uint4{mine.x, mine.y, got.x, got.y};
      const int r = first + i + (odd ? 2 : 0);
      if (r < place.thread_rows) *reinterpret_cast<uint4*>(values + r * cast.columns) = both;
    }
#pragma unroll
    for (int word = 0; word < 2; ++word) {
      uint32_t by_row[4], by_column[4];
#pragma unroll
      for (int i = 0; i < kCastHalf; ++i) by_row[i] = word == 0 ? bytes[i].x : bytes[i].y;
      transpose_bytes(by_row, by_column);
#pragma unroll
      for (int i = 0; i < 4; ++i) tile.word(place, half, 4 * word + i) = by_column[i];
    }
  }
  if constexpr (Source::kSums) griddepcontrol_launch_dependents();

  __shared__ BlockStatistics<kCastWarps> of_block;
  __shared__ float sums_of_warp[Source::kSums ? kCastWarps : 1][kCastTile];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  if constexpr (kValues) of_block.note(statistics, threadIdx.x);
  if constexpr (Source::kSums) {
#pragma unroll
    for (int e = 0; e < kColumnsPerDraw; ++e) {
      sums[e] += __shfl_xor_sync(kAllLanes, sums[e], kCastGroups);  // the warp's other rows
      if (lane < kCastGroups) sums_of_warp[warp][lane * kColumnsPerDraw + e] = sums[e];
    }
  }
  __syncthreads();

  tile.for_each_quad(place, cast.transpose, cast.pitch,
                     [](int, uint8_t* to, const uint4& quad, bool swap) {
                       *reinterpret_cast<uint4*>(to) = CastTile::swapped(quad, swap);
                     });
  if constexpr (Source::kSums) {
    if (cast.partials != nullptr && static_cast<int>(threadIdx.x) < place.columns) {
      float sum = 0.0f;
#pragma unroll
      for (int i = 0; i < kCastWarps; ++i) sum += sums_of_warp[i][threadIdx.x];
      cast.partials[place.first_row / kCastTile * cast.columns + place.first_column + threadIdx.x] =
          sum;
    }
  }
  if (kValues && threadIdx.x == 0) of_block.publish(cast);
}

template <CastOf kOf, typename Source>
__global__ void __launch_bounds__(kCastThreads, Source::kBlocks)
    cast_kernel(const Source source, const Cast cast) {
  cast_tile<kOf>(source, cast, CastPlace(cast, blockIdx.x));
}

// kRowsAhead of a source that reads numbers of type T: 128 bytes of each tensor.
template <typename T>
constexpr int kCastRowsAhead = 16 / sizeof(T);

// The source of a matrix in memory.
template <typename T, bool kSums_ = false>
struct Given {
  static constexpr int kBlocks = !kSums_ ? 4 : sizeof(T) == 2 ? 3 : 2;
  static constexpr int kRowsAhead = kCastRowsAhead<T>;
  static constexpr bool kSums = kSums_;
  using Row = Columns<T>;
  struct State {
    __device__ __forceinline__ State(const Given&, const Cast&, const CastPlace&, CastTile&) {}
  };

  const T* x;
  int64_t stride;

  __device__ __forceinline__ const T* at(const CastPlace& place, int first) const {
    return x + (place.row() + first) * stride + place.column();
  }
  __device__ __forceinline__ Row load(const T* at, int i) const {
    Row row;
    row.load_cg(at + i * stride);
    return row;
  }

  template <typename AnyState>
  __device__ __forceinline__ void numbers(const AnyState&, const Row& row, int,
                                          float (&x)[kColumnsPerDraw]) const {
    row.unpack(x);
  }
};

inline void check_cast(const char* op, const char* name, const Tensor& x) {
  require_fp8(op, x.get_device());
  check_rows(op, name, x);
}

constexpr auto kE4m3 = ScalarType::Float8_e4m3fn;

inline int64_t cast_pitch(int64_t rows) { return blocks_for(rows, kFp8Alignment) * kFp8Alignment; }

// The scalars of a cast; null if a result is not to be cast.
struct CastScalars {
  const float* scale = nullptr;
  int* amax = nullptr;
  unsigned long long* saturated = nullptr;

  bool are_given() const { return scale != nullptr; }
};

// Those of an op's argument: `Cast | None` (ops/arguments.py).
inline CastScalars cast_scalars(const char* op, const std::optional<Tensor>& scale,
                                const std::optional<Tensor>& amax,
                                const std::optional<Tensor>& saturated) {
  if (!scale.has_value()) return {};
  require_fp8(op, scale->get_device());
  return {.scale = scale->const_data_ptr<float>(),
          .amax = static_cast<int*>(amax->mutable_data_ptr()),
          .saturated = static_cast<unsigned long long*>(saturated->mutable_data_ptr())};
}

// A cast of a matrix [T, C]: values [T, C] and transpose [C, P]. What is not wanted is empty.
struct CastResults {
  Tensor values, transpose;
  Cast cast;  // without scalars, all pointers are null
};

// On the device of `like`.
inline CastResults allocate_cast(const Tensor& like, int64_t rows, int64_t columns,
                                 const CastScalars& scalars, CastOf of = CastOf::kBoth) {
  const int64_t pitch = cast_pitch(rows);
  const auto allocate_if = [&](bool is_wanted, int64_t first, int64_t second) {
    return scalars.are_given() && is_wanted ? allocate(like, {first, second}, kE4m3)
                                            : allocate(like, {0}, kE4m3);
  };
  CastResults results{.values = allocate_if(of != CastOf::kTranspose, rows, columns),
                      .transpose = allocate_if(of != CastOf::kValues, columns, pitch),
                      .cast = {}};
  if (scalars.are_given()) {
    results.cast = {.values = output_of<uint8_t>(results.values),
                    .transpose = output_of<uint8_t>(results.transpose),
                    .scale = scalars.scale,
                    .amax = scalars.amax,
                    .saturated = scalars.saturated,
                    .rows = rows,
                    .columns = columns,
                    .pitch = pitch,
                    .tiles_across = static_cast<unsigned>(blocks_for(columns, kCastTile))};
  }
  return results;
}

// For kernels that cast in a variant of their own. Calls function(whether the kernel casts):
// std::true_type if Cast::values is not null. Only bfloat16 is cast.
template <typename T, typename Function>
void dispatch_cast(const Cast& cast, Function&& function) {
  constexpr bool kMayCast = std::is_same_v<T, __nv_bfloat16>;
  if (kMayCast && cast.values != nullptr) {
    function(std::bool_constant<kMayCast>{});
  } else {
    require(cast.values == nullptr, "lightseq: a result that is cast must be bfloat16");
    function(std::false_type{});
  }
}

template <CastOf kOf = CastOf::kBoth, typename Source>
void launch_cast(const char* op, const Source& source, const Cast& cast) {
  if (cast.rows == 0 || cast.columns == 0) return;
  const int64_t blocks = cast.tiles_down() * cast.tiles_across;
  launch({.op = op, .grid = dim3(blocks), .block = kCastThreads}, cast_kernel<kOf, Source>, source,
         cast);
}

}  // namespace lightseq
