// Common code of attention's forward and backward: loading rows and dropout bits into shared
// memory, exponentials and masks, storing results. units.cuh divides the work.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cassert>
#include <climits>
#include <cstdint>
#include <utility>

#include "attention/units.cuh"
#include "common/attention.cuh"
#include "common/check.h"
#include "common/exp2.cuh"
#include "common/launch.cuh"
#include "common/philox.cuh"
#include "common/ptx/mma.cuh"

namespace lightseq::attention {

// A tile has at most 16 KiB, so that five tiles fit into every GPU's shared memory.
template <int kMost, typename T, int kWidth>
constexpr int kTileRows = std::min<int>(kMost, 16384 / (kWidth * sizeof(T)));

template <typename T, int kRows, int kWidth>
struct Tile {
  T numbers[kRows][kStride<T, kWidth>];

  __device__ __forceinline__ T* row(int i) { return numbers[i]; }
};

// Minimum of resident blocks per SM, for __launch_bounds__: 512 threads per SM, with 128 registers
// each, which 16-bit heads of width 64 need.
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

// A row's log-sum-exp as forward saves it, to base e. Of float32 inputs it is float64: a float32 of
// 4 to 8 has an error of up to 2^-22, which all probabilities of the row would share.
template <typename T>
using Lse = std::conditional_t<Base<T>::kIsTwo, float, double>;

template <typename T>
__device__ __forceinline__ Lse<T> lse_of(float shift, float total) {
  if constexpr (!Base<T>::kIsTwo) return shift + ::log(static_cast<double>(total));
  return (shift + __log2f(total)) * Base<T>::kLn;
}

// The log-sum-exp as backward uses it. In 16 bits: multiplied by log2(e). In float32: two floats,
// whose sum approximates the float64 value.
struct alignas(8) TwoFloats {
  float high, low;
};
__device__ __forceinline__ float prepared(float lse) { return lse * kLog2E; }
__device__ __forceinline__ TwoFloats prepared(double lse) {
  const float high = static_cast<float>(lse);
  return {high, isinf(high) ? 0.0f : static_cast<float>(lse - high)};
}
template <typename T>
using PreparedLse = decltype(prepared(Lse<T>()));

__device__ __forceinline__ float probability_of(float score, float scale, float lse) {
  return exp2_approximate(fmaf(score, scale, -lse));
}
__device__ __forceinline__ float probability_of(float score, float scale, const TwoFloats& lse) {
  return expf(fmaf(score, scale, -lse.high) - lse.low);
}

// Masks scores with -inf where a query does not see a key. The scores are those of the warp's 16
// queries, from number `query` of the sentence on, with the keys from number `key` on. Without a
// window all of these queries see the keys below clear_end.
template <int kBlocks>
__device__ __forceinline__ void hide(float (&s)[kBlocks][4], int query, int key, int length_k,
                                     const Band& band, int clear_end) {
#pragma unroll
  for (int n = 0; n < kBlocks; ++n) {
    if (key + n * 8 + 8 <= clear_end) continue;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int last = min(length_k - 1, query + lane_row() + i / 2 * 8 + band.after);
      if (key + n * 8 + lane_column() + i % 2 > last) s[n][i] = -INFINITY;
    }
  }
  if (band.before == Band::kAll || query + kWarpRows - 1 - key <= band.before) return;
#pragma unroll
  for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int first = query + lane_row() + i / 2 * 8 - band.before;
      if (key + n * 8 + lane_column() + i % 2 < first) s[n][i] = -INFINITY;
    }
  }
}

// Loads a tile from each tensor: `length` rows from row `first` on, for each of the unit's heads,
// one head below the other. All other rows become zero. The load is complete after
// cp_async_wait_all() and a barrier.
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
  // Hide from the compiler that the offsets below are the same for every tile of a sentence: it
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
      cp_async_zfill(tiles[t]->row(row) + column, rows.at(position, head), valid);
    }
  }
}

// Dropout bits of a tile of queries and a tile of keys: bit j of keep[row][i] is set if the query
// in that row keeps key 32 * i + j of its slot.
template <int kRows>
using Keep = uint32_t[kRows][kRows / 32];

