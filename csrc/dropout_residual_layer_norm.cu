// What closes a sublayer, forward: T rows (tokens), C columns (model width).
//
//   sum = residual + dropout(x + bias)
//   y   = (sum - mean) * rstd * gamma + beta       mean and variance over a row's columns
//
//   saved for backward   sum (as it was rounded), mean and rstd (of the sum before it was rounded)
//   bytes moved          x, residual, sum and y, each once
//   determinism          no sum crosses a row, and a row's are added up in a fixed order
//
// A row lives in the registers of a warp, or of a block where C > 1024, so that the variance is
// that of centred values and nothing is read twice. Any part may be missing: bias, residual,
// LayerNorm (gamma and beta), dropout (p == 0).

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <tuple>
#include <type_traits>

#include "common/check.h"
#include "common/columns.cuh"
#include "common/layer_norm.cuh"
#include "common/optional.h"

namespace lightseq {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// Threads of a multiprocessor: more would not leave enough registers for a row.
template <typename T>
constexpr int kFwdThreads = sizeof(T) == 4 ? 512 : 768;

// Rows side by side in a block.
template <typename S>
constexpr int kFwdRows = S::kThreads == kWarp ? 4 : 1;

template <typename T>
struct FwdParams {
  const T *x, *bias, *residual;  // bias, residual null: none
  const T *gamma, *beta;         // null: no LayerNorm
  T *sum, *y;                    // sum null: it would be x
  float *mean, *rstd;
  int64_t x_stride, residual_stride;
  int64_t rows;
  int columns;
  float eps;
  bool drops;  // p > 0
  DropoutFactors dropout;
};

template <typename T, typename S>
__global__ void __launch_bounds__(S::kThreads* kFwdRows<S>,
                                  kFwdThreads<T> / (S::kThreads * kFwdRows<S>))
    dropout_residual_layer_norm_fwd_kernel(FwdParams<T> p) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kFwdRows<S> + threadIdx.y;
  if (row >= p.rows) return;  // a whole warp, or a whole block
  const T* const x_row = p.x + row * p.x_stride + S::column(0);
  const T* const residual_row = p.residual + row * p.residual_stride + S::column(0);
  T* const sum_row = p.sum + row * p.columns + S::column(0);
  T* const y_row = p.y + row * p.columns + S::column(0);
  Columns<T> x[S::kGroups] = {}, residual[S::kGroups] = {};
#pragma unroll
  for (int i = 0; i < S::kGroups; ++i) {
    if (S::column(i) >= p.columns) continue;
    x[i].load_streaming(x_row + i * S::kStride);
    if (p.residual != nullptr) residual[i].load_streaming(residual_row + i * S::kStride);
  }
  const Rng rng(p.dropout.dropout.rng);

  float total[S::kGroups][kColumnsPerDraw];
  float row_sum = 0.0f;
  const auto add_up = [&](auto drops) {
#pragma unroll
    for (int i = 0; i < S::kGroups; ++i) {
      const int column = S::column(i);
      float term[kColumnsPerDraw];
      Columns<T> bias = {};
      if (p.bias != nullptr && column < p.columns) bias.load(p.bias + column);
      bias.unpack(term);
      x[i].unpack(total[i]);
#pragma unroll
      for (int e = 0; e < kColumnsPerDraw; ++e) total[i][e] += term[e];
      if constexpr (drops.value) {
        p.dropout.apply(p.dropout.draw(rng, row, column / kColumnsPerDraw), total[i]);
      }
      residual[i].unpack(term);
#pragma unroll
      for (int e = 0; e < kColumnsPerDraw; ++e) {
        total[i][e] += term[e];
        row_sum += total[i][e];
      }
      x[i].pack(total[i]);
      if (p.sum != nullptr && column < p.columns) x[i].store(sum_row + i * S::kStride);
    }
  };
  if (p.drops) {
    add_up(std::true_type{});
  } else {
    add_up(std::false_type{});
  }
  if (p.gamma == nullptr) return;

