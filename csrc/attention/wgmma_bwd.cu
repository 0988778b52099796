// Attention of long sentences in 16 bits, backward, on GPUs of compute capability 9.0. short_bwd.cu
// has the formulas; a kernel before this one computes D. work_list.cuh explains the work list.
//
// An item is a block of 128 keys of one head. A thread block takes one item after the other, and
// iterates over the queries of its sentence. Two consumer warpgroups have 64 keys each:
//
//   S^T = K Q^T, dP^T = V dO^T     operands from shared memory
//   dV += P^T dO, dK += dS^T Q     P^T and dS^T from registers
//   dQ  = dS K                     dS through shared memory, for which both warpgroups wait
//
// Heads of up to 64 columns: 128 queries at a time, in halves. A warpgroup computes dQ of one half;
// this product is in flight while the next scores are computed. Wider heads: 64 queries at a time;
// a warpgroup computes a box of 64 columns of dQ. It adds dQ while the next scores are computed,
// but starts dP^T after that: a consumer has no registers for all of them.
//
// The blocks of keys of a sentence add their dQ in float32 in global memory, in order: the first
// writes, the next ones add, the last one adds and writes the result. With a causal mask or a
// window, these are the blocks that the tile of queries sees. A counter for each tile of
// queries says whose turn it is. The sums are stored in the order of the threads, so that a warp
// accesses 512 adjacent bytes. In the list a block of keys comes after those that it waits for, and
// thread blocks take items in the order of the list. So the first unfinished item never waits, and
// there is no deadlock.
//
// The warps of the producer: 0 loads by TMA; 1 waits for turns and passes them on; 2 and 3 load
// lse and D, and zero the rows after the end of the sentence.
//
// A kernel before this one (draw_kernel) draws the dropout bits, because here no warp has time for
// it. A drawn word has the bits of 32 keys of a query; draw_kernel transposes them, so that a
// consumer reads words of 32 queries of a key.
//
//   inputs         dout, q, k, v, lse, out
//   workspace      dQ in float32, lse and D by head, counters, dropout bits
//   determinism    every sum has a fixed order, which depends only on the sentence

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <climits>
#include <cmath>

#include "attention/cast.cuh"
#include "attention/wgmma.cuh"
#include "common/ptx/wgmma.cuh"

namespace lightseq::attention {
namespace {

// Dropout bits: word [g, h, k] is for group g of 32 queries, head h, and key k of their sentence.
struct Bits {
  uint32_t* words;
  int64_t keys;  // words of a line: max_k, rounded up to whole tiles

  // Words of a group of 32 queries, from the item's first key on. group: number in the sentence.
  __device__ __forceinline__ uint32_t* at(const Item& item, int group, int head, int heads) const {
    const int64_t line = static_cast<int64_t>(2 * item.unit + group) * heads + head;
    return words + line * keys + item.start;
  }
};

struct BwdParams {
  CUtensorMap q, dout;  // boxes of BwdTiles::kRows rows
  CUtensorMap k, v;     // boxes of kTile rows
  ItemList list;
  const float* lse;     // [H, Tq], times log2(e)
  const float* rowsum;  // [H, Tq]: D
  float4* sums;         // dQ: [units, H, boxes, 64 x 64]
  uint32_t* turns;      // [units, H]: how many blocks have added; zero at the start
  void *dq, *dk, *dv;   // [T, H, D]; not used if gradients are cast
  int64_t dq_token, dq_head, dk_token, dk_head, dv_token, dv_head;  // strides
  int rows_q, heads, width;
  Band band;
  float scale, keep_scale, grad_scale;  // keep_scale: 1 / (1 - p); grad_scale: scale / (1 - p)
  Bits bits;
  GradientCasts casts;
};

template <int kWidth>
struct BwdTiles {
  static constexpr int kHalves = kWidth == 64 ? 2 : 1;  // of 64 queries
  static constexpr int kRows = 64 * kHalves;            // queries at a time
  static constexpr int kKeyStages = kWidth == 64 ? 2 : 1;
  using Keys = uint16_t[kBoxes<kWidth>][kTile * kSwizzleColumns];
  using Queries = uint16_t[kBoxes<kWidth>][kRows * kSwizzleColumns];
  Keys k[kKeyStages], v[kKeyStages];
  Queries q[2], dout[2];
  uint16_t ds[2][kHalves][kTile * 64];  // [keys, 64 queries]
  float lse[2][kRows], rowsum[2][kRows];
  uint32_t keep[2][kRows / 32][kTile];  // bits of 32 queries of a key
  Claims claims;
  Mbarrier keys_loaded[kKeyStages], keys_full[kKeyStages], keys_empty[kKeyStages];
  Mbarrier loaded[2], full[2], empty[2];
  Mbarrier turn, added;
  BlockStatistics<kWgmmaThreads / kWarp> of_queries, of_keys;  // of casts
};

#ifdef LIGHTSEQ_HAS_WGMMA

// A warpgroup's part of dQ: 64 queries and 64 columns.
constexpr int kSumsOfPart = 64 * 64 / 4;  // float4

constexpr int kConsumerWarps = 2 * kWarpgroup / kWarp;

// An SM has 64 Ki registers, which is 168 for each thread of three warpgroups.
constexpr int kProducerRegisters = 40, kConsumerRegisters = (3 * 168 - kProducerRegisters) / 2;

// The tiles of queries that a block of keys iterates over: end - 1 ... begin. Without a window, all
// tiles have the blocks from block 0 on, which the compiler knows.
template <int kWidth, bool kWindow>
struct Steps {
  static constexpr int kRows = BwdTiles<kWidth>::kRows;
  int begin, end;
  int finished_end;  // this block is the last one that adds to the dQ of the tiles before this one

