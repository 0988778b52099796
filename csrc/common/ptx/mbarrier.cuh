// mbarrier: a barrier in shared memory that counts arrivals and the bytes of TMA loads. It needs
// compute capability 9.0 or later.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "common/ptx/async_copy.cuh"

namespace lightseq {

// Advances from phase to phase; the first phase has parity 0.
struct Mbarrier {
  uint64_t state;

  __device__ __forceinline__ void init(int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(this)),
                 "r"(arrivals));
  }
  __device__ __forceinline__ void arrive() {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(this)) : "memory");
  }
  // Arrives at the same barrier of another block of the cluster.
  __device__ __forceinline__ void arrive_cluster(int rank) {
    asm volatile(
        "{\n"
        ".reg .b32 there;\n"
        "mapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [there];\n"
        "}" ::"r"(shared_address(this)),
        "r"(rank)
        : "memory");
  }
  // Arrives, and makes the phase wait for `bytes` more bytes of TMA loads.
  __device__ __forceinline__ void arrive_expect_tx(uint32_t bytes) {
    asm volatile(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(this)),
        "r"(bytes)
        : "memory");
  }
  // Waits until the phase of this parity has completed; returns at once if that is the previous
  // phase. Without the limit on tries, which no wait reaches, ptxas believes that code after the
  // loop reads sums of products in flight, and waits for each product (its remark C7514).
  __device__ __forceinline__ void wait(uint32_t parity) const {
    for (uint32_t tries = 1; !try_wait(parity); ++tries) {
      if (tries == 0) asm volatile("trap;");
    }
  }

 private:
  __device__ __forceinline__ bool try_wait(uint32_t parity) const {
    uint32_t is_over;
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}"
        : "=r"(is_over)
        : "r"(shared_address(this)), "r"(parity)
        : "memory");
    return is_over;
  }
};

// The next of kStages buffers, and the parity of the current phase of its barriers.
template <int kStages>
struct Stage {
  int index = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance() {
    if (++index < kStages) return;
    index = 0;
    parity ^= 1;
  }
};

// Call it in the thread that has initialised barriers, before other threads of the cluster or the
// TMA use them.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

}  // namespace lightseq
