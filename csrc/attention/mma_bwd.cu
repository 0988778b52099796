// Attention of long sentences in 16 bits, backward, by mma.sync. short_bwd.cu has the formulas,
// turns.cuh explains how blocks of keys add to dQ.
//
//   S^T = K Q^T, dP^T = V dO^T        dV += P^T dO, dK += dS^T Q        dQ = dS K
//
// A warp has 32 rows of each product, so it reads right operands from shared memory half as often
// as with 16. In the first four these are keys. A row of scores is that of a key: so P and dS are
// left operands in the registers that have them.
//
// Heads of up to 64 columns: a block has four warps and 128 keys. Only dQ, which sums over the keys
// of all warps, needs dS in shared memory. Wider heads: as a warp has registers for 64 columns of
// dK and dV, two warps share 32 keys. Each computes the scores of half of the queries, and half of
// the columns of dK and dV; P and dS pass through shared memory. A block has four warps and 64
// keys. For heads of 128 columns it has eight warps and 128 keys, if the GPU has 163 KB of shared
// memory for a block. It is then alone on its SM, so it loads the next tile of queries a whole tile
// early.
//
// A block passes its turn at a tile on in the middle of the next one. By then its additions are
// complete, so the fence does not wait for them, while other warps compute.
//
//   bytes moved          k and v once; q and dout once for each block of keys, from the cache
//   determinism          every sum has a fixed order, which depends only on the sentence and, for
//                        sentences of thousands of tokens, on the number of multiprocessors

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "attention/cast.cuh"
#include "attention/mma.cuh"
#include "attention/turns.cuh"

