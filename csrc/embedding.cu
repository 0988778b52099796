// Token and position embedding, forward: T tokens (rows), C columns, V rows of a table.
//
//   y[t] = dropout(scale * weight[token[t]] + position_weight[position[t]])
//
//   saved for backward   the indices; backward generates the dropout bits again
//   bytes moved          the rows of the tables that occur, once each, and y
//   determinism          each result is a sum of only two numbers
//
// Optional: positions, dropout (p == 0: none). An index out of range stops the kernel with a
// device-side assertion before the table is read.

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cassert>
#include <cstdint>
#include <optional>

#include "common/check.h"
#include "common/columns.cuh"
#include "common/launch.cuh"
#include "common/optional.h"
#include "common/reduce.cuh"
#include "common/scalars.cuh"

namespace lightseq {
namespace {

using torch::stable::Tensor;

constexpr int kWarps = 8;  // per block
constexpr int kBlock = kWarp * kWarps;
constexpr int kSlab = kWarp * kColumnsPerDraw;  // columns per warp
constexpr int kTokens = 4, kStages = 2;         // per warp: tokens, and loads in flight

// Resident blocks per SM: as many as the registers allow.
template <typename T>
constexpr int kBlocks = sizeof(T) == 4 ? 3 : 4;

template <typename T>
struct Table {
  const T* data;  // null: no table
  uint32_t stride;
  int64_t rows;
};

template <typename T>
struct Lookup {
  Indices tokens, positions;
  Table<T> words, places;
  float scale;
  DropoutFactors dropout;
  int64_t rows, columns;
};

// A warp processes 256 columns (a slab) of kTokens tokens, with kStages of their rows in flight.
// The number of instructions limits the speed. So there are no branches, and the tokens' Philox
// calls share the parts that depend only on the column. Adjacent blocks have the same slab, so that
// its part of the position table and of the most frequent words stays in L1.
template <typename T, bool kDrops>
__global__ void __launch_bounds__(kBlock, kBlocks<T>)
    embedding_fwd_kernel(const __grid_constant__ Lookup<T> p, T* __restrict__ y) {
  constexpr int kOfBlock = kTokens * kWarps;
  __shared__ uint32_t tokens[kOfBlock], positions[kOfBlock];
  const bool positioned = p.places.data != nullptr;
  griddepcontrol_wait();
  // The next kernel starts only when the last of these blocks have started, so it takes no
  // resources from them.
  griddepcontrol_launch_dependents();
  if (threadIdx.x < kOfBlock) {
    // Past the last row, load the last row again.
    const int64_t row = min(static_cast<int64_t>(blockIdx.x) * kOfBlock + threadIdx.x, p.rows - 1);
    const int64_t token = p.tokens.at(row), position = positioned ? p.positions.at(row) : 0;
    assert(token >= 0 && token < p.words.rows && "tokens in [0, V)");
    assert(!positioned || (position >= 0 && position < p.places.rows && "positions in [0, P)"));
    tokens[threadIdx.x] = static_cast<uint32_t>(token);
    positions[threadIdx.x] = static_cast<uint32_t>(position);
  }
  __syncthreads();
  const int64_t group = static_cast<int64_t>(blockIdx.y) * kWarp + threadIdx.x % kWarp;
  const int64_t column = group * kColumnsPerDraw;
  if (column >= p.columns) return;
  const int of_warp = static_cast<int>(threadIdx.x) / kWarp * kTokens;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kOfBlock + of_warp;
  const T* const words = p.words.data + column;
  const T* const places = p.places.data + column;
  T* const target = y + first * p.columns + column;
  const Rng rng(p.dropout.dropout.rng);
  Columns<T> word[kStages], place[kStages] = {};
  const auto start_loading = [&](int row) {
    const uint64_t token = tokens[of_warp + row], position = positions[of_warp + row];
    word[row % kStages].load(words + token * p.words.stride);
    if (positioned) place[row % kStages].load(places + position * p.places.stride);
  };
#pragma unroll
  for (int row = 0; row < kStages; ++row) start_loading(row);
#pragma unroll
  for (int row = 0; row < kTokens; ++row) {
    float x[kColumnsPerDraw], added[kColumnsPerDraw];
    word[row % kStages].unpack(x);
    place[row % kStages].unpack(added);
    if (row + kStages < kTokens) start_loading(row + kStages);
#pragma unroll
    for (int e = 0; e < kColumnsPerDraw; ++e) x[e] = fmaf(x[e], p.scale, added[e]);
    if constexpr (kDrops) p.dropout.apply(p.dropout.draw(rng, first + row, group), x);
    Columns<T> result;
    result.pack(x);
    if (first + row < p.rows) result.store(target + row * p.columns);
  }
}

Tensor embedding_fwd(const Tensor& tokens, const Tensor& weight,
                     const std::optional<Tensor>& positions,
                     const std::optional<Tensor>& position_weight, double scale, double p,
                     const Tensor& rng, int64_t site) {
  const char* const op = "embedding_fwd";
  check_rows(op, "weight", weight);
  check_optional_rows(op, "position_weight", position_weight);
  require(rng.is_contiguous(), op, ": rng must be contiguous");
  const int64_t rows = tokens.size(0), columns = weight.size(1);
  Tensor y = allocate(weight, {rows, columns});
  const int32_t device = weight.get_device();
  const torch::stable::accelerator::DeviceGuard guard(device);
  dispatch_float(weight.scalar_type(), "embedding_fwd: weight", [&](auto zero) {
    using T = decltype(zero);
    if (y.numel() == 0) return;
    const auto table = [&](const Tensor& x) {
      require(x.stride(0) <= UINT32_MAX, op, ": rows of a table must be less than 2^32 elements",
              " apart, got ", x.stride(0));
      return Table<T>{.data = static_cast<const T*>(x.const_data_ptr()),
                      .stride = static_cast<uint32_t>(x.stride(0)),
                      .rows = x.size(0)};
    };
    const Lookup<T> lookup{
        .tokens = Indices(tokens),
        .positions = Indices(positions.has_value() ? *positions : tokens),
        .words = table(weight),
        .places = position_weight.has_value() ? table(*position_weight) : Table<T>{},
        .scale = static_cast<float>(scale),
        .dropout = DropoutFactors(rng.const_data_ptr<int64_t>(), site, p),
        .rows = rows,
        .columns = columns};
    const dim3 grid(blocks_for(rows, kWarps * kTokens), blocks_for(columns, kSlab));
    const auto kernel = p > 0.0 ? embedding_fwd_kernel<T, true> : embedding_fwd_kernel<T, false>;
    launch({.op = op,
            .grid = grid,
            .block = kBlock,
            .stream = current_stream(device),
            .dependent = true},
           kernel, lookup, static_cast<T*>(y.mutable_data_ptr()));
  });
  return y;
}

STABLE_TORCH_LIBRARY_IMPL(lightseq, CUDA, m) { m.impl("embedding_fwd", TORCH_BOX(&embedding_fwd)); }

}  // namespace
}  // namespace lightseq
