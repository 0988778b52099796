// Self-attention of a decode step in 16-bit numbers: a warp takes a head and up to eight hypotheses
// of a slot, 16 positions at a time. Hypotheses with the same ancestors at all 16 positions are a
// family, and meet their keys on the tensor cores together.
//
// Keys and values come through a ring in shared memory, which belongs to the warp. What is copied
// at a time is a load: as many families of a tile of positions as there is room for, and every row
// of the cache that they read there once, whoever shares it. One load is on its way while the one
// before it is computed with. Which families make a load does not show in the results.
// Queries, new values and results, which lanes read and write as chunks and compute with as
// fragments, change from one to the other on the ring's last rows, its desk.
#pragma once

#include <cstdint>

#include "common/decode_attention.cuh"
#include "common/mma.cuh"
#include "common/query_tile.cuh"

namespace lightseq::decode_attention {

constexpr int kRingWarps = 4;                    // of a block
constexpr int kRingRows = 48;                    // a key and a value each
constexpr int kLoadRows = kRingRows - kKeyTile;  // at most: the next load has room for one family
constexpr int kDesk = kRingRows - kQueryTile;    // rows that are free as long as one load is there

// Families of a tile of positions, and where in the ring a lane's place of the tile has its row.
struct Load {
  int first, rows;                   // in the ring
  int last;                          // place of the tile that exists; those behind are copies
  uint64_t slots = 0, families = 0;  // a byte each: row of the ring; bits of its hypotheses
};

// Eight numbers are a chunk, and chunks change places within a row, so that eight rows in a line
// have their n-th chunks in eight different groups of banks.
template <typename T, int kWidth>
struct alignas(128) Ring {
  static constexpr int kChunks = kWidth / kSize, kAtOnce = kWarp / kChunks;

  T rows[kRingRows][2][kWidth];  // keys, and their values
  const T* sources[kLoadRows];   // keys that the next load has to copy

  static __device__ __forceinline__ int wrap(int row) {
    return row < kRingRows ? row : row - kRingRows;
  }
  __device__ __forceinline__ T* chunk(int row, int side, int number) {
    return &rows[row][side][(number ^ row % 8) * kSize];
  }

  // Channels that do not exist are copies of the last ones: they meet a query of 0, or are not
  // stored. All calls are counted by wait_for_older().
  __device__ __forceinline__ void copy(const Load& load, int64_t to_value, int width) {
    constexpr int kUnroll = kKeyTile / kAtOnce;
    const int number = threadIdx.x % kChunks, column = min(number * kSize, width - kSize);
    __syncwarp();
#pragma unroll 1
    for (int i = threadIdx.x / kChunks; i < load.rows; i += kKeyTile) {
      const T* keys[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) keys[u] = sources[i + u * kAtOnce] + column;
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (i + u * kAtOnce >= load.rows) continue;
        const int row = wrap(load.first + i + u * kAtOnce);
        copy_async(chunk(row, 0, number), keys[u], true);
        copy_async(chunk(row, 1, number), keys[u] + to_value, true);
      }
    }
    asm volatile("cp.async.commit_group;" ::: "memory");
  }

  // For all copies but the newest load's.
  __device__ __forceinline__ void wait_for_older() {
    asm volatile("cp.async.wait_group 1;" ::: "memory");
    __syncwarp();
  }
};

// Lane 4g + t holds, as mma.cuh has it, rows g and g + 8 of left operands and of results, columns g
// of right operands. Scores are [keys, queries] = K Q^T, results are [channels, queries] = V^T P^T.
template <typename T, int kWidth>
struct AncestorTile {
  using Rows = Ring<T, kWidth>;

  uint32_t q[kWidth / kSize];           // query g, channels 8i + 2t and the next
  Softmax<T, 2, kWidth / kSize> state;  // queries 2t and 2t + 1, channels 8i + g
  const int g = threadIdx.x / 4, t = threadIdx.x % 4;

