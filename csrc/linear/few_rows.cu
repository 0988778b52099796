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
//
// norm_linear_fwd uses the same kernel, for at most 6 rows. LayerNorm(s) of s = x + bias + residual
// has a mean m and a deviation d, which are known after a pass over the row. So as not to wait for
// them, the kernel multiplies s as it is, and corrects the product at the end:
//
//   LayerNorm(s) W^T = ((s gamma) W^T - m (gamma W^T)) / d + beta W^T
//
// gamma and beta are rows 6 and 7 of the operand, so their products cost nothing.

#include <algorithm>
#include <cstdint>
#include <type_traits>

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
constexpr int kNormChunks = 2;  // of a warp, which holds them in registers
static_assert(kNormChunks <= kStages && kNormChunks * kChunk * kMaxWarps == kMostNormColumns);
constexpr int kGamma = kFewNormRows, kBeta = kGamma + 1;  // their rows of the operand
static_assert(kBeta < kTile);

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

template <typename T>
struct NormParams {
  const T *bias, *residual, *gamma, *beta;
  T* kept;
  int64_t residual_stride;
  float eps;
  bool keeps_result;

  explicit NormParams(const Product& p)
      : bias(static_cast<const T*>(p.norm->bias)),
        residual(static_cast<const T*>(p.norm->residual)),
        gamma(static_cast<const T*>(p.norm->gamma)),
        beta(static_cast<const T*>(p.norm->beta)),
        kept(static_cast<T*>(p.norm->kept)),
        residual_stride(p.norm->residual_stride),
        eps(p.norm->eps),
        keeps_result(p.norm->keeps_result) {}
};

// A lane's part of LayerNorm(x + bias + residual): row threadIdx.x / 4, and the inputs that it
// multiplies. All threads of the block must call each function.
template <typename T>
class RowNorm {
 public:
  __device__ __forceinline__ RowNorm(const NormParams<T>& norm, const LinearParams<T>& p)
      : norm_(norm), p_(p) {
    const T* const vector = g == kBeta ? norm.beta : g < p.rows ? norm.bias : nullptr;
    each([&](int stage, int half, int column) {
      gamma_[stage][half].load(norm.gamma + column);
      if (vector != nullptr) vector_[stage][half].load(vector + column);
    });
  }

