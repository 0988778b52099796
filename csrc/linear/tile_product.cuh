// A product of 16-bit matrices on GPUs of compute capability 9.0, for kernels that process its
// results before they reach global memory: out [rows, columns] = a b, with a [rows, depth] and, in
// memory, b [depth, columns] or b^T [columns, depth].
//
// A block computes tiles of 128 x 256, one after the other, in steps of 64 along the depth. A
// producer warp loads the operands by TMA, up to kStages steps ahead. Two consumer warpgroups
// multiply with wgmma, 64 rows each. The two blocks of a cluster work on the same columns: each
// loads half of b's tile, and TMA multicast writes it to both.
//
// The consumers write a finished tile, rounded to 16 bits, to shared memory. There it is processed
// during the next tile: by other warps of the kernel, or by the consumers, while the tensor cores
// work on a step.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>

#include "common/check.h"
#include "common/device.h"
#include "common/launch.cuh"
#include "common/ptx/cluster.cuh"
#include "common/ptx/mbarrier.cuh"
#include "common/ptx/tma.cuh"
#include "common/ptx/wgmma.cuh"
#include "common/reduce.cuh"
#include "linear/matmul.h"

namespace lightseq {

constexpr int kCluster = 2;
constexpr int kConsumers = 2;  // warpgroups
constexpr int kConsumerWarps = kConsumers * kWarpgroup / kWarp;
constexpr int kTileRows = kConsumers * kWgmmaM;
constexpr int kTileColumns = 256;                        // of a product
constexpr int kAcross = kTileColumns / kSwizzleColumns;  // boxes side by side in a tile
constexpr int kDepth = kSwizzleColumns;                  // part of the depth that a step multiplies
constexpr int kStages = 3;

// A block has the consumers and one warpgroup that loads, and may do other work of the kernel. An
// SM has 64 Ki registers: 168 for each of 384 threads, rounded down to a multiple of 8. Consumers
// need more, 128 for sums alone.
constexpr int kThreads = (1 + kConsumers) * kWarpgroup;
constexpr int kConsumerRegisters = 232, kProducerRegisters = 40;

// Whether the TMA can copy the matrix.
inline bool fits_tma(const Matrix& x) {
  return x.bytes(x.columns) % 16 == 0 && x.bytes(x.stride) % 16 == 0 && x.stride >= x.columns &&
         reinterpret_cast<uintptr_t>(x.data) % kRowAlignment == 0;
}

// Boxes of `rows` times 128 bytes.
inline CUtensorMap tensor_map_of(const Matrix& x, int rows) {
  return tensor_map_of<2>(
      x.data, x.type, {static_cast<cuuint64_t>(x.columns), static_cast<cuuint64_t>(x.rows)},
      {static_cast<cuuint64_t>(x.bytes(x.stride))},
      {static_cast<cuuint32_t>(kSwizzleBytes / x.bytes(1)), static_cast<cuuint32_t>(rows)});
}

struct TileProduct {
  CUtensorMap a = {}, b = {};
  int steps = 0;
  int row_tiles, column_tiles;
  unsigned blocks;  // of the launch: at most one per SM, and one for each tile of a pair
};

// Tiles for results of this size, if they occupy at least three quarters of the SMs.
inline std::optional<TileProduct> tiles_of(int64_t rows, int64_t columns, int32_t device) {
  const int64_t row_tiles = blocks_for(rows, kTileRows);
  const int64_t column_tiles = blocks_for(columns, kTileColumns);
  const int64_t clusters = resident_blocks(device, 1) / kCluster;
  const int64_t pairs = blocks_for(row_tiles, kCluster) * column_tiles;
  if (4 * pairs < 3 * clusters) return std::nullopt;
  return TileProduct{.row_tiles = static_cast<int>(row_tiles),
                     .column_tiles = static_cast<int>(column_tiles),
                     .blocks = static_cast<unsigned>(kCluster * std::min(pairs, clusters))};
}

// The product a b, or a b^T with transpose_b, of matrices in memory, if the GPU and the operands
// support it, and if there are tiles_of() it.
inline std::optional<TileProduct> tile_product(const Matrix& a, const Matrix& b, bool transpose_b,
                                               int32_t device) {
  if (!has_wgmma(device)) return std::nullopt;
  if (a.type != ScalarType::Half && a.type != ScalarType::BFloat16) return std::nullopt;
  if (!fits_tma(a) || !fits_tma(b)) return std::nullopt;
  std::optional<TileProduct> product = tiles_of(a.rows, transpose_b ? b.rows : b.columns, device);
  if (!product.has_value()) return std::nullopt;
  product->a = tensor_map_of(a, kTileRows);
  product->b = tensor_map_of(b, kDepth);  // the boxes of b^T are also 64 x 64
  product->steps = static_cast<int>(blocks_for(a.columns, kDepth));
  return product;
}

// params: the kernel's, with TileProduct `product`.
template <typename Tiles, typename Params>
void launch_tiles(const char* op, void (*kernel)(Params), const Params& params) {
  launch({.op = op,
          .grid = params.product.blocks,
          .block = kThreads,
          .shared = sizeof(Tiles),
          .dependent = true},
         kernel, params);
}

// A tile of 16-bit numbers, as boxes of 64 columns in the 128-byte swizzle.
using Tile = uint16_t[kAcross][kTileRows * kSwizzleColumns];

struct TileStages {
  uint16_t a[kStages][kTileRows * kDepth];
  uint16_t b[kStages][kAcross][kDepth * kSwizzleColumns];
  Mbarrier full[kStages], empty[kStages];

