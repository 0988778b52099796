// Backward of a product with a positive part: x = dropout(relu(z)) [T, K], y = x W^T [T, N].
//
//   dz      [T, K]     = (dy W) [x > 0] / (1 - p)      sums in float32, rounded once
//   dweight [N, K] (+)= dy^T x
//   dbias   [K]    (+)= column sum of dz     as it is rounded: the gradient of a bias within z, and
//                       NaN where that bias is: ReLU in a product has made 0 of it
//
//   bytes moved   dy and W from the second cache, some times; x and dz once
//   determinism   sums have a fixed order, which depends on N alone, and on T for dbias
//
// On GPUs of compute capability 9.0 dz is one kernel. cublasLt's own epilogue for it takes three
// times as long as its plain product (linear.cu), and a kernel behind that, as other GPUs take it,
// reads and writes [T, K] once more.
//
// A block makes one tile of 128 x 256 of dz after the other. A warp asks for the operands, kStages
// steps of 64 numbers ahead; two warpgroups multiply, with 64 rows each. Two blocks of a cluster
// work on the same columns: each asks for half of the weight's, for both. Another warp asks for the
// tile's x, which comes while its sums are made; dz takes its place in shared memory. While the
// next tile's sums are made it leaves from there, and two more warps add up its columns.

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
#include "common/dependent_launch.cuh"
#include "common/matmul.h"
#include "common/occupancy.h"
#include "common/optional.h"
#include "common/reduce.cuh"
#include "common/warpgroup.cuh"

namespace lightseq {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int kCluster = 2;
constexpr int kMultipliers = 2;  // warpgroups
constexpr int kRows = kMultipliers * kProductRows;
constexpr int kColumns = kProductColumns;
constexpr int kAcross = kColumns / kTileColumns;  // tiles of memory beside each other
constexpr int kDepth = kTileColumns;              // numbers of a step
constexpr int kStages = 3;
constexpr int kThreads = (1 + kMultipliers) * kWarpgroup;

struct Params {
  CUtensorMap dy, weight, x, dz;
  float scale;      // 1 / (1 - p)
  float* partials;  // [row_tiles, columns] column sums of dz; null: not wanted
  int columns, steps;
  int row_tiles, column_tiles;
};

struct Tiles {
  uint16_t dy[kStages][kRows * kDepth];
  uint16_t weight[kStages][kAcross][kDepth * kTileColumns];
  uint16_t x[kAcross][kRows * kTileColumns];  // then dz
  Barrier full[kStages], empty[kStages];
  Barrier has_x, has_dz, is_summed;
};

#ifdef LIGHTSEQ_HAS_WARPGROUPS

constexpr int kWarps = kMultipliers * kWarpgroup / kWarp;  // that multiply
constexpr int kSummers = 2;                                // warps that add up columns

// The tiles of a block, each with the row and column that it begins with.
template <typename Run>
__device__ __forceinline__ void for_each_tile(const Params& p, Run&& run) {
  const int tiles = (p.row_tiles + kCluster - 1) / kCluster * p.column_tiles;
  for (int tile = blockIdx.x / kCluster; tile < tiles; tile += gridDim.x / kCluster) {
    const int row_tile = tile / p.column_tiles * kCluster + blockIdx.x % kCluster;
    run(row_tile, tile % p.column_tiles * kColumns);
  }
}

// A place in a ring, and the parity of the turn.
template <int kSize>
struct Place {
  int index = 0;
  uint32_t parity = 0;

