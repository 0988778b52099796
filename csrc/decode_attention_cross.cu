// Cross-attention of the newest token of every hypothesis, for generation. Self-attention is
// decode_attention.cu; common/decode_attention.cuh has what both share.
//
//   out[n] = softmax(scale * q[n] k^T) v        in each head, over the sentence that n translates
//
// The `beam` hypotheses of a sentence are neighbours; keys and values exist once a sentence. Rows
// that belong to no sentence, or to an empty one, become 0.
//
//   bytes moved   every key and value once for eight hypotheses of a sentence, q and out once
//   determinism   sums have a fixed order, which depends on the sizes and the lengths alone
//
// decode_attention_cross_kernel: 16-bit numbers on the tensor cores, a warp for a head and eight
// queries of one sentence. A sum over channels may take them in any order, so lanes read 16 bytes
// each straight from global memory, and what they hold is a fragment as it is. float32 takes
// decode_attention_rows_kernel, where the queries of a sentence sit in one block and meet in the
// first cache.

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>

#include "common/decode_attention.cuh"

namespace lightseq {
namespace {

using namespace decode_attention;

constexpr int kBeamTile = 8;  // queries of a warp

// A sentence; `first` is its first token.
template <typename T>
struct Source {
  const T *q, *keys;
  int64_t q_stride, to_value;
  int stride, row_stride;  // all in one row
  const int *cu_seqlens, *sentences;
  int slots, beam;

