// Transpose in E4M3 of a matrix x, or of values that are E4M3 already, for a product in backward.
// T rows, C columns.
//
//   transpose [C, P]      x / scale in E4M3
//   sums [C]         (+)= of values: column sums of scale * values; optional
//
//   bytes moved   x and transpose once: 3 per number, 2 if x is E4M3
//   determinism   the same bits as fp8_quantise's transpose; the order of the column sums depends
//                 only on the sizes
//
// common/fp8_cast.cuh explains the kernel.

#include <cstdint>
#include <optional>

#include "common/check.h"
#include "common/column_sum.cuh"
#include "common/fp8_cast.cuh"

namespace lightseq {
namespace {

// The source of values in E4M3.
struct Values {
  static constexpr int kBlocks = 4;
  static constexpr int kRowsAhead = 8;
  static constexpr bool kSums = true;
  using Row = uint2;
  struct State {
    float scale;

    __device__ __forceinline__ State(const Values&, const Cast& cast, const CastPlace&, CastTile&)
        : scale(*cast.scale) {}
  };

  const uint8_t* values;
  int64_t stride;

  __device__ __forceinline__ const uint8_t* at(const CastPlace& place, int first) const {
    return values + (place.row() + first) * stride + place.column();
  }
  __device__ __forceinline__ Row load(const uint8_t* at, int i) const {
    return __ldcg(reinterpret_cast<const uint2*>(at + i * stride));
  }
  __device__ __forceinline__ void numbers(const State& state, const Row& row, int,
                                          float (&x)[kColumnsPerDraw]) const {
#pragma unroll
    for (int i = 0; i < kColumnsPerDraw / 2; ++i) {
      const float2 pair = unpack_e4m3((i < 2 ? row.x : row.y) >> i % 2 * 16);
      x[2 * i] = pair.x * state.scale;
      x[2 * i + 1] = pair.y * state.scale;
    }
  }
};

Tensor fp8_transpose(const Tensor& x, const Tensor& scale, std::optional<Tensor> sums,
                     bool accumulate) {
  constexpr const char* kOp = "fp8_transpose";
  check_cast(kOp, "x", x);
  const int64_t rows = x.size(0), columns = x.size(1);
  const DeviceGuard guard(x.get_device());
  CastResults results =
      allocate_cast(x, rows, columns, {.scale = scale.const_data_ptr<float>()}, CastOf::kTranspose);
  Cast& cast = results.cast;
  if (x.scalar_type() == kE4m3) {
    const Gradients gradients{{gradient_of(kOp, "sums", sums)}};
    const Tensor partials =
        allocate(x, {sums ? cast.tiles_down() : 0, 1, columns}, ScalarType::Float);
    cast.partials = output_of<float>(partials);
    const Values source{.values = data_of<uint8_t>(x), .stride = x.stride(0)};
    launch_cast<CastOf::kTranspose>(kOp, source, cast);
    if (sums) add_partials(partials, gradients, accumulate);
    return results.transpose;
  }
  const Given<__nv_bfloat16> source{.x = data_of<__nv_bfloat16>(x), .stride = x.stride(0)};
  launch_cast<CastOf::kTranspose>(kOp, source, cast);
  return results.transpose;
}

STABLE_TORCH_LIBRARY_IMPL(lightseq, CUDA, m) { m.impl("fp8_transpose", TORCH_BOX(&fp8_transpose)); }

}  // namespace
}  // namespace lightseq
