// Common code of all launchers: torch's stable interface, layout checks, allocation, and torch's
// current stream. Shapes and dtypes that the Python functions have checked are not checked again.
#pragma once

#include <cuda_runtime.h>
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <mutex>
#include <optional>
#include <sstream>
#include <stdexcept>

namespace lightseq {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using torch::stable::accelerator::DeviceGuard;

// Raises RuntimeError in Python if !holds. The message consists of the parts only; torch's own
// macro would put the name of this file in front.
template <typename... Parts>
void require(bool holds, const Parts&... parts) {
  if (holds) return;
  std::ostringstream message;
  (message << ... << parts);
  throw std::runtime_error(message.str());
}

// While it exists, torch does not log errors at its C interface. The caller reports them in one
// sentence; torch before 2.13 would log its C++ stack trace.
class NoTorchLog {
 public:
  NoTorchLog() { enter_or_leave(1); }
  ~NoTorchLog() { enter_or_leave(-1); }
  NoTorchLog(const NoTorchLog&) = delete;
  NoTorchLog& operator=(const NoTorchLog&) = delete;

 private:
  // Several threads may be inside: the last one to leave restores the level that the first found.
  static void enter_or_leave(int by) {
    constexpr int kFatal = 3;
    static int* const level = static_cast<int*>(dlsym(RTLD_DEFAULT, "FLAGS_caffe2_log_level"));
    static std::mutex mutex;
    static int inside = 0, before = 0;
    if (level == nullptr) return;
    const std::lock_guard<std::mutex> lock(mutex);
    if (inside == 0) before = *level;
    inside += by;
    *level = inside > 0 ? kFatal : before;
  }
};

// The sticky error of an earlier kernel, after which this process cannot use the GPU any more;
// cudaSuccess if there is none. The CUDA runtime linked in here does not know errors reported to
// torch's runtime, so query the driver, in a way that is allowed during capture.
inline cudaError_t lasting_error(int32_t device) {
  int before = 0;
  size_t free = 0, total = 0;
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  cudaThreadExchangeStreamCaptureMode(&mode);
  cudaGetDevice(&before);
  cudaSetDevice(device);
  const cudaError_t error = cudaMemGetInfo(&free, &total);
  cudaSetDevice(before);
  cudaThreadExchangeStreamCaptureMode(&mode);
  return error == cudaErrorMemoryAllocation ? cudaSuccess : error;
}

// A new tensor on `like`'s device, from torch's allocator; its dtype is `like`'s if not given.
//
// torch's C interface does not say why the allocator failed, so determine the reason here. fairseq
// skips the batch if the message contains "out of memory".
inline Tensor allocate(const Tensor& like, torch::headeronly::IntHeaderOnlyArrayRef sizes,
                       std::optional<ScalarType> type = std::nullopt) {
  double elements = 1.0;
  for (const int64_t size : sizes) {
    require(size >= 0, "lightseq: a tensor cannot have a dimension of ", size);
    elements *= static_cast<double>(size);
  }
  require(elements < 0x1p59, "lightseq: a tensor cannot have ", elements, " elements");
  try {
    const NoTorchLog quiet;
    return torch::stable::new_empty(like, sizes, type);
  } catch (const std::exception&) {
    const cudaError_t error = lasting_error(like.get_device());
    require(error == cudaSuccess,
            "lightseq: cannot allocate GPU memory: ", cudaGetErrorString(error));
    require(false, "CUDA out of memory: lightseq cannot allocate ", elements, " more elements");
    throw;
  }
}

// torch's current stream on `device`.
//
// The function is in libtorch_cuda, which a CPU build of torch does not have. With a direct
// reference, this library would not load there; with a weak reference, the call would crash. So the
// function is looked up once, in the copy that torch has loaded.
inline cudaStream_t current_stream(int32_t device) {
  using GetStream = AOTITorchError (*)(int32_t, void**);
  static const GetStream get_stream = [] {
    void* torch_cuda = dlopen("libtorch_cuda.so", RTLD_NOLOAD | RTLD_LAZY);
    void* symbol =
        torch_cuda == nullptr ? nullptr : dlsym(torch_cuda, "aoti_torch_get_current_cuda_stream");
    require(symbol != nullptr, "lightseq: this torch has no CUDA support; install a CUDA build");
    return reinterpret_cast<GetStream>(symbol);
  }();
  void* stream = nullptr;
  require(get_stream(device, &stream) == AOTI_TORCH_SUCCESS,
          "lightseq: torch has no current stream on cuda:", device);
  return static_cast<cudaStream_t>(stream);
}

// Kernels read rows 16 bytes at a time and generate dropout bits for 8 columns at a time. So the
// last dimension of x must be contiguous and a multiple of 8, and each row must start on a 16-byte
// boundary.
inline void check_rows(const char* op, const char* name, const Tensor& x) {
  if (x.numel() == 0) return;
  const int64_t last = x.dim() - 1;
  require(x.size(last) % 8 == 0, op, ": ", name, " has rows of ", x.size(last),
          " elements; on a GPU the number must be a multiple of 8");
  const int64_t size = static_cast<int64_t>(x.element_size());
  bool aligned = x.stride(last) == 1 && reinterpret_cast<uintptr_t>(x.data_ptr()) % 16 == 0;
  for (int64_t i = 0; i < last; ++i) {
    aligned = aligned && (x.size(i) == 1 || x.stride(i) * size % 16 == 0);
  }
  require(aligned, op, ": ", name,
          " must be contiguous in its last dimension, with rows on 16-byte boundaries");
}

inline void check_aligned(const char* op, const char* name, const Tensor& x, int64_t bytes) {
  require(reinterpret_cast<uintptr_t>(x.data_ptr()) % bytes == 0, op, ": ", name,
          " must be aligned to ", bytes, " bytes");
}

// Optional tensors of an op: pointers, strides and checks, with a substitute if there is none.

template <typename T>
const T* data_of(const std::optional<Tensor>& tensor) {
  return tensor.has_value() ? static_cast<const T*>(tensor->const_data_ptr()) : nullptr;
}

// Pointer to an output; null if the output is empty, which means that it does not exist.
template <typename T>
T* output_of(const Tensor& tensor) {
  return tensor.numel() > 0 ? static_cast<T*>(tensor.mutable_data_ptr()) : nullptr;
}

// Row stride in elements; 0 if the tensor is missing.
inline int64_t stride_of(const std::optional<Tensor>& tensor) {
  return tensor.has_value() ? tensor->stride(0) : 0;
}

inline void check_optional_rows(const char* op, const char* name,
                                const std::optional<Tensor>& tensor) {
  if (tensor.has_value()) check_rows(op, name, *tensor);
}

// Number of blocks, if there are `work` units of work and each block does `per_block` of them.
inline int64_t blocks_for(int64_t work, int64_t per_block) {
  return (work + per_block - 1) / per_block;
}

}  // namespace lightseq
