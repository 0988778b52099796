// linear_fwd for few rows, as in decoding: see few_rows.cu.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "linear/matmul.h"

namespace lightseq {

constexpr int64_t kFewRows = 16;

// Whether multiply_few_rows() can compute the product.
inline bool has_few_rows(const Product& p) {
  return p.a.rows <= kFewRows && p.is_forward_in_16_bits();
}

void multiply_few_rows(const Product& p);

}  // namespace lightseq
