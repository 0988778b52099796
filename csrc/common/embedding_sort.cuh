// Backward of embedding, first half: a counting sort of T tokens by their rows of a table, V of
// them. It says which rows occur and where, and cuts the sums that are to come into work.
//
//   rank_kernel    cuts the tokens into kTiles tiles, a block each: how many equal tokens has the
//                  tile before this one, and in all?
//   place_kernel   a thread for each row of the table: turns the tiles' counts into places in
//                  `order`, where equal tokens lie side by side, and writes the list of work
//   order_kernel   writes every token's number to its place
//
//   bytes moved    the indices twice, 12 bytes a token for ranks and order; 4 * kTiles bytes a row
//                  of the table are cleared, read and, where the row occurs, written again
//   determinism    integer atomics hand out places in `order` and in the list of work. Which row
//                  gets which place differs from run to run, but a row's tokens always lie side by
//                  side in ascending order
//
// An index out of range stops the first kernel with a device-side assertion before anything is
// written there.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cassert>
#include <cstdint>
#include <utility>

#include "common/check.h"
#include "common/reduce.cuh"
#include "common/scalars.cuh"

namespace lightseq::embedding {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int kWarps = 8;  // of a block
constexpr int kBlock = kWarp * kWarps;
constexpr int kTiles = 32;
constexpr int kRound = 512;  // tokens that a block ranks at a time
constexpr int kRows = 8;     // that a warp adds up
constexpr int kChunk = kRows * kWarps;

// A row of the table that occurs, and its tokens' places in `order`.
struct alignas(16) Work {
  int row, start, count;
  int first;  // the first of the row's pieces of work in the list, where they are several
};

// What the kernels of one table share; what comes before `work` is zero at the start.
struct Sort {
  int* taken;    // [0] places of `order`, [1] long and [2] short pieces of the list of work
  int* arrived;  // [long_work, slabs] how many pieces of the row whose work begins here are done
  int* counts;   // [kTiles, V] then the first place of the tile's tokens; absent rows: -1
  Work* work;    // [long_work] rows of more than kRows tokens, a piece for each kChunk of them,
                 // then [short_work]
  int* rank;     // [T] among the equal tokens of the tile
  int* order;    // [T] numbers of tokens, equal ones side by side and ascending
  Indices indices;
  int tokens, tile, long_work;
  int64_t vocabulary, excluded;
};

// Every token is compared with those before it in its round: many instructions, but nothing to
// wait for.
static __global__ void __launch_bounds__(kRound)
    embedding_rank_kernel(const __grid_constant__ Sort p) {
  __shared__ alignas(16) int round[kRound];
  int* const counts = p.counts + blockIdx.x * p.vocabulary;
  const int end = min(p.tokens, (static_cast<int>(blockIdx.x) + 1) * p.tile);
  const int self = threadIdx.x;
  for (int t = blockIdx.x * p.tile + self; t - self < end; t += kRound) {
    const int64_t token = t < end ? p.indices.at(t) : -1;
    assert(t >= end || (token >= 0 && token < p.vocabulary && "index in [0, V)"));
    const int mine = static_cast<int>(token);
    __syncthreads();  // the round before has been read, its counts are there
    round[self] = mine;
    int before = t < end ? __ldcg(counts + mine) : 0;
    __syncthreads();
    for (int i = 0; i < self / kWarp * kWarp; i += 4) {
      const int4 others = *reinterpret_cast<const int4*>(round + i);
      before += (others.x == mine) + (others.y == mine) + (others.z == mine) + (others.w == mine);
    }
    const unsigned lower = (1u << self % kWarp) - 1;
    before += __popc(__match_any_sync(kAllLanes, mine) & lower);
    if (t < end) {
      p.rank[t] = before;
      atomicMax(counts + mine, before + 1);
    }
  }
}

// Three times the first of `count` places for the calling lane. Every lane takes part; one atomic
// a warp and counter.
__device__ __forceinline__ void take_places(int* taken, const int (&count)[3], int (&first)[3]) {
  const int lane = threadIdx.x % kWarp;
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    int end = count[i];
#pragma unroll
    for (int offset = 1; offset < kWarp; offset *= 2) {
      const int below = __shfl_up_sync(kAllLanes, end, offset);
      if (lane >= offset) end += below;
    }
    first[i] = end;
  }
  int base[3] = {};
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    if (lane == kWarp - 1 && first[i] > 0) base[i] = atomicAdd(taken + i, first[i]);
  }