  // Queries from the ring's desk, where they lie as keys.
  __device__ __forceinline__ void take_queries(Rows& ring) {
#pragma unroll
    for (int i = 0; i < kWidth / kSize; i += 4) {
      uint32_t four[4];
      load_blocks(four, ring.chunk(kDesk + threadIdx.x % 8, 0, i + threadIdx.x / 8));
#pragma unroll
      for (int n = 0; n < 4; ++n) q[i + n] = four[n];
    }
  }

  // The first results, from values on the desk; none are zeros.
  __device__ __forceinline__ void take_values(Rows& ring) {
#pragma unroll
    for (int i = 0; i < kWidth / kSize; i += 4) {
      uint32_t four[4];
      load_blocks_transposed(four, ring.chunk(kDesk + threadIdx.x % 8, 1, i + threadIdx.x / 8));
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const float2 pair = unpack_pair<T>(four[n]);
        state.o[0][i + n] = pair.x, state.o[1][i + n] = pair.y;
      }
    }
  }

  // A family takes part with its own columns of a product, the others stay as they are, to the
  // bit, NaN or not.
  __device__ __forceinline__ void attend(Rows& ring, const Load& load, float scale) {
    const int lane = threadIdx.x;
    uint64_t slots = load.slots;
    float p[4] = {-INFINITY, -INFINITY, -INFINITY, -INFINITY};
#pragma unroll 1
    for (uint64_t families = load.families; families != 0; families >>= 8, slots >>= 8) {
      float score[4] = {};
#pragma unroll
      for (int k = 0; k < kWidth / kSize; k += 2) {
        uint32_t left[4];
        load_blocks(left, ring.chunk(static_cast<int>(slots & 0xff), 0, k + lane / 16));
        mma<T>(score, left, q[k], q[k + 1]);
      }
      const unsigned mine = static_cast<unsigned>(families & 0xff) >> (2 * t);
      if (mine & 1) p[0] = score[0] * scale, p[2] = score[2] * scale;
      if (mine & 2) p[1] = score[1] * scale, p[3] = score[3] * scale;
    }

#pragma unroll
    for (int n = 0; n < 2; ++n) {
      if (g > load.last) p[n] = -INFINITY;
      if (g + 8 > load.last) p[n + 2] = -INFINITY;
      float top = fmaxf(p[n], p[n + 2]);
#pragma unroll
      for (int offset = 4; offset < kWarp; offset *= 2) {
        top = fmaxf(top, __shfl_xor_sync(kAllLanes, top, offset));
      }
      state.raise(n, top);
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      p[e] = Base<T>::exp(p[e] - state.top[e % 2]);
      state.sum[e % 2] += p[e];
    }
    const uint32_t low = transpose(pack<T>(p[0], p[1])), high = transpose(pack<T>(p[2], p[3]));

    // The transposed operand's blocks have their places in another order.
    slots = __shfl_sync(kAllLanes, load.slots, lane / 16 * 8 + lane % 8);
#pragma unroll 1
    for (uint64_t families = load.families; families != 0; families >>= 8, slots >>= 8) {
      const unsigned mine = static_cast<unsigned>(families & 0xff) >> (2 * t);
#pragma unroll
      for (int k = 0; k < kWidth / kSize; k += 2) {
        uint32_t left[4];
        load_blocks_transposed(left,
                               ring.chunk(static_cast<int>(slots & 0xff), 1, k + lane / 8 % 2));
        float (&even)[kWidth / kSize] = state.o[0], (&odd)[kWidth / kSize] = state.o[1];
        float c[4] = {even[k], odd[k], even[k + 1], odd[k + 1]};
        mma<T>(c, left, low, high);
        if (mine & 1) even[k] = c[0], even[k + 1] = c[2];
        if (mine & 2) odd[k] = c[1], odd[k + 1] = c[3];
      }
    }
  }

  // By way of the desk, so that rows leave whole.
  __device__ __forceinline__ void store(T* out, Rows& ring, const Item& item, const Shape& shape) {
    float factor[2];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int offset = 4; offset < kWarp; offset *= 2) {
        state.sum[n] += __shfl_xor_sync(kAllLanes, state.sum[n], offset);
      }
      factor[n] = Base<T>::divide(1.0f, state.sum[n]);
    }
