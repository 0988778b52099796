// Cast to E4M3 of rows that the teams of a block have in registers (layer_norm.cuh), and of their
// transpose, in chunks of adjacent rows. common/fp8_cast.cuh has the layout of the results.
//
// A team stores its row's bytes to global memory and to a tile in shared memory. When the chunk is
// complete, each thread reads four columns of 16 rows of the tile, transposes 4 x 4 bytes at a time
// in registers, and stores 16 bytes per column; of small chunks 4 rows and 4 bytes.
#pragma once

#include <cstdint>

#include "common/fp8_cast.cuh"
#include "row/layer_norm.cuh"

namespace lightseq {

template <typename S>
class RowCast {
 public:
  // tile: S::kChunk rows of S::kColumns bytes in shared memory.
  __device__ __forceinline__ RowCast(const Cast& cast, void* tile)
      : cast_(cast),
        tile_(static_cast<uint8_t*>(tile)),
        columns_(static_cast<int>(cast.columns)),
        inverse_(1.0f / *cast.scale) {}

  // Casts this thread's i-th group of the row.
  __device__ __forceinline__ void put(int64_t row, int i, const float (&x)[kColumnsPerDraw]) {
    const bool is_inside = S::column(i) < columns_;
    const uint2 bytes = statistics_.cast(x, inverse_, is_inside);
    if (!is_inside) return;
    *reinterpret_cast<uint2*>(cast_.values + row * columns_ + S::column(i)) = bytes;
    *in_tile(row, i) = bytes;
  }

  // Stands for put() of all groups of a row that does not exist.
  __device__ __forceinline__ void put_zeros(int64_t row) {
#pragma unroll
    for (int i = 0; i < S::kGroups; ++i) *in_tile(row, i) = {0, 0};
  }

  // All threads of the block call it when they have put all rows of the chunk of `row`.
  __device__ __forceinline__ void finish_chunk(int64_t row) {
    __syncthreads();
    // Neighbouring threads have the same columns and different parts of the rows.
    const int part = thread() % kParts;
    const int64_t first = row / S::kChunk * S::kChunk + part * kPartRows;
    const uint8_t* const from = tile_ + part * kPartRows * S::kColumns;
    uint8_t* const to = cast_.transpose + first;
    const int end = first < cast_.pitch ? columns_ : 0;
    constexpr int kStep = 4 * kBlockThreads / kParts;
#pragma unroll 1
    for (int column = thread() / kParts * 4; column < end; column += kStep) {
      uint32_t quads[4][kPartRows / 4];  // by column
#pragma unroll
      for (int word = 0; word < kPartRows / 4; ++word) {
        uint32_t by_row[4], by_column[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          by_row[i] = *reinterpret_cast<const uint32_t*>(from + (4 * word + i) * S::kColumns +
                                                         in_part(column, part));
        }
        transpose_bytes(by_row, by_column);
#pragma unroll
        for (int e = 0; e < 4; ++e) quads[e][word] = by_column[e];
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) store(to + (column + e) * cast_.pitch, quads[e]);
    }
    __syncthreads();
  }

  // All threads of the block call it at the end.
  __device__ __forceinline__ void add_statistics() const {
    __shared__ BlockStatistics<kBlockThreads / kWarp> of_block;
    of_block.note(statistics_, thread());
    __syncthreads();
    if (thread() == 0) of_block.publish(cast_);
  }

 private:
  static constexpr int kPartRows = S::kChunk < kFp8Alignment ? 4 : kFp8Alignment;
  static constexpr int kParts = S::kChunk / kPartRows;
  static_assert(kFp8Alignment == sizeof(uint4) && kParts * kPartRows == S::kChunk && kParts <= 2);

  static __device__ __forceinline__ void store(uint8_t* to, const uint32_t (&quad)[4]) {
    *reinterpret_cast<uint4*>(to) = {quad[0], quad[1], quad[2], quad[3]};
  }
  static __device__ __forceinline__ void store(uint8_t* to, const uint32_t (&quad)[1]) {
    *reinterpret_cast<uint32_t*>(to) = quad[0];
  }

  static __device__ __forceinline__ int thread() {
    return static_cast<int>(threadIdx.y) * S::kThreads + static_cast<int>(threadIdx.x);
  }
  // The second part of the rows swaps the halves of each 128 bytes, so that two threads which read
  // the same columns of both parts have no bank conflict.
  static __device__ __forceinline__ int in_part(int column, int part) { return column ^ part * 64; }
  __device__ __forceinline__ uint2* in_tile(int64_t row, int i) const {
    const int r = static_cast<int>(row % S::kChunk);
    return reinterpret_cast<uint2*>(tile_ + r * S::kColumns + in_part(S::column(i), r / kPartRows));
  }

  const Cast& cast_;
  uint8_t* const tile_;
  const int columns_;
  const float inverse_;
  CastStatistics statistics_ = {};
};

}  // namespace lightseq
