// The ops of attention over packed sentences. method.h chooses the kernels of a batch: each method
// has files of its own.
//
//   short_fwd.cu, short_bwd.cu    the formulas; short sentences, or all
//   wgmma_fwd.cu, wgmma_bwd.cu    long sentences in 16 bits on compute capability 9.0
//   mma_fwd.cu, mma_bwd.cu        long sentences in 16 bits on other GPUs
//   tf32_bwd.cu                   long sentences in float32, backward
//   work_list.cu                  the work of the kernels for long sentences

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <tuple>

#include "attention/call.h"
#include "attention/cast.cuh"
#include "attention/method.h"
#include "common/ptx/wgmma.cuh"

namespace lightseq::attention {
namespace {

Choice choice_of(const Call& a, bool backward) {
  return choose(Batch{.is_float = a.q.scalar_type() == ScalarType::Float,
                      .has_wgmma = has_wgmma(a.q.get_device()),
                      .backward = backward,
                      .causal = a.causal,
                      .width = a.q.size(2),
                      .rows_q = a.q.size(0),
                      .rows_k = a.k.size(0),
                      .sentences = a.sentences(),
                      .longest = std::max(a.max_q, a.max_k),
                      .is_empty = std::min(a.q.numel(), a.k.numel()) == 0});
}

std::tuple<Tensor, Tensor> forward(Call a, const Cast& cast) {
  const torch::stable::accelerator::DeviceGuard guard(a.q.get_device());
  const bool is_float = a.q.scalar_type() == ScalarType::Float;
  const Tensor out = allocate(a.q, {a.q.size(0), a.q.size(1), a.q.size(2)});
  const Tensor lse =
      allocate(a.q, {a.q.size(0), a.q.size(1)}, is_float ? ScalarType::Double : ScalarType::Float);
  const Forward f{out, lse, cast};
  const Choice choice = choice_of(a, false);
  a.most_of_short = choice.most_of_short;
  short_fwd(a, f);
  if (choice.of_long == Method::kWgmma) wgmma_fwd(a, f);
  if (choice.of_long == Method::kMma) mma_fwd(a, f);
  return {out, lse};
}

void backward(Call a, const Backward& b) {
  const torch::stable::accelerator::DeviceGuard guard(a.q.get_device());
  const Choice choice = choice_of(a, true);
  a.most_of_short = choice.most_of_short;
  short_bwd(a, b);
  if (choice.of_long == Method::kWgmma) wgmma_bwd(a, b);
  if (choice.of_long == Method::kMma) mma_bwd(a, b);
  if (choice.of_long == Method::kTf32) tf32_bwd(a, b);
}

void check_fp8(const char* op, const Tensor& q) {
  require_fp8(op, q.get_device());
  require(q.scalar_type() == ScalarType::BFloat16, op, ": q must be bfloat16");
}

std::tuple<Tensor, Tensor> attention_fwd(const Tensor& q, const Tensor& k, const Tensor& v,
                                         const Tensor& cu_q, const Tensor& cu_k, int64_t max_q,
                                         int64_t max_k, bool causal, double scale, double dropout_p,
                                         const Tensor& rng, int64_t site) {
  return forward(
      {"attention_fwd", q, k, v, cu_q, cu_k, max_q, max_k, causal, scale, dropout_p, rng, site},
      {});
}

std::tuple<Tensor, Tensor, Tensor> fp8_attention_fwd(
    const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cu_q, const Tensor& cu_k,
    int64_t max_q, int64_t max_k, bool causal, double scale, double dropout_p, const Tensor& rng,
    int64_t site, const Tensor& out_scale, Tensor amax, Tensor saturated) {
  constexpr const char* kOp = "fp8_attention_fwd";
  check_fp8(kOp, q);
  const torch::stable::accelerator::DeviceGuard guard(q.get_device());
  const auto casts = allocate_cast(q, q.size(0), q.size(1) * q.size(2), CastOf::kValues);
  const Cast cast = cast_into(casts, out_scale, amax, saturated);
  return std::tuple_cat(
      forward({kOp, q, k, v, cu_q, cu_k, max_q, max_k, causal, scale, dropout_p, rng, site}, cast),
      std::make_tuple(std::get<0>(casts)));
}

void attention_bwd(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v,
                   const Tensor& out, const Tensor& lse, const Tensor& cu_q, const Tensor& cu_k,
                   int64_t max_q, int64_t max_k, bool causal, double scale, double dropout_p,
                   const Tensor& rng, int64_t site, Tensor dq, Tensor dk, Tensor dv) {
  backward(
      {"attention_bwd", q, k, v, cu_q, cu_k, max_q, max_k, causal, scale, dropout_p, rng, site},
      {dout, out, lse, dq, dk, dv, {}});
}

// The cast to x [T, H, D] in E4M3.
Cast cast_to(const char* op, const char* name, const Tensor& x, const Tensor& scale,
             const Tensor& amax, const Tensor& saturated) {
  const int64_t width = x.size(2), stride = x.stride(0);
  const bool heads_adjacent =
      (width == 1 || x.stride(2) == 1) && (x.size(1) == 1 || x.stride(1) == width);
  require(heads_adjacent && stride % kFp8Alignment == 0 && x.size(1) * width % kFp8Alignment == 0,
          op, ": the heads of ", name, " must be adjacent, and its rows multiples of ",
          kFp8Alignment, " numbers");
  check_aligned(op, name, x, kFp8Alignment);
  return {.values = static_cast<uint8_t*>(x.data_ptr()),
          .transpose = nullptr,
          .scale = scale.const_data_ptr<float>(),
          .amax = static_cast<int*>(amax.mutable_data_ptr()),
          .saturated = static_cast<unsigned long long*>(saturated.mutable_data_ptr()),
          .rows = x.size(0),
          .columns = stride,
          .pitch = 0,
          .tiles_across = 0};
}

void fp8_attention_bwd(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v,
                       const Tensor& out, const Tensor& lse, const Tensor& cu_q, const Tensor& cu_k,
                       int64_t max_q, int64_t max_k, bool causal, double scale, double dropout_p,
                       const Tensor& rng, int64_t site, Tensor dq, Tensor dk, Tensor dv,
                       const Tensor& q_scale, Tensor q_amax, Tensor q_saturated,
                       const Tensor& k_scale, Tensor k_amax, Tensor k_saturated) {
  constexpr const char* kOp = "fp8_attention_bwd";
  check_fp8(kOp, q);
  const GradientCasts casts{.dq = cast_to(kOp, "dq", dq, q_scale, q_amax, q_saturated),
                            .dk = cast_to(kOp, "dk", dk, k_scale, k_amax, k_saturated),
                            .dv = cast_to(kOp, "dv", dv, k_scale, k_amax, k_saturated)};
  backward({kOp, q, k, v, cu_q, cu_k, max_q, max_k, causal, scale, dropout_p, rng, site},
           {dout, out, lse, dq, dk, dv, casts});
}

STABLE_TORCH_LIBRARY_IMPL(lightseq, CUDA, m) {
  m.impl("attention_fwd", TORCH_BOX(&attention_fwd));
  m.impl("attention_bwd", TORCH_BOX(&attention_bwd));
  m.impl("fp8_attention_fwd", TORCH_BOX(&fp8_attention_fwd));
  m.impl("fp8_attention_bwd", TORCH_BOX(&fp8_attention_bwd));
}

}  // namespace
}  // namespace lightseq::attention
