// LayerNorm: distribution of rows among threads, and the forward computation of a row.
//
// The grid has as many blocks as are resident at a time (persistent blocks). In a block, each team
// of threads processes one row at a time. A thread always has the same columns, so it keeps their
// data (bias, gamma, sums over rows) in registers. Rows are copied through shared memory, and each
// thread copies exactly the parts that it reads itself; so only sums over a row need a barrier of
// the team. If forward has few rows, each row gets its own team (one_each) and is loaded directly
// to registers.
//
// If results are also cast to E4M3 (fp8_rows.cuh), a block processes chunks of adjacent rows,
// because it stores their transpose.
#pragma once

#include <algorithm>
#include <cstdint>

#include "common/check.h"
#include "common/columns.cuh"
#include "common/device.h"
#include "common/fp8_cast.cuh"
#include "common/ptx/async_copy.cuh"
#include "common/reduce.cuh"

namespace lightseq {

constexpr int kMaxColumns = 8192;
constexpr int kBlockThreads = 512;

// A row is divided among the kThreads threads of a team: each has every kThreads-th group of eight
// columns. If the row is shorter, the last threads idle. kChunkRows: 0 for the usual chunk.
template <int kThreads_, int kGroups_, int kChunkRows = 0>
struct Shape {
  static constexpr int kThreads = kThreads_;
  static constexpr int kGroups = kGroups_;
  static constexpr int kTeams = kBlockThreads / kThreads;
  static constexpr int kWarps = kThreads / kWarp;             // per team
  static constexpr int kStride = kThreads * kColumnsPerDraw;  // between a thread's groups
  static constexpr int kColumns = kStride * kGroups;
  // 32 rows, so that the stores of a transpose fill sectors of 32 bytes; 16 wide rows, which fit
  // into shared memory.
  static constexpr int kChunk = kChunkRows > 0 ? kChunkRows : kColumns <= 2048 ? 32 : 16;
  static constexpr int kRounds = kChunk / kTeams;  // rows per team in a chunk
  static_assert(kRounds * kTeams == kChunk);

  // The widest rows have small chunks, too, for GPUs with 99 KB of shared memory.
  static constexpr int kSmallChunk = 4;
  static constexpr bool kHasSmallChunks = kColumns > 4096 && kChunk > kSmallChunk;
  using SmallChunks = Shape<kThreads, kGroups, kSmallChunk>;

  // First column of this thread's i-th group.
  static __device__ __forceinline__ int column(int i) {
    return i * kStride + static_cast<int>(threadIdx.x) * kColumnsPerDraw;
  }
};

// kGroups: groups per thread; always two if one group each would need more threads than a block.
template <int kGroups, typename Function>
void dispatch_shape(int64_t columns, Function&& function) {
  if (columns <= 512) return function(Shape<64 / kGroups, kGroups>{});
  if (columns <= 1024) return function(Shape<128 / kGroups, kGroups>{});
  if (columns <= 2048) return function(Shape<256 / kGroups, kGroups>{});
  if (columns <= 4096) return function(Shape<512 / kGroups, kGroups>{});
  return function(Shape<kBlockThreads, 2>{});
}

inline void check_width(const char* op, int64_t columns) {
  require(columns <= kMaxColumns, op, ": rows must have at most ", kMaxColumns,
          " elements on a GPU, got ", columns);
}

// A tensor like x, or an empty one if the output does not exist.
inline Tensor empty_rows(const Tensor& x, bool exists) {
  return exists ? allocate(x, {x.size(0), x.size(1)}) : allocate(x, {0});
}

// Assignment of rows to teams. Adjacent rows go to different blocks, so that the last rows are
// spread over all blocks; with kChunks, adjacent chunks do.
struct Rows {
  int64_t step;      // distance between a team's rows, or between a block's chunks
  int each, longer;  // a team has `each` rows, the first `longer` teams have one more; or a block
                     // has as many chunks
  int stages;        // rows in shared memory per team: 2, or 1 if two do not fit
  int shared;        // bytes of shared memory
  unsigned blocks;
  int64_t all = 0;  // rows. A team passes over rows of the last chunk that do not exist
  int tile = 0;     // where the chunk's results begin in shared memory

