// Functions of ops that other ops call.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <string>

#include "common/columns.cuh"
#include "linear/activation.cuh"

namespace lightseq {

// linear.cu
torch::stable::Tensor linear_fwd(const torch::stable::Tensor& x,
                                 const torch::stable::Tensor& weight,
                                 const std::optional<torch::stable::Tensor>& bias, bool relu);
torch::stable::Tensor linear_bwd(const torch::stable::Tensor& dy, const torch::stable::Tensor& x,
                                 const torch::stable::Tensor& weight,
                                 std::optional<torch::stable::Tensor> dweight,
                                 std::optional<torch::stable::Tensor> dbias,
                                 std::optional<torch::stable::Tensor> onto, bool accumulate,
                                 bool need_dx);

// bias_activation_dropout.cu
torch::stable::Tensor bias_activation_dropout_fwd(const torch::stable::Tensor& x,
                                                  std::optional<torch::stable::Tensor> bias,
                                                  std::string activation, double p,
                                                  const torch::stable::Tensor& rng, int64_t site);

// Memory for the slope of y (slope.cuh); empty if it is not needed.
torch::stable::Tensor allocate_slope(const torch::stable::Tensor& y, bool need_slope);

// Returns y = dropout(activation(z)), and writes its slope, unless it is empty.
torch::stable::Tensor activation_fwd(const char* op, const torch::stable::Tensor& z,
                                     Activation activation, const DropoutFactors& dropout,
                                     const torch::stable::Tensor& slope);

// dy * scale * slope or, without slope, dy * scale where x is positive or NaN, else 0. Its column
// sum goes to dbias, which is NaN where `bias` is NaN.
torch::stable::Tensor activation_bwd(const char* op, const torch::stable::Tensor& dy,
                                     const torch::stable::Tensor& x,
                                     const std::optional<torch::stable::Tensor>& slope, float scale,
                                     std::optional<torch::stable::Tensor> dbias,
                                     const std::optional<torch::stable::Tensor>& bias,
                                     bool accumulate);

}  // namespace lightseq
