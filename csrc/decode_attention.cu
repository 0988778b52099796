// Self-attention of the newest token of every hypothesis, for generation. Cross-attention is
// decode_attention_cross.cu; common/decode_attention.cuh and
// query_tile.cuh have what both share.
//
//   out[n] = softmax(scale * q[n] k^T) v        in each head, over positions 0 ... step
//
// Position p of hypothesis n lies in row ancestry[p, n] of the cache, so beam search moves indices
// instead of keys and values (as FasterTransformer does). The new token's key and value come
// straight from qkv and are written to the cache on the way. The `beam` hypotheses of a sentence
// are neighbours, and share most of their past.
//
//   bytes moved   every key and value once for eight hypotheses of a sentence that share it. The
//                 new rows are read and written once.
//   determinism   sums have a fixed order, which depends on the sizes and the step alone, and not
//                 on who shares what with whom
//
// decode_attention_self_kernel: 16-bit numbers, a warp for a head and up to eight hypotheses of a
// slot. It takes 16 positions at a time, and there one family after the other: hypotheses with the
// same ancestors at all 16. A family meets its keys on the tensor cores in one go, while the others
// stay as they are: so a hypothesis adds up the same numbers in the same order, alone or not. Where
// families part within the 16 positions, what they share comes from the first cache. Few slots have
// smaller tiles of hypotheses, down to one, and more warps, whose reads are all under way at once.
// float32 takes decode_attention_rows_kernel, where hypotheses meet in the first cache.
//
// `step` is read on the device and the grid does not depend on it: one captured graph serves all
// steps.

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cassert>
#include <climits>
#include <cstdint>

#include "common/decode_attention.cuh"
#include "common/query_tile.cuh"
#include "common/scalars.cuh"

namespace lightseq {
namespace {

using namespace decode_attention;

template <int kWidth>
constexpr int kBlocks = kWidth == 64 ? 2 : 1;  // that a multiprocessor has registers for

// The past of a hypothesis; `first` is its row.
template <typename T>
struct Past {
  const T* qkv;
  int64_t qkv_stride, channels;
  T* keys;
  int64_t to_value;
  int stride, row_stride, ancestry_stride;
  const int* ancestry;
  Indices step;
  int positions, rows;  // of the cache

  // Positions that lie in the cache: those before the newest.
  __device__ __forceinline__ int count() const {
    const int64_t last = step.at(0);
    assert(last >= 0 && last < positions && "step in [0, P)");
    return static_cast<int>(last);
  }
  __device__ __forceinline__ Span span(int row) const { return {row, count()}; }
  __device__ __forceinline__ const T* query(int row) const { return qkv + row * qkv_stride; }
  __device__ __forceinline__ const T* newest(int row) const { return query(row) + channels; }
  __device__ __forceinline__ const T* start(Span) const { return keys; }
  __device__ __forceinline__ int row_of(Span span, int position) const {
    return ancestry[position * ancestry_stride + span.first];
  }
  // Where row `row` of the cache keeps the key of a position.
  __device__ __forceinline__ T* key_of(int position, int row) const {
    return const_cast<T*>(forward(forward(keys, position, stride), row, row_stride));
  }
  __device__ __forceinline__ void remember(Span span, int channel, const Columns<T>& key,
                                           const Columns<T>& value) const {
    T* const to = key_of(span.count, span.first) + channel;
    key.store(to);
    value.store(to + to_value);
  }