  __device__ __forceinline__ Steps(const BwdParams& p, const Item& item) {
    const Range seeing = p.band.of_keys().seen(item.start, kTile).within(item.length_q);
    end = ((kWindow ? seeing.end : item.length_q) + kRows - 1) / kRows;
    begin = min(seeing.begin / kRows, end);
    const int next = item.start + kTile;  // the next block
    finished_end = next >= item.length_k ? end : max(next - p.band.after, 0) / kRows;
  }
  // How many keys are in the blocks that add to the dQ of tile i before this one.
  static __device__ __forceinline__ int earlier(const BwdParams& p, const Item& item, int i) {
    return kWindow ? item.start - max(i * kRows - p.band.before, 0) / kTile * kTile : item.start;
  }
};

template <int kWidth, bool kWindow, bool kDrops>
__device__ __forceinline__ void load(const BwdParams& p, BwdTiles<kWidth>& tiles) {
  using Tiles = BwdTiles<kWidth>;
  Stage<Tiles::kKeyStages> keys;
  Stage<2> stage, claim;
  const auto take = [&] { return tiles.claims.take(claim, p.list, p.heads); };
  for (Item item = take(); item.head >= 0; item = take()) {
    const Steps<kWidth, kWindow> steps(p, item);
    if (steps.begin == steps.end) continue;
    tiles.keys_empty[keys.index].wait(keys.parity ^ 1);
    Mbarrier& loaded = tiles.keys_loaded[keys.index];
    loaded.arrive_expect_tx(2 * kBoxes<kWidth> * kBoxBytes);
#pragma unroll
    for (int box = 0; box < kBoxes<kWidth>; ++box) {
      const int column = box * kSwizzleColumns, row = item.first_k + item.start;
      tma_load(tiles.k[keys.index][box], p.k, column, item.head, row, loaded);
      tma_load(tiles.v[keys.index][box], p.v, column, item.head, row, loaded);
    }
    keys.advance();
    for (int i = steps.end - 1; i >= steps.begin; --i, stage.advance()) {
      tiles.empty[stage.index].wait(stage.parity ^ 1);
      Mbarrier& full = tiles.loaded[stage.index];
      full.arrive_expect_tx(sizeof(tiles.q[0]) + sizeof(tiles.dout[0]) +
                            (kDrops ? sizeof(tiles.keep[0]) : 0));
      const int row = item.first_q + i * Tiles::kRows;
#pragma unroll
      for (int box = 0; box < kBoxes<kWidth>; ++box) {
        const int column = box * kSwizzleColumns;
        tma_load(tiles.q[stage.index][box], p.q, column, item.head, row, full);
        tma_load(tiles.dout[stage.index][box], p.dout, column, item.head, row, full);
      }
      if constexpr (kDrops) {
        constexpr int kGroups = Tiles::kRows / 32;
#pragma unroll
        for (int group = 0; group < kGroups; ++group) {
          auto& to = tiles.keep[stage.index][group];
          tma_load(to, p.bits.at(item, i * kGroups + group, item.head, p.heads), sizeof(to), full);
        }
      }
    }
  }
}

// Tells the consumers when it is this block's turn to add to dQ. When they have added, passes the
// turn to the next block.
template <int kWidth, bool kWindow>
__device__ __forceinline__ void take_turns(const BwdParams& p, BwdTiles<kWidth>& tiles) {
  const bool is_first_lane = threadIdx.x % kWarp == 0;
  uint32_t parity = 0;
  Stage<2> claim;
  const auto read = [&] { return tiles.claims.read(claim); };
  for (Item item = read(); item.head >= 0; item = read()) {
    const Steps<kWidth, kWindow> steps(p, item);
    for (int i = steps.end - 1; i >= steps.begin; --i, parity ^= 1) {
      const int unit = item.unit + i * BwdTiles<kWidth>::kHalves;
      uint32_t* const turn = p.turns + static_cast<int64_t>(unit) * p.heads + item.head;
      const int earlier = steps.earlier(p, item, i);
      if (earlier > 0) {
        while (load_acquire(turn) != static_cast<uint32_t>(earlier / kTile)) {
        }
      }
      __syncwarp();
      if (is_first_lane) tiles.turn.arrive();
      tiles.added.wait(parity);
      if (i >= steps.finished_end && is_first_lane) pass_turn(turn);
    }
  }
}

// Loops are not unrolled: producers have few registers.
template <int kWidth, bool kWindow>
__device__ __forceinline__ void prepare(const BwdParams& p, BwdTiles<kWidth>& tiles) {
  using Tiles = BwdTiles<kWidth>;
  constexpr int kRows = Tiles::kRows;
  const int second = of_warp(threadIdx.x / kWarp) - 2, lane = threadIdx.x % kWarp;
  Stage<Tiles::kKeyStages> keys;
  Stage<2> stage, claim;
  const auto read = [&] { return tiles.claims.read(claim); };
  for (Item item = read(); item.head >= 0; item = read()) {
    const Steps<kWidth, kWindow> steps(p, item);
    if (steps.begin == steps.end) continue;

    tiles.keys_loaded[keys.index].wait(keys.parity);
    const int length = item.length_k - item.start;
    if (length < kTile) {
#pragma unroll 1
      for (int box = 0; box < kBoxes<kWidth>; ++box) {
        zero_rows_of_box<kTile>(second ? tiles.v[keys.index][box] : tiles.k[keys.index][box],
                                length);
      }
      fence_proxy_async();
      __syncwarp();
    }
    if (lane == 0) tiles.keys_full[keys.index].arrive();
    keys.advance();

    for (int i = steps.end - 1; i >= steps.begin; --i, stage.advance()) {
      const int first = i * kRows;
      // Inputs of a query without keys may be NaN. Treat it as one that does not exist.
      const int rows = item.length_k > 0 ? item.length_q - first : 0;
      tiles.empty[stage.index].wait(stage.parity ^ 1);
      // Queries that do not exist: lse = inf makes their probabilities exp(-inf) = 0.
#pragma unroll 1
      for (int q = second * 32; q < kRows; q += 64) {
        const bool exists = q + lane < rows;
        const uint32_t at = item.head * p.rows_q + item.first_q + first + q + lane;
        tiles.lse[stage.index][q + lane] = exists ? p.lse[at] : INFINITY;
        tiles.rowsum[stage.index][q + lane] = exists ? p.rowsum[at] : 0.0f;
      }
      if (rows < kRows) {
        tiles.loaded[stage.index].wait(stage.parity);
#pragma unroll 1
        for (int box = 0; box < kBoxes<kWidth>; ++box) {
          zero_rows_of_box<kRows>(second ? tiles.dout[stage.index][box] : tiles.q[stage.index][box],
                                  rows);
        }
        fence_proxy_async();
      }
      tiles.full[stage.index].arrive();
    }
  }
}

// sums = a b^T: 64 rows of a and of b, kWidth columns, in boxes of a_box and b_box bytes.
template <typename T, int kWidth>
__device__ __forceinline__ void multiply_rows(float (&sums)[32], const WgmmaOperand& a, int a_box,
                                              const WgmmaOperand& b, int b_box) {
  wgmma_first<T, 0, 0>(sums, a.at(0), b.at(0));
#pragma unroll
  for (int k = 1; k < kWidth / kWgmmaK; ++k) {
    wgmma<T, 0, 0>(sums, a.at(k / 4 * a_box + k % 4 * 32), b.at(k / 4 * b_box + k % 4 * 32));
  }
}

// Adds a warpgroup's part of dQ to the sum of the blocks, in its turn; the last one stores it.
template <typename T, bool kCasts, int kWidth, bool kWindow>
__device__ __forceinline__ void add_dq(const BwdParams& p, BwdTiles<kWidth>& tiles,
                                       const Item& item, const Steps<kWidth, kWindow>& steps, int i,
                                       int group, int row, const float (&dq)[32]) {
  using Tiles = BwdTiles<kWidth>;
  const int half = Tiles::kHalves == 2 ? group : 0, box = Tiles::kHalves == 2 ? 0 : group;
  const int64_t unit = item.unit + i * Tiles::kHalves + half;
  float4* const sums = p.sums +
                       ((unit * p.heads + item.head) * kBoxes<kWidth> + box) * kSumsOfPart +
                       threadIdx.x % kWarpgroup;
  const bool is_first = steps.earlier(p, item, i) == 0, is_last = i < steps.finished_end;
  if (!is_last) {
    if (is_first) {
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        __stcg(sums + e * kWarpgroup,
               float4{dq[4 * e], dq[4 * e + 1], dq[4 * e + 2], dq[4 * e + 3]});
      }
    } else {
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(
                         sums + e * kWarpgroup),
                     "f"(dq[4 * e]), "f"(dq[4 * e + 1]), "f"(dq[4 * e + 2]), "f"(dq[4 * e + 3])
                     : "memory");
      }
    }
    return;
  }
  float total[32];
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    float4 before = {0.0f, 0.0f, 0.0f, 0.0f};
    if (!is_first) {
      asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
                   : "=f"(before.x), "=f"(before.y), "=f"(before.z), "=f"(before.w)
                   : "l"(sums + e * kWarpgroup)
                   : "memory");
    }
    total[4 * e] = dq[4 * e] + before.x;
    total[4 * e + 1] = dq[4 * e + 1] + before.y;
    total[4 * e + 2] = dq[4 * e + 2] + before.z;
    total[4 * e + 3] = dq[4 * e + 3] + before.w;
  }
  const int position = i * Tiles::kRows + half * 64 + row, column = box * kSwizzleColumns;
  const int64_t token = item.first_q + position;
  const int rows = item.length_q - position, columns = p.width - column;
  const float grad_scale = grad_scale_of(p.grad_scale, item.length_k);
  if constexpr (kCasts) {
    cast_sums(p.casts.dq, tiles.of_queries, token, item.head * p.width + column, rows, columns,
              by_group(total), grad_scale, grad_scale);
  } else {
    T* const to = static_cast<T*>(p.dq) + token * p.dq_token + item.head * p.dq_head + column;
    store_sums<T>(to, p.dq_token, rows, columns, total, grad_scale, grad_scale);
  }
}

