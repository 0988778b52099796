// The operations between the two GEMMs of a feed-forward sublayer. T rows (tokens), F columns (FFN
// width).
//
//   y     = dropout(activation(x + bias))          activation: identity, relu, gelu, gelu_accurate
//   dx    = dropout(dy) * activation'(x + bias)    the same dropout bits, generated again
//   dbias = column sum of dx
//
//   saved for backward   only x
//   bytes moved          forward x and y; backward dy, x (not for identity) and dx
//   determinism          the order of dbias' sums depends only on the sizes
//
// A warp processes 256 columns, eight per lane, and iterates over rows. So the bias and the lane's
// part of dbias stay in registers. The loads of several rows are in flight. The warps of a block
// have the same columns and different rows; at the end they add their parts of dbias.
//
// NaN passes through every activation, also relu, so that it reaches the gradient norm.

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <optional>
#include <string>

#include "common/backward.h"
#include "common/check.h"
#include "common/column_sum.cuh"
#include "common/columns.cuh"
#include "common/exp2.cuh"
#include "common/launch.cuh"
#include "common/nan.cuh"
#include "common/occupancy.h"
#include "common/optional.h"
#include "common/reduce.cuh"

namespace lightseq {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

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
constexpr int64_t kMaxGridY = 65535;

enum class Activation { kIdentity, kRelu, kGelu, kGeluAccurate };

constexpr float kSqrtHalf = 0.70710678118654752f;       // 1 / sqrt(2)
constexpr float kSqrtTwoOverPi = 0.79788456080286536f;  // sqrt(2 / pi)
constexpr float kGeluCubic = 0.044715f;

// Has the accuracy of exp2_approximate.
__device__ __forceinline__ float reciprocal_approximate(float x) {
  asm("rcp.approx.ftz.f32 %0, %0;" : "+f"(x));
  return x;
}

// The probability that a standard normal variable exceeds |v|.
//
// For 16-bit types, computing gelu with erff would take longer than its memory accesses. So these
// types use 2^polynomial(|v|), fitted to log2 of the probability on [0, 7]. Its relative error is
// below 6e-6 up to |v| = 4 and below 4e-5 up to 5.5; float16 resolves 5e-4. For larger |v| it
// falls to 0.
template <typename T>
__device__ __forceinline__ float normal_tail(float v) {
  const float a = fabsf(v);
  if constexpr (sizeof(T) == sizeof(float)) return 0.5f - 0.5f * erff(a * kSqrtHalf);
  float log2 = -1.68377596e-6f;
  log2 = fmaf(log2, a, 5.90210802e-5f);
  log2 = fmaf(log2, a, -9.13685828e-4f);
  log2 = fmaf(log2, a, 8.45482573e-3f);
  log2 = fmaf(log2, a, -5.38768210e-2f);
  log2 = fmaf(log2, a, -0.458524436f);
  log2 = fmaf(log2, a, -1.15123546f);
  log2 = fmaf(log2, a, -0.999995947f);
  return exp2_approximate(log2);
}

// gelu_accurate(v) = v (1 + tanh(u)) / 2 = v * sigmoid(2u) = v / (1 + exp(-2u)). Returns exp(-2u),
// with a bound on the exponent: the derivative needs a finite value.
__device__ __forceinline__ float exponential_of_gelu(float v) {
  const float u = v * fmaf(kSqrtTwoOverPi * kGeluCubic, v * v, kSqrtTwoOverPi);
  return exp2_approximate(fminf(-2.0f * kLog2E * u, 126.0f));
}

// For |v| > kFar, in every float type, gelu is v or 0 and its derivative is 1 or 0. Bounding v
// there avoids infinity * 0.
constexpr float kFar = 128.0f;

template <typename T, Activation kActivation>
__device__ __forceinline__ float activate(float v) {
  if constexpr (kActivation == Activation::kRelu) return relu(v);
  if constexpr (kActivation == Activation::kGelu) {
    return relu(v) - at_most(fabsf(v), kFar) * normal_tail<T>(v);
  }
  if constexpr (kActivation == Activation::kGeluAccurate) {
    v = at_least(v, -kFar);
    return v * reciprocal_approximate(1.0f + exponential_of_gelu(v));
  }
  return v;
}

// dy times the derivative of the activation at v.
template <typename T, Activation kActivation>
__device__ __forceinline__ float differentiate(float dy, float v) {
  if constexpr (kActivation == Activation::kRelu) return v <= 0.0f ? 0.0f : dy;
  v = at_least(at_most(v, kFar), -kFar);
  if constexpr (kActivation == Activation::kGelu) {
    const float tail = normal_tail<T>(v);
    const float density = exp2_approximate(-0.5f * kLog2E * v * v);  // times sqrt(2 pi)
    return dy * fmaf(0.5f * kSqrtTwoOverPi * v, density, v < 0.0f ? tail : 1.0f - tail);
  }
  if constexpr (kActivation == Activation::kGeluAccurate) {
    const float exponential = exponential_of_gelu(v);
    const float s = reciprocal_approximate(1.0f + exponential);
    const float du = fmaf(3.0f * kSqrtTwoOverPi * kGeluCubic, v * v, kSqrtTwoOverPi);
    return dy * fmaf(2.0f * v * du, s * s * exponential, s);
  }
  return dy;
}

template <typename T>
struct Params {
  const T* dy = nullptr;  // backward only
  const T* x;
  const T* bias;              // null: none
  T* output;                  // y or dx
  float* partials = nullptr;  // [gridDim.y, columns] column sums of dx; null: do not compute
  int64_t dy_stride = 0, x_stride;
  int64_t rows, columns;
  DropoutFactors dropout;
};

// Without a bias the values are -0: adding -0 changes no number, not even the sign of a zero.
template <typename T>
__device__ __forceinline__ void load_bias(const T* bias, int64_t column,
                                          float (&values)[kColumnsPerDraw]) {
#pragma unroll
  for (int e = 0; e < kColumnsPerDraw; ++e) values[e] = -0.0f;
  if (bias == nullptr) return;
  Columns<T> packed;
  packed.load(bias + column);
  packed.unpack(values);
}

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

template <typename T, Activation kActivation, int kUnroll>
__global__ void __launch_bounds__(kWarp* kWarps, kFwdBlocks)
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
    Columns<T> x[kUnroll] = {};
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      if (u * kWarps < left) x[u].load_cg(x_row + u * kWarps * p.x_stride);
    }
    uint32_t keep[kUnroll];
    draw_rows(p.dropout, rng, row, group, keep);
