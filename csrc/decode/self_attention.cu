// Self-attention of the new token of every hypothesis, for generation. Cross-attention is in
// cross_attention.cu; attention.cuh and query_tile.cuh have the code that both
// share.
//
//   out[n] = softmax(scale * q[n] k^T) v        in each head, over positions 0 ... steps[n]
//
// Position p of hypothesis n is stored in row ancestry[p, n] of the cache. So beam search moves
// indices instead of keys and values (as FasterTransformer does). The key and value of the new
// token are read from qkv, used at once, and also written to the cache. The `beam` hypotheses of a
// sentence are in adjacent rows, its slot, and share most of their past.
//
//   bytes moved   A key or value that up to eight hypotheses of a sentence share is read once, if
//                 these hypotheses have at most 32 different rows at 16 positions. The new rows
//                 are read and written once.
//   determinism   sums have a fixed order, which depends only on the sizes and the step, and not on
//                 which hypotheses share keys
//
// decode_attention_self_kernel: for 16-bit types. A warp processes one head and a tile: up to eight
// hypotheses of a slot, 16 positions at a time. Hypotheses with the same ancestors at all 16
// positions are a family. The tensor cores multiply the keys of a family by its queries in one
// product; the sums of other hypotheses are not changed. So a hypothesis adds the same numbers in
// the same order, whether or not others are in its family.
//
// Keys and values are copied through a ring buffer in shared memory (query_tile.cuh). If
// families differ only at some of the 16 positions, they share the rows of the other positions.
// While a warp computes, the next rows are in flight. If there are few slots, the tiles have fewer
// hypotheses, down to one, so that more warps have loads in flight.
//
// decode_attention_rows_kernel: for float32. Hypotheses share keys through the L1 cache.
//
// `steps` is read on the device and the grid does not depend on it, so one captured graph serves
// all steps. The hypotheses of a slot are at the same step, those of other slots may be at others.

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cassert>
#include <climits>
#include <cstdint>

#include "common/prefetch.cuh"
#include "decode/attention.cuh"
#include "decode/query_tile.cuh"

namespace lightseq {
namespace {

using namespace decode_attention;

// Holds a load of up to 32 rows, and at least one family (16 rows) of the next load.
template <typename T, int kWidth>
using PastRing = Ring<T, kWidth, 48>;

// The positions before the new token; the `Keys` of attention.cuh. `first` of a Span is the
// row of the hypothesis.
template <typename T>
struct Past {
  const T* qkv;
  int64_t qkv_stride, channels;
  T* keys;
  int64_t to_value;
  int stride, row_stride, ancestry_stride;
  const int *ancestry, *steps;
  int positions, rows;  // sizes of the cache

  // Number of positions that a hypothesis has in the cache before the new one.
  __device__ __forceinline__ int count(int row) const {
    const int last = steps[row];
    assert(last >= 0 && last < positions && "steps in [0, P)");
    return last;
  }
  __device__ __forceinline__ Span span(int row) const { return {row, count(row)}; }
  __device__ __forceinline__ const T* query(int row) const { return qkv + row * qkv_stride; }
  __device__ __forceinline__ const T* new_key(int row) const { return query(row) + channels; }
  __device__ __forceinline__ const T* start(Span) const { return keys; }
  __device__ __forceinline__ int row_of(Span span, int position) const {
    return ancestry[position * ancestry_stride + span.first];
  }
  // Address of the key of a position in row `row` of the cache.
  __device__ __forceinline__ T* key_of(int position, int row) const {
    return const_cast<T*>(offset_by(offset_by(keys, position, stride), row, row_stride));
  }
  __device__ __forceinline__ void append(Span span, int channel, const Columns<T>& key,
                                         const Columns<T>& value) const {
    T* const to = key_of(span.count, span.first) + channel;
    key.store(to);
    value.store(to + to_value);
  }