  // A hint of the key and the value that a hypothesis has at a position.
  __device__ __forceinline__ void prefetch_key(int hypothesis, int position, int channel,
                                               int width) const {
    const int last = peek(static_cast<const int*>(step.data));  // of 64 bits the lower half
    if (position >= min(last, positions)) return;
    const int row = peek(ancestry + position * ancestry_stride + hypothesis);
    if (row < 0 || row >= rows) return;
    const T* const key = key_of(position, row) + channel;
    prefetch(key, width * sizeof(T));
    prefetch(key + to_value, width * sizeof(T));
  }
};

// ---- kernel ----

// The new tokens' own keys and values, which are the first that their queries meet.
template <typename T, int kWidth>
__device__ __forceinline__ void begin(QueryTile<T, kWidth>& tile, const Past<T>& past,
                                      const Item& item, int step, const Shape& shape) {
  const int channel = item.head * shape.width;
  float score = 0.0f;  // of query g
#pragma unroll
  for (int c = 0; c < kWidth / 32; ++c) {
    const int column = c * 32 + tile.t * kSize, row = item.first_row + tile.g;
    if (tile.g >= item.queries || column >= shape.width) continue;
    Columns<T> key;
    key.load(past.newest(row) + channel + column);
    key.store(past.key_of(step, row) + channel + column);
    float q[kSize], k[kSize];
    tile.q[c].unpack(q);
    key.unpack(k);
#pragma unroll
    for (int e = 0; e < kSize; ++e) score = fmaf(q[e], k[e], score);
  }
  score += __shfl_xor_sync(kAllLanes, score, 1);
  score += __shfl_xor_sync(kAllLanes, score, 2);
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const int query = 2 * tile.t + n, row = item.first_row + query;
    tile.state.top[n] = __shfl_sync(kAllLanes, score, query * 4) * shape.scale;
    tile.state.sum[n] = tile.g == 0 ? 1.0f : 0.0f;
#pragma unroll
    for (int c = 0; c < kWidth / 64; ++c) {
      const int column = c * 64 + tile.g * kSize;
      if (query >= item.queries || column >= shape.width) continue;
      Columns<T> value;
      value.load(past.newest(row) + past.channels + channel + column);
      value.store(past.key_of(step, row) + past.to_value + channel + column);
      float x[kSize];
      value.unpack(x);
#pragma unroll
      for (int e = 0; e < kSize; ++e) tile.state.o[n][c * kSize + e] = x[e];
    }
  }
}

template <typename T, int kWidth>
__global__ void __launch_bounds__(kWarp* kWarps, kBlocks<kWidth>)
    decode_attention_self_kernel(const Past<T> past, const Shape shape, T* __restrict__ out) {
  constexpr int kHeld = kQueryTile * kKeyTile / kWarp;  // ancestors that a lane holds
  const Team team = shape.team;
  const Item item(shape);
  const int channel = item.head * shape.width, first_position = team.rank() * kKeyTile;
  const int place = threadIdx.x % kKeyTile, half = threadIdx.x / kKeyTile;
  if (team.shift > 0 && item.queries > 0 && half == 0) {
    past.prefetch_key(item.first_row, first_position + place, channel, shape.width);
  }
  wait_for_previous_kernel();

  // A lane holds those of queries 4 * half ... + 3 at one position. What does not exist is a copy.
  const auto read_ancestors = [&](int first, int (&rows)[kHeld]) {
    const int position = min(first + place, past.positions - 1);
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int row = item.first_row + min(half * kHeld + i, item.queries - 1);
      rows[i] = past.ancestry[position * past.ancestry_stride + min(row, shape.rows - 1)];
    }
  };
  int next[kHeld];
  read_ancestors(first_position, next);
  QueryTile<T, kWidth> tile;
  tile.load(past.query(item.first_row) + channel, past.qkv_stride, item, shape);
  const int count = item.queries > 0 ? past.count() : 0;
  if (team.rank() == 0) begin(tile, past, item, count, shape);
  start_next_kernel();

