// Token and position embedding, backward: T tokens (rows), C columns, V rows of a table.
//
//   dweight[v] = scale * sum over t with token[t] == v of dropout'(dy[t])
//
// and the positions' table alike, without the factor. The padding symbol's row of dweight gets
// nothing. dropout' multiplies by the bits of forward, drawn again.
//
//   bytes moved   dy, the table's gradient (where it accumulates, only the rows that occur), and
//                 what the sort needs
//   determinism   a row's tokens are added in ascending order, by eights, those to sums of 64 and
//                 these by a fixed rule; atomics never decide about an order of adding
//
// common/embedding_sort.cuh sorts the tokens by their rows of the table. Then sum_kernel has a warp
// for each row of the table and 256 columns; for rows of more than 8 tokens (the commonest word can
// be 18% of a batch) a block for every 64, and the last block of such a row to finish adds up what
// all have left. In between, zeros go to the rows that do not occur.

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <optional>

#include "common/check.h"
#include "common/columns.cuh"
#include "common/embedding_sort.cuh"
#include "common/occupancy.h"
#include "common/optional.h"
#include "common/reduce.cuh"

namespace lightseq {
namespace {

using namespace embedding;

constexpr int kSlab = kWarp * kColumnsPerDraw;  // columns of a warp

__device__ __forceinline__ int64_t global_warp() {
  return static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / kWarp;
}

template <typename T>
struct Gradients {
  const T* dy;
  int64_t dy_stride, columns;
  DropoutFactors dropout;
  bool accumulate;
  float scale = 1.0f;
  float* partials = nullptr;  // [chunks, columns] sums of chunks
  void* table = nullptr;
  int64_t table_stride = 0;
  ScalarType table_type = ScalarType::Float;
};

using Sums = float[kColumnsPerDraw];

// Adds `count` <= kRows rows of dy in the order in which the lanes hold their numbers.
template <typename T, bool kDrops>
__device__ __forceinline__ void add_rows(const Gradients<T>& g, int held, int count, int64_t group,
                                         const Rng& rng, Sums& sums) {
  const int64_t column = group * kColumnsPerDraw;
  Columns<T> x[kRows] = {};
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int64_t row = __shfl_sync(kAllLanes, held, i);
    if (i < count && column < g.columns) x[i].load_streaming(g.dy + row * g.dy_stride + column);
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    if (i >= count) break;
    const int64_t row = __shfl_sync(kAllLanes, held, i);
    float values[kColumnsPerDraw];
    x[i].unpack(values);
    if constexpr (kDrops) g.dropout.apply(g.dropout.draw(rng, row, group), values);
#pragma unroll
    for (int e = 0; e < kColumnsPerDraw; ++e) sums[e] += values[e];
  }
}

// The sums into a row of the table, rounded once.
template <typename T, typename G>
__device__ __forceinline__ void store_sums(const Gradients<T>& g, int64_t row, int64_t group,
                                           const Sums& sums) {
  const int64_t column = group * kColumnsPerDraw;
  if (column >= g.columns) return;
  G* const target = static_cast<G*>(g.table) + row * g.table_stride + column;
  Columns<G> stored;
  float values[kColumnsPerDraw] = {};
  if (g.accumulate) {
    stored.load_streaming(target);
    stored.unpack(values);
  }
#pragma unroll
  for (int e = 0; e < kColumnsPerDraw; ++e) values[e] = fmaf(sums[e], g.scale, values[e]);
  stored.pack(values);
  stored.store(target);
}

template <typename T>
__device__ __forceinline__ void store_sums(const Gradients<T>& g, int64_t row, int64_t group,
                                           const Sums& sums) {
  switch (g.table_type) {
    case ScalarType::Float:
      return store_sums<T, float>(g, row, group, sums);
    case ScalarType::Half:
      return store_sums<T, __half>(g, row, group, sums);
    default:
      return store_sums<T, __nv_bfloat16>(g, row, group, sums);
  }
}

// Adds the sums of a block's warps up, in the order of the warps; the first warp has the result.
__device__ __forceinline__ void add_warps(Sums& sums) {
  __shared__ alignas(16) float of_warp[kWarps][kSlab];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  __syncthreads();  // earlier readers are done
  float4* const own = reinterpret_cast<float4*>(of_warp[warp] + lane * kColumnsPerDraw);
  own[0] = make_float4(sums[0], sums[1], sums[2], sums[3]);
  own[1] = make_float4(sums[4], sums[5], sums[6], sums[7]);
  __syncthreads();
  if (warp > 0) return;
#pragma unroll
  for (int other = 1; other < kWarps; ++other) {
#pragma unroll
    for (int e = 0; e < kColumnsPerDraw; ++e) sums[e] += of_warp[other][lane * kColumnsPerDraw + e];
  }
}

// Leaves the sums of piece `index` in memory. In the block that does so last for the row, the first
// warp gets the sums of the whole row, and the result is true.
template <typename T>
__device__ __forceinline__ bool join_chunks(const Sort& p, const Gradients<T>& g, const Work& work,
                                            int64_t index, int64_t group, Sums& sums) {
  __shared__ bool is_last;
  const int chunks = (work.count + kChunk - 1) / kChunk;
  const int64_t column = group * kColumnsPerDraw;
  const bool is_inside = column < g.columns;
  if (threadIdx.x < kWarp) {
    Columns<float> stored;
    stored.pack(sums);
    if (is_inside) stored.store(g.partials + index * g.columns + column);
    __threadfence();
    __syncwarp();
    if (threadIdx.x == 0) {
      int* const arrived = p.arrived + work.first * gridDim.y + blockIdx.y;
      is_last = atomicAdd(arrived, 1) == chunks - 1;
    }
  }
  __syncthreads();
  if (!is_last) return false;
  __threadfence();
#pragma unroll
  for (int e = 0; e < kColumnsPerDraw; ++e) sums[e] = 0.0f;
  if (is_inside) {
#pragma unroll 4
    for (int i = threadIdx.x / kWarp; i < chunks; i += kWarps) {
      Columns<float> stored;
      float values[kColumnsPerDraw];
      stored.load_streaming(g.partials + (work.first + i) * g.columns + column);
      stored.unpack(values);
#pragma unroll
      for (int e = 0; e < kColumnsPerDraw; ++e) sums[e] += values[e];
    }
  }
  add_warps(sums);
  return true;
}

// Zeros into those of 32 rows of the table that do not occur.
template <typename T>
__device__ __forceinline__ void clear_rows(const Sort& p, const Gradients<T>& g, int64_t first,
                                           int64_t group) {
  const int64_t row = first + threadIdx.x % kWarp;
  const bool is_absent = row < p.vocabulary && p.counts[row] < 0;
  unsigned absent = __ballot_sync(kAllLanes, is_absent);
  const Sums zeros = {};
  for (; absent != 0; absent &= absent - 1) store_sums(g, first + __ffs(absent) - 1, group, zeros);
}

// As many blocks as fit share the work out. First a block for every 64 tokens of the rows with many
// of them; then a warp for every other row, and zeros in between, which only keep memory busy.
template <typename T, bool kDrops>
__global__ void __launch_bounds__(kBlock)
    embedding_sum_kernel(const __grid_constant__ Sort p, const __grid_constant__ Gradients<T> g) {
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int64_t group = static_cast<int64_t>(blockIdx.y) * kWarp + lane;
  const Rng rng(g.dropout.dropout.rng);
  const int long_work = p.taken[1], all_work = p.long_work + p.taken[2];
  for (int64_t index = blockIdx.x; index < long_work; index += gridDim.x) {
    const Work work = p.work[index];
    const int done = static_cast<int>(index - work.first) * kChunk + warp * kRows;
    const int held = done + lane < work.count ? p.order[work.start + done + lane] : 0;
    Sums sums = {};
    add_rows<T, kDrops>(g, held, min(kRows, work.count - done), group, rng, sums);
    add_warps(sums);
    if (work.count > kChunk && !join_chunks(p, g, work, index, group, sums)) continue;
    if (warp == 0) store_sums(g, work.row, group, sums);
  }

  const int64_t step = static_cast<int64_t>(gridDim.x) * kWarps;
  int64_t clear = g.accumulate ? p.vocabulary : global_warp() * kWarp;
  int64_t index = p.long_work + global_warp();
  const auto load_work = [&](int64_t i) { return i < all_work ? p.work[i] : Work{}; };
  const auto load_held = [&](const Work& of) {
    return lane < of.count ? p.order[of.start + lane] : 0;
  };
  Work work = load_work(index);
  int held = load_held(work);
  while (index < all_work || clear < p.vocabulary) {
    const Work next = load_work(index + step);
    if (clear < p.vocabulary) clear_rows(p, g, clear, group);
    if (index < all_work) {
      Sums sums = {};
      add_rows<T, kDrops>(g, held, work.count, group, rng, sums);
      held = load_held(next);
      store_sums(g, work.row, group, sums);
    }
    work = next;
    index += step;
    clear += step * kWarp;
  }
}

// table[indices[t]] += scale * row t of g, but for the row `excluded`.
template <typename T>
void add_to_table(const char* op, Gradients<T> g, const Tensor& indices, Tensor table, double scale,
                  int64_t excluded, cudaStream_t stream) {
  const int64_t tokens = indices.size(0), columns = table.size(1);
  if (table.numel() == 0) return;
  if (tokens == 0) {
    if (!g.accumulate) torch::stable::zero_(table);
    return;
  }
  const int64_t slabs = blocks_for(columns, kSlab);
  const auto [sort, scratch] = sort_tokens(op, indices, table.size(0), excluded, slabs, stream);
  Tensor partials = allocate(table, {sort.long_work, columns}, ScalarType::Float);
  g.scale = static_cast<float>(scale);
  g.partials = partials.mutable_data_ptr<float>();
  g.table = table.mutable_data_ptr();
  g.table_stride = table.stride(0);
  g.table_type = table.scalar_type();
  const auto kernel = g.dropout.dropout.threshold > 0 ? embedding_sum_kernel<T, true>
                                                      : embedding_sum_kernel<T, false>;
  const int64_t blocks = resident_blocks(kernel, kBlock, table.get_device());
  kernel<<<dim3(blocks_for(blocks, slabs), slabs), kBlock, 0, stream>>>(sort, g);
  check_launch(op);
}

void embedding_bwd(const Tensor& dy, const Tensor& tokens, const std::optional<Tensor>& positions,
                   double scale, int64_t padding_idx, double p, const Tensor& rng, int64_t site,
                   std::optional<Tensor> dweight, std::optional<Tensor> dposition_weight,
                   bool accumulate) {
  const char* const op = "embedding_bwd";
  check_rows(op, "dy", dy);
  require(rng.is_contiguous(), op, ": rng must be contiguous");
  const auto check_table = [&](const char* name, const std::optional<Tensor>& table) {
    check_optional_rows(op, name, table);
    require(!table.has_value() || table->scalar_type() != ScalarType::Double, op, ": ", name,
            " must be float32, float16 or bfloat16 on a GPU");
  };
  check_table("dweight", dweight);
  check_table("dposition_weight", dposition_weight);
  const int32_t device = dy.get_device();
  const torch::stable::accelerator::DeviceGuard guard(device);
  const cudaStream_t stream = current_stream(device);
  dispatch_float(dy.scalar_type(), "embedding_bwd: dy", [&](auto zero) {
    using T = decltype(zero);
    const Gradients<T> gradients{static_cast<const T*>(dy.const_data_ptr()), dy.stride(0),
                                 dy.size(1), DropoutFactors(rng.const_data_ptr<int64_t>(), site, p),
                                 accumulate};
    if (dposition_weight.has_value()) {
      add_to_table(op, gradients, *positions, *dposition_weight, 1.0, -1, stream);
    }
    if (dweight.has_value()) {
      add_to_table(op, gradients, tokens, *dweight, scale, padding_idx, stream);
    }
  });
}

STABLE_TORCH_LIBRARY_IMPL(lightseq, CUDA, m) { m.impl("embedding_bwd", TORCH_BOX(&embedding_bwd)); }

}  // namespace
}  // namespace lightseq
