// linear_activation_fwd.cu with operands and results in E4M3. T rows (tokens), C inputs, F outputs.
//
//   z                 = x W^T + bias                 sums in float32
//   y                 = dropout(activation(z))       values [T, F] and transpose [F, P] in E4M3
//   slope [T, F]      = activation'(z), or 0 where y is dropped; not of ReLU, a byte each
//                       (slope.cuh)
//
//   saved for backward   the slope; for ReLU nothing, because it follows from y
//   bytes moved          x and W several times, from L2; values, transpose and slope once
//   determinism          in one kernel, sums have a fixed order, which depends only on C; otherwise
//                        see linear_fp8.cu
//
// On GPUs of compute capability 9.0, if there are enough tiles, one kernel computes y and the slope
// from the sums in registers (fp8_tile_product.cuh). Another warp stores them by TMA while
// the consumers work on the next tile. Otherwise the product writes z, rounded to bfloat16, and a
// second kernel reads it.

#include <cstdint>
#include <optional>
#include <tuple>
#include <type_traits>

#include "common/check.h"
#include "common/columns.cuh"
#include "common/fp8_cast.cuh"
#include "common/ptx/wgmma.cuh"
#include "linear/activation.cuh"
#include "linear/fp8_tile_product.cuh"
#include "linear/ops.h"

