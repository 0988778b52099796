// Backward functions that other backward ops call.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>

namespace lightseq {

// linear.cu
torch::stable::Tensor linear_bwd(const torch::stable::Tensor& dy, const torch::stable::Tensor& x,
                                 const torch::stable::Tensor& weight,
                                 std::optional<torch::stable::Tensor> dweight,
                                 std::optional<torch::stable::Tensor> dbias,
                                 std::optional<torch::stable::Tensor> onto, bool accumulate,
                                 bool need_dx);

// bias_activation_dropout.cu: dy * scale where x > 0, else 0, and its column sum in dbias, which is
// NaN where `bias` is NaN.
torch::stable::Tensor relu_bwd(const torch::stable::Tensor& dy, const torch::stable::Tensor& x,
                               float scale, std::optional<torch::stable::Tensor> dbias,
                               const std::optional<torch::stable::Tensor>& bias, bool accumulate);

}  // namespace lightseq