  // Prefetches the key and the value that a hypothesis has at a position.
  __device__ __forceinline__ void prefetch_key(int hypothesis, int position, int channel,
                                               int width) const {
    if (position >= min(peek(steps + hypothesis), positions)) return;
    const int row = peek(ancestry + position * ancestry_stride + hypothesis);
    if (row < 0 || row >= rows) return;
    const T* const key = key_of(position, row) + channel;
    prefetch(key, width * sizeof(T));
    prefetch(key + to_value, width * sizeof(T));
  }
};

// ---- kernel ----

// Groups the keys of a tile of hypotheses into loads, and starts their copies. A lane holds the
// ancestors of queries 4 * half ... 4 * half + 3 at one of the 16 positions. For positions and
// queries that do not exist it holds a copy of the last one.
template <typename T, typename Rows>
class Loader {
 public:
  __device__ __forceinline__ Loader(const Past<T>& past, const Item& item, const Shape& shape)
      : past_(past), item_(item), shape_(shape), ahead_(shape.team.rank() * kKeyTile) {
    read_ancestors();
  }

  // Starts the next load of the first `count` positions, into the `room` free rows of the ring from
  // `first` on. After the last load it returns empty ones.
  __device__ __forceinline__ Load start(Rows& ring, int count, int first, int room) {
    if (waiting_ == 0 && ahead_ < count) {
      waiting_ = (1u << item_.queries) - 1;
      position_ = ahead_;
      last_ = min(count - 1 - position_, kKeyTile - 1);
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
        rows_[i] = __shfl_sync(kAllLanes, next_[i], half_ * kKeyTile + min(place_, last_));
      }
      ahead_ += kKeyTile << shape_.team.shift;
      read_ancestors();
    }
    Load load{.first = first, .rows = 0, .last = last_};
    int held[kHeld];  // row of the cache; after it is in the load: ~(row of the ring)
#pragma unroll
    for (int i = 0; i < kHeld; ++i) held[i] = rows_[i];
    const int place = min(place_, last_);
#pragma unroll 1
    while (waiting_ != 0) {
      // The family of the first waiting query, and this query's ancestor at the lane's position.
      const unsigned leader = __ffs(waiting_) - 1;
      const int even = leader & 2 ? held[2] : held[0], odd = leader & 2 ? held[3] : held[1];
      const int ancestor =
          __shfl_sync(kAllLanes, leader & 1 ? odd : even, leader / kHeld * kKeyTile + place_);
      const bool is_new = ancestor >= 0 && static_cast<int>(threadIdx.x) <= last_;
      const unsigned fresh = __ballot_sync(kAllLanes, is_new);
      const int rows = load.rows + __popc(fresh);
      if (rows > min(room, Rows::kLoadRows)) break;
      const int number = load.rows + __popc(fresh & ((1u << place) - 1));
      if (is_new) {
        ring.sources[number] =
            past_.key_of(position_ + place, ancestor) + item_.head * shape_.width;
      }
      const int slot = ancestor < 0 ? ~ancestor : ring.wrap(first + number);
      unsigned others = 0;
#pragma unroll
      for (int i = 0; i < kHeld; ++i) {
        if (held[i] == ancestor) {
          held[i] = ~slot;
        } else {
          others |= 1u << (half_ * kHeld + i);
        }
      }
      const unsigned family = waiting_ & ~__reduce_or_sync(kAllLanes, others);
      waiting_ ^= family;
      load.rows = rows;
      load.slots = load.slots << 8 | static_cast<unsigned>(slot);
      load.families = load.families << 8 | family;
    }
    const auto source = [&ring](int i) { return ring.sources[i]; };
    ring.copy(load, source, past_.to_value, shape_.width);
    return load;
  }

 private:
  static constexpr int kHeld = kQueryTile * kKeyTile / kWarp;

  __device__ __forceinline__ void read_ancestors() {
    const int position = min(ahead_ + place_, past_.positions - 1);
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const int row = item_.first_row + min(half_ * kHeld + i, item_.queries - 1);
      next_[i] = past_.ancestry[position * past_.ancestry_stride + min(row, shape_.rows - 1)];
    }
  }

  const Past<T>& past_;
  const Item& item_;
  const Shape& shape_;
  const int place_ = threadIdx.x % kKeyTile, half_ = threadIdx.x / kKeyTile;
  // ahead_: first position of the ancestors in next_. position_: first position of those in rows_;
  // last_: the last of the 16 positions from there that exists.
  int ahead_, position_ = 0, last_ = 0;
  int next_[kHeld], rows_[kHeld] = {};  // ancestors at the next and at the current positions
  unsigned waiting_ = 0;                // bits of the queries whose keys are not yet loaded
};

