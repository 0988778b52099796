// Occupancy: how many blocks of a kernel are resident on a GPU at a time. For kernels whose blocks
// wait for each other, or that divide all work among the resident blocks.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "common/device.h"

namespace lightseq {

// Number of resident blocks (or warps) on the GPU, if each SM has `per_multiprocessor` of them.
inline int64_t resident_blocks(int32_t device, int64_t per_multiprocessor) {
  return attribute_of(device, cudaDevAttrMultiProcessorCount) * per_multiprocessor;
}

// Number of resident blocks of `kernel` on the GPU. shared: bytes of dynamic shared memory per
// block.
template <typename Kernel>
int64_t resident_blocks(Kernel kernel, int threads, int32_t device, size_t shared = 0) {
  int side_by_side = 0;
  if (shared > 0) dynamic_shared_memory_of(reinterpret_cast<const void*>(kernel), device);
  cudaOccupancyMaxActiveBlocksPerMultiprocessor(&side_by_side, kernel, threads, shared);
  return resident_blocks(device, std::max(1, side_by_side));
}

}  // namespace lightseq
