// Dropout mask: which elements of a [rows, columns] activation are kept. See common/philox.cuh for
// the random numbers.
//
//   keep[r, c] = u16(seed, micro-batch, site, r, c) >= min(round(p * 65536), 65535)
//
// The torch references (lightseq_fairseq/ops) use this op if they run on a GPU. Kernels with
// dropout do not use it: in forward and backward they call keep_bits(), or keep_word() in
// attention, for the elements in their registers. This file is also the smallest complete example
// of a kernel.
//
//   saved for backward   nothing
//   bytes moved          rows * columns written (one byte per element), 16 read
//   determinism          every element is a pure function of p and the arguments of u16
//
// A thread generates the bits of 8 adjacent columns with one Philox call. A warp processes one row,
// a block 8 rows.

#include "common/check.h"
#include "common/launch.cuh"
#include "common/philox.cuh"

namespace lightseq {
namespace {

constexpr int kLanes = 32;
constexpr int kRowsPerBlock = 8;

__global__ void dropout_mask_kernel(bool* __restrict__ keep, Dropout dropout, int64_t rows,
                                    int64_t columns) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kRowsPerBlock + threadIdx.y;
  if (row >= rows) return;
  bool* const keep_row = keep + row * columns;
  const bool aligned = columns % kColumnsPerDraw == 0;
  for (int64_t group = threadIdx.x; group * kColumnsPerDraw < columns; group += kLanes) {
    const uint32_t bits = keep_bits(dropout, row, group);
    const int64_t first = group * kColumnsPerDraw;
    if (aligned) {
      uint64_t bytes = 0;
#pragma unroll
      for (int e = 0; e < kColumnsPerDraw; ++e) {
        bytes |= static_cast<uint64_t>(bits >> e & 1u) << (8 * e);
      }
      *reinterpret_cast<uint64_t*>(keep_row + first) = bytes;
    } else {
      for (int e = 0; e < kColumnsPerDraw && first + e < columns; ++e) {
        keep_row[first + e] = bits >> e & 1u;
      }
    }
  }
}

// rng int64 [2] = (seed, micro-batch) -> bool [rows, columns]
Tensor dropout_mask(const Tensor& rng, int64_t site, int64_t rows, int64_t columns, double p) {
  require(rng.scalar_type() == ScalarType::Long && rng.numel() == 2 && rng.is_contiguous(),
          "dropout_mask: rng must be a contiguous int64 tensor of two elements");
  require(rows >= 0 && columns >= 0, "dropout_mask: rows and columns must not be negative, got ",
          rows, " and ", columns);
  require(p >= 0.0 && p < 1.0, "dropout_mask: p must be at least 0 and below 1, got ", p);
  Tensor keep = allocate(rng, {rows, columns}, ScalarType::Bool);
  if (keep.numel() == 0) return keep;

  const DeviceGuard guard(rng.get_device());
  const Dropout dropout{rng.const_data_ptr<int64_t>(), static_cast<uint32_t>(site),
                        Dropout::threshold_of(p)};
  launch({.op = "dropout_mask",
          .grid = dim3(blocks_for(rows, kRowsPerBlock)),
          .block = dim3(kLanes, kRowsPerBlock)},
         dropout_mask_kernel, keep.mutable_data_ptr<bool>(), dropout, rows, columns);
  return keep;
}

STABLE_TORCH_LIBRARY_IMPL(lightseq, CUDA, m) { m.impl("dropout_mask", TORCH_BOX(&dropout_mask)); }

}  // namespace
}  // namespace lightseq
