// Cast of a matrix x to E4M3, with its transpose. T rows, C columns.
//
//   values [T, C], transpose [C, P]   x / scale in E4M3
//   amax, saturated                   raised and added to
//   sums [C]                     (+)= column sums of x; optional
//
//   bytes moved   x, values and transpose once: 4 per number of a 16-bit type, as many as a copy
//   determinism   the same bits as the reference, ops/fp8_quantise.py; the order of the column sums
//                 depends only on the sizes
//
// common/fp8_cast.cuh explains the kernel.

#include <optional>
#include <tuple>

#include "common/check.h"
#include "common/column_sum.cuh"
#include "common/fp8_cast.cuh"

namespace lightseq {
namespace {

std::tuple<Tensor, Tensor> fp8_quantise(const Tensor& x, const Tensor& scale, Tensor amax,
                                        Tensor saturated, std::optional<Tensor> sums,
                                        bool accumulate) {
  constexpr const char* kOp = "fp8_quantise";
  check_cast(kOp, "x", x);
  const DeviceGuard guard(x.get_device());
  CastResults results =
      allocate_cast(x, x.size(0), x.size(1), cast_scalars(kOp, scale, amax, saturated));
  Cast& cast = results.cast;
  const Gradients gradients{{gradient_of(kOp, "sums", sums)}};
  const Tensor partials =
      allocate(x, {sums ? cast.tiles_down() : 0, 1, cast.columns}, ScalarType::Float);
  cast.partials = output_of<float>(partials);
  dispatch_float(x.scalar_type(), "fp8_quantise: x", [&](auto zero) {
    using T = decltype(zero);
    dispatch_value<false, true>(sums.has_value(), [&](auto has_sums) {
      const Given<T, has_sums.value> source{.x = data_of<T>(x), .stride = x.stride(0)};
      launch_cast(kOp, source, cast);
    });
  });
  if (sums) add_partials(partials, gradients, accumulate);
  return {results.values, results.transpose};
}

STABLE_TORCH_LIBRARY_IMPL(lightseq, CUDA, m) { m.impl("fp8_quantise", TORCH_BOX(&fp8_quantise)); }

}  // namespace
}  // namespace lightseq
