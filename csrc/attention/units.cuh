// Division of attention's work into units, and assignment of units to blocks.
//
// A block works on tiles of kRows rows in shared memory, 16 rows per warp. If the queries and the
// keys of a sentence each fit into a tile (is_short), a tile has as many of its heads as fit, each
// in a slot of 2^shift rows, 16 to 128. Otherwise queries and keys are divided into tiles. A tile
// of queries iterates over the tiles of keys, and in backward also a tile of keys over those of
// queries. In both cases the work of one tile is a unit.
//
// The assignment depends only on cu_q and cu_k. Concatenate all sentences, with queries and keys
// counted together, and divide this line into windows of 2^n rows, one per block. The units of a
// sentence are distributed over the windows that it overlaps. So all blocks have about the same
// work, one launch serves all sentence lengths, and the host needs to know none of them. One warp
// lists the units for its block: a search by every warp would take a third of backward's time.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cassert>
#include <cstdint>

#include "attention/call.h"
#include "common/check.h"
#include "common/philox.cuh"
#include "common/reduce.cuh"

namespace lightseq::attention {

constexpr int kWarpRows = 16;
constexpr int kSmallestShift = 4;        // smallest slot: 16 rows
constexpr int kZeroBlocks = 16;          // blocks that zero the rows past the last sentence
constexpr int64_t kEnoughBlocks = 4096;  // windows grow while there are at least this many blocks

struct Work {
  const int* cu_q;
  const int* cu_k;
  int rows_q, rows_k;
  int sentences;
  int heads;
  int width;
  Band band;
  int longest;              // sentences of more tokens belong to other kernels
  float sentences_per_row;  // per row of queries and keys together
  int window_shift;         // a window is 2^window_shift rows
  int64_t blocks;

  // Start of the sentence on the line of all queries and keys.
  __device__ __forceinline__ uint32_t place(int sentence) const {
    return static_cast<uint32_t>(cu_q[sentence]) + static_cast<uint32_t>(cu_k[sentence]);
  }
};

enum Part : int { kQueries = 1, kKeys = 2 };  // a unit's tile has queries, keys or both

struct alignas(16) Unit {
  int first_q, length_q, first_k, length_k;  // the sentence
  int head, heads;                           // the first head in the tile, and the number of heads
  int shift;                                 // a head has 2^shift rows of the tile
  int start;                                 // position of the tile in the sentence
  int parts;

  __device__ __forceinline__ int slot() const { return 1 << shift; }
};

// The 16 rows of a tile that a warp works on.
struct Place {
  int row;       // first row, in the tile
  int slot;      // first row of the slot, in the tile
  int position;  // position of the first row in the sentence
  int head;
  bool exists;

