// Attention of long sentences in 16 bits, forward, by mma.sync. short_fwd.cu has the formula,
// mma.cuh explains the kernel's blocks.
//
// A warp has 32 queries of a head, in two tiles of 16, so it reads keys and values from shared
// memory half as often as with 16. Blocks iterate over tiles of keys, the last one first, and load
// the next tile meanwhile, or the first tiles of the next item. Probabilities and results stay in
// registers.
//
//   saved for backward   out, and lse = log(sum of exp(scores)), float32 [T, H]
//   bytes moved          q, out and lse once; k and v once for each tile of queries, from the cache
//   determinism          every sum has a fixed order, which depends only on the sentence

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cfloat>

#include "attention/cast.cuh"
#include "attention/mma.cuh"

namespace lightseq::attention {
namespace {

constexpr int kRowTiles = 2;                     // of a warp, of 16 queries
constexpr int kHalves = 2 * kRowTiles;           // a lane has rows lane / 4 + 8 * half of a warp
constexpr int kQueries = kRowTiles * kWarpRows;  // of a warp
static_assert(kQueries * kMmaWarps == kTile);

template <int kWidth>
constexpr int kKeys = kWidth == 64 ? 64 : 32;  // of a tile

template <typename T>
struct FwdParams {
  Packed<const T> q, k, v;
  ItemList list;
  T* out;      // [Tq, H, D]
  float* lse;  // [Tq, H]
  int heads, width;
  bool causal;
  float scale, keep_scale;  // keep_scale: 1 / (1 - p)
  Dropout dropout;
  Cast cast;  // of out
};

// The numbers of a block's next items. Thread 0 claims each item two items before it begins, so
// that no thread waits for the counter.
struct NextItems {
  int numbers[2];
};

template <int kWidth>
struct FwdTiles {
  using Keys = uint16_t[kKeys<kWidth>][kTileColumns<kWidth>];
  uint16_t q[kTile][kTileColumns<kWidth>];
  Keys k[2], v[2];
  NextItems next;
  BlockStatistics<kMmaWarps> statistics;
};

// An item, its head, and the number of tiles of keys, at least one.
template <typename T, int kWidth>
struct Job {
  Item item;
  int head, tiles;