  // The lane's part of the operand, after the kernel that computes x.
  __device__ __forceinline__ void load(Columns<T> (&values)[kNormChunks][2][1]) {
    Columns<T> residual[kNormChunks][2] = {};
    if (g < p_.rows) {
      each([&](int stage, int half, int column) {
        values[stage][half][0].load_cg(p_.x + g * p_.x_stride + column);
        if (norm_.residual == nullptr) return;
        residual[stage][half].load_cg(norm_.residual + g * norm_.residual_stride + column);
      });
    }
#pragma unroll
    for (int stage = 0; stage < kNormChunks; ++stage) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        Columns<T>& value = values[stage][half][0];
        float (&s)[kColumnsPerDraw] = sums_[stage][half];
        float added[kColumnsPerDraw], rest[kColumnsPerDraw], gamma[kColumnsPerDraw];
        value.unpack(s);
        vector_[stage][half].unpack(added);
        residual[stage][half].unpack(rest);
        gamma_[stage][half].unpack(gamma);
#pragma unroll
        for (int e = 0; e < kColumnsPerDraw; ++e) {
          s[e] = s[e] + added[e] + rest[e];
          gamma[e] *= s[e];
        }
        value.pack(gamma);
        if (g == kGamma) value = gamma_[stage][half];
        if (g == kBeta) value = vector_[stage][half];
      }
    }
    if (!writes() || norm_.keeps_result) return;
    each([&](int stage, int half, int column) {
      Columns<T> sum;
      sum.pack(sums_[stage][half]);
      sum.store(kept(column));
    });
  }

  // Before the block's barrier: the mean of the warp's part of the row, and the sum of squares of
  // the differences to it, so that a large mean cancels nothing.
  __device__ __forceinline__ void share() {
    float sum = 0.0f, squares = 0.0f;
    each([&](int stage, int half, int) {
#pragma unroll
      for (int e = 0; e < kColumnsPerDraw; ++e) sum += sums_[stage][half][e];
    });
    const float mean = sum_of_lanes(sum) / static_cast<float>(max(inputs_of(threadIdx.y), 1));
    each([&](int stage, int half, int) {
#pragma unroll
      for (int e = 0; e < kColumnsPerDraw; ++e) {
        const float x = sums_[stage][half][e] - mean;
        squares = fmaf(x, x, squares);
      }
    });
    squares = sum_of_lanes(squares);
    if (t == 0) shared()[threadIdx.y][g] = {mean, squares};
  }

  // After the barrier.
  struct Moments {
    float mean, inverse;  // 1 / deviation
  };
  __device__ __forceinline__ Moments moments() const {
    const float inverse = 1.0f / static_cast<float>(p_.inputs);
    float mean = 0.0f, squares = 0.0f;
    for (int warp = 0; warp < static_cast<int>(blockDim.y); ++warp) {
      mean = fmaf(static_cast<float>(inputs_of(warp)), shared()[warp][g].x, mean);
    }
    mean *= inverse;
    for (int warp = 0; warp < static_cast<int>(blockDim.y); ++warp) {
      const float2 part = shared()[warp][g];
      const float x = part.x - mean;
      squares += fmaf(static_cast<float>(inputs_of(warp)) * x, x, part.y);
    }
    return {mean, rsqrtf(fmaf(squares, inverse, norm_.eps))};
  }

  // Whether the warp may have a part in writing the LayerNorm's result.
  __device__ __forceinline__ bool writes_result() const {
    return norm_.kept != nullptr && norm_.keeps_result;
  }
  __device__ __forceinline__ void write_result(const Moments& row) const {
    if (!writes()) return;
    each([&](int stage, int half, int column) {
      float gamma[kColumnsPerDraw], beta[kColumnsPerDraw] = {};
      Columns<T> packed;
      gamma_[stage][half].unpack(gamma);
      if (norm_.beta != nullptr) {
        packed.load(norm_.beta + column);
        packed.unpack(beta);
      }
#pragma unroll
      for (int e = 0; e < kColumnsPerDraw; ++e) {
        const float x = (sums_[stage][half][e] - row.mean) * row.inverse;
        gamma[e] = fmaf(x, gamma[e], beta[e]);
      }
      packed.pack(gamma);
      packed.store(kept(column));
    });
  }

 private:
  // Calls f(stage, half, column) for the lane's inputs that exist.
  template <typename F>
  __device__ __forceinline__ void each(F&& f) const {
#pragma unroll
    for (int stage = 0; stage < kNormChunks; ++stage) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int chunk = threadIdx.y + stage * blockDim.y;
        const int column = chunk * kChunk + half * kFragments + t * 8;
        if (column < p_.inputs) f(stage, half, column);
      }
    }
  }
  __device__ __forceinline__ int inputs_of(int warp) const {
    int inputs = 0;
#pragma unroll
    for (int stage = 0; stage < kNormChunks; ++stage) {
      const int first = (warp + stage * static_cast<int>(blockDim.y)) * kChunk;
      inputs += min(max(p_.inputs - first, 0), kChunk);
    }
    return inputs;
  }
  // Sum over the four lanes of a row, in a fixed order.
  static __device__ __forceinline__ float sum_of_lanes(float x) {
    x += __shfl_xor_sync(kAllLanes, x, 1);
    return x + __shfl_xor_sync(kAllLanes, x, 2);
  }
  // The blocks share the rows that are written.
  __device__ __forceinline__ bool writes() const {
    return norm_.kept != nullptr && g < p_.rows && g % gridDim.x == blockIdx.x;
  }
  __device__ __forceinline__ T* kept(int column) const {
    return norm_.kept + static_cast<int64_t>(g) * p_.inputs + column;
  }
  static __device__ __forceinline__ float2 (&shared()) [kMaxWarps][kTile] {
    __shared__ float2 parts[kMaxWarps][kTile];
    return parts;
  }

  const NormParams<T>& norm_;
  const LinearParams<T>& p_;
  const int g = threadIdx.x / 4, t = threadIdx.x % 4;
  Columns<T> gamma_[kNormChunks][2] = {}, vector_[kNormChunks][2] = {};  // bias, or beta
  float sums_[kNormChunks][2][kColumnsPerDraw];
};

