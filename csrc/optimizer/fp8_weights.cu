// Cast of M matrices in one flat buffer to E4M3, with their transposes. fp8_weights casts the
// numbers as they are; adam_step with a cast first updates all parameters of the buffer (adam.cu)
// and casts the new ones, which are in registers then. A matrix has N rows and K columns, both
// multiples of 16, and a scale of its own.
//
//   values, transposes   [N, K] and [K, N] of each matrix
//   amax, saturated      of each matrix, raised and added to
//
//   bytes moved   fp8_weights: 4 per number of a matrix
//                 adam_step: 26 per parameter, and 2 more per number of a matrix
//   determinism   the same bits as the reference, ops/fp8_weights.py
//
// A block has one tile: at most 64 rows of 128 parameters, of a matrix or of the parameters between
// matrices. A table in device memory says where its tile is. A thread has quads, four columns, of
// four adjacent rows at a time; it transposes their 4 x 4 bytes in registers. Shared memory has
// units: 16 rows of a column, 16 bytes of the transpose.

#include <cuda_bf16.h>

#include <cstdint>

#include "common/check.h"
#include "common/fp8_cast.cuh"
#include "common/launch.cuh"
#include "common/reduce.cuh"
#include "optimizer/adam.cuh"

namespace lightseq {
namespace {

using adam::Quad;

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kRows = 64, kColumns = 4 * kWarp;  // of a tile; as in ops/fp8_weights.py
constexpr int kUnitRows = 16;
constexpr int kPlanes = kRows / kUnitRows;  // units of a column
constexpr int kWordRows = 4;                // rows of a 32-bit word of a unit

// A row of the table, see ops/fp8_weights.py.
struct alignas(16) Tile {
  uint32_t first, stride;  // in quads
  int32_t rows, quads, matrix;
  uint32_t value;        // in quads
  uint32_t unit, pitch;  // in units
};

struct Results {
  const Tile* tiles;
  uint8_t *values, *transposes;
  const float* scale;
  int64_t scale_stride;
  int* amax;
  unsigned long long* saturated;
};

// A source is a kernel parameter, with these members:
//
//   kUpdates     whether it updates the parameters
//   kBlocks      resident blocks per SM; this limits the registers per thread
//   kRowsAhead   rows of a thread whose loads are in flight while it processes those before
//   Row          what is loaded of a row: four parameters

// fp8_weights
struct Given {
  static constexpr bool kUpdates = false;
  static constexpr int kBlocks = 4, kRowsAhead = 4;
  struct Row {
    Quad<__nv_bfloat16> low;

    __device__ __forceinline__ void load(const Given& from, uint32_t quad) {
      low.load(from.low + 4ull * quad);
    }
  };

  const __nv_bfloat16* low;
};

// adam_step
struct Updated {
  static constexpr bool kUpdates = true;
  static constexpr int kBlocks = 2, kRowsAhead = 2;
  struct Row {
    Quad<__nv_bfloat16> grad, low;
    Quad<int16_t> remainders;
    Quad<float> m, v;

    __device__ __forceinline__ void load(const Updated& from, uint32_t quad) {
      const uint64_t i = 4ull * quad;
      grad.load(from.grad + i);
      low.load(from.low + i);
      remainders.load(from.remainders + i);
      m.load(from.params.exp_avg + i);
      v.load(from.params.exp_avg_sq + i);
    }
    __device__ __forceinline__ void update(const adam::Coefficients& c) {
      adam::update(c, grad, remainders, low, m, v);
    }
    __device__ __forceinline__ void store(const Updated& to, uint32_t quad) const {
      const uint64_t i = 4ull * quad;
      low.store(to.low + i);
      remainders.store(to.remainders + i);
      m.store(to.params.exp_avg + i);
      v.store(to.params.exp_avg_sq + i);
    }
  };