  __device__ __forceinline__ Job(const FwdParams<T>& p, int number) {
    item = p.list.load(number / p.heads);
    head = number % p.heads;
    const int end = p.causal ? min(item.length_k, item.start + kTile) : item.length_k;
    tiles = max((end + kKeys<kWidth> - 1) / kKeys<kWidth>, 1);
  }
};

template <typename T, int kWidth, bool kDrops, bool kCasts>
__global__ __launch_bounds__(kMmaThreads, 2) void attention_mma_fwd_kernel(
    const __grid_constant__ FwdParams<T> p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  FwdTiles<kWidth>& tiles = *reinterpret_cast<FwdTiles<kWidth>*>(shared);
  constexpr int kColumns = kTileColumns<kWidth>, kRowBytes = 2 * kColumns;
  constexpr int kSteps = kWidth / 16;           // products over the columns of a head
  constexpr int kBlocks = kKeys<kWidth> / 8;    // of 8 keys
  constexpr int kWords = kKeys<kWidth> / 32;    // of dropout bits, for each query
  constexpr int kDraws = kHalves * kWords / 4;  // of a lane
  constexpr bool kKeepsQueries = kWidth == 64;  // in registers
  const int warp = of_warp(threadIdx.x / kWarp), lane = threadIdx.x % kWarp, c = lane % 4;
  const int first_row = warp * kQueries;  // of the item
  const float scale = p.scale * kLog2E;
  const int64_t token_stride = static_cast<int64_t>(p.heads) * p.width;
  const AttentionDropout dropout = kDrops ? AttentionDropout(p.dropout) : AttentionDropout();

  const Lane at(lane);
  const uint32_t q_rows = shared_address(tiles.q) + first_row * kRowBytes;
  const uint32_t q_lane = q_rows + at.left<kColumns>();
  const uint32_t k_lane = shared_address(tiles.k) + at.right<kColumns>();
  const uint32_t v_lane = shared_address(tiles.v) + at.left<kColumns>();

  using Work = Job<T, kWidth>;
  const auto load_queries = [&](const Work& work) {
    const int row = work.item.start + first_row;
    load_rows<kWidth, kQueries, kWarp>(q_rows, p.q, work.head, work.item.first_q + row,
                                       work.item.length_q - row, p.width, lane);
  };
  const auto load_keys = [&](const Work& work, int tile, int stage) {
    const int row = tile * kKeys<kWidth>;
    const int first = work.item.first_k + row, length = work.item.length_k - row;
    load_rows<kWidth, kKeys<kWidth>, kMmaThreads>(shared_address(tiles.k[stage]), p.k, work.head,
                                                  first, length, p.width, threadIdx.x);
    load_rows<kWidth, kKeys<kWidth>, kMmaThreads>(shared_address(tiles.v[stage]), p.v, work.head,
                                                  first, length, p.width, threadIdx.x);
  };

  if constexpr (kCasts) tiles.statistics.clear();
  const int count = p.list.counts[0] * p.heads;
  if (threadIdx.x == 0) {
    tiles.next.numbers[1] = claim(p.list);
    tiles.next.numbers[0] = claim(p.list);
  }
  __syncthreads();
  int number = tiles.next.numbers[1], place = 0, stage = 0;
  if (number >= count) return;
  Work work(p, number);
  load_queries(work);
  load_keys(work, work.tiles - 1, stage);
  cp_async_commit();

  while (true) {
    const int claimed = threadIdx.x == 0 ? claim(p.list) : 0;
    const Item& item = work.item;
    const int position = item.start + first_row;  // of the warp's first query
    const bool works = position < item.length_q;
    const int64_t token = item.first_q + position + lane / 4;

    float o[kRowTiles][kWidth / 2];
    float shift[kHalves], sum[kHalves];
    uint32_t q[kRowTiles][kSteps][4];
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
      for (int e = 0; e < kWidth / 2; ++e) o[m][e] = 0.0f;
    }
#pragma unroll
    for (int half = 0; half < kHalves; ++half) sum[half] = 0.0f;
    bool is_first = true;  // tile of keys of this warp
    Work next = work;

#pragma unroll 1
    for (int t = work.tiles - 1; t >= 0; --t, stage ^= 1) {
      // After the barrier, all threads can read this tile and have finished the previous one.
      cp_async_wait_all();
      __syncthreads();
      if (t > 0) {
        load_keys(work, t - 1, stage ^ 1);
      } else {
        number = tiles.next.numbers[place];
        if (number < count) {
          next = Work(p, number);
          load_keys(next, next.tiles - 1, stage ^ 1);
        }
      }
      if constexpr (kKeepsQueries) {
        if (t == work.tiles - 1) {
#pragma unroll
          for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
            for (int k = 0; k < kSteps; ++k) {
              ldmatrix_x4(q[m][k], beside(q_lane, 2 * k) + m * 16 * kRowBytes);
            }
          }
        }
      }
      // first_key and position are multiples of 32. So a causal mask hides the tile's first key
      // from all of the warp's 32 queries or from none.
      const int first_key = t * kKeys<kWidth>;
      const bool attends = works && !(p.causal && first_key > position);

      float s[kRowTiles][kKeys<kWidth> / 2];
      uint32_t keep[kDraws];
      if (attends) {
        // The four lanes of a quad have the same rows, each with kWords words of bits. Unit u is
        // word u % kWords of row u / kWords; lane c draws units 4 * i + c.
        if constexpr (kDrops) {
#pragma unroll
          for (int i = 0; i < kDraws; ++i) {
            const int unit = 4 * i + c;
            const uint32_t row =
                static_cast<uint32_t>(token + unit / kWords * 8) * p.heads + work.head;
            keep[i] = bits_of_lane(dropout.keep_word(row, t * kWords + unit % kWords));
          }
        }
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
          for (int e = 0; e < kKeys<kWidth> / 2; ++e) s[m][e] = 0.0f;
        }
        const uint32_t k_tile = k_lane + stage * sizeof(tiles.k[0]);
#pragma unroll
        for (int k = 0; k < kSteps; ++k) {
          uint32_t left[kRowTiles][4];
#pragma unroll
          for (int m = 0; m < kRowTiles; ++m) {
            if constexpr (kKeepsQueries) {
#pragma unroll
              for (int i = 0; i < 4; ++i) left[m][i] = q[m][k][i];
            } else {
              ldmatrix_x4(left[m], beside(q_lane, 2 * k) + m * 16 * kRowBytes);
            }
          }
#pragma unroll
          for (int n = 0; n < kBlocks; n += 2) {
            uint32_t right[4];
            ldmatrix_x4(right, beside(k_tile, 2 * k) + n * 8 * kRowBytes);
#pragma unroll
            for (int m = 0; m < kRowTiles; ++m) {
              mma<T>(four(s[m], n), left[m], right[0], right[1]);
              mma<T>(four(s[m], n + 1), left[m], right[2], right[3]);
            }
          }
        }
      }
      if (t == 0 && number < count) {
        __syncwarp();  // all lanes have read the queries
        load_queries(next);
      }
      cp_async_commit();
      if (!attends) continue;

