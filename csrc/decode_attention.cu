// Self-attention of the newest token of every hypothesis, for generation. Cross-attention is
// decode_attention_cross.cu; the kernel is in common/decode_attention.cuh.
//
//   out[n] = softmax(scale * q[n] k^T) v        in each head, over positions 0 ... step
//
// Position p of hypothesis n lies in row ancestry[p, n] of the cache, so beam search moves indices
// instead of keys and values (as FasterTransformer does). The new token's key and value come
// straight from qkv and are written to the cache on the way.
//
//   bytes moved   every key and value once a hypothesis; those that share an ancestor sit in one
//                 block and meet in the first cache. The new rows are read and written once.
//   determinism   sums have a fixed order, which depends on the sizes and the step alone
//
// `step` is read on the device and the grid does not depend on it: one captured graph serves all
// steps.

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cassert>
#include <climits>
#include <cstdint>

#include "common/decode_attention.cuh"
#include "common/scalars.cuh"

namespace lightseq {
namespace {

using namespace decode_attention;

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
  int64_t positions;

  __device__ __forceinline__ Span span(int row) const {
    const int64_t last = step.at(0);
    assert(last >= 0 && last < positions && "step in [0, P)");
    return {row, static_cast<int>(last)};
  }
  __device__ __forceinline__ const T* query(int row) const { return qkv + row * qkv_stride; }
  __device__ __forceinline__ const T* newest(int row) const { return query(row) + channels; }
  __device__ __forceinline__ const T* start(Span) const { return keys; }
  __device__ __forceinline__ int row_of(Span span, int position) const {
    return ancestry[position * ancestry_stride + span.first];
  }
  __device__ __forceinline__ void remember(Span span, int channel, const Columns<T>& key,
                                           const Columns<T>& value) const {
    T* const to =
        const_cast<T*>(forward(forward(keys, span.count, stride), span.first, row_stride));
    key.store(to + channel);
    value.store(to + to_value + channel);
  }
};

Tensor decode_self_attention(const Tensor& qkv, Tensor keys, Tensor values, const Tensor& ancestry,
                             const Tensor& step, int64_t heads, double scale) {
  constexpr const char* kOp = "decode_self_attention";
  const int64_t rows = qkv.size(0), channels = keys.size(2), width = width_of(kOp, channels, heads);
  check_rows(kOp, "qkv", qkv);
  check_rows(kOp, "keys", keys);
  check_rows(kOp, "values", values);
  require(ancestry.is_contiguous() && ancestry.numel() <= INT_MAX, kOp,
          ": ancestry must be contiguous, with at most 2^31 numbers");
  const torch::stable::accelerator::DeviceGuard guard(qkv.get_device());
  Tensor out = allocate(qkv, {rows, channels});
  attention::dispatch(kOp, "qkv", qkv.scalar_type(), width, [&](auto zero, auto tile_width) {
    using T = decltype(zero);
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
                       keys.size(0)};
    launch_rows<T, decltype(tile_width)::value, true>(kOp, past, out, heads, width, scale);
  });
  return out;
}

STABLE_TORCH_LIBRARY_IMPL(lightseq, CUDA, m) {
  m.impl("decode_self_attention", TORCH_BOX(&decode_self_attention));
}

}  // namespace
}  // namespace lightseq
