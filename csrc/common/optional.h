// Optional tensors of an op: pointers, strides and checks, with a substitute if the tensor is
// missing.
#pragma once

#include <cstdint>
#include <optional>

#include "common/check.h"

namespace lightseq {

template <typename T>
const T* data_of(const std::optional<Tensor>& tensor) {
  return tensor.has_value() ? static_cast<const T*>(tensor->const_data_ptr()) : nullptr;
}

// Pointer to an output; null if the output is empty, which means that it does not exist.
template <typename T>
T* output_of(const Tensor& tensor) {
  return tensor.numel() > 0 ? static_cast<T*>(tensor.mutable_data_ptr()) : nullptr;
}

// Row stride in elements; 0 if the tensor is missing.
inline int64_t stride_of(const std::optional<Tensor>& tensor) {
  return tensor.has_value() ? tensor->stride(0) : 0;
}

inline void check_optional_rows(const char* op, const char* name,
                                const std::optional<Tensor>& tensor) {
  if (tensor.has_value()) check_rows(op, name, *tensor);
}

}  // namespace lightseq