template <typename T, int kWidth, bool kWindow, bool kDrops, bool kCasts>
__device__ __forceinline__ void compute_gradients(const BwdParams& p, BwdTiles<kWidth>& tiles) {
  using Tiles = BwdTiles<kWidth>;
  constexpr int kHalves = Tiles::kHalves, kRows = Tiles::kRows;
  constexpr int kQueryBox = kRows * kSwizzleBytes;
  const int group = of_warp(threadIdx.x / kWarpgroup) - 1, thread = threadIdx.x % kWarpgroup;
  const int warp = of_warp(thread / kWarp), lane = thread % kWarp, c = lane % 4;
  const int row = warp * 16 + lane / 4;  // of the warpgroup's 64, and row + 8
  const int key = group * 64 + row;      // of the block's 128, and key + 8
  const float scale = p.scale * kLog2E;
  // stmatrix: lane l gives the address of row l % 8 of matrix l / 8; matrices 1 and 3 are eight
  // keys below 0 and 2, matrices 2 and 3 eight queries beside them.
  const int ds_row = group * 64 + warp * 16 + lane / 8 % 2 * 8 + lane % 8;

  if constexpr (kCasts) {
    tiles.of_queries.clear();
    tiles.of_keys.clear();
  }
  Stage<Tiles::kKeyStages> keys;
  Stage<2> stage, claim;
  const auto read = [&] { return tiles.claims.read(claim); };
  for (Item item = read(); item.head >= 0; item = read()) {
    const Steps<kWidth, kWindow> steps(p, item);
    float dk[kWidth / 2], dv[kWidth / 2];
#pragma unroll
    for (int e = 0; e < kWidth / 2; ++e) dk[e] = dv[e] = 0.0f;

    if (steps.begin < steps.end) {
      tiles.keys_loaded[keys.index].wait(keys.parity);
      tiles.keys_full[keys.index].wait(keys.parity);
      const uint32_t k_box = shared_address(tiles.k[keys.index]);
      const uint32_t v_box = shared_address(tiles.v[keys.index]);
      const WgmmaOperand own_k(k_box + group * 64 * kSwizzleBytes);
      const WgmmaOperand own_v(v_box + group * 64 * kSwizzleBytes);
      const WgmmaOperand k_columns(k_box + (kHalves == 2 ? 0 : group * kBoxBytes), kBoxBytes);
      float dq[32];
      const auto add = [&](int step) {
        tiles.turn.wait(stage.index ^ 1);  // turns alternate as stages do; the next one has begun
        add_dq<T, kCasts>(p, tiles, item, steps, step, group, row, dq);
        release(tiles.added);
      };

      const auto wait_for_queries = [&] {
        tiles.loaded[stage.index].wait(stage.parity);
        tiles.full[stage.index].wait(stage.parity);
      };
      float s[32];
      const auto start_scores = [&](int half) {
        const WgmmaOperand rows(shared_address(tiles.q[stage.index]) + half * 64 * kSwizzleBytes);
        wgmma_fence();
        multiply_rows<T, kWidth>(s, own_k, kBoxBytes, rows, kQueryBox);
        wgmma_commit();
      };
      wait_for_queries();
      if (kHalves == 1) start_scores(0);
#pragma unroll 1
      for (int step = steps.end - 1;;) {
        const uint32_t q_box = shared_address(tiles.q[stage.index]);
        const uint32_t dout_box = shared_address(tiles.dout[stage.index]);
        const uint32_t ds_box = shared_address(tiles.ds[stage.index]);
        // Rows of Q and dO as the K dimension of dK and dV.
        const WgmmaOperand q_depth(q_box, kQueryBox), dout_depth(dout_box, kQueryBox);
#pragma unroll
        for (int half = 0; half < kHalves; ++half) {
          const int half_rows = half * 64 * kSwizzleBytes;
          float dp[32];
          if (kHalves == 2) start_scores(half);
          wgmma_fence();
          multiply_rows<T, kWidth>(dp, own_v, kBoxBytes, WgmmaOperand(dout_box + half_rows),
                                   kQueryBox);
          wgmma_commit();
          if (kHalves == 2 && half == 0 && step < steps.end - 1) {
            wgmma_wait<2>();
            wgmma_hold(dq);
            add(step + 1);
          }

          // Of keys `key` and key + 8: bits of 64 queries, shifted so that the highest bits of the
          // bytes are those of queries 8 i + 2 c (even) and 8 i + 2 c + 1 (odd).
          uint32_t even[2][2], odd[2][2];
          if constexpr (kDrops) {
#pragma unroll
            for (int below = 0; below < 2; ++below) {
#pragma unroll
              for (int part = 0; part < 2; ++part) {
                const uint32_t word = tiles.keep[stage.index][half * 2 + part][key + below * 8];
                even[below][part] = word << (7 - 2 * c);
                odd[below][part] = word << (6 - 2 * c);
              }
            }
          }
          const float* const lse = tiles.lse[stage.index] + half * 64 + c * 2;
          const float* const rowsum = tiles.rowsum[stage.index] + half * 64 + c * 2;

          wgmma_wait<1>();
          wgmma_hold(s);
#pragma unroll
          for (int e = 0; e < 32; e += 4) {
            const float2 shift = *reinterpret_cast<const float2*>(lse + e * 2);
            s[e] = exp2_approximate(fmaf(s[e], scale, -shift.x));
            s[e + 1] = exp2_approximate(fmaf(s[e + 1], scale, -shift.y));
            s[e + 2] = exp2_approximate(fmaf(s[e + 2], scale, -shift.x));
            s[e + 3] = exp2_approximate(fmaf(s[e + 3], scale, -shift.y));
          }
          const int first_query = step * kRows + half * 64;
          const bool clear_after = p.band.after > 0 || first_query >= item.start + kTile - 1;
          const Range clear = p.band.of_keys().seen_by_all(item.start, kTile);
          if (item.start + kTile > item.length_k ||
              !(kWindow ? clear.has({first_query, first_query + 64}) : clear_after)) {
            int first_seen[2], last_seen[2];  // the queries that attend to each of the two keys
#pragma unroll
            for (int below = 0; below < 2; ++below) {
              const int at = item.start + key + below * 8, place = at - first_query - c * 2;
              first_seen[below] = at < item.length_k ? place - p.band.after : INT_MAX;
              if (kWindow) last_seen[below] = place + p.band.before;
            }
#pragma unroll
            for (int e = 0; e < 32; ++e) {
              const int query = e / 4 * 8 + e % 2, below = e / 2 % 2;
              if (query < first_seen[below] || (kWindow && query > last_seen[below])) s[e] = 0.0f;
            }
          }
          uint32_t pt[16];
#pragma unroll
          for (int i = 0; i < 16; ++i) {  // a pair of queries of a key
            pt[i] = pack_pair<T>(s[2 * i], s[2 * i + 1]);
            if constexpr (kDrops) {
              pt[i] &= mask_of_bits(even[i % 2][i / 8], odd[i % 2][i / 8], i / 2 % 4);
            }
          }
          wgmma_hold(dv);
          wgmma_fence();
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            wgmma_registers<T, 1>(dv, pt + 4 * k, dout_depth.at(half_rows + k * kSixteenRows));
          }
          wgmma_commit();

          wgmma_wait<1>();
          wgmma_hold(dp);
          uint32_t dst[16];
#pragma unroll
          for (int i = 0; i < 16; ++i) {
            float &first = dp[2 * i], &second = dp[2 * i + 1];
            if constexpr (kDrops) {
              const uint32_t mask[2] = {mask_of_bit(even[i % 2][i / 8], i / 2 % 4),
                                        mask_of_bit(odd[i % 2][i / 8], i / 2 % 4)};
              first = __uint_as_float(__float_as_uint(first) & mask[0]);
              second = __uint_as_float(__float_as_uint(second) & mask[1]);
            }
            const float2 d = *reinterpret_cast<const float2*>(rowsum + i / 2 * 8);
            dst[i] = pack_pair<T>(s[2 * i] * (first - d.x), s[2 * i + 1] * (second - d.y));
          }
#pragma unroll
          for (int k = 0; k < 4; ++k) {  // 16 queries
            stmatrix_x4(ds_box + half * kBoxBytes + ds_row * kSwizzleBytes +
                            swizzle_128b(ds_row, k * 2 + lane / 16),
                        dst + 4 * k);
          }
          wgmma_hold(dk);
          wgmma_fence();
#pragma unroll
          for (int k = 0; k < 4; ++k) {
            wgmma_registers<T, 1>(dk, dst + 4 * k, q_depth.at(half_rows + k * kSixteenRows));
          }
          wgmma_commit();
        }
        fence_proxy_async();
        named_barrier(1, 2 * kWarpgroup);
        wgmma_fence();
        const WgmmaOperand ds_half(ds_box + (kHalves == 2 ? group * kBoxBytes : 0));
        wgmma_first<T, 1, 1>(dq, ds_half.at(0), k_columns.at(0));
#pragma unroll
        for (int k = 1; k < kTile / kWgmmaK; ++k) {
          wgmma<T, 1, 1>(dq, ds_half.at(k * kSixteenRows), k_columns.at(k * kSixteenRows));
        }
        wgmma_commit();
        wgmma_wait<1>();
        wgmma_hold(dk);
        wgmma_hold(dv);
        tiles.empty[stage.index].arrive();
        stage.advance();
        // The end of the loop is here, because ptxas would wait for products that an `if` starts.
        if (--step < steps.begin) break;
        wait_for_queries();
        if (kHalves == 1) {
          start_scores(0);
          wgmma_wait<1>();
          wgmma_hold(dq);
          add(step + 1);
        }
      }
      wgmma_wait<0>();
      wgmma_hold(dq);
      release(tiles.keys_empty[keys.index]);
      keys.advance();
      add(steps.begin);
    }

    const int rows = item.length_k - item.start - key;
    const int64_t token = item.first_k + item.start + key;
    const float grad_scale = grad_scale_of(p.grad_scale, item.length_k);
    const auto store = [&](void* to, int64_t token_stride, int64_t head_stride, const Cast& cast,
                           const float (&sums)[kWidth / 2], float scale) {
      if constexpr (kCasts) {
        cast_sums(cast, tiles.of_keys, token, item.head * p.width, rows, p.width, by_group(sums),
                  scale, scale);
      } else {
        T* const first = static_cast<T*>(to) + token * token_stride + item.head * head_stride;
        store_sums<T>(first, token_stride, rows, p.width, sums, scale, scale);
      }
    };
    store(p.dk, p.dk_token, p.dk_head, p.casts.dk, dk, grad_scale);
    store(p.dv, p.dv_token, p.dv_head, p.casts.dv, dv, p.keep_scale);
  }
  if (kCasts && lane == 0) {
    tiles.of_queries.of_warp[threadIdx.x / kWarp].publish(p.casts.dq);
    tiles.of_keys.of_warp[threadIdx.x / kWarp].publish(p.casts.dk);
  }
}

