// Functions of ops that other ops call, and operands of products.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>

#include "common/check.h"
#include "common/columns.cuh"
#include "linear/activation.cuh"

namespace lightseq {

struct Cast;
struct CastScalars;

// An operand of a product: a tensor, which is `values` alone, or quantised (`Quantised` in
// ops/arguments.py). An op reads values or transpose; the other may be missing.
struct Operand {
  std::optional<Tensor> values, transpose, scale;

  bool is_quantised() const { return scale.has_value(); }
};

// linear.cu. activation: see Product.
Tensor linear_fwd(const Tensor& x, const Tensor& weight, const std::optional<Tensor>& bias,
                  Activation activation = Activation::kIdentity);
Tensor linear_bwd(const Tensor& dy, const Tensor& x, const Tensor& weight,
                  std::optional<Tensor> dweight, std::optional<Tensor> dbias,
                  std::optional<Tensor> onto, bool accumulate, bool need_dx);

// linear_fp8.cu: the same for quantised operands.
Tensor fp8_linear_fwd(const Operand& x, const Operand& weight, const std::optional<Tensor>& bias);
Tensor fp8_linear_bwd(const Operand& dy, const Operand& x, const Operand& weight,
                      std::optional<Tensor> dweight, std::optional<Tensor> onto, bool accumulate,
                      bool need_dx);

// linear_activation_fwd_fp8.cu: values and transpose of y, and the slope.
std::tuple<Tensor, Tensor, Tensor> fp8_linear_activation_fwd(
    const Operand& x, const Operand& weight, const Tensor& bias, Activation activation,
    const DropoutFactors& dropout, bool need_slope, const CastScalars& scalars);

// activation_linear_bwd_fp8.cu: values and transpose of dz, without dweight.
std::tuple<Tensor, Tensor> fp8_activation_linear_bwd(
    const Operand& dy, const Operand& x, const Operand& weight, const std::optional<Tensor>& slope,
    float scale, const std::optional<Tensor>& dbias, bool accumulate, const CastScalars& scalars);

// bias_activation_dropout.cu
Tensor bias_activation_dropout_fwd(const Tensor& x, std::optional<Tensor> bias,
                                   std::string activation, double p, const Tensor& rng,
                                   int64_t site);

// Memory for the slope of y (slope.cuh); empty if it is not needed.
Tensor allocate_slope(const Tensor& y, bool need_slope);

// Returns y = dropout(activation(z)), and writes its slope, unless it is empty.
Tensor activation_fwd(const char* op, const Tensor& z, Activation activation,
                      const DropoutFactors& dropout, const Tensor& slope);

// dy * scale * slope or, without slope, dy * scale where x is positive or NaN, else 0. Its column
// sum goes to dbias, which is NaN where `bias` is NaN.
Tensor activation_bwd(const char* op, const Tensor& dy, const Tensor& x,
                      const std::optional<Tensor>& slope, float scale, std::optional<Tensor> dbias,
                      const std::optional<Tensor>& bias, bool accumulate);

// fp8_activation.cu

// Casts dropout(activation(z + bias)) for z [T, F] in bfloat16, and writes the slope, unless it is
// empty.
void fp8_activation_fwd(const char* op, const Tensor& z, const Tensor& bias, Activation activation,
                        const DropoutFactors& dropout, const Tensor& slope, const Cast& cast);

// Casts dy * scale * slope for dy [T, F] in bfloat16 or, without slope, dy * scale where y is
// positive or NaN, else 0. Writes partial column sums, if they are wanted.
void fp8_activation_bwd(const char* op, const Tensor& dy, const Tensor& y_transpose,
                        const std::optional<Tensor>& slope, float scale, const Cast& cast);

}  // namespace lightseq