      const int clear_end = min(item.length_k, p.causal ? position + 1 : item.length_k);
      if (first_key + kKeys<kWidth> > clear_end) {
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
          for (int e = 0; e < kKeys<kWidth> / 2; ++e) {
            const int key = first_key + e / 4 * 8 + c * 2 + e % 2;
            const int query = position + m * 16 + e / 2 % 2 * 8 + lane / 4;
            if (key >= item.length_k || (p.causal && key > query)) s[m][e] = -INFINITY;
          }
        }
      }

      float largest[kHalves];
      bool outgrown = false;
#pragma unroll
      for (int half = 0; half < kHalves; ++half) {
        float x = -INFINITY;
#pragma unroll
        for (int e = half % 2 * 2; e < kKeys<kWidth> / 2; e += 4) {
          x = fmaxf(x, fmaxf(s[half / 2][e], s[half / 2][e + 1]));
        }
        x = fmaxf(x, __shfl_xor_sync(kAllLanes, x, 1));
        largest[half] = fmaxf(x, __shfl_xor_sync(kAllLanes, x, 2));
      }
      if (is_first) {
        // Finite even if the sentence has no keys: then all exponentials are zero.
#pragma unroll
        for (int half = 0; half < kHalves; ++half) shift[half] = fmaxf(largest[half], -FLT_MAX);
        is_first = false;
      } else {
#pragma unroll
        for (int half = 0; half < kHalves; ++half) {
          outgrown |= (largest[half] - shift[half]) * scale > kTolerance;
        }
        if (__any_sync(kAllLanes, outgrown)) {
#pragma unroll
          for (int half = 0; half < kHalves; ++half) {
            const float grown = fmaxf(shift[half], largest[half]);
            const float shrink = exp2_approximate((shift[half] - grown) * scale);
            shift[half] = grown;
            sum[half] *= shrink;
#pragma unroll
            for (int e = half % 2 * 2; e < kWidth / 2; e += 4) {
              o[half / 2][e] *= shrink;
              o[half / 2][e + 1] *= shrink;
            }
          }
        }
      }

      float offset[kHalves];
#pragma unroll
      for (int half = 0; half < kHalves; ++half) offset[half] = -shift[half] * scale;
      const uint32_t v_tile = v_lane + stage * sizeof(tiles.v[0]);
#pragma unroll
      for (int k = 0; k < kBlocks / 2; ++k) {  // 16 keys
        uint32_t left[kRowTiles][4];
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int half = 2 * m + i % 2, n = 2 * k + i / 2, e = 4 * n + i % 2 * 2;
            float x[2];
#pragma unroll
            for (int j = 0; j < 2; ++j) {
              x[j] = exp2_approximate(fmaf(s[m][e + j], scale, offset[half]));
              sum[half] += x[j];
            }
            left[m][i] = pack_pair<T>(x[0], x[1]);
            if constexpr (kDrops) {
              const int unit = half * kWords + n / 4, bit = unit % 4 * 2;
              const uint32_t word = keep[unit / 4];
              left[m][i] &= mask_of_bits(word << (7 - bit), word << (6 - bit), n % 4);
            }
          }
        }
