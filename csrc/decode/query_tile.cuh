// Attention of a decode step for 16-bit types. A slot is the adjacent rows of one sentence's
// hypotheses. A warp processes one head and up to eight queries of a slot, 16 keys at a time.
// Queries that attend to the same 16 keys are a family; the tensor cores process them together. In
// self-attention, a family is the queries with the same ancestors at all 16 positions; in
// cross-attention, all queries are one family. The other common code is in attention.cuh.
//
// Keys and values are copied through a ring buffer in shared memory, one per warp. The rows copied
// at a time are a load: the keys and values of one or more families, each row once. While one load
// is processed, others are in flight. The grouping of families into loads does not change the
// results. The last rows of the ring are staging rows: there, data that lanes read or write as
// chunks is converted to or from fragments.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>

#include "common/ptx/mma.cuh"
#include "decode/attention.cuh"

namespace lightseq::decode_attention {

constexpr int kQueryTile = 8;  // queries per warp
constexpr int kKeyTile = 16;   // keys per product
constexpr int kRingWarps = 4;  // per block

// The work of a team: one head of a tile of adjacent queries of a slot.
struct Item {
  int head, slot, first_row, queries;  // queries == 0: no work

  __device__ __forceinline__ explicit Item(const Shape& shape) {
    const int number = static_cast<int>(blockIdx.x) * shape.team.items() + shape.team.item();
    slot = number / shape.heads;
    head = number - slot * shape.heads;
    const int first = static_cast<int>(blockIdx.y) * shape.queries;
    first_row = slot * shape.beam + first;
    queries = max(0, min(min(shape.queries, shape.beam - first), shape.rows - first_row));
  }
};

// Families of a tile of keys, and the row in the ring for this lane's key of the tile.
struct Load {
  int first, rows;                   // first row in the ring, number of rows
  int last;                          // last key of the tile that exists; later ones are copies
  uint64_t slots = 0, families = 0;  // one byte per family: row of the ring; bits of its queries
};

// A chunk is eight numbers. Chunks are permuted (swizzled) within a row, so that the n-th chunks of
// eight consecutive rows are in eight different groups of banks.
template <typename T, int kWidth, int kCapacity>
struct alignas(128) Ring {
  static constexpr int kRows = kCapacity;
  static constexpr int kChunks = kWidth / kSize, kAtOnce = kWarp / kChunks;
  static constexpr int kLoadRows = kRows - kKeyTile;   // maximum; leaves room for another family
  static constexpr int kStaging = kRows - kQueryTile;  // free if there is at most one load
  // Resident blocks per SM, limited by shared memory.
  static constexpr int kBlocks = 768 * 64 / (kRingWarps * kRows * kWidth);

  T rows[kRows][2][kWidth];     // keys and their values
  const T* sources[kLoadRows];  // keys that the next load must copy, if the kernel lists them

  static __device__ __forceinline__ int wrap(int row) { return row < kRows ? row : row - kRows; }
  __device__ __forceinline__ T* chunk(int row, int side, int number) {
    return &rows[row][side][(number ^ row % 8) * kSize];
  }

  // Starts the copies of a load. at(i): address of the head's i-th key; past the load's last key it
  // may return any address. Channels that do not exist are copies of the last ones; they are
  // multiplied by a query of 0, or not stored. wait() counts each call as one load.
  template <typename At>
  __device__ __forceinline__ void copy(const Load& load, const At& at, int64_t to_value,
                                       int width) {
    constexpr int kUnroll = kKeyTile / kAtOnce;
    const int number = threadIdx.x % kChunks, column = min(number * kSize, width - kSize);
    __syncwarp();
#pragma unroll 1
    for (int i = threadIdx.x / kChunks; i < load.rows; i += kKeyTile) {
      const T* keys[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) keys[u] = at(i + u * kAtOnce) + column;
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (i + u * kAtOnce >= load.rows) continue;
        const int row = wrap(load.first + i + u * kAtOnce);
        cp_async(chunk(row, 0, number), keys[u]);
        cp_async(chunk(row, 1, number), keys[u] + to_value);
      }
    }
    cp_async_commit();
  }

  // Waits until at most the kPending newest loads are in flight.
  template <int kPending = 1>
  __device__ __forceinline__ void wait() {
    cp_async_wait<kPending>();
    __syncwarp();
  }
};

// Layout as in common/ptx/mma.cuh: lane 4g + t holds rows g and g + 8 of left operands and of
// results, and column g of right operands. Scores are [keys, queries] = K Q^T; results are
// [channels, queries] = V^T P^T.
template <typename T, int kWidth, typename Rows>
struct QueryTile {
  uint32_t q[kWidth / kSize];           // query g, channels 8i + 2t and 8i + 2t + 1
  Softmax<T, 2, kWidth / kSize> state;  // queries 2t and 2t + 1, channels 8i + g
  const int g = threadIdx.x / 4, t = threadIdx.x % 4;

