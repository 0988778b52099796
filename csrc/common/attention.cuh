// Common code of attention and of attention in a decode step: exponentials, and the choice of the
// kernel by element type and head width.
#pragma once

#include <cstdint>
#include <string>
#include <type_traits>

#include "common/check.h"
#include "common/exp2.cuh"
#include "common/vec.cuh"

namespace lightseq::attention {

// Exponentials and logarithms. For 16-bit types to base 2: one instruction, and the factor log2(e)
// becomes part of `scale`. For float32 to base e, since the rounding of that factor would matter.
template <typename T>
struct Base {
  static constexpr bool kIsTwo = sizeof(T) == 2;
  static constexpr float kLogE = kIsTwo ? kLog2E : 1.0f;
  static constexpr float kLn = kIsTwo ? 0.6931471805599453f : 1.0f;

  static __device__ __forceinline__ float exp(float x) {
    if constexpr (!kIsTwo) return expf(x);
    return exp2_approximate(x);
  }
  static __device__ __forceinline__ float divide(float x, float y) {
    return kIsTwo ? __fdividef(x, y) : x / y;
  }
};

// Calls function(zero of the element type, width of a tile's rows). `name`: the tensor's name.
template <typename Function>
void dispatch(const char* op, const char* name, ScalarType type, int64_t width,
              Function&& function) {
  require(width % 8 == 0 && width >= 8 && width <= 128, op,
          ": the head width must be a multiple of 8 up to 128 on a GPU, got ", width);
  const std::string what = std::string(op) + ": " + name;
  dispatch_float(type, what.c_str(), [&](auto zero) {
    if (width <= 64) {
      function(zero, std::integral_constant<int, 64>{});
    } else {
      function(zero, std::integral_constant<int, 128>{});
    }
  });
}

}  // namespace lightseq::attention
