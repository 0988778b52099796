// Products of small tiles in shared memory; each is computed by one warp. W is kWidth.
//
//   multiply_nt   c[16, N]  = a[16, W] b[N, W]^T
//   multiply_nn   c[16, W] += p[16, N] b[N, W]       p in registers, a result of multiply_nt
//   multiply_tn   c[16, W] += a[K, 16]^T b[K, W]
//
// 16-bit types use the tensor cores (mma.sync m16n8k16: all GPUs from sm_80 on). float32 uses fused
// multiply-adds, to keep all of its 24 bits. Accumulation is in float32.
//
// A result of N columns is float c[N / 8][4] in each lane. For columns 8n ... 8n + 7, lane 4g + t
// holds columns 2t and 2t + 1: of row g in c[n][0], c[n][1], and of row g + 8 in c[n][2], c[n][3].
// Two adjacent fragments have the layout of the left operand of the next product, so probabilities
// stay in registers.
//
// The row stride of a tile is kStride numbers, 16 bytes more than the width. Eight rows then start
// in eight different groups of four banks, so ldmatrix and 16-byte reads have no bank conflicts.
#pragma once

#include <cstdint>
#include <type_traits>

#include "common/ptx/async_copy.cuh"
#include "common/reduce.cuh"
#include "common/vec.cuh"

namespace lightseq {

template <typename T, int kWidth>
constexpr int kStride = kWidth + Vec<T>::kSize;

// Row and column of this lane's first number of a result.
__device__ __forceinline__ int lane_row() { return threadIdx.x % kWarp / 4; }
__device__ __forceinline__ int lane_column() { return threadIdx.x % 4 * 2; }

// Loads four 8x8 matrices of 16-bit numbers; lane l passes the address of row l % 8 of matrix
// l / 8.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
}
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], const void* row) {
  ldmatrix_x4(r, shared_address(row));
}

__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], uint32_t row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];\n"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(row)
               : "memory");
}
__device__ __forceinline__ void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row) {
  ldmatrix_x4_trans(r, shared_address(row));
}

// The transpose of an 8x8 matrix of 16-bit numbers: lane 4g + t has columns 2t and 2t + 1 of row g.
__device__ __forceinline__ uint32_t movmatrix_trans(uint32_t pair) {
  uint32_t transposed;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(pair));
  return transposed;
}

template <typename T>
__device__ __forceinline__ void store_pair(T* to, float first, float second) {
  if constexpr (sizeof(T) == 2) {
    *reinterpret_cast<uint32_t*>(to) = pack_pair<T>(first, second);
  } else {
    *reinterpret_cast<float2*>(to) = {first, second};
  }
}

// Stores two adjacent fragments of a result, 16 rows of 16 numbers; the row stride is kRow numbers.
template <typename T, int kRow>
__device__ __forceinline__ void store_fragments(T* to, const float (&left)[4],
                                                const float (&right)[4]) {
#if __CUDA_ARCH__ >= 900
  if constexpr (sizeof(T) == 2) {
    to += threadIdx.x % 16 * kRow + threadIdx.x % kWarp / 16 * 8;
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};\n" ::"r"(
                     shared_address(to)),
                 "r"(pack_pair<T>(left[0], left[1])), "r"(pack_pair<T>(left[2], left[3])),
                 "r"(pack_pair<T>(right[0], right[1])), "r"(pack_pair<T>(right[2], right[3]))
                 : "memory");
    return;
  }
#endif
  to += lane_row() * kRow + lane_column();
  store_pair(to, left[0], left[1]);
  store_pair(to + 8, right[0], right[1]);
  store_pair(to + 8 * kRow, left[2], left[3]);
  store_pair(to + 8 * kRow + 8, right[2], right[3]);
}

// c[16, 8] += a[16, 16] b[16, 8]
template <typename T>
__device__ __forceinline__ void mma(float (&c)[4], const uint32_t (&a)[4], uint32_t b0,
                                    uint32_t b1) {
  if constexpr (std::is_same_v<T, __half>) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};\n"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};\n"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
  }
}

// c[16, 8] += a[16, 8] b[8, 8] in TF32. a: of lane 4g + t, columns t and t + 4 of rows g and g + 8,
// in the order (g, t), (g + 8, t), (g, t + 4), (g + 8, t + 4). b: rows t and t + 4 of column g.
__device__ __forceinline__ void mma_tf32(float (&c)[4], const uint32_t (&a)[4],
                                         const uint32_t (&b)[2]) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};\n"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// Adds low * row to row g of c, and high * row to row g + 8. `row` points to the lane's first
// column.
template <int kWidth>
__device__ __forceinline__ void multiply_add_row(float (&c)[kWidth / 8][4], float low, float high,
                                                 const float* row) {
#pragma unroll
  for (int n = 0; n < kWidth / 8; ++n) {
    const float2 right = *reinterpret_cast<const float2*>(row + n * 8);
    c[n][0] = fmaf(low, right.x, c[n][0]);
    c[n][1] = fmaf(low, right.y, c[n][1]);
    c[n][2] = fmaf(high, right.x, c[n][2]);
    c[n][3] = fmaf(high, right.y, c[n][3]);
  }
}

