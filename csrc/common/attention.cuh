// What attention's forward and backward share: how the work is cut up, how rows and dropout's bits
// reach shared memory, and how results leave it.
//
// A block works on tiles of kRows rows in shared memory, 16 rows a warp. A sentence whose two sides
// fit into a tile is short: it is on chip whole, and a tile holds as many of its heads as fit, each
// in a slot of 2^shift rows, 16 to 128. A long sentence is cut into tiles, each of which walks the
// tiles of the other side. A tile's worth of either is a unit of work.
//
// Who does which unit follows from cu_q and cu_k alone. Lay all sentences end to end, queries and
// keys counted together, and cut that line into windows of 2^n rows, each of which has a block. A
// sentence's units are dealt out to the windows it touches. So every block gets about as much to
// do, one launch serves all lengths, and the host needs to know none of them. One warp makes the
// list of what its block has to do: when every warp looked for itself, backward spent a third of
// its time on that.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cassert>
#include <climits>
#include <cstdint>
#include <string>
#include <utility>

#include "common/check.h"
#include "common/exp2.cuh"
#include "common/mma.cuh"
#include "common/philox.cuh"

namespace lightseq::attention {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int kWarpRows = 16;
constexpr int kSmallestShift = 4;        // of a slot: 16 rows
constexpr int kZeroBlocks = 16;          // zero the rows past the last sentence
constexpr int64_t kEnoughBlocks = 4096;  // windows grow as long as there are so many blocks

// 16 KiB of numbers at most: five tiles then fit into every GPU's shared memory.
template <int kMost, typename T, int kWidth>
constexpr int kTileRows = std::min<int>(kMost, 16384 / (kWidth * sizeof(T)));

template <typename T, int kRows, int kWidth>
struct Tile {
  T numbers[kRows][kStride<T, kWidth>];

  __device__ __forceinline__ T* row(int i) { return numbers[i]; }
};

// For __launch_bounds__: as many threads a multiprocessor as may have 128 registers each, which is
// what 16-bit heads of 64 need.
template <typename T, int kWidth, int kThreads>
constexpr int kMinBlocks = kWidth == 64 && sizeof(T) == 2 ? 512 / kThreads : 1;

// [T, H, D] in memory.
template <typename T>
struct Packed {
  T* data;
  int token_bytes;
  int head_bytes;

  __device__ __forceinline__ T* at(int row, int head) const {
    using Byte = std::conditional_t<std::is_const_v<T>, const char, char>;
    return reinterpret_cast<T*>(reinterpret_cast<Byte*>(data) +
                                static_cast<int64_t>(row) * token_bytes +
                                static_cast<int64_t>(head) * head_bytes);
  }
};

struct Work {
  const int* cu_q;
  const int* cu_k;
  int rows_q, rows_k;
  int sentences;
  int heads;
  int width;
  bool causal;
  float sentences_per_row;  // rows of queries and keys
  int window_shift;         // a window is 2^window_shift rows
  int64_t blocks;

  // The sentence's place on the line of all queries and keys.
  __device__ __forceinline__ uint32_t place(int sentence) const {
    return static_cast<uint32_t>(cu_q[sentence]) + static_cast<uint32_t>(cu_k[sentence]);
  }
};

enum Part : int { kQueries = 1, kKeys = 2 };  // the side whose tile a unit is, or both

struct alignas(16) Unit {
  int first_q, length_q, first_k, length_k;  // the sentence
  int head, heads;                           // the first head in the tile, and how many there are
  int shift;                                 // a head has 2^shift rows of the tile
  int start;                                 // of the tile, in the sentence
  int parts;

  __device__ __forceinline__ int slot() const { return 1 << shift; }
};

// The 16 rows of a tile that a warp works on.
struct Place {
  int row;       // the first, in the tile
  int slot;      // first row of their slot
  int position;  // of the first, in the sentence
  int head;
  bool exists;

  __device__ __forceinline__ explicit Place(const Unit& unit) {
    row = threadIdx.x / kWarp * kWarpRows;
    const int index = row >> unit.shift;
    slot = index << unit.shift;
    position = unit.start + row - slot;
    head = unit.head + index;
    exists = index < unit.heads;
  }
};

// Exponentials and logarithms: to base 2 for 16-bit numbers, where that is one instruction and the
// factor log2(e) becomes part of `scale`; to base e for float32, where its rounding would count.
template <typename T>
struct Base {
  static constexpr bool kIsTwo = sizeof(T) == 2;
  static constexpr float kLogE = kIsTwo ? kLog2E : 1.0f;
  static constexpr float kLn = kIsTwo ? 0.6931471805599453f : 1.0f;

