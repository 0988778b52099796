// Common code of beam search and sampling: log-softmax of a row of logits, and fairseq's rules for
// pad, eos and unk, which are applied after it.
//
//   l = log_softmax(logits / temperature); -inf for pad and for tokens that the step forbids;
//       unk_penalty is subtracted for unk
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "common/columns.cuh"
#include "common/cut.cuh"
#include "common/exp2.cuh"
#include "common/reduce.cuh"

namespace lightseq::beam_search {

constexpr int kSize = kColumnsPerDraw;  // logits per load
constexpr float kFloor = -1e30f;        // initial maximum; finite, so that exp(-inf - kFloor) is 0

struct Rules {
  const int *steps, *last_steps;  // of each row
  int pad, eos, unk, min_len, min_len_from;
  float unk_penalty, temperature;
};

// The rules of a row's step.
struct Step {
  int number, pad, eos, unk;
  float unk_penalty;
  bool only_eos, no_eos;
  int lowest, highest;  // smallest and largest token with a rule

  __device__ __forceinline__ Step(const Rules& rules, int row)
      : number(rules.steps[row]),
        pad(rules.pad),
        eos(rules.eos),
        unk(rules.unk),
        unk_penalty(rules.unk_penalty),
        only_eos(number >= rules.last_steps[row]),
        no_eos(number < rules.min_len && number >= rules.min_len_from),
        lowest(min(pad, min(eos, unk))),
        highest(max(pad, max(eos, unk))) {}

  // Whether the tokens first ... first + count - 1 may include one with a rule.
  __device__ __forceinline__ bool touches(int first, int count) const {
    return first <= highest && first + count > lowest;
  }
  __device__ __forceinline__ bool forbids(int token) const {
    return token == pad || (token == eos ? no_eos : only_eos);
  }
  // A token's log-probability under the rules.
  __device__ __forceinline__ float apply(int token, float l) const {
    return forbids(token) ? -INFINITY : token == unk ? l - unk_penalty : l;
  }
};

// log_softmax of a row; NaN becomes -inf. log_sum is NaN if the row has a NaN or +inf, or only
// -inf.
struct LogSoftmax {
  float rate, top, log_sum;  // 1 / temperature; largest logit * rate; log of the sum of exp

  __device__ __forceinline__ float operator()(float logit) const {
    const float l = (logit * rate - top) - log_sum;
    return isnan(l) ? -INFINITY : l;
  }
};

// The largest of some logits, and the sum of exponentials relative to it.
template <typename T>
struct Total {
  float top, sum;

  // The sum relative to another maximum. An empty sum needs a case of its own: with top = kFloor
  // the factor can be infinite (fmaf does not round in between), and 0 * inf is NaN.
  __device__ __forceinline__ float sum_from(float highest, float rate) const {
    return sum == 0.0f ? 0.0f : sum * Exponential<T>(highest, rate)(top);
  }
  __device__ __forceinline__ LogSoftmax log_softmax(float rate) const {
    return {rate, top * rate, sum > 0.0f ? logf(sum) : NAN};
  }
};

// Reads a row and calls visit(first token, logits[n], their largest) with n = 8 or n = 1. All
// threads of the block must call it; kThreads exceeds the number of scalars that a row can have.
template <typename T, int kThreads, int kLoads, typename Visit>
__device__ __forceinline__ Total<T> read_row(const T* row, const Cut& cut, float rate,
                                             const Visit& visit) {
  float top = kFloor, sum = 0.0f;
  const auto add = [&](int first, const auto& x) {
    constexpr int kCount = std::extent_v<std::remove_reference_t<decltype(x)>>;
    float largest = x[0];
#pragma unroll
    for (int e = 1; e < kCount; ++e) largest = fmaxf(largest, x[e]);
    if (largest > top) {
      sum *= Exponential<T>(largest, rate)(top);
      top = largest;
    }
    const Exponential<T> exponential(top, rate);
    float part = 0.0f;
#pragma unroll
    for (int e = 0; e < kCount; ++e) part += exponential(x[e]);
    sum += part;
    visit(first, x, largest);
  };

  if (static_cast<int>(threadIdx.x) < cut.scalars) {
    const int token = cut.column_of_scalar(threadIdx.x);
    const float x[1] = {to_float(row[token])};
    add(token, x);
  }
  for (int first = threadIdx.x; first < cut.vectors; first += kThreads * kLoads) {
    Columns<T> logits[kLoads];
#pragma unroll
    for (int u = 0; u < kLoads; ++u) {
      const int i = first + u * kThreads;
      if (i < cut.vectors) logits[u].load_cg(row + cut.column_of_vector(i));
    }
#pragma unroll
    for (int u = 0; u < kLoads; ++u) {
      const int i = first + u * kThreads;
      if (i >= cut.vectors) break;
      float x[kSize];
      logits[u].unpack(x);
      add(cut.column_of_vector(i), x);
    }
  }
  const float highest = block_reduce<kThreads>(top, Max{});
  const float total = block_reduce<kThreads>(Total<T>{top, sum}.sum_from(highest, rate), Sum{});
  return {highest, total};
}

// Maps a float (not NaN) to an unsigned integer with the same order. -0 and 0 are equal.
__device__ __forceinline__ uint32_t ordered(float x) {
  const uint32_t bits = __float_as_uint(x + 0.0f);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float from_ordered(uint32_t x) {
  return __uint_as_float(x >> 31 ? x & 0x7fffffffu : ~x);
}

inline Rules rules_of(const char* op, const Tensor& logits, const Tensor& scores,
                      const Tensor& steps, const Tensor& last_steps, int64_t pad, int64_t eos,
                      int64_t unk, int64_t min_len, int64_t min_len_from, double unk_penalty,
                      double temperature) {
  require(logits.size(1) <= INT32_MAX - kSize, op, ": V must be below 2^31, got ", logits.size(1));
  require(scores.is_contiguous() && steps.is_contiguous() && last_steps.is_contiguous(), op,
          ": scores, steps and last_steps must be contiguous");
  require(temperature > 0.0, op, ": temperature must be positive, got ", temperature);
  for (const int64_t token : {pad, eos, unk}) {
    require(token >= 0 && token < logits.size(1), op, ": pad, eos and unk must be in [0, V), got ",
            token);
  }
  return {.steps = steps.const_data_ptr<int>(),
          .last_steps = last_steps.const_data_ptr<int>(),
          .pad = static_cast<int>(pad),
          .eos = static_cast<int>(eos),
          .unk = static_cast<int>(unk),
          .min_len = static_cast<int>(min_len),
          .min_len_from = static_cast<int>(min_len_from),
          .unk_penalty = static_cast<float>(unk_penalty),
          .temperature = static_cast<float>(temperature)};
}

}  // namespace lightseq::beam_search
