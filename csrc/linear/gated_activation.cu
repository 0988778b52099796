// A gated activation between the two products of a feed-forward sublayer. T rows (tokens), F
// columns of y.
//
//   y  = dropout(activation(a) * b)                  x = [a, b], [T, 2 F]
//   da = dropout(dy) * b * activation'(a)            the same dropout bits, generated again
//   db = dropout(dy) * activation(a)
//
//   saved for backward   only x
//   bytes moved          forward x and y; backward dy, x and dx
//   determinism          each result depends on two or three numbers
//
// A thread processes eight columns of a row, so one call of Philox generates their bits. Its loads
// do not depend on each other, and a multiprocessor has enough threads to keep memory busy.
//
// NaN passes through, also if it is dropped.

#include <algorithm>
#include <string>

#include "common/check.h"
#include "common/columns.cuh"
#include "common/launch.cuh"
#include "linear/activation.cuh"

namespace lightseq {
namespace {

constexpr int kLanes = 32, kRows = 8;  // of a block: groups of eight columns, and rows
constexpr int64_t kMostBlocks = 65535;

template <typename T>
struct Params {
  const T *dy, *x;  // dy: backward only
  T* output;        // y or dx
  int64_t dy_stride, x_stride, rows, columns;
  DropoutFactors dropout;
};

// Calls run(row, column, bits of dropout) for the thread's groups of columns.
template <typename T, typename Run>
__device__ __forceinline__ void for_each_group(const Params<T>& p, Run&& run) {
  const int64_t group = static_cast<int64_t>(blockIdx.x) * kLanes + threadIdx.x;
  const int64_t column = group * kColumnsPerDraw;
  if (column >= p.columns) return;
  const bool drops = p.dropout.drops();
  const Rng rng = drops ? Rng(p.dropout.dropout.rng) : Rng();
  for (int64_t row = static_cast<int64_t>(blockIdx.y) * kRows + threadIdx.y; row < p.rows;
       row += static_cast<int64_t>(gridDim.y) * kRows) {
    run(row, column, drops ? p.dropout.draw(rng, row, group) : kKeepAll);
  }
}

template <typename T, Activation kActivation>
__global__ void __launch_bounds__(kLanes* kRows)
    gated_activation_fwd_kernel(const __grid_constant__ Params<T> p) {
  for_each_group(p, [&](int64_t row, int64_t column, uint32_t keep) {
    const T* const x = p.x + row * p.x_stride + column;
    Columns<T> left, right;
    left.load_cg(x);
    right.load_cg(x + p.columns);
    float a[kColumnsPerDraw], b[kColumnsPerDraw];
    left.unpack(a);
    right.unpack(b);
#pragma unroll
    for (int e = 0; e < kColumnsPerDraw; ++e) a[e] = activate<T, kActivation>(a[e]).value * b[e];
    p.dropout.apply(keep, a);
    left.pack(a);
    left.store(p.output + row * p.columns + column);
  });
}

template <typename T, Activation kActivation>
__global__ void __launch_bounds__(kLanes* kRows)
    gated_activation_bwd_kernel(const __grid_constant__ Params<T> p) {
  for_each_group(p, [&](int64_t row, int64_t column, uint32_t keep) {
    const T* const x = p.x + row * p.x_stride + column;
    Columns<T> left, right, gradient;
    gradient.load_cg(p.dy + row * p.dy_stride + column);
    left.load_cg(x);
    right.load_cg(x + p.columns);
    float a[kColumnsPerDraw], b[kColumnsPerDraw], dy[kColumnsPerDraw];
    gradient.unpack(dy);
    left.unpack(a);
    right.unpack(b);
    p.dropout.apply(keep, dy);
#pragma unroll
    for (int e = 0; e < kColumnsPerDraw; ++e) {
      const Activated activated = activate<T, kActivation>(a[e]);
      a[e] = dy[e] * b[e] * activated.slope;
      b[e] = dy[e] * activated.value;
    }
    left.pack(a);
    right.pack(b);
    T* const dx = p.output + row * 2 * p.columns + column;
    left.store(dx);
    right.store(dx + p.columns);
  });
}

void check_halves(const char* op, const Tensor& x) {
  check_rows(op, "x", x);
  require(x.size(1) % (2 * kColumnsPerDraw) == 0, op, ": x has rows of ", x.size(1),
          " elements; on a GPU the number must be a multiple of 16");
}

// Calls start(parameters, grid) for the type of x.
template <typename Start>
void prepare(const char* op, const Tensor* dy, const Tensor& x, const Tensor& output,
             const DropoutFactors& dropout, Start&& start) {
  if (output.numel() == 0) return;
  const DeviceGuard guard(x.get_device());
  dispatch_float(x.scalar_type(), (std::string(op) + ": x").c_str(), [&](auto zero) {
    using T = decltype(zero);
    const int64_t rows = x.size(0), columns = x.size(1) / 2;
    const Params<T> params{
        .dy = dy == nullptr ? nullptr : static_cast<const T*>(dy->const_data_ptr()),
        .x = static_cast<const T*>(x.const_data_ptr()),
        .output = output_of<T>(output),
        .dy_stride = dy == nullptr ? 0 : dy->stride(0),
        .x_stride = x.stride(0),
        .rows = rows,
        .columns = columns,
        .dropout = dropout};
    start(params, dim3(blocks_for(columns, kLanes * kColumnsPerDraw),
                       std::min(kMostBlocks, blocks_for(rows, kRows))));
  });
}

Tensor gated_activation_fwd(const Tensor& x, std::string activation, double p, const Tensor& rng,
                            int64_t site) {
  const char* const op = "gated_activation_fwd";
  check_halves(op, x);
  const Tensor y = allocate(x, {x.size(0), x.size(1) / 2});
  const DropoutFactors dropout(rng.const_data_ptr<int64_t>(), site, p);
  prepare(op, nullptr, x, y, dropout, [&]<typename T>(const Params<T>& params, dim3 grid) {
    dispatch_nonlinear(activation_of(op, activation), [&](auto chosen) {
      launch({.op = op, .grid = grid, .block = dim3(kLanes, kRows)},
             gated_activation_fwd_kernel<T, chosen.value>, params);
    });
  });
  return y;
}

Tensor gated_activation_bwd(const Tensor& dy, const Tensor& x, std::string activation, double p,
                            const Tensor& rng, int64_t site) {
  const char* const op = "gated_activation_bwd";
  check_halves(op, x);
  check_rows(op, "dy", dy);
  const Tensor dx = allocate(x, {x.size(0), x.size(1)});
  const DropoutFactors dropout(rng.const_data_ptr<int64_t>(), site, p);
  prepare(op, &dy, x, dx, dropout, [&]<typename T>(const Params<T>& params, dim3 grid) {
    dispatch_nonlinear(activation_of(op, activation), [&](auto chosen) {
      launch({.op = op, .grid = grid, .block = dim3(kLanes, kRows)},
             gated_activation_bwd_kernel<T, chosen.value>, params);
    });
  });
  return dx;
}

STABLE_TORCH_LIBRARY_IMPL(lightseq, CUDA, m) {
  m.impl("gated_activation_fwd", TORCH_BOX(&gated_activation_fwd));
  m.impl("gated_activation_bwd", TORCH_BOX(&gated_activation_bwd));
}

}  // namespace
}  // namespace lightseq
