// Beam search, first step: the best continuations of every hypothesis. The second step, which
// merges the candidates of a sentence, is in beam_advance.cu; sampling is in beam_sample.cu.
//
//   total[j] = score + l[j]       l: beam_search.cuh
//   result: the `count` largest totals of a row, sorted; ties: the lowest token first
//
//   bytes moved   the logits are read once; a few hundred of them once more
//   determinism   the order has no ties, so the result does not depend on the order of execution
//
// A block processes a row (a hypothesis). If there are few rows, a cluster of blocks processes one:
// each block has a part of the row, they exchange their sums of exponentials, and at the end the
// first block receives the best tokens of each block.
//
// The search first finds a rough bound (the hierarchical search of LightSeq, Wang et al. 2021).
//   1. Each thread reads its logits once, for the sum of exponentials. It keeps its best vector
//      (eight adjacent logits) and `second`, the largest logit outside of this vector.
//   2. Threads form groups. The `count`-th best of the groups' best logits is the bound: at least
//      `count` tokens reach it.
//   3. A thread whose best logit reaches the bound adds the tokens of this vector that reach it to
//      a list. Only if `second` also reaches the bound, all logits of the thread are read again.
//   4. About a dozen tokens are listed. For each the rank is the number of better ones.
//
// A key combines a total and its token in one number: larger is better, and all keys differ. If too
// many tokens reach the bound (equal logits), the `count`-th best of the listed keys becomes the
// new bound, and the block repeats steps 3 and 4.

#include <cstdint>
#include <tuple>

#include "common/check.h"
#include "common/device.h"
#include "common/launch.cuh"
#include "common/ptx/cluster.cuh"
#include "search/beam_search.cuh"

namespace lightseq {
namespace {

using namespace beam_search;

using Key = unsigned long long;

constexpr int kMaxCount = 128;  // maximum number of candidates, and of groups
constexpr int kListed = 1024;   // size of the list of keys
// Clusters are used if the GPU has them, their grid has at most kFewBlocks blocks per SM, each
// block has at least kPart tokens, and `count` is at most kMaxCount / 4.
constexpr int kFewBlocks = 2;
constexpr int kPart = 1024;

__device__ __forceinline__ Key key_of(float total, int token) {
  return static_cast<Key>(ordered(total)) << 32 | ~static_cast<uint32_t>(token);
}

// The number of better keys.
__device__ __forceinline__ int rank_of(Key key, const Key* keys, int number) {
  int rank = 0;
  for (int i = 0; i < number; ++i) rank += keys[i] > key;
  return rank;
}

// A thread's best logit, and `second`, the largest logit outside of the vector of the best one.
// Without unk, which has a penalty and is listed separately.
struct Best {
  float logit, second = -INFINITY;
  int last;  // last token of the best logit's vector; of a scalar, its token

