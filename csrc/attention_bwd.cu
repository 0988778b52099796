// Attention over packed sentences, backward. attention.cu has the formula; common/attention.cuh
// says how the work is cut up.
//
//   P = exp(scale * q k^T - lse)      kept = dropout's mask / (1 - p)      D = rowsum(dO * O)
//   dV = (P * kept)^T dO              dS = P * ((dO V^T) * kept - D)
//   dQ = scale * dS K                 dK = scale * dS^T Q
//
// Sentences of at most 64 tokens: P and dS are computed once, by warps that own 16 queries each,
// and pass through shared memory to the warps that own 16 keys (five small products). Up to 128
// tokens shared memory has no room for them: a second pass computes S^T = K Q^T and V dO^T afresh
// (seven). A tile of a longer sentence makes one of these passes: it holds its own side and walks
// the tiles of the other.
//
//   read besides dout    q, k, v, lse; out for D only where a row of P is in no warp whole
//   bytes moved          everything once where a sentence fits into a tile; tiles of longer ones
//                        come again from the cache
//   determinism          no atomics; every number is summed in a fixed order, which depends on the
//                        sentence alone and not on the batch around it

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>

#include "common/attention.cuh"

namespace lightseq {
namespace {

using namespace attention;

template <typename T>
struct BwdParams {
  Work work;
  Packed<const T> dout, q, k, v, out;
  const float* lse;
  Packed<T> dq, dk, dv;
  int rows_q, rows_k;
  float scale;
  float keep_scale;  // 1 / (1 - p)
  Dropout dropout;
};

template <typename T, int kWidth>
constexpr int kRows = kTileRows<128, T, kWidth>;
template <typename T, int kWidth>
constexpr int kThreads = kRows<T, kWidth> / kWarpRows * kWarp;

// The rows of `out` give D, then hold dQ on its way out.
template <typename T, int kWidth>
struct BwdTiles {
  Tile<T, kRows<T, kWidth>, kWidth> q, dout, out, k, v;
  float lse[kRows<T, kWidth>], rowsum[kRows<T, kWidth>];  // lse * log2(e) or lse, D
  Keep<kRows<T, kWidth>> keep;
};

template <typename T, int kWidth>
__device__ __forceinline__ void load_keys(BwdTiles<T, kWidth>& tiles, const BwdParams<T>& p,
                                          const Unit& unit, int start) {
  load_tiles({&tiles.k, &tiles.v}, {p.k, p.v}, unit, unit.first_k + start, unit.length_k - start,
             p.work.width);
}

// Loads everything about the queries from start_q on, draws the bits, and waits for all copies that
// are under way.
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

  // Probabilities of rows that do not exist become exp(-inf).
  const int warp_row = threadIdx.x / kWarp * kWarpRows;
  const int row = warp_row + threadIdx.x % kWarpRows;
  const int position = row & (unit.slot() - 1), head = row >> unit.shift;
  float lse = INFINITY;
  if (position < length && head < unit.heads) {
    lse = p.lse[static_cast<int64_t>(first + position) * p.work.heads + unit.head + head];
  }
  draw<1>(tiles.keep, p.dropout, p.work, unit, start_q, start_k);
  tiles.lse[row] = lse * Base<T>::kLogE;
  wait_for_copies();
  __syncthreads();