#endif

template <typename T, int kWidth, bool kWindow, bool kDrops, bool kCasts>
__global__ __launch_bounds__(kWgmmaThreads, 1) void attention_wgmma_bwd_kernel(
    const __grid_constant__ BwdParams p) {
#ifdef LIGHTSEQ_HAS_WGMMA
  extern __shared__ __align__(1024) unsigned char shared[];
  using Tiles = BwdTiles<kWidth>;
  Tiles& tiles = *reinterpret_cast<Tiles*>(shared);
  if (threadIdx.x == 0) {
    tiles.claims.init(kConsumerWarps + 3);
    for (int i = 0; i < Tiles::kKeyStages; ++i) {
      tiles.keys_loaded[i].init(1);
      tiles.keys_full[i].init(2);
      tiles.keys_empty[i].init(kConsumerWarps);
    }
    for (int i = 0; i < 2; ++i) {
      tiles.loaded[i].init(1);
      // All lanes that write or read arrive: an arrival orders only the accesses of its own lane.
      tiles.full[i].init(2 * kWarp);
      tiles.empty[i].init(kConsumerWarps * kWarp);
    }
    tiles.turn.init(1);
    tiles.added.init(kConsumerWarps);
    fence_mbarrier_init();
  }
  __syncthreads();
  griddepcontrol_wait();
  if (threadIdx.x >= kWarpgroup) {
    setmaxnreg_inc<kConsumerRegisters>();
    compute_gradients<T, kWidth, kWindow, kDrops, kCasts>(p, tiles);
  } else {
    setmaxnreg_dec<kProducerRegisters>();
    const int warp = threadIdx.x / kWarp;
    if (threadIdx.x == 0) load<kWidth, kWindow, kDrops>(p, tiles);
    if (warp == 1) take_turns<kWidth, kWindow>(p, tiles);
    if (warp >= 2) prepare<kWidth, kWindow>(p, tiles);
  }
#else
  asm volatile("trap;");
#endif
}

