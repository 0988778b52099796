// Attention of long sentences, for the host code of attention.cu and attention_bwd.cu.
// common/attention_items.cuh explains the kernels.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>

namespace lightseq {
struct Cast;
namespace attention {
struct GradientCasts;
}
}  // namespace lightseq

namespace lightseq::attention {

using torch::stable::Tensor;

// A sentence is long if it has more queries or more keys than this: 128, but less on GPUs of
// compute capability 9.0, in 16 bits. There it depends on the average number of tokens of the
// sentences, empty ones included: 0 if the average is at least 104 (heads of more than 64 columns:
// 72), so that no sentence is short; else 64 for heads of more than 64 columns, and for other heads
// without a causal mask if the average is at least 48. Measured: lab notebook, "attention: all
// sentences of a batch by the kernels for long ones".
int most_tokens_of_short(const Tensor& q, const Tensor& k, const Tensor& cu_q, bool causal);
// Whether sentences of more tokens than most_of_short have kernels of their own, and this batch may
// have such sentences: in 16 bits; backward in float32 for heads of up to 64 columns. max_q, max_k:
// the arguments of the op.
bool has_long_kernels(const Tensor& q, const Tensor& k, const Tensor& cu_q, int64_t max_q,
                      int64_t max_k, int most_of_short, bool backward);

// The arguments that both passes have.
struct LongArguments {
  const Tensor &q, &k, &v, &cu_q, &cu_k;
  int64_t max_k;  // no sentence has more keys
  bool causal;
  double scale, dropout_p;
  const Tensor& rng;
  int64_t site;
  int most_of_short;  // most_tokens_of_short
};

// Write the rows of the long sentences, and no others. cast: of out, if Cast::values is not null.
void attention_long_fwd(const LongArguments& a, const Tensor& out, const Tensor& lse,
                        const Cast& cast);
// casts: if Cast::values are not null, dq, dk and dv are not written, but their casts.
void attention_long_bwd(const LongArguments& a, const Tensor& dout, const Tensor& out,
                        const Tensor& lse, const Tensor& dq, const Tensor& dk, const Tensor& dv,
                        const GradientCasts& casts);

// The functions above call these: in 16 bits on GPUs that lack wgmma, and in float32.
void attention_tiles_fwd(const LongArguments& a, const Tensor& out, const Tensor& lse,
                         const Cast& cast);
void attention_tiles_bwd(const LongArguments& a, const Tensor& dout, const Tensor& out,
                         const Tensor& lse, const Tensor& dq, const Tensor& dk, const Tensor& dv,
                         const GradientCasts& casts);
void attention_float_bwd(const LongArguments& a, const Tensor& dout, const Tensor& out,
                         const Tensor& lse, const Tensor& dq, const Tensor& dk, const Tensor& dv);

}  // namespace lightseq::attention
