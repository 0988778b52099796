// Common code of self- and cross-attention of a decode step: one query per hypothesis and head.
//
//   out[n] = softmax(scale * q[n] k^T) v
//
// decode_attention_rows_kernel: float32, one warp per query and head. A lane has eight channels, so
// a head of width 64 uses eight lanes, and a warp processes four keys at a time. Each group of
// lanes has its own online softmax (Milakov and Gimelshein 2018); they are merged at the end. A
// template parameter gives the addresses of keys and values. For 16-bit types see query_tile.cuh.
//
// If there are too few queries to fill the GPU, up to eight warps of a block split the keys of one
// query.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cfloat>
#include <climits>
#include <cstdint>

#include "common/attention.cuh"
#include "common/columns.cuh"
#include "common/device.h"
#include "common/launch.cuh"
#include "common/reduce.cuh"

namespace lightseq::decode_attention {

using attention::Base;
using torch::stable::Tensor;

constexpr int kWarps = 8;               // per block; all may split the keys of one query
constexpr int kBusyWarps = 32;          // per SM; with more, keys are not split
constexpr int kSize = kColumnsPerDraw;  // channels per lane

// ---- softmax ----

// Online softmax state of kQueries queries, with kColumns channels of their results. Exponentials
// are relative to `top`, the largest score so far.
template <typename T, int kQueries, int kColumns>
struct Softmax {
  float top[kQueries], sum[kQueries], o[kQueries][kColumns];

  __device__ __forceinline__ Softmax() {
#pragma unroll
    for (int i = 0; i < kQueries; ++i) {
      top[i] = -0.5f * FLT_MAX;  // finite, so that exp(-inf - top) is 0
      sum[i] = 0.0f;
#pragma unroll
      for (int c = 0; c < kColumns; ++c) o[i][c] = 0.0f;
    }
  }

  __device__ __forceinline__ void raise(int i, float score) {
    if (!(score > top[i])) return;
    const float factor = Base<T>::exp(top[i] - score);
    top[i] = score;
    sum[i] *= factor;
#pragma unroll
    for (int c = 0; c < kColumns; ++c) o[i][c] *= factor;
  }

  // other(n, x): the n-th number of another state of the query; x is that number of this state.
  template <typename Other>
  __device__ __forceinline__ void merge(int i, const Other& other) {
    const float other_top = other(0, top[i]);
    const float high = fmaxf(top[i], other_top);
    const float mine = Base<T>::exp(top[i] - high), theirs = Base<T>::exp(other_top - high);
    top[i] = high;
    sum[i] = fmaf(other(1, sum[i]), theirs, sum[i] * mine);
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      o[i][c] = fmaf(other(2 + c, o[i][c]), theirs, o[i][c] * mine);
    }
  }
};

// ---- division of work ----

// 2^shift adjacent warps of a block are a team. A team processes one item, a head of one or a few
// queries, and its warps split the keys.
struct Team {
  int shift;

  __device__ __forceinline__ int warps() const { return 1 << shift; }
  __device__ __forceinline__ int items() const { return blockDim.y >> shift; }  // per block
  __device__ __forceinline__ int item() const { return threadIdx.y >> shift; }
  __device__ __forceinline__ int rank() const { return threadIdx.y & (warps() - 1); }
};

template <typename Softmax>
size_t shared_bytes(Team team) {
  return team.shift == 0 ? 0 : sizeof(Softmax) * kWarps * kWarp;
}

// Merges the states of a team's first `busy` warps (those that have processed keys) into its first
// warp, lane by lane. All threads of the block must call it. A warp uses `room` numbers of shared
// memory.
template <typename T, int kQueries, int kColumns>
__device__ __forceinline__ void merge(Softmax<T, kQueries, kColumns>& state, Team team, int busy,
                                      int room = kQueries * (2 + kColumns) * kWarp) {
  if (team.shift == 0) return;
  extern __shared__ float shared[];
  constexpr int kNumbers = 2 + kColumns;
  const auto number = [room](int warp, int i, int n) -> float& {
    return shared[warp * room + (i * kNumbers + n) * kWarp + threadIdx.x];
  };
  if (team.rank() > 0 && team.rank() < busy) {
#pragma unroll
    for (int i = 0; i < kQueries; ++i) {
      number(threadIdx.y, i, 0) = state.top[i];
      number(threadIdx.y, i, 1) = state.sum[i];
#pragma unroll
      for (int c = 0; c < kColumns; ++c) number(threadIdx.y, i, 2 + c) = state.o[i][c];
    }
  }
  __syncthreads();
  if (team.rank() > 0) return;
  for (int rank = 1; rank < busy; ++rank) {
#pragma unroll
    for (int i = 0; i < kQueries; ++i) {
      state.merge(i, [&](int n, float) { return number(threadIdx.y + rank, i, n); });
    }
  }
}

