// Label-smoothed cross entropy of logits [T, V]: T rows (tokens), V classes (vocabulary).
//
//   lse       = log sum_j exp(logit[j])
//   nll       = lse - logit[target]
//   loss      = (1 - s - s') nll + s' sum_j (lse - logit[j]),   s' = s / (V - 1) for smoothing s
//   correct   = whether the target is the first class with the largest logit
//   dlogit[j] = dloss (exp(logit[j] - lse) - s' - (1 - s - s') [j == target])
//
//   saved for backward   lse and the logits, which backward overwrites with their gradient
//   bytes moved          Forward reads the logits once. Backward reads and writes them once; rows
//                        whose target is the pad symbol are only written. If dloss is known in
//                        advance, fwd_bwd does both, and reads and writes the logits once.
//   determinism          sums of a row have a fixed order, which depends on V and on the alignment
//                        of the row
//
// A block processes one row. Its threads have several 16-byte loads in flight. They keep a running
// maximum and the sum of exponentials relative to it, so forward needs only one pass. V may be any
// number and rows may start at any address: the numbers before the first and after the last aligned
// vector are read one per thread. fwd_bwd keeps the row in shared memory between its two passes. If
// rows are too long for that, it launches forward and then backward.
//
// lse is NaN if the row has a NaN or +inf, or only -inf, as in the reference. Otherwise a class
// with logit -inf has probability 0. A row with a NaN counts as wrong. A target out of range that
// is not the pad symbol stops forward's kernel with a device-side assertion.

#include <cassert>
#include <cfloat>
#include <cstdint>
#include <tuple>
#include <type_traits>

#include "common/check.h"
#include "common/columns.cuh"
#include "common/cut.cuh"
#include "common/exp2.cuh"
#include "common/launch.cuh"
#include "common/ptx/async_copy.cuh"
#include "common/reduce.cuh"
#include "common/scalars.cuh"
#include "common/vec.cuh"

namespace lightseq {
namespace {

constexpr int kFwdThreads = 128, kFwdLoads = 2;  // loads: of 8 logits each, in flight per thread
constexpr int kBwdThreads = 512, kBwdLoads = 4;
constexpr int kBothThreads = 512, kBothLoads = 2;
constexpr int kSize = kColumnsPerDraw;  // logits per load

// Running maximum and sums over the logits that a thread has read.
template <typename T>
struct Running {
  float max = -0.5f * FLT_MAX;  // finite, so that exp(-inf - max) is 0
  float sum = 0.0f;             // sum of exp(logit - max)
  float total = 0.0f;           // sum of the logits

  // Adds logits and returns the largest of them.
  template <int kCount>
  __device__ __forceinline__ float add(const float (&x)[kCount]) {
    float top = x[0];
    float part = x[0];
#pragma unroll
    for (int e = 1; e < kCount; ++e) {
      top = fmaxf(top, x[e]);
      part += x[e];
    }
    total += part;
    if (top > max) {
      sum *= Exponential<T>(top)(max);
      max = top;
    }
    const Exponential<T> exponential(max);
    part = 0.0f;
#pragma unroll
    for (int e = 0; e < kCount; ++e) part += exponential(x[e]);
    sum += part;
    return top;
  }
};

struct Rows {
  int64_t stride;
  int classes;
  Indices target;
  int64_t padding_idx;
  float share, own;  // weights in the loss: of every class, and the target's additional weight
};

// Loads the vectors of a row, from global memory or from their copy in shared memory.
template <typename T>
struct InMemory {
  const T* row;
  __device__ __forceinline__ void load(Columns<T>& x, const Cut& cut, int i) const {
    x.load_cg(row + cut.column_of_vector(i));
  }
};

template <typename T>
struct OnChip {
  const T* vectors;
  __device__ __forceinline__ void load(Columns<T>& x, const Cut&, int i) const {
    x.load_shared(vectors + i * kSize);
  }
};

// Outputs of forward; a block writes element blockIdx.x. lse null: do not write.
struct Results {
  float *loss, *nll, *lse;
  bool* correct;

