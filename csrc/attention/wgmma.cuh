// Common code of wgmma_fwd.cu and wgmma_bwd.cu: tiles in shared memory, and items of the work list.
// work_list.cuh explains the list.
//
// One block per SM is resident. An item of backward has 128 keys. Operands are loaded by TMA into
// tiles of 128 rows, in boxes of 64 columns; a head of 96 columns takes two boxes, of which
// products read 96 columns. Products are computed by wgmma.
#pragma once

#include <cuda.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>

#include "attention/work_list.cuh"
#include "common/ptx/mbarrier.cuh"
#include "common/ptx/tma.cuh"
#include "common/ptx/wgmma.cuh"

namespace lightseq::attention {

constexpr int kWgmmaThreads = 3 * kWarpgroup;          // warpgroups: one producer, two consumers
constexpr int kBoxBytes = kTile * kSwizzleBytes;       // 128 rows of 64 columns
constexpr int kEightRows = 8 * kSwizzleBytes;          // bytes
constexpr int kSixteenRows = kWgmmaK * kSwizzleBytes;  // a step of K where rows are the K dimension

template <int kWidth>
constexpr int kBoxes = (kWidth + kSwizzleColumns - 1) / kSwizzleColumns;

// The next items of a block, in shared memory. One thread takes them from the list, the other warps
// read them. head < 0: there are no more.
struct Claims {
  Item items[2];
  Mbarrier full[2], empty[2];

  __device__ __forceinline__ void init(int readers) {
    for (int i = 0; i < 2; ++i) {
      full[i].init(1);
      empty[i].init(readers);
    }
  }
  __device__ __forceinline__ Item take(Stage<2>& place, const ItemList& list, int heads) {
    empty[place.index].wait(place.parity ^ 1);
    const int number = atomicAdd(list.counts + 1, 1), i = number / heads;
    Item item = {};
    item.head = -1;
    if (i < list.counts[0]) {
      item = list.load(i);
      item.head = number - i * heads;
    }
    items[place.index] = item;
    full[place.index].arrive();
    place.advance();
    return item;
  }
  // Called by whole warps.
  __device__ __forceinline__ Item read(Stage<2>& place) {
    full[place.index].wait(place.parity);
    const Item& at = items[place.index];
    const Item item = {of_warp(at.first_q),  of_warp(at.length_q), of_warp(at.first_k),
                       of_warp(at.length_k), of_warp(at.start),    of_warp(at.unit),
                       of_warp(at.head)};
    if (threadIdx.x % kWarp == 0) empty[place.index].arrive();
    place.advance();
    return item;
  }
};

__device__ __forceinline__ void named_barrier(int id, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// A warp's arrival, after all its lanes have read the data that the barrier protects.
__device__ __forceinline__ void release(Mbarrier& empty) {
  __syncwarp();
  if (threadIdx.x % kWarp == 0) empty.arrive();
}

// Zeroes rows first ... kRows - 1 of a box; called by a warp. Rows after the end of a sentence
// belong to the next sentence or to none. They may be NaN, and 0 * NaN is NaN.
template <int kRows>
__device__ __forceinline__ void zero_rows_of_box(void* box, int first) {
  constexpr int kPerRow = kSwizzleBytes / 16;
  uint4* const chunks = static_cast<uint4*>(box);
#pragma unroll 1  // producers have few registers
  for (int i = max(first, 0) * kPerRow + static_cast<int>(threadIdx.x) % kWarp; i < kRows * kPerRow;
       i += kWarp) {
    chunks[i] = uint4{0, 0, 0, 0};
  }
}

// Boxes of `rows` rows of one head of x [T, H, D].
inline CUtensorMap tensor_map_of_heads(const Tensor& x, int rows) {
  const auto bytes = [](int64_t numbers) { return static_cast<cuuint64_t>(2 * numbers); };
  return tensor_map_of<3>(x.data_ptr(), x.scalar_type(),
                          {static_cast<cuuint64_t>(x.size(2)), static_cast<cuuint64_t>(x.size(1)),
                           static_cast<cuuint64_t>(x.size(0))},
                          {bytes(x.size(1) > 1 ? x.stride(1) : x.size(2)),
                           bytes(x.size(0) > 1 ? x.stride(0) : x.size(1) * x.size(2))},
                          {kSwizzleColumns, 1, static_cast<cuuint32_t>(rows)});
}

}  // namespace lightseq::attention
