// Common code of the backward kernels for long sentences that iterate over tiles of 64 queries:
// mma_bwd.cu and tf32_bwd.cu.
//
// The blocks of keys of a head add their dQ in float32 in global memory, tile by tile, in a fixed
// order: the first writes, the next ones add, the last one adds and writes the result. A counter
// of a tile, or of a warp's part of it, says whose turn it is.
//
// Blocks that started with the same tile would wait for each other. So each one starts with another
// tile, and continues with the next ones: after the last tile with tile 0, or with a causal mask or
// a window, from its first tile to the last one. A tile's order is that in which blocks arrive, if
// they all start at the same time. Then each block finds its turn passed on by the one before,
// which arrived at least a tile earlier (shift scheduling: Qiang et al. 2026, arXiv:2601.21824).
//
// A block may wait for one that has a later place in the list of work. So all blocks that add to a
// tile must run at the same time: they are neighbours in the list, and a thread block takes its
// next item only when it waits for no turn any more. If these are more than most_together, they add
// in the order of the list. Without mask and window all of them then start with the first tile.
#pragma once

#include <cstdint>

#include "attention/cast.cuh"
#include "attention/mma.cuh"

namespace lightseq::attention {

constexpr int kQueryTile = 64;

template <typename T>
struct BwdParams : MmaParams<T> {
  Packed<const T> dout;
  Result<T> dq, dk, dv;
  const float *lse, *rowsum, *lse_low;  // see Workspace, also for the next two
  uint32_t* turns;
  float* sums;
  int most_together = 0;  // see launch_in_turns()

  BwdParams(const Call& a, const Backward& b, const ItemList& list, const Workspace& workspace)
      : MmaParams<T>(a, list),
        dout(packed<const T>(a.op, "dout", b.dout)),
        dq(result_of<T>(a.op, "dq", b.dq, b.casts.dq)),
        dk(result_of<T>(a.op, "dk", b.dk, b.casts.dk)),
        dv(result_of<T>(a.op, "dv", b.dv, b.casts.dv)),
        lse(workspace.lse),
        rowsum(workspace.rowsum),
        lse_low(workspace.lse_low),
        turns(workspace.turns),
        sums(workspace.sums) {}
};

// When a block adds to a tile.
struct Turn {
  int number;  // how many blocks add before it
  bool is_last;
};

// A block of kKeys keys of a head, and its tiles of queries.
template <int kKeys>
struct KeyBlock {
  Item item;
  int head;
  int index, blocks;      // number of the block, and how many there are
  int first, count, end;  // tiles: the one it starts with, how many it has, and those of the head
  Band band;
  bool rotates;  // does not add in the order of the list

  // The list has all blocks of a sentence after each other. Numbers go through the blocks of a
  // head, then through the heads, then through the sentences.
  __device__ __forceinline__ KeyBlock(const ItemList& list, int heads, const Band& band,
                                      int most_together, int number)
      : band(band) {
    const int any = number / heads;  // an item of the sentence
    item = list.load(any);
    blocks = max((item.length_k + kKeys - 1) / kKeys, 1);
    const int of_sentence = number - (any - item.start / kKeys) * heads;
    head = of_sentence / blocks;
    index = of_sentence - head * blocks;
    item.start = index * kKeys;
    end = (item.length_q + kQueryTile - 1) / kQueryTile;
    rotates = min(blocks, (kQueryTile + band.before + band.after) / kKeys + 2) <= most_together;
    const Range seen = band.of_keys().seen(item.start, kKeys).within(item.length_q);
    first =
        band.is_all() ? (rotates ? index * end / blocks : 0) : min(seen.begin / kQueryTile, end);
    count = band.is_all() ? end : (seen.end + kQueryTile - 1) / kQueryTile - first;
  }
  // The tile after tile i.
  __device__ __forceinline__ int after(int i) const { return i + 1 < end ? i + 1 : 0; }
  // Inputs of a query without keys may be NaN. Treat it as one that does not exist; its dQ is zero.
  // For queries that do not exist, all is zero except P = exp(0), which is multiplied by zeros.
  __device__ __forceinline__ int queries_from(int i) const {
    return item.length_k > 0 ? item.length_q - i * kQueryTile : 0;
  }
  // How many blocks add to tile i.
  __device__ __forceinline__ int blocks_of(int i) const {
    const Range of_tile = blocks_at(i);
    return of_tile.end - of_tile.begin;
  }
  __device__ __forceinline__ Turn turn(int i) const {
    const int number = added_before(i);
    return {number, number == blocks_of(i) - 1};
  }