namespace lightseq::attention {
namespace {

constexpr int kRows = kRowTiles * kWarpRows;  // of a warp
constexpr int kChunk = 32;                    // queries whose scores a warp computes at a time
constexpr int kFewWarps = kMmaWarps, kManyWarps = 2 * kFewWarps;
constexpr int kScoreBytes = 2 * kQueryTile;  // of a row of scores

template <int kWidth, int kWarps>
struct BwdTiles {
  static constexpr int kSharing = kWidth == 64 ? 1 : 2;  // warps that share keys
  static constexpr int kKeys = kWarps / kSharing * kRows;
  static constexpr int kStages = kWarps / kFewWarps;  // tiles of queries
  // Of a warp in dQ, where kBeside warps have the same queries, and in dK and dV.
  static constexpr int kBeside = kWarps / (kQueryTile / kRows);
  static constexpr int kQueryColumns = kWidth / kBeside, kKeyColumns = kWidth / kSharing;
  using Queries = uint16_t[kQueryTile][kTileColumns<kWidth>];
  uint16_t k[kKeys][kTileColumns<kWidth>], v[kKeys][kTileColumns<kWidth>];
  Queries q[kStages], dout[kStages];
  uint16_t scores[kSharing][kKeys][kQueryTile];  // dS^T; if warps share keys, also P^T
  float lse[kQueryTile], rowsum[kQueryTile];
  uint32_t keep[kStages][kKeys / 32][kQueryTile];  // bits of 32 keys
  BlockStatistics<kWarps> of_queries, of_keys;     // of casts
};

// Writes sums of 16 rows, multiplied by `factor`. row, column: of the lane's first row, and of the
// first column; rows: how many exist from `row` on; width: of a head.
template <bool kCasts, typename T, int kCount, int kWarps>
__device__ __forceinline__ void store(const Result<T>& to, BlockStatistics<kWarps>& statistics,
                                      int row, int head, int column, int rows, int width,
                                      const float (&sums)[kCount], float factor) {
  if constexpr (kCasts) {
    cast_sums(to.cast, statistics, row, head * width + column, rows,
              min(width - column, 2 * kCount), by_group(sums), factor, factor);
  } else {
    store_sums<T>(to.rows.at(row, head) + column, to.rows.token_bytes / sizeof(T), rows,
                  width - column, sums, factor, factor);
  }
}

template <typename T, int kWidth, int kWarps, typename Work>
__device__ __forceinline__ void load_keys(const BwdParams<T>& p, BwdTiles<kWidth, kWarps>& tiles,
                                          const Work& work) {
  constexpr int kKeys = BwdTiles<kWidth, kWarps>::kKeys, kThreads = kWarps * kWarp;
  const int first = work.item.first_k + work.item.start;
  const int length = work.item.length_k - work.item.start;
  load_rows<kWidth, kKeys, kThreads>(shared_address(tiles.k), p.k, work.head, first, length,
                                     p.width, threadIdx.x);
  load_rows<kWidth, kKeys, kThreads>(shared_address(tiles.v), p.v, work.head, first, length,
                                     p.width, threadIdx.x);
}

// Also dropout's bits.
template <bool kDrops, typename T, int kWidth, int kWarps, typename Work>
__device__ __forceinline__ void load_queries(const BwdParams<T>& p, BwdTiles<kWidth, kWarps>& tiles,
                                             const AttentionDropout& dropout, const Work& work,
                                             int i, int stage) {
  constexpr int kThreads = kWarps * kWarp;
  const int first = work.item.first_q + i * kQueryTile, length = work.queries_from(i);
  const uint32_t offset = stage * sizeof(tiles.q[0]);
  load_rows<kWidth, kQueryTile, kThreads>(shared_address(tiles.q) + offset, p.q, work.head, first,
                                          length, p.width, threadIdx.x);
  load_rows<kWidth, kQueryTile, kThreads>(shared_address(tiles.dout) + offset, p.dout, work.head,
                                          first, length, p.width, threadIdx.x);
  if constexpr (kDrops) {
#pragma unroll
    for (int unit = threadIdx.x; unit < tiles.kKeys / 32 * kQueryTile; unit += kThreads) {
      const int word = unit / kQueryTile, query = unit % kQueryTile;
      const uint32_t row = static_cast<uint32_t>(first + query) * p.heads + work.head;
      tiles.keep[stage][word][query] = dropout.keep_word(row, work.item.start / 32 + word);
    }
  }
}

// Loads lse and D.
template <typename T, int kWidth, int kWarps, typename Work>
__device__ __forceinline__ void load_sums(const BwdParams<T>& p, BwdTiles<kWidth, kWarps>& tiles,
                                          const Work& work, int i) {
  const int query = threadIdx.x % kQueryTile, which = threadIdx.x / kQueryTile;
  const float* const from = (which == 0 ? p.lse : p.rowsum) +
                            static_cast<int64_t>(work.head) * p.rows_q + work.item.first_q +
                            i * kQueryTile + query;
  if (which < 2) {
    cp_async_4_zfill(shared_address(which == 0 ? tiles.lse : tiles.rowsum) + 4 * query, from,
                     query < work.queries_from(i));
  }
}

// A warp's part of the products, and this lane's addresses for it: see Lane.
template <typename T, int kWidth, int kWarps>
struct Warp {
  using Tiles = BwdTiles<kWidth, kWarps>;
  static constexpr int kColumns = kTileColumns<kWidth>, kRowBytes = 2 * kColumns;
  int share, key, query, key_column, query_column;  // first ones
  uint32_t own_keys, by_rows, by_columns, own_scores, scores_by_keys, scores_by_queries;

  __device__ __forceinline__ Warp(int warp, const Lane& at, uint32_t ds_tile)
      : share(Tiles::kSharing > 1 ? warp % 2 : 0),
        key(warp / Tiles::kSharing * kRows),
        query(warp / Tiles::kBeside * kRows),
        key_column(share * Tiles::kKeyColumns),
        query_column(warp % Tiles::kBeside * Tiles::kQueryColumns),
        own_keys(key * kRowBytes + at.template left<kColumns>()),
        by_rows(at.template right<kColumns>()),
        by_columns(at.template left<kColumns>()),
        own_scores(swizzled<kQueryTile>(key + lane_row(), 0) + lane_column() * 2),
        scores_by_keys(key * kScoreBytes + at.template left<kQueryTile>()),
        scores_by_queries((ds_tile + at.template right<kQueryTile>()) ^ (query / 8 * 16)) {}

