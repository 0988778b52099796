// What closes a sublayer, forward: T rows (tokens), C columns (model width).
//
//   sum = residual + dropout(x + bias)
//   y   = (sum - mean) * rstd * gamma + beta       mean and variance over a row's columns
//
//   saved for backward   sum (as it was rounded), mean and rstd (of the sum before it was rounded)
//   bytes moved          x, residual, sum and y, each once
//   determinism          no sum crosses a row, and a row's are added up in a fixed order
//
// A row lives in the registers of a team of threads, so that the variance is that of centred values
// and nothing is read twice. Meanwhile the next rows are on their way (common/layer_norm.cuh). Any
// part may be missing: bias, residual, LayerNorm (gamma and beta), dropout (p == 0).

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <tuple>
#include <type_traits>

#include "common/check.h"
#include "common/columns.cuh"
#include "common/dependent_launch.cuh"
#include "common/layer_norm.cuh"
#include "common/optional.h"

namespace lightseq {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int kFwdGroups = 2;  // of columns, for each thread

template <typename T>
struct FwdParams {
  const T *x, *bias, *residual;  // bias, residual null: none
  const T *gamma, *beta;         // null: no LayerNorm
  T *sum, *y;                    // sum null: it would be x
  float *mean, *rstd;
  int64_t x_stride, residual_stride;
  Rows rows;
  int columns;
  float inverse;  // 1 / columns
  float eps;
  bool drops;  // p > 0
  DropoutFactors dropout;
};

template <typename T, typename S>
__global__ void __launch_bounds__(kBlockThreads, 1)
    dropout_residual_layer_norm_fwd_kernel(const __grid_constant__ FwdParams<T> p) {
  extern __shared__ uint4 shared[];
  __shared__ float sum_rooms[S::kTeams][S::kWarps], square_rooms[S::kTeams][S::kWarps];
  wait_for_previous_kernel();
  RowQueue<T, S, 2> queue(p.rows, {p.x, p.residual}, {p.x_stride, p.residual_stride},
                          p.residual == nullptr ? 1 : 2, p.columns, shared);
  // Rows are few, as in decoding, and all on their way: the next kernel's weights may come, too.
  // Many rows are memory's work to the end, of which the next kernel should take nothing.
  if (p.rows.each == 0) start_next_kernel();
  const Rng rng(p.dropout.dropout.rng);
  Columns<T> bias[S::kGroups] = {}, gamma[S::kGroups] = {}, beta[S::kGroups] = {};
#pragma unroll
  for (int i = 0; i < S::kGroups; ++i) {
    if (S::column(i) >= p.columns) continue;
    if (p.bias != nullptr) bias[i].load(p.bias + S::column(i));
    if (p.gamma == nullptr) continue;
    gamma[i].load(p.gamma + S::column(i));
    beta[i].load(p.beta + S::column(i));
  }

  int64_t row = p.rows.first();
  int64_t output = row * p.columns + S::column(0), output_step = p.rows.step * p.columns;
  keep(output_step);
  for (int left = p.rows.count(); left > 0; --left) {
    queue.wait();
    float total[S::kGroups][kColumnsPerDraw];
    float row_sum = 0.0f;
    const auto add_up = [&](auto drops) {
#pragma unroll
      for (int i = 0; i < S::kGroups; ++i) {
        float term[kColumnsPerDraw];
        queue.get(0, i, total[i]);
        bias[i].unpack(term);
#pragma unroll
        for (int e = 0; e < kColumnsPerDraw; ++e) total[i][e] += term[e];
        if constexpr (drops.value) {
          p.dropout.apply(p.dropout.draw(rng, row, S::column(i) / kColumnsPerDraw), total[i]);
        }
        queue.get(1, i, term);
#pragma unroll
        for (int e = 0; e < kColumnsPerDraw; ++e) {
          total[i][e] += term[e];
          row_sum += total[i][e];
        }
        if (p.sum != nullptr && S::column(i) < p.columns) {
          Columns<T> packed;
          packed.pack(total[i]);
          packed.store(p.sum + output + i * S::kStride);
        }
      }
    };
    if (p.drops) {
      add_up(std::true_type{});
    } else {
      add_up(std::false_type{});
    }
    queue.pop();

    if (p.gamma != nullptr) {
      const float mean = team_sum<S>(row_sum, sum_rooms[threadIdx.y]) * p.inverse;
      float squares = 0.0f;
#pragma unroll
      for (int i = 0; i < S::kGroups; ++i) {
        const float centre = S::column(i) < p.columns ? mean : 0.0f;  // zeros beyond the row's end
#pragma unroll
        for (int e = 0; e < kColumnsPerDraw; ++e) {
          total[i][e] -= centre;
          squares += total[i][e] * total[i][e];
        }
      }
      squares = team_sum<S>(squares, square_rooms[threadIdx.y]);
      const float rstd = rsqrtf(squares * p.inverse + p.eps);
      if (threadIdx.x == 0) {
        p.mean[row] = mean;
        p.rstd[row] = rstd;
      }
#pragma unroll
      for (int i = 0; i < S::kGroups; ++i) {
        float weight[kColumnsPerDraw], shift[kColumnsPerDraw];
        gamma[i].unpack(weight);
        beta[i].unpack(shift);
#pragma unroll
        for (int e = 0; e < kColumnsPerDraw; ++e) {
          total[i][e] = total[i][e] * rstd * weight[e] + shift[e];
        }
        Columns<T> packed;
        packed.pack(total[i]);
        if (S::column(i) < p.columns) packed.store(p.y + output + i * S::kStride);
      }
    }
    row += p.rows.step;
    output += output_step;
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
    FwdParams<T> params{data_of<T>(x),
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
                        {},
                        static_cast<int>(columns),
                        1.0f / static_cast<float>(columns),
                        static_cast<float>(eps),
                        p > 0.0,
                        dropout};
    dispatch_shape<kFwdGroups>(columns, [&](auto shape) {
      using S = decltype(shape);
      const auto kernel = dropout_residual_layer_norm_fwd_kernel<T, S>;
      params.rows = share_out<S>(kernel, rows, RowQueue<T, S, 2>::kRowBytes, 0, device);
      launch_early(op, kernel, dim3(params.rows.blocks), dim3(S::kThreads, S::kTeams),
                   params.rows.shared, current_stream(device), params);
    });
  });
  return {sum, y, mean, rstd};
}

STABLE_TORCH_LIBRARY_IMPL(lightseq, CUDA, m) {
  m.impl("dropout_residual_layer_norm_fwd", TORCH_BOX(&dropout_residual_layer_norm_fwd));
}

}  // namespace
}  // namespace lightseq
