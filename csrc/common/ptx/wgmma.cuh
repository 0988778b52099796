// wgmma: products computed by a warpgroup (four warps) from shared memory, on GPUs of compute
// capability 9.0. The code is compiled for sm_90a (scripts/build_cuda.py looks for this file). A
// kernel that uses it also compiles for other GPUs, but must not be launched there.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "common/device.h"

// Defined if the code being compiled is for sm_90a: only then can a kernel's body use wgmma.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define LIGHTSEQ_HAS_WGMMA
#endif

namespace lightseq {

constexpr int kWarpgroup = 128;            // threads
constexpr int kWgmmaM = 64, kWgmmaK = 16;  // rows of a product, and its depth

// Sums per thread of a product [kWgmmaM, columns].
constexpr int wgmma_sums(int columns) { return kWgmmaM * columns / kWarpgroup; }

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

// Descriptor of an operand in the 128-byte swizzle (tma.cuh), eight rows of which are 1024 bytes.
// at(offset): descriptor of the operand `offset` bytes after the address. leading_offset: bytes
// from a box to the next one beside it, used if the product is wider than a box.
struct WgmmaOperand {
  uint32_t low, high;

  __device__ __forceinline__ explicit WgmmaOperand(uint32_t address, uint32_t leading_offset = 16)
      : low((address & 0x3ffff) >> 4 | (leading_offset >> 4) << 16), high(1u << 30 | 1024 >> 4) {}

  // Shared memory ends before the sum could reach the bits of leading_offset.
  __device__ __forceinline__ uint64_t at(int offset) const {
    uint64_t descriptor;
    asm("mov.b64 %0, {%1, %2};" : "=l"(descriptor) : "r"(low + (offset >> 4)), "r"(high));
    return descriptor;
  }
};

// The macros below write out the operands of a product of 32, 48, 64 or 128 sums per thread.
#define LIGHTSEQ_SUMS_4(x, i) x(sums[i]), x(sums[i + 1]), x(sums[i + 2]), x(sums[i + 3])
#define LIGHTSEQ_SUMS_16(x, i)                                                 \
  LIGHTSEQ_SUMS_4(x, i), LIGHTSEQ_SUMS_4(x, i + 4), LIGHTSEQ_SUMS_4(x, i + 8), \
      LIGHTSEQ_SUMS_4(x, i + 12)
#define LIGHTSEQ_SUMS_OF_32(x) LIGHTSEQ_SUMS_16(x, 0), LIGHTSEQ_SUMS_16(x, 16)
#define LIGHTSEQ_SUMS_OF_48(x) LIGHTSEQ_SUMS_OF_32(x), LIGHTSEQ_SUMS_16(x, 32)
#define LIGHTSEQ_SUMS_OF_64(x) LIGHTSEQ_SUMS_OF_48(x), LIGHTSEQ_SUMS_16(x, 48)
#define LIGHTSEQ_SUMS_OF_128(x)                                             \
  LIGHTSEQ_SUMS_OF_64(x), LIGHTSEQ_SUMS_16(x, 64), LIGHTSEQ_SUMS_16(x, 80), \
      LIGHTSEQ_SUMS_16(x, 96), LIGHTSEQ_SUMS_16(x, 112)
#define LIGHTSEQ_NAMES_OF_32                                               \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define LIGHTSEQ_NAMES_OF_48 \
  LIGHTSEQ_NAMES_OF_32       \
  ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define LIGHTSEQ_NAMES_OF_64 \
  LIGHTSEQ_NAMES_OF_48       \
  ", %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define LIGHTSEQ_NAMES_OF_128                                                                    \
  LIGHTSEQ_NAMES_OF_64                                                                           \
  ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "           \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "             \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define LIGHTSEQ_WRITTEN "=f"
#define LIGHTSEQ_ADDED "+f"

// count: sums per thread; columns: 2 * count; then the numbers of the operands behind the sums.
#define LIGHTSEQ_WGMMA_SHARED(count, columns, type, sums_are, a_, b_, add_, ta_, tb_)            \
  asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, " add_                                          \
               ", 0;\n"                                                                          \
               "wgmma.mma_async.sync.aligned.m64n" columns "k16.f32." type "." type              \
               " {" LIGHTSEQ_NAMES_OF_##count "}, " a_ ", " b_ ", p, 1, 1, " ta_ ", " tb_ ";\n}" \
               : LIGHTSEQ_SUMS_OF_##count(sums_are)                                              \
               : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)), "n"(kTransA), "n"(kTransB))
