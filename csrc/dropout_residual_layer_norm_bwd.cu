// What closes a sublayer, backward: T rows (tokens), C columns (model width).
//
//   dresidual = rstd * (g - mean(g) - n * mean(g * n)) + dsum
//               where g = dy * gamma and n = (sum - mean) * rstd
//   dx        = dropout(dresidual)                 the bits of forward, drawn again
//   dgamma, dbeta, dbias = column sums of dy * n, dy, dx
//
//   bytes moved     dy, dsum, sum, dresidual and dx, each once, and a row of partial sums a block
//   determinism     everything is added up in an order that depends on the sizes alone
//
// The warps stay and walk down the rows, a warp a row or, where C > 1024, a block a row. In
// registers they hold their columns' share of the three sums; the row itself waits in shared
// memory, to which the next one is copied meanwhile. Either of dy (no LayerNorm) and dsum may be
// missing, and so may dropout (p == 0) and each of the column sums.

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <optional>
#include <tuple>
#include <type_traits>

#include "common/check.h"
#include "common/column_sum.cuh"
#include "common/columns.cuh"
#include "common/layer_norm.cuh"
#include "common/occupancy.h"
#include "common/optional.h"

namespace lightseq {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int kStaticBytes = 128;  // of shared memory, for the sums over a row

template <typename T>
struct BwdParams {
  const T *dy, *dsum, *sum, *gamma;  // dy, dsum null: none; sum and gamma are read with dy only
  const float *mean, *rstd;
  T *dx, *dresidual;  // dx null: it would be dresidual
  float* partials;    // [gridDim.x, 3, columns] column sums for dgamma, dbeta, dbias; null: none
  int64_t dy_stride, dsum_stride, sum_stride;
  int64_t rows;
  int columns;
  int stages;  // rows in shared memory for each that is worked on: 2, or 1 where that does not fit
  DropoutFactors dropout;
};

// Rows side by side in a block: as many as leave enough registers for the column sums.
template <typename S>
constexpr int kBwdRows = S::kThreads > kWarp ? 1 : 8;

// Threads that share a row wait for each other.
template <typename S>
__device__ __forceinline__ void sync_row() {
  if constexpr (S::kThreads == kWarp) {
    __syncwarp();
  } else {
    __syncthreads();
  }
}

// Starts to copy a row to shared memory, on the way to which it occupies no registers.
template <typename T, typename S>
__device__ __forceinline__ void copy_row(const T* source, T* shared, int columns) {
  const int first = threadIdx.x * Vec<T>::kSize;
  const auto target = static_cast<uint32_t>(__cvta_generic_to_shared(shared + first));
  const T* from = source + first;
  asm volatile("" : "+l"(from));  // or else nvcc computes it again for every copy
#pragma unroll
  for (int i = 0; i < S::kColumns / Vec<T>::kSize / S::kThreads; ++i) {
    const int offset = i * S::kThreads * Vec<T>::kSize;
    if (first + offset < columns) {
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(
                       target + offset * static_cast<int>(sizeof(T))),
                   "l"(from + offset)
                   : "memory");
    }
  }
}

