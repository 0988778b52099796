// Common code of mma_fwd.cu, mma_bwd.cu and tf32_bwd.cu: tiles in shared memory. work_list.cuh
// explains the work list.
//
// As many blocks as are resident take items from the list in its order.
//
// A tile in shared memory has rows of kColumns 16-bit numbers, without space between them. Chunks
// of 16 bytes are permuted within a row (swizzled below), so that the eight rows of a matrix that
// ldmatrix reads, or that a warp stores, are in different banks.
#pragma once

#include <cstdint>

#include "attention/work_list.cuh"
#include "common/ptx/async_copy.cuh"
#include "common/ptx/mma.cuh"

namespace lightseq::attention {

constexpr int kMmaThreads = 128, kMmaWarps = kMmaThreads / kWarp;
constexpr int kRowTiles = 2;  // of a warp in 16 bits, of 16 rows

using Fragments = uint32_t (&)[4];  // a left operand, or two right operands of 8 columns each

// The parameters of both passes.
template <typename T>
struct MmaParams {
  Packed<const T> q, k, v;
  ItemList list;
  int rows_q, heads, width;
  Band band;
  float scale, keep_scale, grad_scale;  // keep_scale: 1 / (1 - p); grad_scale: scale / (1 - p)
  Dropout dropout;

  MmaParams(const Call& a, const ItemList& list)
      : q(packed<const T>(a.op, "q", a.q)),
        k(packed<const T>(a.op, "k", a.k)),
        v(packed<const T>(a.op, "v", a.v)),
        list(list),
        rows_q(static_cast<int>(a.q.size(0))),
        heads(static_cast<int>(a.q.size(1))),
        width(static_cast<int>(a.q.size(2))),
        band(a.band()),
        scale(static_cast<float>(a.scale)),
        keep_scale(a.keep_scale()),
        grad_scale(a.grad_scale()),
        dropout(dropout_of(a)) {}
};

// Columns of a tile's rows. Heads of up to 96 columns have tiles of 128, of which products read 96.
template <int kWidth>
constexpr int kTileColumns = kWidth == 64 ? 64 : 128;

// Offset in bytes of a chunk of a row.
template <int kColumns>
__device__ __forceinline__ constexpr uint32_t swizzled(int row, int chunk) {
  return static_cast<uint32_t>(row * kColumns * 2 + (chunk ^ row % 8) * 16);
}

// The address `chunks` chunks to the right of the first or second chunk of a row; `chunks` is even
// and constant, and tiles start at multiples of 128 bytes.
__device__ __forceinline__ constexpr uint32_t beside(uint32_t address, int chunks) {
  return (address ^ (chunks % 8 * 16)) + chunks / 8 * 128;
}

// Addresses of a lane for ldmatrix in a tile, for the 16 rows from row 0 on and two chunks:
//   left           the four matrices of a left operand
//   right          two matrices for each of two right operands, of 8 rows each: their products
//                  have 8 columns each
// With .trans, `left` reads two right operands whose K dimension is the rows of the tile.
struct Lane {
  int lane;
  int left_row = lane % 16, left_chunk = lane / 16;
  int right_row = lane % 8 + lane / 16 * 8, right_chunk = lane / 8 % 2;

  template <int kColumns>
  __device__ __forceinline__ uint32_t left() const {
    return swizzled<kColumns>(left_row, left_chunk);
  }
  template <int kColumns>
  __device__ __forceinline__ uint32_t right() const {
    return swizzled<kColumns>(right_row, right_chunk);
  }
};

// Copies rows first ... first + kRows - 1 of a head to a tile; rows from `length` on and columns
// from `width` on become zero. By kThreads threads, of which this one is number `thread`.
template <int kWidth, int kRows, int kThreads, typename T>
__device__ __forceinline__ void load_rows(uint32_t tile, const Packed<const T>& x, int head,
                                          int first, int length, int width, int thread) {
  constexpr int kColumns = kTileColumns<kWidth>, kPerRow = kColumns / 8;
  constexpr int kRowsAtOnce = kThreads / kPerRow;
  static_assert(kRows % kRowsAtOnce == 0);
  const int chunk = thread % kPerRow;
  int row = thread / kPerRow;
  if (chunk * 8 >= kWidth) return;
  if (chunk * 8 >= width) length = 0;
  const T* from = x.at(first + row, head) + chunk * 8;
#pragma unroll
  for (int i = 0; i < kRows; i += kRowsAtOnce) {
    // If kRowsAtOnce is less than 8, the swizzle of the next row differs: compute it again.
    cp_async_zfill(tile + swizzled<kColumns>(row, chunk), from, row < length);
    row += kRowsAtOnce;
    from = reinterpret_cast<const T*>(reinterpret_cast<const char*>(from) +
                                      static_cast<int64_t>(kRowsAtOnce) * x.token_bytes);
  }
}

// Takes the next item of the list. An item's number is item * heads + head in forward; see KeyBlock
// for backward.
__device__ __forceinline__ int claim(const ItemList& list) { return atomicAdd(list.counts + 1, 1); }

template <int kCount>
__device__ __forceinline__ float (&four(float (&sums)[kCount], int n))[4] {
  return reinterpret_cast<float (&)[4]>(sums[4 * n]);
}

template <int kRows, int kCount, typename Number>
__device__ __forceinline__ void clear(Number (&numbers)[kRows][kCount]) {
#pragma unroll
  for (int m = 0; m < kRows; ++m) {
#pragma unroll
    for (int e = 0; e < kCount; ++e) numbers[m][e] = 0;
  }
}

// sums += left right. left(a, m, k) loads 16 rows of the left operand, right(b, n, k) two operands
// of 8 columns each; k: number of a step of 16 along the depth.
template <typename T, int kSteps, int kCount, typename Left, typename Right>
__device__ __forceinline__ void multiply_add(float (&sums)[kRowTiles][kCount], const Left& left,
                                             const Right& right) {
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    uint32_t a[kRowTiles][4];
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) left(a[m], m, k);
#pragma unroll
    for (int n = 0; n < kCount / 4; n += 2) {
      uint32_t b[4];
      right(b, n, k);
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        mma<T>(four(sums[m], n), a[m], b[0], b[1]);
        mma<T>(four(sums[m], n + 1), a[m], b[2], b[3]);
      }
    }
  }
}

}  // namespace lightseq::attention
