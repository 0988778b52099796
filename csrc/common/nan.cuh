// Maximum and minimum that keep a NaN, where fmaxf and fminf would drop it.
//
// The policy: in training a NaN, in whatever tensor it begins, reaches the loss or the gradient
// norm, and the run stops or skips the update as fairseq does. cublasLt's ReLU alone makes 0 of a
// NaN. One in x or in the weight shows in dx, which multiplies by them again; one in the bias shows
// in the bias's gradient (relu_linear_bwd).
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