#define LIGHTSEQ_WGMMA_REGISTERS(count, columns, type, sums_are, a0, a1, a2, a3, b_, tb_)         \
  asm volatile(                                                                                   \
      "{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\n"                                                  \
      "wgmma.mma_async.sync.aligned.m64n" columns "k16.f32." type "." type                        \
      " {" LIGHTSEQ_NAMES_OF_##count "}, {" a0 ", " a1 ", " a2 ", " a3 "}, " b_ ", p, 1, 1, " tb_ \
                                     ";\n}"                                                       \
      : LIGHTSEQ_SUMS_OF_##count(sums_are)                                                        \
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "n"(kTransB))
#define LIGHTSEQ_SHARED_32(type, sums_are) \
  LIGHTSEQ_WGMMA_SHARED(32, "64", type, sums_are, "%32", "%33", "%34", "%35", "%36")
#define LIGHTSEQ_SHARED_48(type, sums_are) \
  LIGHTSEQ_WGMMA_SHARED(48, "96", type, sums_are, "%48", "%49", "%50", "%51", "%52")
#define LIGHTSEQ_SHARED_64(type, sums_are) \
  LIGHTSEQ_WGMMA_SHARED(64, "128", type, sums_are, "%64", "%65", "%66", "%67", "%68")
#define LIGHTSEQ_SHARED_128(type, sums_are) \
  LIGHTSEQ_WGMMA_SHARED(128, "256", type, sums_are, "%128", "%129", "%130", "%131", "%132")
#define LIGHTSEQ_REGISTERS_32(type, sums_are) \
  LIGHTSEQ_WGMMA_REGISTERS(32, "64", type, sums_are, "%32", "%33", "%34", "%35", "%36", "%37")
#define LIGHTSEQ_REGISTERS_48(type, sums_are) \
  LIGHTSEQ_WGMMA_REGISTERS(48, "96", type, sums_are, "%48", "%49", "%50", "%51", "%52", "%53")
#define LIGHTSEQ_REGISTERS_64(type, sums_are) \
  LIGHTSEQ_WGMMA_REGISTERS(64, "128", type, sums_are, "%64", "%65", "%66", "%67", "%68", "%69")
#define LIGHTSEQ_BY_TYPE(form, sums_are)     \
  if constexpr (std::is_same_v<T, __half>) { \
    form("f16", sums_are);                   \
  } else {                                   \
    form("bf16", sums_are);                  \
  }

// sums [64, N] = a [64, 16] b [16, N], or += if `accumulate`; asynchronous, by a warpgroup; calls
// execute in order. a and b are descriptors. kTransA, kTransB: 0 if the rows of the operand's boxes
// are rows of a, or columns of b (K-major); 1 if they are the K dimension (MN-major). A thread's
// sums: row 16 * warp + lane / 4 (+ 8), columns 8 * i + lane % 4 * 2 (+ 1) are sums[4 * i] (+ 2)
// (+ 1).
template <typename T, int kTransA, int kTransB, int kCount>
__device__ __forceinline__ void wgmma(float (&sums)[kCount], uint64_t a, uint64_t b,
                                      bool accumulate = true) {
  if constexpr (kCount == 32) {
    LIGHTSEQ_BY_TYPE(LIGHTSEQ_SHARED_32, LIGHTSEQ_ADDED)
  } else if constexpr (kCount == 48) {
    LIGHTSEQ_BY_TYPE(LIGHTSEQ_SHARED_48, LIGHTSEQ_ADDED)
  } else if constexpr (kCount == 64) {
    LIGHTSEQ_BY_TYPE(LIGHTSEQ_SHARED_64, LIGHTSEQ_ADDED)
  } else {
    static_assert(kCount == 128);
    LIGHTSEQ_BY_TYPE(LIGHTSEQ_SHARED_128, LIGHTSEQ_ADDED)
  }
}

