// Backward of a linear layer and the ReLU and dropout in front of it: x = dropout(relu(z)) [T, K],
// y = x W^T [T, N].
//
//   dz      [T, K]     = (dy W) [x > 0] / (1 - p)      sums in float32, rounded once
//   dweight [N, K] (+)= dy^T x
//   dbias   [K]    (+)= column sum of dz, after dz is rounded
//
// dbias is the gradient of a bias that was added in z. It becomes NaN where that bias is NaN: the
// ReLU epilogue of the product has turned the NaN into 0 (common/nan.cuh).
//
//   bytes moved   dy and W several times, from L2; x and dz once
//   determinism   sums have a fixed order, which depends only on N, and for dbias also on T
//
// On GPUs of compute capability 9.0, one kernel computes dz. cuBLASLt's own epilogue for it takes
// three times as long as the product without epilogue (linear.cu). Other GPUs run the product and
// then a second kernel, which reads and writes [T, K] once more.
//
// A block computes tiles of 128 x 256 of dz, one after the other. A producer warp loads the
// operands by TMA, kStages steps of 64 numbers ahead. Two consumer warpgroups multiply with wgmma,
// 64 rows each. The two blocks of a cluster work on the same columns: each loads half of the
// weight's tile, and TMA multicast writes it to both. Another warp loads the tile of x while the
// consumers still multiply. dz then replaces x in shared memory. While the consumers work on the
// next tile, TMA stores dz from there, and two more warps compute its column sums.

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <type_traits>

#include "common/backward.h"
#include "common/check.h"
#include "common/cluster.cuh"
#include "common/column_sum.cuh"
#include "common/columns.cuh"
#include "common/launch.cuh"
#include "common/matmul.h"
#include "common/mbarrier.cuh"
#include "common/occupancy.h"
#include "common/optional.h"
#include "common/reduce.cuh"
#include "common/tma.cuh"
#include "common/wgmma.cuh"

