// What the host knows of a GPU, and how much shared memory a kernel may have on it: the one place
// that asks the driver.
//
// A library made by `build_cuda.py --acts-as N`, for tests, takes every GPU for one of compute
// capability N, and so the paths that the host chooses for those: its code is PTX that also runs on
// the GPU at hand.
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <utility>

#include "check.h"

#ifndef LIGHTSEQ_ACTS_AS
#define LIGHTSEQ_ACTS_AS 0
#endif

namespace lightseq {

constexpr int kActsAs = LIGHTSEQ_ACTS_AS;  // 0: as what the GPU is

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

// Shared memory that one block can have, by the tables of the CUDA programming guide.
constexpr int shared_memory_of_capability(int capability) {
  if (capability == 80 || capability == 87) return 163 << 10;
  return capability < 90 || capability >= 120 ? 99 << 10 : 227 << 10;
}

// Bytes of shared memory that a block can have, static ones counted.
inline int shared_memory_of_block(int32_t device) {
  const int most = attribute_of(device, cudaDevAttrMaxSharedMemoryPerBlockOptin);
  return kActsAs == 0 ? most : std::min(most, shared_memory_of_capability(kActsAs));
}

// Bytes of shared memory that the blocks of a multiprocessor share, those that the driver takes of
// each block counted.
inline int shared_memory_of_multiprocessor(int32_t device) {
  const int most = attribute_of(device, cudaDevAttrMaxSharedMemoryPerMultiprocessor);
  return kActsAs == 0 ? most : std::min(most, shared_memory_of_capability(kActsAs) + (1 << 10));
}

// Bytes of dynamic shared memory that a block of `kernel` can have, and from now on may ask for.
//
// Without asking a block gets 48 KiB, static ones counted. So the first call for a kernel and a GPU
// asks for all that there is; more calls cost a look into a table.
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

}  // namespace lightseq
