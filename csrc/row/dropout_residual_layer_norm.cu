// The end of a sublayer (dropout, residual, LayerNorm), forward. T rows (tokens), C columns (model
// width).
//
//   sum = residual + dropout(x + bias)
//   y   = (sum - mean) * rstd * gamma + beta       mean and variance over a row's columns
//
//   values, transpose = y / scale in E4M3, with a cast
//
//   saved for backward   sum (rounded), and mean and rstd (of the sum before rounding)
//   bytes moved          x, residual, sum and y, each once
//   determinism          all sums are over one row, in a fixed order
//
// A team of threads holds a row in registers. So the variance can be computed from centred values,
// and nothing is read twice. Meanwhile the next rows are being copied (layer_norm.cuh).
// Optional: bias, residual, LayerNorm (gamma), beta, dropout (p == 0: none).
//
// If there are so few rows that no team has more than one, as in a decode step, all data are in L2
// except the weights, and the time is mostly latency. For this case a separate kernel loads rows
// directly to registers, prefetches the weights before the previous kernel has ended, and lets the
// next kernel start. Teams and the order of sums are the same, so a row has the same bits.
//
// With a cast there is only the first kernel, because training has many rows.

#include <optional>
#include <tuple>
#include <type_traits>

#include "common/check.h"
#include "common/columns.cuh"
#include "common/launch.cuh"
#include "common/prefetch.cuh"
#include "row/fp8_rows.cuh"
#include "row/layer_norm.cuh"

namespace lightseq {
namespace {

constexpr int kFwdGroups = 2;  // groups of columns per thread

// Resident blocks per SM of the kernel for few rows: as many as the registers allow.
template <typename T>
constexpr int kSideBySide = sizeof(T) == sizeof(float) ? 1 : 2;

template <typename T>
struct FwdParams {
  const T *x, *bias, *residual;  // bias, residual null: missing
  const T *gamma, *beta;         // gamma null: no LayerNorm; beta null: zeros
  T *sum, *y;                    // sum null: it equals x; y null: not stored
  float *mean, *rstd;
  int64_t x_stride, residual_stride;
  Rows rows;
  int columns;
  float inverse;  // 1 / columns
  float eps;
  bool drops;  // p > 0
  DropoutFactors dropout;
};

// Bias, gamma and beta of a thread's columns.
template <typename T, typename S>
struct Weights {
  Columns<T> bias[S::kGroups] = {}, gamma[S::kGroups] = {}, beta[S::kGroups] = {};

