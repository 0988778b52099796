// Maximum and minimum that keep a NaN, where fmaxf and fminf would drop it.
//
// The policy: in training a NaN, in whatever tensor it begins, reaches the loss or the gradient
// norm, and the run stops or skips the update as fairseq does. Kernels of ours keep it. cublasLt's
// ReLU alone, y = relu(x W^T + b), makes 0 of it, and backward shows what forward has hidden: the
// gradient of y is 0 there, and 0 times NaN is NaN. One in W shows in dx = dy W, one in x in
// dW = dy^T x, and one in b, which nothing multiplies by, is put into db by relu_linear_bwd. Where
// there is no backward, in validation and in translation, it may stay hidden.
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
