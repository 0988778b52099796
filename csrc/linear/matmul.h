// One matrix product, computed by the fastest available algorithm (matmul.cu).
#pragma once

#include <cuda_runtime.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <climits>
#include <cstdint>

#include "linear/activation.cuh"

namespace lightseq {

constexpr int64_t kRowAlignment = 16;  // bytes
constexpr int64_t kFewRows = 16;       // up to them, few_rows.cu is the fastest

// A matrix in device memory.
struct Matrix {
  void* data;
  int64_t rows, columns, stride;
  ScalarType type;
  Tensor owner;

  // A vector counts as one row.
  explicit Matrix(const Tensor& x)
      : data(x.data_ptr()),
        rows(x.dim() == 2 ? x.size(0) : 1),
        columns(x.size(x.dim() - 1)),
        stride(rows > 1 ? x.stride(0) : columns),
        type(x.scalar_type()),
        owner(x) {}

  int64_t bytes(int64_t numbers) const {
    if (type == ScalarType::Float8_e4m3fn || type == ScalarType::Byte) return numbers;
    return numbers * (type == ScalarType::Float ? 4 : 2);
  }
};

// out = f(a) f(b) + bias, or out += f(a) f(b), accumulated in float32; f(x) is x or x^T. All rows
// start on 16-byte boundaries and are a multiple of 16 bytes long.
//
// With operands in E4M3, f(a) f(b) is a b^T a_scale b_scale; other forms do not exist.
struct Product {
  const char* op;
  Matrix out, a, b;
  bool transpose_a = false, transpose_b = false;
  const void* bias = nullptr;
  // Only with a bias. Apart from relu, only if has_few_rows().
  Activation activation = Activation::kIdentity;
  bool accumulate = false;
  const float *a_scale = nullptr, *b_scale = nullptr;  // in device memory; E4M3 only
  int64_t tokens = a.rows;                             // which of the sizes counts tokens

  // Whether our own kernels (few_rows.cu, tiles.cu) can compute it.
  bool is_forward_in_16_bits() const {
    return transpose_b && !transpose_a && !accumulate && a.type != ScalarType::Float &&
           out.type == a.type && std::max(a.columns, out.columns) <= INT_MAX / 2;
  }
  // Whether few_rows.cu computes it, with any activation.
  bool has_few_rows() const { return a.rows <= kFewRows && is_forward_in_16_bits(); }
};

void multiply(const Product& p);

}  // namespace lightseq
