// wgmma: products computed by a warpgroup (four warps) from shared memory, on GPUs of compute
// capability 9.0. The code is compiled for sm_90a (scripts/build_cuda.py looks for this file). A
// kernel that uses it also compiles for other GPUs, but must not be launched there.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "device.h"

// Defined if the code being compiled is for sm_90a: only then can a kernel's body use wgmma.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define LIGHTSEQ_HAS_WGMMA
#endif

namespace lightseq {

constexpr int kWarpgroup = 128;  // threads
constexpr int kWgmmaM = 64, kWgmmaN = 256, kWgmmaK = 16;
constexpr int kWgmmaAccumulators = kWgmmaM * kWgmmaN / kWarpgroup;  // per thread

// Whether wgmma kernels were compiled and this GPU can run them.
inline bool has_wgmma([[maybe_unused]] int32_t device) {
#ifdef LIGHTSEQ_SM90A
  return capability_of(device) == 90;
#else
  return false;
#endif
}

// Sets the registers per thread of a warpgroup, a multiple of 8.
template <int kCount>
__device__ __forceinline__ void setmaxnreg_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
__device__ __forceinline__ void setmaxnreg_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}

// Descriptor of an operand in the 128-byte swizzle (tma.cuh). Offsets in bytes: stride_offset from
// eight rows to the next eight; leading_offset from a box to the next one beside it, used if the
// product is wider than a box.
__device__ __forceinline__ uint64_t wgmma_descriptor(uint32_t address, uint32_t stride_offset,
                                                     uint32_t leading_offset) {
  constexpr uint64_t kSwizzle128B = uint64_t{1} << 62;
  return kSwizzle128B | static_cast<uint64_t>(stride_offset >> 4) << 32 |
         static_cast<uint64_t>(leading_offset >> 4) << 16 | (address & 0x3ffff) >> 4;
}

#define LIGHTSEQ_ACCUMULATORS_4(i) \
  "+f"(sums[i]), "+f"(sums[i + 1]), "+f"(sums[i + 2]), "+f"(sums[i + 3])
#define LIGHTSEQ_ACCUMULATORS_16(i)                                                           \
  LIGHTSEQ_ACCUMULATORS_4(i), LIGHTSEQ_ACCUMULATORS_4(i + 4), LIGHTSEQ_ACCUMULATORS_4(i + 8), \
      LIGHTSEQ_ACCUMULATORS_4(i + 12)
#define LIGHTSEQ_ACCUMULATORS_64(i)                                                                \
  LIGHTSEQ_ACCUMULATORS_16(i), LIGHTSEQ_ACCUMULATORS_16(i + 16), LIGHTSEQ_ACCUMULATORS_16(i + 32), \
      LIGHTSEQ_ACCUMULATORS_16(i + 48)
#define LIGHTSEQ_ACCUMULATOR_NAMES                                                               \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                       \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "             \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "             \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "             \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "             \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "             \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define LIGHTSEQ_WGMMA(type)                                                                       \
  asm volatile(                                                                                    \
      "{\n"                                                                                        \
      ".reg .pred p;\n"                                                                            \
      "setp.ne.b32 p, %130, 0;\n"                                                                  \
      "wgmma.mma_async.sync.aligned.m64n256k16.f32." type "." type " {" LIGHTSEQ_ACCUMULATOR_NAMES \
      "}, %128, %129, p, 1, 1, 0, 1;\n"                                                            \
      "}"                                                                                          \
      : LIGHTSEQ_ACCUMULATORS_64(0), LIGHTSEQ_ACCUMULATORS_64(64)                                  \
      : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)))

// sums [64, 256] (+)= a [64, 16] b [16, 256], asynchronous, by a warpgroup; calls execute in order.
// a and b are descriptors. The rows of a's boxes are rows of a (K-major); the rows of b's boxes are
// the K dimension (MN-major). A thread's sums: row 16 * warp + lane / 4 (+ 8), columns
// 8 * i + lane % 4 * 2 (+ 1) are sums[4 * i] (+ 2) (+ 1).
template <typename T>
__device__ __forceinline__ void wgmma(float (&sums)[kWgmmaAccumulators], uint64_t a, uint64_t b,
                                      bool accumulate) {
  if constexpr (std::is_same_v<T, __half>) {
    LIGHTSEQ_WGMMA("f16");
  } else {
    LIGHTSEQ_WGMMA("bf16");
  }
}

// Fence before the first wgmma after other instructions that access its sums.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Waits until at most the kPending newest groups are in flight.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}
// Waits for all groups; afterwards the sums may be read.
__device__ __forceinline__ void wgmma_wait_all(float (&sums)[kWgmmaAccumulators]) {
  wgmma_wait<0>();
#pragma unroll
  for (int i = 0; i < kWgmmaAccumulators; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}

}  // namespace lightseq
