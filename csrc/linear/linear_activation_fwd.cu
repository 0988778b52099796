// A linear layer with the activation and dropout behind it. T rows (tokens), C inputs, F outputs.
//
//   z     [T, F] = x W^T + bias              sums in float32, rounded once
//   y     [T, F] = dropout(activation(z))
//   slope [T, F] = activation'(z), or 0 where y is dropped; a byte each for bfloat16
//                  (slope.cuh)
//
//   saved for backward   the slope; for ReLU nothing, because it follows from y
//   bytes moved          x and W several times, from L2; y and the slope once
//   determinism          in one kernel, the sums of z have a fixed order, which depends only on C;
//                        otherwise see linear.cu
//
// For gelu and silu in 16 bits on GPUs of compute capability 9.0, if there are enough tiles, one
// kernel computes y and the slope. Otherwise the product writes z, and then a second kernel
// reads z and writes y and the slope. For ReLU with dropout, the product writes x W^T, and the
// second kernel adds the bias; without dropout, the product's epilogue is enough (linear.cu).
//
// tile_product.cuh describes the product. gelu and its derivative take some 20 instructions
// per number. If a consumer computed them for a whole tile, the tensor cores would wait for about a
// third of the time. So a consumer warp writes its 16 rows of z to shared memory. In each step of
// the next tile, while the tensor cores work, the warp computes y and the slope of a few of these
// rows (of one row, if a tile has at least 16 steps). A warp reads only rows that it has written. A
// lane has eight columns, so the warp's stores fill 512 bytes of a row.

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>

#include "common/check.h"
#include "common/columns.cuh"
#include "common/fp8_cast.cuh"
#include "common/ptx/wgmma.cuh"
#include "common/reduce.cuh"
#include "linear/activation.cuh"
#include "linear/matmul.h"
#include "linear/ops.h"
#include "linear/tile_product.cuh"

namespace lightseq {
namespace {

constexpr const char* kOp = "linear_activation_fwd";

template <typename T>
struct Params {
  TileProduct product;
  const T* bias;
  T* y;
  typename SlopeColumns<T>::Number* slope;  // null: do not write
  int64_t rows;
  int columns;
  DropoutFactors dropout;
};

struct Tiles {
  Tile z;
  uint16_t bias[kConsumerWarps][kTileColumns];
  TileStages stages;
};

#ifdef LIGHTSEQ_HAS_WGMMA

__device__ __forceinline__ void init(Tiles&) {}

constexpr int kWarpRows = kTileRows / kConsumerWarps;
static_assert(kTileColumns == kWarp * kColumnsPerDraw, "a lane has eight columns of a row");

// A warp's rows of the finished tile; one lane's columns of them.
template <typename T, Activation kActivation, bool kDrops>
struct Rows {
  const Params<T>& p;
  const Rng rng;
  const int chunk;        // of a box's row
  const uint32_t z;       // address of the warp's first row in the lane's box
  int next = 0, end = 0;  // rows of the warp
  int64_t row = 0;        // of y
  int64_t place = 0;      // in y
  int group = 0;          // column of y, in groups of a draw
  Columns<T> x;           // the next row; loaded before the products of a step, to hide the latency

  __device__ __forceinline__ Rows(const Params<T>& params, Tile& tile, int thread)
      : p(params),
        rng(kDrops ? Rng(params.dropout.dropout.rng) : Rng()),
        chunk(thread % kWarp % kChunks),
        z(shared_address(tile[thread % kWarp / kChunks]) +
          thread / kWarp * kWarpRows * kSwizzleBytes) {}

  __device__ __forceinline__ void begin(int64_t first_row, int first_column, int lane) {
    const int column = first_column + lane * kColumnsPerDraw;
    const int64_t left = column < p.columns ? p.rows - first_row : 0;
    next = 0;
    end = static_cast<int>(min(left, static_cast<int64_t>(kWarpRows)));
    row = first_row;
    place = row * p.columns + column;
    group = column / kColumnsPerDraw;
    load();
  }