// Draws the bits of a block of keys for the queries that see one. A warp has 32 of the keys.
__global__ __launch_bounds__(kTile, 10) void draw_kernel(const ItemList list, const Bits bits,
                                                         const Dropout arguments, int heads,
                                                         const Band band) {
  griddepcontrol_launch_dependents();
  griddepcontrol_wait();
  const AttentionDropout dropout(arguments);
  const int warp = of_warp(threadIdx.x / kWarp), lane = threadIdx.x % kWarp;
  const int count = list.counts[0] * heads;
  for (int n = blockIdx.x; n < count; n += gridDim.x) {
    const Item item = list.load(n / heads);
    const int head = n % heads;
    assert(item.length_k <= bits.keys && "no sentence has more keys than max_k");
    if (item.start + warp * 32 >= item.length_k) continue;
    uint32_t id = static_cast<uint32_t>(item.first_q + lane) * heads + head;
    const Range seeing = band.of_keys().seen(item.start, kTile).within(item.length_q);
    const int groups = (seeing.end + 31) / 32;
#pragma unroll 4
    for (int group = seeing.begin / 32; group < groups; ++group) {
      const uint32_t word = dropout.keep_word(id + group * 32 * heads, item.start / 32 + warp);
      bits.at(item, group, head, heads)[threadIdx.x] = transpose_bits(word);
    }
  }
}

}  // namespace