  __device__ __forceinline__ void advance() {
    if (++index < kSize) return;
    index = 0;
    parity ^= 1;
  }
};

__device__ __forceinline__ void ask_for_operands(const Params& p, Tiles& tiles) {
  constexpr int kShare = kAcross / kCluster;
  const int rank = blockIdx.x % kCluster;
  Place<kStages> stage;
  for_each_tile(p, [&](int row_tile, int column) {
    for (int step = 0; step < p.steps; ++step, stage.advance()) {
      tiles.empty[stage.index].wait(stage.parity ^ 1);
      Barrier& full = tiles.full[stage.index];
      full.expect(sizeof(tiles.dy[0]) + sizeof(tiles.weight[0]));
      copy_tile(tiles.dy[stage.index], p.dy, step * kDepth, row_tile * kRows, full);
#pragma unroll
      for (int i = rank * kShare, left = kShare; left > 0; ++i, --left) {
        copy_tile(tiles.weight[stage.index][i], p.weight, column + i * kTileColumns, step * kDepth,
                  full, (1 << kCluster) - 1);
      }
    }
  });
}

__device__ __forceinline__ void exchange_x_for_dz(const Params& p, Tiles& tiles) {
  uint32_t parity = 0;
  for_each_tile(p, [&](int row_tile, int column) {
    wait_until_stores_have_read();
    tiles.is_summed.wait(parity ^ 1);
    tiles.has_x.expect(sizeof(tiles.x));
#pragma unroll
    for (int i = 0; i < kAcross; ++i) {
      copy_tile(tiles.x[i], p.x, column + i * kTileColumns, row_tile * kRows, tiles.has_x);
    }
    tiles.has_dz.wait(parity);
    parity ^= 1;
#pragma unroll
    for (int i = 0; i < kAcross; ++i) {
      store_tile(p.dz, column + i * kTileColumns, row_tile * kRows, tiles.x[i]);
    }
    end_of_stores();
  });
  wait_until_stores_have_read();
}

// A thread adds up four columns of a tile.
template <typename T>
__device__ __forceinline__ void add_up(const Params& p, Tiles& tiles, int thread) {
  constexpr int kPerThread = kColumns / (kSummers * kWarp);
  static_assert(kPerThread == 4, "a thread reads 8 bytes of a row");
  const int first = thread * kPerThread, part = first % kTileColumns / 8;
  const char* const tile = reinterpret_cast<const char*>(tiles.x[first / kTileColumns]);
  uint32_t parity = 0;
  for_each_tile(p, [&](int row_tile, int column) {
    tiles.has_dz.wait(parity);
    parity ^= 1;
    float4 sum = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 8
    for (int row = 0; row < kRows; ++row) {
      const uint2 words = *reinterpret_cast<const uint2*>(
          tile + row * kTileRowBytes + swizzled_part(row, part) + first % 8 * sizeof(T));
      const float2 left = unpack_pair<T>(words.x), right = unpack_pair<T>(words.y);
      sum.x += left.x;
      sum.y += left.y;
      sum.z += right.x;
      sum.w += right.y;
    }
    __syncwarp();
    if (thread % kWarp == 0) tiles.is_summed.arrive();
    if (p.partials != nullptr && row_tile < p.row_tiles && column + first < p.columns) {
      *reinterpret_cast<float4*>(p.partials + static_cast<int64_t>(row_tile) * p.columns + column +
                                 first) = sum;
    }
  });
}

// A pair where x is positive or NaN, else zero.
__device__ __forceinline__ uint32_t choose(uint32_t pair, __half2 x) {
  return pair & __hgtu2_mask(x, __half2{});
}
__device__ __forceinline__ uint32_t choose(uint32_t pair, __nv_bfloat162 x) {
  return pair & __hgtu2_mask(x, __nv_bfloat162{});
}

// Makes dz of a thread's sums, in the place of x. `row`: the first of its two.
template <typename T>
__device__ __forceinline__ void make_dz(const float (&sums)[kProductSums], float scale,
                                        Tiles& tiles, int row, int lane) {
  using Pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
  constexpr int kPairs = kProductSums / 2 / kAcross;
  const auto place = [&](int tile, int pair) {
    return reinterpret_cast<char*>(tiles.x[tile]) + (row + pair % 2 * 8) * kTileRowBytes +
           swizzled_part(lane / 4, pair / 2) + lane % 4 * 4;
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
    if (tile + 1 < kAcross) load(tile + 1);  // nvcc moves no load ahead of a store
#pragma unroll
    for (int i = 0; i < kPairs; ++i) {
      const float* const both = sums + 2 * (tile * kPairs + i);
      *reinterpret_cast<uint32_t*>(place(tile, i)) =
          choose(pack_pair<T>(both[0] * scale, both[1] * scale), x[tile % 2][i]);
    }
  }
}

template <typename T>
__device__ __forceinline__ void make_tiles(const Params& p, Tiles& tiles) {
  const int thread = threadIdx.x - kWarpgroup, warp = thread / kWarp, lane = thread % kWarp;
  const int row = warp * 16 + lane / 4;
  const uint32_t dy_offset = thread / kWarpgroup * kProductRows * kTileRowBytes;
  const auto release = [&](int stage) {
    if (lane < kCluster) tiles.empty[stage].arrive_at(lane);
  };
  Place<kStages> stage;
  uint32_t parity = 0;  // of the tile
  for_each_tile(p, [&](int, int) {
    float sums[kProductSums];
    int before = 0;
    for (int step = 0; step < p.steps; ++step, stage.advance()) {
      tiles.full[stage.index].wait(stage.parity);
      const uint32_t dy = shared_address(tiles.dy[stage.index]) + dy_offset;
      const uint32_t weight = shared_address(tiles.weight[stage.index]);
      begin_products();
#pragma unroll
      for (int k = 0; k < kDepth; k += kProductDepth) {
        add_product<T>(
            sums, operand(dy + k * 2, 8 * kTileRowBytes, 16),
            operand(weight + k * kTileRowBytes, 8 * kTileRowBytes, kDepth * kTileRowBytes),
            step + k > 0);
      }
      end_of_products();
      wait_for_products_but<1>();
      if (step > 0) release(before);
      before = stage.index;
    }
    wait_for_products(sums);
    release(before);

    tiles.has_x.wait(parity);
    parity ^= 1;
    make_dz<T>(sums, p.scale, tiles, row, lane);
    show_writes();
    __syncwarp();
    if (lane == 0) tiles.has_dz.arrive();
  });
}

#endif

template <typename T>
__global__ void LIGHTSEQ_CLUSTER(kCluster) __launch_bounds__(kThreads, 1)
    relu_linear_bwd_kernel(const __grid_constant__ Params p) {
#ifdef LIGHTSEQ_HAS_WARPGROUPS
  extern __shared__ __align__(1024) unsigned char shared[];
  Tiles& tiles = *reinterpret_cast<Tiles*>(shared);
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      tiles.full[i].init(1);
      tiles.empty[i].init(kWarps * kCluster);
    }
    tiles.has_x.init(1);
    tiles.has_dz.init(kWarps);
    tiles.is_summed.init(kSummers);
    show_barriers();
  }
  cluster_sync();
  wait_for_previous_kernel();
  // 64 Ki registers are 168 a thread: those that multiply need more, of which 128 for their sums.
  if (threadIdx.x >= kWarpgroup) {
    take_registers<232>();
    make_tiles<T>(p, tiles);
  } else {
    leave_registers<40>();
    if (threadIdx.x == 0) ask_for_operands(p, tiles);
    if (threadIdx.x == kWarp) exchange_x_for_dz(p, tiles);
    if (threadIdx.x >= 2 * kWarp) add_up<T>(p, tiles, threadIdx.x - 2 * kWarp);
    __syncwarp();
  }
  cluster_sync();  // the other block may still write here
