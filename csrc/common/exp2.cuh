// Powers of two in one instruction.
#pragma once

namespace lightseq {

constexpr float kLog2E = 1.4426950408889634f;

// The hardware's approximation, with an error of at most 2 ulp. Denormals are flushed to zero,
// which is accurate enough here; CUDA's exp2f spends several more instructions on them.
__device__ __forceinline__ float exp2_approximate(float x) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
}

}  // namespace lightseq
