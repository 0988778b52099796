// Attention of a decode step in 16-bit numbers: a warp takes a head and up to eight queries of a
// slot, which meet their keys on the tensor cores. decode_attention.cuh has the rest. QueryTile is
// for keys that all of them share; where their pasts part see ancestor_tile.cuh.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>

#include "common/decode_attention.cuh"
#include "common/mma.cuh"
#include "common/prefetch.cuh"

namespace lightseq::decode_attention {

constexpr int kQueryTile = 8;  // queries of a warp
constexpr int kKeyTile = 16;   // keys of a product

// A head of a tile of queries, which are neighbours in a slot: what a team does.
struct Item {
  int head, slot, first_row, queries;  // 0 queries: nothing

  __device__ __forceinline__ explicit Item(const Shape& shape) {
    const int number = static_cast<int>(blockIdx.x) * shape.team.items() + shape.team.item();
    slot = number / shape.heads;
    head = number - slot * shape.heads;
    const int first = static_cast<int>(blockIdx.y) * shape.queries;
    first_row = slot * shape.beam + first;
    queries = max(0, min(min(shape.queries, shape.beam - first), shape.rows - first_row));
  }
};

// The transpose of an 8x8 matrix of 16-bit numbers: lane 4g + t has columns 2t and 2t + 1 of row g.
__device__ __forceinline__ uint32_t transpose(uint32_t pair) {
  uint32_t transposed;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(pair));
  return transposed;
}

// A head of up to eight queries, which one warp has. A sum over channels may take them in any
// order, so lanes read 16 bytes each straight from global memory, and what they hold is a fragment
// as it is.
//
// Lane 4g + t holds, as mma.cuh has it, rows g and g + 8 of left operands and of results, columns g
// of right operands. Scores are [keys, queries] = K Q^T: the lane reads channels 32c + 8t ... + 7
// of keys g and g + 8 and of query g, and takes them for columns 2t, 2t + 1, 2t + 8, 2t + 9 of two
// fragments. Results are [channels, queries] = V^T P^T: it reads channels 64c + 8g ... + 7 of keys
// 2t, 2t + 1, 2t + 8, 2t + 9 and takes them for rows g and g + 8 of four fragments.
template <typename T, int kWidth>
struct QueryTile {
  Columns<T> q[kWidth / 32] = {};
  Softmax<T, 2, kWidth / 8> state;  // queries 2t and 2t + 1, this lane's part of the sum
  const int g = threadIdx.x / 4, t = threadIdx.x % 4;

  // first: of the first query, the head's first channel. stride: numbers from one to the next.
  __device__ __forceinline__ void load(const T* first, int64_t stride, const Item& item,
                                       const Shape& shape) {
#pragma unroll
    for (int c = 0; c < kWidth / 32; ++c) {
      const int column = c * 32 + t * kSize;
      if (g < item.queries && column < shape.width) q[c].load(first + g * stride + column);
    }
  }

  // The queries meet kTiles * 16 keys, of which `count` exist; the others are copies of any that
  // do. at(i): the i-th, its head's first channel.
  template <int kTiles, typename At>
  __device__ __forceinline__ void attend(const At& at, int64_t to_value, int count,
                                         const Shape& shape) {
    // Channels that do not exist are copies of the last ones: they meet a query of 0, or are not
    // stored.
    const auto load = [&](const T* from, int column) {
      Columns<T> eight;
      eight.load(from + min(column, shape.width - kSize));
      return eight;
    };
    Columns<T> k[kTiles][2][kWidth / 32], v[kTiles][4][kWidth / 64];
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const T* const key = at(i * kKeyTile + n * 8 + g);
#pragma unroll
        for (int c = 0; c < kWidth / 32; ++c) k[i][n][c] = load(key, c * 32 + t * kSize);
      }
    }
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const T* const value = at(i * kKeyTile + n / 2 * 8 + 2 * t + n % 2) + to_value;
#pragma unroll
        for (int c = 0; c < kWidth / 64; ++c) v[i][n][c] = load(value, c * 64 + g * kSize);
      }
    }

    float score[kTiles][4] = {}, top[2] = {-INFINITY, -INFINITY};
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
#pragma unroll
      for (int c = 0; c < kWidth / 32; ++c) {
        const Columns<T>&low = k[i][0][c], &high = k[i][1][c];
#pragma unroll
        for (int w = 0; w < 4; w += 2) {
          const uint32_t left[4] = {low.words[w], high.words[w], low.words[w + 1],
                                    high.words[w + 1]};
          mma<T>(score[i], left, q[c].words[w], q[c].words[w + 1]);
        }
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const bool seen = i * kKeyTile + e / 2 * 8 + g < count;
        score[i][e] = seen ? score[i][e] * shape.scale : -INFINITY;
        top[e % 2] = fmaxf(top[e % 2], score[i][e]);
      }
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int offset = 4; offset < kWarp; offset *= 2) {
        top[n] = fmaxf(top[n], __shfl_xor_sync(kAllLanes, top[n], offset));
      }
      state.raise(n, top[n]);
    }
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      float (&p)[4] = score[i];
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        p[e] = Base<T>::exp(p[e] - state.top[e % 2]);
        state.sum[e % 2] += p[e];
      }
      const uint32_t low = transpose(pack<T>(p[0], p[1])), high = transpose(pack<T>(p[2], p[3]));
