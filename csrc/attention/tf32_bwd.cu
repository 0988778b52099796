// Attention of long sentences, backward, in float32, for heads of at most 64 columns. short_bwd.cu
// has the formulas, turns.cuh explains how blocks of keys add to dQ in turn.
//
// The tensor cores multiply numbers of 11 bits (TF32). A float32 is the sum of two of them, high
// and low, and a product of two float32 is high * high + high * low + low * high; what is left out
// is below the rounding of float32 (Ootomo and Yokota 2022). The tensor cores do not round sums to
// nearest. So they add 16 products of two high parts at most; all other additions are float32's.
//
// A block has 64 keys of a head and iterates over tiles of 64 queries. A warp has 16 x 32 numbers
// of each product, so that many warps can hide latencies. P, and then dS, pass through shared
// memory.
//
//   S^T = K Q^T, dP^T = V dO^T        dV += P^T dO, dK += dS^T Q        dQ = dS K
//
// Sums over one tile are computed separately and then added: one chain of additions over all rows
// of a long sentence would lose more bits.
//
// With few keys dS is hardly larger than the rounding errors of its two terms. So if a tile of
// queries attends to keys of one tile only, D is computed from P and dP: rowsum(P * dP) has the
// same errors as the other term. It is divided by rowsum(P), which errors of S make differ from 1.

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "attention/mma.cuh"
#include "attention/turns.cuh"

namespace lightseq::attention {
namespace {

constexpr int kSide = kQueryTile;         // queries and keys of a tile, and columns
constexpr int kPitch = kSide + 4;         // numbers of a row in shared memory
constexpr int kRows = 16, kColumns = 32;  // of a warp, in each product
constexpr int kAcross = kColumns / 8;     // fragments of 16 x 8 numbers
constexpr int kWarps = kSide / kRows * (kSide / kColumns), kThreads = kWarps * kWarp;

using Params = BwdParams<float>;

using Work = KeyBlock<kSide>;

using Rows = float[kSide][kPitch];
using Sums = float[kAcross][4];  // see common/ptx/mma.cuh

struct FloatTiles {
  Rows q, k, v, dout;
  Rows p;  // P, then dS: [queries, keys]
  float lse[kSide], lse_low[kSide], rowsum[kSide];
  float2 parts[kSide / kRows][kSide];  // of rowsum(P * dP) and rowsum(P)
  uint32_t keep[kSide][2];             // bits of 64 keys
  int number;                          // of an item
};

__device__ __forceinline__ void add(Sums& sums, const Sums& more) {
#pragma unroll
  for (int n = 0; n < kAcross; ++n) {
#pragma unroll
    for (int i = 0; i < 4; ++i) sums[n][i] += more[n][i];
  }
}

// Numbers as the sums of two of 11 bits. The tensor cores ignore the last 13 bits; adding 0x1000
// before rounds to nearest.
template <int kCount>
struct Split {
  uint32_t high[kCount], low[kCount];

  __device__ __forceinline__ void set(int i, float x) {
    high[i] = (__float_as_uint(x) + 0x1000u) & ~0x1fffu;
    low[i] = __float_as_uint(x - __uint_as_float(high[i])) + 0x1000u;
  }
};

// A matrix in shared memory, as an operand whose number (row or column i, depth k) is at
// first[i * kStep + k * kDepth]. A fragment has eight numbers along the depth, of which a lane has
// two, kNext apart: lane t has k = t and t + 4, or 2t and 2t + 1, whichever has no bank conflicts.
// Both operands of a product have the same ones. first: of this lane.
template <int kStep, int kDepth, int kNext>
struct Operand {
  const float* first;

  __device__ __forceinline__ float at(int i, int k, int next) const {
    return first[i * kStep + k * kDepth + next * kNext];
  }
};

// Rows of a matrix, by rows or by columns of shared memory. from: row and column of the lane.
using ByRows = Operand<kPitch, 1, 4>;
using ByPairs = Operand<kPitch, 1, 1>;
using ByColumns = Operand<1, kPitch, kPitch>;

// sums = left right
template <typename Left, typename Right>
__device__ __forceinline__ void multiply(Sums& sums, const Left& left, const Right& right) {
  Sums small = {};
  clear(sums);
#pragma unroll 1
  for (int first = 0; first < kSide; first += 16) {
    Split<4> a[2];
#pragma unroll
    for (int i = 0; i < 8; ++i)
      a[i / 4].set(i % 4, left.at(i % 2 * 8, first + i / 4 * 8, i % 4 / 2));
#pragma unroll
    for (int n = 0; n < kAcross; ++n) {
      float part[4] = {};
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        Split<2> b;
#pragma unroll
        for (int i = 0; i < 2; ++i) b.set(i, right.at(n * 8, first + half * 8, i));
        mma_tf32(part, a[half].high, b.high);
        mma_tf32(small[n], a[half].high, b.low);
        mma_tf32(small[n], a[half].low, b.high);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) sums[n][i] += part[i];
    }
  }
  add(sums, small);
}

// Copies rows first ... first + 63 of a head; rows from `length` on and columns from `width` on
// become zero.
__device__ __forceinline__ void load_rows(Rows& to, const Packed<const float>& x, int head,
                                          int first, int length, int width) {
  constexpr int kPerRow = kSide / 4, kRowsAtOnce = kThreads / kPerRow;
  const int row = threadIdx.x / kPerRow, column = threadIdx.x % kPerRow * 4;
  if (column >= width) length = 0;
#pragma unroll
  for (int i = 0; i < kSide; i += kRowsAtOnce) {
    cp_async_zfill(shared_address(&to[row + i][column]), x.at(first + row + i, head) + column,
                   row + i < length);
  }
}

// Stores sums, multiplied by `factor`. row, first: of this lane; length: how many rows exist from
// `row` on.
__device__ __forceinline__ void store(const Packed<float>& to, int row, int head, int first,
                                      int length, int width, const Sums& sums, float factor) {
#pragma unroll
  for (int n = 0; n < kAcross; ++n) {
    const int column = first + n * 8;
    if (column >= width) continue;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (half * 8 >= length) continue;
      *reinterpret_cast<float2*>(to.at(row + half * 8, head) + column) = {
          sums[n][2 * half] * factor, sums[n][2 * half + 1] * factor};
    }
  }
}

