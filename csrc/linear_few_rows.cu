// linear_fwd of at most 16 rows of 16-bit numbers: T rows, K inputs, N outputs.
//
//   y [T, N] = x W^T + b, or its positive part      sums in float32, rounded once
//
//   bytes moved   W once, from memory as a rule: a decoder's weights are larger than any cache.
//                 x once a block, from the second cache. Nothing else counts.
//   determinism   sums have a fixed order, which depends on K alone: a row's result is the same
//                 whatever the other rows are, and however many
//
// Such a product takes as long as its weights take to arrive, and then the latency of everything
// else. So all of a block's weights are on their way to shared memory before it waits for the
// kernel before, which makes x: they are usually there when x is. In its turn it lets the next
// kernel begin as soon as it may (common/launch.cuh says when).
//
// A block has 8 to 32 outputs, so that there are about as many blocks as multiprocessors, and all
// inputs. Its warps share these out in chunks of 64, one line of each weight row, and add their
// sums up at the end. Every thread copies what it will read itself: warps meet only there.
//
// Products are mma.sync's: 16 rows of x, those that do not exist being zeros, times 8 rows of W.
// Which 16 inputs it multiplies at a time does not matter, as long as both sides agree. Lane 4g + t
// reads inputs 8t ... 8t + 7 of 32, 16 bytes, of row g of either, and takes them for columns 2t,
// 2t + 1, 2t + 8 and 2t + 9 of two fragments: no ldmatrix, and no bank conflicts.

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "common/check.h"
#include "common/columns.cuh"
#include "common/launch.cuh"
#include "common/linear_few_rows.h"
#include "common/linear_forward.cuh"
#include "common/mma.cuh"
#include "common/occupancy.h"

namespace lightseq {
namespace {

constexpr int kTile = 8;        // outputs, or rows of x
constexpr int kMaxTiles = 4;    // of outputs, of a block
constexpr int kFragments = 32;  // inputs of two fragments, one read of a lane
constexpr int kChunk = 64;      // inputs of a warp at a time
constexpr int kStages = 4;      // of a warp's pipeline, a chunk each
constexpr int kTileBytes = kTile * kChunk * 2;
constexpr int kMinWarps = 8, kMaxWarps = 16;
static_assert(kMaxTiles * kFewRows / kTile <= kMinWarps, "a warp finishes a tile");

// The left operands of two products from 16 bytes of every row. With eight rows, one operand does
// for both: the first product has them in its upper half, the second in its lower half, and the
// other halves of their results mean nothing.
template <typename T>
__device__ __forceinline__ void fragments_of(const Columns<T> (&x)[1], uint32_t (&f)[2][4]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) f[0][i] = f[1][i] = x[0].words[i % 2 * 2 + i / 2];
}
template <typename T>
__device__ __forceinline__ void fragments_of(const Columns<T> (&x)[2], uint32_t (&f)[2][4]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) f[i / 4][i % 4] = x[i % 2].words[i / 2];
}

// kTiles: of outputs. kRowTiles: of rows.
template <typename T, int kTiles, int kRowTiles>
__global__ void __launch_bounds__(kWarp* kMaxWarps)
    linear_few_rows_kernel(const __grid_constant__ LinearParams<T> p) {
  extern __shared__ uint4 shared[];
  char* const room = reinterpret_cast<char*>(shared);
  const int room_of_warp = min(p.chunks, kStages) * kTiles * kTileBytes;
  const int warps = blockDim.y, warp = threadIdx.y;
  const int g = threadIdx.x / 4, t = threadIdx.x % 4;
  const int first_output = static_cast<int>(blockIdx.x) * kTiles * kTile;
  const int first_input = warp * kChunk + t * 8, step = warps * kChunk;

  // The lane's part of a chunk is twice eight inputs of each tile. Those that do not exist are
  // zeros, as x has there.
  const auto slot = [&](int stage, int tile, int half) {
    const int before = (stage * kTiles + tile) * 2 + half;
    return reinterpret_cast<T*>(room + warp * room_of_warp + before * (kTileBytes / 2)) +
           threadIdx.x * 8;
  };
  const T* weight = p.weight + (first_output + g) * p.weight_stride + first_input;
  int weights_left = p.inputs - first_input;
  const auto copy_next = [&](int stage) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int skipped = half * kFragments;
        cp_async_zfill(slot(stage, tile, half), weight + tile * kTile * p.weight_stride + skipped,
                       skipped < weights_left && first_output + tile * kTile < p.outputs);
      }
    }
    weight += step;
    weights_left -= step;
  };

  if (!p.weights_are_old) griddepcontrol_wait();
