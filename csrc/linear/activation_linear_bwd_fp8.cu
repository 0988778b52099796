// Backward of an activation and dropout, and of the linear layer behind it, with operands and
// results in E4M3: y = dropout(activation(z)) [T, F], then a product with W [N, F].
//
//   dz      [T, F]     = (dy W) slope / (1 - p)    values and transpose [F, P] in E4M3
//   dbias   [F]    (+)= column sum of dz before the cast
//
// The slope comes from forward (linear_activation_fwd_fp8.cu). For ReLU it is 1 where y is positive
// or NaN, else 0; y is read in E4M3 from its transpose, which a product also reads.
//
//   bytes moved   dy and W several times, from L2; the slope or y, values and transpose once
//   determinism   in one kernel, sums have a fixed order, which depends only on N, and for dbias
//                 also on T; otherwise see linear_fp8.cu
//
// On GPUs of compute capability 9.0, if there are enough tiles, one kernel computes dz from the
// sums in registers (fp8_tile_product.cuh). Another warp loads the tile of the slope or of y
// while the consumers still multiply. values or the transpose then replace it in shared memory,
// each byte that of the same number; that warp stores both, and adds up the column sums of the
// consumers. Otherwise the product writes dy W, rounded to bfloat16, and a second kernel reads it.

#include <cstdint>
#include <optional>
#include <tuple>

#include "common/check.h"
#include "common/column_sum.cuh"
#include "common/fp8_cast.cuh"
#include "common/ptx/mma.cuh"
#include "common/ptx/wgmma.cuh"
#include "linear/fp8_tile_product.cuh"
#include "linear/ops.h"
#include "linear/slope.cuh"

namespace lightseq {
namespace {

constexpr const char* kOp = "activation_linear_bwd";

struct Params {
  TileProduct product;
  CUtensorMap given;  // of the slope, or of y's transpose
  CastMaps results;
  const float *dy_scale, *weight_scale;
  float factor;  // 1 / (1 - p)
  Cast cast;
};

struct Tiles {
  CastTiles cast;
  TileStages stages;
  float sums[kConsumerWarps][kTileColumns];  // column sums of the warps' rows
  Mbarrier given, full;  // given: also that results and sums of the tile before have been read
};

#ifdef LIGHTSEQ_HAS_WGMMA

__device__ __forceinline__ void init(Tiles& tiles) {
  tiles.given.init(kWarp);
  tiles.full.init(kConsumerWarps * kWarp);
}

// By one warp.
template <bool kSlope>
__device__ __forceinline__ void load_given_store_results(const Params& p, Tiles& tiles) {
  constexpr int kPerLane = kTileColumns / kWarp;
  const int lane = threadIdx.x % kWarp;
  uint32_t parity = 0;
  for_each_tile(p.product, [&](int row_tile, int column) {
    const int row = row_tile * kTileRows;
    if (lane > 0) {
      tiles.given.arrive();
    } else {
      tma_store_wait_read();
      if constexpr (kSlope) {
        tiles.given.arrive_expect_tx(sizeof(tiles.cast.values));
        tma_load(tiles.cast.values[0], p.given, column, row, tiles.given);
        tma_load(tiles.cast.values[1], p.given, column + kSwizzleBytes, row, tiles.given);
      } else {
        tiles.given.arrive_expect_tx(sizeof(tiles.cast.transpose));
        tma_load(tiles.cast.transpose, p.given, row, column, tiles.given);
      }
    }
    tiles.full.wait(parity);
    parity ^= 1;
    if (lane == 0) store_cast(p.results, tiles.cast, row_tile, column);
    if (p.cast.partials != nullptr && row_tile < p.product.row_tiles) {
#pragma unroll
      for (int i = 0; i < kPerLane; ++i) {
        const int of_tile = i * kWarp + lane;
        float sum = 0.0f;
#pragma unroll
        for (int warp = 0; warp < kConsumerWarps; ++warp) sum += tiles.sums[warp][of_tile];
        if (column + of_tile < p.cast.columns) {
          p.cast.partials[row_tile * p.cast.columns + column + of_tile] = sum;
        }
      }
    }
  });
  if (lane == 0) tma_store_wait_read();
}

// Sums of four columns over the rows of a warp; each lane gets that of column `column_of_sum`.
__device__ __forceinline__ float sum_of_rows(const float (&x)[4], int lane) {
  const bool upper = lane & 16, second = lane & 8;
  float a = upper ? x[2] : x[0], b = upper ? x[3] : x[1];
  a += __shfl_xor_sync(kAllLanes, upper ? x[0] : x[2], 16);
  b += __shfl_xor_sync(kAllLanes, upper ? x[1] : x[3], 16);
  float sum = second ? b : a;
  sum += __shfl_xor_sync(kAllLanes, second ? a : b, 8);
  return sum + __shfl_xor_sync(kAllLanes, sum, 4);
}
__device__ __forceinline__ int column_of_sum(int lane) { return lane / 16 * 2 + lane / 8 % 2; }

template <bool kSlope>
__device__ __forceinline__ void consume(const Params& p, Tiles& tiles, int thread) {
  const OfThread mine(thread);
  const float inverse = 1.0f / *p.cast.scale;
  const float scale = *p.dy_scale * *p.weight_scale * (kSlope ? p.factor / kSlopeSteps : p.factor);
  CastStatistics statistics = {};
  uint32_t parity = 0;
  const auto finish = [&](const Fp8Sums& sums, int row_tile, int column) {
    tiles.given.wait(parity);
    parity ^= 1;
    const int64_t first_row = static_cast<int64_t>(row_tile) * kTileRows;
    const int rows = static_cast<int>(min(p.cast.rows - first_row, int64_t{kTileRows}));
    const int columns = static_cast<int>(p.cast.columns) - column;
    uint32_t given[kGroupsAtOnce / 2][4];  // of two groups each
    const auto prepare = [&](int j) {
#pragma unroll
      for (int i = 0; i < kGroupsAtOnce / 2; ++i) {
        if constexpr (kSlope) {
          ldmatrix_x4(given[i], mine.values_at(tiles.cast, j + 2 * i));
        } else {
          ldmatrix_x4_trans(given[i], mine.transpose_at(tiles.cast, j + 2 * i));
#pragma unroll
          for (uint32_t& word : given[i]) word = positive_or_nan(word);
        }
      }
    };
    const auto numbers = [&](int j, float (&x)[kColumnsPerDraw]) {
      const uint32_t* const of_group = given[j % kGroupsAtOnce / 2] + j % 2 * 2;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int c = 0; c < 4; ++c) {
          float& number = x[4 * r + c];
          if constexpr (kSlope) {
            number *= scale * scaled_slope(of_group[r], c);
          } else {
            const bool passes = of_group[c / 2] >> (16 * (c % 2) + 8 * r + 7) & 1u;
            number = passes ? number * scale : 0.0f;
          }
        }
      }
      const float of_both[4] = {x[0] + x[4], x[1] + x[5], x[2] + x[6], x[3] + x[7]};
      const float sum = sum_of_rows(of_both, mine.lane);
      if (mine.lane / 4 % 2 == 0) {
        tiles.sums[mine.warp][j * kFp8Group + mine.column + column_of_sum(mine.lane)] = sum;
      }
    };
    cast_sums(sums, mine, tiles.cast, inverse, rows, columns, statistics, prepare, numbers);
    fence_proxy_async();
    tiles.full.arrive();
  };
  multiply_fp8_tiles(p.product, tiles.stages, thread, finish);
  statistics = statistics.of_warp();
  if (mine.lane == 0) statistics.publish(p.cast);
}

