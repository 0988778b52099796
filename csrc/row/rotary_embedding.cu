// Rotary position embedding, in place. T rows (tokens), H heads of D columns.
//
//   y[j]       = x[j] cos[j] - x[j + D/2] sin[j]       j < D/2; cos and sin [T, D/2]
//   y[j + D/2] = x[j + D/2] cos[j] + x[j] sin[j]       transposed: with -sin
//
//   saved for backward   nothing: the transposed rotation reads the gradients only
//   bytes moved          x read and written once; cos and sin once
//   determinism          each result depends on four numbers
//
// A thread rotates four pairs of columns of four heads. The threads of a block have the same few
// rows, whose angles they read from L1.

#include <algorithm>

#include "common/check.h"
#include "common/launch.cuh"
#include "common/vec.cuh"

namespace lightseq {
namespace {

constexpr int kPairs = 4, kHeads = 4;  // of a thread
constexpr int kThreads = 256;          // of a block

template <typename T>
struct alignas(kPairs * sizeof(T)) Four {
  T values[kPairs];
};

template <typename T>
struct Params {
  T* x;
  const float *cos, *sin;
  int64_t token_stride, head_stride, rows;
  int heads, half;  // half: D / 2
  float sign;       // of sin
};

template <typename T>
__global__ void __launch_bounds__(kThreads)
    rotary_embedding_kernel(const __grid_constant__ Params<T> p) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * blockDim.z + threadIdx.z;
  if (row >= p.rows) return;
  const int pair = static_cast<int>(threadIdx.x) * kPairs;
  const auto cos = *reinterpret_cast<const Four<float>*>(p.cos + row * p.half + pair);
  const auto sin = *reinterpret_cast<const Four<float>*>(p.sin + row * p.half + pair);
  T* const first = p.x + row * p.token_stride + pair;
  for (int head = threadIdx.y * kHeads; head < p.heads; head += blockDim.y * kHeads) {
    Four<T> left[kHeads], right[kHeads];
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      if (head + h >= p.heads) break;
      const T* const from = first + (head + h) * p.head_stride;
      left[h] = *reinterpret_cast<const Four<T>*>(from);
      right[h] = *reinterpret_cast<const Four<T>*>(from + p.half);
    }
#pragma unroll
    for (int h = 0; h < kHeads; ++h) {
      if (head + h >= p.heads) break;
#pragma unroll
      for (int i = 0; i < kPairs; ++i) {
        const float a = to_float(left[h].values[i]), b = to_float(right[h].values[i]);
        const float c = cos.values[i], s = sin.values[i] * p.sign;
        left[h].values[i] = from_float<T>(a * c - b * s);
        right[h].values[i] = from_float<T>(b * c + a * s);
      }
      T* const to = first + (head + h) * p.head_stride;
      *reinterpret_cast<Four<T>*>(to) = left[h];
      *reinterpret_cast<Four<T>*>(to + p.half) = right[h];
    }
  }
}

void rotary_embedding(Tensor x, const Tensor& cos, const Tensor& sin, bool transposed) {
  constexpr const char* op = "rotary_embedding";
  check_rows(op, "x", x);
  const int64_t rows = x.size(0), heads = x.size(1), width = x.size(2);
  if (x.numel() == 0) return;
  require(width <= 8 * kThreads, op, ": heads must have at most ", 8 * kThreads,
          " columns on a GPU, got ", width);
  check_aligned(op, "cos", cos, kVecBytes);
  check_aligned(op, "sin", sin, kVecBytes);
  const DeviceGuard guard(x.get_device());
  dispatch_float(x.scalar_type(), "rotary_embedding: x", [&](auto zero) {
    using T = decltype(zero);
    const Params<T> params{.x = static_cast<T*>(x.data_ptr()),
                           .cos = cos.const_data_ptr<float>(),
                           .sin = sin.const_data_ptr<float>(),
                           .token_stride = x.stride(0),
                           .head_stride = x.stride(1),
                           .rows = rows,
                           .heads = static_cast<int>(heads),
                           .half = static_cast<int>(width / 2),
                           .sign = transposed ? -1.0f : 1.0f};
    const int64_t across = width / (2 * kPairs);
    const int64_t down = std::min(blocks_for(heads, kHeads), kThreads / across);
    const int64_t deep = std::clamp<int64_t>(kThreads / (across * down), 1, 64);
    launch({.op = op,
            .grid = static_cast<unsigned>(blocks_for(rows, deep)),
            .block = dim3(across, down, deep)},
           rotary_embedding_kernel<T>, params);
  });
}

STABLE_TORCH_LIBRARY_IMPL(lightseq, CUDA, m) {
  m.impl("rotary_embedding", TORCH_BOX(&rotary_embedding));
}

}  // namespace
}  // namespace lightseq