// Draws dropout bits; call it while copies are in flight. The threads divide the work evenly: a
// word of 32 keys for each query and head of the unit.
template <int kRows>
__device__ __forceinline__ void draw(Keep<kRows>& keep, const Plan& plan, const Dropout& dropout,
                                     const Work& work, const Unit& unit, int start_q, int start_k) {
  if (dropout.threshold == 0) return;
  constexpr int kThreads = kRows / kWarpRows * kWarp;
  const AttentionDropout bits = plan.dropout;
  const int queries = min(unit.length_q - start_q, unit.slot());
  const int words = (min(unit.length_k - start_k, unit.slot()) + 31) / 32;
  // Rounded up, so that (i * per) >> 16 is the quotient of the small numbers below.
  const int per_word = static_cast<int>(__fdividef(65536.0f, words)) + 1;
  const int per_query = static_cast<int>(__fdividef(65536.0f, queries)) + 1;
#pragma unroll 1
  for (int i = threadIdx.x; i < queries * words * unit.heads; i += kThreads) {
    const int line = i * per_word >> 16, word = i - line * words;
    const int head = line * per_query >> 16, query = line - head * queries;
    const int key = start_k + word * 32;
    if (key > start_q + query + work.band.after) continue;
    const uint32_t row = static_cast<uint32_t>(unit.first_q + start_q + query) * work.heads;
    keep[(head << unit.shift) + query][word] =
        bits.keep_word(row + unit.head + head, static_cast<uint32_t>(key) / 32);
  }
}

// Softmax computes exp(score - shift). `shift` is set to the running maximum only when the maximum
// exceeds it by more than kTolerance. So rescaling is rare, and values up to exp(8) do not
// overflow.
constexpr float kTolerance = 8.0f;

// The shift of a query that has seen no key yet, less than all scores: a window may begin behind
// the first keys of a warp's queries. It is finite, so that its exponentials are zero.
constexpr float kLeastShift = -0x1p118f;

// The sum of the four lanes that have the columns of a row.
__device__ __forceinline__ float sum_of_row(float x) {
  x += __shfl_xor_sync(kAllLanes, x, 1);
  return x + __shfl_xor_sync(kAllLanes, x, 2);
}
__device__ __forceinline__ float largest_of_row(float x) {
  x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, 1));
  return fmaxf(x, __shfl_xor_sync(kAllLanes, x, 2));
}

// Of rows r and r + 8 (r = lane_row()) of a warp's 16 rows of scores.
template <int kBlocks>
__device__ __forceinline__ void find_largest(float (&largest)[2], const float (&s)[kBlocks][4]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float x = -INFINITY;
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) x = fmaxf(x, fmaxf(s[n][half * 2], s[n][half * 2 + 1]));
    largest[half] = largest_of_row(x);
  }
}

// Raises the shift of the warp's rows to the largest scores; sums and results shrink.
template <typename T, int kBlocks>
__device__ __forceinline__ void raise_shift(float (&shift)[2], float (&sum)[2],
                                            float (&o)[kBlocks][4], const float (&largest)[2],
                                            float scale) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float next = fmaxf(shift[half], largest[half]);
    const float shrink = Base<T>::exp((shift[half] - next) * scale);
    shift[half] = next;
    sum[half] *= shrink;
#pragma unroll
    for (int n = 0; n < kBlocks; ++n) {
      o[n][half * 2] *= shrink;
      o[n][half * 2 + 1] *= shrink;
    }
  }
}

// Writes lse of rows r and r + 8 (r = lane_row()), and returns the factors of their results. sum:
// of this lane's exponentials. lse: of row r; rows: how many exist from row r on. The results of
// rows without keys are zero.
template <typename T>
__device__ __forceinline__ float2 end_softmax(const float (&shift)[2], const float (&sum)[2],
                                              float scale, float keep_scale, bool has_keys,
                                              Lse<T>* lse, int heads, int rows) {
  float factor[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float total = sum_of_row(sum[half]);
    factor[half] = has_keys ? Base<T>::divide(keep_scale, total) : 0.0f;
    if (lane_column() == 0 && rows > half * 8) {
      lse[half * 8 * heads] = has_keys ? lse_of<T>(shift[half] * scale, total) : 0;
    }
  }
  return {factor[0], factor[1]};
}