#pragma unroll
    for (int i = 0; i < kWidth / kSize; ++i) {
      const uint32_t pair =
          transpose(pack<T>(state.o[0][i] * factor[0], state.o[1][i] * factor[1]));
      *reinterpret_cast<uint32_t*>(ring.chunk(kDesk + g, 0, i) + 2 * t) = pair;
    }
    __syncwarp();
    const int number = threadIdx.x % Rows::kChunks;
#pragma unroll
    for (int i = 0; i < kQueryTile; i += Rows::kAtOnce) {
      const int query = i + threadIdx.x / Rows::kChunks;
      if (query >= item.queries || number * kSize >= shape.width) continue;
      Columns<T> packed;
      packed.load_shared(ring.chunk(kDesk + query, 0, number));
      const int64_t row = static_cast<int64_t>(item.first_row + query) * shape.heads + item.head;
      packed.store(out + row * shape.width + number * kSize);
    }
  }
};

// The queries, and the new tokens' own keys and values, which are the first that their queries
// meet. A lane reads one chunk of a few rows. Past: decode_attention.cu's.
template <typename T, int kWidth>
struct Newest {
  using Rows = Ring<T, kWidth>;
  static constexpr int kParts = kQueryTile / Rows::kAtOnce;

  Columns<T> q[kParts] = {}, key[kParts] = {}, value[kParts] = {};
  const unsigned query = threadIdx.x / Rows::kChunks, number = threadIdx.x % Rows::kChunks;

  // keys: whether more than the queries is wanted.
  template <typename Past>
  __device__ __forceinline__ void load(const Past& past, const Item& item, const Shape& shape,
                                       bool keys) {
    const T* from = past.query(item.first_row + query) + item.head * shape.width + number * kSize;
#pragma unroll
    for (int i = 0; i < kParts; ++i, from += Rows::kAtOnce * past.qkv_stride) {
      if (!exists(i, item, shape)) continue;
      q[i].load(from);
      if (!keys) continue;
      key[i].load(from + past.channels);
      value[i].load(from + 2 * past.channels);
    }
  }

  // Begins the tile; new keys and values go to the cache, too.
  template <typename Past>
  __device__ __forceinline__ void put(AncestorTile<T, kWidth>& tile, Rows& ring, const Past& past,
                                      const Item& item, int step, const Shape& shape,
                                      bool keys) const {
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      const int row = kDesk + i * Rows::kAtOnce + query;
      *reinterpret_cast<Columns<T>*>(ring.chunk(row, 0, number)) = q[i];
      *reinterpret_cast<Columns<T>*>(ring.chunk(row, 1, number)) = value[i];
    }
    if (keys) {
      T* to = past.key_of(step, item.first_row + query) + item.head * shape.width + number * kSize;
#pragma unroll
      for (int i = 0; i < kParts; ++i) {
        if (exists(i, item, shape)) {
          key[i].store(to);
          value[i].store(to + past.to_value);
        }
        to = const_cast<T*>(forward(to, Rows::kAtOnce, past.row_stride));
        float a[kSize], b[kSize], score = 0.0f;
        q[i].unpack(a);
        key[i].unpack(b);
#pragma unroll
        for (int e = 0; e < kSize; ++e) score = fmaf(a[e], b[e], score);
#pragma unroll
        for (int offset = 1; offset < Rows::kChunks; offset *= 2) {
          score += __shfl_xor_sync(kAllLanes, score, offset);
        }
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const unsigned of = 2 * tile.t + n;
          const float x =
              __shfl_sync(kAllLanes, score, of % Rows::kAtOnce * Rows::kChunks) * shape.scale;
          if (of / Rows::kAtOnce == i) tile.state.top[n] = x;
        }
      }
      tile.state.sum[0] = tile.state.sum[1] = tile.g == 0 ? 1.0f : 0.0f;
    }
    __syncwarp();
    tile.take_queries(ring);
    tile.take_values(ring);
    __syncwarp();
  }

 private:
  __device__ __forceinline__ bool exists(int i, const Item& item, const Shape& shape) const {
    return static_cast<int>(i * Rows::kAtOnce + query) < item.queries &&
           static_cast<int>(number * kSize) < shape.width;
  }
};

}  // namespace lightseq::decode_attention
