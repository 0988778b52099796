// A product of E4M3 matrices on GPUs of compute capability 9.0, for kernels that process its sums
// in registers and cast them to E4M3 before they reach global memory: a b^T, with a [rows, depth]
// and b [columns, depth]. Rows and columns are multiples of 16.
//
// Tiles, clusters, stages and warps are those of tile_product.cuh; a step multiplies 128 of the
// depth. The tensor cores add with fewer bits than float32. So each step has sums of its own, which
// are added in float32 to those of the tile. These do not fit in registers for 256 columns at a
// time, so a warpgroup computes a step in two halves of 128 columns.
//
// wgmma gives a thread two columns of rows r and r + 8. The TMA loads the operands in another order
// of rows, so that the thread gets what the cast needs: of 16 rows (tokens), row r of the product
// is row 2r of a, and row r + 8 is row 2r + 1; of 16 columns, column 8 h + 2 q + e is column
// 4 q + 2 h + e. So a thread has two adjacent rows of four adjacent columns (`of_thread`), and
// stmatrix writes the values and their transpose to shared memory, four times four bytes at a time.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>

#include "common/fp8_cast.cuh"
#include "linear/tile_product.cuh"

namespace lightseq {

constexpr int kFp8Depth = kSwizzleBytes;  // of the depth that a step multiplies
constexpr int kFp8Group = 16;             // rows and columns that are reordered
constexpr int kHalfColumns = kTileColumns / 2;
constexpr int kHalfSums = wgmma_sums(kHalfColumns);  // of a consumer thread
constexpr int kGroupsAcross = kTileColumns / kFp8Group;
constexpr int kGroupsAtOnce = 4;  // of a thread's casts

// The product a b^T, if the GPU and the operands support it, and if the tiles occupy at least three
// quarters of the SMs.
inline std::optional<TileProduct> fp8_tile_product(const Matrix& a, const Matrix& b,
                                                   int32_t device) {
  if (!has_wgmma(device) || a.rows % kFp8Group != 0 || b.rows % kFp8Group != 0) return std::nullopt;
  if (!fits_tma(a) || !fits_tma(b)) return std::nullopt;
  std::optional<TileProduct> product = tiles_of(a.rows, b.rows, device);
  if (!product.has_value()) return std::nullopt;
  const auto size = [](int64_t x) { return static_cast<cuuint64_t>(x); };
  product->a = tensor_map_of<4>(a.data, a.type, {size(a.columns), 8, 2, size(a.rows / kFp8Group)},
                                {size(2 * a.stride), size(a.stride), size(kFp8Group * a.stride)},
                                {kFp8Depth, 8, 2, kTileRows / kFp8Group});
  product->b = tensor_map_of<5>(
      b.data, b.type, {size(b.columns), 2, 4, 2, size(b.rows / kFp8Group)},
      {size(b.stride), size(4 * b.stride), size(2 * b.stride), size(kFp8Group * b.stride)},
      {kFp8Depth, 2, 4, 2, kHalfColumns / kFp8Group});
  product->steps = static_cast<int>(blocks_for(a.columns, kFp8Depth));
  return product;
}

// The results of a tile, and what they are computed from: values of all columns of a row are in two
// boxes; rows of the transpose are columns.
struct CastTiles {
  uint8_t values[2][kTileRows * kSwizzleBytes];
  uint8_t transpose[kTileColumns * kTileRows];
};

// Tensor maps of a cast's results, with the boxes of CastTiles.
struct CastMaps {
  CUtensorMap values, transpose;

  explicit CastMaps(const CastResults& results)
      : values(tensor_map_of(Matrix(results.values), kTileRows)),
        transpose(tensor_map_of(Matrix(results.transpose), kTileColumns)) {}
};

#ifdef LIGHTSEQ_HAS_WGMMA

// Loads the operands of all tiles. By one thread.
__device__ __forceinline__ void load_fp8_operands(const TileProduct& p, TileStages& stages) {
  const int rank = blockIdx.x % kCluster;
  Stage<kStages> stage;
  for_each_tile(p, [&](int row_tile, int column) {
    for (int step = 0; step < p.steps; ++step, stage.advance()) {
      stages.empty[stage.index].wait(stage.parity ^ 1);
      Mbarrier& full = stages.full[stage.index];
      full.arrive_expect_tx(sizeof(stages.a[0]) + sizeof(stages.b[0]));
      tma_load(stages.a[stage.index], p.a,
               {step * kFp8Depth, 0, 0, row_tile * kTileRows / kFp8Group}, full);
      tma_load_multicast(stages.b[stage.index][rank * kAcross / kCluster], p.b,
                         {step * kFp8Depth, 0, 0, 0, (column + rank * kHalfColumns) / kFp8Group},
                         full, (1 << kCluster) - 1);
    }
  });
}

// The sums of a consumer thread: those of each half of the tile's columns.
using Fp8Sums = float[2][kHalfSums];

// Multiplies all tiles, and calls finish(sums, row tile, first column) for each. By the consumers;
// thread: index of this thread among theirs.
template <typename Finish>
__device__ __forceinline__ void multiply_fp8_tiles(const TileProduct& p, TileStages& stages,
                                                   int thread, Finish&& finish) {
  constexpr int kHalfBytes = kHalfColumns * kSwizzleBytes, kNext = 2 * kWgmmaK;
  const uint32_t a_offset = of_warp(thread / kWarpgroup) * kWgmmaM * kSwizzleBytes;
  const int lane = thread % kWarp;
  Stage<kStages> stage;
  for_each_tile(p, [&](int row_tile, int column) {
    Fp8Sums sums = {};
    for (int step = 0; step < p.steps; ++step, stage.advance()) {
      stages.full[stage.index].wait(stage.parity);
      const WgmmaOperand a(shared_address(stages.a[stage.index]) + a_offset);
      const WgmmaOperand b(shared_address(stages.b[stage.index]));
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float of_step[kHalfSums];
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < kFp8Depth / kNext; ++k) {
          wgmma_e4m3(of_step, a.at(k * kNext), b.at(half * kHalfBytes + k * kNext), k > 0);
        }
        wgmma_commit();
        wgmma_wait<0>();
        wgmma_hold(of_step);
        if (half == 1 && lane < kCluster) stages.empty[stage.index].arrive_cluster(lane);
#pragma unroll
        for (int i = 0; i < kHalfSums; ++i) sums[half][i] += of_step[i];
      }
    }
    finish(sums, row_tile, column);
  });
}

