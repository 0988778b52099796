// Prefetches into the L2 cache, which the whole GPU shares. A prefetch returns no value. So it may
// be called before griddepcontrol_wait(), whatever the previous kernel writes, and it does no harm
// if its address is out of date. To compute addresses of prefetches, read values with peek(); they
// may be out of date, so check that the address is within the tensor.
//
// In a decode step of few hypotheses the weights evict everything else from L2. Without prefetches,
// each read in a chain of dependent reads would wait for memory.
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

// Prefetches a range; address and bytes must be multiples of 16. Before compute capability 9.0 it
// does nothing.
__device__ __forceinline__ void prefetch(const void* address, int bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(address), "r"(bytes));
#endif
}

}  // namespace lightseq
