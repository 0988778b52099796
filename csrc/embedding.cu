// Token and position embedding: T tokens (rows), C columns, V rows of a table.
//
//   y[t]       = dropout(scale * weight[token[t]] + position_weight[position[t]])
//   dweight[v] = scale * sum over t with token[t] == v of dropout'(dy[t])
//
// and the positions' table alike, without the factor. The padding symbol's row of dweight gets
// nothing. Saved for backward: the indices; dropout's bits are drawn again.
//
//   bytes moved   forward: the rows of the table that occur, and y. Backward: dy, and the table's
//                 gradient; where it accumulates, only the rows that occur
//   determinism   forward has no sums. Backward adds a row's tokens in ascending order, by eights,
//                 those to sums of 64 and these by a fixed rule. Integer atomics hand out places in
//                 memory, which differ from run to run, but never decide about an order of adding
//
// Backward is a counting sort and a sum:
//
//   rank_kernel    cuts the tokens into kTiles tiles, a block each: how many equal tokens has the
//                  tile before this one, and in all?
//   place_kernel   a thread for each row of the table: turns the tiles' counts into places in
//                  `order`, where equal tokens lie side by side, and writes the list of work
//   order_kernel   writes every token's number to its place
//   sum_kernel     a warp for each row of the table and 256 columns; for rows of more than 8 tokens
//                  (the commonest word can be 18% of a batch) a block for every 64, and the last
//                  block of such a row to finish adds up what all have left. In between, zeros go
//                  to the rows that do not occur
//
// An index out of range stops the kernels with a device-side assertion before anything is written
// there.

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cassert>
#include <cstdint>
#include <optional>

#include "common/check.h"
#include "common/columns.cuh"
#include "common/occupancy.h"
#include "common/reduce.cuh"
#include "common/scalars.cuh"