// Where a consumer thread's numbers are. Group j of a tile has columns 16 j ... 16 j + 15.
struct OfThread {
  static constexpr int kColumns = 4, kRows = 2;
  int row, column;  // of the tile: the thread's first row, and its first column in group 0
  int lane, warp;

  __device__ __forceinline__ explicit OfThread(int thread)
      : row(thread / kWarp * kFp8Group + thread % kWarp / 4 * kRows),
        column(thread % 4 * kColumns),
        lane(thread % kWarp),
        warp(thread / kWarp) {}

  // The sums of group j: x[4 * r + c] is row r, column c of the thread.
  __device__ __forceinline__ static void get(const Fp8Sums& sums, int j,
                                             float (&x)[kColumnsPerDraw]) {
    constexpr int kGroups = kGroupsAcross / 2;
    const float* const of_group = sums[j / kGroups] + j % kGroups * kColumnsPerDraw;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
#pragma unroll
        for (int e = 0; e < 2; ++e) x[4 * r + 2 * h + e] = of_group[4 * h + 2 * r + e];
      }
    }
  }

  // The addresses that stmatrix and ldmatrix need for groups j and j + 1, with j even.
  // Matrices of values: rows 2 k of group j, rows 2 k + 1, and both of group j + 1.
  __device__ __forceinline__ uint32_t values_at(CastTiles& tiles, int j) const {
    const int matrix = lane / 8, at_row = warp * kFp8Group + lane % 8 * 2 + matrix % 2;
    return shared_address(tiles.values[j / 8]) + at_row * kSwizzleBytes +
           swizzle_128b(at_row, j % 8 + matrix / 2);
  }
  // Of the transpose: columns 4 q + e of group j, columns 4 q + 2 + e, and both of group j + 1; the
  // numbers of the 16-bit matrix are pairs of rows.
  __device__ __forceinline__ uint32_t transpose_at(CastTiles& tiles, int j) const {
    const int matrix = lane / 8;
    const int at_column =
        (j + matrix / 2) * kFp8Group + lane % 8 / 2 * 4 + matrix % 2 * 2 + lane % 2;
    return shared_address(tiles.transpose) + at_column * kSwizzleBytes +
           swizzle_128b(at_column, warp);
  }
};

// The words of a matrix of the transpose, from the words of values of two rows: columns 2 h and
// 2 h + 1 of the thread.
__device__ __forceinline__ uint32_t across(uint32_t first_row, uint32_t second_row, int h) {
  return __byte_perm(first_row, second_row, h == 0 ? 0x5140 : 0x7362);
}

// Casts the sums of a tile to the tile's results, four groups at a time: so many independent
// computations hide each other's latency. prepare(j) is called before groups j ... j + 3;
// numbers(j, x) turns the sums of group j into the numbers to be cast. rows: the tile's rows that
// exist; columns: its columns.
template <typename Prepare, typename Numbers>
__device__ __forceinline__ void cast_sums(const Fp8Sums& sums, const OfThread& mine,
                                          CastTiles& tiles, float inverse, int rows, int columns,
                                          CastStatistics& statistics, Prepare&& prepare,
                                          Numbers&& numbers) {
#pragma unroll
  for (int j = 0; j < kGroupsAcross; j += kGroupsAtOnce) {
    prepare(j);
    float x[kGroupsAtOnce][kColumnsPerDraw];
    bool exist[kGroupsAtOnce];
#pragma unroll
    for (int i = 0; i < kGroupsAtOnce; ++i) {
      OfThread::get(sums, j + i, x[i]);
      numbers(j + i, x[i]);
      exist[i] = mine.row < rows && (j + i) * kFp8Group < columns;
    }
    statistics.note(x, inverse, exist);
#pragma unroll
    for (int i = 0; i < kGroupsAtOnce; i += 2) {
      const uint2 left = pack_e4m3(x[i], inverse), right = pack_e4m3(x[i + 1], inverse);
      const uint32_t values[4] = {left.x, left.y, right.x, right.y};
      const uint32_t transpose[4] = {across(left.x, left.y, 0), across(left.x, left.y, 1),
                                     across(right.x, right.y, 0), across(right.x, right.y, 1)};
      stmatrix_x4(mine.values_at(tiles, j + i), values);
      stmatrix_x4_trans(mine.transpose_at(tiles, j + i), transpose);
    }
  }
}

// Stores a tile's results; of a thread that has waited for them. tma_store_wait_read() waits until
// the tile may be overwritten.
__device__ __forceinline__ void store_cast(const CastMaps& maps, const CastTiles& tiles,
                                           int row_tile, int column) {
  const int row = row_tile * kTileRows;
  tma_store(maps.values, column, row, tiles.values[0]);
  tma_store(maps.values, column + kSwizzleBytes, row, tiles.values[1]);
  tma_store(maps.transpose, row, column, tiles.transpose);
  tma_store_commit();
}

#endif

}  // namespace lightseq
