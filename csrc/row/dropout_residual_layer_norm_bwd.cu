// The end of a sublayer (dropout, residual, LayerNorm), backward. T rows (tokens), C columns (model
// width).
//
//   dresidual = rstd * (g - mean(g) - n * mean(g * n)) + dsum
//               where g = dy * gamma, n = (sum - mean) * rstd, and mean(.) is over a row
//   dx        = dropout(dresidual)                 forward's dropout bits, generated again
//   values, transpose = dx / scale in E4M3, with a cast; dx itself is not written then
//   dgamma, dbeta, dbias = column sums of dy * n, dy, dx
//
//   bytes moved     dy, dsum, sum, dresidual and dx, each once; three rows of sums per block
//   determinism     the order of every sum depends only on the sizes
//
// layer_norm.cuh explains how rows are distributed among teams of threads. A thread holds
// its part of the three column sums in registers; at the end the teams of a block add their parts
// in shared memory. Optional: dy (missing if there was no LayerNorm) or dsum, dropout (p == 0:
// none), and each of the column sums.
//
// embedding_layer_norm_bwd is the same with dropout after LayerNorm: dropout(dy) takes the place of
// dy, and dresidual is the result.

#include <optional>
#include <tuple>
#include <type_traits>

#include "common/check.h"
#include "common/column_sum.cuh"
#include "common/columns.cuh"
#include "common/launch.cuh"
#include "row/fp8_rows.cuh"
#include "row/layer_norm.cuh"

