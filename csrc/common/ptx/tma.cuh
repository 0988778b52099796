// TMA (cp.async.bulk.tensor): the hardware copies boxes of a tensor to shared memory and back. It
// needs compute capability 9.0 or later. A box has rows of 128 bytes in the 128-byte swizzle, which
// wgmma can read: eight rows of one column are in different banks.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "common/check.h"
#include "common/ptx/async_copy.cuh"
#include "common/ptx/mbarrier.cuh"

namespace lightseq {

constexpr int kSwizzleBytes = 128;                  // bytes of a box's row
constexpr int kSwizzleColumns = kSwizzleBytes / 2;  // 16-bit numbers of a box's row

// Tensor map of 16-bit numbers or bytes; the arrays begin with the innermost dimension, strides (in
// bytes) with the second one. Outside of the tensor, loads give zeros and stores write nothing.
template <int kRank>
CUtensorMap tensor_map_of(const void* data, ScalarType type, const cuuint64_t (&sizes)[kRank],
                          const cuuint64_t (&strides)[kRank - 1], const cuuint32_t (&box)[kRank]) {
  using Encode = decltype(&cuTensorMapEncodeTiled);
  static const Encode encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found{};
#if CUDART_VERSION >= 12050
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault,
                                     &found);
#else
    cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &found);
#endif
    require(function != nullptr,
            "lightseq: the NVIDIA driver has no cuTensorMapEncodeTiled; install a newer driver");
    return reinterpret_cast<Encode>(function);
  }();
  const bool bytes = type == ScalarType::Byte || type == ScalarType::Float8_e4m3fn;
  const CUtensorMapDataType numbers = bytes                      ? CU_TENSOR_MAP_DATA_TYPE_UINT8
                                      : type == ScalarType::Half ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                                                 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16;
  cuuint32_t steps[kRank];
  for (cuuint32_t& step : steps) step = 1;
  CUtensorMap map;
  const CUresult status =
      encode(&map, numbers, kRank, const_cast<void*>(data), sizes, strides, box, steps,
             CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  require(status == CUDA_SUCCESS, "lightseq: cannot make a tensor map of ", sizes[kRank - 1],
          " rows of ", sizes[0], " numbers (CUDA error ", static_cast<int>(status), ")");
  return map;
}

// Byte offset of the 16-byte chunk number `chunk` within row `row` of a box.
__device__ __forceinline__ int swizzle_128b(int row, int chunk) { return (chunk ^ row % 8) * 16; }

__device__ __forceinline__ void tma_load(void* to, const CUtensorMap& from, int column, int row,
                                         Mbarrier& barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3}], [%4];" ::"r"(shared_address(to)),
      "l"(&from), "r"(column), "r"(row), "r"(shared_address(&barrier))
      : "memory");
}

// Loads a box of a tensor [T, H, D]: rows (tokens) from `row` on, of one head.
__device__ __forceinline__ void tma_load(void* to, const CUtensorMap& from, int column, int head,
                                         int row, Mbarrier& barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4}], [%5];" ::"r"(shared_address(to)),
      "l"(&from), "r"(column), "r"(head), "r"(row), "r"(shared_address(&barrier))
      : "memory");
}

// Loads a box of a tensor with four dimensions; at: its first element, the innermost index first.
__device__ __forceinline__ void tma_load(void* to, const CUtensorMap& from, const int (&at)[4],
                                         Mbarrier& barrier) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(shared_address(to)),
      "l"(&from), "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(at[3]), "r"(shared_address(&barrier))
      : "memory");
}

// Loads adjacent bytes; addresses and sizes are multiples of 16.
__device__ __forceinline__ void tma_load(void* to, const void* from, uint32_t bytes,
                                         Mbarrier& barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(&barrier))
      : "memory");
}

// Loads to the same address in all blocks of the cluster whose bits are set, and counts the bytes
// on the same barrier of each.
__device__ __forceinline__ void tma_load_multicast(void* to, const CUtensorMap& from, int column,
                                                   int row, Mbarrier& barrier, uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(shared_address(to)),
      "l"(&from), "r"(column), "r"(row), "r"(shared_address(&barrier)), "h"(blocks)
      : "memory");
}

__device__ __forceinline__ void tma_load_multicast(void* to, const CUtensorMap& from,
                                                   const int (&at)[5], Mbarrier& barrier,
                                                   uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3, %4, %5, %6}], [%7], %8;" ::"r"(shared_address(to)),
      "l"(&from), "r"(at[0]), "r"(at[1]), "r"(at[2]), "r"(at[3]), "r"(at[4]),
      "r"(shared_address(&barrier)), "h"(blocks)
      : "memory");
}

// Call it in each thread that has written to shared memory, before a tma_store() or wgmma reads
// that data.
__device__ __forceinline__ void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void tma_store(const CUtensorMap& to, int column, int row,
                                          const void* from) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];" ::"l"(&to),
      "r"(column), "r"(row), "r"(shared_address(from))
      : "memory");
}
__device__ __forceinline__ void tma_store_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Waits until this thread's stores have read their shared memory, so that it may be overwritten.
__device__ __forceinline__ void tma_store_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

}  // namespace lightseq
