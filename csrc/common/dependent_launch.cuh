// Kernels that follow each other closely (programmatic dependent launch): a kernel launched by
// launch_early() may start while the one before it on the stream is still at work, on GPUs that
// can, from compute capability 9.0 on. What it does before wait_for_previous_kernel() must not
// touch memory, and at least one block has to pass there: otherwise it could be over before its
// predecessor is, and whoever waits for it would wait for too little.
#pragma once

#include <cuda_runtime.h>

#include "check.h"

namespace lightseq {

// Lets the next kernel start as soon as every block has called this or is over.
__device__ __forceinline__ void start_next_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Returns when the previous kernel is over and what it wrote can be read.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// kernel<<<grid, block, shared, stream>>>(arguments...) and its launch check. `what`: for messages.
template <typename... Parameters, typename... Arguments>
void launch_early(const char* what, void (*kernel)(Parameters...), dim3 grid, dim3 block,
                  size_t shared, cudaStream_t stream, const Arguments&... arguments) {
  int device = 0, major = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device);
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = major >= 9 ? 1 : 0;
  cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...);
  check_launch(what);
}

}  // namespace lightseq