// The factor of dQ and dK of a sentence. A single key has probability 1 whatever its score is, so
// the gradient of the score is zero: dS is the difference of two equal terms, and the computed dS
// has only their rounding errors.
__device__ __forceinline__ float grad_scale_of(float grad_scale, int length_k) {
  return length_k == 1 ? 0.0f : grad_scale;
}

// Rows of a packed tensor, of one head.
struct HeadRows {
  int head, first, length;
};

// The queries (or keys) from a place to the end of the sentence.
__device__ __forceinline__ HeadRows queries_of(const Unit& unit, const Place& place) {
  return {.head = place.head,
          .first = unit.first_q + place.position,
          .length = unit.length_q - place.position};
}
__device__ __forceinline__ HeadRows keys_of(const Unit& unit, const Place& place) {
  return {.head = place.head,
          .first = unit.first_k + place.position,
          .length = unit.length_k - place.position};
}

// Writes a warp's 16 rows of results, multiplied by `low` (rows g) and `high` (rows g + 8), to x;
// only as many rows as `to` has. They pass through `stage`, 16 rows of shared memory that only this
// warp uses, so that global stores have 16 bytes.
template <typename T, int kWidth>
__device__ __forceinline__ void store_rows(const Packed<T>& x, const HeadRows& to, T* stage,
                                           const float (&c)[kWidth / 8][4], float low, float high,
                                           int width) {
  constexpr int kRow = kStride<T, kWidth>;
  __syncwarp();
#pragma unroll
  for (int n = 0; n < kWidth / 8; n += 2) {
    const float left[4] = {c[n][0] * low, c[n][1] * low, c[n][2] * high, c[n][3] * high};
    const float right[4] = {c[n + 1][0] * low, c[n + 1][1] * low, c[n + 1][2] * high,
                            c[n + 1][3] * high};
    store_fragments<T, kRow>(stage + n * 8, left, right);
  }
  __syncwarp();
  constexpr int kPerRow = kWidth / Vec<T>::kSize, kRowsAtOnce = kWarp / kPerRow;
  const int lane = threadIdx.x % kWarp, column = lane % kPerRow * Vec<T>::kSize;
  if (column >= width) return;
  const Packed<T> rows{x.at(to.first, to.head) + column, x.token_bytes, 0};
#pragma unroll
  for (int i = 0; i < kWarpRows; i += kRowsAtOnce) {
    const int row = i + lane / kPerRow;
    if (row >= to.length) continue;
    store(rows.at(row, 0), load(stage + row * kRow + column));
  }
}

// Sets rows first ... rows - 1 to zero; called by the last kZeroBlocks blocks of the grid.
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
          " must have fewer than 2^31 rows, and strides below 2^31 bytes");
  return {static_cast<T*>(x.data_ptr()), static_cast<int>(x.stride(0) * sizeof(T)),
          static_cast<int>(x.stride(1) * sizeof(T))};
}

inline Dropout dropout_of(const Call& a) {
  require(a.rng.is_contiguous(), a.op, ": rng must be contiguous");
  return {a.rng.const_data_ptr<int64_t>(), static_cast<uint32_t>(a.site),
          Dropout::threshold_of(a.dropout_p)};
}

// The parameters of both passes over units.
template <typename T>
struct UnitParams {
  Work work;
  Packed<const T> q, k, v;
  float scale, keep_scale;  // keep_scale: 1 / (1 - p)
  Dropout dropout;

  explicit UnitParams(const Call& a)
      : work(work_of(a)),
        q(packed<const T>(a.op, "q", a.q)),
        k(packed<const T>(a.op, "k", a.k)),
        v(packed<const T>(a.op, "v", a.v)),
        scale(static_cast<float>(a.scale)),
        keep_scale(a.keep_scale()),
        dropout(dropout_of(a)) {}
};

template <typename Params>
void launch_units(const Call& a, void (*kernel)(Params), const Params& params, unsigned threads,
                  size_t shared) {
  launch({.op = a.op,
          .grid = static_cast<unsigned>(params.work.blocks) + kZeroBlocks,
          .block = threads,
          .shared = shared,
          .stream = current_stream(a.q.get_device())},
         kernel, params);
}

template <typename Function>
void dispatch(const Call& a, Function&& function) {
  dispatch(a.op, "q", a.q.scalar_type(), a.q.size(2), std::forward<Function>(function));
}

}  // namespace lightseq::attention
