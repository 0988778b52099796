// The operations between the two GEMMs of a feed-forward sublayer. T rows (tokens), F columns (FFN
// width).
//
//   y     = dropout(activation(x + bias))          activation: identity or of activation.cuh
//   dx    = dropout(dy) * activation'(x + bias)    the same dropout bits, generated again
//   dbias = column sum of dx
//
//   saved for backward   only x
//   bytes moved          forward x and y; backward dy, x (not for identity) and dx
//   determinism          the order of dbias' sums depends only on the sizes
//
// linear_activation_fwd.cu and activation_linear_bwd.cu do the same next to a product. If they
// cannot do it in the product's kernel, they call these kernels. For gelu and silu, forward then
// also writes the slope (slope.cuh), and backward reads the slope instead of x.
//
// A warp processes 256 columns, eight per lane, and iterates over rows. So the bias and the lane's
// part of dbias stay in registers. The loads of several rows are in flight. The warps of a block
// have the same columns and different rows; at the end they add their parts of dbias.
//
// NaN passes through every activation, also relu, so that it reaches the gradient norm.

#include <algorithm>
#include <optional>
#include <string>

#include "common/check.h"
#include "common/column_sum.cuh"
#include "common/columns.cuh"
#include "common/device.h"
#include "common/launch.cuh"
#include "common/reduce.cuh"
#include "linear/activation.cuh"
#include "linear/ops.h"

namespace lightseq {
namespace {

constexpr int kWarps = 8;
constexpr int kColumnsPerBlock = kWarp * kColumnsPerDraw;
// Resident blocks per SM; this limits the registers per thread. Code for compute capability 10.0
// and later needs a few more registers.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr int kFwdBlocks = 2;
#else
constexpr int kFwdBlocks = 4;
#endif
constexpr int kBwdBlocks = 3;
constexpr int kSlopeBlocks = std::min(kFwdBlocks, kBwdBlocks);
constexpr int64_t kMaxGridY = 65535;

// As Derivative, if forward has stored the derivative.
struct GivenDerivative {
  static constexpr bool kReadsX = true;
  template <typename T>
  using Given = SlopeColumns<T>;
  template <typename T>
  __device__ __forceinline__ static float times(float dy, float slope) {
    return dy * slope;
  }
};

template <typename T, typename X = T>
struct Params {
  const T* dy = nullptr;                              // backward only
  const X* x;                                         // or the slope
  const T* bias;                                      // null: none
  T* output;                                          // y or dx
  typename SlopeColumns<T>::Number* slope = nullptr;  // forward only
  float* partials = nullptr;  // [gridDim.y, columns] column sums of dx; null: do not compute
  int64_t dy_stride = 0, x_stride;
  int64_t rows, columns;
  DropoutFactors dropout;
};

// A block processes kUnroll * kWarps adjacent rows at a time; each warp has every kWarps-th row.
template <int kUnroll>
__device__ __forceinline__ int64_t first_row() {
  return static_cast<int64_t>(blockIdx.y) * (kUnroll * kWarps) + threadIdx.y;
}
template <int kUnroll>
__device__ __forceinline__ int64_t rows_per_step() {
  return static_cast<int64_t>(gridDim.y) * (kUnroll * kWarps);
}
// Number of rows from `row` on, at most those of one step.
template <int kUnroll>
__device__ __forceinline__ int rows_left(int64_t rows, int64_t row) {
  return static_cast<int>(min(rows - row, static_cast<int64_t>(kUnroll * kWarps)));
}

template <int kUnroll>
__device__ __forceinline__ void draw_rows(const DropoutFactors& dropout, const Rng& rng,
                                          int64_t row, int64_t group, uint32_t (&keep)[kUnroll]) {
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) keep[u] = kKeepAll;
  if (!dropout.drops()) return;
#pragma unroll
  for (int u = 0; u < kUnroll; ++u) keep[u] = dropout.draw(rng, row + u * kWarps, group);
}

template <typename T, Activation kActivation, bool kSlope, int kUnroll>
__global__ void __launch_bounds__(kWarp* kWarps, kSlope ? kSlopeBlocks : kFwdBlocks)
    bias_activation_dropout_fwd_kernel(Params<T> p) {
  const int64_t group = static_cast<int64_t>(blockIdx.x) * kWarp + threadIdx.x;
  const int64_t column = group * kColumnsPerDraw;
  if (column >= p.columns) return;
  float bias[kColumnsPerDraw];
  load_bias(p.bias, column, bias);
  const Rng rng(p.dropout.dropout.rng);
  for (int64_t row = first_row<kUnroll>(); row < p.rows; row += rows_per_step<kUnroll>()) {
    const int left = rows_left<kUnroll>(p.rows, row);
    const T* const x_row = p.x + row * p.x_stride + column;
    T* const y_row = p.output + row * p.columns + column;
    auto* const slope_row = p.slope + row * p.columns + column;
    Columns<T> x[kUnroll] = {};
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (u * kWarps < left) x[u].load_cg(x_row + u * kWarps * p.x_stride);
    }
    uint32_t keep[kUnroll];
    draw_rows(p.dropout, rng, row, group, keep);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      Columns<T> y;
      SlopeColumns<T> slope;
      activate_columns<T, kActivation>(x[u], bias, p.dropout, true, keep[u], y, slope);
      if (u * kWarps >= left) continue;
      y.store(y_row + u * kWarps * p.columns);
      if constexpr (kSlope) slope.store(slope_row + u * kWarps * p.columns);
    }
  }
}

