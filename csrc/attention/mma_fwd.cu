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

#include "attention/cast.cuh"
#include "attention/mma.cuh"

namespace lightseq::attention {
namespace {

constexpr int kHalves = 2 * kRowTiles;           // a lane has rows lane / 4 + 8 * half of a warp
constexpr int kQueries = kRowTiles * kWarpRows;  // of a warp
static_assert(kQueries * kMmaWarps == kTile);

template <int kWidth>
constexpr int kKeys = kWidth == 64 ? 64 : 32;  // of a tile
template <int kWidth>
constexpr bool kKeepsQueries = kWidth == 64;  // in registers
template <int kWidth>
constexpr int kRowBytes = 2 * kTileColumns<kWidth>;

template <typename T>
struct FwdParams : MmaParams<T> {
  T* out;      // [Tq, H, D]
  float* lse;  // [Tq, H]
  Cast cast;   // of out
};

template <int kWidth>
struct FwdTiles {
  using Keys = uint16_t[kKeys<kWidth>][kTileColumns<kWidth>];
  uint16_t q[kTile][kTileColumns<kWidth>];
  Keys k[2], v[2];
  // Of the block's next items. Thread 0 claims each item two items before it begins, so that no
  // thread waits for the counter.
  int numbers[2];
  BlockStatistics<kMmaWarps> statistics;
};

// An item, its head, and its tiles of keys: last ... first, at least one.
template <typename T, int kWidth>
struct Job {
  Item item;
  int head, first, last;

  __device__ __forceinline__ Job(const FwdParams<T>& p, int number) {
    item = p.list.load(number / p.heads);
    head = number % p.heads;
    const Range seen = p.band.seen(item.start, kTile).within(item.length_k);
    first = seen.begin / kKeys<kWidth>;
    last = max(seen.end - 1, 0) / kKeys<kWidth>;
  }
};

// Loads the warp's queries.
template <typename T, int kWidth>
__device__ __forceinline__ void load_queries(const FwdParams<T>& p, uint32_t rows,
                                             const Job<T, kWidth>& job, int first_row, int lane) {
  const int row = job.item.start + first_row;
  load_rows<kWidth, kQueries, kWarp>(rows, p.q, job.head, job.item.first_q + row,
                                     job.item.length_q - row, p.width, lane);
}

template <typename T, int kWidth>
__device__ __forceinline__ void load_keys(const FwdParams<T>& p, FwdTiles<kWidth>& tiles,
                                          const Job<T, kWidth>& job, int tile, int stage) {
  const int row = tile * kKeys<kWidth>;
  const int first = job.item.first_k + row, length = job.item.length_k - row;
  load_rows<kWidth, kKeys<kWidth>, kMmaThreads>(shared_address(tiles.k[stage]), p.k, job.head,
                                                first, length, p.width, threadIdx.x);
  load_rows<kWidth, kKeys<kWidth>, kMmaThreads>(shared_address(tiles.v[stage]), p.v, job.head,
                                                first, length, p.width, threadIdx.x);
}

// Dropout bits of a lane. The four lanes of a quad have the same rows, each with kWords words of
// bits. Unit u is word u % kWords of row u / kWords; lane c draws units 4 * i + c.
template <int kWords, int kDraws>
__device__ __forceinline__ void draw(uint32_t (&keep)[kDraws], const AttentionDropout& dropout,
                                     int token, int heads, int head, int tile, int lane) {
#pragma unroll
  for (int i = 0; i < kDraws; ++i) {
    const int unit = 4 * i + lane % 4;
    const uint32_t row = static_cast<uint32_t>(token + unit / kWords * 8) * heads + head;
    keep[i] = bits_of_lane(dropout.keep_word(row, tile * kWords + unit % kWords));
  }
}

// The softmax of a lane's rows, over the keys so far.
template <typename T>
struct Softmax {
  float shift[kRowTiles][2], sum[kRowTiles][2] = {};  // sum: of the lane's keys
  bool is_empty = true;