template <bool kDrops>
__global__ __launch_bounds__(kThreads,
                             2) void attention_tf32_bwd_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  FloatTiles& tiles = *reinterpret_cast<FloatTiles*>(shared);
  const int warp = of_warp(threadIdx.x / kWarp), lane = threadIdx.x % kWarp;
  // A lane's first row (a key, or a query of dQ) and first column (a query, or a column of a head).
  const int row_of_warp = warp % (kSide / kRows) * kRows;
  const int column_of_warp = warp / (kSide / kRows) * kColumns;
  const int own = row_of_warp + lane_row(), column = column_of_warp + lane_column();
  // Of a right operand, rows or columns.
  const int right = column_of_warp + lane_row();
  const AttentionDropout dropout = kDrops ? AttentionDropout(p.dropout) : AttentionDropout();

  const auto load_keys = [&](const Work& work) {
    const Item& item = work.item;
    const int first = item.first_k + item.start, length = item.length_k - item.start;
    load_rows(tiles.k, p.k, work.head, first, length, p.width);
    load_rows(tiles.v, p.v, work.head, first, length, p.width);
  };
  const auto load_queries = [&](Rows& to, const Packed<const float>& from, const Work& work,
                                int i) {
    load_rows(to, from, work.head, work.item.first_q + i * kSide, work.queries_from(i), p.width);
  };
  // Also lse and D.
  const auto load_dout = [&](const Work& work, int i) {
    load_queries(tiles.dout, p.dout, work, i);
    const int query = threadIdx.x % kSide;
    const int64_t from =
        static_cast<int64_t>(work.head) * p.rows_q + work.item.first_q + i * kSide + query;
    const bool exists = query < work.queries_from(i);
    if (threadIdx.x < kSide) {
      cp_async_4_zfill(shared_address(tiles.lse + query), p.lse + from, exists);
      cp_async_4_zfill(shared_address(tiles.lse_low + query), p.lse_low + from, exists);
    } else if (threadIdx.x < 2 * kSide) {
      cp_async_4_zfill(shared_address(tiles.rowsum + query), p.rowsum + from, exists);
    }
  };
  const auto draw = [&](const Work& work, int i) {
    if (kDrops && threadIdx.x < 2 * kSide) {
      const int query = threadIdx.x / 2, word = threadIdx.x % 2;
      const uint32_t row =
          static_cast<uint32_t>(work.item.first_q + i * kSide + query) * p.heads + work.head;
      tiles.keep[query][word] = dropout.keep_word(row, work.item.start / 32 + word);
    }
  };

  const int count = p.list.counts[0] * p.heads;
  while (true) {
    if (threadIdx.x == 0) tiles.number = claim(p.list);
    __syncthreads();
    const int number = tiles.number;
    if (number >= count) return;
    const Work work(p.list, p.heads, p.band, p.most_together, number);
    const Item& item = work.item;
    load_keys(work);
    load_queries(tiles.q, p.q, work, work.first);
    load_dout(work, work.first);
    draw(work, work.first);
    const float grad_scale = grad_scale_of(p.grad_scale, item.length_k);
    Sums dk = {}, dv = {};

    int i = work.first;
#pragma unroll 1
    for (int left = work.count; left > 0; --left) {
      const int first_query = i * kSide, next = work.after(i);
      const bool continues = left > 1;
      cp_async_wait_all();
      __syncthreads();  // this tile has been loaded, and dS of the previous tile has been read
      Sums s, dp;
      multiply(s, ByRows{&tiles.k[own][lane % 4]}, ByRows{&tiles.q[right][lane % 4]});
      multiply(dp, ByRows{&tiles.v[own][lane % 4]}, ByRows{&tiles.dout[right][lane % 4]});
      const bool all_keys = item.length_k > 0 && work.blocks_of(i) == 1;
      const bool clear_of_hidden =
          item.start + kSide <= item.length_k &&
          p.band.seen_by_all(first_query, kSide).has({item.start, item.start + kSide});
#pragma unroll
      for (int n = 0; n < kAcross; ++n) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int query = column + n * 8 + e;
          const TwoFloats lse{tiles.lse[query], tiles.lse_low[query]};
          const float rowsum = all_keys ? 0.0f : tiles.rowsum[query];
          const uint32_t keep = kDrops ? tiles.keep[query][row_of_warp / 32] >> (own % 32) : ~0u;
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int i = 2 * half + e, key = item.start + own + 8 * half;
            float probability = probability_of(s[n][i], p.scale, lse);
            if (!clear_of_hidden &&
                (key >= item.length_k || !p.band.sees(first_query + query, key))) {
              probability = 0.0f;
            }
            const bool kept = keep >> (8 * half) & 1u;
            tiles.p[query][own + 8 * half] = kept ? probability : 0.0f;
            s[n][i] = probability;
            dp[n][i] = (kept ? dp[n][i] : 0.0f) - rowsum;
          }
        }
      }
      if (all_keys) {
#pragma unroll
        for (int n = 0; n < kAcross; ++n) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float sum = s[n][e] * dp[n][e] + s[n][e + 2] * dp[n][e + 2];
            float total = s[n][e] + s[n][e + 2];
#pragma unroll
            for (int offset = 4; offset < kWarp; offset *= 2) {
              sum += __shfl_xor_sync(kAllLanes, sum, offset);
              total += __shfl_xor_sync(kAllLanes, total, offset);
            }
            if (lane_row() == 0) {
              tiles.parts[row_of_warp / kRows][column + n * 8 + e] = {sum, total};
            }
          }
        }
      }
      __syncthreads();  // P is complete
      Sums sums;
      multiply(sums, ByColumns{&tiles.p[lane_column()][own]},
               ByColumns{&tiles.dout[lane_column()][right]});
      add(dv, sums);
      if (all_keys) {
#pragma unroll
        for (int n = 0; n < kAcross; ++n) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            float sum = 0.0f, total = 0.0f;
#pragma unroll
            for (int w = 0; w < kSide / kRows; ++w) {
              const float2 part = tiles.parts[w][column + n * 8 + e];
              sum += part.x;
              total += part.y;
            }
            dp[n][e] -= sum / total;
            dp[n][e + 2] -= sum / total;
          }
        }
      }
      __syncthreads();  // P, dO, lse and D have been read
      if (continues) load_dout(work, next);
