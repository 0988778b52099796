// Reductions (sum, maximum) over a warp or a block, in a fixed order: the same input gives the same
// bits. All threads of the warp or block must call them, and all receive the result.
#pragma once

#include <cstdint>

namespace lightseq {

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffffu;

// Returns the value of lane 0 to all lanes, so the compiler knows that it is the same for a warp.
__device__ __forceinline__ int of_warp(int x) { return __shfl_sync(kAllLanes, x, 0); }

struct Sum {
  template <typename T>
  __device__ __forceinline__ T operator()(T a, T b) const {
    return a + b;
  }
};

// Ignores NaN, as fmaxf does. Callers that must propagate a NaN do so through a sum.
struct Max {
  __device__ __forceinline__ float operator()(float a, float b) const { return fmaxf(a, b); }
};

template <typename Operation, typename T>
__device__ __forceinline__ T warp_reduce(T x, Operation operation) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) {
    x = operation(x, __shfl_xor_sync(kAllLanes, x, offset));
  }
  return x;
}

// kThreads: a multiple of 32, at most 1024. Threads are numbered by threadIdx.x only.
// Synchronises the block before and after the write to shared memory, so calls may follow directly.
template <int kThreads, typename Operation, typename T>
__device__ __forceinline__ T block_reduce(T x, Operation operation) {
  constexpr int kWarps = kThreads / kWarp;
  x = warp_reduce(x, operation);
  if constexpr (kWarps > 1) {
    __shared__ T partial[kWarps];
    __syncthreads();  // all threads have read the result of the previous call
    if (threadIdx.x % kWarp == 0) partial[threadIdx.x / kWarp] = x;
    __syncthreads();
    x = partial[0];
#pragma unroll
    for (int warp = 1; warp < kWarps; ++warp) x = operation(x, partial[warp]);
  }
  return x;
}

}  // namespace lightseq
