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

constexpr int kRowTiles = 2;                  // of a warp, of 16 rows
constexpr int kRows = kRowTiles * kWarpRows;  // of a warp
constexpr int kChunk = 32;                    // queries whose scores a warp computes at a time
constexpr int kQuerySteps = kQueryTile / 16;
constexpr int kFewWarps = kMmaWarps, kManyWarps = 2 * kFewWarps;
template <int kWidth>
constexpr int kSharing = kWidth == 64 ? 1 : 2;  // warps that share keys

template <typename T>
struct BwdParams {
  Packed<const T> dout, q, k, v;
  Result<T> dq, dk, dv;
  ItemList list;
  const float *lse, *rowsum;  // [H, Tq]: lse times log2(e), and D
  float* sums;                // dQ: [tiles of queries, H, warps, fragments, kFragment]
  uint32_t* turns;  // [tiles of queries, H]: how many blocks have added; zero at the start
  int rows_q, heads, width, most_together;
  bool causal;
  float scale, keep_scale, grad_scale;  // keep_scale: 1 / (1 - p); grad_scale: scale / (1 - p)
  Dropout dropout;
};

template <int kWidth, int kWarps>
struct BwdTiles {
  static constexpr int kKeys = kWarps / kSharing<kWidth> * kRows;
  static constexpr int kStages = kWarps / kFewWarps;  // tiles of queries
  using Queries = uint16_t[kQueryTile][kTileColumns<kWidth>];
  uint16_t k[kKeys][kTileColumns<kWidth>], v[kKeys][kTileColumns<kWidth>];
  Queries q[kStages], dout[kStages];
  uint16_t scores[kSharing<kWidth>][kKeys][kQueryTile];  // dS^T; if warps share keys, also P^T
  float lse[kQueryTile], rowsum[kQueryTile];
  uint32_t keep[kStages][kKeys / 32][kQueryTile];  // bits of 32 keys
  BlockStatistics<kWarps> of_queries, of_keys;     // of casts
};

// Writes sums of 16 rows, multiplied by `factor`. row, column: of the lane's first row, and of the
// first column; rows: how many exist from `row` on.
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

__device__ __forceinline__ void store_shared(uint32_t to, uint32_t word) {
  asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(word) : "memory");
}

// sums += left right. left(a, m, k) loads 16 rows of the left operand, right(b, n, k) two operands
// of 8 columns each; k: number of a step of 16 along the depth.
template <typename T, int kSteps, int kCount, typename Left, typename Right>
__device__ __forceinline__ void multiply_add(float (&sums)[kRowTiles][kCount], const Left& left,
                                             const Right& right) {
#pragma unroll
  for (int k = 0; k < kSteps; ++k) {
    uint32_t a[kRowTiles][4];
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) left(a[m], m, k);
#pragma unroll
    for (int n = 0; n < kCount / 4; n += 2) {
      uint32_t b[4];
      right(b, n, k);
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        mma<T>(four(sums[m], n), a[m], b[0], b[1]);
        mma<T>(four(sums[m], n + 1), a[m], b[2], b[3]);
      }
    }
  }
}

template <int kCount>
__device__ __forceinline__ void clear(float (&sums)[kRowTiles][kCount]) {
#pragma unroll
  for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
    for (int e = 0; e < kCount; ++e) sums[m][e] = 0.0f;
  }
}