// Queries, keys and values of the new tokens. A query first attends to its own key. A lane reads
// one chunk of a few rows.
template <typename T, typename Rows>
struct NewToken {
  static constexpr int kParts = kQueryTile / Rows::kAtOnce;

  Columns<T> q[kParts] = {}, key[kParts] = {}, value[kParts] = {};
  const unsigned query = threadIdx.x / Rows::kChunks, number = threadIdx.x % Rows::kChunks;

  // keys: whether to load keys and values, too.
  __device__ __forceinline__ void load(const Past<T>& past, const Item& item, const Shape& shape,
                                       bool keys) {
    const T* from = past.query(item.first_row + query) + item.head * shape.width + number * kSize;
#pragma unroll
    for (int i = 0; i < kParts; ++i, from += Rows::kAtOnce * past.qkv_stride) {
      if (!exists(i, item, shape)) continue;
      q[i].load(from);
      if (!keys) continue;
      key[i].load(from + past.channels);
      value[i].load(from + 2 * past.channels);
    }
  }

  // Initialises the tile; also stores the new keys and values in the cache.
  template <typename Tile>
  __device__ __forceinline__ void init_tile(Tile& tile, Rows& ring, const Past<T>& past,
                                            const Item& item, int step, const Shape& shape,
                                            bool keys) const {
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      const int row = Rows::kStaging + i * Rows::kAtOnce + query;
      *reinterpret_cast<Columns<T>*>(ring.chunk(row, 0, number)) = q[i];
      *reinterpret_cast<Columns<T>*>(ring.chunk(row, 1, number)) = value[i];
    }
    if (keys) {
      T* to = past.key_of(step, item.first_row + query) + item.head * shape.width + number * kSize;
#pragma unroll
      for (int i = 0; i < kParts; ++i) {
        if (exists(i, item, shape)) {
          key[i].store(to);
          value[i].store(to + past.to_value);
        }
        to = const_cast<T*>(offset_by(to, Rows::kAtOnce, past.row_stride));
        float a[kSize], b[kSize], score = 0.0f;
        q[i].unpack(a);
        key[i].unpack(b);
#pragma unroll
        for (int e = 0; e < kSize; ++e) score = fmaf(a[e], b[e], score);
#pragma unroll
        for (int offset = 1; offset < Rows::kChunks; offset *= 2) {
          score += __shfl_xor_sync(kAllLanes, score, offset);
        }
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const unsigned of = 2 * tile.t + n;
          const float x =
              __shfl_sync(kAllLanes, score, of % Rows::kAtOnce * Rows::kChunks) * shape.scale;
          if (of / Rows::kAtOnce == i) tile.state.top[n] = x;
        }
      }
      tile.state.sum[0] = tile.state.sum[1] = tile.g == 0 ? 1.0f : 0.0f;
    }
    __syncwarp();
    tile.ldmatrix_queries(ring);
    tile.ldmatrix_values(ring);
    __syncwarp();
  }

 private:
  __device__ __forceinline__ bool exists(int i, const Item& item, const Shape& shape) const {
    return static_cast<int>(i * Rows::kAtOnce + query) < item.queries &&
           static_cast<int>(number * kSize) < shape.width;
  }
};