  // Sets the shift, or raises it if scores exceed it by too much. Then sums and results shrink.
  template <int kScores, int kResults>
  __device__ __forceinline__ void set_shift(const float (&s)[kRowTiles][kScores],
                                            float (&o)[kRowTiles][kResults], float scale) {
    float largest[kRowTiles][2];
    bool outgrown = false;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) find_largest(largest[m], by_group(s[m]));
#pragma unroll
    for (int i = 0; i < 2 * kRowTiles; ++i) {
      const float most = largest[i / 2][i % 2];
      float& at = shift[i / 2][i % 2];
      if (is_empty) {
        at = fmaxf(most, kLeastShift);
      } else {
        outgrown |= (most - at) * scale > kTolerance;
      }
    }
    is_empty = false;
    if (!__any_sync(kAllLanes, outgrown)) return;
#pragma unroll
    for (int m = 0; m < kRowTiles; ++m) {
      raise_shift<T>(shift[m], sum[m], by_group(o[m]), largest[m], scale);
    }
  }
};

// o += P V. P: exponentials of the scores, dropped where bits of `keep` are zero. They are computed
// for 16 keys at a time, and added to the softmax's sum. values: address of the lane.
template <typename T, int kWidth, bool kDrops, int kDraws>
__device__ __forceinline__ void add_values(float (&o)[kRowTiles][kWidth / 2], Softmax<T>& softmax,
                                           const float (&s)[kRowTiles][kKeys<kWidth> / 2],
                                           const uint32_t (&keep)[kDraws], float scale,
                                           uint32_t values) {
  float offset[kHalves];
#pragma unroll
  for (int half = 0; half < kHalves; ++half) {
    offset[half] = -softmax.shift[half / 2][half % 2] * scale;
  }
  const auto probabilities = [&](Fragments a, int m, int k) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int half = 2 * m + i % 2, n = 2 * k + i / 2, e = 4 * n + i % 2 * 2;
      float x[2];
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        x[j] = exp2_approximate(fmaf(s[m][e + j], scale, offset[half]));
        softmax.sum[m][i % 2] += x[j];
      }
      a[i] = pack_pair<T>(x[0], x[1]);
      if constexpr (kDrops) {
        const int unit = half * (kKeys<kWidth> / 32) + n / 4, bit = unit % 4 * 2;
        const uint32_t word = keep[unit / 4];
        a[i] &= mask_of_bits(word << (7 - bit), word << (6 - bit), n % 4);
      }
    }
  };
  multiply_add<T, kKeys<kWidth> / 16>(o, probabilities, [&](Fragments b, int n, int k) {
    ldmatrix_x4_trans(b, beside(values, n) + k * 16 * kRowBytes<kWidth>);
  });
}

