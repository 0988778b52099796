// One matrix product, by the fastest of the algorithms that cuBLASLt proposes and of our own
// kernels (few_rows.cu, tiles.cu).
//
// few_rows.cu is the fastest for products of few rows. When another product occurs for the first
// time, the algorithms are timed in turns, and the fastest is stored: in memory, and in a file for
// other processes (algorithm_table.h). If several processes search the same product, all use the
// algorithm that the file has first. The fastest algorithm depends on the number of tokens: at 3456
// tokens, the best algorithm for 3333 tokens took up to 1.7 times as long as the best for 3456. So
// each number of tokens has its own entry.
//
// Only multiples of 64 tokens are timed, and below 64 tokens powers of two, as in decode steps.
// Shapes that repeat have such numbers, because rows are rounded up to buckets; other numbers may
// never occur again. For other numbers, and for products that first occur during the capture of a
// graph, cuBLASLt's first proposal is used.
//
// LIGHTSEQ_LINEAR_SEARCH=0 always uses cuBLASLt's first proposal: to measure what the search gains,
// and for runs whose bits must not depend on timings.

#include <cuda_runtime.h>

#include <algorithm>
#include <cctype>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <sstream>
#include <string>
#include <vector>

#include "common/check.h"
#include "common/device.h"
#include "linear/algorithm_table.h"
#include "linear/cublaslt.h"
#include "linear/forward.cuh"
#include "linear/matmul.h"

namespace lightseq {
namespace {

constexpr int64_t kWorkspace = 32 << 20;  // bytes; what NVIDIA recommends for Hopper
constexpr int kProposals = 8;
constexpr int64_t kSearchedTokens = 64;  // multiples of it are searched
constexpr int64_t kFewTokens = 64;       // below it, powers of two are searched
constexpr int kRounds = 3;
constexpr float kMilliseconds = 0.1f;  // of work in one measurement; kMostRuns may limit it
constexpr int kMostRuns = 8;           // runs of an algorithm in one measurement
// After one run each, an algorithm is dropped if it took longer than kHopeless times the fastest
// plus kLaunch, the milliseconds that the host may need for a launch.
constexpr float kHopeless = 1.2f;
constexpr float kLaunch = 0.01f;
// To replace an earlier algorithm, a later one must take less than this fraction of its time.
constexpr float kFaster = 0.99f;

cudaDataType_t cuda_type_of(const Matrix& x) {
  if (x.type == ScalarType::Float) return CUDA_R_32F;
  if (x.type == ScalarType::Float8_e4m3fn) return CUDA_R_8F_E4M3;
  return x.type == ScalarType::Half ? CUDA_R_16F : CUDA_R_16BF;
}

cublasLtEpilogue_t epilogue_of(const Product& p) {
  if (p.bias == nullptr) return CUBLASLT_EPILOGUE_DEFAULT;
  return p.activation == Activation::kRelu ? CUBLASLT_EPILOGUE_RELU_BIAS : CUBLASLT_EPILOGUE_BIAS;
}

// Descriptors of a product for cuBLASLt, whose A is our b and whose B is our a. cuBLASLt's matrices
// are column-major, so it sees the transpose of each of our matrices, and out = op(a) op(b) becomes
// out^T = op(b)^T op(a)^T.
struct MatmulDesc {
  cublasLtMatmulDescOpaque_t matmul;
  cublasLtMatrixLayoutOpaque_t a, b, out;

