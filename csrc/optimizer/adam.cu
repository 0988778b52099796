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
//            (torch's rule: eps * sqrt(1 - beta2^step) in place of eps)
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

#include <algorithm>
#include <optional>
#include <type_traits>

#include "common/check.h"
#include "common/device.h"
#include "common/launch.cuh"
#include "common/reduce.cuh"
#include "common/vec.cuh"
#include "optimizer/adam.cuh"

namespace lightseq::adam {
namespace {

constexpr int kNormThreads = 512;
constexpr int kNormLoads = 4;  // 16-byte loads in flight per thread
template <typename T>
constexpr int64_t kNormWork = Vec<T>::kSize * kNormLoads * kNormThreads;  // elements per block
constexpr int kStepThreads = 256;
constexpr int kQuads = 2;  // groups of four elements in flight per thread

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
  const int64_t place = vectors * Vec<T>::kSize + thread;
  if (place < count) sum = fmaf(to_float(grad[place]), to_float(grad[place]), sum);

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
    g[u].load(grad + 4 * (first + i));
    kept[u].load(param + 4 * (first + i));
    if constexpr (kSplit) rounded[u].load(low + 4 * (first + i));
    m[u].load(exp_avg + 4 * i);
    v[u].load(exp_avg_sq + 4 * i);
  }

  __shared__ Coefficients shared;
  __shared__ bool is_finite;
  if (threadIdx.x == 0) is_finite = compute_coefficients(params, &shared);
  __syncthreads();
  if (!is_finite) return;
  const Coefficients c = shared;
  unsigned long long counter = 0;
  if (threadIdx.x == 0) counter = count_block(params);

#pragma unroll
  for (int u = 0; u < kQuads; ++u) {
    const int i = threadIdx.x + u * kStepThreads;
    if (i >= left) break;
    update(c, g[u], kept[u], rounded[u], m[u], v[u]);
    kept[u].store(param + 4 * (first + i));
    m[u].store(exp_avg + 4 * i);
    v[u].store(exp_avg_sq + 4 * i);
    if (kSplit || low != nullptr) rounded[u].store(low + 4 * (first + i));
  }
  if (blockIdx.x == 0) update_last(params, c, param, grad, low);
  if (threadIdx.x == 0) end_step(params, counter);
}

Tensor adam_norm(const Tensor& grad) {
  const char* const op = "adam_norm";
  check_aligned(op, "grad", grad, kVecBytes);
  Tensor norm = allocate(grad, {}, ScalarType::Float);
  const int32_t device = grad.get_device();
  const DeviceGuard guard(device);
  dispatch_float(grad.scalar_type(), "adam_norm: grad", [&](auto zero) {
    using T = decltype(zero);
    const auto kernel = adam_norm_kernel<T>;
    const int64_t count = grad.numel();
    const int64_t work = blocks_for(count, kNormWork<T>);
    const int64_t blocks =
        std::clamp<int64_t>(work, 1, resident_blocks(kernel, kNormThreads, device));
    Tensor scratch = allocate(grad, {blocks}, ScalarType::Double);
    launch({.op = op, .grid = dim3(blocks), .block = kNormThreads, .cooperative = true}, kernel,
           data_of<T>(grad), count, scratch.mutable_data_ptr<double>(),
           norm.mutable_data_ptr<float>());
  });
  return norm;
}

void adam_step(Tensor param, Tensor exp_avg, Tensor exp_avg_sq, const Tensor& grad,
               const std::optional<Tensor>& param_low, Tensor step, const Tensor& lr,
               const Tensor& multiplier, const Tensor& norm, double max_norm, double clip_eps,
               double beta1, double beta2, double eps, double weight_decay,
               std::optional<Tensor> cast_tiles, std::optional<Tensor> cast_scale,
               std::optional<Tensor> cast_amax, std::optional<Tensor> cast_saturated,
               std::optional<Tensor> cast_values, std::optional<Tensor> cast_transposes,
               bool eps_after_correction) {
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
      .weight_decay = weight_decay,
      .eps_after_correction = eps_after_correction};
  if (cast_tiles.has_value()) {
    return update_and_cast(
        op, params, param, grad, *param_low,
        {*cast_tiles, *cast_scale, *cast_amax, *cast_saturated, *cast_values, *cast_transposes});
  }
  constexpr int64_t kWork = 4 * kQuads * kStepThreads;  // elements per block
  const int64_t blocks = std::max<int64_t>(1, blocks_for(params.count, kWork));
  check_blocks(op, params, blocks);
  const DeviceGuard guard(param.get_device());
  dispatch_float(grad.scalar_type(), "adam_step: grad", [&](auto zero) {
    using G = decltype(zero);
    check_aligned(op, "grad", grad, sizeof(Quad<G>));
    const auto start = [&](auto* kept, auto* low) {
      using P = std::remove_pointer_t<decltype(kept)>;
      using L = std::remove_pointer_t<decltype(low)>;
      launch({.op = op, .grid = dim3(blocks), .block = kStepThreads}, adam_step_kernel<P, G, L>,
             params, kept, data_of<G>(grad), low);
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
}  // namespace lightseq::adam