#pragma unroll
      for (int n = 0; n < kAcross; ++n) {
#pragma unroll
        for (int j = 0; j < 4; ++j) {
          tiles.p[column + n * 8 + j % 2][own + j / 2 * 8] = s[n][j] * dp[n][j];
        }
      }
      __syncthreads();  // dS is complete
      multiply(sums, ByColumns{&tiles.p[lane_column()][own]},
               ByColumns{&tiles.q[lane_column()][right]});
      add(dk, sums);
      __syncthreads();  // Q has been read
      if (continues) {
        load_queries(tiles.q, p.q, work, next);
        draw(work, next);
      }

      Sums& dq = sums;
      multiply(dq, ByPairs{&tiles.p[own][lane_column()]},
               ByColumns{&tiles.k[lane_column()][right]});
      const int64_t part =
          (static_cast<int64_t>(item.unit + i) * p.heads + work.head) * kWarps + warp;
      const Turn turn = work.turn(i);
      add_in_turn(p.sums + part * (kAcross * kFragment), p.turns + part, turn, dq);
      __syncwarp();
      if (!turn.is_last && threadIdx.x % kWarp == 0) pass_turn(p.turns + part);
      if (turn.is_last) {
        store(p.dq.rows, item.first_q + first_query + own, work.head, column,
              item.length_q - first_query - own, p.width, dq, grad_scale);
      }
      i = next;
    }

    const int key = item.first_k + item.start + own, keys = item.length_k - item.start - own;
    store(p.dk.rows, key, work.head, column, keys, p.width, dk, grad_scale);
    store(p.dv.rows, key, work.head, column, keys, p.width, dv, p.keep_scale);
    cp_async_wait_all();  // if there is no tile of queries
    __syncthreads();      // the tiles have been read, and no warp waits for a turn
  }
}

}  // namespace

void tf32_bwd(const Call& a, const Backward& b) {
  const int32_t device = a.q.get_device();
  const cudaStream_t stream = current_stream(device);
  Tensor memory;
  const ItemList list = list_items(a, kSide, false, memory, stream);
  const Workspace workspace = prepare_workspace(a, b, kWarps, kAcross * kFragment, stream);
  Params params(a, b, list, workspace);
  const auto kernel = params.dropout.threshold > 0 ? attention_tf32_bwd_kernel<true>
                                                   : attention_tf32_bwd_kernel<false>;
  launch_in_turns(a.op, kernel, params, kThreads, sizeof(FloatTiles), device, stream);
}

}  // namespace lightseq::attention
