// Values that a kernel reads one at a time: token ids, a loss scale, one gradient per row. Their
// dtype is known only at run time. A branch on it is cheaper than another instance of the kernel.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>

#include "common/vec.cuh"

namespace lightseq {

// A vector of float16, bfloat16, float32 or float64 with any stride (0: an expanded scalar).
struct Floats {
  const void* data;
  int64_t stride;
  ScalarType type;

  explicit Floats(const Tensor& x)
      : data(x.const_data_ptr()), stride(x.dim() == 0 ? 0 : x.stride(0)), type(x.scalar_type()) {}

  template <typename Result>
  __device__ __forceinline__ Result at(int64_t i) const {
    const int64_t place = i * stride;
    switch (type) {
      case ScalarType::Double:
        return static_cast<Result>(static_cast<const double*>(data)[place]);
      case ScalarType::Float:
        return static_cast<Result>(static_cast<const float*>(data)[place]);
      case ScalarType::Half:
        return static_cast<Result>(to_float(static_cast<const __half*>(data)[place]));
      default:
        return static_cast<Result>(to_float(static_cast<const __nv_bfloat16*>(data)[place]));
    }
  }
};

// A vector of int32 or int64 with any stride, or a single number.
struct Indices {
  const void* data;
  int64_t stride;
  bool wide;

  explicit Indices(const Tensor& x)
      : data(x.const_data_ptr()),
        stride(x.dim() == 0 ? 0 : x.stride(0)),
        wide(x.scalar_type() == ScalarType::Long) {}

  __device__ __forceinline__ int64_t at(int64_t i) const {
    return wide ? static_cast<const int64_t*>(data)[i * stride]
                : static_cast<const int32_t*>(data)[i * stride];
  }
};

}  // namespace lightseq