  if constexpr (kRowsum) {  // D is the diagonal of dO O^T
    float products[2][4];
    multiply_nt<T, kWidth>(products, tiles.dout.row(warp_row), tiles.out.row(warp_row));
    if (lane_row() / 2 * 2 == lane_column()) {
      const bool odd = lane_row() % 2;
      tiles.rowsum[warp_row + lane_row()] = odd ? products[0][1] : products[0][0];
      tiles.rowsum[warp_row + lane_row() + 8] = odd ? products[1][3] : products[1][2];
    }
    __syncthreads();
  }
}

// All three gradients of heads that have kSlot rows, from one computation of P and dS. A warp makes
// those of its 16 queries. P goes where `out` would be, for which D is not needed here: a warp has
// whole rows of P. dS goes beside it or, where that is full, replaces V. Then each warp reads its
// 16 keys' columns of both.
template <int kSlot, typename T, int kWidth>
__device__ __forceinline__ void whole_pass(BwdTiles<T, kWidth>& tiles, const BwdParams<T>& p,
                                           const Unit& unit) {
  constexpr int kRow = kStride<T, kWidth>, kWords = (kSlot + 31) / 32;
  constexpr int kWordBlocks = kSlot / 8 / kWords;
  constexpr bool kBeside = 2 * kSlot <= kWidth;
  load_keys(tiles, p, unit, 0);
  load_queries<false>(tiles, p, unit, 0, 0);
  const Place place(unit);
  T* const kept = tiles.out.row(place.slot);
  T* const dscores = kBeside ? kept + kSlot : tiles.v.row(place.slot);
  const float scale = p.scale * Base<T>::kLogE, keep_scale = p.keep_scale;
  const int query = place.position + lane_row();  // and query + 8

  float s[kSlot / 8][4], dp[kSlot / 8][4];
  multiply_nt<T, kWidth>(s, tiles.q.row(place.row), tiles.k.row(place.slot));
  multiply_nt<T, kWidth>(dp, tiles.dout.row(place.row), tiles.v.row(place.slot));
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = place.row + lane_row() + half * 8;
    const float lse = tiles.lse[row];
    const int end = p.work.causal ? min(unit.length_k, query + half * 8 + 1) : unit.length_k;
    T* const to = kept + (query + half * 8) * kRow + lane_column();
    float rowsum = 0.0f;
#pragma unroll
    for (int word = 0; word < kWords; ++word) {
      const uint32_t visible = low_bits(end - word * 32 - lane_column());
      uint32_t keep = ~0u;
      if (p.dropout.threshold > 0) keep = tiles.keep[row][word] >> lane_column();
#pragma unroll
      for (int n = 0; n < kWordBlocks; ++n) {
        float (&score)[4] = s[word * 4 + n];
        float (&d)[4] = dp[word * 4 + n];
        float kept_pair[2];
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          const int i = half * 2 + e;
          const float probability = Base<T>::exp(fmaf(score[i], scale, -lse));
          const float factor = keep >> (n * 8 + e) & 1u ? keep_scale : 0.0f;
          score[i] = visible >> (n * 8 + e) & 1u ? probability : 0.0f;
          d[i] *= factor;
          rowsum = fmaf(score[i], d[i], rowsum);
          kept_pair[e] = score[i] * factor;
        }
        store_pair(to + (word * 4 + n) * 8, kept_pair[0], kept_pair[1]);
      }
    }
    rowsum += __shfl_xor_sync(kAllLanes, rowsum, 1);
    rowsum += __shfl_xor_sync(kAllLanes, rowsum, 2);
#pragma unroll
    for (int n = 0; n < kSlot / 8; ++n) {
#pragma unroll
      for (int i = half * 2; i < half * 2 + 2; ++i) s[n][i] *= dp[n][i] - rowsum;
    }
  }
  float dq[kWidth / 8][4] = {};
  multiply_nn<T, kWidth>(dq, s, tiles.k.row(place.slot));
  if (!kBeside) __syncthreads();  // V has been read
#pragma unroll
  for (int n = 0; n < kSlot / 8; ++n) {
    T* const to = dscores + query * kRow + n * 8 + lane_column();
    store_pair(to, s[n][0], s[n][1]);
    store_pair(to + 8 * kRow, s[n][2], s[n][3]);
  }
  __syncthreads();  // P and dS are there, K has been read
  if (!place.exists) return;

  T* const stage = tiles.k.row(place.row);
  const int length_q = unit.length_q - place.position, length_k = unit.length_k - place.position;
  const int first_k = unit.first_k + place.position;
  store_rows<T, kWidth>(p.dq, stage, dq, p.scale, p.scale, place.head,
                        unit.first_q + place.position, length_q, p.work.width);
  float dv[kWidth / 8][4] = {};
  multiply_tn<T, kWidth, kSlot>(dv, kept + place.position, tiles.dout.row(place.slot));
  store_rows<T, kWidth>(p.dv, stage, dv, 1.0f, 1.0f, place.head, first_k, length_k, p.work.width);
  float dk[kWidth / 8][4] = {};
  multiply_tn<T, kWidth, kSlot>(dk, dscores + place.position, tiles.q.row(place.slot));
  store_rows<T, kWidth>(p.dk, stage, dk, p.scale, p.scale, place.head, first_k, length_k,
                        p.work.width);
}

