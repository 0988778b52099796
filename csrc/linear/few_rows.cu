// linear_fwd for at most 16 rows, for 16-bit types: T rows, K inputs, N outputs.
//
//   y [T, N] = x W^T + b, or an activation of it    sums in float32, rounded once
//
//   bytes moved   W once, usually from memory: a decoder's weights are larger than any cache. x
//                 once per block, from L2. The rest is negligible.
//   determinism   sums have a fixed order, which depends only on K: the result of a row does not
//                 depend on the other rows or their number
//
// The time of such a product is the time until the weights have arrived, plus latencies. So a block
// starts to copy its weights to shared memory before it waits for the previous kernel, which
// computes x. Usually the weights have arrived when x is complete. The block also lets the next
// kernel start as early as allowed (common/launch.cuh explains when).
//
// A block has all inputs and 8 to 32 outputs, so that there are about as many blocks as SMs. Its
// warps split the inputs in chunks of 64, which is one cache line of each weight row, and add their
// sums at the end. Each thread copies exactly the data that it reads itself, so only these final
// sums need a barrier.
//
// mma.sync multiplies 16 rows of x (zeros for rows that do not exist) by 8 rows of W. The order of
// the inputs within a product does not matter, if it is the same for x and W. So lane 4g + t reads
// 16 bytes, inputs 8t ... 8t + 7 of 32, from row g of x and of W. It uses them as columns 2t,
// 2t + 1, 2t + 8 and 2t + 9 of two fragments. This needs no ldmatrix and has no bank conflicts.

#include <algorithm>
#include <cstdint>

#include "common/check.h"
#include "common/columns.cuh"
#include "common/device.h"
#include "common/launch.cuh"
#include "common/ptx/mma.cuh"
#include "linear/forward.cuh"

namespace lightseq {
namespace {

constexpr int kTile = 8;        // outputs, or rows of x
constexpr int kMaxTiles = 4;    // tiles of outputs per block
constexpr int kFragments = 32;  // inputs of two fragments; a lane reads 8 of them
constexpr int kChunk = 64;      // inputs of a warp at a time
constexpr int kStages = 4;      // stages of a warp's pipeline; each holds a chunk
constexpr int kTileBytes = kTile * kChunk * 2;
constexpr int kMinWarps = 8, kMaxWarps = 16;
static_assert(kMaxTiles * kFewRows / kTile <= kMinWarps, "a warp adds up at most one tile");

// The left operands of two products, from 16 bytes of each row. If there are at most eight rows,
// one operand serves both products: the first product uses its upper half, the second its lower
// half. The other half of each result is not used.
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

// kTiles: tiles of outputs per block. kRowTiles: tiles of rows, 1 or 2.
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

  // The lane's part of a chunk is two times eight inputs of each tile. Inputs that do not exist are
  // zeros, as in x.
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
  // At the end each of the first warps adds up a tile of results; a lane has two adjacent outputs
  // of a row.
  const int row = warp % kRowTiles * kTile + g;
  const int output = first_output + warp / kRowTiles * kTile + 2 * t;
  const bool finishes = warp < kTiles * kRowTiles && row < p.rows && output < p.outputs;
  const uint32_t bias = finishes ? p.bias_pair(output) : 0;
  const T* x[kRowTiles];
  int left[kRowTiles];  // inputs left to read; rows that do not exist have none
#pragma unroll
  for (int i = 0; i < kRowTiles; ++i) {
    x[i] = p.x + (i * kTile + g) * p.x_stride + first_input;
    left[i] = i * kTile + g < p.rows ? p.inputs - first_input : 0;
  }
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();

  // Two sums per tile, because each product must wait for the previous product of the same sum.
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

  // A warp overwrites its weights, which its lanes have read, with its sums.
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

}  // namespace

void multiply_few_rows(const Product& p) {
  const int32_t device = p.out.owner.get_device();
  const int64_t warps =
      std::clamp<int64_t>(blocks_for(p.a.columns, 2 * kChunk), kMinWarps, kMaxWarps);
  const int64_t chunks = blocks_for(p.a.columns, kChunk * warps);
  const int64_t tile_bytes = warps * std::min<int64_t>(chunks, kStages) * kTileBytes;
  // One block per SM; if there are more blocks, two should fit on an SM.
  const int room = shared_memory_of_multiprocessor(device);
  const int64_t tiles = blocks_for(p.out.columns, kTile);
  const int64_t shared_out = blocks_for(tiles, resident_blocks(device, 1));
  const int64_t of_block =
      std::clamp<int64_t>(room / 2 / tile_bytes, 1, std::min<int64_t>(shared_out, kMaxTiles));

  const auto start = [&](auto tiles_of_block, auto row_tiles) {
    dispatch_16_bits(p.a.type, [&](auto zero) {
      using T = decltype(zero);
      const auto kernel = linear_few_rows_kernel<T, tiles_of_block.value, row_tiles.value>;
      launch({.op = p.op,
              .grid = dim3(blocks_for(tiles, of_block)),
              .block = dim3(kWarp, warps),
              .shared = static_cast<size_t>(of_block * tile_bytes),
              .dependent = true},
             kernel, LinearParams<T>(p, chunks, current_stream(device)));
    });
  };
  static_assert(kMaxTiles == 4 && kFewRows == 2 * kTile);
  dispatch_value<1, 2, 3, 4>(of_block, [&](auto tiles_of_block) {
    dispatch_value<1, 2>(p.a.rows <= kTile ? 1 : 2,
                         [&](auto row_tiles) { start(tiles_of_block, row_tiles); });
  });
}

}  // namespace lightseq