  template <typename S, bool kChunks = false>
  __device__ __forceinline__ int64_t first() const {
    if constexpr (kChunks) return static_cast<int64_t>(blockIdx.x) * S::kChunk + threadIdx.y;
    return static_cast<int64_t>(threadIdx.y) * gridDim.x + blockIdx.x;
  }
  template <typename S, bool kChunks = false>
  __device__ __forceinline__ int count() const {
    if constexpr (kChunks)
      return S::kRounds * (each + (static_cast<int>(blockIdx.x) < longer ? 1 : 0));
    return each + (first<S>() < longer ? 1 : 0);
  }
  // The row after `row`. round: number of the row in the team's chunk.
  template <typename S, bool kChunks>
  __device__ __forceinline__ int64_t next(int64_t row, int round) const {
    if constexpr (!kChunks) return row + step;
    return row + (round < S::kRounds - 1 ? S::kTeams : step - (S::kRounds - 1) * S::kTeams);
  }
};

// Bytes of shared memory for a block's results of a chunk.
template <typename S, bool kChunks>
constexpr int kTileBytes = kChunks ? S::kChunk * S::kColumns : 0;

// Whether one row of each team and the results of a chunk fit into shared memory.
template <typename S, typename Queue, typename Kernel>
bool chunks_fit(Kernel kernel, int32_t device) {
  return S::kTeams * Queue::kRowBytes + kTileBytes<S, true> <=
         dynamic_shared_memory_of(reinterpret_cast<const void*>(kernel), device);
}

// Queue: the RowQueue of the inputs. kLeast: minimum bytes of shared memory.
template <typename S, bool kChunks, typename Queue, int kLeast, typename Kernel>
Rows share_out(Kernel kernel, int64_t rows, int32_t device) {
  constexpr int kRows = S::kTeams * Queue::kRowBytes, kTile = kTileBytes<S, kChunks>;
  constexpr int kStatic = 1 << 10;  // the kernels have less static shared memory
  constexpr bool kFits =
      std::max(kRows + kTile, kLeast) + kStatic <= shared_memory_of_capability(89);
  static_assert(kFits || (kChunks && S::kHasSmallChunks), "too much for GPUs with 99 KB");
  const int room = dynamic_shared_memory_of(reinterpret_cast<const void*>(kernel), device) - kTile;
  const int stages = 2 * kRows <= room ? 2 : 1;
  const int queue = stages * kRows;
  const int bytes = std::max(queue + kTile, kLeast);
  // Chunks also cover the rows of zeros with which the transpose ends.
  const int64_t parts = kChunks ? blocks_for(cast_pitch(rows), S::kChunk) : rows;
  const int64_t blocks = std::min(parts, resident_blocks(kernel, kBlockThreads, device, bytes));
  const int64_t takers = std::max<int64_t>(1, kChunks ? blocks : blocks * S::kTeams);
  return {.step = kChunks ? takers * S::kChunk : takers,
          .each = static_cast<int>(parts / takers),
          .longer = static_cast<int>(parts % takers),
          .stages = stages,
          .shared = bytes,
          .blocks = static_cast<unsigned>(blocks),
          .all = rows,
          .tile = queue};
}

// One row per team, with `teams` teams per block.
inline Rows one_each(int64_t rows, int64_t teams) {
  const int64_t blocks = blocks_for(rows, teams);
  return {.step = blocks * teams,
          .each = 0,
          .longer = static_cast<int>(rows),
          .stages = 0,
          .shared = 0,
          .blocks = static_cast<unsigned>(blocks)};
}

// Keeps x in a register: nvcc would recompute it for each row.
__device__ __forceinline__ void keep(int64_t& x) { asm volatile("" : "+l"(x)); }
__device__ __forceinline__ void keep(uint32_t& x) { asm volatile("" : "+r"(x)); }

// Queue of a team's rows in shared memory. The rows of the kInputs tensors are stored side by side.
template <typename T, typename S, int kInputs, bool kChunks = false>
class RowQueue {
 public:
  static constexpr int kInputBytes = S::kColumns * static_cast<int>(sizeof(T));
  static constexpr int kRowBytes = kInputs * kInputBytes;

