// Token and position embedding, forward: T tokens (rows), C columns, V rows of a table.
//
//   y[t] = dropout(norm(scale * weight[token[t]] + position_weight[position[t]]))
//
// norm is LayerNorm in embedding_layer_norm_fwd, and the identity in embedding_fwd. With a cast, y
// is rounded to bfloat16 and then cast to E4M3 (common/fp8_cast.cuh):
//
//   values [T, C] = y / scale of the cast
//
//   saved for backward   the indices; with LayerNorm also mean and rstd, and backward looks up the
//                        rows again. Backward generates the dropout bits again
//   bytes moved          the rows of the tables that occur, once each, y and values
//   determinism          each result is a sum of only two numbers; with LayerNorm, all sums are
//                        over one row, in a fixed order
//
// Optional: positions, dropout (p == 0: none). An index out of range stops the kernel with a
// device-side assertion before the table is read.

#include <cassert>
#include <cstdint>
#include <optional>
#include <tuple>

#include "common/check.h"
#include "common/columns.cuh"
#include "common/launch.cuh"
#include "common/reduce.cuh"
#include "common/scalars.cuh"
#include "row/fp8_rows.cuh"
#include "row/layer_norm.cuh"

namespace lightseq {
namespace {

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

  __device__ __forceinline__ bool positioned() const { return places.data != nullptr; }

  __device__ __forceinline__ uint32_t token(int64_t row) const {
    const int64_t token = tokens.at(row);
    assert(token >= 0 && token < words.rows && "tokens in [0, V)");
    return static_cast<uint32_t>(token);
  }