  // Eight columns from first + 8 n on, and the eight after them; n is even.
  __device__ __forceinline__ uint32_t columns(uint32_t tile, int first, int n) const {
    const uint32_t lane_address = tile + by_columns;
    if constexpr (kWidth == 96) return lane_address ^ ((first / 8 + n) * 16);
    return lane_address ^ (first / 8 * 16) ^ (n * 16);  // first is a multiple of 32
  }

  // sums += keys queries^T, with the queries of a chunk
  __device__ __forceinline__ void multiply(float (&sums)[kRowTiles][kChunk / 2], uint32_t keys,
                                           uint32_t queries, int chunk) const {
    multiply_add<T, kWidth / 16>(
        sums,
        [&](Fragments a, int m, int k) {
          ldmatrix_x4(a, beside(keys + own_keys, 2 * k) + m * 16 * kRowBytes);
        },
        [&](Fragments b, int n, int k) {
          ldmatrix_x4(b, beside(queries + by_rows + chunk * kRowBytes, 2 * k) + n * 8 * kRowBytes);
        });
  }

  // sums += scores queries, with the scores of a chunk in registers
  __device__ __forceinline__ void add(float (&sums)[kRowTiles][Tiles::kKeyColumns / 2],
                                      const uint32_t (&scores)[kRowTiles][kChunk / 4],
                                      uint32_t queries, int chunk) const {
    multiply_add<T, kChunk / 16>(
        sums,
        [&](Fragments a, int m, int k) {
#pragma unroll
          for (int j = 0; j < 4; ++j) a[j] = scores[m][4 * k + j];
        },
        [&](Fragments b, int n, int k) {
          ldmatrix_x4_trans(
              b, beside(queries + by_columns + chunk * kRowBytes, n) + k * 16 * kRowBytes);
        });
  }

  // sums += scores queries, with all scores in shared memory
  __device__ __forceinline__ void add(float (&sums)[kRowTiles][Tiles::kKeyColumns / 2],
                                      uint32_t scores, uint32_t queries) const {
    multiply_add<T, kQueryTile / 16>(
        sums,
        [&](Fragments a, int m, int k) {
          ldmatrix_x4(a, beside(scores + scores_by_keys, 2 * k) + m * 16 * kScoreBytes);
        },
        [&](Fragments b, int n, int k) {
          ldmatrix_x4_trans(b, columns(queries, key_column, n) + k * 16 * kRowBytes);
        });
  }

  // dq += dS K
  __device__ __forceinline__ void add_dq(float (&dq)[kRowTiles][Tiles::kQueryColumns / 2],
                                         uint32_t keys) const {
    multiply_add<T, Tiles::kKeys / 16>(
        dq,
        [&](Fragments a, int m, int k) {
          ldmatrix_x4_trans(a, beside(scores_by_queries, 2 * m) + k * 16 * kScoreBytes);
        },
        [&](Fragments b, int n, int k) {
          ldmatrix_x4_trans(b, columns(keys, query_column, n) + k * 16 * kRowBytes);
        });
  }

  __device__ __forceinline__ void store_scores(
      uint32_t to, int chunk, const uint32_t (&scores)[kRowTiles][kChunk / 4]) const {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int e = 0; e < kChunk / 4; ++e) {  // n = e / 2: 8 queries; e % 2: 8 keys
        const uint32_t at = ((to + own_scores) ^ ((chunk + e / 2 * 8) / 8 * 16)) +
                            (m * 16 + e % 2 * 8) * kScoreBytes;
        asm volatile("st.shared.u32 [%0], %1;" ::"r"(at), "r"(scores[m][e]) : "memory");
      }
    }
  }

