// A linear layer with the activation and dropout behind it. T rows (tokens), C inputs, F outputs.
//
//   z     [T, F] = x W^T + bias              sums in float32, rounded once
//   y     [T, F] = dropout(activation(z))
//   slope [T, F] = dropout(activation'(z))   the derivative of y; the same dropout bits
//
//   saved for backward   the slope; for ReLU nothing, because it follows from y
//   bytes moved          x and W several times, from L2; y and the slope once
//   determinism          in one kernel, the sums of z have a fixed order, which depends only on C;
//                        otherwise see linear.cu
//
// For both forms of gelu in 16 bits on GPUs of compute capability 9.0, if there are enough tiles,
// one kernel computes y and the slope. Otherwise the product writes z, and then a second kernel
// reads z and writes y and the slope. For ReLU with dropout, the product writes x W^T, and the
// second kernel adds the bias; without dropout, the product's epilogue is enough (linear.cu).
//
// common/tile_product.cuh describes the product. gelu and its derivative take some 30 instructions
// per number. If a consumer computed them for a whole tile, the tensor cores would wait for about a
// third of the time. So a consumer warp writes its 16 rows of z to shared memory. In each step of
// the next tile, while the tensor cores work, the warp computes y and the slope of a few of these
// rows (of one row, if a tile has at least 16 steps). A warp reads only rows that it has written. A
// lane has eight columns, so the warp's stores fill 512 bytes of a row.

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>
#include <string>
#include <tuple>

#include "common/activation.cuh"
#include "common/check.h"
#include "common/columns.cuh"
#include "common/launch.cuh"
#include "common/matmul.h"
#include "common/mbarrier.cuh"
#include "common/ops.h"
#include "common/optional.h"
#include "common/reduce.cuh"
#include "common/tile_product.cuh"
#include "common/wgmma.cuh"

namespace lightseq {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr const char* kOp = "linear_activation_fwd";

template <typename T>
struct Params {
  TileProduct product;
  const T* bias;
  T* y;
  T* slope;  // null: do not write
  int64_t rows;
  int columns;
  DropoutFactors dropout;
};

struct Tiles {
  Tile z;
  TileStages stages;
};

#ifdef LIGHTSEQ_HAS_WGMMA

constexpr int kWarpRows = kTileRows / kConsumerWarps;
static_assert(kTileColumns == kWarp * kColumnsPerDraw, "a lane has eight columns of a row");

// A warp's rows of the finished tile; one lane's columns of them.
template <typename T, Activation kActivation>
struct Rows {
  const Params<T>& p;
  const Rng rng;
  const int thread;
  const uint32_t z;  // address of the warp's first row in the lane's box
  int next = kWarpRows;
  int64_t first = 0;  // row of y
  int column = 0;

  __device__ __forceinline__ Rows(const Params<T>& params, Tile& tile, int number)
      : p(params),
        rng(params.dropout.drops() ? Rng(params.dropout.dropout.rng) : Rng()),
        thread(number),
        z(shared_address(tile[chunk() / kChunks]) + number / kWarp * kWarpRows * kSwizzleBytes) {}

  __device__ __forceinline__ void begin(int row_tile, int first_column) {
    next = 0;
    first = static_cast<int64_t>(row_tile) * kTileRows + thread / kWarp * kWarpRows;
    column = first_column + chunk() * kColumnsPerDraw;
  }

  // Computes y and the slope of the next `count` rows.
  __device__ __forceinline__ void activate(int count) {
#pragma unroll 1
    for (; count > 0 && next < kWarpRows; --count, ++next) {
      const int64_t row = first + next;
      if (row >= p.rows || column >= p.columns) continue;
      uint32_t keep = kKeepAll;
      if (p.dropout.drops()) keep = p.dropout.draw(rng, row, column / kColumnsPerDraw);
      Columns<T> x, y, slope;
      x.load_shared(z + next * kSwizzleBytes + swizzle_128b(next, chunk() % kChunks));
      float no_bias[kColumnsPerDraw];  // z already contains the bias
      load_bias<T>(nullptr, 0, no_bias);
      activate_columns<T, kActivation>(x, no_bias, p.dropout, keep, y, slope);
      const int64_t place = row * p.columns + column;
      y.store(p.y + place);
      if (p.slope != nullptr) slope.store(p.slope + place);
    }
    __syncwarp();  // wgmma needs all lanes
  }

 private:
  static constexpr int kChunks = kSwizzleColumns / kColumnsPerDraw;  // of a box's row
  __device__ __forceinline__ int chunk() const { return thread % kWarp; }
};

template <typename T, Activation kActivation>
__device__ __forceinline__ void consume(const Params<T>& p, Tiles& tiles, int thread) {
  Rows<T, kActivation> rows(p, tiles.z, thread);
  // Rows per step, so that all rows are done when the next tile is finished.
  const int in_step = (kWarpRows + p.product.steps - 1) / p.product.steps;
  const auto meanwhile = [&] { rows.activate(in_step); };
  const auto finish = [&](const float (&sums)[kTileSums], int row_tile, int column) {
    __syncwarp();
#pragma unroll
    for (int box = 0; box < kAcross; ++box) {
#pragma unroll
      for (int i = 0; i < kTilePairs; i += 2) {  // pairs of two rows, in the same columns
        const int first = column + box * kSwizzleColumns + i / 2 * 8 + thread % 4 * 2;
        const float2 bias =
            first < p.columns
                ? unpack_pair<T>(__ldg(reinterpret_cast<const uint32_t*>(p.bias + first)))
                : float2{};
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float* const both = sums + 2 * (box * kTilePairs + i + half);
          *reinterpret_cast<uint32_t*>(place_of(tiles.z, thread, box, i + half)) =
              pack_pair<T>(both[0] + bias.x, both[1] + bias.y);
        }
      }
    }
    __syncwarp();
    rows.begin(row_tile, column);
  };
  multiply_tiles<T, true>(p.product, tiles.stages, thread, meanwhile, finish);
  rows.activate(kWarpRows);
}