// What backward reads of a row, side by side in shared memory: dy and sum, dsum.
template <typename T, typename S, bool kNorm, bool kStream>
__device__ __forceinline__ void copy_inputs(const BwdParams<T>& p, int64_t row, T* stage) {
  if (row < p.rows) {
    if constexpr (kNorm) {
      copy_row<T, S>(p.dy + row * p.dy_stride, stage, p.columns);
      copy_row<T, S>(p.sum + row * p.sum_stride, stage + S::kColumns, p.columns);
    }
    if constexpr (kStream) {
      copy_row<T, S>(p.dsum + row * p.dsum_stride, stage + 2 * kNorm * S::kColumns, p.columns);
    }
  }
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// kNorm: dy is given. kStream: dsum is given.
template <typename T, typename S, bool kNorm, bool kStream>
__global__ void __launch_bounds__(S::kThreads* kBwdRows<S>, 1)
    dropout_residual_layer_norm_bwd_kernel(BwdParams<T> p) {
  extern __shared__ uint4 shared[];
  constexpr int kStage = (2 * kNorm + kStream) * S::kColumns;
  T* const stages = reinterpret_cast<T*>(shared) + threadIdx.y * p.stages * kStage;
  const Rng rng(p.dropout.dropout.rng);
  const float inverse = 1.0f / p.columns;
  float dgamma[S::kGroups][kColumnsPerDraw] = {};
  float dbeta[S::kGroups][kColumnsPerDraw] = {};
  float dbias[S::kGroups][kColumnsPerDraw] = {};

  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.y;
  // Neighbouring rows go to different blocks, so that the last rows keep all of them busy.
  int64_t row = static_cast<int64_t>(threadIdx.y) * gridDim.x + blockIdx.x;
  // Beyond a row's end there are zeros, which no copy touches.
  for (int column = p.columns + threadIdx.x; column < S::kColumns; column += S::kThreads) {
    for (int i = 0; i < p.stages * kStage / S::kColumns; ++i) {
      stages[i * S::kColumns + column] = from_float<T>(0.0f);
    }
  }
  int stage = 0;
  copy_inputs<T, S, kNorm, kStream>(p, row, stages);
  float next_mean = 0.0f, next_rstd = 0.0f;
  if (kNorm && row < p.rows) {
    next_mean = p.mean[row];
    next_rstd = p.rstd[row];
  }
  for (; row < p.rows; row += step) {
    const T* const dy = stages + stage * kStage;
    const T* const sum = dy + S::kColumns;
    const T* const dsum = dy + 2 * kNorm * S::kColumns;
    if (p.stages > 1) {
      stage = 1 - stage;
      copy_inputs<T, S, kNorm, kStream>(p, row + step, stages + stage * kStage);
    }
    const float mean = next_mean, rstd = next_rstd;
    if (kNorm && row + step < p.rows) {
      next_mean = p.mean[row + step];
      next_rstd = p.rstd[row + step];
    }
    int64_t output = row * p.columns + S::column(0);
    asm volatile("" : "+l"(output));  // or else nvcc multiplies again before each store
    if (p.stages > 1) {
      asm volatile("cp.async.wait_group 1;" ::: "memory");
    } else {
      asm volatile("cp.async.wait_group 0;" ::: "memory");
    }
    sync_row<S>();

    // With c = sum - mean and g = dy * gamma: dresidual = rstd * g - shift - slope * c.
    float shift = 0.0f, slope = 0.0f;
    if constexpr (kNorm) {
      float g[S::kGroups] = {}, gc[S::kGroups] = {};
#pragma unroll
      for (int i = 0; i < S::kGroups; ++i) {
        Columns<T> packed;
        float gamma[kColumnsPerDraw], d[kColumnsPerDraw], c[kColumnsPerDraw];
        packed.load(p.gamma + min(S::column(i), p.columns - kColumnsPerDraw));
        packed.unpack(gamma);
        packed.load_shared(dy + S::column(i));
        packed.unpack(d);
        packed.load_shared(sum + S::column(i));
        packed.unpack(c);
#pragma unroll
        for (int e = 0; e < kColumnsPerDraw; ++e) {
          c[e] -= mean;
          dgamma[i][e] += d[e] * (c[e] * rstd);
          dbeta[i][e] += d[e];
          gamma[e] *= d[e];
          g[i] += gamma[e];
          gc[i] += gamma[e] * c[e];
        }
      }
#pragma unroll
      for (int i = 1; i < S::kGroups; ++i) {
        g[0] += g[i];
        gc[0] += gc[i];
      }
      const float g_sum = block_reduce<S::kThreads>(g[0], Sum{});
      const float gc_sum = block_reduce<S::kThreads>(gc[0], Sum{});
      shift = rstd * g_sum * inverse;
      slope = rstd * rstd * (rstd * gc_sum) * inverse;
    }
    const auto finish = [&](auto drops) {
#pragma unroll
      for (int i = 0; i < S::kGroups; ++i) {
        const int column = S::column(i);
        Columns<T> packed;
        float d[kColumnsPerDraw] = {}, term[kColumnsPerDraw];
        if constexpr (kNorm) {
          packed.load(p.gamma + min(column, p.columns - kColumnsPerDraw));
          packed.unpack(term);
          packed.load_shared(dy + column);
          packed.unpack(d);
#pragma unroll
          for (int e = 0; e < kColumnsPerDraw; ++e) d[e] = rstd * (d[e] * term[e]) - shift;
          packed.load_shared(sum + column);
          packed.unpack(term);
#pragma unroll
          for (int e = 0; e < kColumnsPerDraw; ++e) d[e] -= slope * (term[e] - mean);
        }
        if constexpr (kStream) {
          packed.load_shared(dsum + column);
          packed.unpack(term);
#pragma unroll
          for (int e = 0; e < kColumnsPerDraw; ++e) d[e] += term[e];
        }
        packed.pack(d);
        if (column < p.columns) packed.store(p.dresidual + output + i * S::kStride);
        if constexpr (drops.value) {
          p.dropout.apply(p.dropout.draw(rng, row, column / kColumnsPerDraw), d);
          packed.pack(d);
          if (column < p.columns) packed.store(p.dx + output + i * S::kStride);
        }
#pragma unroll
        for (int e = 0; e < kColumnsPerDraw; ++e) dbias[i][e] += d[e];
      }
    };
    if (p.dx != nullptr) {
      finish(std::true_type{});
    } else {
      finish(std::false_type{});
    }
    sync_row<S>();  // the stage has been read and may be filled again
    if (p.stages == 1) copy_inputs<T, S, kNorm, kStream>(p, row + step, stages);
  }
  if (p.partials == nullptr) return;
  start_next_kernel();

  // The rows of a block are added up in shared memory, the three kinds of sums side by side.
  float* const partials = p.partials + int64_t{kMaxSums} * blockIdx.x * p.columns;
  float* const room = reinterpret_cast<float*>(shared) + threadIdx.y * kMaxSums * p.columns;
  float* const target = kBwdRows<S> == 1 ? partials : room;
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
  if constexpr (kBwdRows<S> > 1) {
    __syncthreads();
    const float* const sums = reinterpret_cast<const float*>(shared);
    const int all = kMaxSums * p.columns;
    for (int i = threadIdx.y * S::kThreads + threadIdx.x; i < all; i += S::kThreads * blockDim.y) {
      float total = 0.0f;
      for (int y = 0; y < blockDim.y; ++y) total += sums[y * all + i];
      partials[i] = total;
    }
  }
}

// Fills in how rows are staged and where partial sums go, launches, and adds the sums up.
template <typename T, typename S, bool kNorm, bool kStream>
void launch_bwd(BwdParams<T> params, const Tensor& grad, const Gradients& gradients,
                bool accumulate) {
  const auto kernel = dropout_residual_layer_norm_bwd_kernel<T, S, kNorm, kStream>;
  const int32_t device = grad.get_device();
  const cudaStream_t stream = current_stream(device);
  const int64_t columns = params.columns;
  const bool sums = gradients.of[0].data != nullptr || gradients.of[1].data != nullptr ||
                    gradients.of[2].data != nullptr;

  int room = 0;
  cudaDeviceGetAttribute(&room, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
  room -= kStaticBytes;
  int bytes = (2 * kNorm + kStream) * S::kColumns * static_cast<int>(sizeof(T));
  params.stages = 2 * bytes <= room ? 2 : 1;
  bytes *= params.stages;
  if (kBwdRows<S> > 1) bytes = std::max<int>(bytes, kMaxSums * S::kColumns * sizeof(float));
  const int rows = std::min(room / bytes, kBwdRows<S>);
  bytes *= rows;
  const dim3 threads(S::kThreads, rows);
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
  const int64_t blocks = std::min(blocks_for(params.rows, rows),
                                  resident_blocks(kernel, S::kThreads * rows, device, bytes));
  Tensor partials = allocate(grad, {sums ? blocks : 0, kMaxSums, columns}, ScalarType::Float);
  params.partials = output_of<float>(partials);
  if (params.rows > 0 && columns > 0) {
    kernel<<<static_cast<unsigned>(blocks), threads, bytes, stream>>>(params);
    check_launch("dropout_residual_layer_norm_bwd");
  }
  if (sums) {
    add_partials(partials.const_data_ptr<float>(), blocks, columns, kMaxSums, gradients, accumulate,
                 stream);
  }
}

std::tuple<Tensor, Tensor> dropout_residual_layer_norm_bwd(
    std::optional<Tensor> dy, std::optional<Tensor> dsum, const Tensor& sum,
    std::optional<Tensor> gamma, const Tensor& mean, const Tensor& rstd, double p,
    const Tensor& rng, int64_t site, std::optional<Tensor> dgamma, std::optional<Tensor> dbeta,
    std::optional<Tensor> dbias, bool accumulate) {
  const char* const op = "dropout_residual_layer_norm_bwd";
  require(dy.has_value() || dsum.has_value(), op, ": one of dy and dsum must be given");
  check_optional_rows(op, "dy", dy);
  check_optional_rows(op, "dsum", dsum);
  if (dy.has_value()) {
    check_rows(op, "sum", sum);
    check_optional_rows(op, "gamma", gamma);
    require(mean.is_contiguous() && rstd.is_contiguous(), op, ": mean and rstd must be contiguous");
  }
  Gradients gradients{{{}, {}, gradient_of(op, "dbias", dbias)}};
  if (dy.has_value()) {  // otherwise there was no LayerNorm, and nothing to say of its parameters
    gradients.of[0] = gradient_of(op, "dgamma", dgamma);
    gradients.of[1] = gradient_of(op, "dbeta", dbeta);
  }
  const Tensor& grad = dy.has_value() ? *dy : *dsum;
  const int64_t rows = grad.size(0), columns = grad.size(1);
  check_width(op, columns);
  Tensor dx = empty_rows(grad, p > 0.0);
  Tensor dresidual = empty_rows(grad, true);

  const torch::stable::accelerator::DeviceGuard guard(grad.get_device());
  const DropoutFactors dropout(rng.const_data_ptr<int64_t>(), site, p);
  dispatch_float(grad.scalar_type(), "dropout_residual_layer_norm_bwd: dy", [&](auto zero) {
    using T = decltype(zero);
    const BwdParams<T> params{data_of<T>(dy),
                              data_of<T>(dsum),
                              data_of<T>(sum),
                              data_of<T>(gamma),
                              data_of<float>(mean),
                              data_of<float>(rstd),
                              output_of<T>(dx),
                              output_of<T>(dresidual),
                              nullptr,
                              stride_of(dy),
                              stride_of(dsum),
                              dy.has_value() ? sum.stride(0) : 0,
                              rows,
                              static_cast<int>(columns),
                              0,
                              dropout};
    dispatch_shape(columns, [&](auto shape) {
      using S = decltype(shape);
      if (!dsum.has_value()) {
        launch_bwd<T, S, true, false>(params, grad, gradients, accumulate);
      } else if (dy.has_value()) {
        launch_bwd<T, S, true, true>(params, grad, gradients, accumulate);
      } else {
        launch_bwd<T, S, false, true>(params, grad, gradients, accumulate);
      }
    });
  });
  return {dx, dresidual};
}

STABLE_TORCH_LIBRARY_IMPL(lightseq, CUDA, m) {
  m.impl("dropout_residual_layer_norm_bwd", TORCH_BOX(&dropout_residual_layer_norm_bwd));
}

}  // namespace
}  // namespace lightseq