template <typename T, typename TDerivative, int kUnroll>
__global__ void __launch_bounds__(kWarp* kWarps, kBwdBlocks) bias_activation_dropout_bwd_kernel(
    Params<T, typename TDerivative::template Given<T>::Number> p) {
  using Given = typename TDerivative::template Given<T>;
  constexpr bool kReadsX = TDerivative::kReadsX;
  const int64_t group = static_cast<int64_t>(blockIdx.x) * kWarp + threadIdx.x;
  const int64_t column = group * kColumnsPerDraw;
  const int64_t rows = column < p.columns ? p.rows : 0;
  float bias[kColumnsPerDraw] = {};
  if (rows > 0) load_bias(p.bias, column, bias);
  float dbias[kColumnsPerDraw] = {};
  const Rng rng = p.dropout.drops() ? Rng(p.dropout.dropout.rng) : Rng();
  for (int64_t row = first_row<kUnroll>(); row < rows; row += rows_per_step<kUnroll>()) {
    const int left = rows_left<kUnroll>(rows, row);
    const T* const dy_row = p.dy + row * p.dy_stride + column;
    const auto* const x_row = p.x + row * p.x_stride + column;
    T* const dx_row = p.output + row * p.columns + column;
    Columns<T> dy[kUnroll] = {};  // zeros past the last row, so dx is zero there
    Given x[kUnroll] = {};
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (u * kWarps < left) {
        dy[u].load_cg(dy_row + u * kWarps * p.dy_stride);
        if constexpr (kReadsX) x[u].load_cg(x_row + u * kWarps * p.x_stride);
      }
    }
    uint32_t keep[kUnroll];
    draw_rows(p.dropout, rng, row, group, keep);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      float dx[kColumnsPerDraw], before[kColumnsPerDraw] = {};
      dy[u].unpack(dx);
      if constexpr (kReadsX) x[u].unpack(before);
      p.dropout.apply(keep[u], dx);
#pragma unroll
      for (int e = 0; e < kColumnsPerDraw; ++e) {
        dx[e] = TDerivative::template times<T>(dx[e], before[e] + bias[e]);
        dbias[e] += dx[e];
      }
      dy[u].pack(dx);
      if (u * kWarps < left) dy[u].store(dx_row + u * kWarps * p.columns);
    }
  }
  if (p.partials == nullptr) return;
  griddepcontrol_launch_dependents();

  __shared__ float of_warp[kWarps][kColumnsPerBlock];
