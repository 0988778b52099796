// How kernels are launched, and how they follow each other closely.
//
// Programmatic dependent launch: on GPUs that can, from compute capability 9.0 on, a kernel with
// Launch::dependent may start while the one before it on the stream is still at work.
//
// Such a kernel calls griddepcontrol_wait() before it touches memory, but for what is said below,
// and griddepcontrol_launch_dependents() only after that. Blocks may be over without either, but
// not all of them: whoever waits for the kernel would wait for too little. A kernel that is not
// dependent has waited when it starts, and calls griddepcontrol_launch_dependents() wherever it
// likes.
//
// So when a kernel starts behind a dependent one, everything before its predecessor is over, and
// can be read past the first cache. What the predecessor itself writes cannot, even if its blocks
// are over: their last numbers may still be on their way. Before it waits, a kernel may therefore
// read what a known predecessor does not write: weights. follows_dependent_launch() knows those
// launched here, whose results are rows of tokens and sums of gradients; nobody may take these for
// the weights of the kernel right behind. And it may read what its op forbids any predecessor to
// write, as decode_cross_attention does.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>

#include "check.h"
#include "device.h"

namespace lightseq {

// Lets the next kernel start as soon as every block has called this or is over. Blocks that wait
// occupy a multiprocessor: in a kernel whose own blocks are all running they take nothing from it.
__device__ __forceinline__ void griddepcontrol_launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Returns when the previous kernel is over and what it wrote can be read. May be called again.
__device__ __forceinline__ void griddepcontrol_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The one node of a graph under capture that the stream's next will depend on; null if there is
// none, or several.
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

// Of this thread's last dependent launch.
inline LastNode& last_dependent_node() {
  static thread_local LastNode last;
  return last;
}

// Whether a kernel launched now comes right behind a dependent one. Nobody can tell outside a
// graph: what others launch on the stream does not show.
inline bool follows_dependent_launch(cudaStream_t stream) {
  const LastNode now(stream), last = last_dependent_node();
  return now.node != nullptr && now.node == last.node && now.capture == last.capture;
}

struct Launch {
  const char* op;  // for messages
  dim3 grid, block;
  size_t shared = 0;  // bytes of dynamic shared memory: up to all that the GPU has
  cudaStream_t stream;
  bool dependent = false;    // on the kernel before, as said above
  bool cooperative = false;  // blocks wait for each other
};

// kernel<<<grid, block, shared, stream>>>(arguments...). Raises an error if the driver refuses: no
// code for this GPU, too many resources. Faults inside a kernel surface later, as they do
// everywhere in CUDA.
template <typename... Parameters, typename... Arguments>
void launch(const Launch& how, void (*kernel)(Parameters...), const Arguments&... arguments) {
  int device = 0;
  cudaGetDevice(&device);
  if (how.shared > 0) {
    const int room = dynamic_shared_memory_of(reinterpret_cast<const void*>(kernel), device);
    require(static_cast<int64_t>(how.shared) <= room, how.op, ": these sizes need ", how.shared,
            " bytes of shared memory and this GPU has ", room);
  }
  cudaLaunchAttribute attribute{};
  cudaLaunchConfig_t config{};
  config.gridDim = how.grid;
  config.blockDim = how.block;
  config.dynamicSmemBytes = how.shared;
  config.stream = how.stream;
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
  if (how.dependent) last_dependent_node() = LastNode(how.stream);
}

}  // namespace lightseq
