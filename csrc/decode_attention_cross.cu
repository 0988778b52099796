// Cross-attention of the newest token of every hypothesis, for generation. Self-attention is
// decode_attention.cu; common/decode_attention.cuh and
// query_tile.cuh have what both share.
//
//   out[n] = softmax(scale * q[n] k^T) v        in each head, over the sentence that n translates
//
// The `beam` hypotheses of a sentence are neighbours; keys and values exist once a sentence. Rows
// that belong to no sentence, or to an empty one, become 0.
//
//   bytes moved   every key and value once for eight hypotheses of a sentence, q and out once
//   determinism   sums have a fixed order, which depends on the sizes and the lengths alone
//
// 16-bit numbers take decode_attention_cross_kernel, in which a warp has eight queries of a
// sentence. float32 takes decode_attention_rows_kernel, where the queries of a sentence sit in one
// block and meet in the first cache. In a small step the sentence's keys and values are asked for
// before the queries are there.

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>

#include "common/decode_attention.cuh"
#include "common/query_tile.cuh"

namespace lightseq {
namespace {

using namespace decode_attention;

// A sentence; `first` is its first token.
template <typename T>
struct Source {
  const T *q, *keys;
  int64_t q_stride, to_value;
  int stride, row_stride;  // all in one row
  const int *cu_seqlens, *sentences;
  int slots, beam, count, tokens;  // `count` sentences with `tokens` tokens in all

  __device__ __forceinline__ Span span(int row) const {
    const int slot = row / beam;
    const int sentence = slot < slots ? sentences[slot] : -1;
    if (sentence < 0) return {0, 0};
    const int first = cu_seqlens[sentence];
    return {first, cu_seqlens[sentence + 1] - first};
  }
  __device__ __forceinline__ const T* query(int row) const { return q + row * q_stride; }
  __device__ __forceinline__ const T* start(Span span) const {
    return forward(keys, span.first, stride);
  }
  __device__ __forceinline__ int row_of(Span, int) const { return 0; }

  // A hint of the slot's n-th key and value, of which a head begins at `channel`.
  __device__ __forceinline__ void prefetch_key(int slot, int n, int channel, int width) const {
    const int sentence = slot < slots ? peek(sentences + slot) : -1;
    if (sentence < 0 || sentence >= count) return;
    const int token = peek(cu_seqlens + sentence) + n;
    if (token < 0 || token >= min(peek(cu_seqlens + sentence + 1), tokens)) return;
    const T* const key = forward(keys, token, stride) + channel;
    prefetch(key, width * sizeof(T));
    prefetch(key + to_value, width * sizeof(T));
  }
};

template <typename T, int kWidth>
__global__ void __launch_bounds__(kWarp* kWarps)
    decode_attention_cross_kernel(const Source<T> source, const Shape shape, T* __restrict__ out) {
  constexpr int kTiles = 128 / kWidth, kKeys = kTiles * kKeyTile;  // of one turn
  const Team team = shape.team;
  const Item item(shape);
  const int channel = item.head * shape.width, first_key = team.rank() * kKeys;
  const int lane = threadIdx.x;
  if (team.shift > 0 && item.queries > 0 && lane < kKeys) {
    source.prefetch_key(item.slot, first_key + lane, channel, shape.width);
  }
  wait_for_previous_kernel();

  QueryTile<T, kWidth> tile;
  tile.load(source.query(item.first_row) + channel, source.q_stride, item, shape);
  start_next_kernel();
  const Span span = item.queries > 0 ? source.span(item.first_row) : Span{0, 0};
  const T* const keys = source.start(span) + channel;
  for (int first = first_key; first < span.count; first += kKeys << team.shift) {
    const auto at = [&](int i) {
      return forward(keys, min(first + i, span.count - 1), source.stride);
    };
    tile.template attend<kTiles>(at, source.to_value, span.count - first, shape);
  }

  merge(tile.state, team, min(team.warps(), (span.count + kKeys - 1) / kKeys));
  if (team.rank() == 0) tile.store(out, item, span.count > 0, shape);
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
    const Source<T> source{static_cast<const T*>(q.const_data_ptr()),
                           static_cast<const T*>(keys.const_data_ptr()),
                           q.stride(0),
                           to_values<T>(kOp, keys, values),
                           bytes_between<T>(kOp, keys, 0),
                           0,
                           cu_seqlens.const_data_ptr<int>(),
                           sentences.const_data_ptr<int>(),
                           static_cast<int>(sentences.size(0)),
                           static_cast<int>(beam),
                           static_cast<int>(cu_seqlens.size(0)) - 1,
                           static_cast<int>(keys.size(0))};
    if constexpr (sizeof(T) == sizeof(float)) {
      launch_rows<T, kWidth, false>(kOp, source, out, heads, width, scale);
    } else {
      launch_tiles<T, kWidth>(kOp, decode_attention_cross_kernel<T, kWidth>, source, out, beam,
                              blocks_for(beam, kQueryTile), heads, width, scale, kWarps, 0);
    }
  });
  return out;
}

STABLE_TORCH_LIBRARY_IMPL(lightseq, CUDA, m) {
  m.impl("decode_cross_attention", TORCH_BOX(&decode_cross_attention));
}

}  // namespace
}  // namespace lightseq
