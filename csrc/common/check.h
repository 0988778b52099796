// What every launcher needs around its kernel: torch's current stream and a launch check.
#pragma once

#include <cuda_runtime.h>
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/headeronly/util/Exception.h>

#include <cstdint>

namespace lightseq {

// The stream on which torch runs `device`'s work at the moment.
//
// The function lives in libtorch_cuda, which does not exist in a CPU build of torch. A direct
// reference would keep this library from loading there, and a weak one crashes, so it is looked up
// once, in the copy that torch has already loaded.
inline cudaStream_t current_stream(int32_t device) {
  using GetStream = AOTITorchError (*)(int32_t, void**);
  static const GetStream get_stream = [] {
    void* torch_cuda = dlopen("libtorch_cuda.so", RTLD_NOLOAD | RTLD_LAZY);
    void* symbol =
        torch_cuda == nullptr ? nullptr : dlsym(torch_cuda, "aoti_torch_get_current_cuda_stream");
    STD_TORCH_CHECK(symbol != nullptr, "lightseq: this torch has no CUDA support");
    return reinterpret_cast<GetStream>(symbol);
  }();
  void* stream = nullptr;
  STD_TORCH_CHECK(get_stream(device, &stream) == AOTI_TORCH_SUCCESS,
                  "lightseq: torch has no current stream on cuda:", device);
  return static_cast<cudaStream_t>(stream);
}

// To be called right after <<<>>>: reports a launch that the driver refused (no code for this GPU,
// too many resources). Faults inside a kernel surface later, as they do everywhere in CUDA.
inline void check_launch(const char* kernel) {
  const cudaError_t error = cudaGetLastError();
  STD_TORCH_CHECK(error == cudaSuccess, "lightseq: ", kernel, ": ", cudaGetErrorString(error));
}

}  // namespace lightseq
