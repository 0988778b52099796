// Adam over one flat buffer of N parameters: unscaling, clipping, overflow skip, decoupled weight
// decay and 16-bit copy, in one pass.
//
//   norm   = sqrt(sum grad^2)
//   total  = norm * multiplier; if it is not finite, the update is skipped
//   step  += 1
//   g      = grad * multiplier * min(1, max_norm / (total + clip_eps))
//   m, v   = lerp(m, g, 1 - beta1), lerp(v, g^2, 1 - beta2)
//   size   = lr * sqrt(1 - beta2^step) / (1 - beta1^step)
//   param  = (param - lr * weight_decay * param) - size * (m / (sqrt(v) + eps))
//   low    = param rounded to 16 bits
//
// If `low` is bfloat16, param may be stored as its 16-bit remainder over `low` (ops/adam.py:
// split_floats).
//
//   bytes moved   adam_norm reads grad; adam_step reads grad, param, m, v and writes param, m, v,
//                 low. With 16-bit gradients and copy: 2 + 28 bytes per parameter, or 2 + 26 with
//                 the remainder (adam_step then also reads low).
//   determinism   norm: each thread sums its share in float; the shares are added in double, in a
//                 fixed order; the number of blocks depends on N, the dtype and the GPU
//
// adam_norm and adam_step are one launch each. The host reads no value: learning rate, loss scale,
// norm and step are in device memory. Scalars are computed in double, once per block.
//
// Every operation on an element is rounded where eager torch rounds it. So the parameters are equal
// bit for bit to those of the reference on the same GPU. __fmul_rn and similar intrinsics prevent
// the compiler from fusing more operations than torch's own kernels do. In particular, weight decay
// is rounded separately: if it were fused with the step, weights near 1 would drift away from
// fairseq's.

#include <cooperative_groups.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <optional>
#include <type_traits>

#include "common/check.h"
#include "common/launch.cuh"
#include "common/occupancy.h"
#include "common/reduce.cuh"
#include "common/scalars.cuh"
#include "common/vec.cuh"

