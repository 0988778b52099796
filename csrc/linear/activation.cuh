// Activation functions and their derivatives, with bias and dropout. gelu is the erf form,
// gelu_accurate the tanh form; silu(v) is v sigmoid(v).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <string>
#include <type_traits>

#include "common/check.h"
#include "common/columns.cuh"
#include "common/exp2.cuh"
#include "linear/nan.cuh"
#include "linear/slope.cuh"

namespace lightseq {

enum class Activation { kIdentity, kRelu, kGelu, kGeluAccurate, kSilu };

constexpr float kSqrtHalf = 0.70710678118654752f;          // 1 / sqrt(2)
constexpr float kSqrtTwoOverPi = 0.79788456080286536f;     // sqrt(2 / pi)
constexpr float kLog2OfDensityAt0 = -1.3257480647361593f;  // log2(1 / sqrt(2 pi))
constexpr float kGeluCubic = 0.044715f;

// Error of at most 1 ulp (PTX manual).
__device__ __forceinline__ float reciprocal_approximate(float x) {
  asm("rcp.approx.ftz.f32 %0, %0;" : "+f"(x));
  return x;
}

// The probability that a standard normal variable exceeds |v|.
//
// For 16-bit types, computing gelu with erff would take longer than its memory accesses. So these
// types use 2^polynomial(|v|), fitted to log2 of the probability: for float16 on [0, 7], with a
// relative error below 6e-6 up to |v| = 4 and below 4e-5 up to 5.5; for bfloat16 on [0, 5.5], with
// one below 2.5e-4. Rounding to these types has one of 5e-4 and 4e-3. For larger |v| the relative
// error grows, while the probability itself falls below 2e-8.
template <typename T>
__device__ __forceinline__ float normal_tail(float v) {
  const float a = fabsf(v);
  if constexpr (sizeof(T) == sizeof(float)) return 0.5f - 0.5f * erff(a * kSqrtHalf);
  float log2;
  const auto polynomial = [&](float highest, auto... others) {
    log2 = highest;
    ((log2 = fmaf(log2, a, others)), ...);
  };
  if constexpr (std::is_same_v<T, __half>) {
    polynomial(-1.68377596e-6f, 5.90210802e-5f, -9.13685828e-4f, 8.45482573e-3f, -5.38768210e-2f,
               -0.458524436f, -1.15123546f, -0.999995947f);
  } else {
    polynomial(-2.33251300e-4f, 4.86977386e-3f, -4.45990146e-2f, -0.469681080f, -1.14626082f,
               -1.00035909f);
  }
  return exp2_approximate(log2);
}

// Beyond these bounds, an activation is v or 0 and its derivative is 1 or 0, up to 2e-36. Bounding
// v there avoids infinity * 0. The bounds of gelu_accurate and silu keep their exponentials below
// 2^126.
constexpr float kFar = 128.0f, kFarAccurate = 10.0f, kFarSilu = 87.0f;

struct Activated {
  float value, slope;  // slope: the derivative
};

// NaN passes through every activation, also relu, so that it reaches the gradient norm. The slope
// at a NaN is NaN for gelu and silu, and 1 otherwise. T: the type to which the results will be
// rounded.
template <typename T, Activation kActivation>
__device__ __forceinline__ Activated activate(float v) {
  if constexpr (kActivation == Activation::kRelu) return {relu(v), v <= 0.0f ? 0.0f : 1.0f};
  constexpr float kBound = kActivation == Activation::kGelu   ? kFar
                           : kActivation == Activation::kSilu ? kFarSilu
                                                              : kFarAccurate;
  const float above = at_least(v, -kBound);  // without an upper bound: gelu(infinity) is infinity
  const float near = at_most(above, kBound);
  if constexpr (kActivation == Activation::kGelu) {
    const float tail = normal_tail<T>(near);
    const float below = v < 0.0f ? tail : 1.0f - tail;  // probability of a number below v
    const float density = exp2_approximate(fmaf(-0.5f * kLog2E * near, near, kLog2OfDensityAt0));
    return {above * below, fmaf(near, density, below)};
  }
  // gelu_accurate(v) = v (1 + tanh(u)) / 2 = v s, with s = sigmoid(2u) = 1 / (1 + exp(-2u)) and
  // u = sqrt(2 / pi) (v + 0.044715 v^3).
  if constexpr (kActivation == Activation::kGeluAccurate) {
    constexpr float kLinear = 2.0f * kSqrtTwoOverPi, kCubic = kLinear * kGeluCubic;  // of 2u
    const float square = near * near;
    const float exponential =
        exp2_approximate(near * fmaf(-kLog2E * kCubic, square, -kLog2E * kLinear));
    const float s = reciprocal_approximate(1.0f + exponential);
    const float slope = near * fmaf(3.0f * kCubic, square, kLinear);  // v times that of 2u
    return {above * s, fmaf(slope, s * (s * exponential), s)};
  }
  if constexpr (kActivation == Activation::kSilu) {
    const float s = reciprocal_approximate(1.0f + exp2_approximate(-kLog2E * above));
    const float value = above * s;
    return {value, fmaf(at_most(value, kBound), 1.0f - s, s)};
  }
  return {v, 1.0f};
}

// The activation of v, where it is chosen at run time.
template <typename T>
__device__ __forceinline__ float activated(Activation activation, float v) {
  switch (activation) {
    case Activation::kIdentity:
      return v;
    case Activation::kRelu:
      return relu(v);
    case Activation::kGelu:
      return activate<T, Activation::kGelu>(v).value;
    case Activation::kGeluAccurate:
      return activate<T, Activation::kGeluAccurate>(v).value;
    case Activation::kSilu:
      return activate<T, Activation::kSilu>(v).value;
  }
  return v;
}

// dy times the derivative of the activation at v.
template <Activation kActivation>
struct Derivative {
  static constexpr bool kReadsX = kActivation != Activation::kIdentity;
  template <typename T>
  using Given = Columns<T>;
  template <typename T>
  __device__ __forceinline__ static float times(float dy, float v) {
    // Select, do not multiply: zero times infinity would be NaN.
    if constexpr (kActivation == Activation::kRelu) return v <= 0.0f ? 0.0f : dy;
    return dy * activate<T, kActivation>(v).slope;
  }
};

// Without a bias the values are -0: adding -0 changes no number, not even the sign of a zero.
template <typename T>
__device__ __forceinline__ void load_bias(const T* bias, int64_t column,
                                          float (&values)[kColumnsPerDraw]) {
#pragma unroll
  for (int e = 0; e < kColumnsPerDraw; ++e) values[e] = -0.0f;
  if (bias == nullptr) return;
  Columns<T> packed;
  packed.load(bias + column);
  packed.unpack(values);
}

// Replaces x by dropout(activation(x + bias)) in eight columns, and computes the slopes. drops:
// dropout.drops().
template <typename T, Activation kActivation>
__device__ __forceinline__ void activate(float (&x)[kColumnsPerDraw],
                                         const float (&bias)[kColumnsPerDraw],
                                         const DropoutFactors& dropout, bool drops, uint32_t keep,
                                         float (&slopes)[kColumnsPerDraw]) {
#pragma unroll
  for (int e = 0; e < kColumnsPerDraw; ++e) {
    const Activated activated = activate<T, kActivation>(x[e] + bias[e]);
    x[e] = activated.value;
    slopes[e] = activated.slope;
  }
  if (!drops) return;
  dropout.apply(keep, x);
#pragma unroll
  for (int e = 0; e < kColumnsPerDraw; ++e) slopes[e] *= keep >> e & 1u ? 1.0f : 0.0f;
}

// The same for packed numbers.
template <typename T, Activation kActivation>
__device__ __forceinline__ void activate_columns(const Columns<T>& x,
                                                 const float (&bias)[kColumnsPerDraw],
                                                 const DropoutFactors& dropout, bool drops,
                                                 uint32_t keep, Columns<T>& y,
                                                 SlopeColumns<T>& slope) {
  float values[kColumnsPerDraw], slopes[kColumnsPerDraw];
  x.unpack(values);
  activate<T, kActivation>(values, bias, dropout, drops, keep, slopes);
  y.pack(values);
  slope.pack(slopes);
}

// Whether forward must save the derivative. relu's follows from the output; identity's is 1.
__host__ __device__ constexpr bool has_slope(Activation activation) {
  return activation != Activation::kIdentity && activation != Activation::kRelu;
}

// These call function(constant): for all activations, all but the identity, those with a slope.
template <typename Function>
void dispatch_activation(Activation activation, Function&& function) {
  dispatch_value<Activation::kIdentity, Activation::kRelu, Activation::kGelu,
                 Activation::kGeluAccurate, Activation::kSilu>(activation, function);
}

template <typename Function>
void dispatch_nonlinear(Activation activation, Function&& function) {
  dispatch_value<Activation::kRelu, Activation::kGelu, Activation::kGeluAccurate,
                 Activation::kSilu>(activation, function);
}

template <typename Function>
void dispatch_with_slope(Activation activation, Function&& function) {
  dispatch_value<Activation::kGelu, Activation::kGeluAccurate, Activation::kSilu>(activation,
                                                                                  function);
}

inline Activation activation_of(const char* op, const std::string& name) {
  if (name == "identity") return Activation::kIdentity;
  if (name == "relu") return Activation::kRelu;
  if (name == "gelu") return Activation::kGelu;
  if (name == "gelu_accurate") return Activation::kGeluAccurate;
  require(name == "silu", op,
          ": activation must be identity, relu, gelu, gelu_accurate or silu, got ", name);
  return Activation::kSilu;
}

}  // namespace lightseq
