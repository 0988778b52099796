// Backward of a linear layer and of the activation and dropout in front of it:
// x = dropout(activation(z)) [T, K], y = x W^T [T, N].
//
//   dz      [T, K]     = (dy W) slope / (1 - p)    sums in float32, rounded once; twice, if a
//                                                  second kernel multiplies by the slope
//   dweight [N, K] (+)= dy^T x
//   dbias   [K]    (+)= column sum of dz, after dz is rounded
//
// The slope [T, K] is the derivative of the activation, or 0 where an element is dropped. It comes
// from forward (linear_activation_fwd.cu); for bfloat16 it has a byte per number
// (slope.cuh). For ReLU it is computed from x: [x > 0].
//
// dbias is the gradient of the bias in z. If that bias is given and has a NaN, dbias becomes NaN
// there: forward's ReLU epilogue may have turned the NaN into 0 (nan.cuh).
//
//   bytes moved   for dz: dy and W several times, from L2; x or the slope, and dz, once
//   determinism   in one kernel, sums have a fixed order, which depends only on N, and for dbias
//                 also on T; other products: see linear.cu
//
// In 16 bits on GPUs of compute capability 9.0, if there are enough tiles, one kernel computes dz.
// Otherwise the product and then a second kernel run; the second kernel reads and writes [T, K]
// once more. cuBLASLt's epilogue for the derivative of ReLU is not used: with it, the product takes
// three times as long (linear.cu).
//
// tile_product.cuh describes the product. Another warp loads the tile of the slope (or of x)
// while the consumers still multiply. dz then replaces it in shared memory. While the consumers
// work on the next tile, TMA stores dz from there, and two more warps compute its column sums.

#include <cstdint>
#include <optional>
#include <tuple>
#include <type_traits>

#include "common/check.h"
#include "common/column_sum.cuh"
#include "common/columns.cuh"
#include "common/fp8_cast.cuh"
#include "common/ptx/mbarrier.cuh"
#include "common/ptx/wgmma.cuh"
#include "common/reduce.cuh"
#include "linear/matmul.h"
#include "linear/ops.h"
#include "linear/slope.cuh"
#include "linear/tile_product.cuh"

