// Attention over packed sentences, backward, for sentences of any length; the other methods are
// faster for long ones. short_fwd.cu has the formula of forward, units.cuh explains how the work is
// divided.
//
//   P = exp(scale * q k^T - lse)      M = dropout mask of zeros and ones
//   D = rowsum(P * M * dO V^T) = (1 - p) rowsum(dO * O)
//   dV = (P * M)^T dO / (1 - p)       dS = P * (M * dO V^T - D)
//   dQ = scale / (1 - p) dS K         dK = scale / (1 - p) dS^T Q
//
// The limits below are for 16-bit heads of up to 64 columns; other tiles have fewer than 128 rows.
// Sentences of at most 64 tokens: warps with 16 queries each compute P and dS once, and pass them
// through shared memory to the warps with 16 keys each (five small products). Sentences of 65 to
// 128 tokens: shared memory is too small for P and dS, so a second pass computes S^T = K Q^T and
// V dO^T again (seven products). Longer sentences: a tile performs only one of the two passes. A
// tile of queries iterates over the tiles of keys, a tile of keys over the tiles of queries.
//
//   inputs         dout, q, k, v, lse; and out, to compute D, if no warp has a whole row of P
//   bytes moved    everything once if a sentence fits into a tile; tiles of longer sentences are
//                  read again from the cache
//   determinism    no atomics; every sum has a fixed order, which depends only on the sentence and
//                  on which kernels compute the batch (method.h)

#include <cmath>
#include <cstdint>

#include "attention/cast.cuh"

