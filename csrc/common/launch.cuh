// Kernel launches, with programmatic dependent launch.
//
// Programmatic dependent launch: on GPUs that support it (compute capability 9.0 and later), a
// kernel with Launch::dependent may start while the previous kernel in the stream still runs.
//
// Such a kernel calls griddepcontrol_wait() before it accesses memory (exceptions below), and
// griddepcontrol_launch_dependents() only after that. A block may end without either call, but at
// least one block must call griddepcontrol_wait(): otherwise the kernel could end before its
// predecessor, and the next kernel would wait only for this one. A kernel that is not dependent
// starts after its predecessor has ended, and may call griddepcontrol_launch_dependents() at any
// point.
//
// So when a kernel starts after a dependent one, all kernels before its predecessor have completed,
// and their results can be read if the reads bypass the L1 cache. The results of the predecessor
// cannot be read yet, even if its blocks have ended: their last stores may still be in flight.
// Before its wait, a kernel may therefore read memory that a known predecessor does not write: the
// weights. follows_dependent_launch() recognises predecessors that were launched here. Their
// results are rows of tokens and sums of gradients; do not use these as weights of the next kernel.
// A kernel may also read inputs that its op does not allow any predecessor to write, as
// decode_cross_attention does.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <optional>

#include "common/check.h"
#include "common/device.h"

namespace lightseq {

// The next kernel may start when all blocks have called this or have ended. Its blocks then occupy
// SMs while they wait. This costs nothing if all blocks of this kernel are resident.
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Waits until the previous kernel has ended and its results can be read. May be called repeatedly.
__device__ __forceinline__ void griddepcontrol_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// During capture: the single graph node on which the stream's next node will depend; null outside
// of capture, or if there are several.
struct LastNode {
  unsigned long long capture = 0;
  cudaGraphNode_t node = nullptr;

  explicit LastNode(cudaStream_t stream) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    const cudaGraphNode_t* nodes = nullptr;
    const cudaGraphEdgeData* edges = nullptr;
    size_t count = 0;
#if CUDART_VERSION >= 13000
    cudaStreamGetCaptureInfo(stream, &status, &capture, nullptr, &nodes, &edges, &count);
#else
    cudaStreamGetCaptureInfo_v3(stream, &status, &capture, nullptr, &nodes, &edges, &count);
#endif
    if (status == cudaStreamCaptureStatusActive && count == 1) node = nodes[0];
  }
  LastNode() = default;
};

// The node of this thread's last dependent launch.
inline LastNode& last_dependent_node() {
  static thread_local LastNode last;
  return last;
}

// Whether a kernel launched now directly follows a dependent kernel of ours. Always false outside
// of capture: launches of other code on the stream are not visible there.
inline bool follows_dependent_launch(cudaStream_t stream) {
  const LastNode now(stream), last = last_dependent_node();
  return now.node != nullptr && now.node == last.node && now.capture == last.capture;
}

struct Launch {
  const char* op;  // for messages
  dim3 grid, block;
  size_t shared = 0;  // bytes of dynamic shared memory, up to the GPU's maximum
  std::optional<cudaStream_t> stream = std::nullopt;  // none: torch's current stream
  bool dependent = false;                             // programmatic dependent launch, see above
  bool cooperative = false;  // blocks wait for each other, so all must be resident
};

// kernel<<<grid, block, shared, stream>>>(arguments...). Raises an error if the launch fails: no
// code for this GPU, too many resources. Errors inside a kernel appear later, as always in CUDA.
template <typename... Parameters, typename... Arguments>
void launch(const Launch& how, void (*kernel)(Parameters...), const Arguments&... arguments) {
  int device = 0;
  cudaGetDevice(&device);
  if (how.shared > 0) {
    const int room = dynamic_shared_memory_of(reinterpret_cast<const void*>(kernel), device);
    require(static_cast<int64_t>(how.shared) <= room, how.op, ": these sizes need ", how.shared,
            " bytes of shared memory per block; this GPU has ", room);
  }
  cudaLaunchAttribute attribute{};
  cudaLaunchConfig_t config{};
  config.gridDim = how.grid;
  config.blockDim = how.block;
  config.dynamicSmemBytes = how.shared;
  config.stream = how.stream ? *how.stream : current_stream(device);
  config.attrs = &attribute;
  if (how.cooperative) {
    attribute.id = cudaLaunchAttributeCooperative;
    attribute.val.cooperative = 1;
    config.numAttrs = 1;
  } else if (how.dependent && capability_of(device) >= 90) {
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    config.numAttrs = 1;
  }
  cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...);
  const cudaError_t error = cudaGetLastError();
  require(error == cudaSuccess, "lightseq: ", how.op, ": ", cudaGetErrorString(error));
  if (how.dependent) last_dependent_node() = LastNode(config.stream);
}

}  // namespace lightseq
