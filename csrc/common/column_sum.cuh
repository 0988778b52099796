// The second half of a sum over rows, for gradients of parameters.
//
// A kernel that walks over rows keeps the sums of its columns in registers and leaves one row of
// partial sums a block behind: float [blocks, sums, columns], where `sums` counts the parameters
// whose gradients it makes. add_partials() adds the blocks up and writes each sum into the gradient
// that the caller owns, rounded once. Everything is added in an order that depends on the sizes
// alone, so the same input gives the same bits.
#pragma once

#include <cuda_runtime.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <optional>

#include "check.h"
#include "dependent_launch.cuh"
#include "reduce.cuh"
#include "vec.cuh"

namespace lightseq {

constexpr int kMaxSums = 3;

// Where a sum goes: a contiguous tensor of any float type, or nowhere (data is null).
struct Gradient {
  void* data = nullptr;
  torch::headeronly::ScalarType type = torch::headeronly::ScalarType::Float;
};

struct Gradients {
  Gradient of[kMaxSums];
};

inline Gradient gradient_of(const char* op, const char* name,
                            const std::optional<torch::stable::Tensor>& tensor) {
  if (!tensor.has_value()) return {};
  require(tensor->is_contiguous(), op, ": ", name, " must be contiguous");
  return {tensor->mutable_data_ptr(), tensor->scalar_type()};
}

template <typename T>
__device__ __forceinline__ void store_gradient(void* data, int64_t i, float x, bool accumulate) {
  T* const target = static_cast<T*>(data) + i;
  if constexpr (sizeof(T) == 8) {
    *target = accumulate ? *target + x : x;
  } else {
    *target = from_float<T>(accumulate ? to_float(*target) + x : x);
  }
}

// Warps of a block, so few that one which starts early has a chance beside the previous kernel's,
// and how many rows of partials each of them has on the way at a time: all of them up to 136
// blocks.
constexpr int kSumWarps = 8;
constexpr int kSumLoads = 17;

// A block adds 32 columns: its warps share out the rows of partials.
static __global__ void __launch_bounds__(kWarp* kSumWarps)
    column_sum_kernel(const float* partials, int blocks, int columns,
                      const __grid_constant__ Gradients gradients, bool accumulate) {
  using torch::headeronly::ScalarType;
  const Gradient& gradient = gradients.of[blockIdx.y];
  if (gradient.data == nullptr) return;
  const int column = static_cast<int>(blockIdx.x) * kWarp + threadIdx.x;
  const int64_t pitch = static_cast<int64_t>(gridDim.y) * columns;
  wait_for_previous_kernel();
  float sum = 0.0f;
  if (column < columns) {
    partials += static_cast<int64_t>(blockIdx.y) * columns + column;
    for (int first = threadIdx.y; first < blocks; first += kSumLoads * kSumWarps) {
      const float* at = partials + first * pitch;
      float parts[kSumLoads];
#pragma unroll
      for (int u = 0; u < kSumLoads; ++u, at += kSumWarps * pitch) {
        parts[u] = first + u * kSumWarps < blocks ? *at : 0.0f;
      }
#pragma unroll
      for (int u = 0; u < kSumLoads; ++u) sum += parts[u];
    }
  }
  __shared__ float of_warp[kSumWarps][kWarp];
  of_warp[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || column >= columns) return;
#pragma unroll
  for (int warp = 1; warp < kSumWarps; ++warp) sum += of_warp[warp][threadIdx.x];
  switch (gradient.type) {
    case ScalarType::Double:
      return store_gradient<double>(gradient.data, column, sum, accumulate);
    case ScalarType::Half:
      return store_gradient<__half>(gradient.data, column, sum, accumulate);
    case ScalarType::BFloat16:
      return store_gradient<__nv_bfloat16>(gradient.data, column, sum, accumulate);
    default:
      return store_gradient<float>(gradient.data, column, sum, accumulate);
  }
}

inline void add_partials(const float* partials, int64_t blocks, int64_t columns, int sums,
                         const Gradients& gradients, bool accumulate, cudaStream_t stream) {
  if (columns == 0) return;
  // It waits for the previous kernel before it reads what that leaves behind.
  launch_early("column_sum", column_sum_kernel, dim3(blocks_for(columns, kWarp), sums),
               dim3(kWarp, kSumWarps), 0, stream, partials, static_cast<int>(blocks),
               static_cast<int>(columns), gradients, accumulate);
}

}  // namespace lightseq
