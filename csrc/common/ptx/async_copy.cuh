// cp.async: asynchronous copies from global to shared memory that do not pass through registers. A
// thread waits for its own copies, group by group; other threads see them after a barrier.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

namespace lightseq {

// The address in the shared memory window, as PTX needs it.
__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// Copies 16 bytes.
__device__ __forceinline__ void cp_async(uint32_t to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void cp_async(void* to, const void* from) {
  cp_async(shared_address(to), from);
}

// Copies 16 bytes; if !valid, writes zeros and reads nothing.
__device__ __forceinline__ void cp_async_zfill(uint32_t to, const void* from, bool valid) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(valid ? 16 : 0)
               : "memory");
}
__device__ __forceinline__ void cp_async_zfill(void* to, const void* from, bool valid) {
  cp_async_zfill(shared_address(to), from, valid);
}

// The same for 4 bytes.
__device__ __forceinline__ void cp_async_4_zfill(uint32_t to, const void* from, bool valid) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from),
               "r"(valid ? 4 : 0)
               : "memory");
}

// Makes a group of the copies since the last commit; the group may be empty.
__device__ __forceinline__ void cp_async_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// Waits until at most the kPending newest groups are in flight.
template <int kPending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Waits for all copies, committed or not.
__device__ __forceinline__ void cp_async_wait_all() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}

}  // namespace lightseq
