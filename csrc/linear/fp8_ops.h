// Functions of the fp8 ops that other ops call.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <optional>

#include "common/columns.cuh"
#include "common/fp8_cast.cuh"
#include "linear/activation.cuh"

namespace lightseq {

// fp8_linear.cu
torch::stable::Tensor fp8_linear_fwd(const torch::stable::Tensor& x,
                                     const torch::stable::Tensor& x_scale,
                                     const torch::stable::Tensor& weight,
                                     const torch::stable::Tensor& weight_scale,
                                     std::optional<torch::stable::Tensor> bias);

// fp8_activation.cu

// Casts dropout(activation(z + bias)) for z [T, F] in bfloat16, and writes the slope, unless it is
// empty.
void fp8_activation_fwd(const char* op, const torch::stable::Tensor& z,
                        const torch::stable::Tensor& bias, Activation activation,
                        const DropoutFactors& dropout, const torch::stable::Tensor& slope,
                        const Cast& cast);

// Casts dy * scale * slope for dy [T, F] in bfloat16 or, without slope, dy * scale where y is
// positive or NaN, else 0. Writes partial column sums, if they are wanted.
void fp8_activation_bwd(const char* op, const torch::stable::Tensor& dy,
                        const torch::stable::Tensor& y_transpose,
                        const std::optional<torch::stable::Tensor>& slope, float scale,
                        const Cast& cast);

}  // namespace lightseq