  __device__ __forceinline__ void store_losses(float of_loss, float of_nll) const {
    loss[blockIdx.x] = of_loss;
    nll[blockIdx.x] = of_nll;
  }
};

// Stores the results of a row, and returns its lse to all threads. wanted: the target.
template <int kThreads, bool kAccuracy, typename T, typename Source>
__device__ __forceinline__ float forward(const Source& source, const T* row, const Cut& cut,
                                         const Rows& rows, int64_t wanted, const Results& results) {
  const bool is_pad = wanted == rows.padding_idx;
  assert(is_pad || (wanted >= 0 && wanted < rows.classes && "target in [0, V)"));
  const int target = static_cast<int>(wanted);
  const float mine = is_pad ? 0.0f : to_float(row[target]);

  Running<T> seen;
  bool beaten = false;  // found a larger logit, or an equal one of a class before the target
  if (static_cast<int>(threadIdx.x) < cut.scalars) {
    const int column = cut.column_of_scalar(threadIdx.x);
    const float x[1] = {to_float(row[column])};
    const float top = seen.add(x);
    if constexpr (kAccuracy) beaten = column < target ? top >= mine : top > mine;
  }
  // Check the classes before the target that may be in the target's vector.
  if (kAccuracy && threadIdx.x == 0 && !is_pad) {
    for (int i = ::max(0, target - kSize + 1); i < target; ++i) beaten |= to_float(row[i]) >= mine;
  }
  for (int first = threadIdx.x; first < cut.vectors; first += kThreads * kFwdLoads) {
    Columns<T> logit[kFwdLoads];
#pragma unroll
    for (int u = 0; u < kFwdLoads; ++u) {
      const int i = first + u * kThreads;
      if (i < cut.vectors) source.load(logit[u], cut, i);
    }
#pragma unroll
    for (int u = 0; u < kFwdLoads; ++u) {
      const int i = first + u * kThreads;
      if (i >= cut.vectors) break;
      float x[kSize];
      logit[u].unpack(x);
      const float top = seen.add(x);
      if constexpr (kAccuracy) {
        beaten |= cut.column_of_vector(i) + kSize <= target ? top >= mine : top > mine;
      }
    }
  }

  const float max = block_reduce<kThreads>(seen.max, Max{});
  const float sum = block_reduce<kThreads>(seen.sum * Exponential<T>(max)(seen.max), Sum{});
  const float total = block_reduce<kThreads>(seen.total, Sum{});
  if constexpr (kAccuracy) beaten = __syncthreads_or(beaten);
  const float lse = sum > 0.0f ? max + logf(sum) : NAN;
  if (threadIdx.x > 0) return lse;
  const float own_loss = lse - mine;
  const float all_losses = static_cast<float>(rows.classes) * lse - total;
  const float loss = rows.share > 0.0f ? rows.own * own_loss + rows.share * all_losses : own_loss;
  results.store_losses(is_pad ? 0.0f : loss, is_pad ? 0.0f : own_loss);
  if (results.lse != nullptr) results.lse[blockIdx.x] = lse;
  if constexpr (kAccuracy) {
    const bool has_nan = isnan(lse) && !isinf(mine);
    results.correct[blockIdx.x] = !is_pad && !beaten && !has_nan;
  }
  return lse;
}

// Overwrites a row of logits with its gradient.
template <int kThreads, int kLoads, typename T, typename Source>
__device__ __forceinline__ void backward(const Source& source, T* row, const Cut& cut,
                                         const Rows& rows, int target, float dloss, float lse) {
  const Exponential<T> exponential(lse);
  const auto gradient = [&](float x, int column) {
    const float p = exponential(x) - rows.share;
    return dloss * (column == target ? p - rows.own : p);
  };
  for (int first = threadIdx.x; first < cut.vectors; first += kThreads * kLoads) {
    Columns<T> logit[kLoads];
#pragma unroll
    for (int u = 0; u < kLoads; ++u) {
      const int i = first + u * kThreads;
      if (i < cut.vectors) source.load(logit[u], cut, i);
    }
#pragma unroll
    for (int u = 0; u < kLoads; ++u) {
      const int i = first + u * kThreads;
      if (i >= cut.vectors) break;
      const int column = cut.column_of_vector(i);
      float x[kSize];
      logit[u].unpack(x);
#pragma unroll
      for (int e = 0; e < kSize; ++e) x[e] = gradient(x[e], column + e);
      logit[u].pack(x);
      logit[u].store(row + column);
    }
  }
  if (static_cast<int>(threadIdx.x) < cut.scalars) {
    const int column = cut.column_of_scalar(threadIdx.x);
    row[column] = from_float<T>(gradient(to_float(row[column]), column));
  }
}

// Writes the zero gradient of a row whose target is the pad symbol. The row is not read, since it
// may contain any bits.
template <int kThreads, typename T>
__device__ __forceinline__ void clear(T* row, const Cut& cut) {
  const Columns<T> zeros = {};
  for (int i = threadIdx.x; i < cut.vectors; i += kThreads) {
    zeros.store(row + cut.column_of_vector(i));
  }
  if (static_cast<int>(threadIdx.x) < cut.scalars) {
    row[cut.column_of_scalar(threadIdx.x)] = from_float<T>(0.0f);
  }
}

template <typename T, bool kAccuracy>
__global__ void __launch_bounds__(kFwdThreads)
    cross_entropy_fwd_kernel(const T* __restrict__ logits, const Rows rows, const Results results) {
  const T* const row = logits + blockIdx.x * rows.stride;
  const Cut cut(row, rows.classes);
  forward<kFwdThreads, kAccuracy>(InMemory<T>{row}, row, cut, rows, rows.target.at(blockIdx.x),
                                  results);
}

template <typename T>
__global__ void __launch_bounds__(kBwdThreads)
    cross_entropy_bwd_kernel(T* __restrict__ logits, const Rows rows, const Floats dloss,
                             const Floats lse) {
  T* const row = logits + blockIdx.x * rows.stride;
  const Cut cut(row, rows.classes);
  const int64_t target = rows.target.at(blockIdx.x);
  if (target == rows.padding_idx) return clear<kBwdThreads>(row, cut);
  backward<kBwdThreads, kBwdLoads>(InMemory<T>{row}, row, cut, rows, static_cast<int>(target),
                                   dloss.at<float>(blockIdx.x), lse.at<float>(blockIdx.x));
}

// Two blocks are resident per SM: one computes while the other loads.
template <typename T, bool kAccuracy>
__global__ void __launch_bounds__(kBothThreads, 2)
    cross_entropy_fwd_bwd_kernel(T* logits, const Rows rows, const Floats dloss,
                                 const Results results) {
  griddepcontrol_wait();
  extern __shared__ __align__(16) unsigned char shared[];
  T* const vectors = reinterpret_cast<T*>(shared);
  T* const row = logits + blockIdx.x * rows.stride;
  const Cut cut(row, rows.classes);
  const int64_t target = rows.target.at(blockIdx.x);
  if (target == rows.padding_idx) {
    clear<kBothThreads>(row, cut);
    if (threadIdx.x == 0) {
      results.store_losses(0.0f, 0.0f);
      if constexpr (kAccuracy) results.correct[blockIdx.x] = false;
    }
    return;
  }
  // Each thread copies exactly the vectors that it reads itself, so no barrier is needed.
  for (int i = threadIdx.x; i < cut.vectors; i += kBothThreads) {
    constexpr int kPerCopy = Vec<T>::kSize;
#pragma unroll
    for (int part = 0; part < kSize; part += kPerCopy) {
      cp_async(vectors + i * kSize + part, row + cut.column_of_vector(i) + part);
    }
  }
  const float scale = dloss.at<float>(blockIdx.x);
  cp_async_wait_all();
  const OnChip<T> source{vectors};
  const float lse = forward<kBothThreads, kAccuracy>(source, row, cut, rows, target, results);
  backward<kBothThreads, kBothLoads>(source, row, cut, rows, static_cast<int>(target), scale, lse);
}

Rows rows_of(const char* op, const Tensor& logits, const Tensor& target, double smoothing,
             int64_t padding_idx) {
  const int64_t classes = logits.size(1);
  require(classes <= INT32_MAX, op, ": fewer than 2^31 classes are supported, got ", classes);
  const double share = smoothing > 0.0 ? smoothing / static_cast<double>(classes - 1) : 0.0;
  return {.stride = logits.stride(0),
          .classes = static_cast<int>(classes),
          .target = Indices(target),
          .padding_idx = padding_idx,
          .share = static_cast<float>(share),
          .own = static_cast<float>(1.0 - smoothing - share)};
}

// [T] each; `correct` is empty if accuracy is false.
struct Outputs {
  Tensor loss, nll, correct;

