// How kernels are launched that have dynamic shared memory, or launch attributes.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>

#include "check.h"
#include "device.h"

namespace lightseq {

// cudaLaunchKernelEx with the shared memory that a block needs, and its launch check. `what` is
// for messages; `attribute` may be null.
template <typename... Parameters, typename... Arguments>
void launch_with(cudaLaunchAttribute* attribute, const char* what, void (*kernel)(Parameters...),
                 dim3 grid, dim3 block, size_t shared, cudaStream_t stream,
                 const Arguments&... arguments) {
  if (shared > 0) {
    int device = 0;
    cudaGetDevice(&device);
    const int room = dynamic_shared_memory_of(reinterpret_cast<const void*>(kernel), device);
    require(static_cast<int64_t>(shared) <= room, what, ": these sizes need ", shared,
            " bytes of shared memory and this GPU has ", room);
  }
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  config.attrs = attribute;
  config.numAttrs = attribute == nullptr ? 0 : 1;
  cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...);
  check_launch(what);
}

// kernel<<<grid, block, shared, stream>>>(arguments...) for any `shared` that the GPU has.
template <typename... Parameters, typename... Arguments>
void launch(const char* what, void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared,
            cudaStream_t stream, const Arguments&... arguments) {
  launch_with(nullptr, what, kernel, grid, block, shared, stream, arguments...);
}

}  // namespace lightseq