template <typename T, int kWidth, int kBlocks>
__device__ __forceinline__ void multiply_nt(float (&c)[kBlocks][4], const T* a, const T* b) {
  constexpr int kRow = kStride<T, kWidth>;
  const int lane = threadIdx.x % kWarp;
#pragma unroll
  for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
    for (int e = 0; e < 4; ++e) c[n][e] = 0.0f;
  }
  if constexpr (sizeof(T) == 2) {
    a += lane % 16 * kRow + lane / 16 * 8;
    b += (lane % 8 + lane / 16 * 8) * kRow + lane / 8 % 2 * 8;
#pragma unroll
    for (int k = 0; k < kWidth; k += 16) {
      uint32_t left[4];
      ldmatrix_x4(left, a + k);
#pragma unroll
      for (int n = 0; n < kBlocks; n += 2) {
        uint32_t right[4];
        ldmatrix_x4(right, b + n * 8 * kRow + k);
        mma<T>(c[n], left, right[0], right[1]);
        mma<T>(c[n + 1], left, right[2], right[3]);
      }
    }
  } else {
    // Partial sums of four, added with compensated summation (Kahan 1965): attention's backward
    // subtracts such products that are nearly equal.
    float lost[kBlocks][4] = {};
    a += lane_row() * kRow;
    b += lane_column() * kRow;
#pragma unroll 1
    for (int k = 0; k < kWidth; k += 4) {
      const Vec<T> left[2] = {load(a + k), load(a + 8 * kRow + k)};
#pragma unroll
      for (int n = 0; n < kBlocks; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const Vec<T> right = load(b + (n * 8 + e % 2) * kRow + k);
          float sum = left[e / 2].values[0] * right.values[0];
#pragma unroll
          for (int i = 1; i < 4; ++i) sum = fmaf(left[e / 2].values[i], right.values[i], sum);
          sum -= lost[n][e];
          const float total = c[n][e] + sum;
          lost[n][e] = (total - c[n][e]) - sum;
          c[n][e] = total;
        }
      }
    }
  }
}

template <typename T, int kWidth, int kBlocks>
__device__ __forceinline__ void multiply_nn(float (&c)[kWidth / 8][4], const float (&p)[kBlocks][4],
                                            const T* b) {
  constexpr int kRow = kStride<T, kWidth>;
  const int lane = threadIdx.x % kWarp;
  if constexpr (sizeof(T) == 2) {
    b += lane % 16 * kRow + lane / 16 * 8;
#pragma unroll
    for (int k = 0; k < kBlocks; k += 2) {
      uint32_t left[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        left[i] = pack_pair<T>(p[k + i / 2][i % 2 * 2], p[k + i / 2][i % 2 * 2 + 1]);
      }
#pragma unroll
      for (int n = 0; n < kWidth / 8; n += 2) {
        uint32_t right[4];
        ldmatrix_x4_trans(right, b + k * 8 * kRow + n * 8);
        mma<T>(c[n], left, right[0], right[1]);
        mma<T>(c[n + 1], left, right[2], right[3]);
      }
    }
  } else {
    // Sum these rows separately, 32 columns at a time, and add the sum to c: one chain of additions
    // over all rows of a long sentence would lose more bits.
    b += lane_column();
#pragma unroll
    for (int first = 0; first < kWidth / 8; first += 4) {
      float sum[4][4] = {};
#pragma unroll
      for (int k = 0; k < kBlocks * 8; ++k) {
        const int owner = lane / 4 * 4 + k % 8 / 2;
        const float low = __shfl_sync(kAllLanes, p[k / 8][k % 2], owner);
        const float high = __shfl_sync(kAllLanes, p[k / 8][k % 2 + 2], owner);
        multiply_add_row<32>(sum, low, high, b + k * kRow + first * 8);
      }
#pragma unroll
      for (int n = 0; n < 4; ++n) {
#pragma unroll
        for (int e = 0; e < 4; ++e) c[first + n][e] += sum[n][e];
      }
    }
  }
}

// Uses the first `rows` (at most kDepth) rows of a and b, rounded up to a multiple of 16 for 16-bit
// types.
template <typename T, int kWidth, int kDepth>
__device__ __forceinline__ void multiply_tn(float (&c)[kWidth / 8][4], const T* a, const T* b,
                                            int rows) {
  constexpr int kRow = kStride<T, kWidth>;
  const int lane = threadIdx.x % kWarp;
  if constexpr (sizeof(T) == 2) {
    a += (lane % 8 + lane / 16 * 8) * kRow + lane / 8 % 2 * 8;
    b += lane % 16 * kRow + lane / 16 * 8;
#pragma unroll
    for (int k = 0; k < kDepth; k += 16) {
      if (k >= rows) break;
      uint32_t left[4];
      ldmatrix_x4_trans(left, a + k * kRow);
#pragma unroll
      for (int n = 0; n < kWidth / 8; n += 2) {
        uint32_t right[4];
        ldmatrix_x4_trans(right, b + k * kRow + n * 8);
        mma<T>(c[n], left, right[0], right[1]);
        mma<T>(c[n + 1], left, right[2], right[3]);
      }
    }
  } else {
    a += lane_row();
    b += lane_column();
#pragma unroll 1
    for (int k = 0; k < min(kDepth, rows); ++k) {
      multiply_add_row<kWidth>(c, a[k * kRow], a[k * kRow + 8], b + k * kRow);
    }
  }
}

}  // namespace lightseq