template <typename T, int kWidth, int kWarps, bool kDrops, bool kCasts>
__global__ __launch_bounds__(kWarps* kWarp, kManyWarps / kWarps) void attention_mma_bwd_kernel(
    const __grid_constant__ BwdParams<T> p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  using Tiles = BwdTiles<kWidth, kWarps>;
  Tiles& tiles = *reinterpret_cast<Tiles*>(shared);
  constexpr int kColumns = kTileColumns<kWidth>, kRowBytes = 2 * kColumns;
  constexpr int kScoreBytes = 2 * kQueryTile;  // of a row of scores
  constexpr int kKeys = Tiles::kKeys;
  constexpr bool kShares = kSharing<kWidth> > 1;
  constexpr int kThreads = kWarps * kWarp;
  constexpr int kStages = Tiles::kStages;
  constexpr uint32_t kStageBytes = sizeof(typename Tiles::Queries);
  // Fragments of a warp: of its queries by its columns in dQ, and of its keys by its columns in dK
  // and dV.
  constexpr int kBeside = kWarps / (kQueryTile / kRows);  // warps with the same queries in dQ
  constexpr int kQueryColumns = kWidth / kBeside, kKeyColumns = kWidth / kSharing<kWidth>;
  constexpr int kFragments = kRowTiles * kQueryColumns / 8;
  using Work = KeyBlock<kKeys>;
  using Left = uint32_t (&)[4];

  const int warp = of_warp(threadIdx.x / kWarp), lane = threadIdx.x % kWarp;
  const int share = kShares ? warp % 2 : 0;
  const int key_of_warp = warp / kSharing<kWidth> * kRows, query_of_warp = warp / kBeside * kRows;
  const int key_column = share * kKeyColumns, query_column = warp % kBeside * kQueryColumns;
  const float scale = p.scale * kLog2E;
  const AttentionDropout dropout = kDrops ? AttentionDropout(p.dropout) : AttentionDropout();

  // Addresses of this lane, see Lane.
  const Lane at(lane);
  const uint32_t k_tile = shared_address(tiles.k), v_tile = shared_address(tiles.v);
  const uint32_t q_tiles = shared_address(tiles.q), dout_tiles = shared_address(tiles.dout);
  const uint32_t ds_tile = shared_address(tiles.scores[0]);
  const uint32_t p_tile = shared_address(tiles.scores[kSharing<kWidth> - 1]);
  const uint32_t own_keys = key_of_warp * kRowBytes + at.template left<kColumns>();
  const uint32_t by_rows = at.template right<kColumns>(), by_columns = at.template left<kColumns>();
  const uint32_t own_scores = swizzled<kQueryTile>(key_of_warp + lane_row(), 0) + lane_column() * 2;
  const uint32_t scores_by_keys = key_of_warp * kScoreBytes + at.template left<kQueryTile>();
  const uint32_t scores_by_queries =
      (ds_tile + at.template right<kQueryTile>()) ^ (query_of_warp / 8 * 16);
  // Eight columns from first + 8 n on, and the eight after them; n is even.
  const auto columns = [&](uint32_t tile, int first, int n) {
    const uint32_t lane_address = tile + by_columns;
    if constexpr (kWidth == 96) return lane_address ^ ((first / 8 + n) * 16);
    return lane_address ^ (first / 8 * 16) ^ (n * 16);  // first is a multiple of 32
  };

  const auto load_keys = [&](const Work& work) {
    const Item& item = work.item;
    const int first = item.first_k + item.start, length = item.length_k - item.start;
    load_rows<kWidth, kKeys, kThreads>(k_tile, p.k, work.head, first, length, p.width, threadIdx.x);
    load_rows<kWidth, kKeys, kThreads>(v_tile, p.v, work.head, first, length, p.width, threadIdx.x);
  };
  // Also dropout's bits.
  const auto load_queries = [&](const Work& work, int i, int stage) {
    const int first = work.item.first_q + i * kQueryTile, length = work.queries_from(i);
    const uint32_t offset = stage * kStageBytes;
    load_rows<kWidth, kQueryTile, kThreads>(q_tiles + offset, p.q, work.head, first, length,
                                            p.width, threadIdx.x);
    load_rows<kWidth, kQueryTile, kThreads>(dout_tiles + offset, p.dout, work.head, first, length,
                                            p.width, threadIdx.x);
    if constexpr (kDrops) {
#pragma unroll
      for (int unit = threadIdx.x; unit < kKeys / 32 * kQueryTile; unit += kThreads) {
        const int word = unit / kQueryTile, query = unit % kQueryTile;
        const uint32_t row = static_cast<uint32_t>(first + query) * p.heads + work.head;
        tiles.keep[stage][word][query] = dropout.keep_word(row, work.item.start / 32 + word);
      }
    }
  };
  // lse and D.
  const auto load_sums = [&](const Work& work, int i) {
    const int query = threadIdx.x % kQueryTile, which = threadIdx.x / kQueryTile;
    const float* const from = (which == 0 ? p.lse : p.rowsum) +
                              static_cast<int64_t>(work.head) * p.rows_q + work.item.first_q +
                              i * kQueryTile + query;
    if (which < 2) {
      cp_async_4_zfill(shared_address(which == 0 ? tiles.lse : tiles.rowsum) + 4 * query, from,
                       query < work.queries_from(i));
    }
  };

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
    const Work work(p.list, p.heads, p.causal, p.most_together, number);
    const Item& item = work.item;
    load_keys(work);
    load_queries(work, work.first, 0);
    load_sums(work, work.first);
    const int key = item.start + key_of_warp;  // of the sentence
    const float grad_scale = grad_scale_of(p.grad_scale, item.length_k);
    float dk[kRowTiles][kKeyColumns / 2], dv[kRowTiles][kKeyColumns / 2];
    clear(dk);
    clear(dv);

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
      const uint32_t q_tile = q_tiles + stage * kStageBytes;
      const uint32_t dout_tile = dout_tiles + stage * kStageBytes;
      if (kStages > 1 && continues) load_queries(work, next, stage ^ 1);
      const int64_t tile = static_cast<int64_t>(item.unit + i) * p.heads + work.head;
      uint32_t* const passed = p.turns + tile;

      // P and dS: left operands of steps of 16 queries.
      uint32_t probabilities[kRowTiles][kChunk / 16][4], dscores[kRowTiles][kChunk / 16][4];
      const auto store_scores = [&](uint32_t to, int chunk, const auto& scores) {
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
          for (int e = 0; e < kChunk / 4; ++e) {  // n = e / 2: 8 queries; e % 2: 8 keys
            store_shared(((to + own_scores) ^ ((chunk + e / 2 * 8) / 8 * 16)) +
                             (m * 16 + e % 2 * 8) * kScoreBytes,
                         scores[m][e / 4][e % 4]);
          }
        }
      };