  // Starts the first copies. inputs: number of tensors in `data`; the others read as zeros.
  __device__ __forceinline__ RowQueue(const Rows& rows, const T* const (&data)[kInputs],
                                      const int64_t (&strides)[kInputs], int inputs, int columns,
                                      void* shared)
      : rows_(rows),
        row_(rows.first<S, kChunks>()),
        left_(rows.count<S, kChunks>()),
        inputs_(inputs),
        columns_(columns),
        pair_(rows.stages == 2) {
#pragma unroll
    for (int k = 0; k < kInputs; ++k) {
      const int64_t row = kChunks ? 0 : row_, step = kChunks ? 1 : rows.step;
      next_[k] = reinterpret_cast<const char*>(data[k] + row * strides[k] + S::column(0));
      step_[k] = step * strides[k] * static_cast<int>(sizeof(T));
      keep(step_[k]);
    }
    stage_ = shared_address(shared) + threadIdx.y * rows.stages * kRowBytes +
             S::column(0) * static_cast<int>(sizeof(T));
    both_ = 2 * stage_ + (pair_ ? kRowBytes : 0);
    keep(stage_);
    keep(both_);
    copy();
    if (pair_) {
      stage_ = both_ - stage_;
      copy();
      stage_ = both_ - stage_;
    }
    for (int i = 0; i < S::kGroups; ++i) {
      for (int k = 0; k < kInputs; ++k) {
        if (S::column(i) < columns && k < inputs) continue;
        clear(stage_ + place(k, i));
        clear(both_ - stage_ + place(k, i));
      }
    }
  }

  // Waits until the current row has arrived.
  __device__ __forceinline__ void wait() const {
    if (pair_) {
      cp_async_wait<1>();
    } else {
      cp_async_wait<0>();
    }
  }

  // Reads this thread's i-th group of the row from the k-th tensor; zeros past the row's end.
  __device__ __forceinline__ void get(int k, int i, float (&x)[kColumnsPerDraw]) const {
    Columns<T> packed;
    packed.load_shared(stage_ + place(k, i));
    packed.unpack(x);
  }

  // Releases the row that has been read, and starts the copy of another one in its place.
  __device__ __forceinline__ void pop() {
    copy();
    stage_ = both_ - stage_;
  }

 private:
  static __device__ __forceinline__ uint32_t place(int k, int i) {
    return k * kInputBytes + i * S::kStride * static_cast<int>(sizeof(T));
  }

  __device__ __forceinline__ void copy() {
    if (left_ > 0) {
      --left_;
#pragma unroll
      for (int k = 0; k < kInputs; ++k) {
        if (k >= inputs_ || (kChunks && row_ >= rows_.all)) continue;
        const char* const from = next_[k] + (kChunks ? row_ * step_[k] : 0);
#pragma unroll
        for (int i = 0; i < S::kGroups; ++i) {
          if (S::column(i) >= columns_) continue;
#pragma unroll
          for (int bytes = 0; bytes < kGroupBytes; bytes += kVecBytes) {
            cp_async(stage_ + place(k, i) + bytes, from + place(0, i) + bytes);
          }
        }
        if constexpr (!kChunks) next_[k] += step_[k];
      }
      if constexpr (kChunks) {
        row_ = rows_.next<S, kChunks>(row_, round_);
        round_ = (round_ + 1) % S::kRounds;
      }
    }
    cp_async_commit();
  }

  static __device__ __forceinline__ void clear(uint32_t address) {
#pragma unroll
    for (int bytes = 0; bytes < kGroupBytes; bytes += kVecBytes) {
      asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(address + bytes), "r"(0)
                   : "memory");
    }
  }