#pragma unroll
      for (int j = 0; j < kWidth / 16; ++j) {
        const auto word = [&](int n) { return v[i][n][j / 4].words[j % 4]; };
        const uint32_t left[4] = {
            __byte_perm(word(0), word(1), 0x5410), __byte_perm(word(0), word(1), 0x7632),
            __byte_perm(word(2), word(3), 0x5410), __byte_perm(word(2), word(3), 0x7632)};
        float* const o[2] = {&state.o[0][2 * j], &state.o[1][2 * j]};
        float c[4] = {o[0][0], o[1][0], o[0][1], o[1][1]};
        mma<T>(c, left, low, high);
        o[0][0] = c[0], o[0][1] = c[2];
        o[1][0] = c[1], o[1][1] = c[3];
      }
    }
  }

  // has_keys: whether the queries have met any; otherwise the result is 0.
  __device__ __forceinline__ void store(T* out, const Item& item, bool has_keys,
                                        const Shape& shape) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int offset = 4; offset < kWarp; offset *= 2) {
        state.sum[n] += __shfl_xor_sync(kAllLanes, state.sum[n], offset);
      }
      const float factor = has_keys ? Base<T>::divide(1.0f, state.sum[n]) : 0.0f;
      T* const row =
          out + (static_cast<int64_t>(item.first_row + 2 * t + n) * shape.heads + item.head) *
                    shape.width;
#pragma unroll
      for (int c = 0; c < kWidth / 64; ++c) {
        const int column = c * 64 + g * kSize;
        if (2 * t + n >= item.queries || column >= shape.width) continue;
        float x[kSize];
#pragma unroll
        for (int e = 0; e < kSize; ++e) x[e] = state.o[n][c * kSize + e] * factor;
        Columns<T> packed;
        packed.pack(x);
        packed.store(row + column);
      }
    }
  }
};

// ---- launch ----

// tiles: into how many a slot is cut. warps: of a block, each of which has `room` bytes of shared
// memory, or what merge() takes if that is 0.
template <typename T, int kWidth, typename Keys>
void launch_tiles(const char* op, void (*kernel)(Keys, Shape, T*), const Keys& keys,
                  const Tensor& out, int64_t beam, int64_t tiles, int64_t heads, int64_t width,
                  double scale, int warps, size_t room) {
  const int32_t device = out.get_device();
  const int64_t queries = blocks_for(beam, tiles), items = blocks_for(out.size(0), beam) * heads;
  tiles = blocks_for(beam, queries);
  const Team team = team_for(items * tiles, device, warps);
  const size_t shared = room > 0 ? room * warps : shared_bytes<Softmax<T, 2, kWidth / 8>>(team);
  if (room > 0) {
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                         static_cast<int>(shared));
  }
  launch_early(op, kernel, dim3(blocks_for(items, warps >> team.shift), tiles), dim3(kWarp, warps),
               shared, current_stream(device), keys,
               shape_of<T>(out, heads, width, scale, team, beam, queries),
               static_cast<T*>(out.mutable_data_ptr()));
}

}  // namespace lightseq::decode_attention