  const int turn = kKeyTile << team.shift;
#pragma unroll 1
  for (int first = first_position; first < count; first += turn) {
    int rows[kHeld];
    const int last = count - 1 - first;  // from there on all places are copies of this one
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      rows[i] = __shfl_sync(kAllLanes, next[i], half * kKeyTile + min(place, last));
    }
    read_ancestors(first + turn, next);

#pragma unroll 1
    for (unsigned waiting = (1u << item.queries) - 1; waiting != 0;) {
      // The first one's family, and the row of its ancestor at this lane's place.
      const int leader = __ffs(waiting) - 1;
      const int even = leader & 2 ? rows[2] : rows[0], odd = leader & 2 ? rows[3] : rows[1];
      const int row =
          __shfl_sync(kAllLanes, leader & 1 ? odd : even, leader / kHeld * kKeyTile + place);
      unsigned others = 0;
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
        if (rows[i] != row) others |= 1u << (half * kHeld + i);
      }
      const unsigned family = waiting & ~__reduce_or_sync(kAllLanes, others);
      waiting ^= family;

      const auto key =
          reinterpret_cast<uintptr_t>(past.key_of(first + min(place, last), row) + channel);
      const auto at = [&](int i) {
        return reinterpret_cast<const T*>(__shfl_sync(kAllLanes, key, i));
      };
      const unsigned mine = family >> (2 * tile.t);
      tile.template attend<1>(at, past.to_value, last + 1, mine & 1, mine & 2, shape);
    }
  }

  merge(tile.state, team, min(team.warps(), (count + kKeyTile - 1) / kKeyTile));
  if (team.rank() == 0) tile.store(out, item, true, shape);
}

// ---- launcher ----

// Into how many tiles a slot is cut: the smaller they are the more reads are under way at once,
// and all warps shall run side by side.
int64_t tiles_for(int64_t items, int64_t beam, int32_t device) {
  const int64_t warps = resident_blocks(device, kWarps * kBlocks<64>);
  int64_t tiles = blocks_for(beam, kQueryTile);
  while (tiles < beam && 2 * tiles * items <= warps) tiles *= 2;
  return std::min(tiles, beam);
}

Tensor decode_self_attention(const Tensor& qkv, Tensor keys, Tensor values, const Tensor& ancestry,
                             const Tensor& step, int64_t heads, double scale, int64_t beam) {
  constexpr const char* kOp = "decode_self_attention";
  const int64_t rows = qkv.size(0), channels = keys.size(2), width = width_of(kOp, channels, heads);
  check_rows(kOp, "qkv", qkv);
  check_rows(kOp, "keys", keys);
  check_rows(kOp, "values", values);
  require(ancestry.is_contiguous() && ancestry.numel() <= INT_MAX, kOp,
          ": ancestry must be contiguous, with at most 2^31 numbers");
  const int32_t device = qkv.get_device();
  const torch::stable::accelerator::DeviceGuard guard(device);
  Tensor out = allocate(qkv, {rows, channels});
  attention::dispatch(kOp, "qkv", qkv.scalar_type(), width, [&](auto zero, auto tile_width) {
    using T = decltype(zero);
    constexpr int kWidth = decltype(tile_width)::value;
    if (rows == 0) return;
    const Past<T> past{static_cast<const T*>(qkv.const_data_ptr()),
                       qkv.stride(0),
                       channels,
                       static_cast<T*>(keys.mutable_data_ptr()),
                       to_values<T>(kOp, keys, values),
                       bytes_between<T>(kOp, keys, 0),
                       bytes_between<T>(kOp, keys, 1),
                       static_cast<int>(keys.size(1)),
                       ancestry.const_data_ptr<int>(),
                       Indices(step),
                       static_cast<int>(keys.size(0)),
                       static_cast<int>(keys.size(1))};
    if constexpr (sizeof(T) == sizeof(float)) {
      launch_rows<T, kWidth, true>(kOp, past, out, heads, width, scale);
    } else {
      const int64_t tiles = tiles_for(blocks_for(rows, beam) * heads, beam, device);
      launch_tiles<T, kWidth>(kOp, decode_attention_self_kernel<T, kWidth>, past, out, beam, tiles,
                              heads, width, scale);
    }
  });
  return out;
}

STABLE_TORCH_LIBRARY_IMPL(lightseq, CUDA, m) {
  m.impl("decode_self_attention", TORCH_BOX(&decode_self_attention));
}

}  // namespace
}  // namespace lightseq