  __device__ __forceinline__ explicit Best(const Cut& cut) : logit(-INFINITY), last(-1) {
    const int thread = threadIdx.x;
    if (thread < cut.vectors) {
      last = cut.column_of_vector(thread) + kSize - 1;
    } else if (thread < cut.scalars) {
      last = cut.column_of_scalar(thread);
    }
  }
  __device__ __forceinline__ void consider(float x, int last_token) {
    if (x > logit) {
      second = logit;
      logit = x;
      last = last_token;
    } else {
      second = fmaxf(second, x);
    }
  }
};

struct Output {
  float* scores;
  int* tokens;
  int count;
};

// Writes the result if all tokens except possibly eos have -inf: eos first, then the lowest tokens.
__device__ __forceinline__ void write_end(const Output& output, int eos, float total) {
  const bool has_end = total > -INFINITY;
  for (int i = threadIdx.x; i < output.count; i += blockDim.x) {
    const int other = has_end ? i - (i <= eos) : i;
    output.scores[i] = has_end && i == 0 ? total : -INFINITY;
    output.tokens[i] = has_end && i == 0 ? eos : other;
  }
}

template <typename T>
struct Logits {
  const T* data;
  int64_t stride;
  int classes;
};

template <typename T, int kThreads, int kLoads, int kCluster>
__device__ __forceinline__ void find_candidates(const Logits<T>& logits, const float* scores,
                                                const Rules& rules, int groups, Output output) {
  __shared__ Key group_best[kMaxCount], listed[kListed], bound;
  __shared__ Key finalists[kCluster > 1 ? kListed : 1];  // in the first block: each block's best
  __shared__ Total<T> totals[kCluster];                  // in each block: the totals of all blocks
  __shared__ int number;                                 // number of listed keys
  const int hypothesis = blockIdx.x / kCluster, part = blockIdx.x % kCluster;
  const T* const whole = logits.data + hypothesis * logits.stride;
  // The block's part of the row begins with token `begin`. Parts consist of whole cache lines if
  // rows do.
  constexpr int kLine = kLineBytes / sizeof(T);
  const int each =
      kCluster == 1 ? logits.classes : ((logits.classes - 1) / (kCluster * kLine) + 1) * kLine;
  const int begin = part * each, end = min(logits.classes, begin + each);
  const T* const row = whole + begin;
  const Cut cut(row, end - begin);
  output.scores += static_cast<int64_t>(hypothesis) * output.count;
  output.tokens += static_cast<int64_t>(hypothesis) * output.count;
  if constexpr (kCluster > 1) cluster_sync();
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();

  const Step step(rules, hypothesis);
  const int unk = step.unk - begin;
  const float score = scores[hypothesis], rate = 1.0f / rules.temperature;
  // A hypothesis with score -inf is dead. Without a cluster, do not read its logits. In a cluster,
  // the reads of logits do not wait for the score.
  const bool dead = !(score > -INFINITY);
  if (kCluster == 1 && dead) return write_end(output, step.eos, -INFINITY);
  if (threadIdx.x < kMaxCount) group_best[threadIdx.x] = 0;
  if (threadIdx.x == 0) bound = 0, number = 0;

  Best best(cut);
  Total<T> total =
      read_row<T, kThreads, kLoads>(row, cut, rate, [&](int first, const auto& x, float largest) {
        constexpr int kCount = std::extent_v<std::remove_reference_t<decltype(x)>>;
        if (step.touches(begin + first, kCount)) {
          largest = -INFINITY;
#pragma unroll
          for (int e = 0; e < kCount; ++e) {
            const int token = begin + first + e;
            if (!step.forbids(token) && token != step.unk) largest = fmaxf(largest, x[e]);
          }
        }
        best.consider(largest, first + kCount - 1);
      });
  if constexpr (kCluster > 1) {
    if (threadIdx.x < kCluster) *mapa(&totals[part], threadIdx.x) = total;
    cluster_sync();
    float highest = kFloor, sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kCluster; ++i) highest = fmaxf(highest, totals[i].top);
#pragma unroll
    for (int i = 0; i < kCluster; ++i) sum += totals[i].sum_from(highest, rate);
    total = {highest, sum};
  }
  const LogSoftmax log_softmax = total.log_softmax(rate);
  const auto total_of = [&](int token, float logit) {  // token: counted from the start of the row
    return step.apply(token, log_softmax(logit)) + score;
  };
  if (dead || step.only_eos || isnan(log_softmax.log_sum)) {
    if (part == 0) write_end(output, step.eos, total_of(step.eos, to_float(whole[step.eos])));
    return;
  }

  // Compute the bound. A thread's key has the last token of its vector, which makes it the smallest
  // possible key: the key of the actual best token is at least as large.
  const Key mine = best.last < 0 ? 0 : key_of(log_softmax(best.logit) + score, begin + best.last);
  atomicMax(&group_best[threadIdx.x % groups], mine);
  __syncthreads();
  if (static_cast<int>(threadIdx.x) < groups) {
    const Key key = group_best[threadIdx.x];
    if (key > 0 && rank_of(key, group_best, groups) == output.count - 1) bound = key;
  }
  __syncthreads();

  while (true) {
    const Key least = bound;
    const auto offer = [&](int token, float logit) {
      const Key key = key_of(total_of(begin + token, logit), begin + token);
      if (key < least) return;
      const int place = atomicAdd(&number, 1);
      if (place < kListed) listed[place] = key;
    };
    const auto offer_vector = [&](int first) {
      Columns<T> eight;
      eight.load_cg(row + first);
      float x[kSize];
      eight.unpack(x);
#pragma unroll
      for (int e = 0; e < kSize; ++e) {
        if (first + e != unk) offer(first + e, x[e]);
      }
    };
    const auto offer_one = [&](int token) {
      if (token != unk) offer(token, to_float(row[token]));
    };

    const bool again = ordered(log_softmax(best.second) + score) >= least >> 32;
    if (!again && mine > 0 && mine >> 32 >= least >> 32) {
      const int first = best.last - (kSize - 1);
      if (first >= cut.head && best.last < cut.column_of_vector(cut.vectors)) {
        offer_vector(first);
      } else {
        offer_one(best.last);
      }
    }
    for (unsigned owners = __ballot_sync(kAllLanes, again); owners != 0; owners &= owners - 1) {
      const int lane = threadIdx.x % kWarp;
      const int owner = threadIdx.x - lane + __ffs(owners) - 1;
      for (int i = owner + lane * kThreads; i < cut.vectors; i += kWarp * kThreads) {
        offer_vector(cut.column_of_vector(i));
      }
      if (lane == 0 && owner < cut.scalars) offer_one(cut.column_of_scalar(owner));
    }
    if (threadIdx.x == 0 && unk >= 0 && unk < end - begin) offer(unk, to_float(row[unk]));
    __syncthreads();
    if (number <= kListed) break;

    for (int i = threadIdx.x; i < kListed; i += kThreads) {
      if (rank_of(listed[i], listed, kListed) == output.count - 1) bound = listed[i];
    }
    __syncthreads();
    if (threadIdx.x == 0) number = 0;
    __syncthreads();
  }