// sums = a b. The previous contents of `sums` need not be initialised: if another instruction
// initialised them while products are in flight, ptxas would wait for each product.
template <typename T, int kTransA, int kTransB, int kCount>
__device__ __forceinline__ void wgmma_first(float (&sums)[kCount], uint64_t a, uint64_t b) {
  constexpr bool accumulate = false;
  if constexpr (kCount == 32) {
    LIGHTSEQ_BY_TYPE(LIGHTSEQ_SHARED_32, LIGHTSEQ_WRITTEN)
  } else {
    static_assert(kCount == 64);
    LIGHTSEQ_BY_TYPE(LIGHTSEQ_SHARED_64, LIGHTSEQ_WRITTEN)
  }
}

#define LIGHTSEQ_WGMMA_E4M3(add, sums_are)                                                 \
  asm volatile(                                                                            \
      "{\n.reg .pred p;\nsetp.ne.b32 p, " add                                              \
      ", 0;\nwgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {" LIGHTSEQ_NAMES_OF_64 \
      "}, %64, %65, p, 1, 1;\n}"                                                           \
      : LIGHTSEQ_SUMS_OF_64(sums_are)                                                      \
      : "l"(a), "l"(b))
// sums [64, 128] = a [64, 32] b [32, 128], or += if `accumulate`, of E4M3; both K-major. The tensor
// cores add with fewer bits than float32.
__device__ __forceinline__ void wgmma_e4m3(float (&sums)[64], uint64_t a, uint64_t b,
                                           bool accumulate) {
  if (accumulate) {
    LIGHTSEQ_WGMMA_E4M3("1", LIGHTSEQ_ADDED);
  } else {
    LIGHTSEQ_WGMMA_E4M3("0", LIGHTSEQ_WRITTEN);
  }
}

// sums += a b with a in registers, as in the sums of another product: a word has two columns of a
// row; the four words are columns 16 * k ... 16 * k + 15 of rows r and r + 8.
template <typename T, int kTransB, int kCount>
__device__ __forceinline__ void wgmma_registers(float (&sums)[kCount], const uint32_t* a,
                                                uint64_t b) {
  if constexpr (kCount == 32) {
    LIGHTSEQ_BY_TYPE(LIGHTSEQ_REGISTERS_32, LIGHTSEQ_ADDED)
  } else if constexpr (kCount == 48) {
    LIGHTSEQ_BY_TYPE(LIGHTSEQ_REGISTERS_48, LIGHTSEQ_ADDED)
  } else {
    static_assert(kCount == 64);
    LIGHTSEQ_BY_TYPE(LIGHTSEQ_REGISTERS_64, LIGHTSEQ_ADDED)
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
// Stores four 8x8 matrices of 16-bit numbers, packed as the sums of a product; lane l passes the
// address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void stmatrix_x4(uint32_t row, const uint32_t* matrices) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row),
               "r"(matrices[0]), "r"(matrices[1]), "r"(matrices[2]), "r"(matrices[3])
               : "memory");
}
// The same, but row and column of each matrix are exchanged.
__device__ __forceinline__ void stmatrix_x4_trans(uint32_t row, const uint32_t* matrices) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row),
               "r"(matrices[0]), "r"(matrices[1]), "r"(matrices[2]), "r"(matrices[3])
               : "memory");
}
// The compiler moves no access to these sums across this: call it after the wait for a product, and
// before a product that reads or adds to sums which other instructions have written.
template <int kCount>
__device__ __forceinline__ void wgmma_hold(float (&sums)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}

}  // namespace lightseq
