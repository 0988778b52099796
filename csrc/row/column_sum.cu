// The second step of a column sum: the partial sums of kernels become gradients of parameters.
// common/column_sum.cuh explains the first step.
//
//   gradient [C] (+)= sum over blocks of partials [blocks, C]      each rounded once
//
//   bytes moved   partials once
//   determinism   the order of a sum depends only on the number of its blocks. A sum has the same
//                 bits alone or together with other sums, at once or deferred
//
// A backward pass has some sixty column sums, and each one's launch takes as long as its work. So
// between defer_column_sums(flat) and flush_column_sums(flat), the sums whose gradients lie in
// `flat` are collected and share launches. Their partials are kept until the launch. The collected
// sums are launched before the flush if their partials become larger than L2 is likely to hold, if
// they fill a launch, or if a gradient would be written twice. If a gradient of a kernel is not
// entirely in `flat`, all sums of this kernel are computed at once; if they write to the gradient
// of a collected sum, the collected sums are launched first.

#include <algorithm>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <vector>

#include "common/check.h"
#include "common/column_sum.cuh"
#include "common/launch.cuh"
#include "common/reduce.cuh"
#include "common/vec.cuh"

namespace lightseq {
namespace {

// Warps per block: so few that a block can become resident while the previous kernel still runs.
constexpr int kSumWarps = 8;
// Rows of partials that a warp has in flight; with up to 136 blocks of partials, all of them.
constexpr int kSumLoads = 17;
constexpr int kMostTogether = 72;        // sums per launch; kernel arguments are limited to 4 KB
constexpr int64_t kMostHeld = 16 << 20;  // bytes of partials kept for a launch

struct ColumnSum {
  const float* partials;
  Gradient gradient;
  int pitch;  // numbers from one block's partials to the next block's
  int blocks, columns;
  int first_strip;  // all sums of a launch are divided into strips of 32 columns
  bool accumulate;
};

struct ColumnSums {
  ColumnSum of[kMostTogether];
  int count;
};
static_assert(sizeof(ColumnSums) <= 4096, "kernel arguments are limited to 4 KB");

template <typename T>
__device__ __forceinline__ void store_gradient(void* data, int64_t i, float x, bool accumulate) {
  T* const target = static_cast<T*>(data) + i;
  if constexpr (sizeof(T) == 8) {
    *target = accumulate ? *target + x : x;
  } else {
    *target = from_float<T>(accumulate ? to_float(*target) + x : x);
  }
}

__device__ __forceinline__ float number_at(const void* data, ScalarType type, int64_t i) {
  switch (type) {
    case ScalarType::Double:
      return static_cast<float>(static_cast<const double*>(data)[i]);
    case ScalarType::Half:
      return to_float(static_cast<const __half*>(data)[i]);
    case ScalarType::BFloat16:
      return to_float(static_cast<const __nv_bfloat16*>(data)[i]);
    default:
      return static_cast<const float*>(data)[i];
  }
}

// A block computes the sums of one strip; the rows of partials are divided among its warps.
__global__ void __launch_bounds__(kWarp* kSumWarps)
    column_sum_kernel(const __grid_constant__ ColumnSums sums) {
  const int strip = static_cast<int>(blockIdx.x);
  int mine = 0;
  for (int end = sums.count; end - mine > 1;) {
    const int middle = (mine + end) / 2;
    (sums.of[middle].first_strip <= strip ? mine : end) = middle;
  }
  const ColumnSum& p = sums.of[mine];
  const int column = (strip - p.first_strip) * kWarp + static_cast<int>(threadIdx.x);
  griddepcontrol_wait();
  float sum = 0.0f;
  if (column < p.columns) {
    const float* const partials = p.partials + column;
    for (int first = threadIdx.y; first < p.blocks; first += kSumLoads * kSumWarps) {
      const float* at = partials + static_cast<int64_t>(first) * p.pitch;
      float parts[kSumLoads];
#pragma unroll
      for (int u = 0; u < kSumLoads; ++u, at += kSumWarps * static_cast<int64_t>(p.pitch)) {
        parts[u] = first + u * kSumWarps < p.blocks ? *at : 0.0f;
      }
#pragma unroll
      for (int u = 0; u < kSumLoads; ++u) sum += parts[u];
    }
  }
  __shared__ float of_warp[kSumWarps][kWarp];
  of_warp[threadIdx.y][threadIdx.x] = sum;
  __syncthreads();
  if (threadIdx.y != 0 || column >= p.columns) return;
#pragma unroll
  for (int warp = 1; warp < kSumWarps; ++warp) sum += of_warp[warp][threadIdx.x];
  if (p.gradient.parameter != nullptr) {
    const float value = number_at(p.gradient.parameter, p.gradient.parameter_type, column);
    if (isnan(value)) sum = value;
  }
  switch (p.gradient.type) {
    case ScalarType::Double:
      return store_gradient<double>(p.gradient.data, column, sum, p.accumulate);
    case ScalarType::Half:
      return store_gradient<__half>(p.gradient.data, column, sum, p.accumulate);
    case ScalarType::BFloat16:
      return store_gradient<__nv_bfloat16>(p.gradient.data, column, sum, p.accumulate);
    default:
      return store_gradient<float>(p.gradient.data, column, sum, p.accumulate);
  }
}

int64_t bytes_of(const Gradient& gradient, int64_t columns) {
  switch (gradient.type) {
    case ScalarType::Double:
      return 8 * columns;
    case ScalarType::Float:
      return 4 * columns;
    default:
      return 2 * columns;
  }
}

// The sums of one launch, and references to their partials, which keep these allocated.
class SumLaunch {
 public:
  bool is_full() const { return sums_.count > kMostTogether - kMaxSums || bytes_ > kMostHeld; }

