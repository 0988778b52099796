// The casts of attention's results to E4M3, in the kernels that compute them. Kernels that cast are
// variants of their own, so that the others have no code of it. common/fp8_cast.cuh has the rule.
//
// Numbers are rounded to bfloat16 before. So backward, which makes the transpose of forward's
// result from the stored numbers, gets the same bytes. Gradients are stored in E4M3 only.
//
// A cast here has no transpose: sentences begin at any row, so its stores would fill sectors only
// in part, and fp8_transpose takes less time. Cast::columns is the distance between rows of values;
// heads are adjacent.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>
#include <type_traits>

#include "attention/tiles.cuh"
#include "common/columns.cuh"
#include "common/fp8_cast.cuh"

namespace lightseq::attention {

// The casts of backward's gradients; those of dk and dv share their scalars.
struct GradientCasts {
  Cast dq, dk, dv;
};

// Where a gradient is written, in T or in E4M3.
template <typename T>
struct Result {
  Packed<T> rows;
  Cast cast;
};

template <typename T>
Result<T> result_of(const char* op, const char* name, const Tensor& x, const Cast& cast) {
  if (cast.values != nullptr) return {.rows = {}, .cast = cast};
  return {.rows = packed<T>(op, name, x), .cast = {}};
}

// Zeroes the values of rows first ... rows - 1; see zero_rows() in tiles.cuh.
__device__ __forceinline__ void zero_values(const Cast& cast, int first, int rows,
                                            const Work& work) {
  const int chunks = work.heads * work.width / static_cast<int>(kFp8Alignment);
  for (int row = first + blockIdx.x - work.blocks; row < rows; row += kZeroBlocks) {
    uint4* const values = reinterpret_cast<uint4*>(cast.values + row * cast.columns);
    for (int i = threadIdx.x; i < chunks; i += blockDim.x) values[i] = uint4{0, 0, 0, 0};
  }
}

// Sums of wgmma as those of mma: four of each group of 8 columns.
template <typename Float, int kCount>
__device__ __forceinline__ auto by_group(Float (&sums)[kCount]) -> Float (&)[kCount / 4][4] {
  return reinterpret_cast<Float(&)[kCount / 4][4]>(sums);
}

// A warp's 16 rows of a result in the layout of mma and wgmma: a lane has the columns 8 n + 2 c and
// 8 n + 2 c + 1 of rows r (sums[n][0 ... 1]) and r + 8 (sums[n][2 ... 3]), r = lane / 4,
// c = lane % 4. Casts the sums, multiplied by `low` (row r) and `high` (row r + 8).
//
// row, column: of the sums in the result, lane / 4 included. rows: how many exist from `row` on;
// columns: how many exist from `column` on, a multiple of 8.
template <int kGroups, int kWarps>
__device__ __forceinline__ void cast_sums(const Cast& cast, BlockStatistics<kWarps>& statistics,
                                          int64_t row, int column, int rows, int columns,
                                          const float (&sums)[kGroups][4], float low, float high) {
  constexpr int kAtOnce = 8;  // groups of 8 columns: each lane stores two of them
  const int c = threadIdx.x % 4;
  const bool right = c >= 2, odd = c % 2 == 1, exists[2] = {rows > 0, rows > 8};
  const bool aligned = (column | columns) % 16 == 0;  // otherwise heads begin at multiples of 8
  // 1 / scale, which is a power of two: the exponents are e + 127 and -e + 127.
  const float inverse = __uint_as_float((254u << 23) - __float_as_uint(*cast.scale));

  __nv_bfloat162 pairs[2][kGroups];  // of row r, and of row r + 8
  CastStatistics mine = {};
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float factor = half == 0 ? low : high;
    __nv_bfloat162 most = {};
#pragma unroll
    for (int n = 0; n < kGroups; ++n) {
      const __nv_bfloat162 pair =
          __floats2bfloat162_rn(sums[n][2 * half] * factor, sums[n][2 * half + 1] * factor);
      pairs[half][n] = __hfma2(pair, __nv_bfloat162{}, pair);  // infinity becomes NaN
      most = __hmax2(most, __habs2(pairs[half][n]));           // ignores NaN
    }
    const float2 both = __bfloat1622float2(most);
    if (exists[half]) mine.amax = fmaxf(mine.amax, fmaxf(both.x, both.y));
  }
  if (mine.amax * inverse > kMostE4m3) {                                     // rare
    const __nv_bfloat162 limit = __float2bfloat162_rn(kMostE4m3 / inverse);  // exact
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      __nv_bfloat162 beyond = {};
#pragma unroll
      for (const __nv_bfloat162 pair : pairs[half]) {
        beyond = __hadd2(beyond, __hgt2(__habs2(pair), limit));
      }
      const float2 both = __bfloat1622float2(beyond);
      if (exists[half]) mine.saturated += static_cast<unsigned>(both.x + both.y);
    }
  }
  statistics.add(mine);

  uint8_t* const to = cast.values + row * cast.columns + column + c * 16;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int first = 0; first < kGroups; first += kAtOnce) {
      uint32_t words[kAtOnce / 2] = {};  // two bytes of each of two groups
#pragma unroll
      for (int n = 0; n < min(kAtOnce, kGroups - first); ++n) {
        const float2 pair = __bfloat1622float2(pairs[half][first + n]);
        words[n / 2] |= pack_e4m3(pair.x * inverse, pair.y * inverse) << n % 2 * 16;
      }
      // The four lanes of a row exchange words, so that lane c gets word c of each: first with the
      // lane two beside it, then with its neighbour.
      uint32_t from[2][2];             // words 0 and 1, or 2 and 3: of this lane, of the other
      uint32_t of_even[2], of_odd[2];  // [0]: of this pair of lanes, [1]: of the other pair
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        from[0][i] = right ? words[2 + i] : words[i];
        from[1][i] = __shfl_xor_sync(kAllLanes, right ? words[i] : words[2 + i], 2);
      }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t kept = odd ? from[i][1] : from[i][0];
        const uint32_t got = __shfl_xor_sync(kAllLanes, odd ? from[i][0] : from[i][1], 1);
        of_even[i] = odd ? got : kept;
        of_odd[i] = odd ? kept : got;
      }
      uint2 groups[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const uint32_t order = i == 0 ? 0x5410 : 0x7632;
        const uint32_t near = __byte_perm(of_even[0], of_odd[0], order);
        const uint32_t far = __byte_perm(of_even[1], of_odd[1], order);
        groups[i] = right ? uint2{far, near} : uint2{near, far};
      }
      uint8_t* const at = to + half * 8 * cast.columns + first * 8;
      const int left = exists[half] ? columns - first * 8 - c * 16 : 0;
      if (aligned && left > 0) {
        *reinterpret_cast<uint4*>(at) = {groups[0].x, groups[0].y, groups[1].x, groups[1].y};
      } else {
        if (left > 0) *reinterpret_cast<uint2*>(at) = groups[0];
        if (left > 8) *reinterpret_cast<uint2*>(at + 8) = groups[1];
      }
    }
  }
}

}  // namespace lightseq::attention