#endif

template <bool kSlope>
__global__ void LIGHTSEQ_CLUSTER(kCluster) __launch_bounds__(kThreads, 1)
    fp8_activation_linear_bwd_kernel(const __grid_constant__ Params p) {
#ifdef LIGHTSEQ_HAS_WGMMA
  run_warpgroups<Tiles>([&](Tiles& tiles, int thread) { consume<kSlope>(p, tiles, thread); },
                        [&](Tiles& tiles) {
                          if (threadIdx.x == 0) load_fp8_operands(p.product, tiles.stages);
                          if (threadIdx.x / kWarp == 1) load_given_store_results<kSlope>(p, tiles);
                        });
#else
  asm volatile("trap;");
#endif
}

}  // namespace

// dy [T, N], x [T, F], weight [N, F] in E4M3, slope [T, F] or none -> values [T, F] and transpose
// [F, P] of dz. Reads the transposes of x and weight. Writes dbias [F]: overwrites or accumulates.
std::tuple<Tensor, Tensor> fp8_activation_linear_bwd(const Operand& of_dy, const Operand& of_x,
                                                     const Operand& of_weight,
                                                     const std::optional<Tensor>& slope,
                                                     float scale,
                                                     const std::optional<Tensor>& dbias,
                                                     bool accumulate, const CastScalars& scalars) {
  const Tensor &dy = of_dy.values.value(), &y_transpose = of_x.transpose.value();
  const Tensor& weight_transpose = of_weight.transpose.value();
  const int32_t device = dy.get_device();
  check_rows(kOp, "dy", dy);
  check_rows(kOp, "weight_transpose", weight_transpose);
  check_rows(kOp, "y_transpose", y_transpose);
  const DeviceGuard guard(device);
  const Gradients gradients{{gradient_of(kOp, "dbias", dbias)}};
  const int64_t rows = dy.size(0), columns = weight_transpose.size(0);
  const CastResults results = allocate_cast(dy, rows, columns, scalars);
  Cast cast = results.cast;
  const Matrix given(slope ? *slope : y_transpose);
  std::optional<TileProduct> product;
  if (fits_tma(given)) product = fp8_tile_product(Matrix(dy), Matrix(weight_transpose), device);
  static_assert(kTileRows == kCastTile, "both kernels write as many partial sums");
  const int64_t sums = dbias.has_value() ? cast.tiles_down() : 0;
  const Tensor partials = allocate(dy, {sums, 1, columns}, ScalarType::Float);
  cast.partials = output_of<float>(partials);
  if (product.has_value()) {
    const Params params{
        .product = *product,
        .given = tensor_map_of(given, slope ? kTileRows : kTileColumns),
        .results = CastMaps(results),
        .dy_scale = of_dy.scale->const_data_ptr<float>(),
        .weight_scale = of_weight.scale->const_data_ptr<float>(),
        .factor = scale,
        .cast = cast,
    };
    launch_tiles<Tiles>(
        kOp,
        slope ? fp8_activation_linear_bwd_kernel<true> : fp8_activation_linear_bwd_kernel<false>,
        params);
  } else if (rows > 0) {
    const Tensor dx =
        fp8_linear_fwd(of_dy, {weight_transpose, std::nullopt, of_weight.scale}, std::nullopt);
    fp8_activation_bwd(kOp, dx, y_transpose, slope, scale, cast);
  }
  if (dbias.has_value()) add_partials(partials, gradients, accumulate);
  return {results.values, results.transpose};
}

}  // namespace lightseq
