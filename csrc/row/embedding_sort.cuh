// Backward of embedding, first step: one kernel sorts T tokens by their row of a table with V rows,
// and sets rows that do not occur to zero.
//
// Each block owns the rows v with v % owners == its number and does all work for them, so no block
// waits for another. Each of its warps has a share of all tokens:
//
//   count   in shared memory: for each row of the block, the tokens of the share; and the total
//           number of tokens that belong to blocks before this one
//   place   from these counts: the range of each row in `order`, and where each share begins in it
//   order   the warps read their shares again and write the block's tokens to their places
//   clear   set rows without tokens to zero; half of the warps begin with this
//
//   bytes moved    the indices, which all blocks read twice (from the caches); 16 bytes per token;
//                  the zeros
//   determinism    tokens are sorted by owner, then row, then number; atomics are only used to
//                  count
//
// An index out of range stops the kernel with a device-side assertion; it is not counted.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cassert>
#include <cstdint>

#include "common/launch.cuh"
#include "common/reduce.cuh"
#include "common/scalars.cuh"

namespace lightseq::embedding {

constexpr int kSortWarps = 32;  // per block
constexpr int kSortBlock = kWarp * kSortWarps;
constexpr int kLeastOwnerShift = 7;  // 128 blocks, all resident on most GPUs
constexpr int kMostOwned = 512;      // rows per block
constexpr int kBatch = 8;            // tokens per lane with loads in flight

// An entry of the sorted tokens.
struct alignas(16) Place {
  int token;         // number of the token
  int row;           // its row of the table
  int index, count;  // index among the tokens of that row, their count (excluded row: 0)
};

struct Sort {
  Indices indices;
  int tokens;
  int share = 0;        // tokens per warp
  int owner_shift = 0;  // owners = 2^owner_shift
  int64_t vocabulary = 0, excluded = -1;
  Place* order = nullptr;  // [tokens]
  int* arrived = nullptr;  // [arrivals] zeros for the next kernel
  int64_t arrivals = 0;
  char* table = nullptr;  // null: rows without tokens are not changed
  int64_t table_stride = 0, row_bytes = 0;
};

// Exclusive prefix sum of x over the threads of the block; `total` is the sum over all threads.
__device__ __forceinline__ int exclusive_sum(int x, int& total) {
  __shared__ int of_warp[kSortWarps];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const auto inclusive = [&](int sum) {
#pragma unroll
    for (int offset = 1; offset < kWarp; offset *= 2) {
      const int below = __shfl_up_sync(kAllLanes, sum, offset);
      if (lane >= offset) sum += below;
    }
    return sum;
  };
  const int sum = inclusive(x);
  __syncthreads();  // all threads have read the result of the previous call
  if (lane == kWarp - 1) of_warp[warp] = sum;
  __syncthreads();
  const int warps = inclusive(of_warp[lane]);
  total = __shfl_sync(kAllLanes, warps, kSortWarps - 1);
  const int before = __shfl_sync(kAllLanes, warps, max(warp - 1, 0));
  return sum - x + (warp > 0 ? before : 0);
}

static __global__ void __launch_bounds__(kSortBlock)
    embedding_sort_kernel(const __grid_constant__ Sort p) {
  extern __shared__ int counts[];        // [shares, kMostOwned] tokens, then index of the next one
  __shared__ int2 segments[kMostOwned];  // first place and tokens of a row
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const uint32_t owner = blockIdx.x, owners = 1u << p.owner_shift;
  for (int i = threadIdx.x; i < kSortWarps * kMostOwned; i += kSortBlock) counts[i] = 0;
  for (int64_t i = blockIdx.x * kSortBlock + threadIdx.x; i < p.arrivals;
       i += static_cast<int64_t>(gridDim.x) * kSortBlock) {
    p.arrived[i] = 0;
  }
  __syncthreads();

  int* const counted = counts + warp * kMostOwned;
  const int first = min(warp * p.share, p.tokens), end = min(first + p.share, p.tokens);
  // Load only the lower 32 bits of an index: they identify the row if it is valid, and have the
  // same address for int32 and int64. Without a branch on the type, the loads can overlap.
  const auto* const indices = static_cast<const char*>(p.indices.data);
  const int64_t step = p.indices.stride * (p.indices.wide ? sizeof(int64_t) : sizeof(int32_t));
  const auto load_rows = [&](int token, uint32_t (&rows)[kBatch]) {
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int64_t at = min(token + i * kWarp, p.tokens - 1);
      rows[i] = *reinterpret_cast<const uint32_t*>(indices + at * step);
    }
  };
  int before = 0;
  for (int token = first + lane; token < end; token += kBatch * kWarp) {
    uint32_t rows[kBatch];
    load_rows(token, rows);
    bool is_valid = true;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const bool exists = i * kWarp < end - token;
      const uint32_t its_owner = rows[i] % owners;
      before += exists && its_owner < owner;
      if (!exists || its_owner != owner) continue;
      const int64_t row = p.indices.at(token + i * kWarp);
      if (row >= 0 && row < p.vocabulary) {
        atomicAdd(counted + (rows[i] >> p.owner_shift), 1);
      } else {
        is_valid = false;
      }
    }
    assert(is_valid && "index in [0, V)");
  }
  int start;
  exclusive_sum(before, start);

  int count = 0;
  if (threadIdx.x < kMostOwned) {
#pragma unroll
    for (int share = 0; share < kSortWarps; ++share) {
      int* const of_share = counts + share * kMostOwned + threadIdx.x;
      const int added = *of_share;
      *of_share = count;
      count += added;
    }
  }
  int total;
  start += exclusive_sum(count, total);
  if (threadIdx.x < kMostOwned) segments[threadIdx.x] = make_int2(start, count);
  __syncthreads();

  const auto order = [&] {
    for (int token = first + lane; token - lane < end; token += kBatch * kWarp) {
      uint32_t rows[kBatch];
      load_rows(token, rows);
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const bool is_own = rows[i] % owners == owner && i * kWarp < end - token;
        if (!__any_sync(kAllLanes, is_own)) continue;
        const unsigned equal = __match_any_sync(kAllLanes, is_own ? rows[i] : ~owner);
        const int of_block = static_cast<int>(rows[i] >> p.owner_shift);
        if (is_own) {
          const int2 segment = segments[of_block];
          const int index = counted[of_block] + __popc(equal & ((1u << lane) - 1));
          p.order[segment.x + index] = {token + i * kWarp, static_cast<int>(rows[i]), index,
                                        rows[i] == p.excluded ? 0 : segment.y};
        }
        __syncwarp();
        if (is_own && equal >> lane == 1) counted[of_block] += __popc(equal);
        __syncwarp();
      }
    }
  };
  const auto clear = [&] {
    for (int i = warp;; i += kSortWarps) {
      const int64_t row = (static_cast<int64_t>(i) << p.owner_shift) + owner;
      if (row >= p.vocabulary) return;
      if (segments[i].y > 0 && row != p.excluded) continue;
      char* const target = p.table + row * p.table_stride;
      for (int64_t byte = lane * sizeof(uint4); byte < p.row_bytes; byte += kWarp * sizeof(uint4)) {
        *reinterpret_cast<uint4*>(target + byte) = make_uint4(0, 0, 0, 0);
      }
    }
  };
#pragma unroll 1
  for (int turn = warp; turn < warp + 2; ++turn) {
    if (turn % 2 == 0) {
      order();
    } else if (p.table != nullptr) {
      clear();
    }
  }
}

// Launches the sort; chooses p.share and p.owner_shift.
inline void sort_tokens(Sort p) {
  p.share = static_cast<int>(blocks_for(p.tokens, kSortBlock)) * kWarp;
  p.owner_shift = kLeastOwnerShift;
  while (static_cast<int64_t>(kMostOwned) << p.owner_shift < p.vocabulary) ++p.owner_shift;
  launch({.op = "embedding_bwd",
          .grid = 1u << p.owner_shift,
          .block = kSortBlock,
          .shared = kSortWarps * kMostOwned * sizeof(int)},
         embedding_sort_kernel, p);
}

}  // namespace lightseq::embedding
