// Attention of long sentences, for the hosts of attention.cu and attention_bwd.cu.
// common/attention_items.cuh explains the kernels.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>

namespace lightseq::attention {

using torch::stable::Tensor;

// A sentence is long if a side of it has more tokens.
int most_tokens_of_short(const Tensor& q);
// Whether the long sentences of this batch have kernels of their own: in 16 bits all in forward,
// and those of compute capability 9.0 in backward; in float32 backward of up to 64 columns. max_q,
// max_k: as the ops take them.
bool has_long_kernels(const Tensor& q, const Tensor& k, const Tensor& cu_q, int64_t max_q,
                      int64_t max_k, bool backward);

// The arguments that both passes have.
struct LongArguments {
  const Tensor &q, &k, &v, &cu_q, &cu_k;
  int64_t max_k;  // no sentence has more keys
  bool causal;
  double scale, dropout_p;
  const Tensor& rng;
  int64_t site;
};

// Write the rows of the long sentences, and no others.
void attention_long_fwd(const LongArguments& a, const Tensor& out, const Tensor& lse);
void attention_long_bwd(const LongArguments& a, const Tensor& dout, const Tensor& out,
                        const Tensor& lse, const Tensor& dq, const Tensor& dk, const Tensor& dv);

// The functions above call these: in 16 bits on GPUs that lack wgmma, and in float32.
void attention_tiles_fwd(const LongArguments& a, const Tensor& out, const Tensor& lse);
void attention_float_bwd(const LongArguments& a, const Tensor& dout, const Tensor& out,
                         const Tensor& lse, const Tensor& dq, const Tensor& dk, const Tensor& dv);

}  // namespace lightseq::attention