  explicit MatmulDesc(const Product& p) {
    const CublasLt& lt = cublaslt();
    lt.check(lt.init_desc(&matmul, sizeof(matmul), CUBLAS_COMPUTE_32F, CUDA_R_32F), p.op);
    const auto set = [&](cublasLtMatmulDescAttributes_t attribute, auto value) {
      lt.check(lt.set_desc(&matmul, attribute, &value, sizeof(value)), p.op);
    };
    set(CUBLASLT_MATMUL_DESC_TRANSA, p.transpose_b ? CUBLAS_OP_T : CUBLAS_OP_N);
    set(CUBLASLT_MATMUL_DESC_TRANSB, p.transpose_a ? CUBLAS_OP_T : CUBLAS_OP_N);
    set(CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue_of(p));
    if (p.bias != nullptr) set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, p.bias);
    if (p.a_scale != nullptr) {
      set(CUBLASLT_MATMUL_DESC_A_SCALE_POINTER, p.b_scale);
      set(CUBLASLT_MATMUL_DESC_B_SCALE_POINTER, p.a_scale);
      set(CUBLASLT_MATMUL_DESC_FAST_ACCUM, int8_t{0});
    }
    const auto describe = [&](cublasLtMatrixLayoutOpaque_t& layout, const Matrix& x) {
      lt.check(
          lt.init_layout(&layout, sizeof(layout), cuda_type_of(x), x.columns, x.rows, x.stride),
          p.op);
    };
    describe(a, p.b);
    describe(b, p.a);
    describe(out, p.out);
  }
};

// At most `wanted` of cuBLASLt's proposals, in its order.
std::vector<Algorithm> propose(cublasLtHandle_t handle, const Product& p, int wanted) {
  const CublasLt& lt = cublaslt();
  cublasLtMatmulPreferenceOpaque_t preference;
  lt.check(lt.init_preference(&preference, sizeof(preference)), p.op);
  const auto set = [&](cublasLtMatmulPreferenceAttributes_t attribute, auto value) {
    lt.check(lt.set_preference(&preference, attribute, &value, sizeof(value)), p.op);
  };
  set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, static_cast<uint64_t>(kWorkspace));
  // Allow only algorithms without a split-K reduction, or with one in float32 scratch memory: an
  // in-place reduction may differ from run to run.
  set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK,
      static_cast<uint32_t>(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
  for (const auto alignment :
       {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES}) {
    set(alignment, static_cast<uint32_t>(kRowAlignment));
  }
  MatmulDesc d(p);
  cublasLtMatmulHeuristicResult_t results[kProposals] = {};
  int found = 0;
  lt.check(lt.get_heuristic(handle, &d.matmul, &d.a, &d.b, &d.out, &d.out, &preference, wanted,
                            results, &found),
           p.op);
  require(found > 0, p.op, ": cuBLASLt has no algorithm for this product");
  std::vector<Algorithm> algorithms;
  for (int i = 0; i < found; ++i) {
    algorithms.push_back(
        {.algo = results[i].algo, .needs_workspace = results[i].workspaceSize > 0});
  }
  return algorithms;
}

cublasStatus_t run(cublasLtHandle_t handle, const Product& p, MatmulDesc& d,
                   const Algorithm& algorithm, cudaStream_t stream) {
  if (algorithm.tile > 0) {
    return multiply_by_tiles(p, algorithm.tile, stream) ? CUBLAS_STATUS_SUCCESS
                                                        : CUBLAS_STATUS_NOT_SUPPORTED;
  }
  const float one = 1.0f;
  const float beta = p.accumulate ? 1.0f : 0.0f;
  std::optional<Tensor> workspace;
  if (algorithm.needs_workspace) {
    workspace = allocate(p.out.owner, {kWorkspace}, ScalarType::Byte);
  }
  return cublaslt().matmul(handle, &d.matmul, &one, p.b.data, &d.a, p.a.data, &d.b, &beta,
                           p.out.data, &d.out, p.out.data, &d.out, &algorithm.algo,
                           workspace ? workspace->mutable_data_ptr() : nullptr,
                           workspace ? kWorkspace : 0, stream);
}

// Several runs of one algorithm, one after the other, as a CUDA graph. Without a graph, launches of
// small products would take the host longer than the GPU. Extra operations of an algorithm, such as
// zeroing a counter, take as long in this graph as in the captured step.
class Runs {
 public:
  template <typename Run>
  Runs(int count, Run&& run) {
    cudaStream_t stream = nullptr;
    cudaGraph_t graph = nullptr;
    std::exception_ptr failure;  // for example out of memory
    bool good = cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking) == cudaSuccess;
    good = good && cudaStreamBeginCapture(stream, cudaStreamCaptureModeRelaxed) == cudaSuccess;
    if (good) {
      try {
        for (int i = 0; i < count; ++i) good = run(stream) == CUBLAS_STATUS_SUCCESS && good;
      } catch (...) {
        failure = std::current_exception();
      }
      good = cudaStreamEndCapture(stream, &graph) == cudaSuccess && good && !failure;
    }
    if (good) cudaGraphInstantiate(&graph_, graph, 0);
    if (graph != nullptr) cudaGraphDestroy(graph);
    if (stream != nullptr) cudaStreamDestroy(stream);
    cudaGetLastError();  // clears the error of a failed capture; launch() then returns false
    if (failure) std::rethrow_exception(failure);
  }
  ~Runs() {
    if (graph_ != nullptr) cudaGraphExecDestroy(graph_);
  }
  Runs(const Runs&) = delete;
  Runs& operator=(const Runs&) = delete;