  __device__ __forceinline__ explicit Weights(const FwdParams<T>& p) {
#pragma unroll
    for (int i = 0; i < S::kGroups; ++i) {
      if (S::column(i) >= p.columns) continue;
      if (p.bias != nullptr) bias[i].load(p.bias + S::column(i));
      if (p.gamma == nullptr) continue;
      gamma[i].load(p.gamma + S::column(i));
      if (p.beta != nullptr) beta[i].load(p.beta + S::column(i));
    }
  }
};

// Processes one row of a team. output: index of the thread's first result in sum and y. get(k, i,
// x): reads this thread's i-th group of x (k = 0) or residual (k = 1), zeros if it does not exist.
// done(): called when both have been read. put(i, x): gets the i-th group of y, and may change it.
template <typename T, typename S, typename Get, typename Done, typename Put>
__device__ __forceinline__ void close_row(const FwdParams<T>& p, const Weights<T, S>& weights,
                                          const Rng& rng, int64_t row, int64_t output, Get&& get,
                                          Done&& done, Put&& put) {
  float total[S::kGroups][kColumnsPerDraw];
  float row_sum = 0.0f;
  const auto add_up = [&](auto drops) {
#pragma unroll
    for (int i = 0; i < S::kGroups; ++i) {
      float term[kColumnsPerDraw];
      get(0, i, total[i]);
      weights.bias[i].unpack(term);
#pragma unroll
      for (int e = 0; e < kColumnsPerDraw; ++e) total[i][e] += term[e];
      if constexpr (drops.value) {
        p.dropout.apply(p.dropout.draw(rng, row, S::column(i) / kColumnsPerDraw), total[i]);
      }
      get(1, i, term);
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
  done();
  if (p.gamma == nullptr) return;

  const float2 statistics =
      normalize_row<T, S>(total, row_sum, weights.gamma, weights.beta, p.columns, p.inverse, p.eps);
  if (threadIdx.x == 0) {
    p.mean[row] = statistics.x;
    p.rstd[row] = statistics.y;
  }
#pragma unroll
  for (int i = 0; i < S::kGroups; ++i) {
    if (p.y != nullptr && S::column(i) < p.columns) {
      Columns<T> packed;
      packed.pack(total[i]);
      packed.store(p.y + output + i * S::kStride);
    }
    put(i, total[i]);
  }
}

// For many rows. The kernel is limited by memory until its end, so it does not let the next kernel
// start early, which would compete for memory. kCasts: y is also cast; `cast` is read only then.
template <typename T, typename S, bool kCasts>
__global__ void __launch_bounds__(kBlockThreads, 1)
    dropout_residual_layer_norm_fwd_kernel(const __grid_constant__ FwdParams<T> p,
                                           const __grid_constant__ Cast cast) {
  extern __shared__ uint4 shared[];
  griddepcontrol_wait();
  RowQueue<T, S, 2, kCasts> queue(p.rows, {p.x, p.residual}, {p.x_stride, p.residual_stride},
                                  p.residual == nullptr ? 1 : 2, p.columns, shared);
  const Rng rng(p.dropout.dropout.rng);
  const Weights<T, S> weights(p);
  int64_t row = p.rows.template first<S, kCasts>();
  int left = p.rows.template count<S, kCasts>();
  const auto close = [&](int64_t output, auto&& put) {
    close_row(
        p, weights, rng, row, output,
        [&](int k, int i, float (&x)[kColumnsPerDraw]) { queue.get(k, i, x); },
        [&] { queue.pop(); }, put);
  };
  if constexpr (kCasts) {
    RowCast<S> y(cast, reinterpret_cast<char*>(shared) + p.rows.tile);
    for (int round = 0; left > 0; --left) {
      queue.wait();
      if (row < p.rows.all) {
        close(row * p.columns + S::column(0),
              [&](int i, float (&x)[kColumnsPerDraw]) { y.put(row, i, x); });
      } else {
        queue.pop();
        y.put_zeros(row);
      }
      if (round == S::kRounds - 1) y.finish_chunk(row);
      row = p.rows.template next<S, true>(row, round);
      round = (round + 1) % S::kRounds;
    }
    y.add_statistics();
  } else {
    int64_t output = row * p.columns + S::column(0), output_step = p.rows.step * p.columns;
    keep(output_step);
    for (; left > 0; --left) {
      queue.wait();
      close(output, [](int, float (&)[kColumnsPerDraw]) {});
      row += p.rows.step;
      output += output_step;
    }
  }
}

// For few rows, one per team. All loads are in flight at once, so the next kernel may start and
// load its weights.
template <typename T, typename S>
__global__ void __launch_bounds__(kBlockThreads, kSideBySide<T>)
    dropout_residual_layer_norm_fwd_few_rows_kernel(const __grid_constant__ FwdParams<T> p) {
  if (p.rows.template count<S>() == 0) return;
  // There are so few rows that 32 bits suffice for indices.
  const int row = static_cast<int>(p.rows.template first<S>());
  const T* const x = p.x + row * p.x_stride + S::column(0);
  const T* const residual = p.residual + row * p.residual_stride + S::column(0);
  uint32_t output = row * p.columns + S::column(0);
  keep(output);
  if (row == 0 && threadIdx.x == 0) {
    for (const T* const vector : {p.bias, p.gamma, p.beta}) {
      if (vector != nullptr) prefetch(vector, p.columns * static_cast<int>(sizeof(T)));
    }
  }
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  Columns<T> inputs[2][S::kGroups] = {};
#pragma unroll
  for (int i = 0; i < S::kGroups; ++i) {
    if (S::column(i) >= p.columns) continue;
    inputs[0][i].load_cg(x + i * S::kStride);
    if (p.residual != nullptr) inputs[1][i].load_cg(residual + i * S::kStride);
  }
  const Weights<T, S> weights(p);
  const Rng rng = p.drops ? Rng(p.dropout.dropout.rng) : Rng();
  close_row(
      p, weights, rng, row, output,
      [&](int k, int i, float (&values)[kColumnsPerDraw]) { inputs[k][i].unpack(values); }, [] {},
      [](int, float (&)[kColumnsPerDraw]) {});
}

// cast: Cast::values is null if y is not cast.
template <typename T>
struct FwdLaunch {
  const char* op;
  FwdParams<T> params;
  Cast cast;
  int64_t rows;
  int32_t device;

  template <typename Kernel, typename... More>
  void start(Kernel kernel, int threads, int64_t teams, const More&... more) {
    launch({.op = op,
            .grid = params.rows.blocks,
            .block = dim3(threads, teams),
            .shared = static_cast<size_t>(params.rows.shared),
            .dependent = true},
           kernel, params, more...);
  }

  template <typename S, bool kCasts>
  void many() {
    const auto kernel = dropout_residual_layer_norm_fwd_kernel<T, S, kCasts>;
    using Queue = RowQueue<T, S, 2, kCasts>;
    if constexpr (kCasts && S::kHasSmallChunks) {
      if (!chunks_fit<S, Queue>(kernel, device)) return many<typename S::SmallChunks, true>();
    }
    params.rows = share_out<S, kCasts, Queue, 0>(kernel, rows, device);
    start(kernel, S::kThreads, S::kTeams, cast);
  }

  template <typename S>
  void run() {
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
      if (cast.values != nullptr) return many<S, true>();
    }
    const int64_t of_multiprocessor = blocks_for(rows, resident_blocks(device, 1));
    const int64_t side_by_side = blocks_for(of_multiprocessor, S::kTeams);
    if (side_by_side > kSideBySide<T>) return many<S, false>();
    const int64_t teams = blocks_for(of_multiprocessor, side_by_side);
    params.rows = one_each(rows, teams);
    start(dropout_residual_layer_norm_fwd_few_rows_kernel<T, S>, S::kThreads, teams);
  }
};

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> dropout_residual_layer_norm_fwd(
    const Tensor& x, std::optional<Tensor> bias, std::optional<Tensor> residual,
    std::optional<Tensor> gamma, std::optional<Tensor> beta, double p, const Tensor& rng,
    int64_t site, double eps, bool keep_y, std::optional<Tensor> cast_scale,
    std::optional<Tensor> cast_amax, std::optional<Tensor> cast_saturated) {
  constexpr const char* op = "dropout_residual_layer_norm_fwd";
  const CastScalars scalars = cast_scalars(op, cast_scale, cast_amax, cast_saturated);
  if (scalars.are_given()) check_cast(op, "x", x);
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
  Tensor y = empty_rows(x, makes_y && keep_y);
  Tensor mean = allocate(x, {makes_y ? rows : 0}, ScalarType::Float);
  Tensor rstd = allocate(x, {makes_y ? rows : 0}, ScalarType::Float);
  const CastResults results = allocate_cast(x, rows, columns, scalars);
  const std::tuple all{sum, y, mean, rstd, results.values, results.transpose};
  if (sum.numel() == 0 && mean.numel() == 0) return all;

  const int32_t device = x.get_device();
  const DeviceGuard guard(device);
  const DropoutFactors dropout(rng.const_data_ptr<int64_t>(), site, p);
  dispatch_float(x.scalar_type(), "dropout_residual_layer_norm_fwd: x", [&](auto zero) {
    using T = decltype(zero);
    FwdLaunch<T> launch{.op = op,
                        .params = {.x = data_of<T>(x),
                                   .bias = data_of<T>(bias),
                                   .residual = data_of<T>(residual),
                                   .gamma = data_of<T>(gamma),
                                   .beta = data_of<T>(beta),
                                   .sum = output_of<T>(sum),
                                   .y = output_of<T>(y),
                                   .mean = output_of<float>(mean),
                                   .rstd = output_of<float>(rstd),
                                   .x_stride = x.stride(0),
                                   .residual_stride = stride_of(residual),
                                   .rows = {},
                                   .columns = static_cast<int>(columns),
                                   .inverse = 1.0f / static_cast<float>(columns),
                                   .eps = static_cast<float>(eps),
                                   .drops = p > 0.0,
                                   .dropout = dropout},
                        .cast = results.cast,
                        .rows = rows,
                        .device = device};
    dispatch_shape<kFwdGroups>(columns,
                               [&](auto shape) { launch.template run<decltype(shape)>(); });
  });
  return all;
}

STABLE_TORCH_LIBRARY_IMPL(lightseq, CUDA, m) {
  m.impl("dropout_residual_layer_norm_fwd", TORCH_BOX(&dropout_residual_layer_norm_fwd));
}

}  // namespace
}  // namespace lightseq