  void add(const Tensor& partials, const Gradients& gradients, bool accumulate) {
    const int blocks = static_cast<int>(partials.size(0)),
              kinds = static_cast<int>(partials.size(1));
    const int columns = static_cast<int>(partials.size(2));
    const auto* const data = partials.const_data_ptr<float>();
    for (int kind = 0; kind < kinds; ++kind) {
      const Gradient& gradient = gradients.of[kind];
      if (gradient.data == nullptr) continue;
      sums_.of[sums_.count++] = {.partials = data + static_cast<int64_t>(kind) * columns,
                                 .gradient = gradient,
                                 .pitch = kinds * columns,
                                 .blocks = blocks,
                                 .columns = columns,
                                 .first_strip = strips_,
                                 .accumulate = accumulate};
      strips_ += static_cast<int>(blocks_for(columns, kWarp));
    }
    held_.push_back(partials);
    bytes_ += partials.numel() * static_cast<int64_t>(sizeof(float));
  }

  // Whether one of the sums writes between these addresses.
  bool overlap(const char* begin, const char* end) const {
    return std::any_of(sums_.of, sums_.of + sums_.count, [&](const ColumnSum& sum) {
      const auto* const at = static_cast<const char*>(sum.gradient.data);
      return at < end && begin < at + bytes_of(sum.gradient, sum.columns);
    });
  }

  void launch(cudaStream_t stream) {
    if (strips_ > 0) {
      // The kernel waits for its predecessor before it reads the partials.
      lightseq::launch({.op = "column_sum",
                        .grid = dim3(strips_),
                        .block = dim3(kWarp, kSumWarps),
                        .stream = stream,
                        .dependent = true},
                       column_sum_kernel, sums_);
    }
    *this = {};
  }

 private:
  ColumnSums sums_{};
  std::vector<Tensor> held_;
  int64_t bytes_ = 0;
  int strips_ = 0;
};

// The sums collected on a device. Locked, because autograd adds sums in a thread of its own, and
// another thread calls begin() and end().
class DeferredSums {
 public:
  static DeferredSums& of(int32_t device) {
    static std::mutex mutex;
    // Never destroyed: if a process ends within a step, it could not free GPU memory any more.
    static auto& all = *new std::map<int32_t, DeferredSums>;
    const std::lock_guard<std::mutex> lock(mutex);
    return all[device];
  }

  void begin(const Tensor& flat, cudaStream_t stream) {
    const std::lock_guard<std::mutex> lock(mutex_);
    sums_.launch(stream_);  // sums deferred by an earlier begin() without an end()
    flat_ = flat;
    stream_ = stream;
  }

  void end(bool wanted) {
    const std::lock_guard<std::mutex> lock(mutex_);
    flat_.reset();
    if (wanted) {
      sums_.launch(stream_);
    } else {
      sums_ = {};
    }
  }

  // Returns false if the caller must compute these sums at once.
  bool take(const Tensor& partials, const Gradients& gradients, bool accumulate,
            cudaStream_t stream) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (!flat_.has_value() || stream != stream_) return false;
    const auto* const begin = data_of<char>(flat_);
    const char* const end = begin + flat_->numel() * static_cast<int64_t>(flat_->element_size());
    bool again = false;
    bool is_inside = true;
    for (const Gradient& gradient : gradients.of) {
      const auto* const at = static_cast<const char*>(gradient.data);
      if (at == nullptr) continue;
      is_inside = is_inside && at >= begin && at + bytes_of(gradient, partials.size(2)) <= end;
      again = again || sums_.overlap(at, at + bytes_of(gradient, partials.size(2)));
    }
    if (again) sums_.launch(stream);
    if (!is_inside) return false;
    sums_.add(partials, gradients, accumulate);
    if (sums_.is_full()) sums_.launch(stream);
    return true;
  }

 private:
  std::mutex mutex_;
  std::optional<Tensor> flat_;  // a reference, so that its memory is not reused meanwhile
  cudaStream_t stream_ = nullptr;
  SumLaunch sums_;
};

void defer_column_sums(Tensor flat) {
  require(flat.is_contiguous(), "defer_column_sums: flat must be contiguous");
  const int32_t device = flat.get_device();
  const DeviceGuard guard(device);
  DeferredSums::of(device).begin(flat, current_stream(device));
}

void flush_column_sums(Tensor flat, bool wanted) {
  const DeviceGuard guard(flat.get_device());
  DeferredSums::of(flat.get_device()).end(wanted);
}

STABLE_TORCH_LIBRARY_IMPL(lightseq, CUDA, m) {
  m.impl("defer_column_sums", TORCH_BOX(&defer_column_sums));
  m.impl("flush_column_sums", TORCH_BOX(&flush_column_sums));
}

}  // namespace

void add_partials(const Tensor& partials, const Gradients& gradients, bool accumulate) {
  const cudaStream_t stream = current_stream(partials.get_device());
  if (DeferredSums::of(partials.get_device()).take(partials, gradients, accumulate, stream)) return;
  SumLaunch alone;
  alone.add(partials, gradients, accumulate);
  alone.launch(stream);
}

}  // namespace lightseq