  static __device__ __forceinline__ float exp(float x) {
    if constexpr (!kIsTwo) return expf(x);
    return exp2_approximate(x);
  }
  static __device__ __forceinline__ float divide(float x, float y) {
    return kIsTwo ? __fdividef(x, y) : x / y;
  }
  static __device__ __forceinline__ float log(float x) { return kIsTwo ? __log2f(x) : logf(x); }
};

// Scores become -inf where a query does not see the key. They are those of the sentence's query
// number `query` and the warp's 15 after it with key number `key` and the following ones. All of
// those queries see the keys below clear_end.
template <int kBlocks>
__device__ __forceinline__ void hide(float (&s)[kBlocks][4], int query, int key, int length_k,
                                     bool causal, int clear_end) {
#pragma unroll
  for (int n = 0; n < kBlocks; ++n) {
    if (key + n * 8 + 8 <= clear_end) continue;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int last = causal ? min(length_k - 1, query + lane_row() + i / 2 * 8) : length_k - 1;
      if (key + n * 8 + lane_column() + i % 2 > last) s[n][i] = -INFINITY;
    }
  }
}

// The last sentence that starts at `place` or before; a warp searches, first among the 64 sentences
// around where it lies if all are equally long, else 32-ary.
__device__ __forceinline__ int find_sentence(const Work& work, uint32_t place) {
  const int lane = threadIdx.x % kWarp;
  const int guess = static_cast<int>(place * work.sentences_per_row);
  int first = max(min(guess - kWarp, work.sentences - 2 * kWarp), 0);
  const int near[2] = {first + lane, first + lane + kWarp};
  const bool before[2] = {near[0] < work.sentences && work.place(near[0]) <= place,
                          near[1] < work.sentences && work.place(near[1]) <= place};
  const int below =
      __popc(__ballot_sync(kAllLanes, before[0])) + __popc(__ballot_sync(kAllLanes, before[1]));
  const int last = min(2 * kWarp, work.sentences - first);
  if ((below > 0 || first == 0) && (below < last || first + last == work.sentences)) {
    return first + max(below - 1, 0);
  }
  first = 0;
  int count = work.sentences;
  while (count > 1) {
    const int step = (count + kWarp - 1) / kWarp;
    const int sentence = first + lane * step;
    const bool is_before = lane * step < count && work.place(sentence) <= place;
    const int skip = max(__popc(__ballot_sync(kAllLanes, is_before)) - 1, 0) * step;
    first += skip;
    count = min(step, count - skip);
  }
  return first;
}

// What a block has to do next, in shared memory, and dropout's numbers.
struct Plan {
  Unit units[kWarp];
  int count;
  uint2 seed;
  uint32_t micro_batch;
};

// Whether a tensor of so many rows has a sentence from `first` to `end`.
__device__ __forceinline__ bool has_sentence(int rows, int first, int end) {
  return 0 <= first && first <= end && end <= rows;
}

