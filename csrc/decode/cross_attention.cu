// Cross-attention of the new token of every hypothesis, for generation. Self-attention is in
// self_attention.cu; attention.cuh and query_tile.cuh have the code that both
// share.
//
//   out[n] = softmax(scale * q[n] k^T) v        in each head, over the sentence that n translates
//
// The `beam` hypotheses of a sentence are in adjacent rows, its slot. Keys and values exist once
// per sentence. Rows that belong to no sentence, or to an empty one, become 0.
//
//   bytes moved   each key and value once per eight hypotheses of a sentence; q and out once
//   determinism   sums have a fixed order, which depends only on the sizes and the lengths
//
// decode_attention_cross_kernel: for 16-bit types. A warp processes one head and up to eight
// queries of a sentence. It copies keys and values through a ring buffer in shared memory
// (query_tile.cuh), two tiles of 16 keys ahead. So for sentences of usual lengths nearly all
// loads are in flight at once. This matters, because the keys and values of six layers are larger
// than L2 and are read from memory in each step. They are computed before the search; only the
// queries are new in each step. So the kernel starts to load the first tiles before it waits for
// the previous kernel, which computes the queries. If there are few slots, the warps of a block
// split the keys of a sentence.
//
// decode_attention_rows_kernel: for float32. The queries of a sentence are in one block and share
// keys through the L1 cache.

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>

#include "common/prefetch.cuh"
#include "decode/attention.cuh"
#include "decode/query_tile.cuh"

namespace lightseq {
namespace {

using namespace decode_attention;

// The source sentences; the `Keys` of attention.cuh. `first` of a Span is the first token of
// the sentence.
template <typename T>
struct Source {
  const T *q, *keys;
  int64_t q_stride, to_value;
  int stride, row_stride;  // all positions are in row 0, so row_stride is 0
  const int *cu_seqlens, *sentences;
  int slots, beam;

  // May be called before griddepcontrol_wait(): no previous kernel may write these tensors.
  __device__ __forceinline__ Span span(int row) const {
    const int slot = row / beam;
    const int sentence = slot < slots ? peek(sentences + slot) : -1;
    if (sentence < 0) return {0, 0};
    const int first = peek(cu_seqlens + sentence);
    return {first, peek(cu_seqlens + sentence + 1) - first};
  }
  __device__ __forceinline__ const T* query(int row) const { return q + row * q_stride; }
  __device__ __forceinline__ const T* start(Span span) const {
    return offset_by(keys, span.first, stride);
  }
  __device__ __forceinline__ int row_of(Span, int) const { return 0; }
};

// The ring has 32 rows: enough for most sentences, and small enough for many resident warps, which
// hide the latency of longer sentences.
template <typename T, int kWidth>
using SourceRing = Ring<T, kWidth, 32>;

template <typename T, int kWidth>
__global__ void __launch_bounds__(kWarp* kRingWarps, SourceRing<T, kWidth>::kBlocks)
    decode_attention_cross_kernel(const Source<T> source, const Shape shape, T* __restrict__ out) {
  using Rows = SourceRing<T, kWidth>;
  constexpr int kTiles = Rows::kRows / kKeyTile;  // in the ring
  extern __shared__ uint4 rings[];
  Rows& ring = reinterpret_cast<Rows*>(rings)[threadIdx.y];
  const Team team = shape.team;
  const Item item(shape);
  const int channel = item.head * shape.width;

  const Span span = item.queries > 0 ? source.span(item.first_row) : Span{0, 0};
  const T* const keys = source.start(span) + channel;
  const auto first_key = [&](int tile) { return (tile << team.shift | team.rank()) * kKeyTile; };
  // All queries are one family. Places past the last key are copies of it.
  const auto load_of = [&](int tile) {
    const int row = tile % kTiles * kKeyTile, rows = min(kKeyTile, span.count - first_key(tile));
    const int place = min(static_cast<int>(threadIdx.x) % kKeyTile, rows - 1);
    return Load{.first = row,
                .rows = rows,
                .last = rows - 1,
                .slots = static_cast<unsigned>(row + place),
                .families = 0xff};
  };
  const auto copy = [&](int tile) {
    const auto key = [&](int i) { return offset_by(keys, first_key(tile) + i, source.stride); };
    ring.copy(load_of(tile), key, source.to_value, shape.width);
  };
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) copy(tile);
  griddepcontrol_wait();

  QueryTile<T, kWidth, Rows> queries;
  queries.load_queries(source.query(item.first_row) + channel, source.q_stride, item, shape);
  griddepcontrol_launch_dependents();
#pragma unroll 1
  for (int tile = 0; first_key(tile) < span.count; ++tile) {
    ring.template wait<kTiles - 1>();
    queries.attend(ring, load_of(tile), shape.scale);
    copy(tile + kTiles);
  }

  const int tiles = (span.count + kKeyTile - 1) / kKeyTile;
  merge(queries.state, team, min(team.warps(), tiles), sizeof(ring) / sizeof(float));
  if (span.count == 0) queries.state.sum[0] = queries.state.sum[1] = 1.0f;  // 0 / 1, not 0 / 0
  if (team.rank() == 0) queries.store(out, ring, item, shape);
}

Tensor decode_cross_attention(const Tensor& q, const Tensor& keys, const Tensor& values,
                              const Tensor& cu_seqlens, const Tensor& sentences, int64_t beam,
                              int64_t heads, double scale) {
  constexpr const char* kOp = "decode_cross_attention";
  const int64_t rows = q.size(0), channels = q.size(1), width = width_of(kOp, channels, heads);
  check_rows(kOp, "q", q);
  check_rows(kOp, "keys", keys);
  check_rows(kOp, "values", values);
  require(cu_seqlens.is_contiguous() && sentences.is_contiguous(), kOp,
          ": cu_seqlens and sentences must be contiguous");
  const torch::stable::accelerator::DeviceGuard guard(q.get_device());
  Tensor out = allocate(q, {rows, channels});
  attention::dispatch(kOp, "q", q.scalar_type(), width, [&](auto zero, auto tile_width) {
    using T = decltype(zero);
    constexpr int kWidth = decltype(tile_width)::value;
    if (rows == 0) return;
    const Source<T> source{.q = static_cast<const T*>(q.const_data_ptr()),
                           .keys = static_cast<const T*>(keys.const_data_ptr()),
                           .q_stride = q.stride(0),
                           .to_value = to_values<T>(kOp, keys, values),
                           .stride = stride_between<T>(kOp, keys, 0),
                           .row_stride = 0,
                           .cu_seqlens = cu_seqlens.const_data_ptr<int>(),
                           .sentences = sentences.const_data_ptr<int>(),
                           .slots = static_cast<int>(sentences.size(0)),
                           .beam = static_cast<int>(beam)};
    const Shape shape = shape_of<T>(out, heads, scale, beam);
    if constexpr (sizeof(T) == sizeof(float)) {
      launch_rows<T, kWidth, false>(kOp, source, shape, out);
    } else {
      launch_tiles<SourceRing<T, kWidth>>(kOp, decode_attention_cross_kernel<T, kWidth>, source,
                                          shape, out, blocks_for(beam, kQueryTile),
                                          kRingWarps * SourceRing<T, kWidth>::kBlocks);
    }
  });
  return out;
}

STABLE_TORCH_LIBRARY_IMPL(lightseq, CUDA, m) {
  m.impl("decode_cross_attention", TORCH_BOX(&decode_cross_attention));
}

}  // namespace
}  // namespace lightseq