#endif

template <typename T, Activation kActivation>
__global__ void LIGHTSEQ_CLUSTER(kCluster) __launch_bounds__(kThreads, 1)
    linear_activation_fwd_kernel(const __grid_constant__ Params<T> p) {
#ifdef LIGHTSEQ_HAS_WGMMA
  extern __shared__ __align__(1024) unsigned char shared[];
  Tiles& tiles = *reinterpret_cast<Tiles*>(shared);
  if (threadIdx.x == 0) {
    tiles.stages.init();
    fence_mbarrier_init();
  }
  cluster_sync();
  griddepcontrol_wait();
  if (threadIdx.x >= kWarpgroup) {
    setmaxnreg_inc<kConsumerRegisters>();
    consume<T, kActivation>(p, tiles, threadIdx.x - kWarpgroup);
  } else {
    setmaxnreg_dec<kProducerRegisters>();
    if (threadIdx.x == 0) load_operands<true>(p.product, tiles.stages);
    __syncwarp();
  }
  cluster_sync();  // the other block may still arrive at this block's barriers
#else
  asm volatile("trap;");
#endif
}

using Results = std::tuple<Tensor, Tensor>;  // y and slope

// Computes y and the slope in one kernel. Returns nothing if the product cannot be computed by
// tiles.
std::optional<Results> by_tiles(const Tensor& x, const Tensor& weight, const Tensor& bias,
                                Activation activation, const DropoutFactors& dropout,
                                bool need_slope, int32_t device) {
  const std::optional<TileProduct> product = tile_product(Matrix(x), Matrix(weight), true, device);
  if (!product.has_value()) return std::nullopt;
  const int64_t rows = x.size(0), columns = weight.size(0);
  const Tensor y = allocate(x, {rows, columns});
  const Tensor slope = need_slope ? allocate(x, {rows, columns}) : allocate(x, {0});
  const auto start = [&](auto zero, auto chosen) {
    using T = decltype(zero);
    const Params<T> params{.product = *product,
                           .bias = static_cast<const T*>(bias.const_data_ptr()),
                           .y = output_of<T>(y),
                           .slope = output_of<T>(slope),
                           .rows = rows,
                           .columns = static_cast<int>(columns),
                           .dropout = dropout};
    launch({.op = kOp,
            .grid = product->blocks,
            .block = kThreads,
            .shared = sizeof(Tiles),
            .stream = current_stream(device),
            .dependent = true},
           linear_activation_fwd_kernel<T, chosen.value>, params);
  };
  const auto start_for = [&](auto chosen) {
    x.scalar_type() == ScalarType::Half ? start(__half{}, chosen) : start(__nv_bfloat16{}, chosen);
  };
  activation == Activation::kGelu ? start_for(ActivationConstant<Activation::kGelu>{})
                                  : start_for(ActivationConstant<Activation::kGeluAccurate>{});
  return Results(y, slope);
}

// x [T, C], weight [F, C], bias [F] -> y [T, F] and slope [T, F], which is empty for ReLU, or
// if need_slope is false.
Results linear_activation_fwd(const Tensor& x, const Tensor& weight, const Tensor& bias,
                              std::string activation, double p, const Tensor& rng, int64_t site,
                              bool need_slope) {
  const Activation which = activation_of(kOp, activation);
  const int32_t device = x.get_device();
  const torch::stable::accelerator::DeviceGuard guard(device);
  if (which == Activation::kRelu && p == 0.0) {
    return {linear_fwd(x, weight, bias, true), allocate(x, {0})};
  }
  check_rows(kOp, "bias", bias);
  const DropoutFactors dropout(rng.const_data_ptr<int64_t>(), site, p);
  if (has_slope(which)) {
    const auto results = by_tiles(x, weight, bias, which, dropout, need_slope, device);
    if (results.has_value()) return *results;
  }
  if (!has_slope(which)) {
    const Tensor z = linear_fwd(x, weight, std::nullopt, false);
    return {bias_activation_dropout_fwd(z, bias, activation, p, rng, site), allocate(x, {0})};
  }
  const Tensor z = linear_fwd(x, weight, bias, false);
  if (need_slope) {
    const Tensor y = replace_by_slope(kOp, z, which, dropout);
    return {y, z};
  }
  return {bias_activation_dropout_fwd(z, std::nullopt, activation, p, rng, site), allocate(x, {0})};
}

STABLE_TORCH_LIBRARY_IMPL(lightseq, CUDA, m) {
  m.impl("linear_activation_fwd", TORCH_BOX(&linear_activation_fwd));
}

}  // namespace
}  // namespace lightseq