// Lists the next units of this block's window in plan.units; by one warp. Sentence number
// `sentence` is the next to look at, and of that one `done` units have been listed already.
template <int kRows>
__device__ __forceinline__ void list_units(Plan& plan, const Work& work, int parts, int& sentence,
                                           int& done) {
  const int rows_shift = 31 - __clz(kRows);
  const int lane = threadIdx.x;
  const uint32_t window = blockIdx.x;
  int count = 0;
  for (; sentence < work.sentences; ++sentence, done = 0) {
    Unit unit;
    unit.first_q = work.cu_q[sentence];
    unit.first_k = work.cu_k[sentence];
    const int end_q = work.cu_q[sentence + 1], end_k = work.cu_k[sentence + 1];
    assert(has_sentence(work.rows_q, unit.first_q, end_q) && "cu_q ascends within [0, Tq]");
    assert(has_sentence(work.rows_k, unit.first_k, end_k) && "cu_k ascends within [0, Tk]");
    unit.length_q = end_q - unit.first_q;
    unit.length_k = end_k - unit.first_k;
    const uint32_t begin = unit.first_q + static_cast<uint32_t>(unit.first_k);
    const uint32_t end = begin + unit.length_q + unit.length_k;
    const int first_window = begin >> work.window_shift;
    if (first_window > static_cast<int>(window)) break;
    if (begin == end || end <= window << work.window_shift) continue;
    const int windows = ((end - 1) >> work.window_shift) - first_window + 1;

    const int longest = max(unit.length_q, unit.length_k);
    const bool is_short = longest <= kRows;
    unit.shift = is_short ? max(32 - __clz(longest - 1), kSmallestShift) : rows_shift;
    const int together_shift = rows_shift - unit.shift, together = 1 << together_shift;
    const int tiles_q = (unit.length_q + kRows - 1) / kRows;
    const int tiles_k = parts & kKeys ? (unit.length_k + kRows - 1) / kRows : 0;
    const int units =
        is_short ? (work.heads + together - 1) >> together_shift : work.heads * (tiles_q + tiles_k);
    const int u = window - first_window + (done + lane) * windows;
    if (is_short) {
      unit.head = u << together_shift;
      unit.start = 0;
      unit.parts = parts;
    } else {
      const int tile = u / work.heads;
      unit.head = u - tile * work.heads;
      unit.start = (tile < tiles_q ? tile : tile - tiles_q) * kRows;
      unit.parts = tile < tiles_q ? kQueries : kKeys;
    }
    unit.heads = min(together, work.heads - unit.head);
    const int fit = kWarp - count;
    if (u < units && lane < fit) plan.units[count + lane] = unit;
    const int left = __popc(__ballot_sync(kAllLanes, u < units));
    count += min(left, fit);
    if (left >= fit) {
      done += fit;
      break;
    }
  }
  if (lane == 0) plan.count = count;
}

// Calls run(unit) for everything this block has to do. All threads take part.
template <int kRows, typename Run>
__device__ __forceinline__ void for_each_unit(Plan& plan, const Work& work, const Dropout& dropout,
                                              int parts, Run&& run) {
  int sentence = 0, done = 0;
  if (threadIdx.x < kWarp) {
    sentence = find_sentence(work, blockIdx.x << work.window_shift);
  } else if (threadIdx.x == kWarp && dropout.threshold > 0) {
    const uint64_t seed = dropout.rng[0];
    plan.seed = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
    plan.micro_batch = static_cast<uint32_t>(dropout.rng[1]);
  }
  int count;
  do {
    if (threadIdx.x < kWarp) list_units<kRows>(plan, work, parts, sentence, done);
    __syncthreads();
    count = plan.count;
    for (int i = 0; i < count; ++i) {
      run(plan.units[i]);
      __syncthreads();  // shared memory has been read
    }
  } while (count == kWarp);
}

// Fills a tile from each tensor with its rows first, first + 1, ... of the sentence, `length` of
// them, the unit's heads below each other; the rest becomes zero. Complete after wait_for_copies
// and a barrier.
template <typename T, int kRows, int kWidth, int kTensors>
__device__ __forceinline__ void load_tiles(Tile<T, kRows, kWidth>* const (&tiles)[kTensors],
                                           const Packed<const T> (&tensors)[kTensors],
                                           const Unit& unit, int first, int length, int width) {
  constexpr int kPerRow = kWidth / Vec<T>::kSize;
  constexpr int kRowsAtOnce = kRows / kWarpRows * kWarp / kPerRow;
  const int column = threadIdx.x % kPerRow * Vec<T>::kSize;
  if (column >= width) length = 0;
  const T* from[kTensors];
#pragma unroll
  for (int t = 0; t < kTensors; ++t) from[t] = tensors[t].at(first, unit.head) + column;
  // The compiler must not see that the offsets below are the same for every tile of a sentence: it
  // would keep all of them in registers.
  int row = threadIdx.x / kPerRow;
  asm volatile("" : "+r"(row));
#pragma unroll
  for (int i = 0; i < kRows; i += kRowsAtOnce, row += kRowsAtOnce) {
    const int position = row & (unit.slot() - 1), head = row >> unit.shift;
    const bool valid = position < length && head < unit.heads;
#pragma unroll
    for (int t = 0; t < kTensors; ++t) {
      const Packed<const T> rows{from[t], tensors[t].token_bytes, tensors[t].head_bytes};
      copy_async(tiles[t]->row(row) + column, rows.at(position, head), valid);
    }
  }
}

