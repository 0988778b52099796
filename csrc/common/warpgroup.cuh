// What GPUs of compute capability 9.0 have of their own: products that four warps make from shared
// memory, tiles of a matrix that the hardware copies there and back, and barriers that count the
// bytes of such copies. Code for it is made for sm_90a (scripts/build_cuda.py); for other GPUs a
// kernel that uses this is compiled as well, and must not be launched.
//
// A tile has rows of 128 bytes. Its 16-byte parts lie where the number of the row, modulo 8,
// exchanges them (swizzled_part), so that eight rows of one column are in different banks.
#pragma once

#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "check.h"
#include "device.h"
#include "matmul.h"

// Where the body of a kernel that uses this may stand.
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define LIGHTSEQ_HAS_WARPGROUPS
#endif

namespace lightseq {

constexpr int kWarpgroup = 128;   // threads
constexpr int kTileColumns = 64;  // of a tile in memory: 128 bytes of 16-bit numbers
constexpr int kTileRowBytes = 128;
constexpr int kProductRows = 64;      // of a warpgroup's product,
constexpr int kProductColumns = 256;  // its columns
constexpr int kProductDepth = 16;     // and what it adds up
constexpr int kProductSums = kProductRows * kProductColumns / kWarpgroup;  // of a thread

// Whether kernels for it were compiled, and this GPU runs them.
inline bool has_warpgroups([[maybe_unused]] int32_t device) {
#ifdef LIGHTSEQ_SM90A
  return capability_of(device) == 90;
#else
  return false;
#endif
}

// A matrix of 16-bit numbers as tiles of `rows` times kTileColumns. What is outside of it is read
// as zeros and not written.
inline CUtensorMap tiles_of(const Matrix& x, int rows) {
  using Encode = decltype(&cuTensorMapEncodeTiled);
  static const Encode encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found{};
#if CUDART_VERSION >= 12050
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault,
                                     &found);
#else
    cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &found);
#endif
    require(function != nullptr, "lightseq: the driver has no cuTensorMapEncodeTiled");
    return reinterpret_cast<Encode>(function);
  }();
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(x.columns), static_cast<cuuint64_t>(x.rows)};
  const cuuint64_t stride = static_cast<cuuint64_t>(x.bytes(x.stride));
  const cuuint32_t box[] = {kTileColumns, static_cast<cuuint32_t>(rows)}, steps[] = {1, 1};
  const bool half = x.type == torch::headeronly::ScalarType::Half;
  CUtensorMap map;
  const CUresult status = encode(
      &map, half ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2, x.data,
      sizes, &stride, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  require(status == CUDA_SUCCESS, "lightseq: no tiles of a matrix of ", x.rows, " x ", x.columns,
          " (CUDA error ", static_cast<int>(status), ")");
  return map;
}

// Where the 16 bytes numbered `part` of a tile's row lie in it.
__device__ __forceinline__ int swizzled_part(int row, int part) { return (part ^ row % 8) * 16; }

__device__ __forceinline__ uint32_t shared_address(const void* address) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(address));
}

// A barrier in shared memory, which goes from phase to phase: the first has parity 0.
struct Barrier {
  uint64_t state;

  __device__ __forceinline__ void init(int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(this)),
                 "r"(arrivals));
  }
  __device__ __forceinline__ void arrive() {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(this)) : "memory");
  }
  // At the same barrier of a block of the cluster.
  __device__ __forceinline__ void arrive_at(int rank) {
    asm volatile(
        "{\n"
        ".reg .b32 there;\n"
        "mapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [there];\n"
        "}" ::"r"(shared_address(this)),
        "r"(rank)
        : "memory");
  }
  // Arrives, and has the phase wait for so many bytes of copies.
  __device__ __forceinline__ void expect(uint32_t bytes) {
    asm volatile(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(this)),
        "r"(bytes)
        : "memory");
  }
  // Returns when the phase of that parity is over: at once if that is the one before the current.
  __device__ __forceinline__ void wait(uint32_t parity) const {
    uint32_t is_over;
    do {
      asm volatile(
          "{\n"
          ".reg .pred p;\n"
          "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
          "selp.u32 %0, 1, 0, p;\n"
          "}"
          : "=r"(is_over)
          : "r"(shared_address(this)), "r"(parity)
          : "memory");
    } while (!is_over);
  }
};

// Of a thread that has made barriers, before the others meet it.
__device__ __forceinline__ void show_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void copy_tile(void* to, const CUtensorMap& from, int column, int row,
                                          Barrier& barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
      "[%0], [%1, {%2, %3}], [%4];" ::"r"(shared_address(to)),
      "l"(&from), "r"(column), "r"(row), "r"(shared_address(&barrier))
      : "memory");
}