template <typename T, int kWidth, bool kDrops, bool kCasts>
__global__ __launch_bounds__(kMmaThreads, 2) void attention_mma_fwd_kernel(
    const __grid_constant__ FwdParams<T> p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  FwdTiles<kWidth>& tiles = *reinterpret_cast<FwdTiles<kWidth>*>(shared);
  constexpr int kWords = kKeys<kWidth> / 32;  // of dropout bits, for each query
  const int warp = of_warp(threadIdx.x / kWarp), lane = threadIdx.x % kWarp;
  const int first_row = warp * kQueries;  // of the item
  const float scale = p.scale * kLog2E;
  const AttentionDropout dropout = kDrops ? AttentionDropout(p.dropout) : AttentionDropout();

  const Lane at{lane};
  const uint32_t q_rows = shared_address(tiles.q) + first_row * kRowBytes<kWidth>;
  const uint32_t q_lane = q_rows + at.left<kTileColumns<kWidth>>();
  const uint32_t k_lane = shared_address(tiles.k) + at.right<kTileColumns<kWidth>>();
  const uint32_t v_lane = shared_address(tiles.v) + at.left<kTileColumns<kWidth>>();
  const auto read_queries = [&](Fragments a, int m, int k) {
    ldmatrix_x4(a, beside(q_lane, 2 * k) + m * 16 * kRowBytes<kWidth>);
  };

  if constexpr (kCasts) tiles.statistics.clear();
  const int count = p.list.counts[0] * p.heads;
  if (threadIdx.x == 0) {
    tiles.numbers[1] = claim(p.list);
    tiles.numbers[0] = claim(p.list);
  }
  __syncthreads();
  int number = tiles.numbers[1], place = 0, stage = 0;
  if (number >= count) return;
  Job<T, kWidth> job(p, number);
  load_queries(p, q_rows, job, first_row, lane);
  load_keys(p, tiles, job, job.last, stage);
  cp_async_commit();

  while (true) {
    const int claimed = threadIdx.x == 0 ? claim(p.list) : 0;
    const Item& item = job.item;
    const int position = item.start + first_row;  // of the warp's first query
    const bool works = position < item.length_q;
    const int token = item.first_q + position + lane / 4;

    float o[kRowTiles][kWidth / 2] = {};
    uint32_t q[kRowTiles][kWidth / 16][4];
    Softmax<T> softmax;
    Job<T, kWidth> next = job;

#pragma unroll 1
    for (int t = job.last; t >= job.first; --t, stage ^= 1) {
      // After the barrier, all threads can read this tile and have finished the previous one.
      cp_async_wait_all();
      __syncthreads();
      if (t > job.first) {
        load_keys(p, tiles, job, t - 1, stage ^ 1);
      } else {
        number = tiles.numbers[place];
        if (number < count) {
          next = Job<T, kWidth>(p, number);
          load_keys(p, tiles, next, next.last, stage ^ 1);
        }
      }
      if constexpr (kKeepsQueries<kWidth>) {
        if (t == job.last) {
#pragma unroll
          for (int m = 0; m < kRowTiles; ++m) {
#pragma unroll
            for (int k = 0; k < kWidth / 16; ++k) read_queries(q[m][k], m, k);
          }
        }
      }
      const int first_key = t * kKeys<kWidth>;
      const Range keys{first_key, first_key + kKeys<kWidth>};
      const Range seen = p.band.seen(position, kQueries);
      const bool attends = works && seen.begin < keys.end && keys.begin < seen.end;

      float s[kRowTiles][kKeys<kWidth> / 2];
      uint32_t keep[kHalves * kWords / 4];
      if (attends) {
        if constexpr (kDrops) draw<kWords>(keep, dropout, token, p.heads, job.head, t, lane);
        clear(s);
        const uint32_t k_tile = k_lane + stage * sizeof(tiles.k[0]);
        multiply_add<T, kWidth / 16>(
            s,
            [&](Fragments a, int m, int k) {
              if constexpr (kKeepsQueries<kWidth>) {
#pragma unroll
                for (int i = 0; i < 4; ++i) a[i] = q[m][k][i];
              } else {
                read_queries(a, m, k);
              }
            },
            [&](Fragments b, int n, int k) {
              ldmatrix_x4(b, beside(k_tile, 2 * k) + n * 8 * kRowBytes<kWidth>);
            });
      }
      if (t == job.first && number < count) {
        __syncwarp();  // all lanes have read the queries
        load_queries(p, q_rows, next, first_row, lane);
      }
      cp_async_commit();
      if (!attends) continue;
      if (!p.band.seen_by_all(position, kQueries).within(item.length_k).has(keys)) {
#pragma unroll
        for (int m = 0; m < kRowTiles; ++m) {
          hide(by_group(s[m]), position + m * 16, first_key, item.length_k, p.band, INT_MIN);
        }
      }
      softmax.set_shift(s, o, scale);
      add_values<T, kWidth, kDrops>(o, softmax, s, keep, scale,
                                    v_lane + stage * sizeof(tiles.v[0]));
    }

    // This place was last read during the previous item. It is read again after a barrier of the
    // next item.
    if (threadIdx.x == 0) tiles.numbers[place ^ 1] = claimed;
    place ^= 1;
    if (works) {
#pragma unroll
      for (int m = 0; m < kRowTiles; ++m) {
        const int rows = item.length_q - position - m * 16 - lane_row();
        const int64_t line = static_cast<int64_t>(token + m * 16) * p.heads + job.head;
        const float2 factor = end_softmax<T>(softmax.shift[m], softmax.sum[m], scale, p.keep_scale,
                                             item.length_k > 0, p.lse + line, p.heads, rows);
        store_sums<T>(p.out + line * p.width, static_cast<int64_t>(p.heads) * p.width, rows,
                      p.width, o[m], factor.x, factor.y);
        if constexpr (kCasts) {
          cast_sums(p.cast, tiles.statistics, token + m * 16, job.head * p.width, rows, p.width,
                    by_group(o[m]), factor.x, factor.y);
        }
      }
    }
    if (number >= count) break;
    job = next;
  }
  if (kCasts && lane == 0) tiles.statistics.of_warp[warp].publish(p.cast);
}

}  // namespace

void mma_fwd(const Call& a, const Forward& f) {
  const int32_t device = a.q.get_device();
  const cudaStream_t stream = current_stream(device);
  Tensor memory;
  const ItemList list = list_items(a, 0, true, memory, stream);
  dispatch_long(a, f.cast, [&](auto zero, auto width, auto drops, auto casts) {
    using T = decltype(zero);
    constexpr size_t kShared = sizeof(FwdTiles<width>);
    const auto kernel = attention_mma_fwd_kernel<T, width, drops, casts>;
    const FwdParams<T> params{
        {a, list}, static_cast<T*>(f.out.data_ptr()), f.lse.mutable_data_ptr<float>(), f.cast};
    launch({.op = a.op,
            .grid = static_cast<unsigned>(resident_blocks(kernel, kMmaThreads, device, kShared)),
            .block = kMmaThreads,
            .shared = kShared,
            .stream = stream},
           kernel, params);
  });
}

}  // namespace lightseq::attention