  __device__ __forceinline__ void init() {
    for (int i = 0; i < kStages; ++i) {
      full[i].init(1);
      empty[i].init(kConsumerWarps * kCluster);
    }
  }
};

#ifdef LIGHTSEQ_HAS_WGMMA

constexpr int kTileSums = wgmma_sums(kTileColumns);  // per thread of a consumer

// Calls run(row tile, first column) for each tile of the block.
template <typename Run>
__device__ __forceinline__ void for_each_tile(const TileProduct& p, Run&& run) {
  const int tiles = (p.row_tiles + kCluster - 1) / kCluster * p.column_tiles;
  for (int tile = blockIdx.x / kCluster; tile < tiles; tile += gridDim.x / kCluster) {
    const int row_tile = tile / p.column_tiles * kCluster + blockIdx.x % kCluster;
    run(row_tile, tile % p.column_tiles * kTileColumns);
  }
}

// Loads the operands of all tiles. By one thread.
template <bool kTransposeB>
__device__ __forceinline__ void load_operands(const TileProduct& p, TileStages& stages) {
  constexpr int kShare = kAcross / kCluster;
  const int rank = blockIdx.x % kCluster;
  Stage<kStages> stage;
  for_each_tile(p, [&](int row_tile, int column) {
    for (int step = 0; step < p.steps; ++step, stage.advance()) {
      stages.empty[stage.index].wait(stage.parity ^ 1);
      Mbarrier& full = stages.full[stage.index];
      full.arrive_expect_tx(sizeof(stages.a[0]) + sizeof(stages.b[0]));
      tma_load(stages.a[stage.index], p.a, step * kDepth, row_tile * kTileRows, full);
#pragma unroll
      for (int i = rank * kShare, left = kShare; left > 0; ++i, --left) {
        const int across = column + i * kSwizzleColumns, along = step * kDepth;
        tma_load_multicast(stages.b[stage.index][i], p.b, kTransposeB ? along : across,
                           kTransposeB ? across : along, full, (1 << kCluster) - 1);
      }
    }
  });
}

// Multiplies all tiles, and calls finish(sums, row tile, first column) for each. Calls
// meanwhile(step, first column) in each step, while the tensor cores work. By the consumers;
// thread: index of this thread among theirs.
template <typename T, bool kTransposeB, typename Meanwhile, typename Finish>
__device__ __forceinline__ void multiply_tiles(const TileProduct& p, TileStages& stages, int thread,
                                               Meanwhile&& meanwhile, Finish&& finish) {
  // Bytes from a box of b to the next one across, and from 16 elements of the depth to the next
  // ones. The boxes of b^T follow each other in memory, so wgmma does not use kBox.
  constexpr int kBox = kTransposeB ? 16 : kDepth * kSwizzleBytes;
  constexpr int kNext = kTransposeB ? kWgmmaK * 2 : kWgmmaK * kSwizzleBytes;
  const uint32_t a_offset = of_warp(thread / kWarpgroup) * kWgmmaM * kSwizzleBytes;
  const int lane = thread % kWarp;
  const auto release = [&](int stage) {
    if (lane < kCluster) stages.empty[stage].arrive_cluster(lane);
  };
  Stage<kStages> stage;
  for_each_tile(p, [&](int row_tile, int column) {
    float sums[kTileSums];
    int before = 0;
    for (int step = 0; step < p.steps; ++step, stage.advance()) {
      stages.full[stage.index].wait(stage.parity);
      const WgmmaOperand a(shared_address(stages.a[stage.index]) + a_offset);
      const WgmmaOperand b(shared_address(stages.b[stage.index]), kBox);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < kDepth / kWgmmaK; ++k) {
        wgmma<T, 0, kTransposeB ? 0 : 1>(sums, a.at(k * kWgmmaK * 2), b.at(k * kNext),
                                         step + k > 0);
      }
      wgmma_commit();
      wgmma_wait<1>();
      if (step > 0)
        release(before);  // before meanwhile(): the next load of this stage takes as long as a step
      before = stage.index;
      meanwhile(step, column);
    }
    wgmma_wait<0>();
    wgmma_hold(sums);
    release(before);
    finish(sums, row_tile, column);
  });
}

// The body of a kernel: the consumers call consume(tiles, index of the thread among theirs), the
// threads of the other warpgroup load(tiles). Tiles: shared memory, with TileStages `stages`, and
// with init(), which initialises other barriers.
template <typename Tiles, typename Consume, typename Load>
__device__ __forceinline__ void run_warpgroups(Consume&& consume, Load&& load) {
  extern __shared__ __align__(1024) unsigned char shared[];
  Tiles& tiles = *reinterpret_cast<Tiles*>(shared);
  if (threadIdx.x == 0) {
    tiles.stages.init();
    init(tiles);
    fence_mbarrier_init();
  }
  cluster_sync();
  griddepcontrol_wait();
  if (threadIdx.x >= kWarpgroup) {
    setmaxnreg_inc<kConsumerRegisters>();
    consume(tiles, threadIdx.x - kWarpgroup);
  } else {
    setmaxnreg_dec<kProducerRegisters>();
    load(tiles);
    __syncwarp();
  }
  cluster_sync();  // the other block may still arrive at this block's barriers
}

constexpr int kTilePairs = kTileSums / 2 / kAcross;  // pairs of a thread's sums in a box

// Where pair number `pair` of a consumer thread's sums in box number `box` is in a tile.
__device__ __forceinline__ char* place_of(Tile& tile, int thread, int box, int pair) {
  const int lane = thread % kWarp, row = thread / kWarp * 16 + lane / 4;
  return reinterpret_cast<char*>(tile[box]) + (row + pair % 2 * 8) * kSwizzleBytes +
         swizzle_128b(lane / 4, pair / 2) + lane % 4 * 4;
}

#endif

}  // namespace lightseq