// dQ of the warp's queries.
template <typename T, int kWidth>
__device__ __forceinline__ void query_pass(BwdTiles<T, kWidth>& tiles, const BwdParams<T>& p,
                                           const Unit& unit) {
  constexpr int kChunk = 32;
  const Place place(unit);
  const bool works = place.exists && place.position < unit.length_q;
  const bool causal = p.work.causal;
  const int tile_end = min(unit.length_k, causal ? unit.start + unit.slot() : INT_MAX);
  const int warp_end = min(unit.length_k, causal ? place.position + kWarpRows : INT_MAX);
  const int clear_end = min(unit.length_k, causal ? place.position + 1 : INT_MAX);
  const float scale = p.scale * Base<T>::kLogE, keep_scale = p.keep_scale;

  float dq[kWidth / 8][4] = {};
  for (int tile = 0; tile < tile_end; tile += unit.slot()) {
    if (tile > 0) __syncthreads();
    load_keys(tiles, p, unit, tile);
    if (tile == 0) {
      load_queries<true>(tiles, p, unit, unit.start, 0);
    } else {
      draw<1>(tiles.keep, p.dropout, p.work, unit, unit.start, tile);
      wait_for_copies();
      __syncthreads();
    }
    if (!works) continue;

    const int chunks_end = min(unit.slot(), warp_end - tile);
#pragma unroll 1
    for (int chunk = 0; chunk < chunks_end; chunk += kChunk) {
      const int row_k = place.slot + chunk;
      float s[kChunk / 8][4], dp[kChunk / 8][4];
      multiply_nt<T, kWidth>(s, tiles.q.row(place.row), tiles.k.row(row_k));
      multiply_nt<T, kWidth>(dp, tiles.dout.row(place.row), tiles.v.row(row_k));
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int row = place.row + lane_row() + half * 8;
        const float lse = tiles.lse[row], rowsum = tiles.rowsum[row];
        uint32_t keep = ~0u;
        if (p.dropout.threshold > 0) keep = tiles.keep[row][chunk / 32] >> lane_column();
#pragma unroll
        for (int n = 0; n < kChunk / 8; ++n) {
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int i = half * 2 + e;
            const float probability = Base<T>::exp(fmaf(s[n][i], scale, -lse));
            const float factor = keep >> (n * 8 + e) & 1u ? keep_scale : 0.0f;
            s[n][i] = probability * fmaf(dp[n][i], factor, -rowsum);
          }
        }
        if (tile + chunk + kChunk > clear_end) {
          const int query = place.position + lane_row() + half * 8;
          const int end = causal ? min(unit.length_k, query + 1) : unit.length_k;
          const uint32_t visible = low_bits(end - (tile + chunk + lane_column()));
#pragma unroll
          for (int n = 0; n < kChunk / 8; ++n) {
#pragma unroll
            for (int e = 0; e < 2; ++e) {
              if (!(visible >> (n * 8 + e) & 1u)) s[n][half * 2 + e] = 0.0f;
            }
          }
        }
      }
      multiply_nn<T, kWidth>(dq, s, tiles.k.row(row_k));
    }
  }
  if (works) {
    store_rows<T, kWidth>(p.dq, tiles.out.row(place.row), dq, p.scale, p.scale, place.head,
                          unit.first_q + place.position, unit.length_q - place.position,
                          p.work.width);
  }
}

// dK and dV of the warp's keys. loaded: the tiles hold everything already.
template <typename T, int kWidth>
__device__ __forceinline__ void key_pass(BwdTiles<T, kWidth>& tiles, const BwdParams<T>& p,
                                         const Unit& unit, bool loaded) {
  constexpr int kChunk = 16;
  const Place place(unit);
  const bool works = place.exists && place.position < unit.length_k;
  const bool causal = p.work.causal;
  T* const row_k = tiles.k.row(place.row);
  T* const row_v = tiles.v.row(place.row);
  const float scale = p.scale * Base<T>::kLogE, keep_scale = p.keep_scale;

  float dk[kWidth / 8][4] = {}, dv[kWidth / 8][4] = {};
  const int tile_begin = causal ? unit.start : 0;
  for (int tile = tile_begin; tile < unit.length_q; tile += unit.slot()) {
    if (!loaded) {
      if (tile == tile_begin) {
        load_keys(tiles, p, unit, unit.start);
      } else {
        __syncthreads();
      }
      load_queries<true>(tiles, p, unit, tile, unit.start);
    }
    if (!works) continue;

    const int chunks_begin = causal ? max(place.position - tile, 0) / kChunk * kChunk : 0;
    const int chunks_end = min(unit.slot(), unit.length_q - tile);
#pragma unroll 1
    for (int chunk = chunks_begin; chunk < chunks_end; chunk += kChunk) {
      const int row_q = place.slot + chunk;
      float s[kChunk / 8][4], dp[kChunk / 8][4];
      multiply_nt<T, kWidth>(s, row_k, tiles.q.row(row_q));
      multiply_nt<T, kWidth>(dp, row_v, tiles.dout.row(row_q));
      const bool clear = !causal || tile + chunk >= place.position + kWarpRows - 1;
      const int bit = place.row - place.slot + lane_row();  // the lane's first key in its slot
#pragma unroll
      for (int n = 0; n < kChunk / 8; ++n) {
        const int column = n * 8 + lane_column();
        const float2 lse = *reinterpret_cast<const float2*>(tiles.lse + row_q + column);
        const float2 rowsum = *reinterpret_cast<const float2*>(tiles.rowsum + row_q + column);
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          uint32_t keep = ~0u;
          if (p.dropout.threshold > 0) {
            keep = tiles.keep[row_q + column + e][bit / 32] >> bit % 32;
          }
          // Queries before the lane's first key, by how many.
          const int before = place.position + lane_row() - (tile + chunk + column + e);
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const int i = half * 2 + e;
            float probability = Base<T>::exp(fmaf(s[n][i], scale, e ? -lse.y : -lse.x));
            if (!clear && before + half * 8 > 0) probability = 0.0f;
            const float factor = keep >> (half * 8) & 1u ? keep_scale : 0.0f;
            s[n][i] = probability * factor;
            dp[n][i] = probability * fmaf(dp[n][i], factor, e ? -rowsum.y : -rowsum.x);
          }
        }
      }
      multiply_nn<T, kWidth>(dv, s, tiles.dout.row(row_q));
      multiply_nn<T, kWidth>(dk, dp, tiles.q.row(row_q));
    }
  }
  if (works) {
    const int first = unit.first_k + place.position, length = unit.length_k - place.position;
    store_rows<T, kWidth>(p.dk, row_k, dk, p.scale, p.scale, place.head, first, length,
                          p.work.width);
    store_rows<T, kWidth>(p.dv, row_v, dv, 1.0f, 1.0f, place.head, first, length, p.work.width);
  }
}