namespace lightseq {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

constexpr int kNormThreads = 512;
constexpr int kNormLoads = 4;  // 16-byte loads in flight per thread
template <typename T>
constexpr int64_t kNormWork = Vec<T>::kSize * kNormLoads * kNormThreads;  // elements per block
constexpr int kStepThreads = 256;
constexpr int kQuads = 2;  // groups of four elements in flight per thread

// ---- kernels ----

// All blocks write their sums to `partials` and wait for each other; the first block adds them.
template <typename T>
__global__ void __launch_bounds__(kNormThreads)
    adam_norm_kernel(const T* __restrict__ grad, int64_t count, double* __restrict__ partials,
                     float* __restrict__ norm) {
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * kNormThreads + threadIdx.x;
  const int64_t threads = static_cast<int64_t>(gridDim.x) * kNormThreads;
  const int64_t vectors = count / Vec<T>::kSize;
  float sum = 0.0f;
  for (int64_t first = thread; first < vectors; first += threads * kNormLoads) {
    Vec<T> x[kNormLoads];
#pragma unroll
    for (int u = 0; u < kNormLoads; ++u) {
      const int64_t i = first + u * threads;
      x[u] = i < vectors ? load_cg(grad + i * Vec<T>::kSize) : Vec<T>{};
    }
#pragma unroll
    for (int u = 0; u < kNormLoads; ++u) {
      float squares = 0.0f;
#pragma unroll
      for (int e = 0; e < Vec<T>::kSize; ++e) {
        const float value = to_float(x[u].values[e]);
        squares = fmaf(value, value, squares);
      }
      sum += squares;
    }
  }
  const int64_t rest = vectors * Vec<T>::kSize + thread;
  if (rest < count) sum = fmaf(to_float(grad[rest]), to_float(grad[rest]), sum);

  const double of_block = block_reduce<kNormThreads>(static_cast<double>(sum), Sum{});
  if (threadIdx.x == 0) partials[blockIdx.x] = of_block;
  cooperative_groups::this_grid().sync();
  if (blockIdx.x > 0) return;
  double total = 0.0;
  for (int i = threadIdx.x; i < static_cast<int>(gridDim.x); i += kNormThreads) {
    total += partials[i];
  }
  total = block_reduce<kNormThreads>(total, Sum{});
  if (threadIdx.x == 0) *norm = static_cast<float>(sqrt(total));
}

struct Params {
  float* exp_avg;
  float* exp_avg_sq;
  int64_t count;
  unsigned long long* step;
  Floats lr, multiplier, norm;
  double max_norm, clip_eps, beta1, beta2, eps, weight_decay;
};

struct Coefficients {
  float factor, blend_1, blend_2, eps, size, decay;
};

// The lower bits of the counter are the number of updates. Every block reads it, and one block must
// store the next number. So the upper bits count the blocks that have read it, and the last of
// these blocks stores. No block waits, and no second counter must be zeroed before.
constexpr int kStepBits = 40;
constexpr int64_t kMaxBlocks = 1 << 23;

__device__ __forceinline__ unsigned long long number_of(unsigned long long counter) {
  return counter & ((1ull << kStepBits) - 1);
}

// base^exponent in few registers, because the loads in flight occupy most of them.
__device__ __forceinline__ double power(double base, unsigned long long exponent) {
  double result = 1.0;
#pragma unroll 1
  for (; exponent != 0; exponent >>= 1, base *= base) {
    if (exponent & 1) result *= base;
  }
  return result;
}

// Returns false if the gradient has overflowed.
__device__ __forceinline__ bool compute_coefficients(const Params& p, Coefficients* result) {
  const double multiplier = p.multiplier.at<double>(0), lr = p.lr.at<double>(0);
  const unsigned long long step = number_of(__ldcg(p.step)) + 1;
  const double total = p.norm.at<double>(0) * multiplier;
  if (!isfinite(total)) return false;
  const double clip = p.max_norm > 0.0 ? fmin(1.0, p.max_norm / (total + p.clip_eps)) : 1.0;
  const double size = lr * sqrt(1.0 - power(p.beta2, step)) / (1.0 - power(p.beta1, step));
  *result = {.factor = static_cast<float>(multiplier * clip),
             .blend_1 = static_cast<float>(1.0 - p.beta1),
             .blend_2 = static_cast<float>(1.0 - p.beta2),
             .eps = static_cast<float>(p.eps),
             .size = static_cast<float>(size),
             .decay = static_cast<float>(-lr * p.weight_decay)};
  return true;
}

// torch.lerp, which starts at the end that is nearer to the result.
__device__ __forceinline__ float lerp(float from, float to, float weight) {
  const float way = __fsub_rn(to, from);
  return weight < 0.5f ? __fmaf_rn(weight, way, from)
                       : __fmaf_rn(-way, __fsub_rn(1.0f, weight), to);
}

__device__ __forceinline__ void update(const Coefficients& c, float grad, float& p, float& m,
                                       float& v) {
  const float g = __fmul_rn(grad, c.factor);
  m = lerp(m, g, c.blend_1);
  v = lerp(v, __fmul_rn(g, g), c.blend_2);
  const float step = __fmul_rn(__fdiv_rn(m, __fadd_rn(__fsqrt_rn(v), c.eps)), c.size);
  p = __fsub_rn(__fmaf_rn(c.decay, p, p), step);
}

// A float is stored as a bfloat16 and a remainder, the difference of their bits. If the float lies
// half-way between two bfloat16 and the difference would be 2^15, its last bit changes.
__device__ __forceinline__ float join(__nv_bfloat16 high, int16_t remainder) {
  return __uint_as_float((static_cast<uint32_t>(__bfloat16_as_ushort(high)) << 16) + remainder);
}

__device__ __forceinline__ int16_t remainder_of(float x, __nv_bfloat16 high) {
  const uint32_t difference =
      __float_as_uint(x) - (static_cast<uint32_t>(__bfloat16_as_ushort(high)) << 16);
  return static_cast<int16_t>(min(static_cast<int>(difference), INT16_MAX));
}

// Updates a parameter as stored: in float, or as remainder over `low`. Writes its 16-bit copy to
// `low`.
template <typename P, typename L>
__device__ __forceinline__ void update(const Coefficients& c, float grad, P& kept, L& low, float& m,
                                       float& v) {
  if constexpr (std::is_same_v<P, int16_t>) {
    float p = join(low, kept);
    update(c, grad, p, m, v);
    low = from_float<L>(p);
    kept = remainder_of(p, low);
  } else {
    update(c, grad, kept, m, v);
    low = from_float<L>(kept);
  }
}

// Four elements: 16 bytes of float or 8 bytes of a 16-bit type. So a warp's accesses to each tensor
// are contiguous.
template <typename T>
struct alignas(4 * sizeof(T)) Quad {
  static constexpr int kSize = 4;
  using Bits = std::conditional_t<sizeof(T) == 4, int4, int2>;
  T values[kSize];
};

// Bypasses L1: an update took 1.47 ms like this, and 1.50 ms with evict-first loads.
template <typename T>
__device__ __forceinline__ Quad<T> load_quad(const T* address) {
  const auto bits = __ldcg(reinterpret_cast<const typename Quad<T>::Bits*>(address));
  return *reinterpret_cast<const Quad<T>*>(&bits);
}

template <typename T>
__device__ __forceinline__ void store_quad(T* address, const Quad<T>& x) {
  *reinterpret_cast<typename Quad<T>::Bits*>(address) =
      *reinterpret_cast<const typename Quad<T>::Bits*>(&x);
}

// A block processes kQuads * kStepThreads adjacent quads: memory is faster if the addresses in
// flight lie close together. P: float, or int16_t if param holds remainders over `low`. low: null
// if no 16-bit copy is wanted.
template <typename P, typename G, typename L>
__global__ void __launch_bounds__(kStepThreads)
    adam_step_kernel(const __grid_constant__ Params params, P* __restrict__ param,
                     const G* __restrict__ grad, L* __restrict__ low) {
  constexpr bool kSplit = std::is_same_v<P, int16_t>;
  constexpr int kWork = kQuads * kStepThreads;
  const int64_t quads = params.count / 4, first = static_cast<int64_t>(blockIdx.x) * kWork;
  const int left = static_cast<int>(min(static_cast<int64_t>(kWork), quads - first));
  float* const exp_avg = params.exp_avg + 4 * first;
  float* const exp_avg_sq = params.exp_avg_sq + 4 * first;
  Quad<G> g[kQuads];
  Quad<P> kept[kQuads];
  Quad<L> rounded[kQuads];
  Quad<float> m[kQuads], v[kQuads];
#pragma unroll
  for (int u = 0; u < kQuads; ++u) {  // in flight while the first thread computes coefficients
    const int i = threadIdx.x + u * kStepThreads;
    if (i >= left) break;
    g[u] = load_quad(grad + 4 * (first + i));
    kept[u] = load_quad(param + 4 * (first + i));
    if constexpr (kSplit) rounded[u] = load_quad(low + 4 * (first + i));
    m[u] = load_quad(exp_avg + 4 * i);
    v[u] = load_quad(exp_avg_sq + 4 * i);
  }

  __shared__ Coefficients shared;
  __shared__ bool is_finite;
  if (threadIdx.x == 0) is_finite = compute_coefficients(params, &shared);
  __syncthreads();
  if (!is_finite) return;
  const Coefficients c = shared;
  unsigned long long counter = 0;
  if (threadIdx.x == 0) counter = atomicAdd(params.step, 1ull << kStepBits);

#pragma unroll
  for (int u = 0; u < kQuads; ++u) {
    const int i = threadIdx.x + u * kStepThreads;
    if (i >= left) break;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      update(c, to_float(g[u].values[e]), kept[u].values[e], rounded[u].values[e], m[u].values[e],
             v[u].values[e]);
    }
    store_quad(param + 4 * (first + i), kept[u]);
    store_quad(exp_avg + 4 * i, m[u]);
    store_quad(exp_avg_sq + 4 * i, v[u]);
    if (kSplit || low != nullptr) store_quad(low + 4 * (first + i), rounded[u]);
  }
  const int64_t i = 4 * quads + threadIdx.x;  // the first block updates the last count % 4 elements
  if (blockIdx.x == 0 && i < params.count) {
    L of_param = {};
    if constexpr (kSplit) of_param = low[i];
    update(c, to_float(grad[i]), param[i], of_param, exp_avg[i], exp_avg_sq[i]);
    if (kSplit || low != nullptr) low[i] = of_param;
  }
  if (threadIdx.x == 0 && counter >> kStepBits == gridDim.x - 1) {
    atomicExch(params.step, number_of(counter) + 1);
  }
}