#pragma unroll 1
      for (int chunk = share * kChunk; chunk < kQueryTile; chunk += kSharing<kWidth> * kChunk) {
        // A causal mask hides all keys of the warp.
        if (p.causal && first_query + chunk + kChunk <= key) {
#pragma unroll
          for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
            for (int e = 0; e < kChunk / 4; ++e) {
              probabilities[m][e / 4][e % 4] = dscores[m][e / 4][e % 4] = 0;
            }
          }
          if constexpr (!kShares) store_scores(ds_tile, chunk, dscores);
          continue;
        }
        float s[kRowTiles][kChunk / 2], dp[kRowTiles][kChunk / 2];
        clear(s);
        clear(dp);
        const auto multiply = [&](auto& sums, uint32_t keys, uint32_t queries) {
          multiply_add<T, kWidth / 16>(
              sums,
              [&](Left a, int m, int k) {
                ldmatrix_x4(a, beside(keys + own_keys, 2 * k) + m * 16 * kRowBytes);
              },
              [&](Left b, int n, int k) {
                ldmatrix_x4(
                    b, beside(queries + by_rows + chunk * kRowBytes, 2 * k) + n * 8 * kRowBytes);
              });
        };
        multiply(s, k_tile, q_tile);
        multiply(dp, v_tile, dout_tile);

        const bool clear_of_hidden =
            key + kRows <= item.length_k && !(p.causal && first_query + chunk < key + kRows - 1);
        if (!clear_of_hidden) {
#pragma unroll
          for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
            for (int e = 0; e < kChunk / 2; ++e) {
              const int query = first_query + chunk + e / 4 * 8 + lane_column() + e % 2;
              const int own = key + m * 16 + e / 2 % 2 * 8 + lane_row();
              if (own >= item.length_k || (p.causal && own > query)) s[m][e] = -INFINITY;
            }
          }
        }