  Outputs(const Tensor& logits, bool accuracy)
      : loss(allocate(logits, {logits.size(0)}, ScalarType::Float)),
        nll(allocate(logits, {logits.size(0)}, ScalarType::Float)),
        correct(allocate(logits, {accuracy ? logits.size(0) : 0}, ScalarType::Bool)) {}

  Results results(float* lse) {
    return {.loss = loss.mutable_data_ptr<float>(),
            .nll = nll.mutable_data_ptr<float>(),
            .lse = lse,
            .correct = correct.mutable_data_ptr<bool>()};
  }
};

std::tuple<Tensor, Tensor, Tensor, Tensor> cross_entropy_fwd(const Tensor& logits,
                                                             const Tensor& target, double smoothing,
                                                             int64_t padding_idx, bool accuracy) {
  const char* const op = "cross_entropy_fwd";
  const int64_t count = logits.size(0);
  Outputs outputs(logits, accuracy);
  Tensor lse = allocate(logits, {count}, ScalarType::Float);
  const Rows rows = rows_of(op, logits, target, smoothing, padding_idx);
  const DeviceGuard guard(logits.get_device());
  dispatch_float(logits.scalar_type(), "cross_entropy_fwd: logits", [&](auto zero) {
    using T = decltype(zero);
    if (count == 0) return;
    const auto kernel =
        accuracy ? cross_entropy_fwd_kernel<T, true> : cross_entropy_fwd_kernel<T, false>;
    launch({.op = op, .grid = dim3(count), .block = kFwdThreads}, kernel, data_of<T>(logits), rows,
           outputs.results(lse.mutable_data_ptr<float>()));
  });
  return {outputs.loss, outputs.nll, lse, outputs.correct};
}

void cross_entropy_bwd(const Tensor& dloss, Tensor logits, const Tensor& target, const Tensor& lse,
                       double smoothing, int64_t padding_idx) {
  const char* const op = "cross_entropy_bwd";
  const Rows rows = rows_of(op, logits, target, smoothing, padding_idx);
  const DeviceGuard guard(logits.get_device());
  dispatch_float(logits.scalar_type(), "cross_entropy_bwd: logits", [&](auto zero) {
    using T = decltype(zero);
    if (logits.size(0) == 0) return;
    launch({.op = op, .grid = dim3(logits.size(0)), .block = kBwdThreads},
           cross_entropy_bwd_kernel<T>, output_of<T>(logits), rows, Floats(dloss), Floats(lse));
  });
}

// Whether the shared memory of an SM suffices for two rows of row_bytes.
template <typename Kernel>
bool has_room(Kernel kernel, size_t row_bytes, int32_t device) {
  const auto static_bytes = shared_memory_of_block(device) -
                            dynamic_shared_memory_of(reinterpret_cast<const void*>(kernel), device);
  const auto reserved = attribute_of(device, cudaDevAttrReservedSharedMemoryPerBlock);
  return 2 * (row_bytes + static_bytes + reserved) <=
         static_cast<size_t>(shared_memory_of_multiprocessor(device));
}

std::tuple<Tensor, Tensor, Tensor> cross_entropy_fwd_bwd(const Tensor& dloss, Tensor logits,
                                                         const Tensor& target, double smoothing,
                                                         int64_t padding_idx, bool accuracy) {
  const char* const op = "cross_entropy_fwd_bwd";
  const Rows rows = rows_of(op, logits, target, smoothing, padding_idx);
  const int32_t device = logits.get_device();
  const DeviceGuard guard(device);
  std::tuple<Tensor, Tensor, Tensor> results;
  dispatch_float(logits.scalar_type(), "cross_entropy_fwd_bwd: logits", [&](auto zero) {
    using T = decltype(zero);
    const size_t row_bytes = sizeof(T) * logits.size(1);
    const auto kernel =
        accuracy ? cross_entropy_fwd_bwd_kernel<T, true> : cross_entropy_fwd_bwd_kernel<T, false>;
    if (!has_room(kernel, row_bytes, device)) {
      auto [loss, nll, lse, correct] =
          cross_entropy_fwd(logits, target, smoothing, padding_idx, accuracy);
      cross_entropy_bwd(dloss, logits, target, lse, smoothing, padding_idx);
      results = {loss, nll, correct};
      return;
    }
    Outputs outputs(logits, accuracy);
    results = {outputs.loss, outputs.nll, outputs.correct};
    if (logits.size(0) == 0) return;
    launch({.op = op,
            .grid = dim3(logits.size(0)),
            .block = kBothThreads,
            .shared = row_bytes,
            .dependent = true},
           kernel, output_of<T>(logits), rows, Floats(dloss), outputs.results(nullptr));
  });
  return results;
}

STABLE_TORCH_LIBRARY_IMPL(lightseq, CUDA, m) {
  m.impl("cross_entropy_fwd", TORCH_BOX(&cross_entropy_fwd));
  m.impl("cross_entropy_bwd", TORCH_BOX(&cross_entropy_bwd));
  m.impl("cross_entropy_fwd_bwd", TORCH_BOX(&cross_entropy_fwd_bwd));
}

}  // namespace
}  // namespace lightseq
