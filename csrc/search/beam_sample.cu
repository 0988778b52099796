// Sampling: draws one continuation of every hypothesis. Beam search is in beam_candidates.cu.
//
//   w[j]  = exp(l[j]) if token j is a candidate, else 0          l: beam_search.cuh
//   token = the first one with w[0] + ... + w[token] > u (w[0] + ... + w[V - 1])
//   total = score + l[token]
//
// V is the vocabulary size. u is a uniform random number from Philox: a function of rng, the
// sentence, the index of the hypothesis in the sentence, and the step. The candidates, which may be
// drawn, are the fewest best tokens whose probabilities add up to topp, or the topk best, or all
// tokens. A token is better if its logit is larger; of equal logits (16-bit logits often are), the
// lowest token is the best. So topk tokens are exactly that many.
//
//   bytes moved   The logits are read once for log_softmax and once to draw. With topp or topk they
//                 are read up to 32 times more, to find the smallest logit of a candidate by
//                 bisection of its bits. A row stays in the caches.
//   determinism   sums have a fixed order, which depends on V and on the alignment of the row
//
// A block processes a row. In the last pass, each thread has a range of adjacent tokens.

#include <cstdint>
#include <tuple>

#include "common/check.h"
#include "common/launch.cuh"
#include "common/philox.cuh"
#include "search/beam_search.cuh"

