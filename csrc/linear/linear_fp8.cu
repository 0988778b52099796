// Linear layers with operands in E4M3: y = x W^T + b. T rows (tokens), P: T rounded up to a
// multiple of 16, K inputs, N outputs.
//
//   forward    y  [T, N]   = x W^T + b                              reads x, W
//   backward   dW [N, K] (+)= dy^T x                                reads dy^T [N, P], x^T [K, P]
//              dx [T, K]   = dy W; or added to another gradient     reads dy, W^T [K, N]
//
// Each product has the form a b^T: GPUs multiply E4M3 only if both operands have the inner
// dimension adjacent. matmul.cu computes it with cuBLASLt. cuBLASLt reads the scales from device
// memory, multiplies the sums in float32 with them, adds the bias, and rounds. An old value is
// added to the rounded result, and the sum is rounded again.
//
// It accumulates without CUBLASLT_MATMUL_DESC_FAST_ACCUM: Hopper's tensor cores add with fewer bits
// than float32, so their sums are moved to float32 registers after every 128 terms.
//
//   saved for backward   nothing
//   bytes moved          each operand read once, each result written once
//   determinism          as linear.cu

#include <optional>

#include "common/check.h"
#include "common/device.h"
#include "linear/matmul.h"
#include "linear/ops.h"

namespace lightseq {
namespace {

// An operand or a result of a product.
Matrix matrix_of(const char* op, const char* name, const Tensor& x) {
  check_rows(op, name, x);
  const Matrix matrix(x);
  require(matrix.stride >= matrix.columns, op, ": rows of ", name, " must not overlap");
  return matrix;
}

const float* scale_of(const char* op, const char* name, const Tensor& scale) {
  check_aligned(op, name, scale, 16);  // cuBLASLt refuses others, without saying why
  return scale.const_data_ptr<float>();
}

}  // namespace

Tensor fp8_linear_fwd(const Operand& of_x, const Operand& of_weight,
                      const std::optional<Tensor>& bias) {
  constexpr const char* kOp = "linear_fwd";
  const Tensor &x = of_x.values.value(), &weight = of_weight.values.value();
  require_fp8(kOp, x.get_device());
  require(weight.numel() > 0, kOp, ": weight must not be empty");
  if (bias) check_rows(kOp, "bias", *bias);
  Tensor y = allocate(x, {x.size(0), weight.size(0)}, ScalarType::BFloat16);
  if (y.numel() == 0) return y;
  const DeviceGuard guard(x.get_device());
  multiply({.op = kOp,
            .out = Matrix(y),
            .a = matrix_of(kOp, "x", x),
            .b = matrix_of(kOp, "weight", weight),
            .transpose_b = true,
            .bias = bias ? bias->const_data_ptr() : nullptr,
            .a_scale = scale_of(kOp, "x_scale", *of_x.scale),
            .b_scale = scale_of(kOp, "weight_scale", *of_weight.scale)});
  return y;
}

Tensor fp8_linear_bwd(const Operand& of_dy, const Operand& of_x, const Operand& of_weight,
                      std::optional<Tensor> dweight, std::optional<Tensor> onto, bool accumulate,
                      bool need_dx) {
  constexpr const char* kOp = "linear_bwd";
  const Tensor &dy = of_dy.values.value(), &weight_transpose = of_weight.transpose.value();
  require_fp8(kOp, dy.get_device());
  require(weight_transpose.numel() > 0, kOp, ": weight_transpose must not be empty");
  const int64_t tokens = dy.size(0), inputs = weight_transpose.size(0);
  Tensor dx = need_dx ? allocate(dy, {tokens, inputs}, ScalarType::BFloat16)
                      : allocate(dy, {0}, ScalarType::BFloat16);
  const DeviceGuard guard(dy.get_device());
  if (tokens == 0) {
    if (dweight && !accumulate) torch::stable::zero_(*dweight);
    return dx;
  }
  if (dweight) {
    const Tensor& dy_transpose = of_dy.transpose.value();
    multiply({.op = kOp,
              .out = matrix_of(kOp, "dweight", *dweight),
              .a = matrix_of(kOp, "dy_transpose", dy_transpose),
              .b = matrix_of(kOp, "x_transpose", of_x.transpose.value()),
              .transpose_b = true,
              .accumulate = accumulate,
              .a_scale = scale_of(kOp, "dy_scale", *of_dy.scale),
              .b_scale = scale_of(kOp, "x_scale", *of_x.scale),
              .tokens = dy_transpose.size(1)});
  }
  if (need_dx || onto) {
    multiply({.op = kOp,
              .out = onto ? matrix_of(kOp, "onto", *onto) : Matrix(dx),
              .a = matrix_of(kOp, "dy", dy),
              .b = matrix_of(kOp, "weight_transpose", weight_transpose),
              .transpose_b = true,
              .accumulate = onto.has_value(),
              .a_scale = scale_of(kOp, "dy_scale", *of_dy.scale),
              .b_scale = scale_of(kOp, "weight_scale", *of_weight.scale)});
  }
  return dx;
}

}  // namespace lightseq
