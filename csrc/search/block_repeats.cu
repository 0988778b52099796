// Blocks tokens that would repeat an n-gram of their hypothesis, and those that are always blocked,
// before beam_candidates.cu or beam_sample.cu chooses a token (fairseq: NGramRepeatBlock).
//
//   logit[b] = -inf                                              for each blocked token b
//   score   += log(sum of exp(logit) without the blocked ones) - log(sum of all)
//
// So a softmax of the new logits, added to the new score, gives what the old ones gave.
//
//   bytes moved   the logits are read once, which brings them into the L2 cache for the next kernel
//   determinism   sums have a fixed order, which depends on V, on the alignment of the row and on
//                 the number of threads
//
// A block processes a row. Its threads compare the newest tokens of the hypothesis with all n-grams
// before them. Most differ in the newest token, so few tokens are read more than once. The blocked
// tokens are kept in shared memory, because each of them counts once.

#include <climits>
#include <cstdint>

#include "common/check.h"
#include "common/launch.cuh"
#include "search/beam_search.cuh"

namespace lightseq {
namespace {

using namespace beam_search;

constexpr int kThreads = 512, kLoads = 4;

struct History {
  const int *tokens, *places, *ancestry, *past_tokens;
  int64_t stride;  // between positions: R of ops/block_repeats.py
  int positions;

  // The token of a hypothesis at a position that it has.
  __device__ __forceinline__ int token(int row, int position, int place) const {
    if (position == place) return tokens[row];
    const int64_t start = position * stride;
    return past_tokens[start + ancestry[start + row]];
  }
  // Whether the n-gram of `last` + 1 tokens from `start` on begins with the `last` newest tokens.
  __device__ __forceinline__ bool repeats(int row, int place, int start, int last) const {
    for (int i = last - 1; i >= 0; --i) {  // the newest token first
      if (token(row, start + i, place) != token(row, place - last + 1 + i, place)) return false;
    }
    return true;
  }
};

// The tokens that are blocked in all rows.
struct Always {
  const int* tokens;
  int count;

  __device__ __forceinline__ bool has(int token) const {
    for (int i = 0; i < count; ++i) {
      if (tokens[i] == token) return true;
    }
    return false;
  }
};

template <typename T>
__global__ void __launch_bounds__(kThreads)
    block_repeats_kernel(T* __restrict__ logits, int64_t stride, int classes,
                         const float* __restrict__ scores, const History history,
                         const Always always, int size, float rate, bool renormalizes,
                         float* __restrict__ new_scores) {
  extern __shared__ int ends[];  // for each start of an n-gram, the token that it blocks, or -1
  const int row = blockIdx.x, last = size - 1;
  T* const mine = logits + row * stride;
  const Cut cut(mine, classes);
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();

  const int place = history.places[row];
  assert(place >= 0 && place < history.positions && "places in [0, P)");
  const int starts = size > 0 ? place - last + 1 : 0;
  for (int start = threadIdx.x; start < starts; start += kThreads) {
    const bool repeats = history.repeats(row, place, start, last);
    ends[start] = repeats ? history.token(row, start + last, place) : -1;
  }
  __syncthreads();
  Total<T> blocked{kFloor, 0.0f};
  const auto block = [&](int token) {
    assert(token >= 0 && token < classes && "blocked tokens in [0, V)");
    const float logit = to_float(mine[token]);
    mine[token] = from_float<T>(-INFINITY);
    if (logit > blocked.top) {
      blocked.sum = blocked.sum_from(logit, rate);
      blocked.top = logit;
    }
    blocked.sum += Exponential<T>(blocked.top, rate)(logit);
  };
  for (int i = threadIdx.x; i < always.count; i += kThreads) block(always.tokens[i]);
  for (int start = threadIdx.x; start < starts; start += kThreads) {
    const int token = ends[start];
    bool is_new = token >= 0 && !always.has(token);
    for (int i = 0; i < start && is_new; ++i) is_new = ends[i] != token;
    if (is_new) block(token);
  }
  if (renormalizes) {
    if (threadIdx.x == 0) new_scores[row] = scores[row];
    return;
  }
  __syncthreads();  // the blocked logits have been written
  const Total<T> left =
      read_row<T, kThreads, kLoads>(mine, cut, rate, [](int, const auto&, float) {});
  const float top = fmaxf(block_reduce<kThreads>(blocked.top, Max{}), left.top);
  const float out = block_reduce<kThreads>(blocked.sum_from(top, rate), Sum{});
  const float in = left.sum_from(top, rate);
  if (threadIdx.x > 0) return;
  const float score = scores[row] + logf(in / (in + out));
  new_scores[row] = isnan(score) ? -INFINITY : score;
}

Tensor block_repeats(Tensor logits, const Tensor& scores, const Tensor& blocked,
                     const Tensor& tokens, const Tensor& places, const Tensor& ancestry,
                     const Tensor& past_tokens, int64_t size, double temperature,
                     bool renormalizes) {
  constexpr const char* kOp = "block_repeats";
  const int64_t rows = logits.size(0), classes = logits.size(1), positions = ancestry.size(0);
  require(classes <= INT32_MAX - kSize, kOp, ": V must be below 2^31, got ", classes);
  for (const Tensor& x : {scores, blocked, tokens, places, ancestry, past_tokens}) {
    require(x.is_contiguous(), kOp, ": all tensors but logits must be contiguous");
  }
  const DeviceGuard guard(logits.get_device());
  Tensor new_scores = allocate(logits, {rows}, ScalarType::Float);
  dispatch_float(logits.scalar_type(), "block_repeats: logits", [&](auto zero) {
    using T = decltype(zero);
    if (rows == 0) return;
    const History history{.tokens = tokens.const_data_ptr<int>(),
                          .places = places.const_data_ptr<int>(),
                          .ancestry = ancestry.const_data_ptr<int>(),
                          .past_tokens = past_tokens.const_data_ptr<int>(),
                          .stride = ancestry.size(1),
                          .positions = static_cast<int>(positions)};
    const Always always{.tokens = blocked.const_data_ptr<int>(),
                        .count = static_cast<int>(blocked.size(0))};
    launch({.op = kOp,
            .grid = dim3(rows),
            .block = kThreads,
            .shared = size > 0 ? positions * sizeof(int) : 0,
            .dependent = true},
           block_repeats_kernel<T>, output_of<T>(logits), logits.stride(0),
           static_cast<int>(classes), scores.const_data_ptr<float>(), history, always,
           static_cast<int>(size), static_cast<float>(1.0 / temperature), renormalizes,
           new_scores.mutable_data_ptr<float>());
  });
  return new_scores;
}

STABLE_TORCH_LIBRARY_IMPL(lightseq, CUDA, m) { m.impl("block_repeats", TORCH_BOX(&block_repeats)); }

}  // namespace
}  // namespace lightseq