#pragma unroll
  for (int i = 0; i < 3; ++i) {
    first[i] += __shfl_sync(kAllLanes, base[i], kWarp - 1) - count[i];
  }
}

static __global__ void __launch_bounds__(kBlock)
    embedding_place_kernel(const __grid_constant__ Sort p) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * kBlock + threadIdx.x;
  const bool is_counted = row < p.vocabulary && row != p.excluded;
  int before[kTiles];
  int count = 0;
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    before[tile] = is_counted ? p.counts[tile * p.vocabulary + row] : 0;
  }
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    const int of_tile = before[tile];
    before[tile] = count;
    count += of_tile;
  }
  const bool is_long = count > kRows;
  const int chunks = is_long ? (count + kChunk - 1) / kChunk : 0;
  int first[3];
  take_places(p.taken, {count, chunks, count > 0 && !is_long}, first);
  const int start = first[0];
  if (row >= p.vocabulary) return;
  if (count == 0) {
    p.counts[row] = -1;
    return;
  }
  const Work work{static_cast<int>(row), start, count, first[1]};
  for (int i = 0; i < chunks; ++i) p.work[first[1] + i] = work;
  if (!is_long) p.work[p.long_work + first[2]] = work;
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    p.counts[tile * p.vocabulary + row] = start + before[tile];
  }
}

static __global__ void __launch_bounds__(kBlock)
    embedding_order_kernel(const __grid_constant__ Sort p) {
  const int t = blockIdx.x * kBlock + threadIdx.x;
  if (t >= p.tokens) return;
  const int64_t token = p.indices.at(t);
  if (token == p.excluded) return;
  p.order[p.counts[t / p.tile * p.vocabulary + token] + p.rank[t]] = t;
}

// Enqueues the sort of `indices`, but for those that are `excluded`, for a kernel that works on
// `slabs` slabs of columns. The memory of the result is to be kept until that has been launched.
inline std::pair<Sort, Tensor> sort_tokens(const char* op, const Tensor& indices,
                                           int64_t vocabulary, int64_t excluded, int64_t slabs,
                                           cudaStream_t stream) {
  const int64_t tokens = indices.size(0);
  require(tokens < INT32_MAX - kTiles * kRound, op, ": more than 2^31 tokens");
  const int64_t long_work = tokens / (kRows + 1), short_work = std::min(tokens, vocabulary);
  const int64_t zeros = (3 + long_work * slabs + kTiles * vocabulary + 3) / 4 * 4;
  const int64_t all_work = 4 * (long_work + short_work);
  Tensor scratch = allocate(indices, {zeros + all_work + 2 * tokens}, ScalarType::Int);
  int* const base = scratch.mutable_data_ptr<int>();
  int* const rank = base + zeros + all_work;
  const int64_t tile = blocks_for(tokens, kTiles * kRound) * kRound;
  const Sort sort{base,
                  base + 3,
                  base + 3 + long_work * slabs,
                  reinterpret_cast<Work*>(base + zeros),
                  rank,
                  rank + tokens,
                  Indices(indices),
                  static_cast<int>(tokens),
                  static_cast<int>(tile),
                  static_cast<int>(long_work),
                  vocabulary,
                  excluded};
  cudaMemsetAsync(base, 0, zeros * sizeof(int), stream);
  embedding_rank_kernel<<<blocks_for(tokens, tile), kRound, 0, stream>>>(sort);
  embedding_place_kernel<<<blocks_for(vocabulary, kBlock), kBlock, 0, stream>>>(sort);
  embedding_order_kernel<<<blocks_for(tokens, kBlock), kBlock, 0, stream>>>(sort);
  return {sort, scratch};
}

}  // namespace lightseq::embedding
