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

template <typename T>
struct Given {
  static constexpr int kBlocks = 4;
  static constexpr int kRowsAhead = kCastRowsAhead<T>;
  static constexpr bool kSums = false;
  using Row = Columns<T>;
  struct State {
    __device__ __forceinline__ State(const Given&, const Cast&, const CastPlace&, CastTile&) {}
  };

  const T* x;
  int64_t stride;

  __device__ __forceinline__ const T* at(const CastPlace& place, int first) const {
    return x + (place.row() + first) * stride + place.column();
  }
  __device__ __forceinline__ Row load(const T* at, int i) const {
    Row row;
    row.load_cg(at + i * stride);
    return row;
  }

  __device__ __forceinline__ void numbers(const State&, const Row& row, int,
                                          float (&x)[kColumnsPerDraw]) const {
    row.unpack(x);
  }
};

std::tuple<Tensor, Tensor> fp8_quantise(const Tensor& x, const Tensor& scale, Tensor amax,
                                        Tensor saturated) {
  constexpr const char* kOp = "fp8_quantise";
  check_cast(kOp, "x", x);
  const torch::stable::accelerator::DeviceGuard guard(x.get_device());
  const auto results = allocate_cast(x);
  const Cast cast(std::get<0>(results), std::get<1>(results), scale, amax, saturated);
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
