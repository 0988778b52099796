// Token and position embedding, backward: T tokens (rows), C columns, V rows of a table.
//
//   dweight[v] = scale * sum over t with token[t] == v of dropout'(dy[t])
//
// The gradient of the position table is the same without the factor. The padding symbol gets no
// gradient in dweight. dropout' applies forward's dropout bits, generated again.
//
//   bytes moved   dy, the gradient of the table (when accumulating, only the rows that occur), and
//                 the data of the sort
//   determinism   Each sum is divided into parts by the places (indices) of its tokens among
//                 the sorted tokens. Tokens within a part, and then the parts, are added in
//                 ascending order. The order does not depend on atomics.
//
// embedding_sort.cuh sorts the tokens by their row of the table, and sets rows that do not
// occur to zero. The tokens of a row are then a segment of adjacent places. embedding_sum_kernel
// gives each warp a window of 16 places. So all warps have about the same work, even if some tokens
// are frequent (the most frequent word can be 18% of a batch). A segment of at most 8 tokens is
// summed by the warp in whose window it begins. A longer segment is divided where windows end. The
// block adds the parts of its warps in shared memory; if a segment extends over several blocks, the
// last of them to finish adds all their parts, through global memory.

#include <cstdint>
#include <optional>

#include "common/check.h"
#include "common/columns.cuh"
#include "common/launch.cuh"
#include "common/ptx/async_copy.cuh"
#include "common/reduce.cuh"
#include "row/embedding_sort.cuh"