namespace lightseq {
namespace {

using namespace beam_search;

constexpr int kThreads = 512, kLoads = 4;

struct Sampling {
  const int64_t* rng;
  const int* sentences;
  int beam, topk;
  float topp;
};

// The same number in (0, 1) as ops/philox.py draws.
__device__ __forceinline__ double uniform(const Sampling& sampling, int row, int step) {
  const int sentence = sampling.sentences[row / sampling.beam];
  const auto hypothesis = static_cast<uint32_t>(sentence * sampling.beam + row % sampling.beam);
  const auto seed = static_cast<uint64_t>(sampling.rng[0]);
  const uint4 words = philox4x32(
      {static_cast<uint32_t>(step), hypothesis, 0u, static_cast<uint32_t>(sampling.rng[1])},
      {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)});
  return (words.x + 0.5) * 0x1p-32;
}

// Prefix sums of x over the threads of the block: without this thread, including it, and over all
// threads. `after` of a thread and `before` of the next thread have the same bits.
struct Scan {
  double before, after, total;
};

__device__ __forceinline__ Scan scan(double x) {
  __shared__ double of_warp[kThreads / kWarp];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  double sum = x;
#pragma unroll
  for (int offset = 1; offset < kWarp; offset *= 2) {
    const double below = __shfl_up_sync(kAllLanes, sum, offset);
    if (lane >= offset) sum += below;
  }
  __syncthreads();  // all threads have read the result of the previous call
  if (lane == kWarp - 1) of_warp[warp] = sum;
  __syncthreads();
  double before = 0.0, total = 0.0;
#pragma unroll
  for (int i = 0; i < kThreads / kWarp; ++i) {
    if (i == warp) before = total;
    total += of_warp[i];
  }
  const double below = __shfl_up_sync(kAllLanes, sum, 1);
  return {lane == 0 ? before : before + below, before + sum, total};
}

template <typename T>
__global__ void __launch_bounds__(kThreads)
    beam_sample_kernel(const T* __restrict__ logits, int64_t stride, int classes,
                       const float* __restrict__ scores, const Rules rules, const Sampling sampling,
                       float* __restrict__ totals, int* __restrict__ tokens) {
  __shared__ int drawn;
  const T* const row = logits + blockIdx.x * stride;
  const Cut cut(row, classes);
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  const Step step(rules, static_cast<int>(blockIdx.x));
  const float score = scores[blockIdx.x];
  if (!(score > -INFINITY)) {
    if (threadIdx.x == 0) tokens[blockIdx.x] = step.eos, totals[blockIdx.x] = -INFINITY;
    return;
  }
  if (threadIdx.x == 0) drawn = -1;

  const float rate = 1.0f / rules.temperature;
  const Total<T> total =
      read_row<T, kThreads, kLoads>(row, cut, rate, [](int, const auto&, float) {});
  const LogSoftmax log_softmax = total.log_softmax(rate);
  // A logit under the rules of the step, on the scale of the logits. Two roundings, as in the
  // reference, not one: so both find the same ties.
  const float unk_penalty = __fmul_rn(step.unk_penalty, rules.temperature);
  const auto ruled = [&](int token, float logit) {
    if (step.forbids(token) || isnan(log_softmax.log_sum)) return -INFINITY;
    return token == step.unk ? logit - unk_penalty : logit;
  };
  const Exponential<T> exponential(total.top, rate);

  // The smallest logit of a candidate: the largest bound that enough logits reach. `surplus`: how
  // much more than enough they are.
  uint32_t least = ordered(-INFINITY);
  float surplus = 0.0f;
  const bool by_sum = sampling.topp > 0.0f;
  if (by_sum || sampling.topk > 0) {
    const float wanted = by_sum ? sampling.topp * expf(log_softmax.log_sum) : sampling.topk;
    // A negative penalty raises unk, perhaps above all others.
    const float highest = fmaxf(total.top, total.top - unk_penalty);
    for (uint32_t above = ordered(highest) + 1; above - least > 1;) {
      const uint32_t middle = least + (above - least) / 2;
      const float bound = from_ordered(middle);
      float sum = 0.0f;
      const auto add = [&](int token, float logit) {
        const float x = ruled(token, logit);
        if (x >= bound) sum += by_sum ? exponential(x) : 1.0f;
      };
      for (int i = threadIdx.x; i < cut.vectors; i += kThreads) {
        const int first = cut.column_of_vector(i);
        Columns<T> eight;
        eight.load(row + first);
        float x[kSize];
        eight.unpack(x);
#pragma unroll
        for (int e = 0; e < kSize; ++e) add(first + e, x[e]);
      }
      if (static_cast<int>(threadIdx.x) < cut.scalars) {
        const int token = cut.column_of_scalar(threadIdx.x);
        add(token, to_float(row[token]));
      }
      sum = block_reduce<kThreads>(sum, Sum{});
      if (sum >= wanted) {
        least = middle;
        surplus = sum - wanted;
      } else {
        above = middle;
      }
    }
  }

  const float bound = from_ordered(least);
  const double at_bound = exponential(bound);
  const int piece = (classes + kThreads - 1) / kThreads;
  const int first = min(classes, static_cast<int>(threadIdx.x) * piece);
  const int last = min(classes, first + piece);
  double sum = 0.0;
  int kept = 0;  // of the thread's tokens at the bound, the first `kept` are candidates
  for (int token = first; token < last; ++token) {
    const float x = ruled(token, to_float(row[token]));
    if (x > bound) sum += exponential(x);
    if (x == bound) ++kept;
  }
  if (surplus > 0.0f) {  // the same for all threads
    const Scan ties = scan(kept);
    const double dropped = by_sum ? floor(surplus / at_bound) : surplus;
    const double room = fmax(1.0, ties.total - dropped) - ties.before;
    kept = max(0, min(kept, static_cast<int>(room)));
  }
  const Scan sums = scan(sum + kept * at_bound);
  const double target = uniform(sampling, blockIdx.x, step.number) * sums.total;
  if (sums.before <= target && target < sums.after) {
    double so_far = sums.before;
    for (int token = first; token < last && so_far <= target; ++token) {
      const float x = ruled(token, to_float(row[token]));
      const bool tied = x == bound && kept-- > 0;
      const double w = tied ? at_bound : x > bound ? exponential(x) : 0.0;
      if (w > 0.0) drawn = token;
      so_far += w;
    }
  }
  __syncthreads();
  if (threadIdx.x > 0) return;
  const int token = drawn < 0 ? step.eos : drawn;
  const float l = step.apply(token, log_softmax(to_float(row[token])));
  tokens[blockIdx.x] = token;
  totals[blockIdx.x] = drawn < 0 ? -INFINITY : l + score;
}

std::tuple<Tensor, Tensor> beam_sample(const Tensor& logits, const Tensor& scores,
                                       const Tensor& sentences, const Tensor& steps,
                                       const Tensor& last_steps, const Tensor& rng, int64_t beam,
                                       int64_t topk, double topp, int64_t pad, int64_t eos,
                                       int64_t unk, int64_t min_len, int64_t min_len_from,
                                       double unk_penalty, double temperature) {
  constexpr const char* kOp = "beam_sample";
  const int64_t rows = logits.size(0), classes = logits.size(1);
  const Rules rules = rules_of(kOp, logits, scores, steps, last_steps, pad, eos, unk, min_len,
                               min_len_from, unk_penalty, temperature);
  require(sentences.is_contiguous() && rng.is_contiguous(), kOp,
          ": sentences and rng must be contiguous");
  const DeviceGuard guard(logits.get_device());
  Tensor totals = allocate(logits, {rows, 1}, ScalarType::Float);
  Tensor tokens = allocate(logits, {rows, 1}, ScalarType::Int);
  dispatch_float(logits.scalar_type(), "beam_sample: logits", [&](auto zero) {
    using T = decltype(zero);
    if (rows == 0) return;
    const Sampling sampling{.rng = rng.const_data_ptr<int64_t>(),
                            .sentences = sentences.const_data_ptr<int>(),
                            .beam = static_cast<int>(beam),
                            .topk = static_cast<int>(topk),
                            .topp = static_cast<float>(topp)};
    launch({.op = kOp, .grid = dim3(rows), .block = kThreads, .dependent = true},
           beam_sample_kernel<T>, data_of<T>(logits), logits.stride(0), static_cast<int>(classes),
           scores.const_data_ptr<float>(), rules, sampling, totals.mutable_data_ptr<float>(),
           tokens.mutable_data_ptr<int>());
  });
  return {totals, tokens};
}

STABLE_TORCH_LIBRARY_IMPL(lightseq, CUDA, m) { m.impl("beam_sample", TORCH_BOX(&beam_sample)); }

}  // namespace
}  // namespace lightseq
