// Vector loads and stores, and conversions: tensors are read and written 16 bytes at a time, and
// computed in float.
//
//   Vec<T>          16 bytes of T: 8 halves or 4 floats
//   load, store     one 16-byte access; the address must be a multiple of 16 bytes
//   load_cg         a load that bypasses L1, for data that no kernel reads again soon
//   pack_pair, unpack_pair   two 16-bit numbers in a register
//   dispatch_float  calls a generic lambda with the tensor's element type
//   dispatch_value  calls a generic lambda with a value that is a template argument
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

#include "common/check.h"

namespace lightseq {

constexpr int kVecBytes = 16;

template <typename T>
struct alignas(kVecBytes) Vec {
  static constexpr int kSize = kVecBytes / sizeof(T);
  T values[kSize];
};

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ __half from_float<__half>(float x) {
  return __float2half_rn(x);
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}

template <typename T>
__device__ __forceinline__ Vec<T> load(const T* address) {
  return *reinterpret_cast<const Vec<T>*>(address);
}

template <typename T>
__device__ __forceinline__ void store(T* address, const Vec<T>& x) {
  *reinterpret_cast<Vec<T>*>(address) = x;
}

template <typename T>
__device__ __forceinline__ Vec<T> load_cg(const T* address) {
  const int4 bits = __ldcg(reinterpret_cast<const int4*>(address));
  return *reinterpret_cast<const Vec<T>*>(&bits);
}

// The two numbers of a word in memory; the first is in the low half.
template <typename T>
__device__ __forceinline__ float2 unpack_pair(uint32_t word);
template <>
__device__ __forceinline__ float2 unpack_pair<__half>(uint32_t word) {
  return __half22float2(*reinterpret_cast<const __half2*>(&word));
}
template <>
__device__ __forceinline__ float2 unpack_pair<__nv_bfloat16>(uint32_t word) {
  return {__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u)};
}

template <typename T>
__device__ __forceinline__ uint32_t pack_pair(float first, float second);
template <>
__device__ __forceinline__ uint32_t pack_pair<__half>(float first, float second) {
  const __half2 pair = __floats2half2_rn(first, second);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
template <>
__device__ __forceinline__ uint32_t pack_pair<__nv_bfloat16>(float first, float second) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(first, second);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

// dispatch_float(type, "op: x", [&](auto zero) { using T = decltype(zero); ... })
template <typename Function>
void dispatch_float(ScalarType type, const char* what, Function&& function) {
  switch (type) {
    case ScalarType::Float:
      return function(float{});
    case ScalarType::Half:
      return function(__half{});
    case ScalarType::BFloat16:
      return function(__nv_bfloat16{});
    default:
      require(false, what, " must be float32, float16 or bfloat16 on a GPU");
  }
}

// dispatch_value<1, 2>(value, [&](auto constant) { ... constant.value ... }); an error if `value`
// is none of these.
template <auto... kValues, typename Value, typename Function>
void dispatch_value(Value value, Function&& function) {
  const bool is_known = ((value == kValues &&
                          (function(std::integral_constant<decltype(kValues), kValues>{}), true)) ||
                         ...);
  require(is_known, "lightseq: there is no kernel for these arguments");
}

// As dispatch_float for a type that is known to have 16 bits.
template <typename Function>
void dispatch_16_bits(ScalarType type, Function&& function) {
  type == ScalarType::Half ? function(__half{}) : function(__nv_bfloat16{});
}

}  // namespace lightseq