#pragma unroll
    for (int u = 0; u < kUnroll; ++u) {
      float y[kColumnsPerDraw];
      x[u].unpack(y);
#pragma unroll
      for (int e = 0; e < kColumnsPerDraw; ++e) y[e] = activate<T, kActivation>(y[e] + bias[e]);
      p.dropout.apply(keep[u], y);
      x[u].pack(y);
      if (u * kWarps < left) x[u].store(y_row + u * kWarps * p.columns);
    }
  }
}

template <typename T, Activation kActivation, int kUnroll>
__global__ void __launch_bounds__(kWarp* kWarps, kBwdBlocks)
    bias_activation_dropout_bwd_kernel(Params<T> p) {
  constexpr bool kReadsX = kActivation != Activation::kIdentity;
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
    const T* const x_row = p.x + row * p.x_stride + column;
    T* const dx_row = p.output + row * p.columns + column;
    Columns<T> dy[kUnroll] = {}, x[kUnroll] = {};  // zeros past the last row, so dx is zero there
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
        dx[e] = differentiate<T, kActivation>(dx[e], before[e] + bias[e]);
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

Activation activation_of(const char* op, const std::string& name) {
  if (name == "identity") return Activation::kIdentity;
  if (name == "relu") return Activation::kRelu;
  if (name == "gelu") return Activation::kGelu;
  require(name == "gelu_accurate", op, ": activation must be identity, relu, gelu or gelu_accurate",
          ", got ", name);
  return Activation::kGeluAccurate;
}

void check_inputs(const char* op, const Tensor& x, const std::optional<Tensor>& bias) {
  require(x.dim() == 2, op, ": x must have two dimensions");
  check_rows(op, "x", x);
  check_optional_rows(op, "bias", bias);
}

template <typename Function>
void dispatch_activation(Activation activation, Function&& function) {
  switch (activation) {
    case Activation::kIdentity:
      return function(std::integral_constant<Activation, Activation::kIdentity>{});
    case Activation::kRelu:
      return function(std::integral_constant<Activation, Activation::kRelu>{});
    case Activation::kGelu:
      return function(std::integral_constant<Activation, Activation::kGelu>{});
    case Activation::kGeluAccurate:
      return function(std::integral_constant<Activation, Activation::kGeluAccurate>{});
  }
}

// Rows in flight per thread: 64 bytes of each tensor in forward, 32 bytes in backward.
template <typename T>
constexpr int kFwdUnroll = 8 / sizeof(T);
template <typename T>
constexpr int kBwdUnroll = 4 / sizeof(T);

Tensor bias_activation_dropout_fwd(const Tensor& x, std::optional<Tensor> bias,
                                   std::string activation, double p, const Tensor& rng,
                                   int64_t site) {
  const char* const op = "bias_activation_dropout_fwd";
  const Activation which = activation_of(op, activation);
  check_inputs(op, x, bias);
  Tensor y = allocate(x, {x.size(0), x.size(1)});
  if (y.numel() == 0) return y;

  const int32_t device = x.get_device();
  const torch::stable::accelerator::DeviceGuard guard(device);
  dispatch_float(x.scalar_type(), "bias_activation_dropout_fwd: x", [&](auto zero) {
    using T = decltype(zero);
    constexpr int64_t kRows = kWarps * kFwdUnroll<T>;
    const Params<T> params{.x = data_of<T>(x),
                           .bias = data_of<T>(bias),
                           .output = static_cast<T*>(y.mutable_data_ptr()),
                           .x_stride = x.stride(0),
                           .rows = x.size(0),
                           .columns = x.size(1),
                           .dropout = DropoutFactors(rng.const_data_ptr<int64_t>(), site, p)};
    const dim3 grid(blocks_for(params.columns, kColumnsPerBlock),
                    std::min(kMaxGridY, blocks_for(params.rows, kRows)));
    dispatch_activation(which, [&](auto chosen) {
      launch(
          {.op = op, .grid = grid, .block = dim3(kWarp, kWarps), .stream = current_stream(device)},
          bias_activation_dropout_fwd_kernel<T, chosen.value, kFwdUnroll<T>>, params);
    });
  });
  return y;
}

struct Backward {
  std::optional<Tensor> bias;
  Activation activation;
  DropoutFactors dropout;
  std::optional<Tensor> dbias;
  std::optional<Tensor> parameter;  // the parameter whose NaN shall appear in dbias, or none
  bool accumulate;
};

Tensor backward(const char* op, const Tensor& dy, const Tensor& x, const Backward& p) {
  check_inputs(op, x, p.bias);
  check_rows(op, "dy", dy);
  const Gradients gradients{{gradient_of(op, "dbias", p.dbias, p.parameter)}};
  const int64_t rows = x.size(0), columns = x.size(1);
  Tensor dx = allocate(x, {rows, columns});

  const int32_t device = x.get_device();
  const torch::stable::accelerator::DeviceGuard guard(device);
  const cudaStream_t stream = current_stream(device);
  dispatch_float(x.scalar_type(), "bias_activation_dropout_bwd: x", [&](auto zero) {
    using T = decltype(zero);
    constexpr int64_t kRows = kWarps * kBwdUnroll<T>;
    const int64_t over_columns = std::max<int64_t>(1, blocks_for(columns, kColumnsPerBlock));
    const int64_t resident = resident_blocks(device, kBwdBlocks);
    // No more blocks than can be resident, because each row of blocks writes partial sums.
    const int64_t blocks =
        std::min(blocks_for(rows, kRows), std::max<int64_t>(1, resident / over_columns));
    Tensor partials =
        allocate(x, {p.dbias.has_value() ? blocks : 0, 1, columns}, ScalarType::Float);
    if (rows > 0 && columns > 0) {
      const Params<T> params{
          .dy = data_of<T>(dy),
          .x = data_of<T>(x),
          .bias = data_of<T>(p.bias),
          .output = static_cast<T*>(dx.mutable_data_ptr()),
          .partials = p.dbias.has_value() ? partials.mutable_data_ptr<float>() : nullptr,
          .dy_stride = dy.stride(0),
          .x_stride = x.stride(0),
          .rows = rows,
          .columns = columns,
          .dropout = p.dropout};
      const dim3 grid(over_columns, blocks);
      dispatch_activation(p.activation, [&](auto chosen) {
        launch({.op = op, .grid = grid, .block = dim3(kWarp, kWarps), .stream = stream},
               bias_activation_dropout_bwd_kernel<T, chosen.value, kBwdUnroll<T>>, params);
      });
    }
    if (p.dbias.has_value()) add_partials(partials, gradients, p.accumulate, stream);
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

Tensor relu_bwd(const Tensor& dy, const Tensor& x, float scale, std::optional<Tensor> dbias,
                const std::optional<Tensor>& bias, bool accumulate) {
  DropoutFactors nothing_drops(nullptr, 0, 0.0);
  nothing_drops.scale = scale;
  return backward("relu_linear_bwd", dy, x,
                  {.bias = std::nullopt,
                   .activation = Activation::kRelu,
                   .dropout = nothing_drops,
                   .dbias = dbias,
                   .parameter = bias,
                   .accumulate = accumulate});
}

}  // namespace lightseq