template <typename T, int kWidth>
__global__ void __launch_bounds__(kWarp* kRingWarps, PastRing<T, kWidth>::kBlocks)
    decode_attention_self_kernel(const Past<T> past, const Shape shape, T* __restrict__ out) {
  using Rows = PastRing<T, kWidth>;
  extern __shared__ uint4 rings[];
  Rows& ring = reinterpret_cast<Rows*>(rings)[threadIdx.y];
  const Team team = shape.team;
  const Item item(shape);
  if (team.shift > 0 && item.queries > 0 && threadIdx.x < kKeyTile) {
    past.prefetch_key(item.first_row, team.rank() * kKeyTile + threadIdx.x, item.head * shape.width,
                      shape.width);
  }
  griddepcontrol_wait();

  Loader<T, Rows> loader(past, item, shape);
  NewToken<T, Rows> token;
  token.load(past, item, shape, team.rank() == 0);
  const int count = item.queries > 0 ? past.count(item.first_row) : 0;
  Load load = loader.start(ring, count, 0, Rows::kRows);
  QueryTile<T, kWidth, Rows> tile;
  token.init_tile(tile, ring, past, item, count, shape, team.rank() == 0);
  griddepcontrol_launch_dependents();

#pragma unroll 1
  while (load.families != 0) {
    const Load next =
        loader.start(ring, count, ring.wrap(load.first + load.rows), Rows::kRows - load.rows);
    ring.wait();
    tile.attend(ring, load, shape.scale);
    __syncwarp();
    load = next;
  }

  merge(tile.state, team, min(team.warps(), (count + kKeyTile - 1) / kKeyTile),
        sizeof(ring) / sizeof(float));
  if (team.rank() == 0) tile.store(out, ring, item, shape);
}

// ---- launcher ----

// Number of tiles per slot: as many as possible, because small tiles have more loads in flight, but
// all warps must be resident.
int64_t tiles_for(int64_t items, int64_t beam, int32_t device) {
  const int64_t warps = resident_blocks(device, kRingWarps * PastRing<__half, 64>::kBlocks);
  int64_t tiles = blocks_for(beam, kQueryTile);
  while (tiles < beam && 2 * tiles * items <= warps) tiles *= 2;
  return std::min(tiles, beam);
}

Tensor decode_self_attention(const Tensor& qkv, Tensor keys, Tensor values, const Tensor& ancestry,
                             const Tensor& steps, int64_t heads, double scale, int64_t beam) {
  constexpr const char* kOp = "decode_self_attention";
  const int64_t rows = qkv.size(0), channels = keys.size(2), width = width_of(kOp, channels, heads);
  check_rows(kOp, "qkv", qkv);
  check_rows(kOp, "keys", keys);
  check_rows(kOp, "values", values);
  require(ancestry.is_contiguous() && ancestry.numel() <= INT_MAX, kOp,
          ": ancestry must be contiguous, with fewer than 2^31 elements");
  require(steps.is_contiguous(), kOp, ": steps must be contiguous");
  const int32_t device = qkv.get_device();
  const torch::stable::accelerator::DeviceGuard guard(device);
  Tensor out = allocate(qkv, {rows, channels});
  attention::dispatch(kOp, "qkv", qkv.scalar_type(), width, [&](auto zero, auto tile_width) {
    using T = decltype(zero);
    constexpr int kWidth = decltype(tile_width)::value;
    if (rows == 0) return;
    const Past<T> past{.qkv = static_cast<const T*>(qkv.const_data_ptr()),
                       .qkv_stride = qkv.stride(0),
                       .channels = channels,
                       .keys = static_cast<T*>(keys.mutable_data_ptr()),
                       .to_value = to_values<T>(kOp, keys, values),
                       .stride = stride_between<T>(kOp, keys, 0),
                       .row_stride = stride_between<T>(kOp, keys, 1),
                       .ancestry_stride = static_cast<int>(keys.size(1)),
                       .ancestry = ancestry.const_data_ptr<int>(),
                       .steps = steps.const_data_ptr<int>(),
                       .positions = static_cast<int>(keys.size(0)),
                       .rows = static_cast<int>(keys.size(1))};
    const Shape shape = shape_of<T>(out, heads, scale, beam);
    if constexpr (sizeof(T) == sizeof(float)) {
      launch_rows<T, kWidth, true>(kOp, past, shape, out);
    } else {
      const int64_t tiles = tiles_for(blocks_for(rows, beam) * heads, beam, device);
      launch_tiles<PastRing<T, kWidth>>(kOp, decode_attention_self_kernel<T, kWidth>, past, shape,
                                        out, tiles, kBusyWarps);
    }
  });
  return out;
}

STABLE_TORCH_LIBRARY_IMPL(lightseq, CUDA, m) {
  m.impl("decode_self_attention", TORCH_BOX(&decode_self_attention));
}

}  // namespace
}  // namespace lightseq