namespace lightseq {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int kCluster = 2;
constexpr int kConsumers = 2;  // warpgroups
constexpr int kRows = kConsumers * kWgmmaM;
constexpr int kColumns = 256;                        // of a product
constexpr int kAcross = kColumns / kSwizzleColumns;  // boxes side by side in a tile
constexpr int kDepth = kSwizzleColumns;              // part of N that a step multiplies
constexpr int kStages = 3;
constexpr int kThreads = (1 + kConsumers) * kWarpgroup;

struct Params {
  CUtensorMap dy, weight, x, dz;
  float scale;      // 1 / (1 - p)
  float* partials;  // [row_tiles, columns] column sums of dz; null: do not compute
  int columns, steps;
  int row_tiles, column_tiles;
};

struct Tiles {
  uint16_t dy[kStages][kRows * kDepth];
  uint16_t weight[kStages][kAcross][kDepth * kSwizzleColumns];
  uint16_t x[kAcross][kRows * kSwizzleColumns];  // then dz
  Mbarrier full[kStages], empty[kStages];
  Mbarrier x_full, dz_full, dz_summed;
};

#ifdef LIGHTSEQ_HAS_WGMMA

constexpr int kSums = wgmma_sums(kColumns);

constexpr int kConsumerWarps = kConsumers * kWarpgroup / kWarp;
constexpr int kSumWarps = 2;  // for the column sums

// Calls run(row tile, first column) for each tile of the block.
template <typename Run>
__device__ __forceinline__ void for_each_tile(const Params& p, Run&& run) {
  const int tiles = (p.row_tiles + kCluster - 1) / kCluster * p.column_tiles;
  for (int tile = blockIdx.x / kCluster; tile < tiles; tile += gridDim.x / kCluster) {
    const int row_tile = tile / p.column_tiles * kCluster + blockIdx.x % kCluster;
    run(row_tile, tile % p.column_tiles * kColumns);
  }
}

__device__ __forceinline__ void load_operands(const Params& p, Tiles& tiles) {
  constexpr int kShare = kAcross / kCluster;
  const int rank = blockIdx.x % kCluster;
  Stage<kStages> stage;
  for_each_tile(p, [&](int row_tile, int column) {
    for (int step = 0; step < p.steps; ++step, stage.advance()) {
      tiles.empty[stage.index].wait(stage.parity ^ 1);
      Mbarrier& full = tiles.full[stage.index];
      full.arrive_expect_tx(sizeof(tiles.dy[0]) + sizeof(tiles.weight[0]));
      tma_load(tiles.dy[stage.index], p.dy, step * kDepth, row_tile * kRows, full);
#pragma unroll
      for (int i = rank * kShare, left = kShare; left > 0; ++i, --left) {
        tma_load_multicast(tiles.weight[stage.index][i], p.weight, column + i * kSwizzleColumns,
                           step * kDepth, full, (1 << kCluster) - 1);
      }
    }
  });
}

__device__ __forceinline__ void load_x_store_dz(const Params& p, Tiles& tiles) {
  uint32_t parity = 0;
  for_each_tile(p, [&](int row_tile, int column) {
    tma_store_wait_read();
    tiles.dz_summed.wait(parity ^ 1);
    tiles.x_full.arrive_expect_tx(sizeof(tiles.x));
#pragma unroll
    for (int i = 0; i < kAcross; ++i) {
      tma_load(tiles.x[i], p.x, column + i * kSwizzleColumns, row_tile * kRows, tiles.x_full);
    }
    tiles.dz_full.wait(parity);
    parity ^= 1;
#pragma unroll
    for (int i = 0; i < kAcross; ++i) {
      tma_store(p.dz, column + i * kSwizzleColumns, row_tile * kRows, tiles.x[i]);
    }
    tma_store_commit();
  });
  tma_store_wait_read();
}

// Computes column sums of dz: four columns of each tile per thread.
template <typename T>
__device__ __forceinline__ void add_up(const Params& p, Tiles& tiles, int thread) {
  constexpr int kPerThread = kColumns / (kSumWarps * kWarp);
  static_assert(kPerThread == 4, "a thread reads 8 bytes of a row");
  const int first = thread * kPerThread, chunk = first % kSwizzleColumns / 8;
  const char* const tile = reinterpret_cast<const char*>(tiles.x[first / kSwizzleColumns]);
  uint32_t parity = 0;
  for_each_tile(p, [&](int row_tile, int column) {
    tiles.dz_full.wait(parity);
    parity ^= 1;
    float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 8
    for (int row = 0; row < kRows; ++row) {
      const uint2 words = *reinterpret_cast<const uint2*>(
          tile + row * kSwizzleBytes + swizzle_128b(row, chunk) + first % 8 * sizeof(T));
      const float2 left = unpack_pair<T>(words.x), right = unpack_pair<T>(words.y);
      sum.x += left.x;
      sum.y += left.y;
      sum.z += right.x;
      sum.w += right.y;
    }
    __syncwarp();
    if (thread % kWarp == 0) tiles.dz_summed.arrive();
    if (p.partials != nullptr && row_tile < p.row_tiles && column + first < p.columns) {
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

// Computes dz from a thread's sums, and writes it in place of x. `row`: the first of the thread's
// two rows.
template <typename T>
__device__ __forceinline__ void make_dz(const float (&sums)[kSums], float scale, Tiles& tiles,
                                        int row, int lane) {
  using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
  constexpr int kPairs = kSums / 2 / kAcross;
  const auto place = [&](int tile, int pair) {
    return reinterpret_cast<char*>(tiles.x[tile]) + (row + pair % 2 * 8) * kSwizzleBytes +
           swizzle_128b(lane / 4, pair / 2) + lane % 4 * 4;
  };
  Pair x[2][kPairs];
  const auto load = [&](int tile) {
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      x[tile % 2][i] = *reinterpret_cast<const Pair*>(place(tile, i));
    }
  };
  load(0);
#pragma unroll
  for (int tile = 0; tile < kAcross; ++tile) {
    if (tile + 1 < kAcross) load(tile + 1);  // here, because nvcc moves no load ahead of a store
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const float* const both = sums + 2 * (tile * kPairs + i);
      *reinterpret_cast<uint32_t*>(place(tile, i)) =
          choose(pack_pair<T>(both[0] * scale, both[1] * scale), x[tile % 2][i]);
    }
  }
}

template <typename T>
__device__ __forceinline__ void multiply_tiles(const Params& p, Tiles& tiles) {
  const int thread = threadIdx.x - kWarpgroup, warp = thread / kWarp, lane = thread % kWarp;
  const int row = warp * 16 + lane / 4;
  const uint32_t dy_offset = thread / kWarpgroup * kWgmmaM * kSwizzleBytes;
  const auto release = [&](int stage) {
    if (lane < kCluster) tiles.empty[stage].arrive_cluster(lane);
  };
  Stage<kStages> stage;
  uint32_t parity = 0;  // of x_full
  for_each_tile(p, [&](int, int) {
    float sums[kSums];
    int before = 0;
    for (int step = 0; step < p.steps; ++step, stage.advance()) {
      tiles.full[stage.index].wait(stage.parity);
      const WgmmaOperand dy(shared_address(tiles.dy[stage.index]) + dy_offset);
      const WgmmaOperand weight(shared_address(tiles.weight[stage.index]), kDepth * kSwizzleBytes);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < kDepth; k += kWgmmaK) {
        wgmma<T, 0, 1>(sums, dy.at(k * 2), weight.at(k * kSwizzleBytes), step + k > 0);
      }
      wgmma_commit();
      wgmma_wait<1>();
      if (step > 0) release(before);
      before = stage.index;
    }
    wgmma_wait<0>();
    wgmma_hold(sums);
    release(before);

    tiles.x_full.wait(parity);
    parity ^= 1;
    make_dz<T>(sums, p.scale, tiles, row, lane);
    fence_proxy_async();
    __syncwarp();
    if (lane == 0) tiles.dz_full.arrive();
  });
}

#endif

template <typename T>
__global__ void LIGHTSEQ_CLUSTER(kCluster) __launch_bounds__(kThreads, 1)
    relu_linear_bwd_kernel(const __grid_constant__ Params p) {
#ifdef LIGHTSEQ_HAS_WGMMA
  extern __shared__ __align__(1024) unsigned char shared[];
  Tiles& tiles = *reinterpret_cast<Tiles*>(shared);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      tiles.full[i].init(1);
      tiles.empty[i].init(kConsumerWarps * kCluster);
    }
    tiles.x_full.init(1);
    tiles.dz_full.init(kConsumerWarps);
    tiles.dz_summed.init(kSumWarps);
    fence_mbarrier_init();
  }
  cluster_sync();
  griddepcontrol_wait();
  // An SM has 64 Ki registers, which is 168 per thread. Consumers need more, 128 for sums alone.
  if (threadIdx.x >= kWarpgroup) {
    setmaxnreg_inc<232>();
    multiply_tiles<T>(p, tiles);
  } else {
    setmaxnreg_dec<40>();
    if (threadIdx.x == 0) load_operands(p, tiles);
    if (threadIdx.x == kWarp) load_x_store_dz(p, tiles);
    if (threadIdx.x >= 2 * kWarp) add_up<T>(p, tiles, threadIdx.x - 2 * kWarp);
    __syncwarp();
  }
  cluster_sync();  // the other block may still write to this block's shared memory
#else
  asm volatile("trap;");
#endif
}