  // P and dS of a chunk from its scores and dP, rounded to left operands of steps of 16 queries.
  template <bool kDrops>
  __device__ __forceinline__ void differentiate(const Tiles& tiles, int stage, int chunk,
                                                float scale,
                                                const float (&s)[kRowTiles][kChunk / 2],
                                                const float (&dp)[kRowTiles][kChunk / 2],
                                                uint32_t (&probabilities)[kRowTiles][kChunk / 4],
                                                uint32_t (&dscores)[kRowTiles][kChunk / 4]) const {
#pragma unroll
    for (int n = 0; n < kChunk / 8; ++n) {
      const int query = chunk + n * 8 + lane_column();  // and query + 1
      const float2 lse = *reinterpret_cast<const float2*>(&tiles.lse[query]);
      const float2 rowsum = *reinterpret_cast<const float2*>(&tiles.rowsum[query]);
      // Bytes of bits: the highest one of byte b is the one of key lane_row() + 8 b.
      uint32_t keep[2] = {~0u, ~0u};
      if constexpr (kDrops) {
        const uint2 words = *reinterpret_cast<const uint2*>(&tiles.keep[stage][key / 32][query]);
        keep[0] = words.x << (7 - lane_row());
        keep[1] = words.y << (7 - lane_row());
      }
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float probability[2], gradient[2];
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const int of_sums = n * 4 + half * 2 + e;
            probability[e] = probability_of(s[m][of_sums], scale, e ? lse.y : lse.x);
            float d = dp[m][of_sums];
            if constexpr (kDrops) {
              d = __uint_as_float(__float_as_uint(d) & mask_of_bit(keep[e], 2 * m + half));
            }
            gradient[e] = probability[e] * (d - (e ? rowsum.y : rowsum.x));
          }
          uint32_t& of_p = probabilities[m][2 * n + half];
          of_p = pack_pair<T>(probability[0], probability[1]);
          if constexpr (kDrops) of_p &= mask_of_bits(keep[0], keep[1], 2 * m + half);
          dscores[m][2 * n + half] = pack_pair<T>(gradient[0], gradient[1]);
        }
      }
    }
  }
};

// Hides keys from queries, whose scores become -inf. Positions are counted from the warp's first
// key on. query: the first one of the scores; length: of the keys.
__device__ __forceinline__ void hide(float (&s)[kRowTiles][kChunk / 2], int query, int length,
                                     const Band& band) {
  const auto each = [&](auto&& is_hidden) {
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int e = 0; e < kChunk / 2; ++e) {
        const int by = query + e / 4 * 8 + lane_column() + e % 2;
        if (is_hidden(m * 16 + e / 2 % 2 * 8 + lane_row(), by)) s[m][e] = -INFINITY;
      }
    }
  };
  each([&](int own, int by) { return own >= length || own > by + band.after; });
  if (query + kChunk > band.of_keys().seen_by_all(0, kRows).end) {  // only with a window
    each([&](int own, int by) { return own < by - band.before; });
  }
}