  static constexpr int kGroupBytes = kColumnsPerDraw * static_cast<int>(sizeof(T));
  const Rows& rows_;
  int64_t row_;                // the next row to copy, with kChunks
  int round_ = 0;              // its number in the team's chunk
  const char* next_[kInputs];  // this thread's columns of the next row; with kChunks, of row 0
  int64_t step_[kInputs];      // bytes to the row after it; with kChunks, of a row
  uint32_t stage_, both_;  // address of this thread's columns; the sum of both stages' addresses
  int left_;               // rows still to be copied
  int inputs_, columns_;
  bool pair_;
};

// A named barrier of the team's threads.
template <typename S>
__device__ __forceinline__ void sync_team() {
  asm volatile("bar.sync %0, %1;" ::"r"(threadIdx.y + 1), "n"(S::kThreads) : "memory");
}

// Sum over a row. room: shared memory of the team; consecutive sums need different rooms.
template <typename S>
__device__ __forceinline__ float team_sum(float x, float (&room)[S::kWarps]) {
  x = warp_reduce(x, Sum{});
  if constexpr (S::kWarps > 1) {
    if (threadIdx.x % kWarp == 0) room[threadIdx.x / kWarp] = x;
    sync_team<S>();
    x = room[0];
#pragma unroll
    for (int warp = 1; warp < S::kWarps; ++warp) x += room[warp];
  }
  return x;
}

// Two sums with the shuffles of one: half of a warp adds the first, the other half the second.
template <typename S>
__device__ __forceinline__ float2 team_sum(float2 x, float2 (&room)[S::kWarps]) {
  constexpr int kHalf = kWarp / 2;
  const bool second = threadIdx.x & kHalf;
  float sum = second ? x.y : x.x;
  sum += __shfl_xor_sync(kAllLanes, second ? x.x : x.y, kHalf);
#pragma unroll
  for (int offset = kHalf / 2; offset > 0; offset /= 2) {
    sum += __shfl_xor_sync(kAllLanes, sum, offset);
  }
  float* const half = &room[threadIdx.x / kWarp].x;
  if (threadIdx.x % kHalf == 0) half[second ? 1 : 0] = sum;
  sync_team<S>();
  x = room[0];
#pragma unroll
  for (int warp = 1; warp < S::kWarps; ++warp) {
    x.x += room[warp].x;
    x.y += room[warp].y;
  }
  return x;
}

// LayerNorm of a team's row. x: this thread's columns, zeros past the row's end; overwritten with
// the result. sum: of these elements. inverse: 1 / columns. Returns mean and 1 / standard
// deviation.
template <typename T, typename S>
__device__ __forceinline__ float2 normalize_row(float (&x)[S::kGroups][kColumnsPerDraw], float sum,
                                                const Columns<T> (&gamma)[S::kGroups],
                                                const Columns<T> (&beta)[S::kGroups], int columns,
                                                float inverse, float eps) {
  __shared__ float sum_rooms[S::kTeams][S::kWarps], square_rooms[S::kTeams][S::kWarps];
  const float mean = team_sum<S>(sum, sum_rooms[threadIdx.y]) * inverse;
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < S::kGroups; ++i) {
    const float centre = S::column(i) < columns ? mean : 0.0f;  // keeps zeros past the row's end
#pragma unroll
    for (int e = 0; e < kColumnsPerDraw; ++e) {
      x[i][e] -= centre;
      squares += x[i][e] * x[i][e];
    }
  }
  squares = team_sum<S>(squares, square_rooms[threadIdx.y]);
  const float rstd = rsqrtf(squares * inverse + eps);
#pragma unroll
  for (int i = 0; i < S::kGroups; ++i) {
    float weight[kColumnsPerDraw], shift[kColumnsPerDraw];
    gamma[i].unpack(weight);
    beta[i].unpack(shift);
#pragma unroll
    for (int e = 0; e < kColumnsPerDraw; ++e) x[i][e] = x[i][e] * rstd * weight[e] + shift[e];
  }
  return {mean, rstd};
}

}  // namespace lightseq
