// How dropout_residual_layer_norm_fwd and _bwd share rows out among threads.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>

#include "philox.cuh"
#include "reduce.cuh"

namespace lightseq {

constexpr int kMaxColumns = 8192;

// A row is shared out among kThreads, which take every kThreads-th group of eight columns; where
// the row is shorter, the last of them idle. A block holds several rows where a row takes only a
// warp.
template <int kThreads_, int kGroups_>
struct Shape {
  static constexpr int kThreads = kThreads_;
  static constexpr int kGroups = kGroups_;
  static constexpr int kStride = kThreads * kColumnsPerDraw;  // between groups of a thread
  static constexpr int kColumns = kStride * kGroups;

  // First column of this thread's i-th group.
  static __device__ __forceinline__ int column(int i) {
    return i * kStride + static_cast<int>(threadIdx.x) * kColumnsPerDraw;
  }
};

template <typename Function>
void dispatch_shape(int64_t columns, Function&& function) {
  if (columns <= 512) return function(Shape<32, 2>{});
  if (columns <= 1024) return function(Shape<32, 4>{});
  if (columns <= 2048) return function(Shape<64, 4>{});
  if (columns <= 4096) return function(Shape<128, 4>{});
  return function(Shape<256, 4>{});
}

inline void check_width(const char* op, int64_t columns) {
  require(columns <= kMaxColumns, op, ": rows have ", columns,
          " numbers; on a GPU they may have at most ", kMaxColumns);
}

// Like x, or empty where the output does not exist.
inline torch::stable::Tensor empty_rows(const torch::stable::Tensor& x, bool exists) {
  return exists ? allocate(x, {x.size(0), x.size(1)}) : allocate(x, {0});
}

}  // namespace lightseq
