// linear_fwd of few rows, as decoding has them: see linear_few_rows.cu.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <climits>
#include <cstdint>

#include "matmul.h"

namespace lightseq {

constexpr int64_t kFewRows = 16;

// Whether it is a product for multiply_few_rows().
inline bool has_few_rows(const Product& p) {
  using torch::headeronly::ScalarType;
  return p.a.rows <= kFewRows && p.transpose_b && !p.transpose_a && !p.accumulate &&
         p.a.type != ScalarType::Float && p.out.type == p.a.type &&
         std::max(p.a.columns, p.out.columns) <= INT_MAX / 2;
}

void multiply_few_rows(const Product& p, cudaStream_t stream);

}  // namespace lightseq
