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
#include <optional>
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

std::tuple<Tensor, Tensor, Tensor> attention_fwd(
    const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& cu_q, const Tensor& cu_k,
    int64_t max_q, int64_t max_k, bool causal, int64_t window, double scale, double dropout_p,
    const Tensor& rng, int64_t site, std::optional<Tensor> cast_scale,
    std::optional<Tensor> cast_amax, std::optional<Tensor> cast_saturated) {
  constexpr const char* op = "attention_fwd";
  const CastScalars scalars = cast_scalars(op, cast_scale, cast_amax, cast_saturated);
  const torch::stable::accelerator::DeviceGuard guard(q.get_device());
  const CastResults results =
      allocate_cast(q, q.size(0), q.size(1) * q.size(2), scalars, CastOf::kValues);
  const bool is_float = q.scalar_type() == ScalarType::Float;
  const Tensor out = allocate(q, {q.size(0), q.size(1), q.size(2)});
  const Tensor lse =
      allocate(q, {q.size(0), q.size(1)}, is_float ? ScalarType::Double : ScalarType::Float);
  Call a{op, q, k, v, cu_q, cu_k, max_q, max_k, causal, window, scale, dropout_p, rng, site};
  const Forward f{out, lse, results.cast};
  const Choice choice = choice_of(a, false);
  a.most_of_short = choice.most_of_short;
  short_fwd(a, f);
  if (choice.of_long == Method::kWgmma) wgmma_fwd(a, f);
  if (choice.of_long == Method::kMma) mma_fwd(a, f);
  return {out, lse, results.values};
}

// The cast to x [T, H, D] in E4M3.
Cast cast_to(const char* op, const char* name, const Tensor& x, const CastScalars& scalars) {
  if (!scalars.are_given()) return {};
  const int64_t width = x.size(2), stride = x.stride(0);
  const bool heads_adjacent =
      (width == 1 || x.stride(2) == 1) && (x.size(1) == 1 || x.stride(1) == width);
  require(heads_adjacent && stride % kFp8Alignment == 0 && x.size(1) * width % kFp8Alignment == 0,
          op, ": the heads of ", name, " must be adjacent, and its rows multiples of ",
          kFp8Alignment, " numbers");
  check_aligned(op, name, x, kFp8Alignment);
  return {.values = static_cast<uint8_t*>(x.data_ptr()),
          .transpose = nullptr,
          .scale = scalars.scale,
          .amax = scalars.amax,
          .saturated = scalars.saturated,
          .rows = x.size(0),
          .columns = stride,
          .pitch = 0,
          .tiles_across = 0};
}

void attention_bwd(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v,
                   const Tensor& out, const Tensor& lse, const Tensor& cu_q, const Tensor& cu_k,
                   int64_t max_q, int64_t max_k, bool causal, int64_t window, double scale,
                   double dropout_p, const Tensor& rng, int64_t site, Tensor dq, Tensor dk,
                   Tensor dv, std::optional<Tensor> q_scale, std::optional<Tensor> q_amax,
                   std::optional<Tensor> q_saturated, std::optional<Tensor> k_scale,
                   std::optional<Tensor> k_amax, std::optional<Tensor> k_saturated) {
  constexpr const char* op = "attention_bwd";
  const CastScalars of_q = cast_scalars(op, q_scale, q_amax, q_saturated);
  const CastScalars of_k = cast_scalars(op, k_scale, k_amax, k_saturated);
  require(of_q.are_given() == of_k.are_given(), op, ": q_cast and k_cast must both be given");
  const GradientCasts casts{.dq = cast_to(op, "dq", dq, of_q),
                            .dk = cast_to(op, "dk", dk, of_k),
                            .dv = cast_to(op, "dv", dv, of_k)};
  const torch::stable::accelerator::DeviceGuard guard(q.get_device());
  Call a{op, q, k, v, cu_q, cu_k, max_q, max_k, causal, window, scale, dropout_p, rng, site};
  const Backward b{dout, out, lse, dq, dk, dv, casts};
  const Choice choice = choice_of(a, true);
  a.most_of_short = choice.most_of_short;
  short_bwd(a, b);
  if (choice.of_long == Method::kWgmma) wgmma_bwd(a, b);
  if (choice.of_long == Method::kMma) mma_bwd(a, b);
  if (choice.of_long == Method::kTf32) tf32_bwd(a, b);
}

STABLE_TORCH_LIBRARY_IMPL(lightseq, CUDA, m) {
  m.impl("attention_fwd", TORCH_BOX(&attention_fwd));
  m.impl("attention_bwd", TORCH_BOX(&attention_bwd));
}

}  // namespace
}  // namespace lightseq::attention
