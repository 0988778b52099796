// Our own linear_fwd kernels (few_rows.cu, tiles.cu), whose warps split the input dimension: when
// they are used, their operands, and the epilogue that adds the warps' sums.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/columns.cuh"
#include "common/launch.cuh"
#include "common/ptx/mma.cuh"
#include "linear/activation.cuh"
#include "linear/matmul.h"
#include "linear/nan.cuh"

namespace lightseq {

constexpr int64_t kMostTiledRows = 128;  // no speed-up by multiply_by_tiles() for more rows
constexpr int kTiles = 3;                // number of its tile shapes, numbered from 1

void multiply_few_rows(const Product& p);

// False if a block of this GPU has too little shared memory for these tiles.
bool multiply_by_tiles(const Product& p, int tile, cudaStream_t stream);

// Kernel parameters of a Product with is_forward_in_16_bits() and element type T.
template <typename T>
struct LinearParams {
  const T *x, *weight, *bias;  // bias null: none
  T* y;
  int64_t x_stride, weight_stride, y_stride;
  int rows, inputs, outputs;
  int chunks;  // per warp
  Activation activation;
  bool weights_are_old;  // the previous kernel does not write weight and bias

  LinearParams(const Product& p, int64_t chunks_of_warp, cudaStream_t stream)
      : x(static_cast<const T*>(p.a.data)),
        weight(static_cast<const T*>(p.b.data)),
        bias(static_cast<const T*>(p.bias)),
        y(static_cast<T*>(p.out.data)),
        x_stride(p.a.stride),
        weight_stride(p.b.stride),
        y_stride(p.out.stride),
        rows(static_cast<int>(p.a.rows)),
        inputs(static_cast<int>(p.a.columns)),
        outputs(static_cast<int>(p.out.columns)),
        chunks(static_cast<int>(chunks_of_warp)),
        activation(p.activation),
        weights_are_old(follows_dependent_launch(stream)) {}

  // Bias of outputs `output` and `output + 1`, packed.
  __device__ __forceinline__ uint32_t bias_pair(int output) const {
    return bias == nullptr ? 0 : __ldcg(reinterpret_cast<const uint32_t*>(bias + output));
  }

  // Writes y of outputs `output` and `output + 1` from the sums of each warp.
  template <typename SumsOf>
  __device__ __forceinline__ void epilogue(int row, int output, int warps, SumsOf&& sums_of,
                                           uint32_t bias_of_both) const {
    float2 sum = sums_of(0);
#pragma unroll 8
    for (int warp = 1; warp < warps; ++warp) {
      const float2 part = sums_of(warp);
      sum.x += part.x;
      sum.y += part.y;
    }
    const float2 added = unpack_pair<T>(bias_of_both);
    sum.x += added.x;
    sum.y += added.y;
    sum = {activated<T>(activation, sum.x), activated<T>(activation, sum.y)};
    store_pair(y + row * y_stride + output, sum.x, sum.y);
  }
};

}  // namespace lightseq