 private:
  // The blocks that add to tile i.
  __device__ __forceinline__ Range blocks_at(int i) const {
    const Range seen = band.seen(i * kQueryTile, kQueryTile);
    return {max(seen.begin, 0) / kKeys, min(blocks, (seen.end - 1) / kKeys + 1)};
  }
  // How many blocks add to tile i before this one.
  __device__ __forceinline__ int added_before(int i) const {
    if (!band.is_all()) {
      const Range of_tile = blocks_at(i);
      return rotates ? of_tile.end - 1 - index : index - of_tile.begin;
    }
    if (!rotates) return index;
    const int started = ((i + 1) * blocks + end - 1) / end;  // blocks whose first tile is <= i
    return started - 1 - index + (index < started ? 0 : blocks);
  }
};

// A fragment of dQ in global memory, 16 x 8 numbers: the four of a lane (see common/ptx/mma.cuh)
// are adjacent if the GPU adds four at once, otherwise those of adjacent lanes are.
constexpr int kFragment = 4 * kWarp;
#if __CUDA_ARCH__ >= 900
constexpr bool kAddsFour = true;
#else
constexpr bool kAddsFour = false;
#endif

__device__ __forceinline__ void write_to(float* fragment, const float (&x)[4]) {
  const int lane = threadIdx.x % kWarp;
  if constexpr (kAddsFour) {
    __stcg(reinterpret_cast<float4*>(fragment) + lane, float4{x[0], x[1], x[2], x[3]});
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) __stcg(fragment + i * kWarp + lane, x[i]);
  }
}

__device__ __forceinline__ void add_to(float* fragment, const float (&x)[4]) {
  const int lane = threadIdx.x % kWarp;
#if __CUDA_ARCH__ >= 900
  // atomicAdd() of a float4 would also read.
  float4* const to = reinterpret_cast<float4*>(fragment) + lane;
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x[0]),
               "f"(x[1]), "f"(x[2]), "f"(x[3])
               : "memory");
#else
#pragma unroll
  for (int i = 0; i < 4; ++i) atomicAdd(fragment + i * kWarp + lane, x[i]);
#endif
}

// x += fragment
__device__ __forceinline__ void add_from(const float* fragment, float (&x)[4]) {
  const int lane = threadIdx.x % kWarp;
  if constexpr (kAddsFour) {
    const float4 more = __ldcg(reinterpret_cast<const float4*>(fragment) + lane);
    x[0] += more.x;
    x[1] += more.y;
    x[2] += more.z;
    x[3] += more.w;
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] += __ldcg(fragment + i * kWarp + lane);
  }
}

// Adds a warp's fragments to its part of dQ when it is the block's turn. The last block gets the
// sum in x instead. part: kFragments after each other; passed: how many blocks have added; seen: an
// earlier value of it, from load_acquire().
template <int kFragments>
__device__ __forceinline__ void add_in_turn(float* part, const uint32_t* passed, const Turn& turn,
                                            float (&x)[kFragments][4], uint32_t seen = 0) {
  // The lanes vote, so that the compiler knows that the warp does not diverge.
  while (__any_sync(kAllLanes, seen != static_cast<uint32_t>(turn.number))) {
    seen = load_acquire(passed);
  }
  if (turn.is_last) {
    if (turn.number == 0) return;
#pragma unroll
    for (int n = 0; n < kFragments; ++n) add_from(part + n * kFragment, x[n]);
  } else if (turn.number == 0) {
#pragma unroll
    for (int n = 0; n < kFragments; ++n) write_to(part + n * kFragment, x[n]);
  } else {
#pragma unroll
    for (int n = 0; n < kFragments; ++n) add_to(part + n * kFragment, x[n]);
  }
}

// Launches as many blocks as are resident. params.most_together becomes the number of blocks of a
// head that surely run at the same time: other kernels may occupy a part of the GPU.
template <typename Params>
void launch_in_turns(const char* op, void (*kernel)(Params), Params& params, int threads,
                     size_t shared, int32_t device, cudaStream_t stream) {
  const int64_t resident = resident_blocks(kernel, threads, device, shared);
  params.most_together = static_cast<int>(resident / 4);
  launch({.op = op,
          .grid = static_cast<unsigned>(resident),
          .block = threads,
          .shared = shared,
          .stream = stream},
         kernel, params);
}

}  // namespace lightseq::attention
