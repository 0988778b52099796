// Operands of short_bwd.cu, the layout of its shared memory, and the loads into it.
#pragma once

#include <cmath>
#include <cstdint>

#include "attention/cast.cuh"

namespace lightseq::attention {

template <typename T>
struct BwdParams {
  Work work;
  Packed<const T> dout, q, k, v, out;
  const Lse<T>* lse;
  Result<T> dq, dk, dv;
  float scale;
  float keep_scale;  // 1 / (1 - p)
  float grad_scale;  // scale / (1 - p)
  Dropout dropout;
};

template <typename T, int kWidth>
constexpr int kRows = kTileRows<128, T, kWidth>;
template <typename T, int kWidth>
constexpr int kThreads = kRows<T, kWidth> / kWarpRows * kWarp;

// The tile of `out` serves to compute D; later it stages dQ for the store.
template <typename T, int kWidth>
struct BwdTiles {
  Tile<T, kRows<T, kWidth>, kWidth> q, dout, out, k, v;
  PreparedLse<T> lse[kRows<T, kWidth>];
  float rowsum[kRows<T, kWidth>];  // D
  Keep<kRows<T, kWidth>> keep;
  Plan plan;
  BlockStatistics<kThreads<T, kWidth> / kWarp> of_queries, of_keys;  // of casts
};

template <typename T, int kWidth>
__device__ __forceinline__ void load_keys(BwdTiles<T, kWidth>& tiles, const BwdParams<T>& p,
                                          const Unit& unit, int start) {
  load_tiles({&tiles.k, &tiles.v}, {p.k, p.v}, unit, unit.first_k + start, unit.length_k - start,
             p.work.width);
}

// Computes D of the warp's queries from P and dO V^T, if all keys are in the tile. With few keys dS
// is hardly larger than the rounding errors of its two terms. Computed like this, D has the same
// errors as the other term, so the errors cancel. D from dO O^T would be too inexact for float32.
template <typename T, int kWidth>
__device__ __forceinline__ void sum_rows(BwdTiles<T, kWidth>& tiles, const BwdParams<T>& p,
                                         const Unit& unit, int start_q) {
  constexpr int kChunk = 16;
  const Place place(unit);
  const int query = start_q + place.row - place.slot;
  float rowsum[2] = {};
#pragma unroll 1
  for (int chunk = 0; chunk < unit.length_k; chunk += kChunk) {
    float s[kChunk / 8][4], dp[kChunk / 8][4];
    multiply_nt<T, kWidth>(s, tiles.q.row(place.row), tiles.k.row(place.slot + chunk));
    multiply_nt<T, kWidth>(dp, tiles.dout.row(place.row), tiles.v.row(place.slot + chunk));
    hide(s, query, chunk, unit.length_k, p.work.causal, p.work.causal ? 0 : unit.length_k);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int row = place.row + lane_row() + i / 2 * 8;
      uint32_t keep = ~0u;
      if (p.dropout.threshold > 0) keep = tiles.keep[row][chunk / 32] >> chunk % 32;
#pragma unroll
      for (int n = 0; n < kChunk / 8; ++n) {
        const float probability = probability_of(s[n][i], p.scale * Base<T>::kLogE, tiles.lse[row]);
        const bool kept = keep >> (n * 8 + lane_column() + i % 2) & 1u;
        rowsum[i / 2] += kept ? probability * dp[n][i] : 0.0f;
      }
    }
  }
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    rowsum[half] += __shfl_xor_sync(kAllLanes, rowsum[half], 1);
    rowsum[half] += __shfl_xor_sync(kAllLanes, rowsum[half], 2);
    if (lane_column() == 0) tiles.rowsum[place.row + lane_row() + half * 8] = rowsum[half];
  }
}

// Stores a warp's 16 rows of a gradient, multiplied by `scale`; see store_rows().
template <bool kCasts, int kWidth, typename T, int kWarps>
__device__ __forceinline__ void store_gradient(const Result<T>& x,
                                               BlockStatistics<kWarps>& statistics,
                                               const HeadRows& to, T* stage,
                                               const float (&c)[kWidth / 8][4], float scale,
                                               int width) {
  if constexpr (kCasts) {
    cast_sums(x.cast, statistics, to.first + lane_row(), to.head * width, to.length - lane_row(),
              width, c, scale, scale);
  } else {
    store_rows<T, kWidth>(x.rows, to, stage, c, scale, scale, width);
  }
}

// Zeroes the rows of a gradient from `first` on; see zero_rows().
template <bool kCasts, typename T>
__device__ __forceinline__ void zero_gradient(const Result<T>& x, int first, int rows,
                                              const Work& work) {
  if constexpr (kCasts) {
    zero_values(x.cast, first, rows, work);
  } else {
    zero_rows(x.rows, first, rows, work);
  }
}

// Loads all data of the queries from start_q on, generates the dropout bits, and waits for all
// copies in flight.
template <bool kRowsum, typename T, int kWidth>
__device__ __forceinline__ void load_queries(BwdTiles<T, kWidth>& tiles, const BwdParams<T>& p,
                                             const Unit& unit, int start_q, int start_k) {
  const int length = unit.length_q - start_q, first = unit.first_q + start_q;
  if constexpr (kRowsum) {
    load_tiles({&tiles.q, &tiles.dout, &tiles.out}, {p.q, p.dout, p.out}, unit, first, length,
               p.work.width);
  } else {
    load_tiles({&tiles.q, &tiles.dout}, {p.q, p.dout}, unit, first, length, p.work.width);
  }

  // lse = inf for rows that do not exist: their probabilities become exp(-inf) = 0.
  const int warp_row = threadIdx.x / kWarp * kWarpRows;
  const int row = warp_row + threadIdx.x % kWarpRows;
  const int position = row & (unit.slot() - 1), head = row >> unit.shift;
  Lse<T> lse = INFINITY;
  if (position < length && head < unit.heads) {
    lse = p.lse[static_cast<int64_t>(first + position) * p.work.heads + unit.head + head];
  }
  draw(tiles.keep, tiles.plan, p.dropout, p.work, unit, start_q, start_k);
  tiles.lse[row] = prepared(lse);
  cp_async_wait_all();
  __syncthreads();

  if constexpr (kRowsum) {
    if (!Base<T>::kIsTwo && unit.length_k <= unit.slot()) {
      sum_rows(tiles, p, unit, start_q);
    } else {  // the diagonal of dO O^T
      float products[2][4];
      multiply_nt<T, kWidth>(products, tiles.dout.row(warp_row), tiles.out.row(warp_row));
      if (lane_row() / 2 * 2 == lane_column()) {
        const int odd = lane_row() % 2;
        const float low = odd ? products[0][1] : products[0][0];
        const float high = odd ? products[1][3] : products[1][2];
        tiles.rowsum[warp_row + lane_row()] = Base<T>::divide(low, p.keep_scale);
        tiles.rowsum[warp_row + lane_row() + 8] = Base<T>::divide(high, p.keep_scale);
      }
    }
    __syncthreads();
  }
}

}  // namespace lightseq::attention
