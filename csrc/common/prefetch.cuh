// Hints: what a kernel is going to read is brought into the second cache, which all of the GPU
// shares. Nothing is returned, so a hint may come before griddepcontrol_wait() whatever the
// previous kernel writes, and may be wrong. Numbers that only lead to the next hint are read by
// peek(), and have to be checked against the bounds of memory.
//
// In a step of few hypotheses, whose weights sweep the second cache each time, every link of a
// chain of reads would else be a wait for memory.
#pragma once

#include <cuda_runtime.h>

namespace lightseq {

// Past the first cache: what it brings there could be out of date when it is read in earnest.
template <typename T>
__device__ __forceinline__ T peek(const T* address) {
  return __ldcg(address);
}

// The number at the address, and what of its neighbours memory hands out with it.
__device__ __forceinline__ void prefetch(const void* address) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

// A stretch of memory; address and bytes must be multiples of 16.
__device__ __forceinline__ void prefetch(const void* address, int bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(address), "r"(bytes));
#endif
}

}  // namespace lightseq