  // Loads queries from global memory. first: the head's first channel of the first query. stride:
  // numbers from one query to the next.
  __device__ __forceinline__ void load_queries(const T* first, int64_t stride, const Item& item,
                                               const Shape& shape) {
#pragma unroll
    for (int i = 0; i < kWidth / kSize; ++i) {
      const bool exists = g < item.queries && i * kSize < shape.width;
      const T* const pair = first + g * stride + i * kSize + 2 * t;
      q[i] = exists ? *reinterpret_cast<const uint32_t*>(pair) : 0;
    }
  }

  // Loads queries from the staging rows, where they are stored in place of keys.
  __device__ __forceinline__ void ldmatrix_queries(Rows& ring) {
#pragma unroll
    for (int i = 0; i < kWidth / kSize; i += 4) {
      uint32_t four[4];
      ldmatrix_x4(four, ring.chunk(Rows::kStaging + threadIdx.x % 8, 0, i + threadIdx.x / 8));
#pragma unroll
      for (int n = 0; n < 4; ++n) q[i + n] = four[n];
    }
  }

  // Initialises the results with the values in the staging rows; missing values are zeros there.
  __device__ __forceinline__ void ldmatrix_values(Rows& ring) {
#pragma unroll
    for (int i = 0; i < kWidth / kSize; i += 4) {
      uint32_t four[4];
      ldmatrix_x4_trans(four, ring.chunk(Rows::kStaging + threadIdx.x % 8, 1, i + threadIdx.x / 8));
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const float2 pair = unpack_pair<T>(four[n]);
        state.o[0][i + n] = pair.x, state.o[1][i + n] = pair.y;
      }
    }
  }

  // Processes a load. From each product a family uses only its own columns; the other columns keep
  // their bits, even if the product is NaN there.
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
        ldmatrix_x4(left, ring.chunk(static_cast<int>(slots & 0xff), 0, k + lane / 16));
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
    const uint32_t low = movmatrix_trans(pack_pair<T>(p[0], p[1])),
                   high = movmatrix_trans(pack_pair<T>(p[2], p[3]));

    // The 8x8 matrices of the transposed operand are in another order.
    slots = __shfl_sync(kAllLanes, load.slots, lane / 16 * 8 + lane % 8);
#pragma unroll 1
    for (uint64_t families = load.families; families != 0; families >>= 8, slots >>= 8) {
      const unsigned mine = static_cast<unsigned>(families & 0xff) >> (2 * t);
#pragma unroll
      for (int k = 0; k < kWidth / kSize; k += 2) {
        uint32_t left[4];
        ldmatrix_x4_trans(left, ring.chunk(static_cast<int>(slots & 0xff), 1, k + lane / 8 % 2));
        float (&even)[kWidth / kSize] = state.o[0], (&odd)[kWidth / kSize] = state.o[1];
        float c[4] = {even[k], odd[k], even[k + 1], odd[k + 1]};
        mma<T>(c, left, low, high);
        if (mine & 1) even[k] = c[0], even[k + 1] = c[2];
        if (mine & 2) odd[k] = c[1], odd[k + 1] = c[3];
      }
    }
  }

  // Stores the results through the staging rows, so that stores are contiguous.
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
          movmatrix_trans(pack_pair<T>(state.o[0][i] * factor[0], state.o[1][i] * factor[1]));
      *reinterpret_cast<uint32_t*>(ring.chunk(Rows::kStaging + g, 0, i) + 2 * t) = pair;
    }
    __syncwarp();
    const int number = threadIdx.x % Rows::kChunks;
#pragma unroll
    for (int i = 0; i < kQueryTile; i += Rows::kAtOnce) {
      const int query = i + threadIdx.x / Rows::kChunks;
      if (query >= item.queries || number * kSize >= shape.width) continue;
      Columns<T> packed;
      packed.load_shared(ring.chunk(Rows::kStaging + query, 0, number));
      const int64_t row = static_cast<int64_t>(item.first_row + query) * shape.heads + item.head;
      packed.store(out + row * shape.width + number * kSize);
    }
  }
};

// ---- launch ----

// tiles: number of tiles per slot. busy_warps: as for team_for().
template <typename Ring, typename T, typename Keys>
void launch_tiles(const char* op, void (*kernel)(Keys, Shape, T*), const Keys& keys, Shape shape,
                  const Tensor& out, int64_t tiles, int busy_warps) {
  const int32_t device = out.get_device();
  const int64_t items = blocks_for(shape.rows, shape.beam) * shape.heads;
  shape.queries = static_cast<int>(blocks_for(shape.beam, tiles));
  tiles = blocks_for(shape.beam, shape.queries);
  shape.team = team_for(items * tiles, device, kRingWarps, busy_warps);
  launch({.op = op,
          .grid = dim3(blocks_for(items, kRingWarps >> shape.team.shift), tiles),
          .block = dim3(kWarp, kRingWarps),
          .shared = sizeof(Ring) * kRingWarps,
          .stream = current_stream(device),
          .dependent = true},
         kernel, keys, shape, static_cast<T*>(out.mutable_data_ptr()));
}

}  // namespace lightseq::decode_attention
