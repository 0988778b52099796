// Powers of two in one instruction, and exponentials of logits.
#pragma once

#include <type_traits>

namespace lightseq {

constexpr float kLog2E = 1.4426950408889634f;

// The hardware's approximation, with an error of at most 2 ulp. Denormals are flushed to zero,
// which is accurate enough here; CUDA's exp2f spends several more instructions on them.
__device__ __forceinline__ float exp2_approximate(float x) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
}

// exp((x - shift) * rate) for logits x of type T. For 16-bit logits in two instructions. This is
// accurate enough: the hardware's power of two has an error of 2 ulp, and rounding shift * log2(e)
// has no larger effect than rounding the shift.
template <typename T>
class Exponential {
 public:
  __device__ __forceinline__ explicit Exponential(float shift, float rate = 1.0f)
      : rate_(kExact ? rate : rate * kLog2E), shift_(kExact ? shift : -shift * rate_) {}
  __device__ __forceinline__ float operator()(float x) const {
    if constexpr (kExact) return expf((x - shift_) * rate_);
    return exp2_approximate(fmaf(x, rate_, shift_));
  }

 private:
  static constexpr bool kExact = std::is_same_v<T, float>;
  float rate_, shift_;
};

}  // namespace lightseq