template <typename T, int kWidth>
__global__ __launch_bounds__(kThreads<T, kWidth>, kMinBlocks<T, kWidth, kThreads<T, kWidth>>)  //
    void attention_bwd_kernel(const BwdParams<T> p) {
  extern __shared__ __align__(16) unsigned char shared[];
  BwdTiles<T, kWidth>& tiles = *reinterpret_cast<BwdTiles<T, kWidth>*>(shared);
  const Work& work = p.work;

  if (blockIdx.x >= work.blocks) {
    zero_rows(p.dq, work.cu_q[work.sentences], p.rows_q, work);
    zero_rows(p.dk, work.cu_k[work.sentences], p.rows_k, work);
    zero_rows(p.dv, work.cu_k[work.sentences], p.rows_k, work);
    return;
  }
  for_each_unit<kRows<T, kWidth>>(work, kQueries | kKeys, [&](const Unit& unit) {
    const bool whole = unit.parts == (kQueries | kKeys);
    if (whole && unit.slot() == 16) {
      whole_pass<16>(tiles, p, unit);
    } else if (whole && unit.slot() == 32) {
      whole_pass<32>(tiles, p, unit);
    } else if (whole && unit.slot() == 64) {
      if constexpr (kRows<T, kWidth> >= 64) whole_pass<64>(tiles, p, unit);
    } else {
      if (unit.parts & kQueries) query_pass(tiles, p, unit);
      if (whole) __syncthreads();  // K and V have been read, their rows may become results
      if (unit.parts & kKeys) key_pass(tiles, p, unit, whole);
    }
  });
}

void attention_bwd(const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v,
                   const Tensor& out, const Tensor& lse, const Tensor& cu_q, const Tensor& cu_k,
                   int64_t /*max_q*/, int64_t /*max_k*/, bool causal, double scale,
                   double dropout_p, const Tensor& rng, int64_t site, Tensor dq, Tensor dk,
                   Tensor dv) {
  constexpr const char* kOp = "attention_bwd";
  const int32_t device = q.get_device();
  const torch::stable::accelerator::DeviceGuard guard(device);
  dispatch(kOp, q, [&](auto zero, auto tile_width) {
    using T = decltype(zero);
    constexpr int kWidth = decltype(tile_width)::value;
    BwdParams<T> p;
    p.dout = packed<const T>(kOp, "dout", dout);
    p.q = packed<const T>(kOp, "q", q);
    p.k = packed<const T>(kOp, "k", k);
    p.v = packed<const T>(kOp, "v", v);
    p.out = packed<const T>(kOp, "out", out);
    p.dq = packed<T>(kOp, "dq", dq);
    p.dk = packed<T>(kOp, "dk", dk);
    p.dv = packed<T>(kOp, "dv", dv);
    require(lse.is_contiguous(), kOp, ": lse must be contiguous");
    p.lse = lse.const_data_ptr<float>();
    p.dropout = dropout_of(kOp, rng, site, dropout_p);
    if (dq.numel() + dk.numel() == 0) return;
    p.rows_q = static_cast<int>(q.size(0));
    p.rows_k = static_cast<int>(k.size(0));
    p.scale = static_cast<float>(scale);
    p.keep_scale = static_cast<float>(1.0 / (1.0 - dropout_p));
    p.work = work_of(kOp, q, k, cu_q, cu_k, causal, kRows<T, kWidth>);
    launch(kOp, attention_bwd_kernel<T, kWidth>, p, kThreads<T, kWidth>,
           sizeof(BwdTiles<T, kWidth>), device);
  });
}

STABLE_TORCH_LIBRARY_IMPL(lightseq, CUDA, m) { m.impl("attention_bwd", TORCH_BOX(&attention_bwd)); }

}  // namespace
}  // namespace lightseq