// To the same place of all blocks of the cluster whose bits are set, and their barriers.
__device__ __forceinline__ void copy_tile(void* to, const CUtensorMap& from, int column, int row,
                                          Barrier& barrier, uint16_t blocks) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
      ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(shared_address(to)),
      "l"(&from), "r"(column), "r"(row), "r"(shared_address(&barrier)), "h"(blocks)
      : "memory");
}

// What threads have written to shared memory can be stored by store_tile() after this, of each.
__device__ __forceinline__ void show_writes() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void store_tile(const CUtensorMap& to, int column, int row,
                                           const void* from) {
  asm volatile(
      "cp.async.bulk.tensor.2d.global.shared::cta.tile.bulk_group [%0, {%1, %2}], [%3];" ::"l"(&to),
      "r"(column), "r"(row), "r"(shared_address(from))
      : "memory");
}
__device__ __forceinline__ void end_of_stores() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
// Until the places that this thread's stores are from may be written again.
__device__ __forceinline__ void wait_until_stores_have_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

// Registers of each thread of a warpgroup: a multiple of 8.
template <int kCount>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
__device__ __forceinline__ void leave_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}

// An operand of a product, in swizzled tiles. Distances in bytes: of eight rows from the next
// eight, and of a tile from the next one beside it, where the product is wider than a tile.
__device__ __forceinline__ uint64_t operand(uint32_t address, uint32_t of_eight_rows,
                                            uint32_t of_tiles) {
  constexpr uint64_t kSwizzled = uint64_t{1} << 62;
  return kSwizzled | static_cast<uint64_t>(of_eight_rows >> 4) << 32 |
         static_cast<uint64_t>(of_tiles >> 4) << 16 | (address & 0x3ffff) >> 4;
}

#define LIGHTSEQ_SUMS_4(i) "+f"(sums[i]), "+f"(sums[i + 1]), "+f"(sums[i + 2]), "+f"(sums[i + 3])
#define LIGHTSEQ_SUMS_16(i) \
  LIGHTSEQ_SUMS_4(i), LIGHTSEQ_SUMS_4(i + 4), LIGHTSEQ_SUMS_4(i + 8), LIGHTSEQ_SUMS_4(i + 12)
#define LIGHTSEQ_SUMS_64(i) \
  LIGHTSEQ_SUMS_16(i), LIGHTSEQ_SUMS_16(i + 16), LIGHTSEQ_SUMS_16(i + 32), LIGHTSEQ_SUMS_16(i + 48)
#define LIGHTSEQ_SUM_NAMES                                                                       \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "                       \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "             \
  "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "             \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, "             \
  "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, "             \
  "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, "             \
  "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
  "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define LIGHTSEQ_PRODUCT(type)                                                             \
  asm volatile(                                                                            \
      "{\n"                                                                                \
      ".reg .pred p;\n"                                                                    \
      "setp.ne.b32 p, %130, 0;\n"                                                          \
      "wgmma.mma_async.sync.aligned.m64n256k16.f32." type "." type " {" LIGHTSEQ_SUM_NAMES \
      "}, %128, %129, p, 1, 1, 0, 1;\n"                                                    \
      "}"                                                                                  \
      : LIGHTSEQ_SUMS_64(0), LIGHTSEQ_SUMS_64(64)                                          \
      : "l"(a), "l"(b), "r"(static_cast<int>(adds)))

// sums [64, 256] (+)= a [64, 16] b [16, 256], of a warpgroup, begun in the order of the calls. The
// rows of a's tiles are its own, those of b's what is added up. A thread's sums: row 16 * warp +
// lane / 4 (+ 8), columns 8 * i + lane % 4 * 2 (+ 1) are sums[4 * i] (+ 2) (+ 1).
template <typename T>
__device__ __forceinline__ void add_product(float (&sums)[kProductSums], uint64_t a, uint64_t b,
                                            bool adds) {
  if constexpr (std::is_same_v<T, __half>) {
    LIGHTSEQ_PRODUCT("f16");
  } else {
    LIGHTSEQ_PRODUCT("bf16");
  }
}

// Before the first product behind other instructions that touch the sums.
__device__ __forceinline__ void begin_products() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
__device__ __forceinline__ void end_of_products() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Until all products are over but those of the last kGroups ends.
template <int kGroups>
__device__ __forceinline__ void wait_for_products_but() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kGroups) : "memory");
}
__device__ __forceinline__ void wait_for_products(float (&sums)[kProductSums]) {
  wait_for_products_but<0>();
#pragma unroll
  for (int i = 0; i < kProductSums; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}

}  // namespace lightseq