  adam::Params params;
  int16_t* remainders;  // of the parameters over `low`
  const __nv_bfloat16* grad;
  __nv_bfloat16* low;
};

// The units of a tile. Lanes of a plane are exchanged, and words of a unit, so that a warp writes
// words, and a quarter of a warp reads units, without bank conflicts.
struct Units {
  uint4 units[kPlanes][4][kWarp];  // columns are 4 * lane + e, and ordered by e, then lane

  __device__ __forceinline__ uint4& unit(int plane, int e, int lane) {
    return units[plane][e][lane ^ plane * (8 / kPlanes)];
  }
  // word: number of four rows of the tile.
  __device__ __forceinline__ void write(int word, int e, int lane, uint32_t bytes) {
    constexpr int kWords = kUnitRows / kWordRows;
    uint4& to = unit(word / kWords, e, lane);
    reinterpret_cast<uint32_t*>(&to)[word % kWords ^ lane / 8] = bytes;
  }
  __device__ __forceinline__ uint4 read(int plane, int e, int lane) {
    uint4 x = unit(plane, e, lane);
    if (lane / 8 % 2 == 1) x = {x.y, x.x, x.w, x.z};
    if (lane / 8 / 2 == 1) x = {x.z, x.w, x.x, x.y};
    return x;
  }
};

// If the gradient has overflowed, the parameters are stored and cast as they were.
template <typename Source>
__global__ void __launch_bounds__(kThreads, Source::kBlocks)
    fp8_weights_kernel(const __grid_constant__ Source source,
                       const __grid_constant__ Results results) {
  constexpr bool kUpdates = Source::kUpdates;
  constexpr int kRowsAhead = Source::kRowsAhead;
  // All in one scope: otherwise nvcc gives two of them the same memory.
  __shared__ Units units;
  __shared__ BlockStatistics<kWarps> of_block;
  __shared__ adam::Coefficients shared;
  __shared__ bool is_finite;
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const Tile tile = results.tiles[blockIdx.x];
  const bool casts = tile.matrix >= 0;
  if (!kUpdates && !casts) return;
  const auto exists = [&](int row) { return row < tile.rows && lane < tile.quads; };
  typename Source::Row ahead[kRowsAhead], rows[kRowsAhead];
  const auto load = [&](int first) {
#pragma unroll
    for (int u = 0; u < kRowsAhead; ++u) {
      if (!exists(first + u)) continue;
      ahead[u].load(source, tile.first + (first + u) * tile.stride + lane);
    }
  };
  load(warp * kWordRows);
  const float inverse = casts ? 1.0f / results.scale[tile.matrix * results.scale_stride] : 0.0f;

  adam::Coefficients coefficients;
  bool updates = false;
  unsigned long long counter = 0;
  if constexpr (kUpdates) {
    if (threadIdx.x == 0) is_finite = compute_coefficients(source.params, &shared);
    __syncthreads();
    updates = is_finite;
    coefficients = shared;
    if (updates && threadIdx.x == 0) counter = count_block(source.params);
  }

  CastStatistics statistics = {};
#pragma unroll 1
  for (int word = warp; word < kRows / kWordRows; word += kWarps) {
    uint32_t bytes[kWordRows] = {};
#pragma unroll
    for (int step = 0; step < kWordRows; step += kRowsAhead) {
      const int first = word * kWordRows + step;
#pragma unroll
      for (int u = 0; u < kRowsAhead; ++u) rows[u] = ahead[u];
      const bool is_last = step + kRowsAhead == kWordRows;  // of these four rows
      const int next = is_last ? (word + kWarps) * kWordRows : first + kRowsAhead;
      if (next < kRows) load(next);
#pragma unroll
      for (int u = 0; u < kRowsAhead; ++u) {
        if (!exists(first + u)) continue;
        const uint32_t inside = (first + u) * tile.stride + lane;
        if constexpr (kUpdates) {
          if (updates) rows[u].update(coefficients);
          rows[u].store(source, tile.first + inside);
        }
        if (!casts) continue;
        float x[1][4];
        rows[u].low.unpack(x[0]);
        statistics.note(x, inverse, {true});
        bytes[step + u] = pack_e4m3(x[0][0] * inverse, x[0][1] * inverse) |
                          pack_e4m3(x[0][2] * inverse, x[0][3] * inverse) << 16;
        reinterpret_cast<uint32_t*>(results.values)[tile.value + inside] = bytes[step + u];
      }
    }
    if (!casts) continue;
    uint32_t by_column[4];
    transpose_bytes(bytes, by_column);
#pragma unroll
    for (int e = 0; e < 4; ++e) units.write(word, e, lane, by_column[e]);
  }

  if (casts) {
    of_block.note(statistics, threadIdx.x);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kPlanes * kColumns / kThreads; ++i) {
      const int number = threadIdx.x + i * kThreads;
      const int plane = number % kPlanes, of_lane = number / kPlanes % kWarp;
      const int e = number / (kPlanes * kWarp);
      if (of_lane >= tile.quads || plane * kUnitRows >= tile.rows) continue;
      const uint32_t unit = tile.unit + (4 * of_lane + e) * tile.pitch + plane;
      reinterpret_cast<uint4*>(results.transposes)[unit] = units.read(plane, e, of_lane);
    }
    if (threadIdx.x == 0) {
      of_block.publish(
          Cast{.amax = results.amax + tile.matrix, .saturated = results.saturated + tile.matrix});
    }
  }
  if constexpr (kUpdates) {
    if (!updates) return;
    if (blockIdx.x == 0) {
      update_last(source.params, coefficients, source.remainders, source.grad, source.low);
    }
    if (threadIdx.x == 0) end_step(source.params, counter);
  }
}

template <typename Source>
void cast_weights(const char* op, const Source& source, const Tensor& low,
                  const adam::WeightCast& cast) {
  const auto& [tiles, scale, amax, saturated, values, transposes] = cast;
  const int32_t device = low.get_device();
  require_fp8(op, device);
  check_aligned(op, "values", values, sizeof(uint32_t));
  check_aligned(op, "transposes", transposes, kUnitRows);
  const int64_t blocks = tiles.size(0);
  if (blocks == 0) return;
  const DeviceGuard guard(device);
  launch({.op = op, .grid = dim3(blocks), .block = kThreads}, fp8_weights_kernel<Source>, source,
         Results{.tiles = data_of<Tile>(tiles),
                 .values = output_of<uint8_t>(values),
                 .transposes = output_of<uint8_t>(transposes),
                 .scale = scale.const_data_ptr<float>(),
                 .scale_stride = scale.stride(0),
                 .amax = output_of<int>(amax),
                 .saturated = static_cast<unsigned long long*>(saturated.mutable_data_ptr())});
}

void fp8_weights(const Tensor& weights, const Tensor& tiles, const Tensor& scale, Tensor amax,
                 Tensor saturated, Tensor values, Tensor transposes) {
  constexpr const char* kOp = "fp8_weights";
  check_aligned(kOp, "weights", weights, sizeof(Quad<__nv_bfloat16>));
  const Given source{data_of<__nv_bfloat16>(weights)};
  cast_weights(kOp, source, weights, {tiles, scale, amax, saturated, values, transposes});
}

STABLE_TORCH_LIBRARY_IMPL(lightseq, CUDA, m) { m.impl("fp8_weights", TORCH_BOX(&fp8_weights)); }

}  // namespace

void adam::update_and_cast(const char* op, const Params& params, const Tensor& param,
                           const Tensor& grad, const Tensor& low, const WeightCast& cast) {
  check_aligned(op, "grad", grad, sizeof(Quad<__nv_bfloat16>));
  check_aligned(op, "param_low", low, sizeof(Quad<__nv_bfloat16>));
  const Updated source{.params = params,
                       .remainders = param.mutable_data_ptr<int16_t>(),
                       .grad = data_of<__nv_bfloat16>(grad),
                       .low = output_of<__nv_bfloat16>(low)};
  check_blocks(op, params, cast.tiles.size(0));
  cast_weights(op, source, low, cast);
}

}  // namespace lightseq