namespace lightseq {
namespace {

using embedding::Place;
using embedding::Sort;

constexpr int kWarps = 8;  // per block
constexpr int kBlock = kWarp * kWarps;
constexpr int kSlab = kWarp * kColumnsPerDraw;  // columns per warp
constexpr int kWindow = 16;                     // places per warp
constexpr int kSpan = kWindow * kWarps;         // places per block
constexpr int kShort = 8;                       // segments of up to kShort tokens are not divided

// Rows of dy in flight per warp: the same number of bytes for every type.
template <typename T>
constexpr int kStages = 8 / sizeof(T);

template <typename T>
struct Gradients {
  const T* dy;
  int64_t dy_stride, columns;
  DropoutFactors dropout;
  bool accumulate;
  float scale = 1.0f;
  int slabs = 0;
  float* partials = nullptr;  // [spans, 2, columns], see join_spans()
  void* table = nullptr;
  int64_t table_stride = 0;
  ScalarType table_type = ScalarType::Float;
};

// The tokens of a row of the table: places start ... end - 1.
struct Segment {
  int row, start, end;
};

using Sums = float[kColumnsPerDraw];

__device__ __forceinline__ void clear(Sums& sums) {
#pragma unroll
  for (int e = 0; e < kColumnsPerDraw; ++e) sums[e] = 0.0f;
}

__device__ __forceinline__ void add(Sums& sums, const Sums& values) {
#pragma unroll
  for (int e = 0; e < kColumnsPerDraw; ++e) sums[e] += values[e];
}

// Copies eight columns.
template <typename T>
__device__ __forceinline__ void cp_async_columns(T* to, const T* from) {
#pragma unroll
  for (int i = 0; i < kColumnsPerDraw; i += Vec<T>::kSize) cp_async(to + i, from + i);
}

// Writes the sums to a row of the table, or adds them to it; rounds once.
template <typename G, typename T>
__device__ __forceinline__ void store_as(const Gradients<T>& g, int64_t row, int64_t column,
                                         const Sums& sums) {
  G* const target = static_cast<G*>(g.table) + row * g.table_stride + column;
  Columns<G> stored;
  Sums values = {};
  if (g.accumulate) {
    stored.load_cg(target);
    stored.unpack(values);
  }
#pragma unroll
  for (int e = 0; e < kColumnsPerDraw; ++e) values[e] = fmaf(sums[e], g.scale, values[e]);
  stored.pack(values);
  stored.store(target);
}

template <typename T>
__device__ __forceinline__ void store_sums(const Gradients<T>& g, int64_t row, int64_t column,
                                           const Sums& sums) {
  if (column >= g.columns) return;
  switch (g.table_type) {
    case ScalarType::Float:
      return store_as<float>(g, row, column, sums);
    case ScalarType::Half:
      return store_as<__half>(g, row, column, sums);
    default:
      return store_as<__nv_bfloat16>(g, row, column, sums);
  }
}

// Writes the block's part of a segment to global memory. If it is the last of the segment's blocks
// to do so, sets `sums` to the sums of the whole segment and returns true.
template <typename T>
__device__ __forceinline__ bool join_spans(const Sort& p, const Gradients<T>& g,
                                           const Segment& segment, int span, int slab,
                                           int64_t column, Sums& sums) {
  const int first = segment.start / kSpan, spans = (segment.end - 1) / kSpan - first + 1;
  const bool is_inside = column < g.columns;
  // A span can have two parts to write: of the segment that continues from the previous span, and
  // of the one that continues in the next span.
  const auto part = [&](int of) {
    return g.partials + (2 * static_cast<int64_t>(of) + (of == first)) * g.columns + column;
  };
  Columns<float> left;
  left.pack(sums);
  if (is_inside) left.store(part(span));
  __threadfence();
  __syncwarp();
  int arrived = 0;
  if (threadIdx.x % kWarp == 0) {
    arrived = atomicAdd(p.arrived + static_cast<int64_t>(first) * g.slabs + slab, 1);
  }
  if (__shfl_sync(kAllLanes, arrived, 0) < spans - 1) return false;
  __threadfence();
  clear(sums);
  if (!is_inside) return true;
#pragma unroll 4
  for (int i = 0; i < spans; ++i) {
    Sums values;
    left.load_cg(part(first + i));
    left.unpack(values);
    add(sums, values);
  }
  return true;
}

template <typename T, bool kDrops>
__global__ void __launch_bounds__(kBlock, sizeof(T) == 2 ? 4 : 3)
    embedding_sum_kernel(const __grid_constant__ Sort p, const __grid_constant__ Gradients<T> g) {
  __shared__ alignas(16) T rows[kStages<T>][kBlock][kColumnsPerDraw];
  __shared__ alignas(16) float parts[kWarps][kSlab];  // of segments that begin in earlier windows
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int span = static_cast<int>(blockIdx.x) / g.slabs;
  const int slab = static_cast<int>(blockIdx.x) - span * g.slabs;
  const int64_t group = static_cast<int64_t>(slab) * kWarp + lane;
  const int64_t column = group * kColumnsPerDraw;
  const int window = span * kSpan + warp * kWindow;
  const Rng rng(g.dropout.dropout.rng);

  // One lane per place of the window; further lanes for the places up to which a short segment can
  // extend past the window.
  Place place = {};
  if (lane < kWindow + kShort - 1 && lane < p.tokens - window) place = p.order[window + lane];
  const int begin = lane - place.index;  // first place of the segment, relative to the window
  const bool is_long = place.count > kShort;
  const bool is_here = is_long ? lane < kWindow : place.count > 0 && begin >= 0 && begin < kWindow;
  const bool is_last = place.index == place.count - 1 || (is_long && lane == kWindow - 1);
  const unsigned ends = __ballot_sync(kAllLanes, is_last);
  unsigned left = __ballot_sync(kAllLanes, is_here), ahead = left;
  const auto copy_next = [&](int stage) {
    if (ahead != 0) {
      const int64_t token = __shfl_sync(kAllLanes, place.token, __ffs(ahead) - 1);
      if (column < g.columns) {
        cp_async_columns(rows[stage][threadIdx.x], g.dy + token * g.dy_stride + column);
      }
    }
    ahead &= ahead - 1;
    cp_async_commit();
  };
#pragma unroll 1
  for (int stage = 0; stage < kStages<T>; ++stage) copy_next(stage);
  Sums sums = {};
#pragma unroll 1
  for (int stage = 0; left != 0; left &= left - 1, stage = (stage + 1) % kStages<T>) {
    const int at = __ffs(left) - 1;
    uint32_t keep = kKeepAll;  // generate bits while the copies are in flight
    if constexpr (kDrops) {
      keep = g.dropout.draw(rng, __shfl_sync(kAllLanes, place.token, at), group);
    }
    Columns<T> x;
    Sums values;
    cp_async_wait<kStages<T> - 1>();
    x.load_shared(rows[stage][threadIdx.x]);
    x.unpack(values);
    if constexpr (kDrops) g.dropout.apply(keep, values);
    add(sums, values);
    copy_next(stage);
    if ((ends >> at & 1) == 0) continue;
    const int row = __shfl_sync(kAllLanes, place.row, at);
    const int index = __shfl_sync(kAllLanes, place.index, at);
    const int count = __shfl_sync(kAllLanes, place.count, at);
    if (index > at) {
      auto* const part = reinterpret_cast<float4*>(parts[warp] + lane * kColumnsPerDraw);
      part[0] = make_float4(sums[0], sums[1], sums[2], sums[3]);
      part[1] = make_float4(sums[4], sums[5], sums[6], sums[7]);
    } else if (index == count - 1) {
      store_sums(g, row, column, sums);
    } else {
      break;  // the segment continues in the next window; the sums are used below
    }
    clear(sums);
  }

  // The parts of a long segment are added by the warp in whose window it begins; if it begins
  // before the span, by the first warp.
  __syncthreads();
  const bool goes_on = is_long && begin >= 0 && place.index < place.count - 1;
  const bool came = is_long && place.index > 0;
  unsigned joins = __ballot_sync(kAllLanes, lane == kWindow - 1 && goes_on) |
                   __ballot_sync(kAllLanes, lane == 0 && warp == 0 && came);
#pragma unroll 1
  while (joins != 0) {
    const int at = kWarp - 1 - __clz(joins);
    joins ^= 1u << at;
    const int start = __shfl_sync(kAllLanes, window + begin, at);
    const Segment segment{__shfl_sync(kAllLanes, place.row, at), start,
                          start + __shfl_sync(kAllLanes, place.count, at)};
    const int first = span * kSpan;
    for (int other = at == 0 ? 0 : warp + 1; other < kWarps; ++other) {
      if (first + other * kWindow >= segment.end) break;
      Sums values;
      Columns<float> part;
      part.load_shared(parts[other] + lane * kColumnsPerDraw);
      part.unpack(values);
      add(sums, values);
    }
    const bool is_whole = start >= first && segment.end <= first + kSpan;
    if (is_whole || join_spans(p, g, segment, span, slab, column, sums)) {
      store_sums(g, segment.row, column, sums);
    }
    clear(sums);
  }
}

// table[indices[t]] (+)= scale * dropout'(dy[t]) for all tokens t, except in the row `excluded`.
template <typename T>
void add_to_table(const char* op, Gradients<T> g, const Tensor& indices, Tensor table, double scale,
                  int64_t excluded) {
  const int64_t tokens = indices.size(0), columns = table.size(1);
  if (table.numel() == 0) return;
  if (tokens == 0) {
    if (!g.accumulate) torch::stable::zero_(table);
    return;
  }
  require(tokens <= INT32_MAX - embedding::kSortBlock, op, ": at most 2^31 tokens are supported",
          ", got ", tokens);
  const int64_t slabs = blocks_for(columns, kSlab), spans = blocks_for(tokens, kSpan);
  constexpr int64_t kInts = sizeof(Place) / sizeof(int);
  Tensor scratch = allocate(indices, {kInts * tokens + spans * slabs}, ScalarType::Int);
  Tensor partials = allocate(table, {2 * spans, columns}, ScalarType::Float);
  g.scale = static_cast<float>(scale);
  g.slabs = static_cast<int>(slabs);
  g.partials = partials.mutable_data_ptr<float>();
  g.table = table.mutable_data_ptr();
  g.table_stride = table.stride(0);
  g.table_type = table.scalar_type();
  const int64_t size = static_cast<int64_t>(table.element_size());
  Sort sort{Indices(indices), static_cast<int>(tokens)};
  sort.vocabulary = table.size(0);
  sort.excluded = excluded;
  sort.order = static_cast<Place*>(scratch.mutable_data_ptr());
  sort.arrived = scratch.mutable_data_ptr<int>() + kInts * tokens;
  sort.arrivals = spans * slabs;
  sort.table = g.accumulate ? nullptr : static_cast<char*>(g.table);
  sort.table_stride = g.table_stride * size;
  sort.row_bytes = columns * size;
  sort_tokens(sort);
  // Test the scale, not the threshold: if 0 < p <= 2^-17, nothing is dropped, but dy is scaled.
  const auto kernel =
      g.dropout.scale != 1.0f ? embedding_sum_kernel<T, true> : embedding_sum_kernel<T, false>;
  launch({.op = op, .grid = dim3(spans * slabs), .block = kBlock}, kernel, sort, g);
}

void embedding_bwd(const Tensor& dy, const Tensor& tokens, const std::optional<Tensor>& positions,
                   double scale, int64_t padding_idx, double p, const Tensor& rng, int64_t site,
                   std::optional<Tensor> dweight, std::optional<Tensor> dposition_weight,
                   bool accumulate) {
  const char* const op = "embedding_bwd";
  check_rows(op, "dy", dy);
  const auto check_table = [&](const char* name, const std::optional<Tensor>& table) {
    check_optional_rows(op, name, table);
    require(!table.has_value() || table->scalar_type() != ScalarType::Double, op, ": ", name,
            " must be float32, float16 or bfloat16 on a GPU");
  };
  check_table("dweight", dweight);
  check_table("dposition_weight", dposition_weight);
  const DeviceGuard guard(dy.get_device());
  dispatch_float(dy.scalar_type(), "embedding_bwd: dy", [&](auto zero) {
    using T = decltype(zero);
    const Gradients<T> gradients{.dy = data_of<T>(dy),
                                 .dy_stride = dy.stride(0),
                                 .columns = dy.size(1),
                                 .dropout = DropoutFactors(rng.const_data_ptr<int64_t>(), site, p),
                                 .accumulate = accumulate};
    if (dposition_weight.has_value()) {
      add_to_table(op, gradients, *positions, *dposition_weight, 1.0, -1);
    }
    if (dweight.has_value()) {
      add_to_table(op, gradients, tokens, *dweight, scale, padding_idx);
    }
  });
}

STABLE_TORCH_LIBRARY_IMPL(lightseq, CUDA, m) { m.impl("embedding_bwd", TORCH_BOX(&embedding_bwd)); }

}  // namespace
}  // namespace lightseq