  __device__ __forceinline__ uint32_t position(int64_t row) const {
    const int64_t position = positioned() ? positions.at(row) : 0;
    assert(!positioned() || (position >= 0 && position < places.rows && "positions in [0, P)"));
    return static_cast<uint32_t>(position);
  }
};

// A warp processes 256 columns (a slab) of kTokens tokens, with kStages of their rows in flight.
// The number of instructions limits the speed. So there are no branches, and the tokens' Philox
// calls share the parts that depend only on the column. Adjacent blocks have the same slab, so that
// its part of the position table and of the most frequent words stays in L1.
template <typename T, bool kDrops, bool kCasts>
__global__ void __launch_bounds__(kBlock, kBlocks<T>)
    embedding_fwd_kernel(const __grid_constant__ Lookup<T> p, T* __restrict__ y,
                         const __grid_constant__ Cast cast) {
  constexpr int kOfBlock = kTokens * kWarps;
  __shared__ uint32_t tokens[kOfBlock], positions[kOfBlock];
  griddepcontrol_wait();
  // The next kernel starts only when the last of these blocks have started, so it takes no
  // resources from them.
  griddepcontrol_launch_dependents();
  if (threadIdx.x < kOfBlock) {
    // Past the last row, load the last row again.
    const int64_t row = min(static_cast<int64_t>(blockIdx.x) * kOfBlock + threadIdx.x, p.rows - 1);
    tokens[threadIdx.x] = p.token(row);
    positions[threadIdx.x] = p.position(row);
  }
  __syncthreads();
  const int64_t group = static_cast<int64_t>(blockIdx.y) * kWarp + threadIdx.x % kWarp;
  const int64_t column = group * kColumnsPerDraw;
  if (!kCasts && column >= p.columns) return;
  const bool is_inside = column < p.columns;  // if not, nothing is loaded or stored
  const float inverse = kCasts ? 1.0f / *cast.scale : 1.0f;
  CastStatistics statistics = {};
  const int of_warp = static_cast<int>(threadIdx.x) / kWarp * kTokens;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kOfBlock + of_warp;
  const T* const words = p.words.data + column;
  const T* const places = p.places.data + column;
  T* const target = y + first * p.columns + column;
  const Rng rng(p.dropout.dropout.rng);
  Columns<T> word[kStages] = {}, place[kStages] = {};
  const auto start_loading = [&](int row) {
    if (kCasts && !is_inside) return;
    const uint64_t token = tokens[of_warp + row], position = positions[of_warp + row];
    word[row % kStages].load(words + token * p.words.stride);
    if (p.positioned()) place[row % kStages].load(places + position * p.places.stride);
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
    const bool exists = is_inside && first + row < p.rows;
    if (exists) result.store(target + row * p.columns);
    if constexpr (kCasts) {
      result.unpack(x);
      const uint2 bytes = statistics.cast(x, inverse, exists);
      const int64_t at = (first + row) * p.columns + column;
      if (exists) *reinterpret_cast<uint2*>(cast.values + at) = bytes;
    }
  }
  if constexpr (kCasts) {
    __shared__ BlockStatistics<kWarps> of_block;
    of_block.note(statistics, threadIdx.x);
    __syncthreads();
    if (threadIdx.x == 0) of_block.publish(cast);
  }
}

template <typename T>
struct Norm {
  const T *gamma, *beta;  // beta null: zeros
  float *mean, *rstd;
  float inverse;  // 1 / columns
  float eps;
};

constexpr int kNormGroups = 2;  // groups of columns per thread

// Resident blocks per SM of the kernel with LayerNorm: as many as the registers allow.
template <typename T>
constexpr int kNormBlocks = sizeof(T) == 4 ? 1 : 2;

// With LayerNorm. A team of threads holds a row in registers (layer_norm.cuh); all its loads
// are in flight at once.
template <typename T, typename S, bool kCasts>
__global__ void __launch_bounds__(kBlockThreads, kNormBlocks<T>)
    embedding_layer_norm_fwd_kernel(const __grid_constant__ Lookup<T> p,
                                    const __grid_constant__ Norm<T> norm, T* __restrict__ y,
                                    const __grid_constant__ Cast cast) {
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();  // as in embedding_fwd_kernel
  const int64_t team = static_cast<int64_t>(blockIdx.x) * S::kTeams + threadIdx.y;
  if (!kCasts && team >= p.rows) return;
  const bool exists = team < p.rows;
  const int64_t row = exists ? team : p.rows - 1;  // if not, load the last row again
  const int columns = static_cast<int>(p.columns);
  const T* const words = p.words.data + uint64_t{p.token(row)} * p.words.stride;
  const T* const places = p.places.data + uint64_t{p.position(row)} * p.places.stride;
  Columns<T> word[S::kGroups] = {}, place[S::kGroups] = {};
  Columns<T> gamma[S::kGroups] = {}, beta[S::kGroups] = {};
#pragma unroll
  for (int i = 0; i < S::kGroups; ++i) {
    if (S::column(i) >= columns) continue;
    word[i].load(words + S::column(i));
    if (p.positioned()) place[i].load(places + S::column(i));
    gamma[i].load(norm.gamma + S::column(i));
    if (norm.beta != nullptr) beta[i].load(norm.beta + S::column(i));
  }
  const Rng rng(p.dropout.dropout.rng);
  uint32_t keep[S::kGroups];  // generate bits while the loads are in flight
#pragma unroll
  for (int i = 0; i < S::kGroups; ++i) {
    keep[i] =
        p.dropout.drops() ? p.dropout.draw(rng, row, S::column(i) / kColumnsPerDraw) : kKeepAll;
  }
  float x[S::kGroups][kColumnsPerDraw];
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < S::kGroups; ++i) {
    float added[kColumnsPerDraw];
    word[i].unpack(x[i]);
    place[i].unpack(added);
#pragma unroll
    for (int e = 0; e < kColumnsPerDraw; ++e) {
      x[i][e] = fmaf(x[i][e], p.scale, added[e]);
      sum += x[i][e];
    }
  }
  const float2 statistics =
      normalize_row<T, S>(x, sum, gamma, beta, columns, norm.inverse, norm.eps);
  if (threadIdx.x == 0 && exists) {
    norm.mean[row] = statistics.x;
    norm.rstd[row] = statistics.y;
  }
  const float inverse = kCasts ? 1.0f / *cast.scale : 1.0f;
  CastStatistics of_cast = {};
#pragma unroll
  for (int i = 0; i < S::kGroups; ++i) {
    if (S::column(i) >= columns || !exists) continue;
    const int64_t at = row * columns + S::column(i);
    p.dropout.apply(keep[i], x[i]);
    Columns<T> result;
    result.pack(x[i]);
    result.store(y + at);
    if constexpr (kCasts) {
      result.unpack(x[i]);
      *reinterpret_cast<uint2*>(cast.values + at) = of_cast.cast(x[i], inverse, true);
    }
  }
  if constexpr (kCasts) {
    __shared__ BlockStatistics<kBlockThreads / kWarp> of_block;
    const int thread = static_cast<int>(threadIdx.y * blockDim.x + threadIdx.x);
    of_block.note(of_cast, thread);
    __syncthreads();
    if (thread == 0) of_block.publish(cast);
  }
}

template <typename T>
Table<T> table_of(const char* op, const char* name, const Tensor& x) {
  check_rows(op, name, x);
  require(x.stride(0) <= UINT32_MAX, op, ": rows of a table must be less than 2^32 elements",
          " apart, got ", x.stride(0));
  return {.data = data_of<T>(x), .stride = static_cast<uint32_t>(x.stride(0)), .rows = x.size(0)};
}

template <typename T>
Lookup<T> lookup_of(const char* op, const Tensor& tokens, const Tensor& weight,
                    const std::optional<Tensor>& positions,
                    const std::optional<Tensor>& position_weight, double scale, double p,
                    const Tensor& rng, int64_t site) {
  return {
      .tokens = Indices(tokens),
      .positions = Indices(positions.has_value() ? *positions : tokens),
      .words = table_of<T>(op, "weight", weight),
      .places = position_weight ? table_of<T>(op, "position_weight", *position_weight) : Table<T>{},
      .scale = static_cast<float>(scale),
      .dropout = DropoutFactors(rng.const_data_ptr<int64_t>(), site, p),
      .rows = tokens.size(0),
      .columns = weight.size(1)};
}