// Dropout's bits of a tile of queries and a tile of keys: bit j of keep[row][i] says whether the
// query in that row keeps its slot's key 32 * i + j.
template <int kRows>
using Keep = uint32_t[kRows][kRows / 32];

// keep_bits of philox.cuh with fewer instructions: two 16-bit comparisons at a time.
__device__ __forceinline__ uint32_t keep_byte(uint4 counter, uint2 key, uint32_t threshold) {
  constexpr uint32_t kHigh = 0x80008000u;
  const uint4 random = philox4x32(counter, key);
  const uint32_t words[4] = {random.x, random.y, random.z, random.w};
  const uint32_t least = threshold * 0x10001u;
  uint32_t signs[4];  // bits 15 and 31: that half of the word is >= threshold
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t difference = (words[i] | kHigh) - (least & ~kHigh);
    signs[i] = (words[i] & ~least) | (~(words[i] ^ least) & difference);
  }
  uint32_t low, high;  // a byte of equal bits for each number
  asm("prmt.b32 %0, %1, %2, 0xfdb9;" : "=r"(low) : "r"(signs[0]), "r"(signs[1]));
  asm("prmt.b32 %0, %1, %2, 0xfdb9;" : "=r"(high) : "r"(signs[2]), "r"(signs[3]));
  return ((low & 0x08040201u) | (high & 0x80402010u)) * 0x01010101u >> 24;
}

// Meant to run while copies are under way. The threads share out what there is to draw, `groups`
// bytes for each of the unit's queries, without gaps.
template <int kUnroll, int kRows>
__device__ __forceinline__ void draw(Keep<kRows>& keep, const Plan& plan, const Dropout& dropout,
                                     const Work& work, const Unit& unit, int start_q, int start_k) {
  if (dropout.threshold == 0) return;
  constexpr int kThreads = kRows / kWarpRows * kWarp;
  const int queries = min(unit.length_q - start_q, unit.slot());
  const int groups = (min(unit.length_k - start_k, unit.slot()) + 7) / kColumnsPerDraw;
  // Rounded up, so that (i * per) >> 16 is the quotient of the small numbers below.
  const int per_group = static_cast<int>(__fdividef(65536.0f, groups)) + 1;
  const int per_query = static_cast<int>(__fdividef(65536.0f, queries)) + 1;
#pragma unroll kUnroll
  for (int i = threadIdx.x; i < queries * groups * unit.heads; i += kThreads) {
    const int line = i * per_group >> 16, group = i - line * groups;
    const int head = line * per_query >> 16, query = line - head * queries;
    const int key = start_k + group * kColumnsPerDraw;
    if (work.causal && key > start_q + query) continue;
    const uint32_t row = static_cast<uint32_t>(unit.first_q + start_q + query) * work.heads;
    const uint4 counter = {static_cast<uint32_t>(key / kColumnsPerDraw), row + unit.head + head,
                           dropout.site, plan.micro_batch};
    reinterpret_cast<uint8_t*>(keep[(head << unit.shift) + query])[group] =
        keep_byte(counter, plan.seed, dropout.threshold);
  }
}

// Writes a warp's 16 rows of results, times `low` (rows g) and `high` (rows g + 8), to the rows of
// x from `first` on, `length` of them at most. They pass through `stage`, 16 rows of shared memory
// that no other warp reads, to leave 16 bytes at a time.
template <typename T, int kWidth>
__device__ __forceinline__ void store_rows(const Packed<T>& x, T* stage,
                                           const float (&c)[kWidth / 8][4], float low, float high,
                                           int head, int first, int length, int width) {
  constexpr int kRow = kStride<T, kWidth>;
  __syncwarp();
#pragma unroll
  for (int n = 0; n < kWidth / 8; n += 2) {
    const float left[4] = {c[n][0] * low, c[n][1] * low, c[n][2] * high, c[n][3] * high};
    const float right[4] = {c[n + 1][0] * low, c[n + 1][1] * low, c[n + 1][2] * high,
                            c[n + 1][3] * high};
    store_blocks<T, kRow>(stage + n * 8, left, right);
  }
  __syncwarp();
  constexpr int kPerRow = kWidth / Vec<T>::kSize, kRowsAtOnce = kWarp / kPerRow;
  const int lane = threadIdx.x % kWarp, column = lane % kPerRow * Vec<T>::kSize;
  if (column >= width) return;
  const Packed<T> rows{x.at(first, head) + column, x.token_bytes, 0};
#pragma unroll
  for (int i = 0; i < kWarpRows; i += kRowsAtOnce) {
    const int row = i + lane / kPerRow;
    if (row < length) store(rows.at(row, 0), load(stage + row * kRow + column));
  }
}