void wgmma_bwd(const Call& a, const Backward& b) {
  const int32_t device = a.q.get_device();
  const cudaStream_t stream = current_stream(device);
  const int heads = static_cast<int>(a.q.size(1));
  Tensor memory;
  const ItemList list = list_items(a, kTile, true, memory, stream);
  Bits bits = {};
  Tensor bits_memory;
  if (const Dropout dropout = dropout_of(a); dropout.threshold > 0) {
    bits.keys = (a.max_k + kTile - 1) / kTile * kTile;
    bits_memory = allocate(a.q, {2 * most_units(a), heads, bits.keys}, ScalarType::Int);
    bits.words = static_cast<uint32_t*>(bits_memory.data_ptr());
    // rowsum_kernel runs beside it; the longer the sentences, the more bits.
    const int64_t resident = resident_blocks(draw_kernel, kTile, device);
    launch({.op = a.op,
            .grid = static_cast<unsigned>(a.max_k > 1024 ? resident * 3 / 4 : resident / 2),
            .block = kTile,
            .stream = stream,
            .dependent = true},
           draw_kernel, list, bits, dropout, heads, a.band());
  }
  dispatch_long(a, b.casts.dq, [&](auto zero, auto width, auto drops, auto casts) {
    using Tiles = BwdTiles<width>;
    const Workspace workspace = prepare_workspace(a, b, 1, kBoxes<width> * 64 * 64, stream);
    const BwdParams p{.q = tensor_map_of_heads(a.q, Tiles::kRows),
                      .dout = tensor_map_of_heads(b.dout, Tiles::kRows),
                      .k = tensor_map_of_heads(a.k, kTile),
                      .v = tensor_map_of_heads(a.v, kTile),
                      .list = list,
                      .lse = workspace.lse,
                      .rowsum = workspace.rowsum,
                      .sums = reinterpret_cast<float4*>(workspace.sums),
                      .turns = workspace.turns,
                      .dq = b.dq.data_ptr(),
                      .dk = b.dk.data_ptr(),
                      .dv = b.dv.data_ptr(),
                      .dq_token = b.dq.stride(0),
                      .dq_head = b.dq.stride(1),
                      .dk_token = b.dk.stride(0),
                      .dk_head = b.dk.stride(1),
                      .dv_token = b.dv.stride(0),
                      .dv_head = b.dv.stride(1),
                      .rows_q = static_cast<int>(a.q.size(0)),
                      .heads = heads,
                      .width = static_cast<int>(a.q.size(2)),
                      .band = a.band(),
                      .scale = static_cast<float>(a.scale),
                      .keep_scale = a.keep_scale(),
                      .grad_scale = a.grad_scale(),
                      .bits = bits,
                      .casts = b.casts};
    dispatch_value<false, true>(a.window > 0, [&](auto window) {
      launch({.op = a.op,
              .grid = static_cast<unsigned>(resident_blocks(device, 1)),
              .block = kWgmmaThreads,
              .shared = sizeof(Tiles),
              .stream = stream,
              .dependent = true},
             attention_wgmma_bwd_kernel<decltype(zero), width, window, drops, casts>, p);
    });
  });
}

}  // namespace lightseq::attention