#else
  asm volatile("trap;");
#endif
}

// A matrix that the hardware copies in tiles.
bool has_tiles(const Matrix& x) {
  return x.columns % 8 == 0 && x.stride % 8 == 0 && x.stride >= x.columns &&
         reinterpret_cast<uintptr_t>(x.data) % kRowAlignment == 0;
}

// dz in one kernel, by as many clusters as the GPU has room for. None where the GPU, or what it is
// given, is not for that, or where there are too few tiles to fill it.
std::optional<Tensor> dz_of_tiles(const Matrix& dy, const Matrix& weight, const Matrix& x,
                                  float scale, const Gradient& dbias, bool accumulate,
                                  int32_t device, cudaStream_t stream) {
  if (!has_warpgroups(device) || x.type == ScalarType::Float) return std::nullopt;
  if (!has_tiles(dy) || !has_tiles(weight) || !has_tiles(x)) return std::nullopt;
  const int64_t row_tiles = blocks_for(x.rows, kRows);
  const int64_t column_tiles = blocks_for(x.columns, kColumns);
  const int64_t clusters = resident_blocks(device, 1) / kCluster;
  const int64_t pairs = blocks_for(row_tiles, kCluster) * column_tiles;
  if (4 * pairs < 3 * clusters) return std::nullopt;
  const Tensor dz = allocate(x.owner, {x.rows, x.columns});
  const Tensor partials =
      allocate(x.owner, {dbias.data != nullptr ? row_tiles : 0, 1, x.columns}, ScalarType::Float);
  const Params params{tiles_of(dy, kRows),
                      tiles_of(weight, kDepth),
                      tiles_of(x, kRows),
                      tiles_of(Matrix(dz), kRows),
                      scale,
                      output_of<float>(partials),
                      static_cast<int>(x.columns),
                      static_cast<int>(blocks_for(dy.columns, kDepth)),
                      static_cast<int>(row_tiles),
                      static_cast<int>(column_tiles)};
  const auto start = [&](auto zero) {
    launch_early("relu_linear_bwd", relu_linear_bwd_kernel<decltype(zero)>,
                 static_cast<unsigned>(kCluster * std::min(pairs, clusters)), kThreads,
                 sizeof(Tiles), stream, params);
  };
  x.type == ScalarType::Half ? start(__half{}) : start(__nv_bfloat16{});
  if (dbias.data != nullptr) add_partials(partials, {{dbias}}, accumulate, stream);
  return dz;
}

// dy [T, N], x [T, K], weight [N, K] -> dz [T, K]; dweight [N, K] and dbias [K] are overwritten, or
// added to. bias [K], or none.
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