// Rows first ... rows - 1 become zero; called by the last kZeroBlocks blocks of the grid.
template <typename T>
__device__ void zero_rows(const Packed<T>& x, int first, int rows, const Work& work) {
  assert(has_sentence(rows, first, first) && "cu_q and cu_k end within [0, Tq] and [0, Tk]");
  const int per_head = work.width / Vec<T>::kSize, per_row = work.heads * per_head;
  for (int row = first + blockIdx.x - work.blocks; row < rows; row += kZeroBlocks) {
    for (int i = threadIdx.x; i < per_row; i += blockDim.x) {
      store(x.at(row, i / per_head) + i % per_head * Vec<T>::kSize, Vec<T>{});
    }
  }
}

template <typename T>
Packed<T> packed(const char* op, const char* name, const Tensor& x) {
  check_rows(op, name, x);
  constexpr int64_t kMost = INT_MAX / sizeof(T);
  require(x.size(0) <= INT_MAX && x.stride(0) <= kMost && x.stride(1) <= kMost, op, ": ", name,
          " has too many rows, or rows too far apart");
  return {static_cast<T*>(x.data_ptr()), static_cast<int>(x.stride(0) * sizeof(T)),
          static_cast<int>(x.stride(1) * sizeof(T))};
}

inline Work work_of(const char* op, const Tensor& q, const Tensor& k, const Tensor& cu_q,
                    const Tensor& cu_k, bool causal) {
  require(cu_q.is_contiguous() && cu_k.is_contiguous(), op, ": cu_q and cu_k must be contiguous");
  // Small windows even out the load, large ones save searches.
  const int64_t rows = q.size(0) + k.size(0), sentences = cu_q.size(0) - 1;
  int shift = 3;
  while (shift < 7 && (rows >> (shift + 1)) >= kEnoughBlocks) ++shift;
  return {cu_q.const_data_ptr<int>(),
          cu_k.const_data_ptr<int>(),
          static_cast<int>(q.size(0)),
          static_cast<int>(k.size(0)),
          static_cast<int>(sentences),
          static_cast<int>(q.size(1)),
          static_cast<int>(q.size(2)),
          causal,
          static_cast<float>(sentences) / static_cast<float>(rows),
          shift,
          (rows + (1 << shift) - 1) >> shift};
}

inline Dropout dropout_of(const char* op, const Tensor& rng, int64_t site, double p) {
  require(rng.is_contiguous(), op, ": rng must be contiguous");
  return {rng.const_data_ptr<int64_t>(), static_cast<uint32_t>(site), Dropout::threshold_of(p)};
}

// Calls function(zero of the element type, width of a tile's rows). `name`: of the tensor.
template <typename Function>
void dispatch(const char* op, const char* name, ScalarType type, int64_t width,
              Function&& function) {
  require(width % 8 == 0 && width >= 8 && width <= 128, op, ": heads of ", width,
          " numbers; on a GPU the head width must be a multiple of 8 up to 128");
  const std::string what = std::string(op) + ": " + name;
  dispatch_float(type, what.c_str(), [&](auto zero) {
    if (width <= 64) {
      function(zero, std::integral_constant<int, 64>{});
    } else {
      function(zero, std::integral_constant<int, 128>{});
    }
  });
}

template <typename Function>
void dispatch(const char* op, const Tensor& q, Function&& function) {
  dispatch(op, "q", q.scalar_type(), q.size(2), std::forward<Function>(function));
}

template <typename Kernel, typename Params>
void launch(const char* op, Kernel kernel, const Params& params, int threads, size_t shared,
            int32_t device) {
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                       static_cast<int>(shared));
  const unsigned blocks = static_cast<unsigned>(params.work.blocks) + kZeroBlocks;
  kernel<<<blocks, threads, shared, current_stream(device)>>>(params);
  check_launch(op);
}

}  // namespace lightseq::attention
