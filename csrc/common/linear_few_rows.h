// linear_fwd of few rows, as decoding has them: see linear_few_rows.cu.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "matmul.h"

namespace lightseq {

constexpr int64_t kFewRows = 16;

// Whether it is a product for multiply_few_rows().
inline bool has_few_rows(const Product& p) {
  return p.a.rows <= kFewRows && p.is_forward_in_16_bits();
}

void multiply_few_rows(const Product& p, cudaStream_t stream);

}  // namespace lightseq