// ---- launchers ----

Tensor adam_norm(const Tensor& grad) {
  const char* const op = "adam_norm";
  check_aligned(op, "grad", grad, kVecBytes);
  Tensor norm = allocate(grad, {}, ScalarType::Float);
  const int32_t device = grad.get_device();
  const torch::stable::accelerator::DeviceGuard guard(device);
  dispatch_float(grad.scalar_type(), "adam_norm: grad", [&](auto zero) {
    using T = decltype(zero);
    const auto kernel = adam_norm_kernel<T>;
    const int64_t count = grad.numel();
    const int64_t work = blocks_for(count, kNormWork<T>);
    const int64_t blocks =
        std::clamp<int64_t>(work, 1, resident_blocks(kernel, kNormThreads, device));
    Tensor scratch = allocate(grad, {blocks}, ScalarType::Double);
    launch({.op = op,
            .grid = static_cast<unsigned>(blocks),
            .block = kNormThreads,
            .stream = current_stream(device),
            .cooperative = true},
           kernel, static_cast<const T*>(grad.const_data_ptr()), count,
           scratch.mutable_data_ptr<double>(), norm.mutable_data_ptr<float>());
  });
  return norm;
}

void adam_step(Tensor param, Tensor exp_avg, Tensor exp_avg_sq, const Tensor& grad,
               const std::optional<Tensor>& param_low, Tensor step, const Tensor& lr,
               const Tensor& multiplier, const Tensor& norm, double max_norm, double clip_eps,
               double beta1, double beta2, double eps, double weight_decay) {
  const char* const op = "adam_step";
  const bool is_split = param.scalar_type() == ScalarType::Short;
  require(is_split || param.scalar_type() == ScalarType::Float, op,
          ": param must be float32 on a GPU");
  check_aligned(op, "param", param, is_split ? sizeof(Quad<int16_t>) : sizeof(Quad<float>));
  check_aligned(op, "exp_avg", exp_avg, sizeof(Quad<float>));
  check_aligned(op, "exp_avg_sq", exp_avg_sq, sizeof(Quad<float>));
  const Params params{
      .exp_avg = exp_avg.mutable_data_ptr<float>(),
      .exp_avg_sq = exp_avg_sq.mutable_data_ptr<float>(),
      .count = param.numel(),
      .step = reinterpret_cast<unsigned long long*>(step.mutable_data_ptr<int64_t>()),
      .lr = Floats(lr),
      .multiplier = Floats(multiplier),
      .norm = Floats(norm),
      .max_norm = max_norm,
      .clip_eps = clip_eps,
      .beta1 = beta1,
      .beta2 = beta2,
      .eps = eps,
      .weight_decay = weight_decay};
  constexpr int64_t kWork = 4 * kQuads * kStepThreads;  // elements per block
  const int64_t blocks = std::max<int64_t>(1, blocks_for(params.count, kWork));
  require(blocks <= kMaxBlocks, op, ": ", params.count, " parameters are too many for one buffer");
  const int32_t device = param.get_device();
  const torch::stable::accelerator::DeviceGuard guard(device);
  dispatch_float(grad.scalar_type(), "adam_step: grad", [&](auto zero) {
    using G = decltype(zero);
    check_aligned(op, "grad", grad, sizeof(Quad<G>));
    const auto start = [&](auto* kept, auto* low) {
      using P = std::remove_pointer_t<decltype(kept)>;
      using L = std::remove_pointer_t<decltype(low)>;
      launch({.op = op,
              .grid = static_cast<unsigned>(blocks),
              .block = kStepThreads,
              .stream = current_stream(device)},
             adam_step_kernel<P, G, L>, params, kept, static_cast<const G*>(grad.const_data_ptr()),
             low);
    };
    void* const low = param_low.has_value() ? param_low->mutable_data_ptr() : nullptr;
    if (low != nullptr) check_aligned(op, "param_low", *param_low, sizeof(Quad<__half>));
    if (is_split) {
      return start(param.mutable_data_ptr<int16_t>(), static_cast<__nv_bfloat16*>(low));
    }
    float* const whole = param.mutable_data_ptr<float>();
    if (low != nullptr && param_low->scalar_type() == ScalarType::Half) {
      return start(whole, static_cast<__half*>(low));
    }
    start(whole, static_cast<__nv_bfloat16*>(low));
  });
}

STABLE_TORCH_LIBRARY_IMPL(lightseq, CUDA, m) {
  m.impl("adam_norm", TORCH_BOX(&adam_norm));
  m.impl("adam_step", TORCH_BOX(&adam_step));
}

}  // namespace
}  // namespace lightseq
