// The update of Adam for elements that a thread has loaded: adam.cu has the formulas, and
// fp8_weights.cu casts the new parameters in the same pass.
#pragma once

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "common/check.h"
#include "common/columns.cuh"
#include "common/scalars.cuh"

namespace lightseq::adam {

struct Params {
  float* exp_avg;
  float* exp_avg_sq;
  int64_t count;
  unsigned long long* step;
  Floats lr, multiplier, norm;
  double max_norm, clip_eps, beta1, beta2, eps, weight_decay;
  bool eps_after_correction;
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

// For one thread of each block, after the block has read the number. Returns what end_step() needs.
__device__ __forceinline__ unsigned long long count_block(const Params& p) {
  return atomicAdd(p.step, 1ull << kStepBits);
}

__device__ __forceinline__ void end_step(const Params& p, unsigned long long counter) {
  if (counter >> kStepBits == gridDim.x - 1) atomicExch(p.step, number_of(counter) + 1);
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

// By which lerp() multiplies the way: the weight, or minus the rest, which is exact from 0.5 on.
// The sign, also of zero, says at which end lerp() starts, so no element needs a branch.
__device__ __forceinline__ float blend(double weight) {
  const float rounded = static_cast<float>(weight);
  return rounded < 0.5f ? rounded : -__fsub_rn(1.0f, rounded);
}

// Returns false if the gradient has overflowed.
__device__ __forceinline__ bool compute_coefficients(const Params& p, Coefficients* result) {
  const double multiplier = p.multiplier.at<double>(0), lr = p.lr.at<double>(0);
  const unsigned long long step = number_of(__ldcg(p.step)) + 1;
  const double total = p.norm.at<double>(0) * multiplier;
  if (!isfinite(total)) return false;
  const double clip = p.max_norm > 0.0 ? fmin(1.0, p.max_norm / (total + p.clip_eps)) : 1.0;
  const double correction = sqrt(1.0 - power(p.beta2, step));
  const double size = lr * correction / (1.0 - power(p.beta1, step));
  *result = {.factor = static_cast<float>(multiplier * clip),
             .blend_1 = blend(1.0 - p.beta1),
             .blend_2 = blend(1.0 - p.beta2),
             .eps = static_cast<float>(p.eps_after_correction ? p.eps * correction : p.eps),
             .size = static_cast<float>(size),
             .decay = static_cast<float>(-lr * p.weight_decay)};
  return true;
}

// torch.lerp, which starts at the end that is nearer to the result.
__device__ __forceinline__ float lerp(float from, float to, float blend) {
  return __fmaf_rn(blend, __fsub_rn(to, from), __float_as_int(blend) >= 0 ? from : to);
}

__device__ __forceinline__ void update(const Coefficients& c, float grad, float& p, float& m,
                                       float& v) {
  const float g = __fmul_rn(grad, c.factor);
  m = lerp(m, g, c.blend_1);
  v = lerp(v, __fmul_rn(g, g), c.blend_2);
  const float step = __fmul_rn(__fdiv_rn(m, __fadd_rn(__fsqrt_rn(v), c.eps)), c.size);
  p = __fsub_rn(__fmaf_rn(c.decay, p, p), step);
}

// Four parameters, or numbers of them: 16 bytes of float, or 8 bytes of a 16-bit type, so a warp's
// accesses to each tensor are contiguous. Packed as in memory: otherwise 16-bit loads in flight
// would occupy twice the registers.
template <typename T>
struct Quad {
  static constexpr int kWords = sizeof(T);
  using Bits = std::conditional_t<kWords == 4, uint4, uint2>;
  alignas(Bits) uint32_t words[kWords];

  // Bypasses L1: an update took 1.47 ms like this, and 1.50 ms with evict-first loads.
  __device__ __forceinline__ void load(const T* address) {
    *reinterpret_cast<Bits*>(words) = __ldcg(reinterpret_cast<const Bits*>(address));
  }
  __device__ __forceinline__ void store(T* address) const {
    *reinterpret_cast<Bits*>(address) = *reinterpret_cast<const Bits*>(words);
  }

  // The first number; set() sets the others to zero.
  __device__ __forceinline__ void set(T x) {
    *this = {};
    *reinterpret_cast<T*>(words) = x;
  }
  __device__ __forceinline__ T first() const { return *reinterpret_cast<const T*>(words); }

  __device__ __forceinline__ void unpack(float (&x)[4]) const {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      if constexpr (kWords == 4) {
        x[i] = __uint_as_float(words[i]);
      } else {
        const float2 pair = unpack_pair<T>(words[i]);
        x[2 * i] = pair.x;
        x[2 * i + 1] = pair.y;
      }
    }
  }
  __device__ __forceinline__ void pack(const float (&x)[4]) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      if constexpr (kWords == 4) {
        words[i] = __float_as_uint(x[i]);
      } else {
        words[i] = pack_pair<T>(x[2 * i], x[2 * i + 1]);
      }
    }
  }
};