  bool launch(cudaStream_t stream) const {
    return graph_ != nullptr && cudaGraphLaunch(graph_, stream) == cudaSuccess;
  }

 private:
  cudaGraphExec_t graph_ = nullptr;
};

// Measures how long each of several pieces of work on a stream takes, in milliseconds. The host
// waits only once, for the last one.
class Stopwatch {
 public:
  explicit Stopwatch(size_t most) : events_(most + 1) {
    for (cudaEvent_t& event : events_) cudaEventCreate(&event);
  }
  ~Stopwatch() {
    for (cudaEvent_t event : events_) cudaEventDestroy(event);
  }
  Stopwatch(const Stopwatch&) = delete;
  Stopwatch& operator=(const Stopwatch&) = delete;

  // work(i) starts piece i; if it returns false, its time is infinite.
  template <typename Work>
  std::vector<float> milliseconds(size_t count, cudaStream_t stream, Work&& work) {
    std::vector<float> times(count, std::numeric_limits<float>::infinity());
    std::vector<bool> done(count);
    cudaEventRecord(events_[0], stream);
    for (size_t i = 0; i < count; ++i) {
      done[i] = work(i);
      cudaEventRecord(events_[i + 1], stream);
    }
    cudaEventSynchronize(events_[count]);
    for (size_t i = 0; i < count; ++i) {
      if (done[i]) cudaEventElapsedTime(&times[i], events_[i], events_[i + 1]);
    }
    return times;
  }

 private:
  std::vector<cudaEvent_t> events_;
};

// Searches for the fastest algorithm: all run in turns, several rounds, and the minimum time of
// each counts. The product is computed many times, so a product that accumulates writes to scratch
// memory.
Algorithm search(cublasLtHandle_t handle, Product p, cudaStream_t stream) {
  std::vector<Algorithm> algorithms;
  const auto add_proposals = [&](const Product& product) {
    for (const Algorithm& algorithm : propose(handle, product, kProposals)) {
      const bool is_new = std::none_of(algorithms.begin(), algorithms.end(), [&](const auto& a) {
        return std::memcmp(&a.algo, &algorithm.algo, sizeof(algorithm.algo)) == 0;
      });
      if (is_new) algorithms.push_back(algorithm);
    }
  };
  add_proposals(p);
  if (epilogue_of(p) != CUBLASLT_EPILOGUE_DEFAULT) {
    // Many algorithms proposed for the product without epilogue also support the epilogue. One of
    // them may be the fastest, although cuBLASLt does not propose it for the epilogue.
    Product plain = p;
    plain.bias = nullptr;
    plain.activation = Activation::kIdentity;
    add_proposals(plain);
  }
  if (p.a.rows <= kMostTiledRows && p.is_forward_in_16_bits()) {
    for (int tile = 1; tile <= kTiles; ++tile)
      algorithms.push_back({.algo = {}, .needs_workspace = false, .tile = tile});
  }
  if (p.accumulate) {
    p.out.owner = allocate(p.out.owner, {p.out.rows, p.out.stride}, p.out.type);
    p.out.data = p.out.owner.mutable_data_ptr();
  }

  MatmulDesc desc(p);
  Stopwatch stopwatch(algorithms.size());
  const auto run_once = [&](size_t i) {
    return run(handle, p, desc, algorithms[i], stream) == CUBLAS_STATUS_SUCCESS;
  };
  stopwatch.milliseconds(algorithms.size(), stream, run_once);  // loads the kernels
  std::vector<float> times = stopwatch.milliseconds(algorithms.size(), stream, run_once);
  const float fastest = *std::min_element(times.begin(), times.end());
  // Drop the algorithms that are clearly slower.
  std::vector<Algorithm> contenders;
  for (size_t i = 0; i < algorithms.size(); ++i) {
    if (times[i] <= kHopeless * fastest + kLaunch) contenders.push_back(algorithms[i]);
  }
  const int count =
      std::clamp(static_cast<int>(kMilliseconds / std::max(fastest, 1e-3f)), 1, kMostRuns);
  std::vector<std::unique_ptr<Runs>> runs;
  for (const Algorithm& algorithm : contenders) {
    runs.push_back(std::make_unique<Runs>(
        count, [&](cudaStream_t captured) { return run(handle, p, desc, algorithm, captured); }));
  }
  std::vector<float> least(contenders.size(), std::numeric_limits<float>::infinity());
  for (int round = 0; round < kRounds; ++round) {
    times = stopwatch.milliseconds(runs.size(), stream,
                                   [&](size_t i) { return runs[i]->launch(stream); });
    for (size_t i = 0; i < least.size(); ++i) least[i] = std::min(least[i], times[i]);
  }
  size_t best = 0;
  for (size_t i = 1; i < least.size(); ++i) {
    if (least[i] < kFaster * least[best]) best = i;
  }
  return contenders[best];
}

