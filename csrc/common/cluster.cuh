// Blocks of a cluster run side by side and write into each other's shared memory: on GPUs that can,
// from compute capability 9.0 on. For older ones a kernel with LIGHTSEQ_CLUSTER is compiled as
// well, and must not be launched.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "device.h"

namespace lightseq {

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define LIGHTSEQ_CLUSTER(count) __cluster_dims__(count, 1, 1)
#else
#define LIGHTSEQ_CLUSTER(count)
#endif

constexpr int kMaxCluster = 8;  // on every GPU that has them

inline bool has_clusters(int32_t device) { return capability_of(device) >= 90; }

// All threads of the cluster: who goes on sees what any of them has written into shared memory.
// Before the first writing it takes one, too, so that all blocks are there.
__device__ __forceinline__ void cluster_sync() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
#endif
}

// The same variable in the shared memory of another block, to write to.
template <typename T>
__device__ __forceinline__ T* mapa(T* shared, int rank) {
#if __CUDA_ARCH__ >= 900
  asm("mapa.u64 %0, %0, %1;" : "+l"(shared) : "r"(rank));
#endif
  return shared;
}

}  // namespace lightseq
