// Prefetches into the L2 cache, which the whole GPU shares. A prefetch returns no value. So it may
// come before griddepcontrol_wait(), whatever the previous kernel writes, and its address may be
// out of date. Values that only serve to compute the next prefetch are read with peek(); check them
// against the bounds of the memory.
//
// In a decode step of few hypotheses the weights evict everything else from L2. Without prefetches
// each read of a chain of dependent reads would wait for memory.
#pragma once

#include <cuda_runtime.h>

namespace lightseq {

// Bypasses L1: a line cached there now could be stale when the kernel reads it later.
template <typename T>
__device__ __forceinline__ T peek(const T* address) {
  return __ldcg(address);
}

// Prefetches the cache line that holds the address.
__device__ __forceinline__ void prefetch(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

// Prefetches a range; address and bytes must be multiples of 16.
__device__ __forceinline__ void prefetch(const void* address, int bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(address), "r"(bytes));
#endif
}

}  // namespace lightseq