// The keys of a query: `first` tells where they are stored.
struct Span {
  int first, count;
};

struct Shape {
  int rows, heads, width;
  float scale;      // factor of scores, for the base of Base<T>
  Team team{0};     // chosen by launch_rows() or launch_tiles()
  int beam;         // queries per slot
  int queries = 1;  // maximum per tile; chosen by launch_tiles()
};

constexpr int kStrideUnit = 16;  // bytes; each row starts at a multiple of this

// The address `count` strides after `from`; stride is in units of kStrideUnit. Both factors fit
// into 32 bits, so this is one instruction, and a position of the cache may have up to 32 GB.
template <typename T>
__device__ __forceinline__ const T* offset_by(const T* from, int count, int stride) {
  return reinterpret_cast<const T*>(reinterpret_cast<const char*>(from) +
                                    static_cast<int64_t>(count * kStrideUnit) * stride);
}

// ---- kernel ----

// Keys has
//   span(row), query(row)        the keys of a query, and the query
//   start(span)                  address of position 0 in row 0 of the cache
//   stride, row_stride           from a position to the next, from a row to the next
//   row_of(span, position)       the row that holds the position
//   to_value                     offset from a key to its value
// and, if a query has a new key of its own (kHasNewKey),
//   new_key(row)                 that key
//   append(span, ...)            stores the key and its value in the cache
//
// A block processes one head of adjacent queries; the heads of these are adjacent in the grid.
template <typename T, int kWidth, bool kHasNewKey, typename Keys>
__global__ void __launch_bounds__(kWarp* kWarps)
    decode_attention_rows_kernel(const Keys keys, const Shape shape, T* __restrict__ out) {
  constexpr int kLanes = kWidth / kSize, kGroups = kWarp / kLanes;
  constexpr int kUnroll = 8 / sizeof(T);  // 128 bytes of keys and values in flight per lane
  constexpr int kChunk = kGroups * kUnroll;
  const Team team = shape.team;
  const int head = blockIdx.x % shape.heads;
  const int row = blockIdx.x / shape.heads * team.items() + team.item();
  const int group = threadIdx.x / kLanes, column = threadIdx.x % kLanes * kSize;
  const int channel = head * shape.width + column;
  const bool works = row < shape.rows && column < shape.width;
  griddepcontrol_wait();

  const Span span = row < shape.rows ? keys.span(row) : Span{0, 0};
  float q[kSize] = {};
  if (works) {
    Columns<T> packed;
    packed.load(keys.query(row) + channel);
    packed.unpack(q);
#pragma unroll
    for (int e = 0; e < kSize; ++e) q[e] *= shape.scale;
  }
  griddepcontrol_launch_dependents();
  // The score of a key that is distributed over a group of lanes; all lanes must call it.
  const auto score_of = [&](const Columns<T>& key) {
    float k[kSize], sum = 0.0f;
    key.unpack(k);
#pragma unroll
    for (int e = 0; e < kSize; ++e) sum = fmaf(q[e], k[e], sum);
#pragma unroll
    for (int offset = kLanes / 2; offset > 0; offset /= 2) {
      sum += __shfl_xor_sync(kAllLanes, sum, offset);
    }
    return sum;
  };

  Softmax<T, 1, kSize> state;
  if constexpr (kHasNewKey) {
    const bool has = team.rank() == 0 && group == 0;
    Columns<T> key = {}, value = {};
    if (works && has) {
      key.load(keys.new_key(row) + channel);
      value.load(keys.new_key(row) + keys.channels + channel);
      keys.append(span, channel, key, value);
    }
    const float score = score_of(key);
    if (has) {
      state.top[0] = score;
      state.sum[0] = 1.0f;
      value.unpack(state.o[0]);
    }
  }

  // Positions that do not exist read the last one, with probability 0. Lanes past the head's width
  // read its last channels, with a query of 0.
  const T* const start = keys.start(span) + head * shape.width + min(column, shape.width - kSize);
  for (int first = team.rank() * kChunk; first < span.count; first += kChunk << team.shift) {
    const auto position = [&](int u) { return first + u * kGroups + group; };
    const auto existing = [&](int u) { return min(position(u), span.count - 1); };
    int rows[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) rows[u] = keys.row_of(span, existing(u));
    Columns<T> key[kUnroll], value[kUnroll];
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const T* const from =
          offset_by(offset_by(start, existing(u), keys.stride), rows[u], keys.row_stride);
      key[u].load(from);
      value[u].load(from + keys.to_value);
    }
    float score[kUnroll], top = -INFINITY;
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      score[u] = score_of(key[u]);
      if (position(u) >= span.count) score[u] = -INFINITY;
      top = fmaxf(top, score[u]);
    }
    state.raise(0, top);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      const float probability = Base<T>::exp(score[u] - state.top[0]);
      state.sum[0] += probability;
      float v[kSize];
      value[u].unpack(v);