#pragma unroll
  for (int stage = 0; stage < kStages; ++stage) {
    if (stage < p.chunks) copy_next(stage);
    cp_async_commit();
  }
  // In the end the first warps add up a tile of results each, a lane two neighbours of a row.
  const int row = warp % kRowTiles * kTile + g;
  const int output = first_output + warp / kRowTiles * kTile + 2 * t;
  const bool finishes = warp < kTiles * kRowTiles && row < p.rows && output < p.outputs;
  const uint32_t bias = finishes ? p.bias_pair(output) : 0;
  const T* x[kRowTiles];
  int left[kRowTiles];  // of its inputs; rows that do not exist have none
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
    x[i] = p.x + (i * kTile + g) * p.x_stride + first_input;
    left[i] = i * kTile + g < p.rows ? p.inputs - first_input : 0;
  }
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();

  // Two sums a tile: a product waits for the one before it in its sum.
  float sums[kTiles][2][4] = {};
  for (int begin = 0; begin < p.chunks; begin += kStages) {
    Columns<T> values[kStages][2][kRowTiles] = {};
#pragma unroll
    for (int stage = 0; stage < kStages; ++stage) {
#pragma unroll
      for (int i = 0; i < kRowTiles; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int skipped = half * kFragments;
          if (skipped < left[i]) values[stage][half][i].load(x[i] + skipped);
        }
        x[i] += step;
        left[i] -= step;
      }
    }
#pragma unroll
    for (int stage = 0; stage < kStages; ++stage) {
      if (begin + stage >= p.chunks) break;
      cp_async_wait<kStages - 1>();
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        uint32_t fragments[2][4];
        fragments_of(values[stage][half], fragments);
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          Columns<T> w;
          w.load_shared(slot(stage, tile, half));
          mma<T>(sums[tile][0], fragments[0], w.words[0], w.words[1]);
          mma<T>(sums[tile][1], fragments[1], w.words[2], w.words[3]);
        }
      }
      if (begin + stage + kStages < p.chunks) copy_next(stage);
      cp_async_commit();
    }
  }

  // A warp's sums take the place of its weights, which its lanes have read.
  const auto result = [&](int of_warp, int tile) -> float2& {
    return reinterpret_cast<float2*>(room + of_warp * room_of_warp)[tile * kWarp + threadIdx.x];
  };
  __syncwarp();
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
#pragma unroll
    for (int i = 0; i < kRowTiles; ++i) {
      const float (&one)[4] = sums[tile][0], (&other)[4] = sums[tile][1];
      const int at = kRowTiles == 1 ? 2 : 2 * i;  // see fragments_of()
      result(warp, tile * kRowTiles + i) = {one[2 * i] + other[at], one[2 * i + 1] + other[at + 1]};
    }
  }
  __syncthreads();
  if (!finishes) return;
  p.epilogue(row, output, warps, [&](int of_warp) { return result(of_warp, warp); }, bias);
}

// dispatch_tiles(n, [&](auto count) { ... decltype(count)::value ... })
template <typename Function>
void dispatch_tiles(int64_t tiles, Function&& function) {
  switch (tiles) {
    case 1:
      return function(std::integral_constant<int, 1>{});
    case 2:
      return function(std::integral_constant<int, 2>{});
    case 3:
      return function(std::integral_constant<int, 3>{});
    default:
      return function(std::integral_constant<int, kMaxTiles>{});
  }
}

}  // namespace

void multiply_few_rows(const Product& p, cudaStream_t stream) {
  const int32_t device = p.out.owner.get_device();
  const int64_t warps =
      std::clamp<int64_t>(blocks_for(p.a.columns, 2 * kChunk), kMinWarps, kMaxWarps);
  const int64_t chunks = blocks_for(p.a.columns, kChunk * warps);
  const int64_t tile_bytes = warps * std::min<int64_t>(chunks, kStages) * kTileBytes;
  // A block for each multiprocessor; where there are more, two should have room side by side.
  const int room = shared_memory_of_multiprocessor(device);
  const int64_t tiles = blocks_for(p.out.columns, kTile);
  const int64_t shared_out = blocks_for(tiles, resident_blocks(device, 1));
  const int64_t of_block =
      std::clamp<int64_t>(room / 2 / tile_bytes, 1, std::min<int64_t>(shared_out, kMaxTiles));

  const auto start = [&](auto tile_count, auto row_tile_count) {
    dispatch_16_bits(p, [&](auto zero) {
      using T = decltype(zero);
      const auto kernel =
          linear_few_rows_kernel<T, decltype(tile_count)::value, decltype(row_tile_count)::value>;
      launch({.op = p.op,
              .grid = static_cast<unsigned>(blocks_for(tiles, of_block)),
              .block = dim3(kWarp, warps),
              .shared = static_cast<size_t>(of_block * tile_bytes),
              .stream = stream,
              .dependent = true},
             kernel, LinearParams<T>(p, chunks, stream));
    });
  };
  dispatch_tiles(of_block, [&](auto tile_count) {
    if (p.a.rows <= kTile) {
      start(tile_count, std::integral_constant<int, 1>{});
    } else {
      start(tile_count, std::integral_constant<int, 2>{});
    }
  });
}

}  // namespace lightseq