namespace lightseq {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int kWarps = 8;  // of a block
constexpr int kBlock = kWarp * kWarps;
constexpr int kSlab = kWarp * kColumnsPerDraw;  // columns of a warp
constexpr int kTokens = 8, kAhead = 2;          // of a warp of the forward kernel
constexpr int kTiles = 32;
constexpr int kRound = 512;  // tokens that a block ranks at a time
constexpr int kRows = 8;     // that a warp adds up
constexpr int kChunk = kRows * kWarps;

__device__ __forceinline__ int64_t global_warp() {
  return static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarp;
}

// ---- forward ----

template <typename T>
struct Table {
  const T* data;  // null: none
  uint32_t stride;
  int64_t rows;
};

template <typename T>
struct Lookup {
  Indices tokens, positions;
  Table<T> words, places;
  float scale;
  DropoutFactors dropout;
  int64_t rows, columns;
};

// A warp takes 256 columns of kTokens tokens, with kAhead of their rows on the way. What counts is
// the number of instructions: hence no branches, and a Philox call that shares with the next what
// depends on the column alone. The blocks of one slab of columns follow each other, so that the
// slab's part of the positions and of the commonest words stays in the multiprocessors' own caches.
template <typename T, bool kDrops>
__global__ void __launch_bounds__(kBlock)
    embedding_fwd_kernel(const __grid_constant__ Lookup<T> p, T* __restrict__ y) {
  constexpr int kOfBlock = kTokens * kWarps;
  __shared__ uint32_t tokens[kOfBlock], positions[kOfBlock];
  const bool positioned = p.places.data != nullptr;
  if (threadIdx.x < kOfBlock) {
    // Behind the last row, the last one is loaded again.
    const int64_t row = min(static_cast<int64_t>(blockIdx.x) * kOfBlock + threadIdx.x, p.rows - 1);
    const int64_t token = p.tokens.at(row), position = positioned ? p.positions.at(row) : 0;
    assert(token >= 0 && token < p.words.rows && "tokens in [0, V)");
    assert(!positioned || (position >= 0 && position < p.places.rows && "positions in [0, P)"));
    tokens[threadIdx.x] = static_cast<uint32_t>(token);
    positions[threadIdx.x] = static_cast<uint32_t>(position);
  }
  __syncthreads();
  const int64_t group = static_cast<int64_t>(blockIdx.y) * kWarp + threadIdx.x % kWarp;
  const int64_t column = group * kColumnsPerDraw;
  if (column >= p.columns) return;
  const int of_warp = static_cast<int>(threadIdx.x) / kWarp * kTokens;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kOfBlock + of_warp;
  const T* const words = p.words.data + column;
  const T* const places = p.places.data + column;
  T* const target = y + first * p.columns + column;
  const Rng rng(p.dropout.dropout.rng);
  Columns<T> word[kAhead], place[kAhead] = {};
  const auto start_loading = [&](int row) {
    const uint64_t token = tokens[of_warp + row], position = positions[of_warp + row];
    word[row % kAhead].load(words + token * p.words.stride);
    if (positioned) place[row % kAhead].load(places + position * p.places.stride);
  };
#pragma unroll
  for (int row = 0; row < kAhead; ++row) start_loading(row);
#pragma unroll
  for (int row = 0; row < kTokens; ++row) {
    float x[kColumnsPerDraw], added[kColumnsPerDraw];
    word[row % kAhead].unpack(x);
    place[row % kAhead].unpack(added);
    if (row + kAhead < kTokens) start_loading(row + kAhead);
#pragma unroll
    for (int e = 0; e < kColumnsPerDraw; ++e) x[e] = fmaf(x[e], p.scale, added[e]);
    if constexpr (kDrops) p.dropout.apply(p.dropout.draw(rng, first + row, group), x);
    Columns<T> result;
    result.pack(x);
    if (first + row < p.rows) result.store(target + row * p.columns);
  }
}

// ---- backward ----

// A row of the table that occurs, and its tokens' places in `order`.
struct alignas(16) Work {
  int row, start, count;
  int first;  // the first of the row's pieces of work in the list, where they are several
};

// What the kernels of one backward pass share; what comes before `work` is zero at the start.
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
__global__ void __launch_bounds__(kRound) embedding_rank_kernel(const __grid_constant__ Sort p) {
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

__global__ void __launch_bounds__(kBlock) embedding_place_kernel(const __grid_constant__ Sort p) {
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

__global__ void __launch_bounds__(kBlock) embedding_order_kernel(const __grid_constant__ Sort p) {
  const int t = blockIdx.x * kBlock + threadIdx.x;
  if (t >= p.tokens) return;
  const int64_t token = p.indices.at(t);
  if (token == p.excluded) return;
  p.order[p.counts[t / p.tile * p.vocabulary + token] + p.rank[t]] = t;
}

template <typename T>
struct Gradients {
  const T* dy;
  int64_t dy_stride, columns;
  DropoutFactors dropout;
  bool accumulate;
  float scale = 1.0f;
  float* partials = nullptr;  // [chunks, columns] sums of chunks
  void* table = nullptr;
  int64_t table_stride = 0;
  ScalarType table_type = ScalarType::Float;
};

using Sums = float[kColumnsPerDraw];

// Adds `count` <= kRows rows of dy in the order in which the lanes hold their numbers.
template <typename T, bool kDrops>
__device__ __forceinline__ void add_rows(const Gradients<T>& g, int held, int count, int64_t group,
                                         const Rng& rng, Sums& sums) {
  const int64_t column = group * kColumnsPerDraw;
  Columns<T> x[kRows] = {};
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int64_t row = __shfl_sync(kAllLanes, held, i);
    if (i < count && column < g.columns) x[i].load_streaming(g.dy + row * g.dy_stride + column);
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    if (i >= count) break;
    const int64_t row = __shfl_sync(kAllLanes, held, i);
    float values[kColumnsPerDraw];
    x[i].unpack(values);
    if constexpr (kDrops) g.dropout.apply(g.dropout.draw(rng, row, group), values);
#pragma unroll
    for (int e = 0; e < kColumnsPerDraw; ++e) sums[e] += values[e];
  }
}

// The sums into a row of the table, rounded once.
template <typename T, typename G>
__device__ __forceinline__ void store_sums(const Gradients<T>& g, int64_t row, int64_t group,
                                           const Sums& sums) {
  const int64_t column = group * kColumnsPerDraw;
  if (column >= g.columns) return;
  G* const target = static_cast<G*>(g.table) + row * g.table_stride + column;
  Columns<G> stored;
  float values[kColumnsPerDraw] = {};
  if (g.accumulate) {
    stored.load_streaming(target);
    stored.unpack(values);
  }
#pragma unroll
  for (int e = 0; e < kColumnsPerDraw; ++e) values[e] = fmaf(sums[e], g.scale, values[e]);
  stored.pack(values);
  stored.store(target);
}

template <typename T>
__device__ __forceinline__ void store_sums(const Gradients<T>& g, int64_t row, int64_t group,
                                           const Sums& sums) {
  switch (g.table_type) {
    case ScalarType::Float:
      return store_sums<T, float>(g, row, group, sums);
    case ScalarType::Half:
      return store_sums<T, __half>(g, row, group, sums);
    default:
      return store_sums<T, __nv_bfloat16>(g, row, group, sums);
  }
}

// Adds the sums of a block's warps up, in the order of the warps; the first warp has the result.
__device__ __forceinline__ void add_warps(Sums& sums) {
  __shared__ alignas(16) float of_warp[kWarps][kSlab];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  __syncthreads();  // earlier readers are done
  float4* const own = reinterpret_cast<float4*>(of_warp[warp] + lane * kColumnsPerDraw);
  own[0] = make_float4(sums[0], sums[1], sums[2], sums[3]);
  own[1] = make_float4(sums[4], sums[5], sums[6], sums[7]);
  __syncthreads();
  if (warp > 0) return;
#pragma unroll
  for (int other = 1; other < kWarps; ++other) {
#pragma unroll
    for (int e = 0; e < kColumnsPerDraw; ++e) sums[e] += of_warp[other][lane * kColumnsPerDraw + e];
  }
}

// Leaves the sums of piece `index` in memory. In the block that does so last for the row, the first
// warp gets the sums of the whole row, and the result is true.
template <typename T>
__device__ __forceinline__ bool join_chunks(const Sort& p, const Gradients<T>& g, const Work& work,
                                            int64_t index, int64_t group, Sums& sums) {
  __shared__ bool is_last;
  const int chunks = (work.count + kChunk - 1) / kChunk;
  const int64_t column = group * kColumnsPerDraw;
  const bool is_inside = column < g.columns;
  if (threadIdx.x < kWarp) {
    Columns<float> stored;
    stored.pack(sums);
    if (is_inside) stored.store(g.partials + index * g.columns + column);
    __threadfence();
    __syncwarp();
    if (threadIdx.x == 0) {
      int* const arrived = p.arrived + work.first * gridDim.y + blockIdx.y;
      is_last = atomicAdd(arrived, 1) == chunks - 1;
    }
  }
  __syncthreads();
  if (!is_last) return false;
  __threadfence();
#pragma unroll
  for (int e = 0; e < kColumnsPerDraw; ++e) sums[e] = 0.0f;
  if (is_inside) {
#pragma unroll 4
    for (int i = threadIdx.x / kWarp; i < chunks; i += kWarps) {
      Columns<float> stored;
      float values[kColumnsPerDraw];
      stored.load_streaming(g.partials + (work.first + i) * g.columns + column);
      stored.unpack(values);
#pragma unroll
      for (int e = 0; e < kColumnsPerDraw; ++e) sums[e] += values[e];
    }
  }
  add_warps(sums);
  return true;
}

// Zeros into those of 32 rows of the table that do not occur.
template <typename T>
__device__ __forceinline__ void clear_rows(const Sort& p, const Gradients<T>& g, int64_t first,
                                           int64_t group) {
  const int64_t row = first + threadIdx.x % kWarp;
  const bool is_absent = row < p.vocabulary && p.counts[row] < 0;
  unsigned absent = __ballot_sync(kAllLanes, is_absent);
  const Sums zeros = {};
  for (; absent != 0; absent &= absent - 1) store_sums(g, first + __ffs(absent) - 1, group, zeros);
}

// As many blocks as fit share the work out. First a block for every 64 tokens of the rows with many
// of them; then a warp for every other row, and zeros in between, which only keep memory busy.
template <typename T, bool kDrops>
__global__ void __launch_bounds__(kBlock)
    embedding_sum_kernel(const __grid_constant__ Sort p, const __grid_constant__ Gradients<T> g) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int64_t group = static_cast<int64_t>(blockIdx.y) * kWarp + lane;
  const Rng rng(g.dropout.dropout.rng);
  const int long_work = p.taken[1], all_work = p.long_work + p.taken[2];
  for (int64_t index = blockIdx.x; index < long_work; index += gridDim.x) {
    const Work work = p.work[index];
    const int done = static_cast<int>(index - work.first) * kChunk + warp * kRows;
    const int held = done + lane < work.count ? p.order[work.start + done + lane] : 0;
    Sums sums = {};
    add_rows<T, kDrops>(g, held, min(kRows, work.count - done), group, rng, sums);
    add_warps(sums);
    if (work.count > kChunk && !join_chunks(p, g, work, index, group, sums)) continue;
    if (warp == 0) store_sums(g, work.row, group, sums);
  }

  const int64_t step = static_cast<int64_t>(gridDim.x) * kWarps;
  int64_t clear = g.accumulate ? p.vocabulary : global_warp() * kWarp;
  int64_t index = p.long_work + global_warp();
  const auto load_work = [&](int64_t i) { return i < all_work ? p.work[i] : Work{}; };
  const auto load_held = [&](const Work& of) {
    return lane < of.count ? p.order[of.start + lane] : 0;
  };
  Work work = load_work(index);
  int held = load_held(work);
  while (index < all_work || clear < p.vocabulary) {
    const Work next = load_work(index + step);
    if (clear < p.vocabulary) clear_rows(p, g, clear, group);
    if (index < all_work) {
      Sums sums = {};
      add_rows<T, kDrops>(g, held, work.count, group, rng, sums);
      held = load_held(next);
      store_sums(g, work.row, group, sums);
    }
    work = next;
    index += step;
    clear += step * kWarp;
  }
}

// ---- launchers ----

unsigned blocks_for(int64_t work, int64_t per_block) {
  return static_cast<unsigned>((work + per_block - 1) / per_block);
}

Tensor embedding_fwd(const Tensor& tokens, const Tensor& weight,
                     const std::optional<Tensor>& positions,
                     const std::optional<Tensor>& position_weight, double scale, double p,
                     const Tensor& rng, int64_t site) {
  const char* const op = "embedding_fwd";
  check_rows(op, "weight", weight);
  if (position_weight.has_value()) check_rows(op, "position_weight", *position_weight);
  require(rng.is_contiguous(), op, ": rng must be contiguous");
  const int64_t rows = tokens.size(0), columns = weight.size(1);
  Tensor y = allocate(weight, {rows, columns});
  const int32_t device = weight.get_device();
  const torch::stable::accelerator::DeviceGuard guard(device);
  dispatch_float(weight.scalar_type(), "embedding_fwd: weight", [&](auto zero) {
    using T = decltype(zero);
    if (y.numel() == 0) return;
    const auto table = [&](const Tensor& x) {
      require(x.stride(0) <= UINT32_MAX, op, ": rows are more than 2^32 numbers apart");
      return Table<T>{static_cast<const T*>(x.const_data_ptr()), static_cast<uint32_t>(x.stride(0)),
                      x.size(0)};
    };
    const Lookup<T> lookup{Indices(tokens),
                           Indices(positions.has_value() ? *positions : tokens),
                           table(weight),
                           position_weight.has_value() ? table(*position_weight) : Table<T>{},
                           static_cast<float>(scale),
                           DropoutFactors(rng.const_data_ptr<int64_t>(), site, p),
                           rows,
                           columns};
    const dim3 grid(blocks_for(rows, kWarps * kTokens), blocks_for(columns, kSlab));
    const auto kernel = p > 0.0 ? embedding_fwd_kernel<T, true> : embedding_fwd_kernel<T, false>;
    kernel<<<grid, kBlock, 0, current_stream(device)>>>(lookup,
                                                        static_cast<T*>(y.mutable_data_ptr()));
    check_launch(op);
  });
  return y;
}

// table[indices[t]] += scale * row t of g, but for the row `excluded`.
template <typename T>
void add_to_table(Gradients<T> g, const Tensor& indices, Tensor table, double scale,
                  int64_t excluded, cudaStream_t stream) {
  const char* const op = "embedding_bwd";
  const int64_t tokens = indices.size(0), vocabulary = table.size(0), columns = table.size(1);
  if (table.numel() == 0) return;
  if (tokens == 0) {
    if (!g.accumulate) torch::stable::zero_(table);
    return;
  }
  require(tokens < INT32_MAX - kTiles * kRound, op, ": more than 2^31 tokens");
  const int64_t long_work = tokens / (kRows + 1), short_work = std::min(tokens, vocabulary);
  const int64_t slabs = blocks_for(columns, kSlab);
  const int64_t zeros = (3 + long_work * slabs + kTiles * vocabulary + 3) / 4 * 4;
  const int64_t all_work = 4 * (long_work + short_work);
  Tensor scratch = allocate(table, {zeros + all_work + 2 * tokens}, ScalarType::Int);
  Tensor partials = allocate(table, {long_work, columns}, ScalarType::Float);
  int* const base = scratch.mutable_data_ptr<int>();
  int* const rank = base + zeros + all_work;
  const int64_t tile = blocks_for(tokens, kTiles * kRound) * static_cast<int64_t>(kRound);
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
  g.scale = static_cast<float>(scale);
  g.partials = partials.mutable_data_ptr<float>();
  g.table = table.mutable_data_ptr();
  g.table_stride = table.stride(0);
  g.table_type = table.scalar_type();

  cudaMemsetAsync(base, 0, zeros * sizeof(int), stream);
  embedding_rank_kernel<<<blocks_for(tokens, tile), kRound, 0, stream>>>(sort);
  embedding_place_kernel<<<blocks_for(vocabulary, kBlock), kBlock, 0, stream>>>(sort);
  embedding_order_kernel<<<blocks_for(tokens, kBlock), kBlock, 0, stream>>>(sort);
  const auto kernel = g.dropout.dropout.threshold > 0 ? embedding_sum_kernel<T, true>
                                                      : embedding_sum_kernel<T, false>;
  const int64_t blocks = resident_blocks(kernel, kBlock, table.get_device());
  const dim3 grid(blocks_for(blocks, slabs), static_cast<unsigned>(slabs));
  kernel<<<grid, kBlock, 0, stream>>>(sort, g);
  check_launch(op);
}

void embedding_bwd(const Tensor& dy, const Tensor& tokens, const std::optional<Tensor>& positions,
                   double scale, int64_t padding_idx, double p, const Tensor& rng, int64_t site,
                   std::optional<Tensor> dweight, std::optional<Tensor> dposition_weight,
                   bool accumulate) {
  const char* const op = "embedding_bwd";
  check_rows(op, "dy", dy);
  require(rng.is_contiguous(), op, ": rng must be contiguous");
  const auto check_table = [&](const char* name, const std::optional<Tensor>& table) {
    if (!table.has_value()) return;
    check_rows(op, name, *table);
    require(table->scalar_type() != ScalarType::Double, op, ": ", name,
            " must be float32, float16 or bfloat16 on a GPU");
  };
  check_table("dweight", dweight);
  check_table("dposition_weight", dposition_weight);
  const int32_t device = dy.get_device();
  const torch::stable::accelerator::DeviceGuard guard(device);
  const cudaStream_t stream = current_stream(device);
  dispatch_float(dy.scalar_type(), "embedding_bwd: dy", [&](auto zero) {
    using T = decltype(zero);
    const Gradients<T> gradients{static_cast<const T*>(dy.const_data_ptr()), dy.stride(0),
                                 dy.size(1), DropoutFactors(rng.const_data_ptr<int64_t>(), site, p),
                                 accumulate};
    if (dposition_weight.has_value()) {
      add_to_table(gradients, *positions, *dposition_weight, 1.0, -1, stream);
    }
    if (dweight.has_value()) {
      add_to_table(gradients, tokens, *dweight, scale, padding_idx, stream);
    }
  });
}

STABLE_TORCH_LIBRARY_IMPL(lightseq, CUDA, m) {
  m.impl("embedding_fwd", TORCH_BOX(&embedding_fwd));
  m.impl("embedding_bwd", TORCH_BOX(&embedding_bwd));
}

}  // namespace
}  // namespace lightseq
