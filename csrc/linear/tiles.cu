// linear_fwd for at most 128 rows, for 16-bit types: T rows, K inputs, N outputs.
//
//   y [T, N] = x W^T + b, or relu of it             sums in float32, rounded once
//
//   bytes moved   W is read once per tile of rows, x once per tile of outputs, from L2
//   determinism   sums have a fixed order, which depends only on K
//
// A decode step has such products, each with its own weight. They take a few microseconds, much of
// it latency: first the weights must arrive, then x, then the last sums are added. So a block
// starts to copy its weights to shared memory, as many as fit, before it waits for the previous
// kernel, which computes x (common/launch.cuh explains when this is allowed). Right after the wait
// it starts to copy x.
//
// A block computes a tile of the result. Tiles are so small that there are about as many as SMs.
// The warps of a block split the inputs in chunks of 32, and add their sums at the end. Each warp
// copies exactly the data that it reads itself, so only these final sums need a barrier.
//
// A row of a chunk has 64 bytes, so two rows occupy all banks once. The 16-byte parts of row r are
// permuted (xor with r / 2 % 4), so that the eight rows that ldmatrix reads at a time are in
// different banks.

#include <cstdint>

#include "common/check.h"
#include "common/launch.cuh"
#include "common/ptx/mma.cuh"
#include "linear/forward.cuh"

namespace lightseq {
namespace {

constexpr int kWarps = 8;
constexpr int kChunk = 32;  // inputs
constexpr int kRowBytes = kChunk * 2;
constexpr int kPartBytes = 16;  // one access
constexpr int kParts = kRowBytes / kPartBytes;

// A tile of the result. kStages: stages of a warp's pipeline; each holds a chunk.
template <int kTileRows, int kTileOutputs, int kStages_>
struct Tile {
  static constexpr int kRows = kTileRows, kOutputs = kTileOutputs, kStages = kStages_;
  static constexpr int kRowBlocks = kRows / 16, kColumnBlocks = kOutputs / 8;  // mma operands
  static constexpr int kChunkBytes = (kRows + kOutputs) * kRowBytes;
  static constexpr int kResultBytes = kRows * kOutputs * static_cast<int>(sizeof(float));
  static constexpr int kFragments = 2 * kRowBlocks * kColumnBlocks;  // of 8 rows and 8 outputs
  static_assert(kColumnBlocks <= kWarps && kWarps % kColumnBlocks == 0,
                "all fragments that a warp adds up have the same outputs");