  const float mean = block_reduce<S::kThreads>(row_sum, Sum{}) / p.columns;
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < S::kGroups; ++i) {
    const float centre = S::column(i) < p.columns ? mean : 0.0f;  // nothing beyond the row's end
#pragma unroll
    for (int e = 0; e < kColumnsPerDraw; ++e) {
      total[i][e] -= centre;
      squares += total[i][e] * total[i][e];
    }
  }
  const float rstd = rsqrtf(block_reduce<S::kThreads>(squares, Sum{}) / p.columns + p.eps);
  if (threadIdx.x == 0) {
    p.mean[row] = mean;
    p.rstd[row] = rstd;
  }
#pragma unroll
  for (int i = 0; i < S::kGroups; ++i) {
    const int column = S::column(i);
    if (column >= p.columns) continue;
    Columns<T> packed;
    float gamma[kColumnsPerDraw], beta[kColumnsPerDraw];
    packed.load(p.gamma + column);
    packed.unpack(gamma);
    packed.load(p.beta + column);
    packed.unpack(beta);
#pragma unroll
    for (int e = 0; e < kColumnsPerDraw; ++e) {
      total[i][e] = total[i][e] * rstd * gamma[e] + beta[e];
    }
    packed.pack(total[i]);
    packed.store(y_row + i * S::kStride);
  }
}

std::tuple<Tensor, Tensor, Tensor, Tensor> dropout_residual_layer_norm_fwd(
    const Tensor& x, std::optional<Tensor> bias, std::optional<Tensor> residual,
    std::optional<Tensor> gamma, std::optional<Tensor> beta, double p, const Tensor& rng,
    int64_t site, double eps) {
  const char* const op = "dropout_residual_layer_norm_fwd";
  check_rows(op, "x", x);
  check_optional_rows(op, "residual", residual);
  check_optional_rows(op, "bias", bias);
  check_optional_rows(op, "gamma", gamma);
  check_optional_rows(op, "beta", beta);
  const int64_t rows = x.size(0), columns = x.size(1);
  check_width(op, columns);
  const bool makes_sum = bias.has_value() || residual.has_value() || p > 0.0;
  const bool makes_y = gamma.has_value();
  Tensor sum = empty_rows(x, makes_sum);
  Tensor y = empty_rows(x, makes_y);
  Tensor mean = allocate(x, {makes_y ? rows : 0}, ScalarType::Float);
  Tensor rstd = allocate(x, {makes_y ? rows : 0}, ScalarType::Float);
  if (sum.numel() == 0 && y.numel() == 0) return {sum, y, mean, rstd};

  const int32_t device = x.get_device();
  const torch::stable::accelerator::DeviceGuard guard(device);
  const DropoutFactors dropout(rng.const_data_ptr<int64_t>(), site, p);
  dispatch_float(x.scalar_type(), "dropout_residual_layer_norm_fwd: x", [&](auto zero) {
    using T = decltype(zero);
    const FwdParams<T> params{data_of<T>(x),
                              data_of<T>(bias),
                              data_of<T>(residual),
                              data_of<T>(gamma),
                              data_of<T>(beta),
                              output_of<T>(sum),
                              output_of<T>(y),
                              output_of<float>(mean),
                              output_of<float>(rstd),
                              x.stride(0),
                              stride_of(residual),
                              rows,
                              static_cast<int>(columns),
                              static_cast<float>(eps),
                              p > 0.0,
                              dropout};
    dispatch_shape(columns, [&](auto shape) {
      using S = decltype(shape);
      dropout_residual_layer_norm_fwd_kernel<T, S>
          <<<blocks_for(rows, kFwdRows<S>), dim3(S::kThreads, kFwdRows<S>), 0,
             current_stream(device)>>>(params);
    });
  });
  check_launch(op);
  return {sum, y, mean, rstd};
}

STABLE_TORCH_LIBRARY_IMPL(lightseq, CUDA, m) {
  m.impl("dropout_residual_layer_norm_fwd", TORCH_BOX(&dropout_residual_layer_norm_fwd));
}

}  // namespace
}  // namespace lightseq
