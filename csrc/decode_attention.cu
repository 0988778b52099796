// Self-attention of the new token of every hypothesis, for generation. Cross-attention is
// decode_attention_cross.cu; common/decode_attention.cuh and query_tile.cuh have what both
// share.
//
//   out[n] = softmax(scale * q[n] k^T) v        in each head, over positions 0 ... step
//
// Position p of hypothesis n lies in row ancestry[p, n] of the cache, so beam search moves indices
// instead of keys and values (as FasterTransformer does). The new token's key and value come
// straight from qkv and are written to the cache on the way. The `beam` hypotheses of a sentence
// are neighbours, and share most of their past.
//
//   bytes moved   every key and value once for eight hypotheses of a sentence that share it, as
//                 long as 32 rows hold what they read at 16 positions. The new rows are read and
//                 written once.
//   determinism   sums have a fixed order, which depends on the sizes and the step alone, and not
//                 on who shares what with whom
//
// decode_attention_self_kernel: 16-bit numbers, a warp for a head and up to eight hypotheses of a
// slot. It takes 16 positions at a time. Hypotheses with the same ancestors at all 16 are a family,
// which meets its keys on the tensor cores in one go, while the others stay as they are: so a
// hypothesis adds up the same numbers in the same order, alone or not. Keys and values come through
// a ring in shared memory (common/query_tile.cuh): where families part within the 16 positions
// they share the rows that they have in common there, and what comes next is on its way while a
// warp computes. Few slots have smaller tiles of hypotheses, down to one, and more warps, whose
// reads are all under way at once. float32 takes decode_attention_rows_kernel, where hypotheses
// meet in the first cache.
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
#include "common/new_token.cuh"
#include "common/prefetch.cuh"
#include "common/query_tile.cuh"
#include "common/scalars.cuh"

namespace lightseq {
namespace {

using namespace decode_attention;

// A load of up to 32 rows, and room for a family of the next one.
template <typename T, int kWidth>
using PastRing = Ring<T, kWidth, 48>;

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

  // Positions that lie in the cache: those before the new one.
  __device__ __forceinline__ int count() const {
    const int64_t last = step.at(0);
    assert(last >= 0 && last < positions && "step in [0, P)");
    return static_cast<int>(last);
  }
  __device__ __forceinline__ Span span(int row) const { return {row, count()}; }
  __device__ __forceinline__ const T* query(int row) const { return qkv + row * qkv_stride; }
  __device__ __forceinline__ const T* new_key(int row) const { return query(row) + channels; }
  __device__ __forceinline__ const T* start(Span) const { return keys; }
  __device__ __forceinline__ int row_of(Span span, int position) const {
    return ancestry[position * ancestry_stride + span.first];
  }
  // Where row `row` of the cache keeps the key of a position.
  __device__ __forceinline__ T* key_of(int position, int row) const {
    return const_cast<T*>(offset_by(offset_by(keys, position, stride), row, row_stride));
  }
  __device__ __forceinline__ void append(Span span, int channel, const Columns<T>& key,
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

// Copies what the hypotheses of a tile have to read, load by load. A lane has, at one place of 16
// positions, the ancestors of queries 4 * half ... + 3. What does not exist is a copy.
template <typename T, typename Rows>
class Loader {
 public:
  __device__ __forceinline__ Loader(const Past<T>& past, const Item& item, const Shape& shape)
      : past_(past), item_(item), shape_(shape), ahead_(shape.team.rank() * kKeyTile) {
    read_ancestors();
  }

  // The next of `count` positions, to the ring's rows from `first` on, of which `room` are free.
  // What comes behind the last load is empty.
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
    int held[kHeld];  // a row of the cache, or ~ that of the ring which this load has for it
#pragma unroll
    for (int i = 0; i < kHeld; ++i) held[i] = rows_[i];
    const int place = min(place_, last_);
#pragma unroll 1
    while (waiting_ != 0) {
      // The first one's family, and its ancestor at this lane's place.
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
  int ahead_, position_ = 0, last_ = 0;  // ahead: of the ancestors in `next`
  int next_[kHeld], rows_[kHeld] = {};
  unsigned waiting_ = 0;  // queries that have not met the tile's keys
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
  const int count = item.queries > 0 ? past.count() : 0;
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

// Into how many tiles a slot is cut: the smaller they are the more reads are under way at once,
// and all warps shall run side by side.
int64_t tiles_for(int64_t items, int64_t beam, int32_t device) {
  const int64_t warps = resident_blocks(device, kRingWarps * PastRing<__half, 64>::kBlocks);
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
    const Past<T> past{.qkv = static_cast<const T*>(qkv.const_data_ptr()),
                       .qkv_stride = qkv.stride(0),
                       .channels = channels,
                       .keys = static_cast<T*>(keys.mutable_data_ptr()),
                       .to_value = to_values<T>(kOp, keys, values),
                       .stride = stride_between<T>(kOp, keys, 0),
                       .row_stride = stride_between<T>(kOp, keys, 1),
                       .ancestry_stride = static_cast<int>(keys.size(1)),
                       .ancestry = ancestry.const_data_ptr<int>(),
                       .step = Indices(step),
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