template <typename T, int kWidth, int kWarps, bool kDrops, bool kCasts>
__global__ __launch_bounds__(kWarps* kWarp, kManyWarps / kWarps) void attention_mma_bwd_kernel(
    const __grid_constant__ BwdParams<T> p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  using Tiles = BwdTiles<kWidth, kWarps>;
  Tiles& tiles = *reinterpret_cast<Tiles*>(shared);
  constexpr bool kShares = Tiles::kSharing > 1;
  constexpr int kStages = Tiles::kStages;
  constexpr int kFragments = kRowTiles * Tiles::kQueryColumns / 8;  // of a warp's dQ

  const int warp = of_warp(threadIdx.x / kWarp), lane = threadIdx.x % kWarp;
  const float scale = p.scale * kLog2E;
  const AttentionDropout dropout = kDrops ? AttentionDropout(p.dropout) : AttentionDropout();
  const uint32_t k_tile = shared_address(tiles.k), v_tile = shared_address(tiles.v);
  const uint32_t ds_tile = shared_address(tiles.scores[0]);
  const uint32_t p_tile = shared_address(tiles.scores[Tiles::kSharing - 1]);
  const Warp<T, kWidth, kWarps> at(warp, Lane{lane}, ds_tile);

  if constexpr (kCasts) {
    tiles.of_queries.clear();
    tiles.of_keys.clear();
  }
  const int count = p.list.counts[0] * p.heads;
  while (true) {
    // In the memory of dS, so that two blocks need 164 KB.
    int* const claimed = reinterpret_cast<int*>(tiles.scores);
    if (threadIdx.x == 0) *claimed = claim(p.list);
    __syncthreads();
    const int number = *claimed;
    if (number >= count) break;
    const KeyBlock<Tiles::kKeys> work(p.list, p.heads, p.band, p.most_together, number);
    const Item& item = work.item;
    load_keys(p, tiles, work);
    load_queries<kDrops>(p, tiles, dropout, work, work.first, 0);
    load_sums(p, tiles, work, work.first);
    const int key = item.start + at.key;  // of the sentence
    const float grad_scale = grad_scale_of(p.grad_scale, item.length_k);
    float dk[kRowTiles][Tiles::kKeyColumns / 2] = {}, dv[kRowTiles][Tiles::kKeyColumns / 2] = {};

    int i = work.first, stage = 0;
    uint32_t* to_pass = nullptr;  // the counter of the turn at the tile before
    const auto pass = [&] {
      if (threadIdx.x == 0 && to_pass != nullptr) pass_turn(to_pass);
    };
#pragma unroll 1
    for (int remaining = work.count; remaining > 0; --remaining) {
      const int first_query = i * kQueryTile, next = work.after(i);
      const bool continues = remaining > 1;
      cp_async_wait_all();
      __syncthreads();  // this tile has been loaded, and dS of the previous tile has been read
      const uint32_t q_tile = shared_address(tiles.q) + stage * sizeof(tiles.q[0]);
      const uint32_t dout_tile = shared_address(tiles.dout) + stage * sizeof(tiles.q[0]);
      if (kStages > 1 && continues) load_queries<kDrops>(p, tiles, dropout, work, next, stage ^ 1);
      const int64_t tile = static_cast<int64_t>(item.unit + i) * p.heads + work.head;
      uint32_t* const passed = p.turns + tile;

      // P and dS: left operands of steps of 16 queries.
      uint32_t probabilities[kRowTiles][kChunk / 4], dscores[kRowTiles][kChunk / 4];
#pragma unroll 1
      for (int chunk = at.share * kChunk; chunk < kQueryTile; chunk += Tiles::kSharing * kChunk) {
        // Positions from the warp's first key on: of the queries, and of those that see a key.
        const Range queries{first_query + chunk - key, first_query + chunk - key + kChunk};
        const Range seeing = p.band.of_keys().seen(0, kRows);
        if (queries.end <= seeing.begin || seeing.end <= queries.begin) {
          clear(probabilities);
          clear(dscores);
          if constexpr (!kShares) at.store_scores(ds_tile, chunk, dscores);
          continue;
        }
        float s[kRowTiles][kChunk / 2] = {}, dp[kRowTiles][kChunk / 2] = {};
        at.multiply(s, k_tile, q_tile, chunk);
        at.multiply(dp, v_tile, dout_tile, chunk);
        const bool clear_of_hidden =
            key + kRows <= item.length_k && p.band.of_keys().seen_by_all(0, kRows).has(queries);
        if (!clear_of_hidden) hide(s, queries.begin, item.length_k - key, p.band);
        at.template differentiate<kDrops>(tiles, stage, chunk, scale, s, dp, probabilities,
                                          dscores);
        if constexpr (!kShares) {
          at.store_scores(ds_tile, chunk, dscores);
          at.add(dv, probabilities, dout_tile, chunk);
          at.add(dk, dscores, q_tile, chunk);
        }
      }
      if constexpr (kShares) {
        at.store_scores(p_tile, at.share * kChunk, probabilities);
        at.store_scores(ds_tile, at.share * kChunk, dscores);
        __syncthreads();  // P and dS are complete; lse and D have been read
        if (kStages > 1 && continues) load_sums(p, tiles, work, next);
        at.add(dv, p_tile, dout_tile);
        pass();
        at.add(dk, ds_tile, q_tile);
      }
      if constexpr (kStages == 1) {
        __syncthreads();  // dS is complete; Q, dO, lse, D and bits have been read
        if (continues) {
          load_queries<kDrops>(p, tiles, dropout, work, next, 0);
          load_sums(p, tiles, work, next);
        }
      }
      if constexpr (!kShares) pass();
      const uint32_t seen = load_acquire(passed);  // arrives during the product

      float dq[kRowTiles][Tiles::kQueryColumns / 2] = {};
      at.add_dq(dq, k_tile);
      const Turn turn = work.turn(i);
      add_in_turn(p.sums + (tile * kWarps + warp) * (kFragments * kFragment), passed, turn,
                  reinterpret_cast<float (&)[kFragments][4]>(dq), seen);
      to_pass = turn.is_last ? nullptr : passed;
      if (turn.is_last) {
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
          const int query = first_query + at.query + m * 16 + lane_row();
          store<kCasts>(p.dq, tiles.of_queries, item.first_q + query, work.head, at.query_column,
                        item.length_q - query, p.width, dq[m], grad_scale);
        }
      }
      i = next;
      if constexpr (kStages > 1) stage ^= 1;
    }
    __syncthreads();  // all warps have added
    pass();

#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      const int own = key + m * 16 + lane_row(), rows = item.length_k - own;
      store<kCasts>(p.dk, tiles.of_keys, item.first_k + own, work.head, at.key_column, rows,
                    p.width, dk[m], grad_scale);
      store<kCasts>(p.dv, tiles.of_keys, item.first_k + own, work.head, at.key_column, rows,
                    p.width, dv[m], p.keep_scale);
    }
    cp_async_wait_all();  // if there is no tile of queries
    __syncthreads();      // the tiles have been read, and no warp waits for a turn
  }
  if (kCasts && lane == 0) {
    tiles.of_queries.of_warp[warp].publish(p.dq.cast);
    tiles.of_keys.of_warp[warp].publish(p.dk.cast);
  }
}

}  // namespace

void mma_bwd(const Call& a, const Backward& b) {
  const int32_t device = a.q.get_device();
  const cudaStream_t stream = current_stream(device);
  dispatch_long(a, b.casts.dq, [&](auto zero, auto width, auto drops, auto casts) {
    using T = decltype(zero);
    const auto start = [&](auto warps) {
      using Tiles = BwdTiles<width, warps>;
      Tensor memory;
      const ItemList list = list_items(a, Tiles::kKeys, false, memory, stream);
      const Workspace workspace = prepare_workspace(a, b, 1, kQueryTile * width, stream);
      BwdParams<T> params(a, b, list, workspace);
      launch_in_turns(a.op, attention_mma_bwd_kernel<T, width, warps, drops, casts>, params,
                      warps * kWarp, sizeof(Tiles), device, stream);
    };
    if constexpr (width == 128) {
      constexpr int kNeeded = sizeof(BwdTiles<width, kManyWarps>);
      if (shared_memory_of_block(device) >= kNeeded)
        return start(std::integral_constant<int, kManyWarps>());
    }
    start(std::integral_constant<int, kFewWarps>());
  });
}

}  // namespace lightseq::attention