#pragma unroll
  for (int e = 0; e < kColumnsPerDraw; ++e) {
    of_warp[threadIdx.y][threadIdx.x * kColumnsPerDraw + e] = dbias[e];
  }
  __syncthreads();
  const int i = threadIdx.y * kWarp + threadIdx.x;  // one of the block's columns
  const int64_t target = static_cast<int64_t>(blockIdx.x) * kColumnsPerBlock + i;
  if (target >= p.columns) return;
  float sum = 0.0f;
#pragma unroll
  for (int warp = 0; warp < kWarps; ++warp) sum += of_warp[warp][i];
  p.partials[blockIdx.y * p.columns + target] = sum;
}

void check_inputs(const char* op, const Tensor& x, const std::optional<Tensor>& bias) {
  check_rows(op, "x", x);
  check_optional_rows(op, "bias", bias);
}

// Rows in flight per thread: 64 bytes of each tensor in forward, 32 bytes in backward.
template <typename T>
constexpr int kFwdUnroll = 8 / sizeof(T);
template <typename T>
constexpr int kBwdUnroll = 4 / sizeof(T);

// slope: where the slope is written, or an empty tensor.
Tensor forward(const char* op, const Tensor& x, const std::optional<Tensor>& bias,
               Activation activation, const DropoutFactors& dropout, const Tensor& slope) {
  check_inputs(op, x, bias);
  Tensor y = allocate(x, {x.size(0), x.size(1)});
  if (y.numel() == 0) return y;

  const DeviceGuard guard(x.get_device());
  dispatch_float(x.scalar_type(), "bias_activation_dropout_fwd: x", [&](auto zero) {
    using T = decltype(zero);
    constexpr int64_t kRows = kWarps * kFwdUnroll<T>;
    const Params<T> params{.x = data_of<T>(x),
                           .bias = data_of<T>(bias),
                           .output = output_of<T>(y),
                           .slope = output_of<typename SlopeColumns<T>::Number>(slope),
                           .x_stride = x.stride(0),
                           .rows = x.size(0),
                           .columns = x.size(1),
                           .dropout = dropout};
    const dim3 grid(blocks_for(params.columns, kColumnsPerBlock),
                    std::min(kMaxGridY, blocks_for(params.rows, kRows)));
    const auto start = [&](auto kernel) {
      launch({.op = op, .grid = grid, .block = dim3(kWarp, kWarps)}, kernel, params);
    };
    dispatch_activation(activation, [&](auto chosen) {
      if constexpr (has_slope(chosen.value)) {
        if (slope.numel() > 0) {
          return start(bias_activation_dropout_fwd_kernel<T, chosen.value, true, kFwdUnroll<T>>);
        }
      }
      start(bias_activation_dropout_fwd_kernel<T, chosen.value, false, kFwdUnroll<T>>);
    });
  });
  return y;
}

struct Backward {
  std::optional<Tensor> bias;
  std::optional<Activation> activation;  // none: x is the slope
  DropoutFactors dropout;
  std::optional<Tensor> dbias;
  std::optional<Tensor> parameter;  // the parameter whose NaN shall appear in dbias, or none
  bool accumulate;
};

