// How forward stores the derivative of gelu or silu, the slope, for backward. The slope is without
// dropout's 1 / (1 - p), and 0 where an element is dropped.
//
// It lies between -0.13 and 1.13. For bfloat16, a byte has it as the code round(200 slope) + 28. So
// its error is at most 1/400, while that of a bfloat16 between 1/2 and 1 is 1/512, and above 1
// 1/256. 0 and 1 are exact. The code of NaN is 255; backward does not read it as NaN, because y has
// the NaN, too. Other types store the slope as it is.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "common/columns.cuh"

namespace lightseq {

constexpr float kSlopeSteps = 200.0f;
// Numbers from 2^23 on have no fraction. So if this one is added, the sum is rounded to an integer,
// and its lowest byte is the code.
constexpr float kSlopeZero = 8388608.0f + 28.0f;

// The slope, times kSlopeSteps, whose code is byte number i of the word.
__device__ __forceinline__ float scaled_slope(uint32_t word, int i) {
  return __uint_as_float(__byte_perm(word, 0x4b000000u, 0x7440u + i)) - kSlopeZero;
}

// The slopes of eight columns of a row.
template <typename T>
struct SlopeColumns : Columns<T> {};

template <>
struct SlopeColumns<__nv_bfloat16> {
  using Number = uint8_t;
  uint2 words;

  __device__ __forceinline__ void load_cg(const uint8_t* address) {
    words = __ldcg(reinterpret_cast<const uint2*>(address));
  }

  __device__ __forceinline__ void store(uint8_t* address) const {
    *reinterpret_cast<uint2*>(address) = words;
  }

  __device__ __forceinline__ void unpack(float (&x)[kColumnsPerDraw]) const {
#pragma unroll
    for (int e = 0; e < kColumnsPerDraw; ++e) {
      x[e] = scaled_slope(e < 4 ? words.x : words.y, e % 4) * (1.0f / kSlopeSteps);
    }
  }

  __device__ __forceinline__ void pack(const float (&x)[kColumnsPerDraw]) {
    uint32_t codes[kColumnsPerDraw];
#pragma unroll
    for (int e = 0; e < kColumnsPerDraw; ++e) {
      codes[e] = __float_as_uint(fmaf(x[e], kSlopeSteps, kSlopeZero));
    }
    const auto four = [&](int e) {
      return __byte_perm(__byte_perm(codes[e], codes[e + 1], 0x0040),
                         __byte_perm(codes[e + 2], codes[e + 3], 0x0040), 0x5410);
    };
    words = {four(0), four(4)};
  }
};

}  // namespace lightseq
