// GPU properties and limits of shared memory; all queries of device attributes are here.
//
// For tests, `build_cuda.py --acts-as N` builds a library that treats every GPU as one of compute
// capability N, so that the host chooses the code paths for N. Its code is PTX, which also runs on
// the actual GPU.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <utility>

#include "common/check.h"

#ifndef LIGHTSEQ_ACTS_AS
#define LIGHTSEQ_ACTS_AS 0
#endif

namespace lightseq {

constexpr int kActsAs = LIGHTSEQ_ACTS_AS;  // 0: use the GPU's own capability

inline int attribute_of(int32_t device, cudaDeviceAttr attribute) {
  int value = 0;
  const cudaError_t error = cudaDeviceGetAttribute(&value, attribute, device);
  require(error == cudaSuccess, "lightseq: cuda:", device, ": ", cudaGetErrorString(error));
  return value;
}

// The compute capability times ten: 90 for 9.0.
inline int capability_of(int32_t device) {
  if (kActsAs != 0) return kActsAs;
  return 10 * attribute_of(device, cudaDevAttrComputeCapabilityMajor) +
         attribute_of(device, cudaDevAttrComputeCapabilityMinor);
}

// Raises an error if the GPU has no tensor cores for fp8.
inline void require_fp8(const char* op, int32_t device) {
  const int capability = capability_of(device);
  require(capability >= 89, op,
          ": fp8 needs a GPU of compute capability 8.9 or later, this one has ", capability / 10,
          ".", capability % 10);
}

// Maximum bytes of shared memory per block, from the tables of the CUDA programming guide.
constexpr int shared_memory_of_capability(int capability) {
  if (capability == 80 || capability == 87) return 163 << 10;
  return capability < 90 || capability >= 120 ? 99 << 10 : 227 << 10;
}

// Maximum bytes of shared memory per block, including static shared memory.
inline int shared_memory_of_block(int32_t device) {
  const int most = attribute_of(device, cudaDevAttrMaxSharedMemoryPerBlockOptin);
  return kActsAs == 0 ? most : std::min(most, shared_memory_of_capability(kActsAs));
}

// Bytes of shared memory per SM, including the driver's share for each block.
inline int shared_memory_of_multiprocessor(int32_t device) {
  const int most = attribute_of(device, cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  return kActsAs == 0 ? most : std::min(most, shared_memory_of_capability(kActsAs) + (1 << 10));
}

// Maximum bytes of dynamic shared memory per block of `kernel`; later launches may use all of it.
//
// The default limit is 48 KiB per block, including static shared memory. The first call for a
// kernel and a GPU raises the limit to the maximum; later calls only look into a table.
inline int dynamic_shared_memory_of(const void* kernel, int32_t device) {
  static std::mutex mutex;
  static std::map<std::pair<const void*, int32_t>, int> known;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto place = known.find({kernel, device});
  if (place != known.end()) return place->second;
  cudaFuncAttributes of_kernel{};
  cudaError_t error = cudaFuncGetAttributes(&of_kernel, kernel);
  const int room = shared_memory_of_block(device) - static_cast<int>(of_kernel.sharedSizeBytes);
  if (error == cudaSuccess) {
    error = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, room);
  }
  require(error == cudaSuccess, "lightseq: shared memory: ", cudaGetErrorString(error));
  return known[{kernel, device}] = room;
}

// Occupancy: how many blocks of a kernel are resident on a GPU at a time. For kernels whose blocks
// wait for each other, or that divide all work among the resident blocks.

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