  // Bytes of shared memory per warp.
  __host__ __device__ static constexpr int room(int chunks) {
    const int copies = (chunks < kStages ? chunks : kStages) * kChunkBytes;
    return copies > kResultBytes ? copies : kResultBytes;
  }
};

__device__ __forceinline__ int part_offset(int row, int part) {
  return row * kRowBytes + (part ^ row / 2 % kParts) * kPartBytes;
}

template <typename T, typename S>
__global__ void __launch_bounds__(kWarp* kWarps, 1)
    linear_tiles_kernel(const __grid_constant__ LinearParams<T> p) {
  extern __shared__ uint4 shared[];
  const int lane = threadIdx.x, warp = threadIdx.y;
  char* const room = reinterpret_cast<char*>(shared) + warp * S::room(p.chunks);
  const int first_row = static_cast<int>(blockIdx.y) * S::kRows;
  const int first_output = static_cast<int>(blockIdx.x) * S::kOutputs;

  // Copies eight rows at a time, 16 bytes per lane. Rows and inputs that do not exist become zeros.
  const auto copy = [&](int chunk, const T* from, int64_t stride, int rows_left, int rows,
                        char* to) {
    const int row = lane / kParts, part = lane % kParts;
    const int input = (chunk * kWarps + warp) * kChunk + part * 8;
    from += row * stride + input;
#pragma unroll
    for (int i = 0; i < rows; i += kWarp / kParts) {
      cp_async_zfill(to + part_offset(i + row, part), from + i * stride,
                     input < p.inputs && i + row < rows_left);
    }
  };
  const auto stage_of = [&](int chunk) { return room + chunk % S::kStages * S::kChunkBytes; };
  const auto copy_weights = [&](int chunk) {
    copy(chunk, p.weight + first_output * p.weight_stride, p.weight_stride,
         p.outputs - first_output, S::kOutputs, stage_of(chunk) + S::kRows * kRowBytes);
  };
  const auto copy_rows = [&](int chunk) {
    copy(chunk, p.x + first_row * p.x_stride, p.x_stride, p.rows - first_row, S::kRows,
         stage_of(chunk));
  };

  if (!p.weights_are_old) griddepcontrol_wait();
  const int at_once = min(p.chunks, S::kStages);
  for (int chunk = 0; chunk < at_once; ++chunk) copy_weights(chunk);
  // At the end a warp adds up every eighth fragment; a lane has two adjacent outputs of a row.
  const int output = first_output + warp % S::kColumnBlocks * 8 + lane_column();
  const uint32_t bias = output < p.outputs ? p.bias_pair(output) : 0;
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  for (int chunk = 0; chunk < S::kStages; ++chunk) {
    if (chunk < p.chunks) copy_rows(chunk);
    cp_async_commit();
  }

  float sums[S::kRowBlocks][S::kColumnBlocks][4] = {};
  for (int chunk = 0; chunk < p.chunks; ++chunk) {
    cp_async_wait<S::kStages - 1>();
    __syncwarp();
    const char* const rows = stage_of(chunk);
    const char* const weights = rows + S::kRows * kRowBytes;
#pragma unroll
    for (int k = 0; k < kParts; k += 2) {  // 16 inputs
      uint32_t left[S::kRowBlocks][4];
#pragma unroll
      for (int i = 0; i < S::kRowBlocks; ++i) {
        ldmatrix_x4(left[i], rows + part_offset(i * 16 + lane % 16, k + lane / 16));
      }
#pragma unroll
      for (int n = 0; n < S::kColumnBlocks; n += 2) {
        uint32_t right[4];
        ldmatrix_x4(right,
                    weights + part_offset(n * 8 + lane % 8 + lane / 16 * 8, k + lane / 8 % 2));
#pragma unroll
        for (int i = 0; i < S::kRowBlocks; ++i) {
          mma<T>(sums[i][n], left[i], right[0], right[1]);
          mma<T>(sums[i][n + 1], left[i], right[2], right[3]);
        }
      }
    }
    __syncwarp();
    if (chunk + S::kStages < p.chunks) {
      copy_weights(chunk + S::kStages);
      copy_rows(chunk + S::kStages);
    }
    cp_async_commit();
  }

  // A warp overwrites its chunks, which its lanes have read, with its sums.
  const auto result = [&](int of_warp, int fragment) -> float2& {
    char* const at = reinterpret_cast<char*>(shared) + of_warp * S::room(p.chunks);
    return reinterpret_cast<float2*>(at)[fragment * kWarp + lane];
  };
#pragma unroll
  for (int i = 0; i < S::kRowBlocks; ++i) {
#pragma unroll
    for (int n = 0; n < S::kColumnBlocks; ++n) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        result(warp, (2 * i + half) * S::kColumnBlocks + n) = {sums[i][n][2 * half],
                                                               sums[i][n][2 * half + 1]};
      }
    }
  }
  __syncthreads();
#pragma unroll
  for (int fragment = warp; fragment < S::kFragments; fragment += kWarps) {
    const int row = first_row + fragment / S::kColumnBlocks * 8 + lane_row();
    if (row >= p.rows || output >= p.outputs) continue;
    p.epilogue(row, output, kWarps, [&](int of_warp) { return result(of_warp, fragment); }, bias);
  }
}

// dispatch_tile(tile, [&](auto shape) { using S = decltype(shape); ... })
template <typename Function>
void dispatch_tile(int tile, Function&& function) {
  switch (tile) {
    case 1:
      return function(Tile<32, 32, 4>{});
    case 2:
      return function(Tile<64, 32, 4>{});
    default:
      return function(Tile<64, 64, 3>{});
  }
}

}  // namespace

bool multiply_by_tiles(const Product& p, int tile, cudaStream_t stream) {
  const int64_t chunks = blocks_for(p.a.columns, kChunk * kWarps);
  int device = 0;
  cudaGetDevice(&device);
  const int most = shared_memory_of_block(device);
  bool launched = false;
  dispatch_tile(tile, [&](auto shape) {
    using S = decltype(shape);
    if (kWarps * S::room(S::kStages) > most) return;
    dispatch_16_bits(p.a.type, [&](auto zero) {
      using T = decltype(zero);
      launch({.op = p.op,
              .grid = dim3(blocks_for(p.out.columns, S::kOutputs), blocks_for(p.a.rows, S::kRows)),
              .block = dim3(kWarp, kWarps),
              .shared = static_cast<size_t>(kWarps * S::room(static_cast<int>(chunks))),
              .stream = stream,
              .dependent = true},
             linear_tiles_kernel<T, S>, LinearParams<T>(p, chunks, stream));
    });
    launched = true;
  });
  return launched;
}

}  // namespace lightseq