#pragma unroll
      for (int e = 0; e < kSize; ++e) state.o[0][e] = fmaf(probability, v[e], state.o[0][e]);
    }
  }

  merge(state, team, min(team.warps(), (span.count + kChunk - 1) / kChunk));
  if (team.rank() > 0) return;
#pragma unroll
  for (int offset = kLanes; offset < kWarp; offset *= 2) {
    state.merge(0, [&](int, float x) { return __shfl_xor_sync(kAllLanes, x, offset); });
  }
  if (works && group == 0) {
    const bool has_keys = kHasNewKey || span.count > 0;
    const float factor = has_keys ? Base<T>::divide(1.0f, state.sum[0]) : 0.0f;
#pragma unroll
    for (int e = 0; e < kSize; ++e) state.o[0][e] *= factor;
    Columns<T> packed;
    packed.pack(state.o[0]);
    packed.store(out + static_cast<int64_t>(row) * shape.heads * shape.width + channel);
  }
}

// ---- launch ----

// The largest team, of at most `warps` warps, with which no SM has more than `busy_warps` warps.
inline Team team_for(int64_t items, int32_t device, int warps, int busy_warps) {
  const int64_t busy = resident_blocks(device, busy_warps);
  Team team{0};
  while (2 << team.shift <= warps && items << (team.shift + 1) <= busy) ++team.shift;
  return team;
}

// Width of a head.
inline int64_t width_of(const char* op, int64_t channels, int64_t heads) {
  require(heads > 0 && channels % heads == 0, op, ": ", channels, " channels cannot be cut into ",
          heads, " heads");
  return channels / heads;
}

// Offset from keys to values, which must have the same strides.
template <typename T>
int64_t to_values(const char* op, const Tensor& keys, const Tensor& values) {
  for (int64_t i = 0; i < keys.dim(); ++i) {
    require(keys.stride(i) == values.stride(i), op, ": keys and values must have equal strides");
  }
  return static_cast<const T*>(values.const_data_ptr()) -
         static_cast<const T*>(keys.const_data_ptr());
}

// Stride of a dimension, in units of kStrideUnit.
template <typename T>
int stride_between(const char* op, const Tensor& keys, int64_t dimension) {
  const int64_t stride = keys.stride(dimension) * static_cast<int64_t>(sizeof(T)) / kStrideUnit;
  require(stride <= INT_MAX && keys.size(dimension) <= INT_MAX / kStrideUnit, op,
          ": keys must have strides below 2^35 bytes, and dimensions below 2^27");
  return static_cast<int>(stride);
}

template <typename T>
Shape shape_of(const Tensor& out, int64_t heads, double scale, int64_t beam) {
  return {.rows = static_cast<int>(out.size(0)),
          .heads = static_cast<int>(heads),
          .width = static_cast<int>(out.size(1) / heads),
          .scale = static_cast<float>(scale * Base<T>::kLogE),
          .beam = static_cast<int>(beam)};
}

template <typename T, int kWidth, bool kHasNewKey, typename Keys>
void launch_rows(const char* op, const Keys& keys, Shape shape, const Tensor& out) {
  const int32_t device = out.get_device();
  shape.team = team_for(static_cast<int64_t>(shape.rows) * shape.heads, device, kWarps, kBusyWarps);
  const int64_t blocks = blocks_for(shape.rows, kWarps >> shape.team.shift) * shape.heads;
  launch({.op = op,
          .grid = static_cast<unsigned>(blocks),
          .block = dim3(kWarp, kWarps),
          .shared = shared_bytes<Softmax<T, 1, kSize>>(shape.team),
          .stream = current_stream(device),
          .dependent = true},
         decode_attention_rows_kernel<T, kWidth, kHasNewKey, Keys>, keys, shape,
         static_cast<T*>(out.mutable_data_ptr()));
}

}  // namespace lightseq::decode_attention