namespace lightseq::attention {
namespace {

template <typename T>
struct BwdParams : UnitParams<T> {
  Packed<const T> dout, out;
  const Lse<T>* lse;
  Result<T> dq, dk, dv;
  float grad_scale;  // scale / (1 - p)
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
template <bool kWindow, typename T, int kWidth>
__device__ __forceinline__ void sum_rows(BwdTiles<T, kWidth>& tiles, const BwdParams<T>& p,
                                         const Unit& unit, int start_q) {
  constexpr int kChunk = 16;
  const Place place(unit);
  const int query = start_q + place.row - place.slot;
  const Band band = p.work.band.template known<kWindow>();
  const int clear_end = min(unit.length_k, query + 1 + band.after);
  float rowsum[2] = {};
#pragma unroll 1
  for (int chunk = 0; chunk < unit.length_k; chunk += kChunk) {
    float s[kChunk / 8][4], dp[kChunk / 8][4];
    multiply_nt<T, kWidth>(s, tiles.q.row(place.row), tiles.k.row(place.slot + chunk));
    multiply_nt<T, kWidth>(dp, tiles.dout.row(place.row), tiles.v.row(place.slot + chunk));
    hide(s, query, chunk, unit.length_k, band, clear_end);
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
    const float sum = sum_of_row(rowsum[half]);
    if (lane_column() == 0) tiles.rowsum[place.row + lane_row() + half * 8] = sum;
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
template <bool kRowsum, bool kWindow, typename T, int kWidth>
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
      sum_rows<kWindow>(tiles, p, unit, start_q);
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

// Computes all three gradients of heads in slots of kSlot rows, with one computation of P and dS. A
// warp computes P and dS of its 16 queries. P is stored in the tile of `out`, which is free: each
// warp has whole rows of P, so D is computed without `out`. dS is stored beside P if there is
// space, otherwise in place of V. Then each warp reads the columns of its 16 keys from both.
template <int kSlot, bool kWindow, bool kCasts, typename T, int kWidth>
__device__ __forceinline__ void whole_pass(BwdTiles<T, kWidth>& tiles, const BwdParams<T>& p,
                                           const Unit& unit) {
  constexpr int kRow = kStride<T, kWidth>;
  constexpr bool kBeside = 2 * kSlot <= kWidth;
  load_keys(tiles, p, unit, 0);
  load_queries<false, kWindow>(tiles, p, unit, 0, 0);
  const Place place(unit);
  T* const probabilities = tiles.out.row(place.slot);
  T* const dscores = kBeside ? probabilities + kSlot : tiles.v.row(place.slot);
  const int own_rows = place.position * kRow;
  const float scale = p.scale * Base<T>::kLogE;
  const Band band = p.work.band.template known<kWindow>();
  const int clear_end = min(unit.length_k, place.position + 1 + band.after);
  const float grad_scale = grad_scale_of(p.grad_scale, unit.length_k);
  const bool works = place.exists && place.position < unit.length_q;

  float s[kSlot / 8][4], dp[kSlot / 8][4], dq[kWidth / 8][4] = {};
  if (works) {
    multiply_nt<T, kWidth>(s, tiles.q.row(place.row), tiles.k.row(place.slot));
    multiply_nt<T, kWidth>(dp, tiles.dout.row(place.row), tiles.v.row(place.slot));
    hide(s, place.position, 0, unit.length_k, band, clear_end);
    const int row = place.row + lane_row();  // and row + 8
    float rowsum[2] = {};
#pragma unroll
    for (int n = 0; n < kSlot / 8; n += 2) {
      float kept[2][4];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const PreparedLse<T> lse = tiles.lse[row + half * 8];
        uint32_t keep = ~0u;
        if (p.dropout.threshold > 0) keep = tiles.keep[row + half * 8][n / 4] >> lane_column();
#pragma unroll
        for (int m = 0; m < 2; ++m) {
#pragma unroll
          for (int i = half * 2; i < half * 2 + 2; ++i) {
            float& score = s[n + m][i];
            score = probability_of(score, scale, lse);
            kept[m][i] = keep >> ((n + m) % 4 * 8 + i % 2) & 1u ? score : 0.0f;
            dp[n + m][i] *= kept[m][i];
            rowsum[half] += dp[n + m][i];
          }
        }
      }
      store_fragments<T, kRow>(probabilities + own_rows + n * 8, kept[0], kept[1]);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      rowsum[half] = sum_of_row(rowsum[half]);
#pragma unroll
      for (int n = 0; n < kSlot / 8; ++n) {
#pragma unroll
        for (int i = half * 2; i < half * 2 + 2; ++i) {
          s[n][i] = fmaf(s[n][i], -rowsum[half], dp[n][i]);
        }
      }
    }
    multiply_nn<T, kWidth>(dq, s, tiles.k.row(place.slot));
  }
  if (!kBeside) __syncthreads();  // V has been read
  if (works) {
#pragma unroll
    for (int n = 0; n < kSlot / 8; n += 2) {
      store_fragments<T, kRow>(dscores + own_rows + n * 8, s[n], s[n + 1]);
    }
  }
  __syncthreads();  // P and dS have been written, K has been read
  if (!place.exists) return;

  T* const stage = tiles.k.row(place.row);
  const HeadRows keys = keys_of(unit, place);
  if (works) {
    store_gradient<kCasts, kWidth>(p.dq, tiles.of_queries, queries_of(unit, place), stage, dq,
                                   grad_scale, p.work.width);
  }
  if (keys.length <= 0) return;
#pragma unroll 1  // unrolled, a kernel that casts takes 5% longer
  for (int i = 0; i < 2; ++i) {
    const bool is_dv = i == 0;
    float sums[kWidth / 8][4] = {};
    multiply_tn<T, kWidth, kSlot>(sums, (is_dv ? probabilities : dscores) + place.position,
                                  (is_dv ? tiles.dout : tiles.q).row(place.slot), unit.length_q);
    store_gradient<kCasts, kWidth>(is_dv ? p.dv : p.dk, tiles.of_keys, keys, stage, sums,
                                   is_dv ? p.keep_scale : grad_scale, p.work.width);
  }
}

// Computes dQ of the warp's queries.
template <bool kWindow, bool kCasts, typename T, int kWidth>
__device__ __forceinline__ void query_pass(BwdTiles<T, kWidth>& tiles, const BwdParams<T>& p,
                                           const Unit& unit) {
  constexpr int kChunk = 32;
  const Place place(unit);
  const bool works = place.exists && place.position < unit.length_q;
  const Band band = p.work.band.template known<kWindow>();
  const int clear_end = min(unit.length_k, place.position + 1 + band.after);
  const Range of_tile = band.seen(unit.start, unit.slot()).within(unit.length_k);
  const Range of_warp = band.seen(place.position, kWarpRows).within(unit.length_k);
  const int first_tile = of_tile.begin & -unit.slot();
  const float scale = p.scale * Base<T>::kLogE;

  float dq[kWidth / 8][4] = {};
  for (int tile = first_tile; tile < of_tile.end; tile += unit.slot()) {
    if (tile > first_tile) __syncthreads();
    load_keys(tiles, p, unit, tile);
    if (tile == first_tile) {
      load_queries<true, kWindow>(tiles, p, unit, unit.start, tile);
    } else {
      draw(tiles.keep, tiles.plan, p.dropout, p.work, unit, unit.start, tile);
      cp_async_wait_all();
      __syncthreads();
    }
    if (!works) continue;

    const int chunks_begin = max(of_warp.begin - tile, 0) / kChunk * kChunk;
    const int chunks_end = min(unit.slot(), of_warp.end - tile);
#pragma unroll 1
    for (int chunk = chunks_begin; chunk < chunks_end; chunk += kChunk) {
      const int row_k = place.slot + chunk;
      float s[kChunk / 8][4], dp[kChunk / 8][4];
      multiply_nt<T, kWidth>(s, tiles.q.row(place.row), tiles.k.row(row_k));
      multiply_nt<T, kWidth>(dp, tiles.dout.row(place.row), tiles.v.row(row_k));
      hide(s, place.position, tile + chunk, unit.length_k, band, clear_end);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = place.row + lane_row() + half * 8;
        const PreparedLse<T> lse = tiles.lse[row];
        const float rowsum = tiles.rowsum[row];
        uint32_t keep = ~0u;
        if (p.dropout.threshold > 0) keep = tiles.keep[row][chunk / 32] >> lane_column();
#pragma unroll
        for (int n = 0; n < kChunk / 8; ++n) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int i = half * 2 + e;
            const float probability = probability_of(s[n][i], scale, lse);
            const float d = keep >> (n * 8 + e) & 1u ? dp[n][i] : 0.0f;
            s[n][i] = probability * (d - rowsum);
          }
        }
      }
      multiply_nn<T, kWidth>(dq, s, tiles.k.row(row_k));
    }
  }
  if (works) {
    const float grad_scale = grad_scale_of(p.grad_scale, unit.length_k);
    store_gradient<kCasts, kWidth>(p.dq, tiles.of_queries, queries_of(unit, place),
                                   tiles.out.row(place.row), dq, grad_scale, p.work.width);
  }
}

// Adjacent numbers, for one load.
template <typename X>
struct alignas(2 * sizeof(X)) Two {
  X first, second;
};

// Computes dK and dV of the warp's keys. loaded: whether the tiles already hold all inputs.
template <bool kWindow, bool kCasts, typename T, int kWidth>
__device__ __forceinline__ void key_pass(BwdTiles<T, kWidth>& tiles, const BwdParams<T>& p,
                                         const Unit& unit, bool loaded) {
  constexpr int kChunk = 16;
  const Place place(unit);
  const bool works = place.exists && place.position < unit.length_k;
  const Band band = p.work.band.template known<kWindow>();
  T* const row_k = tiles.k.row(place.row);
  T* const row_v = tiles.v.row(place.row);
  const float scale = p.scale * Base<T>::kLogE;

  float dk[kWidth / 8][4] = {}, dv[kWidth / 8][4] = {};
  const Range of_tile = band.of_keys().seen(unit.start, unit.slot()).within(unit.length_q);
  const Range of_warp = band.of_keys().seen(place.position, kWarpRows).within(unit.length_q);
  const int tile_begin = of_tile.begin & -unit.slot();
  for (int tile = tile_begin; tile < of_tile.end; tile += unit.slot()) {
    if (!loaded) {
      if (tile == tile_begin) {
        load_keys(tiles, p, unit, unit.start);
      } else {
        __syncthreads();
      }
      load_queries<true, kWindow>(tiles, p, unit, tile, unit.start);
    }
    if (!works) continue;

    const int chunks_begin = max(of_warp.begin - tile, 0) / kChunk * kChunk;
    const int chunks_end = min(unit.slot(), of_warp.end - tile);
#pragma unroll 1
    for (int chunk = chunks_begin; chunk < chunks_end; chunk += kChunk) {
      const int row_q = place.slot + chunk;
      float s[kChunk / 8][4], dp[kChunk / 8][4];
      multiply_nt<T, kWidth>(s, row_k, tiles.q.row(row_q));
      multiply_nt<T, kWidth>(dp, row_v, tiles.dout.row(row_q));
      const int distance = tile + chunk - place.position;  // from the first key to the first query
      const bool clear =
          band.of_keys().seen_by_all(0, kWarpRows).has({distance, distance + kChunk});
      const int bit = place.row - place.slot + lane_row();  // the lane's first key in its slot
#pragma unroll
      for (int n = 0; n < kChunk / 8; ++n) {
        const int column = n * 8 + lane_column();
        using Lses = Two<PreparedLse<T>>;
        const Lses lse = *reinterpret_cast<const Lses*>(tiles.lse + row_q + column);
        const float2 rowsum = *reinterpret_cast<const float2*>(tiles.rowsum + row_q + column);
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          uint32_t keep = ~0u;
          if (p.dropout.threshold > 0) {
            keep = tiles.keep[row_q + column + e][bit / 32] >> bit % 32;
          }
          const int query = distance + column + e;
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int i = half * 2 + e;
            float probability = probability_of(s[n][i], scale, e ? lse.second : lse.first);
            if (!clear && !band.sees(query, lane_row() + half * 8)) probability = 0.0f;
            s[n][i] = keep >> (half * 8) & 1u ? probability : 0.0f;
            dp[n][i] = fmaf(s[n][i], dp[n][i], probability * (e ? -rowsum.y : -rowsum.x));
          }
        }
      }
      multiply_nn<T, kWidth>(dv, s, tiles.dout.row(row_q));
      multiply_nn<T, kWidth>(dk, dp, tiles.q.row(row_q));
    }
  }
  if (works) {
    const HeadRows keys = keys_of(unit, place);
    const float grad_scale = grad_scale_of(p.grad_scale, unit.length_k);
    store_gradient<kCasts, kWidth>(p.dk, tiles.of_keys, keys, row_k, dk, grad_scale, p.work.width);
    store_gradient<kCasts, kWidth>(p.dv, tiles.of_keys, keys, row_v, dv, p.keep_scale,
                                   p.work.width);
  }
}