Tensor backward(const char* op, const Tensor& dy, const Tensor& x, const Backward& p) {
  if (p.activation.has_value()) {
    check_inputs(op, x, p.bias);
  } else if (x.scalar_type() == ScalarType::Byte) {
    check_aligned(op, "slope", x, kColumnsPerDraw);  // its rows are adjacent
  } else {
    check_rows(op, "slope", x);
  }
  check_rows(op, "dy", dy);
  const Gradients gradients{{gradient_of(op, "dbias", p.dbias, p.parameter)}};
  const int64_t rows = x.size(0), columns = x.size(1);
  Tensor dx = allocate(dy, {rows, columns});

  const int32_t device = x.get_device();
  const DeviceGuard guard(device);
  dispatch_float(dy.scalar_type(), "bias_activation_dropout_bwd: x", [&](auto zero) {
    using T = decltype(zero);
    constexpr int64_t kRows = kWarps * kBwdUnroll<T>;
    const int64_t over_columns = std::max<int64_t>(1, blocks_for(columns, kColumnsPerBlock));
    const int64_t resident = resident_blocks(device, kBwdBlocks);
    // No more blocks than can be resident, because each row of blocks writes partial sums.
    const int64_t blocks =
        std::min(blocks_for(rows, kRows), std::max<int64_t>(1, resident / over_columns));
    Tensor partials =
        allocate(dy, {p.dbias.has_value() ? blocks : 0, 1, columns}, ScalarType::Float);
    if (rows > 0 && columns > 0) {
      const dim3 grid(over_columns, blocks);
      const auto start = [&](auto derivative) {
        using X = typename decltype(derivative)::template Given<T>::Number;
        const Params<T, X> params{
            .dy = data_of<T>(dy),
            .x = data_of<X>(x),
            .bias = data_of<T>(p.bias),
            .output = output_of<T>(dx),
            .partials = p.dbias.has_value() ? partials.mutable_data_ptr<float>() : nullptr,
            .dy_stride = dy.stride(0),
            .x_stride = x.stride(0),
            .rows = rows,
            .columns = columns,
            .dropout = p.dropout};
        launch({.op = op, .grid = grid, .block = dim3(kWarp, kWarps)},
               bias_activation_dropout_bwd_kernel<T, decltype(derivative), kBwdUnroll<T>>, params);
      };
      if (p.activation.has_value()) {
        dispatch_activation(*p.activation, [&](auto chosen) { start(Derivative<chosen.value>{}); });
      } else {
        start(GivenDerivative{});
      }
    }
    if (p.dbias.has_value()) add_partials(partials, gradients, p.accumulate);
  });
  return dx;
}

Tensor bias_activation_dropout_bwd(const Tensor& dy, const Tensor& x, std::optional<Tensor> bias,
                                   std::string activation, double p, const Tensor& rng,
                                   int64_t site, std::optional<Tensor> dbias, bool accumulate) {
  const char* const op = "bias_activation_dropout_bwd";
  return backward(op, dy, x,
                  {.bias = bias,
                   .activation = activation_of(op, activation),
                   .dropout = DropoutFactors(rng.const_data_ptr<int64_t>(), site, p),
                   .dbias = dbias,
                   .parameter = std::nullopt,
                   .accumulate = accumulate});
}

STABLE_TORCH_LIBRARY_IMPL(lightseq, CUDA, m) {
  m.impl("bias_activation_dropout_fwd", TORCH_BOX(&bias_activation_dropout_fwd));
  m.impl("bias_activation_dropout_bwd", TORCH_BOX(&bias_activation_dropout_bwd));
}

}  // namespace

Tensor bias_activation_dropout_fwd(const Tensor& x, std::optional<Tensor> bias,
                                   std::string activation, double p, const Tensor& rng,
                                   int64_t site) {
  const char* const op = "bias_activation_dropout_fwd";
  return forward(op, x, bias, activation_of(op, activation),
                 DropoutFactors(rng.const_data_ptr<int64_t>(), site, p), allocate(x, {0}));
}

Tensor allocate_slope(const Tensor& y, bool need_slope) {
  const bool bytes = y.scalar_type() == ScalarType::BFloat16;
  const auto type = bytes ? ScalarType::Byte : y.scalar_type();
  return need_slope ? allocate(y, {y.size(0), y.size(1)}, type) : allocate(y, {0}, type);
}

Tensor activation_fwd(const char* op, const Tensor& z, Activation activation,
                      const DropoutFactors& dropout, const Tensor& slope) {
  return forward(op, z, std::nullopt, activation, dropout, slope);
}

Tensor activation_bwd(const char* op, const Tensor& dy, const Tensor& x,
                      const std::optional<Tensor>& slope, float scale, std::optional<Tensor> dbias,
                      const std::optional<Tensor>& bias, bool accumulate) {
  DropoutFactors nothing_drops(nullptr, 0, 0.0);
  nothing_drops.scale = scale;
  return backward(
      op, dy, slope.value_or(x),
      {.bias = std::nullopt,
       .activation = slope.has_value() ? std::nullopt : std::optional(Activation::kRelu),
       .dropout = nothing_drops,
       .dbias = dbias,
       .parameter = bias,
       .accumulate = accumulate});
}

}  // namespace lightseq