// Computes dz in one kernel, with as many clusters as can be resident. Returns nothing if the GPU
// or the operands do not support this kernel, or if there are too few tiles to fill the GPU.
std::optional<Tensor> dz_of_tiles(const Matrix& dy, const Matrix& weight, const Matrix& x,
                                  float scale, const Gradient& dbias, bool accumulate,
                                  int32_t device, cudaStream_t stream) {
  if (!has_wgmma(device) || x.type == ScalarType::Float) return std::nullopt;
  if (!fits_tma(dy) || !fits_tma(weight) || !fits_tma(x)) return std::nullopt;
  const int64_t row_tiles = blocks_for(x.rows, kRows);
  const int64_t column_tiles = blocks_for(x.columns, kColumns);
  const int64_t clusters = resident_blocks(device, 1) / kCluster;
  const int64_t pairs = blocks_for(row_tiles, kCluster) * column_tiles;
  if (4 * pairs < 3 * clusters) return std::nullopt;
  const Tensor dz = allocate(x.owner, {x.rows, x.columns});
  const Tensor partials =
      allocate(x.owner, {dbias.data != nullptr ? row_tiles : 0, 1, x.columns}, ScalarType::Float);
  const Params params{.dy = tensor_map_of(dy, kRows),
                      .weight = tensor_map_of(weight, kDepth),
                      .x = tensor_map_of(x, kRows),
                      .dz = tensor_map_of(Matrix(dz), kRows),
                      .scale = scale,
                      .partials = output_of<float>(partials),
                      .columns = static_cast<int>(x.columns),
                      .steps = static_cast<int>(blocks_for(dy.columns, kDepth)),
                      .row_tiles = static_cast<int>(row_tiles),
                      .column_tiles = static_cast<int>(column_tiles)};
  const auto start = [&](auto zero) {
    launch({.op = "relu_linear_bwd",
            .grid = static_cast<unsigned>(kCluster * std::min(pairs, clusters)),
            .block = kThreads,
            .shared = sizeof(Tiles),
            .stream = stream,
            .dependent = true},
           relu_linear_bwd_kernel<decltype(zero)>, params);
  };
  x.type == ScalarType::Half ? start(__half{}) : start(__nv_bfloat16{});
  if (dbias.data != nullptr) add_partials(partials, {{dbias}}, accumulate, stream);
  return dz;
}

// dy [T, N], x [T, K], weight [N, K], bias [K] or none -> dz [T, K]. Writes dweight [N, K] and
// dbias [K]: overwrites or accumulates.
Tensor relu_linear_bwd(const Tensor& dy, const Tensor& x, const Tensor& weight, double p,
                       std::optional<Tensor> dweight, std::optional<Tensor> dbias, bool accumulate,
                       std::optional<Tensor> bias) {
  const float scale = static_cast<float>(1.0 / (1.0 - p));
  const int32_t device = x.get_device();
  const torch::stable::accelerator::DeviceGuard guard(device);
  const Gradient of_bias = gradient_of("relu_linear_bwd", "dbias", dbias, bias);
  const std::optional<Tensor> dz = dz_of_tiles(Matrix(dy), Matrix(weight), Matrix(x), scale,
                                               of_bias, accumulate, device, current_stream(device));
  const Tensor dx =
      linear_bwd(dy, x, weight, dweight, std::nullopt, std::nullopt, accumulate, !dz.has_value());
  return dz.has_value() ? *dz : relu_bwd(dx, x, scale, dbias, bias, accumulate);
}

STABLE_TORCH_LIBRARY_IMPL(lightseq, CUDA, m) {
  m.impl("relu_linear_bwd", TORCH_BOX(&relu_linear_bwd));
}

}  // namespace
}  // namespace lightseq
