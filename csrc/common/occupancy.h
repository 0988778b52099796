// How many blocks of a kernel a GPU holds at a time: for kernels whose blocks wait for each other
// or share their work out among themselves.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace lightseq {

template <typename Kernel>
int64_t resident_blocks(Kernel kernel, int threads, int32_t device) {
  int per_multiprocessor = 1, multiprocessors = 1;
  cudaOccupancyMaxActiveBlocksPerMultiprocessor(&per_multiprocessor, kernel, threads, 0);
  cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device);
  return static_cast<int64_t>(per_multiprocessor) * multiprocessors;
}

}  // namespace lightseq
