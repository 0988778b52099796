// The second half of a sum over rows, for gradients of parameters.
//
// A kernel that walks over rows keeps the sums of its columns in registers and leaves one row of
// partial sums a block behind: float [blocks, sums, columns], where `sums` counts the parameters
// whose gradients it makes. add_partials() adds the blocks up and writes each sum into the gradient
// that the caller owns, rounded once. Everything is added in an order that depends on the sizes
// alone, so the same input gives the same bits.
#pragma once

#include <cuda_runtime.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <optional>

#include "check.h"

namespace lightseq {

constexpr int kMaxSums = 3;

// Where a sum goes: a contiguous tensor of any float type, or nowhere (data is null).
struct Gradient {
  void* data = nullptr;
  torch::headeronly::ScalarType type = torch::headeronly::ScalarType::Float;
  // Of what parameter, where a NaN in that shall be one in the gradient; or null.
  torch::headeronly::ScalarType parameter_type = torch::headeronly::ScalarType::Float;
  const void* parameter = nullptr;
};

struct Gradients {
  Gradient of[kMaxSums];
};

inline Gradient gradient_of(const char* op, const char* name,
                            const std::optional<torch::stable::Tensor>& tensor,
                            const std::optional<torch::stable::Tensor>& parameter = std::nullopt) {
  if (!tensor.has_value()) return {};
  require(tensor->is_contiguous(), op, ": ", name, " must be contiguous");
  Gradient gradient{tensor->mutable_data_ptr(), tensor->scalar_type()};
  if (parameter.has_value()) {
    require(parameter->is_contiguous(), op, ": the parameter of ", name, " must be contiguous");
    gradient.parameter = parameter->const_data_ptr();
    gradient.parameter_type = parameter->scalar_type();
  }
  return gradient;
}

// partials: float [blocks, sums, columns]. Adds them up in column_sum.cu: at once, or, if all of
// the gradients lie in a buffer of which defer_column_sums() has said so, when flush_column_sums()
// is called at the latest.
void add_partials(const torch::stable::Tensor& partials, const Gradients& gradients,
                  bool accumulate, cudaStream_t stream);

}  // namespace lightseq
