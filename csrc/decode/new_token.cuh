// The new tokens of a tile of hypotheses; self-attention of the tile begins with them.
#pragma once

#include <cstdint>

#include "decode/attention.cuh"
#include "decode/query_tile.cuh"

namespace lightseq::decode_attention {

// Queries, keys and values of the new tokens. A query first attends to its own key. A lane reads
// one chunk of a few rows. Past: see self_attention.cu.
template <typename T, typename Rows>
struct NewToken {
  static constexpr int kParts = kQueryTile / Rows::kAtOnce;

  Columns<T> q[kParts] = {}, key[kParts] = {}, value[kParts] = {};
  const unsigned query = threadIdx.x / Rows::kChunks, number = threadIdx.x % Rows::kChunks;

  // keys: whether to load keys and values, too.
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

  // Initialises the tile; also stores the new keys and values in the cache.
  template <typename Tile, typename Past>
  __device__ __forceinline__ void init_tile(Tile& tile, Rows& ring, const Past& past,
                                            const Item& item, int step, const Shape& shape,
                                            bool keys) const {
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      const int row = Rows::kStaging + i * Rows::kAtOnce + query;
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
        to = const_cast<T*>(offset_by(to, Rows::kAtOnce, past.row_stride));
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
    tile.ldmatrix_queries(ring);
    tile.ldmatrix_values(ring);
    __syncwarp();
  }

 private:
  __device__ __forceinline__ bool exists(int i, const Item& item, const Shape& shape) const {
    return static_cast<int>(i * Rows::kAtOnce + query) < item.queries &&
           static_cast<int>(number * kSize) < shape.width;
  }
};

}  // namespace lightseq::decode_attention