struct NoNorm {
  explicit NoNorm(const Product&) {}
  template <typename T>
  __device__ __forceinline__ NoNorm(const NoNorm&, const LinearParams<T>&) {}
};

// kTiles: tiles of outputs per block. kRowTiles: tiles of rows, 1 or 2.
template <typename T, int kTiles, int kRowTiles, typename Before>
__global__ void __launch_bounds__(kWarp* kMaxWarps)
    linear_few_rows_kernel(const __grid_constant__ LinearParams<T> p,
                           const __grid_constant__ Before before) {
  constexpr bool kHasNorm = !std::is_same_v<Before, NoNorm>;
  constexpr int kLoaded = kHasNorm ? kNormChunks : kStages;  // chunks of x in registers
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
  std::conditional_t<kHasNorm, RowNorm<T>, NoNorm> norm(before, p);
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();

  // Two sums per tile, because each product must wait for the previous product of the same sum.
  float sums[kTiles][2][4] = {};
  for (int begin = 0; begin < p.chunks; begin += kStages) {
    Columns<T> values[kLoaded][2][kRowTiles] = {};
    if constexpr (kHasNorm) norm.load(values);
#pragma unroll
    for (int stage = 0; stage < kLoaded && !kHasNorm; ++stage) {
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
    for (int stage = 0; stage < kLoaded; ++stage) {
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
  const auto result_of = [&](int of_warp) { return result(of_warp, warp); };
  if constexpr (kHasNorm) {
    norm.share();
    __syncthreads();
    if (warp >= kTiles && !norm.writes_result()) return;
    const auto moments = norm.moments();
    if (norm.writes_result()) norm.write_result(moments);
    if (warp >= kTiles) return;
    float2 sum = p.sum(warps, result_of);
    const auto of_row = [&](int other) -> float2 {
      return {__shfl_sync(kAllLanes, sum.x, other * 4 + t),
              __shfl_sync(kAllLanes, sum.y, other * 4 + t)};
    };
    const float2 of_gamma = of_row(kGamma), of_beta = of_row(kBeta);
    sum.x = fmaf(sum.x - moments.mean * of_gamma.x, moments.inverse, of_beta.x);
    sum.y = fmaf(sum.y - moments.mean * of_gamma.y, moments.inverse, of_beta.y);
    if (finishes) p.finish(row, output, sum, bias);
  } else {
    __syncthreads();
    if (finishes) p.finish(row, output, p.sum(warps, result_of), bias);
  }
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

  const auto start = [&](auto kernel, const auto& params, const auto& before) {
    launch({.op = p.op,
            .grid = dim3(blocks_for(tiles, of_block)),
            .block = dim3(kWarp, warps),
            .shared = static_cast<size_t>(of_block * tile_bytes),
            .dependent = true},
           kernel, params, before);
  };
  static_assert(kMaxTiles == 4 && kFewRows == 2 * kTile);
  const cudaStream_t stream = current_stream(device);
  dispatch_value<1, 2, 3, 4>(of_block, [&](auto of) {
    if (p.norm) {
      using T = __nv_bfloat16;
      return start(linear_few_rows_kernel<T, of.value, 1, NormParams<T>>,
                   LinearParams<T>(p, chunks, stream), NormParams<T>(p));
    }
    dispatch_value<1, 2>(p.a.rows <= kTile ? 1 : 2, [&](auto row_tiles) {
      dispatch_16_bits(p.a.type, [&](auto zero) {
        using T = decltype(zero);
        start(linear_few_rows_kernel<T, of.value, row_tiles.value, NoNorm>,
              LinearParams<T>(p, chunks, stream), NoNorm(p));
      });
    });
  });
}

}  // namespace lightseq
