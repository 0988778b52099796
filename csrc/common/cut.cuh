// Divides a row that may start at any address into aligned vectors and single numbers (scalars).
#pragma once

#include <cstdint>

#include "common/columns.cuh"

namespace lightseq {

constexpr int kLineBytes = 128;

// The columns before `head` are scalars, then follow `vectors` groups of 8, then scalars again. The
// groups begin at a cache line. So warps read and write whole lines, and no two warps share a line.
struct Cut {
  int head, vectors, scalars;

  template <typename T>
  __device__ __forceinline__ Cut(const T* row, int classes) {
    const auto address = static_cast<unsigned>(reinterpret_cast<uintptr_t>(row));
    head = min(classes, static_cast<int>((-address % kLineBytes) / sizeof(T)));
    vectors = (classes - head) / kColumnsPerDraw;
    scalars = classes - vectors * kColumnsPerDraw;  // at both ends; fewer than a line and a vector
  }
  __device__ __forceinline__ int column_of_vector(int i) const {
    return head + i * kColumnsPerDraw;
  }
  __device__ __forceinline__ int column_of_scalar(int i) const {
    return i < head ? i : i + vectors * kColumnsPerDraw;
  }
};

}  // namespace lightseq
