// The second step of a column sum, for gradients of parameters.
//
// A kernel that iterates over rows keeps column sums in registers. Each block writes one row of
// partial sums: float [blocks, sums, columns], where `sums` is the number of parameters whose
// gradients the kernel computes. add_partials() reduces over the blocks and writes each sum to the
// caller's gradient, rounded once. The order of additions depends only on the sizes, so the same
// input gives the same bits.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <optional>

#include "common/check.h"

namespace lightseq {

constexpr int kMaxSums = 3;

// Output of a sum: a contiguous tensor of any float type, or none (data is null).
struct Gradient {
  void* data = nullptr;
  ScalarType type = ScalarType::Float;
  // The parameter, if a NaN in it shall become NaN in its gradient; otherwise null.
  ScalarType parameter_type = ScalarType::Float;
  const void* parameter = nullptr;
};

struct Gradients {
  Gradient of[kMaxSums];
};

inline Gradient gradient_of(const char* op, const char* name, const std::optional<Tensor>& tensor,
                            const std::optional<Tensor>& parameter = std::nullopt) {
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

// partials: float [blocks, sums, columns]. Reduces them (row/column_sum.cu) at once or, if all
// gradients are in the buffer of defer_column_sums(), at the latest in flush_column_sums().
void add_partials(const Tensor& partials, const Gradients& gradients, bool accumulate);

}  // namespace lightseq
