// Kernels that follow each other closely (programmatic dependent launch): a kernel launched by
// launch_early() may start while the one before it on the stream is still at work, on GPUs that
// can, from compute capability 9.0 on.
//
// Such a kernel calls wait_for_previous_kernel() before it touches memory, but for what is said
// below, and start_next_kernel() only after that. Blocks may be over without either, but not all of
// them: whoever waits for the kernel would wait for too little. A kernel launched with <<<>>> has
// waited when it starts, and calls start_next_kernel() wherever it likes.
//
// So when a kernel starts behind one of these, everything before its predecessor is over, and can
// be read past the first cache. What the predecessor itself writes cannot, even if its blocks are
// over: their last numbers may still be on their way. Before it waits, a kernel may therefore read
// what a known predecessor does not write: weights. follows_early_kernel() knows those launched
// here, whose results are rows of tokens and sums of gradients; nobody may take these for the
// weights of the kernel right behind. And it may read what its op forbids any predecessor to write,
// as decode_cross_attention does.
#pragma once

#include <cuda_runtime.h>

#include "device.h"
#include "launch.h"

namespace lightseq {

// Lets the next kernel start as soon as every block has called this or is over. Blocks that wait
// occupy a multiprocessor: in a kernel whose own blocks are all running they take nothing from it.
__device__ __forceinline__ void start_next_kernel() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// Returns when the previous kernel is over and what it wrote can be read. May be called again.
__device__ __forceinline__ void wait_for_previous_kernel() {
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

// Of this thread's last call of launch_early().
inline LastNode& last_early_node() {
  static thread_local LastNode last;
  return last;
}

// Whether a kernel launched now comes right behind one of launch_early()'s. Nobody can tell outside
// a graph: what others launch on the stream does not show.
inline bool follows_early_kernel(cudaStream_t stream) {
  const LastNode now(stream), early = last_early_node();
  return now.node != nullptr && now.node == early.node && now.capture == early.capture;
}

// kernel<<<grid, block, shared, stream>>>(arguments...) and its launch check. `what`: for messages.
template <typename... Parameters, typename... Arguments>
void launch_early(const char* what, void (*kernel)(Parameters...), dim3 grid, dim3 block,
                  size_t shared, cudaStream_t stream, const Arguments&... arguments) {
  int device = 0;
  cudaGetDevice(&device);
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  launch_with(capability_of(device) >= 90 ? &early : nullptr, what, kernel, grid, block, shared,
              stream, arguments...);
  last_early_node() = LastNode(stream);
}

}  // namespace lightseq
