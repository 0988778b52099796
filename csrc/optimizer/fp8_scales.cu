// Scales of M fp8 tensors from the largest numbers of the last updates.
//
//   history, amax   the amaxes become the newest of the history, and then zero
//   scale           2^ceil(log2(a / 224)), a: the largest amax of the history
//
//   bytes moved    some 140 per tensor; the time is that of a launch
//   determinism    the same bits as the reference, ops/fp8_scales.py
//
// A thread per tensor. Whether the update was skipped is read on the device.

#include <cstdint>

#include "common/check.h"
#include "common/launch.cuh"

namespace lightseq {
namespace {

constexpr int kThreads = 64;
constexpr int kHistory = 16;  // HISTORY of ops/fp8_scales.py
constexpr int kMostExponent = 60;

// The least power of two by which `most` / 224 is at most 1, from 2^-60 to 2^60. most: positive.
// 224 is 1.75 * 2^7, so the exponent is that of `most` less 7, or one more if the mantissa of
// `most` exceeds 1.75.
__device__ __forceinline__ float scale_of(float most) {
  const uint32_t bits = __float_as_uint(most);
  const int above = (bits & 0x7fffffu) > 0x600000u;
  const int exponent = static_cast<int>(bits >> 23) - 127 - 7 + above;
  return __uint_as_float((max(-kMostExponent, min(exponent, kMostExponent)) + 127) << 23);
}

__global__ void __launch_bounds__(kThreads)
    fp8_scales_kernel(float* __restrict__ scale, int64_t stride, float* __restrict__ amax,
                      float* __restrict__ history, int64_t count,
                      const double* __restrict__ skipped, bool forget) {
  const int64_t tensor = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (tensor >= count) return;
  float newest_first[kHistory];
  newest_first[0] = amax[tensor];
#pragma unroll
  for (int i = 1; i < kHistory; ++i) {
    newest_first[i] = forget ? 0.0f : history[(i - 1) * count + tensor];
  }
  amax[tensor] = 0.0f;
  if (*skipped != 0.0) return;
  float most = 0.0f;
#pragma unroll
  for (int i = 0; i < kHistory; ++i) {
    most = fmaxf(most, newest_first[i]);
    history[i * count + tensor] = newest_first[i];
  }
  if (most > 0.0f) scale[tensor * stride] = scale_of(most);
}

void fp8_scales(Tensor scale, Tensor amax, Tensor history, const Tensor& skipped, bool forget) {
  const int64_t count = scale.numel();
  if (count == 0) return;
  const DeviceGuard guard(scale.get_device());
  launch({.op = "fp8_scales", .grid = dim3(blocks_for(count, kThreads)), .block = kThreads},
         fp8_scales_kernel, scale.mutable_data_ptr<float>(), scale.stride(0),
         amax.mutable_data_ptr<float>(), history.mutable_data_ptr<float>(), count,
         skipped.const_data_ptr<double>(), forget);
}

STABLE_TORCH_LIBRARY_IMPL(lightseq, CUDA, m) { m.impl("fp8_scales", TORCH_BOX(&fp8_scales)); }

}  // namespace
}  // namespace lightseq