#pragma unroll
        for (int n = 0; n < kChunk / 8; ++n) {
          const int query = chunk + n * 8 + lane_column();  // and query + 1
          const float2 lse = *reinterpret_cast<const float2*>(&tiles.lse[query]);
          const float2 rowsum = *reinterpret_cast<const float2*>(&tiles.rowsum[query]);
          // Bytes of bits: the highest one of byte b is the one of key lane_row() + 8 b.
          uint32_t keep[2] = {~0u, ~0u};
          if constexpr (kDrops) {
            const uint2 words =
                *reinterpret_cast<const uint2*>(&tiles.keep[stage][key_of_warp / 32][query]);
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
              uint32_t& of_p = probabilities[m][n / 2][n % 2 * 2 + half];
              of_p = pack_pair<T>(probability[0], probability[1]);
              if constexpr (kDrops) of_p &= mask_of_bits(keep[0], keep[1], 2 * m + half);
              dscores[m][n / 2][n % 2 * 2 + half] = pack_pair<T>(gradient[0], gradient[1]);
            }
          }
        }
        if constexpr (!kShares) {
          store_scores(ds_tile, chunk, dscores);
          const auto add = [&](auto& sums, const auto& scores, uint32_t queries) {
            multiply_add<T, kChunk / 16>(
                sums,
                [&](Left a, int m, int k) {
#pragma unroll
                  for (int j = 0; j < 4; ++j) a[j] = scores[m][k][j];
                },
                [&](Left b, int n, int k) {
                  ldmatrix_x4_trans(
                      b, beside(queries + by_columns + chunk * kRowBytes, n) + k * 16 * kRowBytes);
                });
          };
          add(dv, probabilities, dout_tile);
          add(dk, dscores, q_tile);
        }
      }
      if constexpr (kShares) {
        store_scores(p_tile, share * kChunk, probabilities);
        store_scores(ds_tile, share * kChunk, dscores);
        __syncthreads();  // P and dS are complete; lse and D have been read
        if (kStages > 1 && continues) load_sums(work, next);
        const auto add = [&](auto& sums, uint32_t scores, uint32_t queries) {
          multiply_add<T, kQuerySteps>(
              sums,
              [&](Left a, int m, int k) {
                ldmatrix_x4(a, beside(scores + scores_by_keys, 2 * k) + m * 16 * kScoreBytes);
              },
              [&](Left b, int n, int k) {
                ldmatrix_x4_trans(b, columns(queries, key_column, n) + k * 16 * kRowBytes);
              });
        };
        add(dv, p_tile, dout_tile);
        pass();
        add(dk, ds_tile, q_tile);
      }
      if constexpr (kStages == 1) {
        __syncthreads();  // dS is complete; Q, dO, lse, D and bits have been read
        if (continues) {
          load_queries(work, next, 0);
          load_sums(work, next);
        }
      }
      if constexpr (!kShares) pass();
      const uint32_t seen = load_acquire(passed);  // arrives during the product

      float dq[kRowTiles][kQueryColumns / 2];
      clear(dq);
      multiply_add<T, kKeys / 16>(
          dq,
          [&](Left a, int m, int k) {
            ldmatrix_x4_trans(a, beside(scores_by_queries, 2 * m) + k * 16 * kScoreBytes);
          },
          [&](Left b, int n, int k) {
            ldmatrix_x4_trans(b, columns(k_tile, query_column, n) + k * 16 * kRowBytes);
          });
      const Turn turn = work.turn(i);
      add_in_turn(p.sums + (tile * kWarps + warp) * (kFragments * kFragment), passed, turn,
                  reinterpret_cast<float (&)[kFragments][4]>(dq), seen);
      to_pass = turn.is_last ? nullptr : passed;
      if (turn.is_last) {
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
          const int query = first_query + query_of_warp + m * 16 + lane_row();
          store<kCasts>(p.dq, tiles.of_queries, item.first_q + query, work.head, query_column,
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
      store<kCasts>(p.dk, tiles.of_keys, item.first_k + own, work.head, key_column, rows, p.width,
                    dk[m], grad_scale);
      store<kCasts>(p.dv, tiles.of_keys, item.first_k + own, work.head, key_column, rows, p.width,
                    dv[m], p.keep_scale);
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
  const int64_t heads = a.q.size(1);
  dispatch_long(a.q, a.dropout_p, [&](auto zero, auto width, auto drops) {
    using T = decltype(zero);
    constexpr int kWidth = decltype(width)::value;
    const auto start = [&](auto warps) {
      constexpr int kWarps = decltype(warps)::value;
      using Tiles = BwdTiles<kWidth, kWarps>;
      Tensor memory;
      const ItemList list = list_items(a, Tiles::kKeys, false, memory, stream);
      const int64_t units = most_units(a);
      const Tensor turns = allocate(a.q, {units, heads}, ScalarType::Int);
      const Tensor sums = allocate(a.q, {units, heads, kQueryTile, kWidth}, ScalarType::Float);
      const OfQueries of_queries = attention::of_queries(a, b, turns, stream);
      BwdParams<T> params{.dout = packed<const T>(a.op, "dout", b.dout),
                          .q = packed<const T>(a.op, "q", a.q),
                          .k = packed<const T>(a.op, "k", a.k),
                          .v = packed<const T>(a.op, "v", a.v),
                          .dq = result_of<T>(a.op, "dq", b.dq, b.casts.dq),
                          .dk = result_of<T>(a.op, "dk", b.dk, b.casts.dk),
                          .dv = result_of<T>(a.op, "dv", b.dv, b.casts.dv),
                          .list = list,
                          .lse = of_queries.lse,
                          .rowsum = of_queries.rowsum,
                          .sums = sums.mutable_data_ptr<float>(),
                          .turns = static_cast<uint32_t*>(turns.data_ptr()),
                          .rows_q = static_cast<int>(a.q.size(0)),
                          .heads = static_cast<int>(heads),
                          .width = static_cast<int>(a.q.size(2)),
                          .most_together = 0,
                          .causal = a.causal,
                          .scale = static_cast<float>(a.scale),
                          .keep_scale = a.keep_scale(),
                          .grad_scale = a.grad_scale(),
                          .dropout = dropout_of(a)};
      dispatch_cast<T>(b.casts.dq, [&](auto is_cast) {
        launch_in_turns(a.op,
                        attention_mma_bwd_kernel<T, kWidth, kWarps, decltype(drops)::value,
                                                 decltype(is_cast)::value>,
                        params, kWarps * kWarp, sizeof(Tiles), device, stream);
      });
    };
    if constexpr (kWidth == 128) {
      constexpr int kNeeded = sizeof(BwdTiles<kWidth, kManyWarps>);
      if (shared_memory_of_block(device) >= kNeeded)
        return start(std::integral_constant<int, kManyWarps>());
    }
    start(std::integral_constant<int, kFewWarps>());
  });
}

}  // namespace lightseq::attention
