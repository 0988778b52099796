// Maximum and minimum that propagate NaN; fmaxf and fminf would drop it.
//
// The policy: in training, a NaN in any tensor reaches the loss or the gradient norm, and the run
// stops or skips the update, as in fairseq. Our kernels propagate NaN. The only exception is
// cuBLASLt's ReLU epilogue, y = relu(x W^T + b), which turns NaN into 0. Then the NaN reappears in
// backward: the gradient of y is 0 there, and 0 * NaN is NaN. A NaN in W appears in dx = dy W, a
// NaN in x appears in dW = dy^T x. Nothing multiplies by b, so activation_linear_bwd writes a NaN
// of b to db. Without backward, in validation and translation, the NaN may stay hidden.
#pragma once

#include <cuda_runtime.h>

namespace lightseq {

__device__ __forceinline__ float at_least(float x, float bound) {
  asm("max.NaN.f32 %0, %0, %1;" : "+f"(x) : "f"(bound));
  return x;
}

__device__ __forceinline__ float at_most(float x, float bound) {
  asm("min.NaN.f32 %0, %0, %1;" : "+f"(x) : "f"(bound));
  return x;
}

__device__ __forceinline__ float relu(float x) { return at_least(x, 0.0f); }

}  // namespace lightseq
