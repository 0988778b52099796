// Transpose in E4M3 of a matrix x, of its LayerNorm, or of values that are E4M3 already, for a
// product in backward. T rows, C columns.
//
//   transpose [C, P]      x / scale, or ((x - mean) * rstd * gamma + beta) / scale, in E4M3
//   sums [C]         (+)= of values: column sums of scale * values; optional
//
//   bytes moved   x and transpose once: 3 per number, 2 if x is E4M3
//   determinism   the same bits as fp8_quantise's transpose, without LayerNorm; the order of the
//                 column sums depends only on the sizes
//
// common/fp8_cast.cuh explains the kernel.

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>

#include "common/check.h"
#include "common/column_sum.cuh"
#include "common/fp8_cast.cuh"
#include "common/optional.h"

namespace lightseq {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using Given16 = Given<__nv_bfloat16>;

// The source of a matrix's LayerNorm.
struct Normalised {
  static constexpr int kBlocks = 3;
  static constexpr int kRowsAhead = Given16::kRowsAhead;
  static constexpr bool kSums = false;

  struct At {
    const __nv_bfloat16* x;
    const float *mean, *rstd;
  };
  struct Row {
    Columns<__nv_bfloat16> x;
    float mean, rstd;
  };
  // Gamma and beta of the thread's columns.
  struct State {
    Columns<__nv_bfloat16> gamma = {}, beta = {};

    __device__ __forceinline__ State(const Normalised& source, const Cast&, const CastPlace& place,
                                     CastTile&) {
      if (place.thread_rows == 0) return;
      gamma.load(source.gamma + place.column());
      beta.load(source.beta + place.column());
    }
  };

  Given16 given;
  const float *mean, *rstd;
  const __nv_bfloat16 *gamma, *beta;

  __device__ __forceinline__ At at(const CastPlace& place, int first) const {
    const int64_t row = place.row() + first;
    return {given.at(place, first), mean + row, rstd + row};
  }
  __device__ __forceinline__ Row load(const At& at, int i) const {
    return {given.load(at.x, i), at.mean[i], at.rstd[i]};
  }
  __device__ __forceinline__ void numbers(const State& state, const Row& row, int,
                                          float (&x)[kColumnsPerDraw]) const {
    float weight[kColumnsPerDraw], shift[kColumnsPerDraw];
    row.x.unpack(x);
    state.gamma.unpack(weight);
    state.beta.unpack(shift);
#pragma unroll
    for (int e = 0; e < kColumnsPerDraw; ++e) {
      x[e] = (x[e] - row.mean) * row.rstd * weight[e] + shift[e];
    }
  }
};

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

Tensor fp8_transpose(const Tensor& x, const Tensor& scale, std::optional<Tensor> mean,
                     std::optional<Tensor> rstd, std::optional<Tensor> gamma,
                     std::optional<Tensor> beta, std::optional<Tensor> sums, bool accumulate) {
  constexpr const char* kOp = "fp8_transpose";
  check_cast(kOp, "x", x);
  require(!mean || (mean->is_contiguous() && rstd->is_contiguous()), kOp,
          ": mean and rstd must be contiguous");
  check_optional_rows(kOp, "gamma", gamma);
  check_optional_rows(kOp, "beta", beta);
  const int64_t rows = x.size(0), columns = x.size(1);
  const torch::stable::accelerator::DeviceGuard guard(x.get_device());
  const cudaStream_t stream = current_stream(x.get_device());
  const Tensor transpose = std::get<1>(allocate_cast(x, rows, columns, CastOf::kTranspose));
  Cast cast{.values = nullptr,
            .transpose = output_of<uint8_t>(transpose),
            .scale = scale.const_data_ptr<float>(),
            .amax = nullptr,
            .saturated = nullptr,
            .rows = rows,
            .columns = columns,
            .pitch = cast_pitch(rows),
            .tiles_across = static_cast<unsigned>(blocks_for(columns, kCastTile))};
  if (x.scalar_type() == kE4m3) {
    const Gradients gradients{{gradient_of(kOp, "sums", sums)}};
    const Tensor partials =
        allocate(x, {sums ? cast.tiles_down() : 0, 1, columns}, ScalarType::Float);
    if (sums) cast.partials = partials.mutable_data_ptr<float>();
    const Values source{.values = static_cast<const uint8_t*>(x.const_data_ptr()),
                        .stride = x.stride(0)};
    launch_cast<CastOf::kTranspose>(kOp, source, cast, stream);
    if (sums) add_partials(partials, gradients, accumulate, stream);
    return transpose;
  }
  const Given16 given{.x = data_of<__nv_bfloat16>(x), .stride = x.stride(0)};
  if (gamma) {
    const Normalised source{.given = given,
                            .mean = data_of<float>(mean),
                            .rstd = data_of<float>(rstd),
                            .gamma = data_of<__nv_bfloat16>(gamma),
                            .beta = data_of<__nv_bfloat16>(beta)};
    launch_cast<CastOf::kTranspose>(kOp, source, cast, stream);
  } else {
    launch_cast<CastOf::kTranspose>(kOp, given, cast, stream);
  }
  return transpose;
}

STABLE_TORCH_LIBRARY_IMPL(lightseq, CUDA, m) { m.impl("fp8_transpose", TORCH_BOX(&fp8_transpose)); }

}  // namespace
}  // namespace lightseq