namespace lightseq {
namespace {

constexpr int kBwdGroups = 1;  // groups of columns per thread; more need too many registers

template <typename T>
struct BwdParams {
  // dy, dsum null: missing; sum and gamma are read only with dy
  const T *dy, *dsum = nullptr, *sum, *gamma;
  const float *mean, *rstd;
  T *dx = nullptr, *dresidual;  // dx null: it equals dresidual
  float* partials =
      nullptr;  // [gridDim.x, 3, columns] column sums for dgamma, dbeta, dbias; null: none
  int64_t dy_stride, dsum_stride = 0, sum_stride;
  Rows rows = {};
  int columns;
  float inverse;  // 1 / columns
  DropoutFactors dropout;
};

template <typename T, typename S, bool kHasDy, bool kHasDsum, bool kCasts>
using BwdQueue = RowQueue<T, S, 2 * kHasDy + kHasDsum, kCasts>;

template <typename T, typename S, bool kHasDy, bool kHasDsum, bool kCasts>
__device__ __forceinline__ BwdQueue<T, S, kHasDy, kHasDsum, kCasts> queue_of(const BwdParams<T>& p,
                                                                             void* shared) {
  constexpr int kInputs = 2 * kHasDy + kHasDsum;
  if constexpr (kHasDy && kHasDsum) {
    return {p.rows,
            {p.dy, p.sum, p.dsum},
            {p.dy_stride, p.sum_stride, p.dsum_stride},
            kInputs,
            p.columns,
            shared};
  } else if constexpr (kHasDy) {
    return {p.rows, {p.dy, p.sum}, {p.dy_stride, p.sum_stride}, kInputs, p.columns, shared};
  } else {
    return {p.rows, {p.dsum}, {p.dsum_stride}, kInputs, p.columns, shared};
  }
}

enum class BwdKind { kPlain, kDropsDy, kCasts };
struct NoCast {};

// kDropsDy: dropout is after LayerNorm. kCasts: dx is cast; `cast` is read only then.
template <typename T, typename S, bool kHasDy, bool kHasDsum, BwdKind kKind>
__global__ void __launch_bounds__(kBlockThreads, 1)
    dropout_residual_layer_norm_bwd_kernel(const __grid_constant__ BwdParams<T> p,
                                           const __grid_constant__ Cast cast) {
  constexpr bool kDropsDy = kKind == BwdKind::kDropsDy, kCasts = kKind == BwdKind::kCasts;
  extern __shared__ uint4 shared[];
  __shared__ float2 rooms[2][S::kTeams][S::kWarps];
  griddepcontrol_wait();
  // Two groups of floats would need sixteen registers, too many in the kernel for wide rows.
  constexpr bool kHoldsGamma = S::kGroups * sizeof(T) < 2 * sizeof(float);
  auto queue = queue_of<T, S, kHasDy, kHasDsum, kCasts>(p, shared);
  int64_t row = p.rows.template first<S, kCasts>();
  int left = p.rows.template count<S, kCasts>();
  float next_mean = 0.0f, next_rstd = 0.0f;
  Columns<T> gamma[S::kGroups] = {};
  if constexpr (kHasDy) {
    if (left > 0 && (!kCasts || row < p.rows.all)) {
      next_mean = p.mean[row];
      next_rstd = p.rstd[row];
    }
#pragma unroll
    for (int i = 0; i < S::kGroups; ++i) {
      if (kHoldsGamma && S::column(i) < p.columns) gamma[i].load(p.gamma + S::column(i));
    }
  }
  const Rng rng(p.dropout.dropout.rng);
  float dgamma[S::kGroups][kColumnsPerDraw] = {};
  float dbeta[S::kGroups][kColumnsPerDraw] = {};
  float dbias[S::kGroups][kColumnsPerDraw] = {};
  int64_t output = row * p.columns + S::column(0), output_step = p.rows.step * p.columns;
  keep(output_step);
  auto rows_cast = [&] {
    if constexpr (kCasts) return RowCast<S>(cast, reinterpret_cast<char*>(shared) + p.rows.tile);
    if constexpr (!kCasts) return NoCast{};
  }();
  griddepcontrol_launch_dependents();  // the next kernel can use the registers that are free here

  for (int round = 0; left > 0; --left) {
    const float mean = next_mean, rstd = next_rstd;
    const int64_t next_row = p.rows.template next<S, kCasts>(row, round);
    if (kHasDy && left > 1 && (!kCasts || next_row < p.rows.all)) {
      next_mean = p.mean[next_row];
      next_rstd = p.rstd[next_row];
    }
    queue.wait();
    if (!kCasts || row < p.rows.all) {
      // With c = sum - mean and g = dy * gamma: dresidual = rstd * g - shift - slope * c.
      float shift = 0.0f, slope = 0.0f;
      float g[S::kGroups][kColumnsPerDraw] = {}, c[S::kGroups][kColumnsPerDraw];
      if constexpr (kHasDy) {
        float2 sums = {};  // sums of g and of g * c
#pragma unroll
        for (int i = 0; i < S::kGroups; ++i) {
          float weight[kColumnsPerDraw];
          if constexpr (!kHoldsGamma) {
            gamma[i].load(p.gamma + min(S::column(i), p.columns - kColumnsPerDraw));
          }
          gamma[i].unpack(weight);
          queue.get(0, i, g[i]);
          queue.get(1, i, c[i]);
          if constexpr (kDropsDy) {
            p.dropout.apply(p.dropout.draw(rng, row, S::column(i) / kColumnsPerDraw), g[i]);
          }
#pragma unroll
          for (int e = 0; e < kColumnsPerDraw; ++e) {
            c[i][e] -= mean;
            dgamma[i][e] += g[i][e] * c[i][e] * rstd;
            dbeta[i][e] += g[i][e];
            g[i][e] *= weight[e];
            sums.x += g[i][e];
            sums.y += g[i][e] * c[i][e];
          }
        }
        sums = team_sum<S>(sums, rooms[left % 2][threadIdx.y]);
        shift = rstd * sums.x * p.inverse;
        slope = rstd * rstd * (rstd * sums.y) * p.inverse;
      }
      const auto finish = [&](auto drops) {
#pragma unroll
        for (int i = 0; i < S::kGroups; ++i) {
          float (&d)[kColumnsPerDraw] = g[i];
          if constexpr (kHasDy) {
            if constexpr (S::kGroups > 1) {  // too many to keep in registers: read c again
              queue.get(1, i, c[i]);
#pragma unroll
              for (int e = 0; e < kColumnsPerDraw; ++e) c[i][e] -= mean;
            }
#pragma unroll
            for (int e = 0; e < kColumnsPerDraw; ++e) d[e] = rstd * d[e] - shift - slope * c[i][e];
          }
          if constexpr (kHasDsum) {
            float term[kColumnsPerDraw];
            queue.get(2 * kHasDy, i, term);
#pragma unroll
            for (int e = 0; e < kColumnsPerDraw; ++e) d[e] += term[e];
          }
          const bool is_inside = S::column(i) < p.columns;
          Columns<T> packed;
          packed.pack(d);
          if (is_inside) packed.store(p.dresidual + output + i * S::kStride);
          if constexpr (drops.value) {
            p.dropout.apply(p.dropout.draw(rng, row, S::column(i) / kColumnsPerDraw), d);
            packed.pack(d);
            if (!kCasts && is_inside) packed.store(p.dx + output + i * S::kStride);
          }
          if constexpr (!kDropsDy) {  // otherwise there is no bias, and registers are few
#pragma unroll
            for (int e = 0; e < kColumnsPerDraw; ++e) dbias[i][e] += d[e];
          }
          if constexpr (kCasts) rows_cast.put(row, i, d);
        }
      };
      if (!kDropsDy && (kCasts ? p.dropout.drops() : p.dx != nullptr)) {
        finish(std::true_type{});
      } else {
        finish(std::false_type{});
      }
    }
    queue.pop();
    if constexpr (kCasts) {
      if (row >= p.rows.all) rows_cast.put_zeros(row);
      if (round == S::kRounds - 1) rows_cast.finish_chunk(row);
      round = (round + 1) % S::kRounds;
      output += (next_row - row) * p.columns;
    } else {
      output += output_step;
    }
    row = next_row;
  }
  if constexpr (kCasts) rows_cast.add_statistics();
  if (p.partials == nullptr) return;

  // Add the sums of the block's teams in shared memory. Layout: [team, kind of sum, column].
  float* const partials = p.partials + int64_t{kMaxSums} * blockIdx.x * p.columns;
  float* const room = reinterpret_cast<float*>(shared) + threadIdx.y * kMaxSums * p.columns;
  float* const target = S::kTeams == 1 ? partials : room;
  __syncthreads();
#pragma unroll
  for (int i = 0; i < S::kGroups; ++i) {
    if (S::column(i) >= p.columns) continue;
    float* const at = target + S::column(i);
#pragma unroll
    for (int e = 0; e < kColumnsPerDraw; e += 4) {
      const auto store4 = [&](float* to, const float* from) {
        *reinterpret_cast<float4*>(to) = make_float4(from[0], from[1], from[2], from[3]);
      };
      store4(at + e, dgamma[i] + e);
      store4(at + p.columns + e, dbeta[i] + e);
      store4(at + 2 * p.columns + e, dbias[i] + e);
    }
  }
  if constexpr (S::kTeams > 1) {
    __syncthreads();
    const float4* const sums = reinterpret_cast<const float4*>(shared);
    const int all = kMaxSums * p.columns / 4;
    for (int i = threadIdx.y * S::kThreads + threadIdx.x; i < all; i += kBlockThreads) {
      float4 total = sums[i];
#pragma unroll
      for (int team = 1; team < S::kTeams; ++team) {
        const float4 sum = sums[team * all + i];
        total.x += sum.x;
        total.y += sum.y;
        total.z += sum.z;
        total.w += sum.w;
      }
      reinterpret_cast<float4*>(partials)[i] = total;
    }
  }
}

// Assigns rows to teams, allocates partial sums, launches, and computes the column sums.
template <typename T, typename S, bool kHasDy, bool kHasDsum, BwdKind kKind>
void launch_bwd(const char* op, BwdParams<T> params, const Tensor& grad, const Gradients& gradients,
                bool accumulate, const Cast& cast = {}) {
  constexpr bool kCasts = kKind == BwdKind::kCasts;
  const auto kernel = dropout_residual_layer_norm_bwd_kernel<T, S, kHasDy, kHasDsum, kKind>;
  using Queue = BwdQueue<T, S, kHasDy, kHasDsum, kCasts>;
  const int32_t device = grad.get_device();
  if constexpr (kCasts && S::kHasSmallChunks) {
    if (!chunks_fit<S, Queue>(kernel, device)) {
      return launch_bwd<T, typename S::SmallChunks, kHasDy, kHasDsum, kKind>(
          op, params, grad, gradients, accumulate, cast);
    }
  }
  const int64_t columns = params.columns;
  const bool sums = gradients.of[0].data != nullptr || gradients.of[1].data != nullptr ||
                    gradients.of[2].data != nullptr;
  constexpr int kSumBytes =
      S::kTeams == 1 ? 0 : S::kTeams * kMaxSums * S::kColumns * static_cast<int>(sizeof(float));
  params.rows = share_out<S, kCasts, Queue, kSumBytes>(kernel, grad.size(0), device);
  const int64_t blocks = params.rows.blocks;
  Tensor partials = allocate(grad, {sums ? blocks : 0, kMaxSums, columns}, ScalarType::Float);
  params.partials = output_of<float>(partials);
  if (blocks > 0 && columns > 0) {
    launch({.op = op,
            .grid = params.rows.blocks,
            .block = dim3(S::kThreads, S::kTeams),
            .shared = static_cast<size_t>(params.rows.shared),
            .dependent = true},
           kernel, params, cast);
  }
  if (sums) add_partials(partials, gradients, accumulate);
}

// dx, dresidual and the transpose of dx. With a cast, dx is its values.
std::tuple<Tensor, Tensor, Tensor> dropout_residual_layer_norm_bwd(
    std::optional<Tensor> dy, std::optional<Tensor> dsum, const Tensor& sum,
    std::optional<Tensor> gamma, const Tensor& mean, const Tensor& rstd, double p,
    const Tensor& rng, int64_t site, std::optional<Tensor> dgamma, std::optional<Tensor> dbeta,
    std::optional<Tensor> dbias, bool accumulate, std::optional<Tensor> cast_scale,
    std::optional<Tensor> cast_amax, std::optional<Tensor> cast_saturated) {
  constexpr const char* op = "dropout_residual_layer_norm_bwd";
  const CastScalars scalars = cast_scalars(op, cast_scale, cast_amax, cast_saturated);
  check_optional_rows(op, "dy", dy);
  check_optional_rows(op, "dsum", dsum);
  if (dy.has_value()) {
    check_rows(op, "sum", sum);
    check_optional_rows(op, "gamma", gamma);
    require(mean.is_contiguous() && rstd.is_contiguous(), op, ": mean and rstd must be contiguous");
  }
  Gradients gradients{{{}, {}, gradient_of(op, "dbias", dbias)}};
  if (dy.has_value()) {  // otherwise there was no LayerNorm, so its parameters have no gradient
    gradients.of[0] = gradient_of(op, "dgamma", dgamma);
    gradients.of[1] = gradient_of(op, "dbeta", dbeta);
  }
  const Tensor& grad = dy.has_value() ? *dy : *dsum;
  if (scalars.are_given()) check_cast(op, dy.has_value() ? "dy" : "dsum", grad);
  const int64_t columns = grad.size(1);
  check_width(op, columns);
  const CastResults results = allocate_cast(grad, grad.size(0), columns, scalars);
  Tensor dx = empty_rows(grad, p > 0.0 && !scalars.are_given());
  Tensor dresidual = empty_rows(grad, true);

  const DeviceGuard guard(grad.get_device());
  const DropoutFactors dropout(rng.const_data_ptr<int64_t>(), site, p);
  dispatch_float(grad.scalar_type(), "dropout_residual_layer_norm_bwd: dy", [&](auto zero) {
    using T = decltype(zero);
    const BwdParams<T> params{.dy = data_of<T>(dy),
                              .dsum = data_of<T>(dsum),
                              .sum = data_of<T>(sum),
                              .gamma = data_of<T>(gamma),
                              .mean = data_of<float>(mean),
                              .rstd = data_of<float>(rstd),
                              .dx = output_of<T>(dx),
                              .dresidual = output_of<T>(dresidual),
                              .dy_stride = stride_of(dy),
                              .dsum_stride = stride_of(dsum),
                              .sum_stride = dy.has_value() ? sum.stride(0) : 0,
                              .columns = static_cast<int>(columns),
                              .inverse = 1.0f / static_cast<float>(columns),
                              .dropout = dropout};
    dispatch_shape<kBwdGroups>(columns, [&](auto shape) {
      using S = decltype(shape);
      const auto run = [&](auto kind, const Cast& to) {
        constexpr BwdKind kKind = kind.value;
        if (!dsum.has_value()) {
          launch_bwd<T, S, true, false, kKind>(op, params, grad, gradients, accumulate, to);
        } else if (dy.has_value()) {
          launch_bwd<T, S, true, true, kKind>(op, params, grad, gradients, accumulate, to);
        } else {
          launch_bwd<T, S, false, true, kKind>(op, params, grad, gradients, accumulate, to);
        }
      };
      if constexpr (std::is_same_v<T, __nv_bfloat16>) {
        if (results.cast.values != nullptr) {
          return run(std::integral_constant<BwdKind, BwdKind::kCasts>{}, results.cast);
        }
      }
      run(std::integral_constant<BwdKind, BwdKind::kPlain>{}, {});
    });
  });
  return {scalars.are_given() ? results.values : dx, dresidual, results.transpose};
}

Tensor embedding_layer_norm_bwd(const Tensor& dy, const Tensor& x, const Tensor& gamma,
                                const Tensor& mean, const Tensor& rstd, double p, const Tensor& rng,
                                int64_t site, std::optional<Tensor> dgamma,
                                std::optional<Tensor> dbeta, bool accumulate) {
  const char* const op = "embedding_layer_norm_bwd";
  check_rows(op, "dy", dy);
  check_rows(op, "x", x);
  check_rows(op, "gamma", gamma);
  require(mean.is_contiguous() && rstd.is_contiguous(), op, ": mean and rstd must be contiguous");
  const Gradients gradients{
      {gradient_of(op, "dgamma", dgamma), gradient_of(op, "dbeta", dbeta), {}}};
  const int64_t columns = dy.size(1);
  check_width(op, columns);
  Tensor dx = empty_rows(dy, true);

  const DeviceGuard guard(dy.get_device());
  const DropoutFactors dropout(rng.const_data_ptr<int64_t>(), site, p);
  dispatch_float(dy.scalar_type(), "embedding_layer_norm_bwd: dy", [&](auto zero) {
    using T = decltype(zero);
    const BwdParams<T> params{.dy = data_of<T>(dy),
                              .sum = data_of<T>(x),
                              .gamma = data_of<T>(gamma),
                              .mean = data_of<float>(mean),
                              .rstd = data_of<float>(rstd),
                              .dresidual = output_of<T>(dx),
                              .dy_stride = dy.stride(0),
                              .sum_stride = x.stride(0),
                              .columns = static_cast<int>(columns),
                              .inverse = 1.0f / static_cast<float>(columns),
                              .dropout = dropout};
    dispatch_shape<kBwdGroups>(columns, [&](auto shape) {
      launch_bwd<T, decltype(shape), true, false, BwdKind::kDropsDy>(op, params, dy, gradients,
                                                                     accumulate);
    });
  });
  return dx;
}

STABLE_TORCH_LIBRARY_IMPL(lightseq, CUDA, m) {
  m.impl("embedding_layer_norm_bwd", TORCH_BOX(&embedding_layer_norm_bwd));
  m.impl("dropout_residual_layer_norm_bwd", TORCH_BOX(&dropout_residual_layer_norm_bwd));
}

}  // namespace
}  // namespace lightseq