  __device__ __forceinline__ Span span(int row) const {
    const int slot = row / beam;
    const int sentence = slot < slots ? sentences[slot] : -1;
    if (sentence < 0) return {0, 0};
    const int first = cu_seqlens[sentence];
    return {first, cu_seqlens[sentence + 1] - first};
  }
  __device__ __forceinline__ const T* query(int row) const { return q + row * q_stride; }
  __device__ __forceinline__ const T* start(Span span) const {
    return forward(keys, span.first, stride);
  }
  __device__ __forceinline__ int row_of(Span, int) const { return 0; }
};

// The transpose of an 8x8 matrix of 16-bit numbers: lane 4g + t has columns 2t and 2t + 1 of row g.
__device__ __forceinline__ uint32_t transpose(uint32_t pair) {
  uint32_t transposed;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(pair));
  return transposed;
}

// Lane 4g + t holds, as mma.cuh has it, rows g and g + 8 of left operands and of results, columns g
// of right operands. Scores are [keys, queries] = K Q^T: the lane reads channels 32c + 8t ... + 7
// of keys g and g + 8 and of query g, and takes them for columns 2t, 2t + 1, 2t + 8, 2t + 9 of two
// fragments. Results are [channels, queries] = V^T P^T: it reads channels 64c + 8g ... + 7 of keys
// 2t, 2t + 1, 2t + 8, 2t + 9 and takes them for rows g and g + 8 of four fragments.
template <typename T, int kWidth>
__global__ void __launch_bounds__(kWarp* kWarps)
    decode_attention_cross_kernel(const Source<T> source, const Shape shape, T* __restrict__ out) {
  constexpr int kTiles = 128 / kWidth, kKeys = 16 * kTiles;  // of one turn
  const Team team = shape.team;
  const int g = threadIdx.x / 4, t = threadIdx.x % 4;
  const int tiles = (source.beam + kBeamTile - 1) / kBeamTile;
  const int item = blockIdx.x * team.items() + team.item();
  const int head = item / tiles % shape.heads, slot = item / tiles / shape.heads;
  const int first_query = item % tiles * kBeamTile, first_row = slot * source.beam + first_query;
  const int queries = min(source.beam - first_query, shape.rows - first_row);
  wait_for_previous_kernel();
  start_next_kernel();

  const Span span = queries > 0 ? source.span(first_row) : Span{0, 0};
  const T* const keys = source.start(span) + head * shape.width;
  Columns<T> q[kWidth / 32] = {};
#pragma unroll
  for (int c = 0; c < kWidth / 32; ++c) {
    const int column = c * 32 + t * kSize;
    if (g < queries && column < shape.width && span.count > 0) {
      q[c].load(source.query(first_row + g) + head * shape.width + column);
    }
  }

  Softmax<T, 2, kWidth / 8> state;  // queries 2t and 2t + 1, this lane's part of the sum
  for (int first = team.rank() * kKeys; first < span.count; first += kKeys << team.shift) {
    // Keys and channels that do not exist are copies of the last ones: they meet a probability or
    // a query of 0, or are not stored.
    const auto load = [&](const T* from, int key, int column) {
      Columns<T> eight;
      eight.load(forward(from, min(key, span.count - 1), source.stride) +
                 min(column, shape.width - kSize));
      return eight;
    };
    Columns<T> k[kTiles][2][kWidth / 32], v[kTiles][4][kWidth / 64];
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
#pragma unroll
        for (int c = 0; c < kWidth / 32; ++c) {
          k[i][n][c] = load(keys, first + i * 16 + n * 8 + g, c * 32 + t * kSize);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
#pragma unroll
      for (int n = 0; n < 4; ++n) {
#pragma unroll
        for (int c = 0; c < kWidth / 64; ++c) {
          v[i][n][c] = load(keys + source.to_value, first + i * 16 + n / 2 * 8 + 2 * t + n % 2,
                            c * 64 + g * kSize);
        }
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
        const bool exists = first + i * 16 + e / 2 * 8 + g < span.count;
        score[i][e] = exists ? score[i][e] * shape.scale : -INFINITY;
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
        float (&even)[kWidth / 8] = state.o[0], (&odd)[kWidth / 8] = state.o[1];
        float c[4] = {even[2 * j], odd[2 * j], even[2 * j + 1], odd[2 * j + 1]};
        mma<T>(c, left, low, high);
        even[2 * j] = c[0], odd[2 * j] = c[1], even[2 * j + 1] = c[2], odd[2 * j + 1] = c[3];
      }
    }
  }

  merge(state, team, min(team.warps(), (span.count + kKeys - 1) / kKeys));
  if (team.rank() > 0) return;
#pragma unroll
  for (int n = 0; n < 2; ++n) {
#pragma unroll
    for (int offset = 4; offset < kWarp; offset *= 2) {
      state.sum[n] += __shfl_xor_sync(kAllLanes, state.sum[n], offset);
    }
    const float factor = span.count > 0 ? Base<T>::divide(1.0f, state.sum[n]) : 0.0f;
    T* const row = out + static_cast<int64_t>(first_row + 2 * t + n) * shape.heads * shape.width +
                   head * shape.width;
#pragma unroll
    for (int c = 0; c < kWidth / 64; ++c) {
      const int column = c * 64 + g * kSize;
      if (2 * t + n >= queries || column >= shape.width) continue;
      float x[kSize];
#pragma unroll
      for (int e = 0; e < kSize; ++e) x[e] = state.o[n][c * kSize + e] * factor;
      Columns<T> packed;
      packed.pack(x);
      packed.store(row + column);
    }
  }
}

Tensor decode_cross_attention(const Tensor& q, const Tensor& keys, const Tensor& values,
                              const Tensor& cu_seqlens, const Tensor& sentences, int64_t beam,
                              int64_t heads, double scale) {
  constexpr const char* kOp = "decode_cross_attention";
  const int64_t rows = q.size(0), channels = q.size(1), width = width_of(kOp, channels, heads);
  check_rows(kOp, "q", q);
  check_rows(kOp, "keys", keys);
  check_rows(kOp, "values", values);
  require(cu_seqlens.is_contiguous() && sentences.is_contiguous(), kOp,
          ": cu_seqlens and sentences must be contiguous");
  const int32_t device = q.get_device();
  const torch::stable::accelerator::DeviceGuard guard(device);
  Tensor out = allocate(q, {rows, channels});
  attention::dispatch(kOp, "q", q.scalar_type(), width, [&](auto zero, auto tile_width) {
    using T = decltype(zero);
    constexpr int kWidth = decltype(tile_width)::value;
    if (rows == 0) return;
    const Source<T> source{static_cast<const T*>(q.const_data_ptr()),
                           static_cast<const T*>(keys.const_data_ptr()),
                           q.stride(0),
                           to_values<T>(kOp, keys, values),
                           bytes_between<T>(kOp, keys, 0),
                           0,
                           cu_seqlens.const_data_ptr<int>(),
                           sentences.const_data_ptr<int>(),
                           static_cast<int>(sentences.size(0)),
                           static_cast<int>(beam)};
    if constexpr (sizeof(T) == sizeof(float)) {
      launch_rows<T, kWidth, false>(kOp, source, out, heads, width, scale);
    } else {
      const int64_t items = blocks_for(rows, beam) * heads * blocks_for(beam, kBeamTile);
      const Team team = team_for(items, device);
      launch_early(kOp, decode_attention_cross_kernel<T, kWidth>,
                   dim3(blocks_for(items, kWarps >> team.shift)), dim3(kWarp, kWarps),
                   shared_bytes<Softmax<T, 2, kWidth / 8>>(team), current_stream(device), source,
                   shape_of<T>(out, heads, width, scale, team),
                   static_cast<T*>(out.mutable_data_ptr()));
    }
  });
  return out;
}

STABLE_TORCH_LIBRARY_IMPL(lightseq, CUDA, m) {
  m.impl("decode_cross_attention", TORCH_BOX(&decode_cross_attention));
}

}  // namespace
}  // namespace lightseq