// A float is stored as a bfloat16 and a remainder, the difference of their bits. If the float lies
// half-way between two bfloat16 and the difference would be 2^15, its last bit changes.
__device__ __forceinline__ void join(const Quad<__nv_bfloat16>& high,
                                     const Quad<int16_t>& remainders, float (&x)[4]) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int pair = static_cast<int>(remainders.words[i]);
    x[2 * i] = __uint_as_float((high.words[i] << 16) + static_cast<int16_t>(pair));
    x[2 * i + 1] = __uint_as_float((high.words[i] & 0xffff0000u) + (pair >> 16));
  }
}

__device__ __forceinline__ Quad<int16_t> remainder_of(const float (&x)[4],
                                                      const Quad<__nv_bfloat16>& high) {
  Quad<int16_t> remainders;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int first = __float_as_int(x[2 * i]) - static_cast<int>(high.words[i] << 16);
    const int second = __float_as_int(x[2 * i + 1]) - static_cast<int>(high.words[i] & 0xffff0000u);
    remainders.words[i] = __byte_perm(min(first, INT16_MAX), min(second, INT16_MAX), 0x5410);
  }
  return remainders;
}

// Updates parameters as stored: in float, or as remainders over `low`. Writes their 16-bit copies
// to `low`.
template <typename P, typename G, typename L>
__device__ __forceinline__ void update(const Coefficients& c, const Quad<G>& grad, Quad<P>& kept,
                                       Quad<L>& low, Quad<float>& m, Quad<float>& v) {
  constexpr bool kSplit = std::is_same_v<P, int16_t>;
  float of_grad[4], of_m[4], of_v[4], p[4];
  grad.unpack(of_grad);
  m.unpack(of_m);
  v.unpack(of_v);
  if constexpr (kSplit) {
    join(low, kept, p);
  } else {
    kept.unpack(p);
  }
#pragma unroll
  for (int e = 0; e < 4; ++e) update(c, of_grad[e], p[e], of_m[e], of_v[e]);
  low.pack(p);
  if constexpr (kSplit) {
    kept = remainder_of(p, low);
  } else {
    kept.pack(p);
  }
  m.pack(of_m);
  v.pack(of_v);
}

// The last count % 4 parameters, for one block; the others are in quads. low: see adam_step_kernel.
template <typename P, typename G, typename L>
__device__ __forceinline__ void update_last(const Params& params, const Coefficients& c, P* param,
                                            const G* grad, L* low) {
  const int64_t i = params.count / 4 * 4 + threadIdx.x;
  if (i >= params.count) return;
  Quad<G> of_grad;
  Quad<P> kept;
  Quad<L> of_low = {};
  Quad<float> m, v;
  of_grad.set(grad[i]);
  kept.set(param[i]);
  m.set(params.exp_avg[i]);
  v.set(params.exp_avg_sq[i]);
  if (low != nullptr) of_low.set(low[i]);
  update(c, of_grad, kept, of_low, m, v);
  param[i] = kept.first();
  params.exp_avg[i] = m.first();
  params.exp_avg_sq[i] = v.first();
  if (low != nullptr) low[i] = of_low.first();
}

// The cast of all weights: see ops/fp8_weights.py.
struct WeightCast {
  Tensor tiles, scale, amax, saturated, values, transposes;
};

// The update of param, which is split over `low`, and the cast of the new weights in one pass
// (fp8_weights.cu).
void update_and_cast(const char* op, const Params& params, const Tensor& param, const Tensor& grad,
                     const Tensor& low, const WeightCast& cast);

inline void check_blocks(const char* op, const Params& params, int64_t blocks) {
  require(blocks <= kMaxBlocks, op, ": ", params.count, " parameters are too many for one buffer");
}

}  // namespace lightseq::adam