std::tuple<Tensor, Tensor> embedding_fwd(const Tensor& tokens, const Tensor& weight,
                                         const std::optional<Tensor>& positions,
                                         const std::optional<Tensor>& position_weight, double scale,
                                         double p, const Tensor& rng, int64_t site,
                                         std::optional<Tensor> cast_scale,
                                         std::optional<Tensor> cast_amax,
                                         std::optional<Tensor> cast_saturated) {
  constexpr const char* op = "embedding_fwd";
  const int64_t rows = tokens.size(0), columns = weight.size(1);
  const CastScalars scalars = cast_scalars(op, cast_scale, cast_amax, cast_saturated);
  const CastResults results = allocate_cast(weight, rows, columns, scalars, CastOf::kValues);
  Tensor y = allocate(weight, {rows, columns});
  const DeviceGuard guard(weight.get_device());
  dispatch_float(weight.scalar_type(), "embedding_fwd: weight", [&](auto zero) {
    using T = decltype(zero);
    const Lookup<T> lookup =
        lookup_of<T>(op, tokens, weight, positions, position_weight, scale, p, rng, site);
    if (y.numel() == 0) return;
    const dim3 grid(blocks_for(rows, kWarps * kTokens), blocks_for(columns, kSlab));
    dispatch_cast<T>(results.cast, [&](auto is_cast) {
      constexpr bool kCasts = decltype(is_cast)::value;
      const auto kernel =
          p > 0.0 ? embedding_fwd_kernel<T, true, kCasts> : embedding_fwd_kernel<T, false, kCasts>;
      launch({.op = op, .grid = grid, .block = kBlock, .dependent = true}, kernel, lookup,
             output_of<T>(y), results.cast);
    });
  });
  return {y, results.values};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> embedding_layer_norm_fwd(
    const Tensor& tokens, const Tensor& weight, const std::optional<Tensor>& positions,
    const std::optional<Tensor>& position_weight, const Tensor& gamma,
    const std::optional<Tensor>& beta, double scale, double p, const Tensor& rng, int64_t site,
    double eps, std::optional<Tensor> cast_scale, std::optional<Tensor> cast_amax,
    std::optional<Tensor> cast_saturated) {
  constexpr const char* op = "embedding_layer_norm_fwd";
  const int64_t rows = tokens.size(0), columns = weight.size(1);
  const CastScalars scalars = cast_scalars(op, cast_scale, cast_amax, cast_saturated);
  const CastResults results = allocate_cast(weight, rows, columns, scalars, CastOf::kValues);
  check_width(op, columns);
  Tensor y = allocate(weight, {rows, columns});
  Tensor mean = allocate(weight, {rows}, ScalarType::Float);
  Tensor rstd = allocate(weight, {rows}, ScalarType::Float);
  const DeviceGuard guard(weight.get_device());
  dispatch_float(weight.scalar_type(), "embedding_layer_norm_fwd: weight", [&](auto zero) {
    using T = decltype(zero);
    const Lookup<T> lookup =
        lookup_of<T>(op, tokens, weight, positions, position_weight, scale, p, rng, site);
    check_rows(op, "gamma", gamma);
    check_optional_rows(op, "beta", beta);
    if (y.numel() == 0) return;
    const Norm<T> norm{.gamma = data_of<T>(gamma),
                       .beta = data_of<T>(beta),
                       .mean = mean.mutable_data_ptr<float>(),
                       .rstd = rstd.mutable_data_ptr<float>(),
                       .inverse = 1.0f / static_cast<float>(columns),
                       .eps = static_cast<float>(eps)};
    dispatch_shape<kNormGroups>(columns, [&](auto shape) {
      using S = decltype(shape);
      dispatch_cast<T>(results.cast, [&](auto is_cast) {
        launch({.op = op,
                .grid = dim3(blocks_for(rows, S::kTeams)),
                .block = dim3(S::kThreads, S::kTeams),
                .dependent = true},
               embedding_layer_norm_fwd_kernel<T, S, decltype(is_cast)::value>, lookup, norm,
               output_of<T>(y), results.cast);
      });
    });
  });
  return {y, mean, rstd, results.values};
}

STABLE_TORCH_LIBRARY_IMPL(lightseq, CUDA, m) {
  m.impl("embedding_fwd", TORCH_BOX(&embedding_fwd));
  m.impl("embedding_layer_norm_fwd", TORCH_BOX(&embedding_layer_norm_fwd));
}

}  // namespace
}  // namespace lightseq
