// Powers of two in one instruction.
#pragma once

namespace lightseq {

constexpr float kLog2E = 1.4426950408889634f;

// The hardware's approximation, good to 2 units in the last place. CUDA's own functions spend
// several instructions more on denormal numbers, which are as good as zero here.
__device__ __forceinline__ float exp2_approximate(float x) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
}

}  // namespace lightseq
