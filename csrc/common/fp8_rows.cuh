// Cast to E4M3 of rows that the teams of a block have in registers (layer_norm.cuh): RowValues; and
// of their transpose as well, in chunks of 16 rows: RowCast. fp8_cast.cuh has the layout of the
// results.
//
// A team stores its row's bytes to global memory and, for the transpose, to a tile in shared
// memory. When the chunk is complete, each thread reads four columns of the tile, transposes 4 x 4
// bytes at a time in registers, and stores 16 bytes per column.
#pragma once

#include <cstdint>

#include "fp8_cast.cuh"
#include "layer_norm.cuh"

namespace lightseq {

static_assert(kChunkRows == kFp8Alignment && kChunkRows == sizeof(uint4));

template <typename S>
class RowValues {
 public:
  __device__ __forceinline__ explicit RowValues(const Cast& cast)
      : cast_(cast), columns_(static_cast<int>(cast.columns)), inverse_(1.0f / *cast.scale) {}

  // Casts this thread's i-th group of the row, and returns its bytes.
  __device__ __forceinline__ uint2 put(int64_t row, int i, const float (&x)[kColumnsPerDraw]) {
    const bool is_inside = S::column(i) < columns_;
    const uint2 bytes = statistics_.cast(x, inverse_, is_inside);
    if (is_inside) {
      *reinterpret_cast<uint2*>(cast_.values + row * columns_ + S::column(i)) = bytes;
    }
    return bytes;
  }

  // All threads of the block call it at the end.
  __device__ __forceinline__ void add_statistics() const {
    __shared__ BlockStatistics<kBlockThreads / kWarp> of_block;
    of_block.note(statistics_, thread());
    __syncthreads();
    if (thread() == 0) of_block.publish(cast_);
  }

 protected:
  static __device__ __forceinline__ int thread() {
    return static_cast<int>(threadIdx.y) * S::kThreads + static_cast<int>(threadIdx.x);
  }

  const Cast& cast_;
  const int columns_;

 private:
  const float inverse_;
  CastStatistics statistics_ = {};
};

template <typename S>
class RowCast : public RowValues<S> {
  using RowValues<S>::cast_;
  using RowValues<S>::columns_;
  using RowValues<S>::thread;

 public:
  // tile: kChunkRows rows of S::kColumns bytes in shared memory.
  __device__ __forceinline__ RowCast(const Cast& cast, void* tile)
      : RowValues<S>(cast), tile_(static_cast<uint8_t*>(tile)) {}

  __device__ __forceinline__ void put(int64_t row, int i, const float (&x)[kColumnsPerDraw]) {
    const uint2 bytes = RowValues<S>::put(row, i, x);
    if (S::column(i) < columns_) *in_tile(row, i) = bytes;
  }

  // Stands for put() of all groups of a row that does not exist.
  __device__ __forceinline__ void put_zeros(int64_t row) {
#pragma unroll
    for (int i = 0; i < S::kGroups; ++i) *in_tile(row, i) = {0, 0};
  }

  // All threads of the block call it when they have put all rows of the chunk of `row`.
  __device__ __forceinline__ void finish_chunk(int64_t row) {
    __syncthreads();
    uint8_t* const to = cast_.transpose + row / kChunkRows * kChunkRows;
#pragma unroll 1
    for (int column = 4 * thread(); column < columns_; column += 4 * kBlockThreads) {
      uint32_t quads[4][4];  // by column
#pragma unroll
      for (int word = 0; word < 4; ++word) {
        uint32_t by_row[4], by_column[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          by_row[i] =
              *reinterpret_cast<const uint32_t*>(tile_ + (4 * word + i) * S::kColumns + column);
        }
        transpose_bytes(by_row, by_column);
#pragma unroll
        for (int e = 0; e < 4; ++e) quads[e][word] = by_column[e];
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        *reinterpret_cast<uint4*>(to + (column + e) * cast_.pitch) = {quads[e][0], quads[e][1],
                                                                      quads[e][2], quads[e][3]};
      }
    }
    __syncthreads();
  }

 private:
  __device__ __forceinline__ uint2* in_tile(int64_t row, int i) const {
    return reinterpret_cast<uint2*>(tile_ + row % kChunkRows * S::kColumns + S::column(i));
  }

  uint8_t* const tile_;
};

}  // namespace lightseq