namespace lightseq {
namespace {

constexpr const char* kOp = "activation_linear_bwd";

struct Params {
  TileProduct product;
  CUtensorMap slope, dz;
  float scale;      // 1 / (1 - p)
  float* partials;  // [row_tiles, columns] column sums of dz; null: do not write
  int columns;
};

struct Tiles {
  Tile slope;  // or x; then dz. Bytes are in its second half
  TileStages stages;
  Mbarrier slope_full, dz_full, dz_summed;
};

#ifdef LIGHTSEQ_HAS_WGMMA

constexpr int kSumWarps = 2;  // for the column sums

__device__ __forceinline__ void init(Tiles& tiles) {
  tiles.slope_full.init(1);
  tiles.dz_full.init(kConsumerWarps * kWarp);
  tiles.dz_summed.init(kSumWarps * kWarp);
}

// Whether T's slopes are bytes. Then two of a tile's boxes have them, with kSwizzleBytes columns
// each.
template <typename T, bool kSlope>
constexpr bool kBytes = kSlope && std::is_same_v<T, __nv_bfloat16>;
constexpr int kByteBoxes = kTileColumns / kSwizzleBytes, kFirstByteBox = kAcross - kByteBoxes;

template <bool kOfBytes>
__device__ __forceinline__ void load_slope_store_dz(const Params& p, Tiles& tiles) {
  uint32_t parity = 0;
  for_each_tile(p.product, [&](int row_tile, int column) {
    tma_store_wait_read();
    tiles.dz_summed.wait(parity ^ 1);
    constexpr int kFirst = kOfBytes ? kFirstByteBox : 0;
    constexpr int kColumns = kOfBytes ? kSwizzleBytes : kSwizzleColumns;
    tiles.slope_full.arrive_expect_tx((kAcross - kFirst) * sizeof(tiles.slope[0]));
#pragma unroll
    for (int i = kFirst; i < kAcross; ++i) {
      tma_load(tiles.slope[i], p.slope, column + (i - kFirst) * kColumns, row_tile * kTileRows,
               tiles.slope_full);
    }
    tiles.dz_full.wait(parity);
    parity ^= 1;
#pragma unroll
    for (int i = 0; i < kAcross; ++i) {
      tma_store(p.dz, column + i * kSwizzleColumns, row_tile * kTileRows, tiles.slope[i]);
    }
    tma_store_commit();
  });
  tma_store_wait_read();
}

// Computes column sums of dz: four columns of each tile per thread.
template <typename T>
__device__ __forceinline__ void add_up(const Params& p, Tiles& tiles, int thread) {
  constexpr int kPerThread = kTileColumns / (kSumWarps * kWarp);
  static_assert(kPerThread == 4, "a thread reads 8 bytes of a row");
  const int first = thread * kPerThread, chunk = first % kSwizzleColumns / 8;
  const char* const tile = reinterpret_cast<const char*>(tiles.slope[first / kSwizzleColumns]);
  uint32_t parity = 0;
  for_each_tile(p.product, [&](int row_tile, int column) {
    tiles.dz_full.wait(parity);
    parity ^= 1;
    float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 8
    for (int row = 0; row < kTileRows; ++row) {
      const uint2 words = *reinterpret_cast<const uint2*>(
          tile + row * kSwizzleBytes + swizzle_128b(row, chunk) + first % 8 * sizeof(T));
      const float2 left = unpack_pair<T>(words.x), right = unpack_pair<T>(words.y);
      sum.x += left.x;
      sum.y += left.y;
      sum.z += right.x;
      sum.w += right.y;
    }
    tiles.dz_summed.arrive();  // all lanes: an arrival orders only the reads of its own lane
    if (p.partials != nullptr && row_tile < p.product.row_tiles && column + first < p.columns) {
      *reinterpret_cast<float4*>(p.partials + static_cast<int64_t>(row_tile) * p.columns + column +
                                 first) = sum;
    }
  });
}

// Keeps each number of the pair where x is positive or NaN; the others become zero.
__device__ __forceinline__ uint32_t choose(uint32_t pair, __half2 x) {
  return pair & __hgtu2_mask(x, __half2{});
}
__device__ __forceinline__ uint32_t choose(uint32_t pair, __nv_bfloat162 x) {
  return pair & __hgtu2_mask(x, __nv_bfloat162{});
}

// Where the two slopes of a pair are, if they are bytes; see place_of().
__device__ __forceinline__ const uint16_t* byte_pair(Tile& tile, int thread, int box, int pair) {
  const int lane = thread % kWarp, row = thread / kWarp * 16 + lane / 4;
  const int first = box * kSwizzleColumns + pair / 2 * 8 + lane % 4 * 2;  // column
  const char* const bytes = reinterpret_cast<char*>(tile[kFirstByteBox + first / kSwizzleBytes]);
  return reinterpret_cast<const uint16_t*>(bytes + (row + pair % 2 * 8) * kSwizzleBytes +
                                           swizzle_128b(lane / 4, first % kSwizzleBytes / 16) +
                                           first % 16);
}

// Computes dz from a thread's sums, and writes it in place of the slope or x. kSlope: whether the
// tile contains the slope.
template <typename T, bool kSlope>
__device__ __forceinline__ void make_dz(const float (&sums)[kTileSums], float scale, Tile& tile,
                                        int thread) {
  using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
  constexpr bool kOfBytes = kBytes<T, kSlope>;
  if constexpr (kOfBytes) scale /= kSlopeSteps;
  uint32_t given[2][kTilePairs];
  const auto load = [&](int box) {
#pragma unroll
    for (int i = 0; i < kTilePairs; ++i) {
      if constexpr (kOfBytes) {
        given[box % 2][i] = *byte_pair(tile, thread, box, i);
      } else {
        given[box % 2][i] = *reinterpret_cast<const uint32_t*>(place_of(tile, thread, box, i));
      }
    }
  };
  load(0);
#pragma unroll
  for (int box = 0; box < kAcross; ++box) {
    if (box + 1 < kAcross) load(box + 1);  // here, because nvcc moves no load ahead of a store
    // dz will replace bytes that other lanes of the warp read.
    if (kOfBytes && box >= kFirstByteBox) __syncwarp();
#pragma unroll
    for (int i = 0; i < kTilePairs; ++i) {
      const float* const both = sums + 2 * (box * kTilePairs + i);
      const uint32_t word = given[box % 2][i];
      uint32_t dz;
      if constexpr (kOfBytes) {
        dz = pack_pair<T>(both[0] * scale * scaled_slope(word, 0),
                          both[1] * scale * scaled_slope(word, 1));
      } else if constexpr (kSlope) {
        const float2 slope = unpack_pair<T>(word);
        dz = pack_pair<T>(both[0] * scale * slope.x, both[1] * scale * slope.y);
      } else {
        dz = choose(pack_pair<T>(both[0] * scale, both[1] * scale),
                    *reinterpret_cast<const Pair*>(&word));
      }
      *reinterpret_cast<uint32_t*>(place_of(tile, thread, box, i)) = dz;
    }
  }
}

template <typename T, bool kSlope>
__device__ __forceinline__ void consume(const Params& p, Tiles& tiles, int thread) {
  uint32_t parity = 0;  // of slope_full
  const auto finish = [&](const float (&sums)[kTileSums], int, int) {
    tiles.slope_full.wait(parity);
    parity ^= 1;
    make_dz<T, kSlope>(sums, p.scale, tiles.slope, thread);
    fence_proxy_async();
    tiles.dz_full.arrive();
  };
  multiply_tiles<T, false>(p.product, tiles.stages, thread, [](int, int) {}, finish);
}

#endif

template <typename T, bool kSlope>
__global__ void LIGHTSEQ_CLUSTER(kCluster) __launch_bounds__(kThreads, 1)
    activation_linear_bwd_kernel(const __grid_constant__ Params p) {
#ifdef LIGHTSEQ_HAS_WGMMA
  const auto load_and_store = [&](Tiles& tiles) {
    if (threadIdx.x == 0) load_operands<false>(p.product, tiles.stages);
    if (threadIdx.x == kWarp) load_slope_store_dz<kBytes<T, kSlope>>(p, tiles);
    if (threadIdx.x >= 2 * kWarp) add_up<T>(p, tiles, threadIdx.x - 2 * kWarp);
  };
  run_warpgroups<Tiles>([&](Tiles& tiles, int thread) { consume<T, kSlope>(p, tiles, thread); },
                        load_and_store);
#else
  asm volatile("trap;");
#endif
}

// Computes dz in one kernel. Returns nothing if the product cannot be computed by tiles.
std::optional<Tensor> dz_of_tiles(const Matrix& dy, const Matrix& weight, const Matrix& x,
                                  const std::optional<Matrix>& slope, float scale,
                                  const Gradient& dbias, bool accumulate, int32_t device) {
  const Matrix& given = slope.has_value() ? *slope : x;
  const std::optional<TileProduct> product = tile_product(dy, weight, false, device);
  if (!product.has_value() || !fits_tma(given)) return std::nullopt;
  const Tensor dz = allocate(x.owner, {x.rows, x.columns});
  const int64_t sums = dbias.data != nullptr ? product->row_tiles : 0;
  const Tensor partials = allocate(x.owner, {sums, 1, x.columns}, ScalarType::Float);
  const Params params{.product = *product,
                      .slope = tensor_map_of(given, kTileRows),
                      .dz = tensor_map_of(Matrix(dz), kTileRows),
                      .scale = scale,
                      .partials = output_of<float>(partials),
                      .columns = static_cast<int>(x.columns)};
  dispatch_16_bits(x.type, [&](auto zero) {
    using T = decltype(zero);
    launch_tiles<Tiles>(kOp,
                        slope.has_value() ? activation_linear_bwd_kernel<T, true>
                                          : activation_linear_bwd_kernel<T, false>,
                        params);
  });
  if (dbias.data != nullptr) add_partials(partials, {{dbias}}, accumulate);
  return dz;
}

// dy [T, N], x [T, K], weight [N, K], slope [T, K] or none, bias [K] or none -> dz [T, K]; its
// transpose [K, P], which is empty without a cast. Writes dweight [N, K] and dbias [K]: overwrites
// or accumulates.
std::tuple<Tensor, Tensor> activation_linear_bwd(
    std::optional<Tensor> dy_values, std::optional<Tensor> dy_transpose,
    std::optional<Tensor> dy_scale, std::optional<Tensor> x_values,
    std::optional<Tensor> x_transpose, std::optional<Tensor> x_scale,
    std::optional<Tensor> weight_values, std::optional<Tensor> weight_transpose,
    std::optional<Tensor> weight_scale, std::optional<Tensor> slope, double p,
    std::optional<Tensor> dweight, std::optional<Tensor> dbias, bool accumulate,
    std::optional<Tensor> bias, std::optional<Tensor> cast_scale, std::optional<Tensor> cast_amax,
    std::optional<Tensor> cast_saturated) {
  const float scale = static_cast<float>(1.0 / (1.0 - p));
  const Operand of_dy{dy_values, dy_transpose, dy_scale}, of_x{x_values, x_transpose, x_scale};
  if (of_x.is_quantised()) {
    const Operand of_weight{weight_values, weight_transpose, weight_scale};
    fp8_linear_bwd(of_dy, of_x, of_weight, dweight, std::nullopt, accumulate, false);
    return fp8_activation_linear_bwd(of_dy, of_x, of_weight, slope, scale, dbias, accumulate,
                                     cast_scalars(kOp, cast_scale, cast_amax, cast_saturated));
  }
  const Tensor &dy = *dy_values, &x = *x_values, &weight = *weight_values;
  const int32_t device = x.get_device();
  const DeviceGuard guard(device);
  const Gradient of_bias = gradient_of(kOp, "dbias", dbias, bias);
  std::optional<Matrix> given;
  if (slope.has_value()) given = Matrix(*slope);
  const std::optional<Tensor> dz =
      dz_of_tiles(Matrix(dy), Matrix(weight), Matrix(x), given, scale, of_bias, accumulate, device);
  const Tensor dx =
      linear_bwd(dy, x, weight, dweight, std::nullopt, std::nullopt, accumulate, !dz.has_value());
  return {dz.has_value() ? *dz : activation_bwd(kOp, dx, x, slope, scale, dbias, bias, accumulate),
          allocate(x, {0}, kE4m3)};
}

STABLE_TORCH_LIBRARY_IMPL(lightseq, CUDA, m) {
  m.impl("activation_linear_bwd", TORCH_BOX(&activation_linear_bwd));
}

}  // namespace
}  // namespace lightseq
