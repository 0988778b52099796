// Cast of a bf16 matrix x [rows, columns] to E4M3, with its transpose: x = scale * values.
//
//   values    [rows, columns]   x / scale, saturated at +-448, rounded to nearest even; NaN and
//                               infinity become NaN
//   transpose [columns, pitch]  pitch: rows rounded up to a multiple of 16; zeros at the end
//   amax                        maximum of its old value and of all finite |x|
//   saturated                   its old value plus the number of finite |x / scale| above 448
//
//   scale         a power of two in device memory
//   columns       a multiple of 64; x and values are contiguous
//   bytes moved   4 per element, as many as a copy of x
//
// A block casts 128 rows of 64 columns, a thread 4 rows of 8 columns. Threads transpose 4 x 4 bytes
// in registers. Shared memory has 32 words of 4 rows for each column. A column's groups of 4 words
// are swapped by an exclusive or with the number of its 8 columns: so neither the writes of single
// words nor the reads of 16 bytes have bank conflicts. All accesses to x, values and transpose have
// 16 bytes.
#include <cuda_bf16.h>
#include <cuda_fp8.h>
#include <cuda_runtime.h>

#include <cstdint>

namespace {

constexpr int kThreads = 256;
constexpr int kRows = 128, kColumns = 64;  // of a tile
constexpr int kWords = kRows / 4;          // of a column in shared memory
constexpr float kMost = 448.0f;
constexpr unsigned kAll = 0xffffffffu;

struct Statistics {
  float amax;
  unsigned saturated;
};

// Two bf16 numbers to two E4M3 numbers; the first is in the low half.
__device__ __forceinline__ uint32_t cast_pair(uint32_t pair, float inverse, Statistics& of_thread) {
  float x[2] = {__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u)};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    x[i] = fmaf(x[i], 0.0f, x[i]);  // infinity becomes NaN, which fmaxf and > ignore
    of_thread.amax = fmaxf(of_thread.amax, fabsf(x[i]));
    x[i] *= inverse;
    of_thread.saturated += fabsf(x[i]) > kMost;
  }
  return __nv_cvt_float2_to_fp8x2({x[0], x[1]}, __NV_SATFINITE, __NV_E4M3);
}

// in[i]: four bytes of row i. out[i]: the bytes of column i.
__device__ __forceinline__ void transpose_bytes(const uint32_t (&in)[4], uint32_t (&out)[4]) {
  const uint32_t low01 = __byte_perm(in[0], in[1], 0x5140),
                 low23 = __byte_perm(in[2], in[3], 0x5140);
  const uint32_t high01 = __byte_perm(in[0], in[1], 0x7362),
                 high23 = __byte_perm(in[2], in[3], 0x7362);
  out[0] = __byte_perm(low01, low23, 0x5410);
  out[1] = __byte_perm(low01, low23, 0x7632);
  out[2] = __byte_perm(high01, high23, 0x5410);
  out[3] = __byte_perm(high01, high23, 0x7632);
}