namespace lightseq {
namespace {

constexpr const char* kOp = "linear_activation_fwd";

struct Params {
  TileProduct product;
  CastMaps results;
  const float *x_scale, *weight_scale;
  const __nv_bfloat16* bias;
  uint8_t* slope;  // null: do not write
  Cast cast;
  DropoutFactors dropout;
};

struct Tiles {
  CastTiles cast;
  TileStages stages;
  Mbarrier full, empty;  // of the cast
};

#ifdef LIGHTSEQ_HAS_WGMMA

__device__ __forceinline__ void init(Tiles& tiles) {
  tiles.full.init(kConsumerWarps * kWarp);
  tiles.empty.init(1);
}

__device__ __forceinline__ void store_results(const Params& p, Tiles& tiles) {
  uint32_t parity = 0;
  for_each_tile(p.product, [&](int row_tile, int column) {
    tiles.full.wait(parity);
    parity ^= 1;
    store_cast(p.results, tiles.cast, row_tile, column);
    tma_store_wait_read();
    tiles.empty.arrive();
  });
}

template <Activation kActivation, bool kDrops>
__device__ __forceinline__ void consume(const Params& p, Tiles& tiles, int thread) {
  const OfThread mine(thread);
  const Rng rng = kDrops ? Rng(p.dropout.dropout.rng) : Rng();
  const float scale = *p.x_scale * *p.weight_scale, inverse = 1.0f / *p.cast.scale;
  CastStatistics statistics = {};
  uint32_t parity = 0;
  const auto finish = [&](const Fp8Sums& sums, int row_tile, int first_column) {
    const int64_t first_row = static_cast<int64_t>(row_tile) * kTileRows;
    const int rows = static_cast<int>(min(p.cast.rows - first_row, int64_t{kTileRows}));
    const int columns = static_cast<int>(p.cast.columns) - first_column;
    const int64_t row = first_row + mine.row;
    const int column = first_column + mine.column;
    uint2 bias[2][kGroupsAtOnce];  // of these groups, and of the next ones
    const auto load_bias = [&](int first) {
#pragma unroll
      for (int j = first; j < first + kGroupsAtOnce && j < kGroupsAcross; ++j) {
        uint2& of_group = bias[j / kGroupsAtOnce % 2][j % kGroupsAtOnce];
        of_group = {0, 0};
        if (j * kFp8Group < columns) {
          of_group = __ldg(reinterpret_cast<const uint2*>(p.bias + column + j * kFp8Group));
        }
      }
    };
    load_bias(0);
    tiles.empty.wait(parity ^ 1);
    parity ^= 1;
    uint32_t keep = 0;  // a byte for each of the groups
    const auto prepare = [&](int j) {
      load_bias(j + kGroupsAtOnce);
      if constexpr (kDrops) {
        // Two neighbours have the same two rows, and halves of the same eight columns. Each draws
        // for one row.
        const int odd = thread % 2;
        uint32_t drawn = 0;
#pragma unroll
        for (int i = 0; i < kGroupsAtOnce; ++i) {
          const int group = (column + (j + i) * kFp8Group) / kColumnsPerDraw;
          drawn |= p.dropout.draw(rng, row + odd, group) << (8 * i);
        }
        const uint32_t other = __shfl_xor_sync(kAllLanes, drawn, 1);
        const uint32_t first = (odd ? other : drawn) >> (odd ? 4 : 0);
        const uint32_t second = (odd ? drawn : other) << (odd ? 0 : 4);
        keep = (first & 0x0f0f0f0fu) | (second & 0xf0f0f0f0u);
      }
    };
    const auto numbers = [&](int j, float (&x)[kColumnsPerDraw]) {
      const uint2& of_group = bias[j / kGroupsAtOnce % 2][j % kGroupsAtOnce];
      const float2 left = unpack_pair<__nv_bfloat16>(of_group.x);
      const float2 right = unpack_pair<__nv_bfloat16>(of_group.y);
      const float of_column[kColumnsPerDraw] = {left.x, left.y, right.x, right.y,
                                                left.x, left.y, right.x, right.y};
      const uint32_t kept = kDrops ? keep >> (8 * (j % kGroupsAtOnce)) : kKeepAll;
      float slopes[kColumnsPerDraw];
#pragma unroll
      for (float& number : x) number *= scale;
      activate<__nv_bfloat16, kActivation>(x, of_column, p.dropout, kDrops, kept, slopes);
      if constexpr (has_slope(kActivation)) {
        if (p.slope == nullptr || mine.row >= rows || j * kFp8Group >= columns) return;
        SlopeColumns<__nv_bfloat16> codes;
        codes.pack(slopes);
        uint8_t* const to = p.slope + row * p.cast.columns + column + j * kFp8Group;
        *reinterpret_cast<uint32_t*>(to) = codes.words.x;
        *reinterpret_cast<uint32_t*>(to + p.cast.columns) = codes.words.y;
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

template <Activation kActivation, bool kDrops>
__global__ void LIGHTSEQ_CLUSTER(kCluster) __launch_bounds__(kThreads, 1)
    fp8_linear_activation_fwd_kernel(const __grid_constant__ Params p) {
#ifdef LIGHTSEQ_HAS_WGMMA
  run_warpgroups<Tiles>(
      [&](Tiles& tiles, int thread) { consume<kActivation, kDrops>(p, tiles, thread); },
      [&](Tiles& tiles) {
        if (threadIdx.x == 0) load_fp8_operands(p.product, tiles.stages);
        if (threadIdx.x == kWarp) store_results(p, tiles);
      });
#else
  asm volatile("trap;");
#endif
}

}  // namespace

// x [T, C], weight [F, C] in E4M3, bias [F] -> values [T, F], transpose [F, P] and slope [T, F],
// which is empty for ReLU, or if need_slope is false.
std::tuple<Tensor, Tensor, Tensor> fp8_linear_activation_fwd(
    const Operand& of_x, const Operand& of_weight, const Tensor& bias, Activation which,
    const DropoutFactors& dropout, bool need_slope, const CastScalars& scalars) {
  const Tensor &x = of_x.values.value(), &weight = of_weight.values.value();
  const int32_t device = x.get_device();
  check_rows(kOp, "x", x);
  check_rows(kOp, "weight", weight);
  check_rows(kOp, "bias", bias);
  const DeviceGuard guard(device);
  const int64_t rows = x.size(0), columns = weight.size(0);
  const CastResults results = allocate_cast(x, rows, columns, scalars);
  const Tensor slope = need_slope && has_slope(which)
                           ? allocate(x, {rows, columns}, ScalarType::Byte)
                           : allocate(x, {0}, ScalarType::Byte);
  const std::tuple all{results.values, results.transpose, slope};
  if (rows == 0) return all;
  const std::optional<TileProduct> product = fp8_tile_product(Matrix(x), Matrix(weight), device);
  if (!product.has_value()) {
    const Tensor z = fp8_linear_fwd(of_x, of_weight, std::nullopt);
    fp8_activation_fwd(kOp, z, bias, which, dropout, slope, results.cast);
    return all;
  }
  const Params params{.product = *product,
                      .results = CastMaps(results),
                      .x_scale = of_x.scale->const_data_ptr<float>(),
                      .weight_scale = of_weight.scale->const_data_ptr<float>(),
                      .bias = data_of<__nv_bfloat16>(bias),
                      .slope = output_of<uint8_t>(slope),
                      .cast = results.cast,
                      .dropout = dropout};
  const auto start = [&](auto chosen, auto drops) {
    launch_tiles<Tiles>(kOp, fp8_linear_activation_fwd_kernel<chosen.value, drops.value>, params);
  };
  dispatch_nonlinear(which, [&](auto chosen) {
    dispatch_value<false, true>(dropout.drops(), [&](auto drops) { start(chosen, drops); });
  });
  return all;
}

}  // namespace lightseq