  // Computes y and the slope of the next `count` rows.
  __device__ __forceinline__ void activate(int count) {
#pragma unroll 1
    for (; count > 0 && next < end; --count, ++row, place += p.columns) {
      uint32_t keep = kKeepAll;
      if constexpr (kDrops) keep = p.dropout.draw(rng, row, group);
      float no_bias[kColumnsPerDraw];  // z already contains the bias
      load_bias<T>(nullptr, 0, no_bias);
      Columns<T> y;
      SlopeColumns<T> slope;
      activate_columns<T, kActivation>(x, no_bias, p.dropout, kDrops, keep, y, slope);
      ++next;
      load();
      y.store(p.y + place);
      if (p.slope != nullptr) slope.store(p.slope + place);
    }
    __syncwarp();  // wgmma needs all lanes
  }

 private:
  static constexpr int kChunks = kSwizzleColumns / kColumnsPerDraw;

  // Behind the last row, it loads that row again, for nothing.
  __device__ __forceinline__ void load() {
    const int row = min(next, kWarpRows - 1);
    x.load_shared(z + row * kSwizzleBytes + swizzle_128b(row, chunk));
  }
};

template <typename T, Activation kActivation, bool kDrops>
__device__ __forceinline__ void consume(const Params<T>& p, Tiles& tiles, int thread) {
  Rows<T, kActivation, kDrops> rows(p, tiles.z, thread);
  const int warp = thread / kWarp, lane = thread % kWarp;
  const uint32_t bias = shared_address(tiles.bias[warp]);
  // Rows per step, so that all rows are done when the next tile is finished.
  const int in_step = (kWarpRows + p.product.steps - 1) / p.product.steps;
  const auto meanwhile = [&](int step, int column) {
    if (step == 0) {
      const int first = column + lane * kColumnsPerDraw;
      cp_async_zfill(bias + lane * kColumnsPerDraw * static_cast<int>(sizeof(T)), p.bias + first,
                     first < p.columns);
    }
    rows.activate(in_step);
  };
  // stmatrix: lane l gives the address of row l % 8 of matrix l / 8; matrices 1 and 3 are eight
  // rows below 0 and 2, matrices 2 and 3 eight columns beside them.
  const int row = warp * kWarpRows + lane / 8 % 2 * 8 + lane % 8;
  const uint32_t z = shared_address(tiles.z) + row * kSwizzleBytes;
  const auto finish = [&](const float (&sums)[kTileSums], int row_tile, int column) {
    cp_async_wait_all();
    __syncwarp();
    uint32_t pairs[kTileColumns / 8];  // of the bias
#pragma unroll
    for (int i = 0; i < kTileColumns / 8; ++i) {
      asm volatile("ld.shared.u32 %0, [%1];" : "=r"(pairs[i]) : "r"(bias + i * 16 + lane % 4 * 4));
    }
#pragma unroll
    for (int i = 0; i < kTileColumns / 8; i += 2) {
      uint32_t words[4];
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const float* const four = sums + (i + k) * 4;
        const float2 added = unpack_pair<T>(pairs[i + k]);
        words[2 * k] = pack_pair<T>(four[0] + added.x, four[1] + added.y);
        words[2 * k + 1] = pack_pair<T>(four[2] + added.x, four[3] + added.y);
      }
      stmatrix_x4(
          z + i / 8 * static_cast<int>(sizeof(tiles.z[0])) + swizzle_128b(row, i % 8 + lane / 16),
          words);
    }
    __syncwarp();
    rows.begin(static_cast<int64_t>(row_tile) * kTileRows + warp * kWarpRows, column, lane);
  };
  multiply_tiles<T, true>(p.product, tiles.stages, thread, meanwhile, finish);
  rows.activate(kWarpRows);
}

#endif

template <typename T, Activation kActivation, bool kDrops>
__global__ void LIGHTSEQ_CLUSTER(kCluster) __launch_bounds__(kThreads, 1)
    linear_activation_fwd_kernel(const __grid_constant__ Params<T> p) {
#ifdef LIGHTSEQ_HAS_WGMMA
  run_warpgroups<Tiles>(
      [&](Tiles& tiles, int thread) { consume<T, kActivation, kDrops>(p, tiles, thread); },
      [&](Tiles& tiles) {
        if (threadIdx.x == 0) load_operands<true>(p.product, tiles.stages);
      });
#else
  asm volatile("trap;");
#endif
}

using Results = std::tuple<Tensor, Tensor>;  // y and slope

// Computes y and the slope in one kernel. Returns nothing if there is no slope, or if the product
// cannot be computed by tiles.
std::optional<Results> by_tiles(const Tensor& x, const Tensor& weight, const Tensor& bias,
                                Activation activation, const DropoutFactors& dropout,
                                bool need_slope, int32_t device) {
  if (!has_slope(activation)) return std::nullopt;
  const std::optional<TileProduct> product = tile_product(Matrix(x), Matrix(weight), true, device);
  if (!product.has_value()) return std::nullopt;
  const int64_t rows = x.size(0), columns = weight.size(0);
  const Tensor y = allocate(x, {rows, columns});
  const Tensor slope = allocate_slope(y, need_slope);
  const auto start = [&](auto zero, auto chosen, auto drops) {
    using T = decltype(zero);
    const Params<T> params{.product = *product,
                           .bias = data_of<T>(bias),
                           .y = output_of<T>(y),
                           .slope = output_of<typename SlopeColumns<T>::Number>(slope),
                           .rows = rows,
                           .columns = static_cast<int>(columns),
                           .dropout = dropout};
    launch_tiles<Tiles>(kOp, linear_activation_fwd_kernel<T, chosen.value, drops.value>, params);
  };
  dispatch_with_slope(activation, [&](auto chosen) {
    dispatch_16_bits(x.scalar_type(), [&](auto zero) {
      dispatch_value<false, true>(dropout.drops(), [&](auto drops) { start(zero, chosen, drops); });
    });
  });
  return Results(y, slope);
}

// x [T, C], weight [F, C], bias [F] -> y [T, F]; its transpose [F, P], which is empty without a
// cast; and slope [T, F], which is empty for ReLU, or if need_slope is false.
std::tuple<Tensor, Tensor, Tensor> linear_activation_fwd(
    std::optional<Tensor> x_values, std::optional<Tensor> x_transpose,
    std::optional<Tensor> x_scale, std::optional<Tensor> weight_values,
    std::optional<Tensor> weight_transpose, std::optional<Tensor> weight_scale, const Tensor& bias,
    std::string activation, double p, const Tensor& rng, int64_t site, bool need_slope,
    std::optional<Tensor> cast_scale, std::optional<Tensor> cast_amax,
    std::optional<Tensor> cast_saturated) {
  const Activation which = activation_of(kOp, activation);
  const DropoutFactors dropout(rng.const_data_ptr<int64_t>(), site, p);
  const Operand of_x{x_values, x_transpose, x_scale};
  if (of_x.is_quantised()) {
    return fp8_linear_activation_fwd(of_x, {weight_values, weight_transpose, weight_scale}, bias,
                                     which, dropout, need_slope,
                                     cast_scalars(kOp, cast_scale, cast_amax, cast_saturated));
  }
  const Tensor &x = *x_values, &weight = *weight_values;
  const Tensor transpose = allocate(x, {0}, kE4m3);
  const int32_t device = x.get_device();
  const DeviceGuard guard(device);
  const bool has_few_rows = x.size(0) <= kFewRows && x.scalar_type() != ScalarType::Float;
  if (p == 0.0 && (which == Activation::kRelu || (has_few_rows && !need_slope))) {
    return {linear_fwd(x, weight, bias, which), transpose, allocate(x, {0})};
  }
  check_rows(kOp, "bias", bias);
  if (const auto results = by_tiles(x, weight, bias, which, dropout, need_slope, device)) {
    const auto& [y, slope] = *results;
    return {y, transpose, slope};
  }
  if (!has_slope(which)) {
    const Tensor z = linear_fwd(x, weight, std::nullopt);
    return {bias_activation_dropout_fwd(z, bias, activation, p, rng, site), transpose,
            allocate(x, {0})};
  }
  const Tensor z = linear_fwd(x, weight, bias);
  const Tensor slope = allocate_slope(z, need_slope);
  return {activation_fwd(kOp, z, which, dropout, slope), transpose, slope};
}

STABLE_TORCH_LIBRARY_IMPL(lightseq, CUDA, m) {
  m.impl("linear_activation_fwd", TORCH_BOX(&linear_activation_fwd));
}

}  // namespace
}  // namespace lightseq