#pragma unroll
        for (int n = 0; n < kWidth / 8; n += 2) {
          uint32_t right[4];
          ldmatrix_x4_trans(right, beside(v_tile, n) + k * 16 * kRowBytes);
#pragma unroll
          for (int m = 0; m < kRowTiles; ++m) {
            mma<T>(four(o[m], n), left[m], right[0], right[1]);
            mma<T>(four(o[m], n + 1), left[m], right[2], right[3]);
          }
        }
      }
    }

    // This place was last read during the previous item. It is read again after a barrier of the
    // next item.
    if (threadIdx.x == 0) tiles.next.numbers[place ^ 1] = claimed;
    place ^= 1;
    if (works) {
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        const int rows = item.length_q - position - m * 16 - lane / 4;
        float* const lse = p.lse + (token + m * 16) * p.heads + work.head;
        float factor[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float total = sum[2 * m + half] + __shfl_xor_sync(kAllLanes, sum[2 * m + half], 1);
          total += __shfl_xor_sync(kAllLanes, total, 2);
          const bool sees = item.length_k > 0;
          factor[half] = sees ? __fdividef(p.keep_scale, total) : 0.0f;
          if (c == 0 && rows > half * 8) {
            lse[half * 8 * p.heads] =
                sees ? (shift[2 * m + half] * scale + __log2f(total)) * Base<T>::kLn : 0.0f;
          }
        }
        store_sums<T>(p.out + (token + m * 16) * token_stride + work.head * p.width, token_stride,
                      rows, p.width, o[m], factor[0], factor[1]);
        if constexpr (kCasts) {
          cast_sums(p.cast, tiles.statistics, token + m * 16, work.head * p.width, rows, p.width,
                    by_group(o[m]), factor[0], factor[1]);
        }
      }
    }
    if (number >= count) break;
    work = next;
  }
  if (kCasts && lane == 0) tiles.statistics.of_warp[warp].publish(p.cast);
}

}  // namespace

void mma_fwd(const Call& a, const Forward& f) {
  const int32_t device = a.q.get_device();
  const cudaStream_t stream = current_stream(device);
  Tensor memory;
  const ItemList list = list_items(a, 0, true, memory, stream);
  dispatch_long(a.q, a.dropout_p, [&](auto zero, auto width, auto drops) {
    using T = decltype(zero);
    constexpr int kWidth = decltype(width)::value;
    constexpr size_t kShared = sizeof(FwdTiles<kWidth>);
    const FwdParams<T> params{.q = packed<const T>(a.op, "q", a.q),
                              .k = packed<const T>(a.op, "k", a.k),
                              .v = packed<const T>(a.op, "v", a.v),
                              .list = list,
                              .out = static_cast<T*>(f.out.data_ptr()),
                              .lse = f.lse.mutable_data_ptr<float>(),
                              .heads = static_cast<int>(a.q.size(1)),
                              .width = static_cast<int>(a.q.size(2)),
                              .causal = a.causal,
                              .scale = static_cast<float>(a.scale),
                              .keep_scale = a.keep_scale(),
                              .dropout = dropout_of(a),
                              .cast = f.cast};
    dispatch_cast<T>(f.cast, [&](auto casts) {
      const auto kernel =
          attention_mma_fwd_kernel<T, kWidth, decltype(drops)::value, decltype(casts)::value>;
      launch({.op = a.op,
              .grid = static_cast<unsigned>(resident_blocks(kernel, kMmaThreads, device, kShared)),
              .block = kMmaThreads,
              .shared = kShared,
              .stream = stream},
             kernel, params);
    });
  });
}

}  // namespace lightseq::attention