template <typename T, int kWidth, bool kWindow, bool kCasts>
__global__ __launch_bounds__(kThreads<T, kWidth>, kMinBlocks<T, kWidth, kThreads<T, kWidth>>)  //
    void attention_short_bwd_kernel(const BwdParams<T> p) {
  extern __shared__ __align__(16) unsigned char shared[];
  BwdTiles<T, kWidth>& tiles = *reinterpret_cast<BwdTiles<T, kWidth>*>(shared);
  const Work& work = p.work;

  if (work.longest != INT_MAX) griddepcontrol_launch_dependents();  // see work_list.cu
  if (blockIdx.x >= work.blocks) {
    check_boundaries(work);
    zero_gradient<kCasts>(p.dq, work.cu_q[work.sentences], work.rows_q, work);
    zero_gradient<kCasts>(p.dk, work.cu_k[work.sentences], work.rows_k, work);
    zero_gradient<kCasts>(p.dv, work.cu_k[work.sentences], work.rows_k, work);
    return;
  }
  if constexpr (kCasts) {
    tiles.of_queries.clear();
    tiles.of_keys.clear();
  }
  for_each_unit<kRows<T, kWidth>>(
      tiles.plan, work, p.dropout, kQueries | kKeys, [&](const Unit unit) {
        const bool whole = unit.parts == (kQueries | kKeys);
        if (whole && unit.slot() == 16) {
          whole_pass<16, kWindow, kCasts>(tiles, p, unit);
        } else if (whole && unit.slot() == 32) {
          whole_pass<32, kWindow, kCasts>(tiles, p, unit);
        } else if (whole && unit.slot() == 64) {
          if constexpr (kRows<T, kWidth> >= 64) whole_pass<64, kWindow, kCasts>(tiles, p, unit);
        } else {
          if (unit.parts & kQueries) query_pass<kWindow, kCasts>(tiles, p, unit);
          if (whole) __syncthreads();  // K and V have been read; results may overwrite their rows
          if (unit.parts & kKeys) key_pass<kWindow, kCasts>(tiles, p, unit, whole);
        }
      });
  if (kCasts && threadIdx.x == 0) {
    tiles.of_queries.publish(p.dq.cast);
    tiles.of_keys.publish(p.dk.cast);
  }
}

}  // namespace

void short_bwd(const Call& a, const Backward& b) {
  dispatch(a, [&](auto zero, auto width) {
    using T = decltype(zero);
    const UnitParams<T> of_both(a);
    require(b.lse.is_contiguous(), a.op, ": lse must be contiguous");
    const BwdParams<T> p{of_both,
                         packed<const T>(a.op, "dout", b.dout),
                         packed<const T>(a.op, "out", b.out),
                         b.lse.const_data_ptr<Lse<T>>(),
                         result_of<T>(a.op, "dq", b.dq, b.casts.dq),
                         result_of<T>(a.op, "dk", b.dk, b.casts.dk),
                         result_of<T>(a.op, "dv", b.dv, b.casts.dv),
                         a.grad_scale()};
    if (b.dq.numel() + b.dk.numel() == 0) return;
    dispatch_cast<T>(b.casts.dq, [&](auto casts) {
      dispatch_value<false, true>(a.window > 0, [&](auto window) {
        launch_units(a, attention_short_bwd_kernel<T, width, window, casts>, p, kThreads<T, width>,
                     sizeof(BwdTiles<T, width>));
      });
    });
  });
}

}  // namespace lightseq::attention