// The state of a GPU, kept until the process ends.
struct Multiplier {
  cublasLtHandle_t handle;
  AlgorithmTable table;
  std::mutex mutex;

  explicit Multiplier(int32_t device) : handle(create_handle()), table(file_name(device)) {}

  static Multiplier& of(int32_t device) {
    static std::mutex mutex;
    static std::map<int32_t, std::unique_ptr<Multiplier>> multipliers;
    const std::lock_guard<std::mutex> lock(mutex);
    std::unique_ptr<Multiplier>& multiplier = multipliers[device];
    if (!multiplier) multiplier = std::make_unique<Multiplier>(device);
    return *multiplier;
  }

 private:
  // The first product of a process may occur during a capture. cuBLASLt's allocations for its
  // handle must not be captured.
  static cublasLtHandle_t create_handle() {
    cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
    cudaThreadExchangeStreamCaptureMode(&mode);
    cublasLtHandle_t handle = nullptr;
    const cublasStatus_t status = cublaslt().create(&handle);
    cudaThreadExchangeStreamCaptureMode(&mode);
    cublaslt().check(status, "lightseq");
    return handle;
  }

  static std::string file_name(int32_t device) {
    cudaDeviceProp properties{};
    int driver = 0;
    cudaGetDeviceProperties(&properties, device);
    cudaDriverGetVersion(&driver);
    std::ostringstream text;
    text << properties.name << '-' << properties.multiProcessorCount << "-driver-" << driver
         << "-cublaslt-" << cublaslt().version();
    if (kActsAs != 0) text << "-acts-as-" << kActsAs;
    text << ".txt";
    std::string name = text.str();
    for (char& c : name) {
      if (std::isalnum(static_cast<unsigned char>(c)) == 0 && c != '.') c = '-';
    }
    return name;
  }
};

bool search_is_on() {
  static const bool on = [] {
    const char* const value = std::getenv("LIGHTSEQ_LINEAR_SEARCH");
    return value == nullptr || std::strcmp(value, "0") != 0;
  }();
  return on;
}

bool is_searched(int64_t tokens) {
  if (tokens < kFewTokens) return tokens > 0 && (tokens & (tokens - 1)) == 0;
  return tokens % kSearchedTokens == 0;
}

bool is_capturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  cudaStreamIsCapturing(stream, &status);
  return status != cudaStreamCaptureStatusNone;
}

}  // namespace

void multiply(const Product& p) {
  if (p.has_few_rows()) return multiply_few_rows(p);
  const int32_t device = p.out.owner.get_device();
  const cudaStream_t stream = current_stream(device);
  Multiplier& multiplier = Multiplier::of(device);
  std::optional<Algorithm> algorithm;
  if (is_searched(p.tokens) && search_is_on()) {
    const AlgorithmTable::Key key = {cuda_type_of(p.a), cuda_type_of(p.out), p.transpose_a,
                                     p.transpose_b,     epilogue_of(p),      p.a.rows,
                                     p.a.columns,       p.out.columns};
    const std::lock_guard<std::mutex> lock(multiplier.mutex);
    algorithm = multiplier.table.find(key);
    if (!algorithm && !is_capturing(stream)) {
      algorithm = multiplier.table.add(key, search(multiplier.handle, p, stream));
    }
  }
  MatmulDesc desc(p);
  const auto run_by = [&](const Algorithm& a) {
    return run(multiplier.handle, p, desc, a, stream);
  };
  // The stored algorithm may not support this product, because strides can differ from those of the
  // search. Then it returns an error before it launches anything, and cuBLASLt's proposal runs.
  if (algorithm && run_by(*algorithm) == CUBLAS_STATUS_SUCCESS) return;
  cublaslt().check(run_by(propose(multiplier.handle, p, 1)[0]), p.op);
}

}  // namespace lightseq
