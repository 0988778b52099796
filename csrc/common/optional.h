// Tensors that an op may do without: what a launcher asks of them, and what stands for them when
// they are missing.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>

#include "check.h"

namespace lightseq {

template <typename T>
const T* data_of(const std::optional<torch::stable::Tensor>& tensor) {
  return tensor.has_value() ? static_cast<const T*>(tensor->const_data_ptr()) : nullptr;
}

// Of an output that is empty where it does not exist.
template <typename T>
T* output_of(const torch::stable::Tensor& tensor) {
  return tensor.numel() > 0 ? static_cast<T*>(tensor.mutable_data_ptr()) : nullptr;
}

// From one row to the next.
inline int64_t stride_of(const std::optional<torch::stable::Tensor>& tensor) {
  return tensor.has_value() ? tensor->stride(0) : 0;
}

inline void check_optional_rows(const char* op, const char* name,
                                const std::optional<torch::stable::Tensor>& tensor) {
  if (tensor.has_value()) check_rows(op, name, *tensor);
}

}  // namespace lightseq
