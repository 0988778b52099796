// Cuts a row that may start at any address into parts aligned to memory lines.
#pragma once

#include <cstdint>

#include "columns.cuh"

namespace lightseq {

constexpr int kLineBytes = 128;

// [0, head) one by one, then `vectors` groups of 8, then the rest one by one. Aligned groups make
// warps read and write whole memory lines, so no two warps share a line.
struct Cut {
  int head, vectors, scalars;

  template <typename T>
  __device__ __forceinline__ Cut(const T* row, int classes) {
    const auto address = static_cast<unsigned>(reinterpret_cast<uintptr_t>(row));
    head = min(classes, static_cast<int>((-address % kLineBytes) / sizeof(T)));
    vectors = (classes - head) / kColumnsPerDraw;
    scalars = classes - vectors * kColumnsPerDraw;  // fewer than one line plus one vector
  }
  __device__ __forceinline__ int column_of_vector(int i) const {
    return head + i * kColumnsPerDraw;
  }
  __device__ __forceinline__ int column_of_scalar(int i) const {
    return i < head ? i : i + vectors * kColumnsPerDraw;
  }
};

}  // namespace lightseq
