// A call of attention, and the methods that compute it (method.h).
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>

#include "attention/band.cuh"

namespace lightseq {
struct Cast;
}

namespace lightseq::attention {

using torch::stable::Tensor;
struct GradientCasts;

// The arguments that forward and backward have.
struct Call {
  const char* op;
  const Tensor &q, &k, &v, &cu_q, &cu_k;
  int64_t max_q, max_k;  // no sentence has more queries, more keys
  bool causal;
  int64_t window;  // a query sees so many tokens on each side of it; 0: all
  double scale, dropout_p;
  const Tensor& rng;
  int64_t site;
  int most_of_short = 0;  // tokens: longer sentences are long (Choice)

  Band band() const {
    const int before =
        window > 0 ? static_cast<int>(std::min<int64_t>(window, Band::kAll)) : Band::kAll;
    return {before, causal ? 0 : before};
  }
  int64_t sentences() const { return cu_q.size(0) - 1; }
  float keep_scale() const { return static_cast<float>(1.0 / (1.0 - dropout_p)); }
  float grad_scale() const { return static_cast<float>(scale) * keep_scale(); }
};

// Forward's results. cast: of out, if Cast::values is not null.
struct Forward {
  const Tensor &out, &lse;
  const Cast& cast;
};

// Backward's other arguments. casts: if Cast::values are not null, dq, dk and dv are in E4M3.
struct Backward {
  const Tensor &dout, &out, &lse, &dq, &dk, &dv;
  const GradientCasts& casts;
};

// Checks the arguments, and writes all rows but those of long sentences.
void short_fwd(const Call& a, const Forward& f);
void short_bwd(const Call& a, const Backward& b);

// Write the rows of the long sentences, and no others.
void wgmma_fwd(const Call& a, const Forward& f);
void wgmma_bwd(const Call& a, const Backward& b);
void mma_fwd(const Call& a, const Forward& f);
void mma_bwd(const Call& a, const Backward& b);
void tf32_bwd(const Call& a, const Backward& b);

}  // namespace lightseq::attention