template <bool kTranspose>
__global__ void __launch_bounds__(kThreads)
    cast_kernel(const uint16_t* __restrict__ x, int64_t rows, int64_t columns,
                const float* __restrict__ scale, uint8_t* __restrict__ values,
                uint8_t* __restrict__ transpose, unsigned* amax, unsigned long long* saturated) {
  __shared__ __align__(16) uint32_t tile[kColumns * kWords];
  __shared__ Statistics of_warp[kThreads / 32];
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int group = lane % 8;            // of 8 columns
  const int word = warp * 4 + lane / 8;  // of 4 rows
  const int64_t first_row = static_cast<int64_t>(blockIdx.y) * kRows;
  const int64_t first_column = static_cast<int64_t>(blockIdx.x) * kColumns;
  const float inverse = 1.0f / *scale;

  uint4 in[4] = {};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int64_t row = first_row + 4 * word + i;
    if (row < rows) {
      in[i] = __ldcg(reinterpret_cast<const uint4*>(x + row * columns + first_column) + group);
    }
  }
  Statistics of_thread = {};
  uint2 out[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    out[i].x = cast_pair(in[i].x, inverse, of_thread) | cast_pair(in[i].y, inverse, of_thread)
                                                            << 16;
    out[i].y = cast_pair(in[i].z, inverse, of_thread) | cast_pair(in[i].w, inverse, of_thread)
                                                            << 16;
  }

  // Two neighbours exchange two rows, so that each stores two rows of 16 columns.
  const bool odd = group % 2 == 1;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint2 mine = odd ? out[2 + i] : out[i], sent = odd ? out[i] : out[2 + i];
    const uint2 got = {__shfl_xor_sync(kAll, sent.x, 1), __shfl_xor_sync(kAll, sent.y, 1)};
    const uint4 both =
        odd ? uint4{got.x, got.y, mine.x, mine.y} : uint4{mine.x, mine.y, got.x, got.y};
    const int64_t row = first_row + 4 * word + (odd ? 2 : 0) + i;
    if (row < rows) {
      reinterpret_cast<uint4*>(values + row * columns + first_column)[group / 2] = both;
    }
  }

  if constexpr (kTranspose) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t by_row[4], by_column[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) by_row[i] = half == 0 ? out[i].x : out[i].y;
      transpose_bytes(by_row, by_column);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        tile[(8 * group + 4 * half + i) * kWords + (word ^ (4 * group))] = by_column[i];
      }
    }
  }
  of_thread.amax = __uint_as_float(__reduce_max_sync(kAll, __float_as_uint(of_thread.amax)));
  of_thread.saturated = __reduce_add_sync(kAll, of_thread.saturated);
  if (lane == 0) of_warp[warp] = of_thread;
  __syncthreads();

  if constexpr (kTranspose) {
    const int64_t pitch = (rows + 15) / 16 * 16;
#pragma unroll
    for (int i = 0; i < kColumns * kWords / 4 / kThreads; ++i) {
      const int place = i * kThreads + threadIdx.x;
      const int column = place / 8, quad = place % 8;  // 16 rows
      const int64_t row = first_row + 16 * quad;
      if (row < pitch) {
        *reinterpret_cast<uint4*>(transpose + (first_column + column) * pitch + row) =
            *reinterpret_cast<const uint4*>(tile + column * kWords + 4 * (quad ^ (column / 8)));
      }
    }
  }
  if (threadIdx.x == 0) {
    Statistics of_block = {};
#pragma unroll
    for (int i = 0; i < kThreads / 32; ++i) {
      of_block.amax = fmaxf(of_block.amax, of_warp[i].amax);
      of_block.saturated += of_warp[i].saturated;
    }
    atomicMax(amax, __float_as_uint(of_block.amax));  // numbers >= 0 are ordered as their bits
    if (of_block.saturated > 0) atomicAdd(saturated, of_block.saturated);
  }
}

}  // namespace

#ifdef __CUDACC__
// transpose null: not written. Returns CUDA's error of the launch.
extern "C" int cast_to_e4m3(const void* x, int64_t rows, int64_t columns, const void* scale,
                            void* values, void* transpose, void* amax, void* saturated,
                            void* stream) {
  const dim3 grid(columns / kColumns, (rows + kRows - 1) / kRows);
  const auto kernel = transpose == nullptr ? cast_kernel<false> : cast_kernel<true>;
  kernel<<<grid, kThreads, 0, static_cast<cudaStream_t>(stream)>>>(
      static_cast<const uint16_t*>(x), rows, columns, static_cast<const float*>(scale),
      static_cast<uint8_t*>(values), static_cast<uint8_t*>(transpose), static_cast<unsigned*>(amax),
      static_cast<unsigned long long*>(saturated));
  return cudaGetLastError();
}
#endif