  __device__ __forceinline__ explicit Place(const Unit& unit) {
    row = threadIdx.x / kWarp * kWarpRows;
    const int index = row >> unit.shift;
    slot = index << unit.shift;
    position = unit.start + row - slot;
    head = unit.head + index;
    exists = index < unit.heads;
  }
};

// The last sentence that starts at or before `place`. A warp searches: first 64 sentences around
// the position that equal lengths would give, then, if that fails, a 32-ary search.
__device__ __forceinline__ int find_sentence(const Work& work, uint32_t place) {
  const int lane = threadIdx.x % kWarp;
  const int guess = static_cast<int>(place * work.sentences_per_row);
  int first = max(min(guess - kWarp, work.sentences - 2 * kWarp), 0);
  const int near[2] = {first + lane, first + lane + kWarp};
  const bool before[2] = {near[0] < work.sentences && work.place(near[0]) <= place,
                          near[1] < work.sentences && work.place(near[1]) <= place};
  const int below =
      __popc(__ballot_sync(kAllLanes, before[0])) + __popc(__ballot_sync(kAllLanes, before[1]));
  const int last = min(2 * kWarp, work.sentences - first);
  if ((below > 0 || first == 0) && (below < last || first + last == work.sentences)) {
    return first + max(below - 1, 0);
  }
  first = 0;
  int count = work.sentences;
  while (count > 1) {
    const int step = (count + kWarp - 1) / kWarp;
    const int sentence = first + lane * step;
    const bool is_before = lane * step < count && work.place(sentence) <= place;
    const int skip = max(__popc(__ballot_sync(kAllLanes, is_before)) - 1, 0) * step;
    first += skip;
    count = min(step, count - skip);
  }
  return first;
}

// The next units of a block, in shared memory, and the generator of its dropout bits.
struct Plan {
  Unit units[kWarp];
  int count;
  AttentionDropout dropout;
};

// Whether [first, end) is a valid sentence of a tensor of `rows` rows.
__device__ __forceinline__ bool has_sentence(int rows, int first, int end) {
  return 0 <= first && first <= end && end <= rows;
}

// Checks all of cu_q and cu_k. list_units() does not check that they begin with 0, nor the unused
// entries at their ends. Called by the last kZeroBlocks blocks of the grid.
__device__ __forceinline__ void check_boundaries(const Work& work) {
  assert(work.cu_q[0] == 0 && work.cu_k[0] == 0 && "cu_q and cu_k begin with 0");
  const int first = (blockIdx.x - static_cast<unsigned>(work.blocks)) * blockDim.x + threadIdx.x;
  for (int i = first; i < work.sentences; i += kZeroBlocks * blockDim.x) {
    assert(has_sentence(work.rows_q, work.cu_q[i], work.cu_q[i + 1]) && "cu_q ascends");
    assert(has_sentence(work.rows_k, work.cu_k[i], work.cu_k[i + 1]) && "cu_k ascends");
  }
}

// Lists the next units of this block's window in plan.units; called by one warp. It continues at
// sentence number `sentence`, of which `done` units have been listed already. The last sentence
// ends at `line_end`. The loop stops there, because a batch often has hundreds of unused entries in
// cu_q and cu_k, which are empty sentences at `line_end`.
template <int kRows>
__device__ __forceinline__ void list_units(Plan& plan, const Work& work, int parts,
                                           uint32_t line_end, int& sentence, int& done) {
  const int rows_shift = 31 - __clz(kRows);
  const int lane = threadIdx.x;
  const uint32_t window = blockIdx.x;
  int count = 0;
  for (; sentence < work.sentences; ++sentence, done = 0) {
    Unit unit;
    unit.first_q = work.cu_q[sentence];
    unit.first_k = work.cu_k[sentence];
    const int end_q = work.cu_q[sentence + 1], end_k = work.cu_k[sentence + 1];
    assert(has_sentence(work.rows_q, unit.first_q, end_q) && "cu_q ascends within [0, Tq]");
    assert(has_sentence(work.rows_k, unit.first_k, end_k) && "cu_k ascends within [0, Tk]");
    unit.length_q = end_q - unit.first_q;
    unit.length_k = end_k - unit.first_k;
    const uint32_t begin = unit.first_q + static_cast<uint32_t>(unit.first_k);
    const uint32_t end = begin + unit.length_q + unit.length_k;
    if (begin == line_end) break;
    const int first_window = begin >> work.window_shift;
    if (first_window > static_cast<int>(window)) break;
    if (begin == end || end <= window << work.window_shift) continue;
    const int windows = ((end - 1) >> work.window_shift) - first_window + 1;

    const int longest = max(unit.length_q, unit.length_k);
    if (longest > work.longest) continue;
    const bool is_short = longest <= kRows;
    unit.shift = is_short ? max(32 - __clz(longest - 1), kSmallestShift) : rows_shift;
    const int together_shift = rows_shift - unit.shift, together = 1 << together_shift;
    const int tiles_q = (unit.length_q + kRows - 1) / kRows;
    const int tiles_k = parts & kKeys ? (unit.length_k + kRows - 1) / kRows : 0;
    const int units =
        is_short ? (work.heads + together - 1) >> together_shift : work.heads * (tiles_q + tiles_k);
    const int u = window - first_window + (done + lane) * windows;
    if (is_short) {
      unit.head = u << together_shift;
      unit.start = 0;
      unit.parts = parts;
    } else {
      const int tile = u / work.heads;
      unit.head = u - tile * work.heads;
      unit.start = (tile < tiles_q ? tile : tile - tiles_q) * kRows;
      unit.parts = tile < tiles_q ? kQueries : kKeys;
    }
    unit.heads = min(together, work.heads - unit.head);
    const int fit = kWarp - count;
    if (u < units && lane < fit) plan.units[count + lane] = unit;
    const int left = __popc(__ballot_sync(kAllLanes, u < units));
    count += min(left, fit);
    if (left >= fit) {
      done += fit;
      break;
    }
  }
  if (lane == 0) plan.count = count;
}

// Calls run(unit) for all units of this block. All threads must call it.
template <int kRows, typename Run>
__device__ __forceinline__ void for_each_unit(Plan& plan, const Work& work, const Dropout& dropout,
                                              int parts, Run&& run) {
  int sentence = 0, done = 0;
  uint32_t line_end = 0;
  if (threadIdx.x < kWarp) {
    line_end = work.place(work.sentences);
    sentence = find_sentence(work, blockIdx.x << work.window_shift);
  } else if (threadIdx.x == kWarp && dropout.threshold > 0) {
    plan.dropout = AttentionDropout(dropout);
  }
  int count;
  do {
    if (threadIdx.x < kWarp) list_units<kRows>(plan, work, parts, line_end, sentence, done);
    __syncthreads();
    count = plan.count;
    for (int i = 0; i < count; ++i) {
      run(plan.units[i]);
      __syncthreads();  // all threads have finished reading shared memory
    }
  } while (count == kWarp);
}

inline Work work_of(const Call& a) {
  require(a.cu_q.is_contiguous() && a.cu_k.is_contiguous(), a.op,
          ": cu_q and cu_k must be contiguous");
  // Small windows balance the load better; large ones need fewer searches.
  const int64_t rows = a.q.size(0) + a.k.size(0);
  int shift = 3;
  while (shift < 7 && (rows >> (shift + 1)) >= kEnoughBlocks) ++shift;
  return {.cu_q = a.cu_q.const_data_ptr<int>(),
          .cu_k = a.cu_k.const_data_ptr<int>(),
          .rows_q = static_cast<int>(a.q.size(0)),
          .rows_k = static_cast<int>(a.k.size(0)),
          .sentences = static_cast<int>(a.sentences()),
          .heads = static_cast<int>(a.q.size(1)),
          .width = static_cast<int>(a.q.size(2)),
          .band = a.band(),
          .longest = a.most_of_short,
          .sentences_per_row = static_cast<float>(a.sentences()) / static_cast<float>(rows),
          .window_shift = shift,
          .blocks = a.most_of_short > 0 ? (rows + (1 << shift) - 1) >> shift : 0};
}

}  // namespace lightseq::attention
