// Thread block clusters: their blocks run at the same time and can write into each other's shared
// memory. They need compute capability 9.0 or later. A kernel with LIGHTSEQ_CLUSTER also compiles
// for older GPUs, but must not be launched there.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/device.h"

namespace lightseq {

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define LIGHTSEQ_CLUSTER(count) __cluster_dims__(count, 1, 1)
#else
#define LIGHTSEQ_CLUSTER(count)
#endif

constexpr int kMaxCluster = 8;  // supported by every GPU with clusters

inline bool has_clusters(int32_t device) { return capability_of(device) >= 90; }

// Barrier of all threads of the cluster; afterwards each thread sees all writes to shared memory
// from before it. Also call it once before the first write, so that all blocks have started.
__device__ __forceinline__ void cluster_sync() {
#if __CUDA_ARCH__ >= 900
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
#endif
}

// The address of the same variable in the shared memory of another block, for writing.
template <typename T>
__device__ __forceinline__ T* mapa(T* shared, int rank) {
#if __CUDA_ARCH__ >= 900
  asm("mapa.u64 %0, %0, %1;" : "+l"(shared) : "r"(rank));
#endif
  return shared;
}

}  // namespace lightseq
