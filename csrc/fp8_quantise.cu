// Cast of a matrix x to E4M3, with its transpose. T rows, C columns.
//
//   values [T, C], transpose [C, P]   x / scale in E4M3
//   amax, saturated                   raised and added to
//
//   bytes moved   x, values and transpose once: 4 per number of a 16-bit type, as many as a copy
//   determinism   the same bits as the reference, ops/fp8_quantise.py
//
// common/fp8_cast.cuh explains the kernel.

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <tuple>

#include "common/check.h"
#include "common/fp8_cast.cuh"
#include "common/optional.h"

namespace lightseq {
namespace {

using torch::stable::Tensor;

std::tuple<Tensor, Tensor> fp8_quantise(const Tensor& x, const Tensor& scale, Tensor amax,
                                        Tensor saturated) {
  constexpr const char* kOp = "fp8_quantise";
  check_cast(kOp, "x", x);
  const torch::stable::accelerator::DeviceGuard guard(x.get_device());
  const auto results = allocate_cast(x);
  const Cast cast = cast_into(results, scale, amax, saturated);
  dispatch_float(x.scalar_type(), "fp8_quantise: x", [&](auto zero) {
    using T = decltype(zero);
    launch_cast(kOp, Given<T>{.x = data_of<T>(x), .stride = x.stride(0)}, cast,
                current_stream(x.get_device()));
  });
  return results;
}

STABLE_TORCH_LIBRARY_IMPL(lightseq, CUDA, m) { m.impl("fp8_quantise", TORCH_BOX(&fp8_quantise)); }

}  // namespace
}  // namespace lightseq