  const auto write_best = [&](const Key* keys, int count, const auto& write) {
    for (int i = threadIdx.x; i < count; i += kThreads) {
      const int rank = rank_of(keys[i], keys, count);
      if (rank < output.count) write(rank, keys[i]);
    }
  };
  const auto write_result = [&](int rank, Key key) {
    output.scores[rank] = from_ordered(static_cast<uint32_t>(key >> 32));
    output.tokens[rank] = static_cast<int>(~static_cast<uint32_t>(key));
  };
  if constexpr (kCluster == 1) {
    write_best(listed, number, write_result);
  } else {
    write_best(listed, number,
               [&](int rank, Key key) { *mapa(&finalists[part * output.count + rank], 0) = key; });
    cluster_sync();
    if (part == 0) write_best(finalists, kCluster * output.count, write_result);
  }
}

// For 16-bit logits, the resident blocks of an SM (two of 512 threads, four of 256 or nine of 128)
// have 64, 64 or 72 KiB in flight. For float32, three loads per thread are more than enough and
// need fewer registers.
template <typename T, int kThreads>
__global__ void __launch_bounds__(kThreads, 1152 / kThreads)
    beam_candidates_kernel(const Logits<T> logits, const float* scores, const Rules rules,
                           int groups, const Output output) {
  find_candidates<T, kThreads, std::is_same_v<T, float> ? 3 : 4, 1>(logits, scores, rules, groups,
                                                                    output);
}

template <typename T, int kThreads>
__global__ void LIGHTSEQ_CLUSTER(kMaxCluster) __launch_bounds__(kThreads, 768 / kThreads)
    beam_candidates_cluster_kernel(const Logits<T> logits, const float* scores, const Rules rules,
                                   int groups, const Output output) {
  find_candidates<T, kThreads, 4, kMaxCluster>(logits, scores, rules, groups, output);
}

std::tuple<Tensor, Tensor> beam_candidates(const Tensor& logits, const Tensor& scores,
                                           const Tensor& steps, const Tensor& last_steps,
                                           int64_t count, int64_t pad, int64_t eos, int64_t unk,
                                           int64_t min_len, int64_t min_len_from,
                                           double unk_penalty, double temperature) {
  constexpr const char* kOp = "beam_candidates";
  const int64_t rows = logits.size(0), classes = logits.size(1);
  const Rules rules = rules_of(kOp, logits, scores, steps, last_steps, pad, eos, unk, min_len,
                               min_len_from, unk_penalty, temperature);
  require(count >= 1 && count < classes && count <= kMaxCount, kOp, ": count must be 1 to ",
          kMaxCount, " and below V on a GPU, got ", count);
  const int32_t device = logits.get_device();
  const DeviceGuard guard(device);
  Tensor best_scores = allocate(logits, {rows, count}, ScalarType::Float);
  Tensor best_tokens = allocate(logits, {rows, count}, ScalarType::Int);
  dispatch_float(logits.scalar_type(), "beam_candidates: logits", [&](auto zero) {
    using T = decltype(zero);
    if (rows == 0) return;
    const auto start = [&](auto kernel, int threads, int64_t blocks) {
      launch({.op = kOp,
              .grid = dim3(blocks),
              .block = static_cast<unsigned>(threads),
              .dependent = true},
             kernel,
             Logits<T>{.data = data_of<T>(logits),
                       .stride = logits.stride(0),
                       .classes = static_cast<int>(classes)},
             scores.const_data_ptr<float>(), rules,
             count <= kMaxCount / 4 ? kMaxCount / 2 : kMaxCount,
             Output{.scores = best_scores.mutable_data_ptr<float>(),
                    .tokens = best_tokens.mutable_data_ptr<int>(),
                    .count = static_cast<int>(count)});
    };
    const bool few = rows * kMaxCluster <= resident_blocks(device, kFewBlocks) &&
                     classes >= kMaxCluster * kPart && count <= kMaxCount / 4 &&
                     has_clusters(device);
    if (few) return start(beam_candidates_cluster_kernel<T, 256>, 256, rows * kMaxCluster);
    // Choose the largest block size with which all rows are resident, so that there is no second
    // wave: more threads have more bytes in flight. With many waves the GPU is busy anyway.
    const auto fits = [&](auto kernel, int threads) {
      return rows <= resident_blocks(kernel, threads, device);
    };
    if (fits(beam_candidates_kernel<T, 512>, 512)) {
      start(beam_candidates_kernel<T, 512>, 512, rows);
    } else if (fits(beam_candidates_kernel<T, 256>, 256)) {
      start(beam_candidates_kernel<T, 256>, 256, rows);
    } else {
      start(beam_candidates_kernel<T, 128>, 128, rows);
    }
  });
  return {best_scores, best_tokens};
}

STABLE_TORCH_LIBRARY_IMPL(lightseq, CUDA, m) {
  m.impl("beam_candidates", TORCH_BOX(&beam_candidates));
}

}  // namespace
}  // namespace lightseq
