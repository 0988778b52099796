// Beam search, second half: the candidates of a sentence's hypotheses are merged, some end and are
// kept as results, the best go on. ops/beam_advance.py says what is written where; the order of
// everything is fairseq's.
//
//   bytes moved   the candidates, and 4 bytes a position and hypothesis of the ancestry, read and
//                 written; 16 bytes a position of every hypothesis that ends
//   determinism   the order of candidates is total; no result depends on who comes first
//
// A block takes a slot (a sentence). A candidate's place in the order is the number of those that
// are better, which its thread counts in shared memory. Diverse beam search does the same for one
// group of hypotheses after the other. The last block that is through counts the step.

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "common/beam_search.cuh"
#include "common/check.h"
#include "common/dependent_launch.cuh"

namespace lightseq {
namespace {

using namespace beam_search;

constexpr int kThreads = 256;
constexpr int kMaxBeam = 64;

struct Advance {
  const float* candidate_scores;
  const int* candidate_tokens;
  int* progress;
  int* sentences;
  int *tokens, *ancestry, *past_tokens, *hypothesis_tokens, *lengths;
  float *scores, *past_scores, *hypothesis_scores, *totals;
  int64_t memory_rows;  // from one position to the next
  int slots, beam, width, groups, eos;
  float diversity;
  double length_penalty;
};

// ---- kernel ----

// The candidates of all beams, in order.
struct Merged {
  float score[2 * kMaxBeam];
  int token[2 * kMaxBeam], parent[2 * kMaxBeam];  // parent: row
  int count;
};

// `scores` and `tokens` [beam, width] lie in shared memory, and so does `merged`.
__device__ __forceinline__ void merge(const Advance& p, int first_row, float* scores, int* tokens,
                                      Merged& merged) {
  const int candidates = p.beam * p.width;
  const int64_t offset = static_cast<int64_t>(first_row) * p.width;
  for (int i = threadIdx.x; i < candidates; i += kThreads) {
    scores[i] = p.candidate_scores[offset + i];
    tokens[i] = p.candidate_tokens[offset + i];
  }
  if (threadIdx.x == 0) merged.count = p.width == 1 ? p.beam : p.width;
  __syncthreads();
  if (p.width == 1) {  // drawn: every hypothesis goes on with its own
    for (int i = threadIdx.x; i < p.beam; i += kThreads) {
      merged.score[i] = scores[i];
      merged.token[i] = tokens[i];
      merged.parent[i] = first_row + i;
    }
    __syncthreads();
    return;
  }
  const int per_group = p.width / p.groups;
  for (int group = 0; group < p.groups; ++group) {
    const auto is_mine = [&](int i) { return i / p.width % p.groups == group; };
    if (group > 0) {
      for (int i = threadIdx.x; i < candidates; i += kThreads) {
        if (!is_mine(i)) continue;
        int picked = 0;
        for (int n = 0; n < per_group * p.groups; ++n) {
          picked += n % p.groups < group && merged.token[n] == tokens[i];
        }
        scores[i] = __fsub_rn(scores[i], __fmul_rn(p.diversity, static_cast<float>(picked)));
      }
      __syncthreads();
    }
    for (int i = threadIdx.x; i < candidates; i += kThreads) {
      if (!is_mine(i)) continue;
      int rank = 0;
      for (int n = 0; n < candidates; ++n) {
        // Among equals the lowest row, then the lowest token.
        const bool first = n / p.width == i / p.width ? tokens[n] < tokens[i] : n < i;
        rank += is_mine(n) && (scores[n] > scores[i] || (scores[n] == scores[i] && first));
      }
      if (rank >= per_group) continue;
      const int place = rank * p.groups + group;  // groups take turns
      merged.score[place] = scores[i];
      merged.token[place] = tokens[i];
      merged.parent[place] = first_row + i / p.width;
    }
    __syncthreads();
  }
}

// A hypothesis that ends at position `step` becomes a result: what stands at position p of the
// result is the token of position p + 1. The whole block takes part.
__device__ __forceinline__ void keep(const Advance& p, int step, int64_t column, int parent,
                                     float score) {
  for (int position = threadIdx.x; position <= step; position += kThreads) {
    const int64_t to = position * p.memory_rows + column;
    if (position == step) {
      p.hypothesis_tokens[to] = p.eos;
      p.hypothesis_scores[to] = score;
      continue;
    }
    const int64_t next = (position + 1) * p.memory_rows;
    const int64_t from = next + (position + 1 < step ? p.ancestry[next + parent] : parent);
    p.hypothesis_tokens[to] = p.past_tokens[from];
    p.hypothesis_scores[to] = p.past_scores[from];
  }
  if (threadIdx.x > 0) return;
  p.lengths[column] = step + 1;
  p.totals[column] = score / static_cast<float>(pow(step + 1.0, p.length_penalty));
}

// New rows' ancestors are those of their parents.
__device__ __forceinline__ void inherit(const Advance& p, int step, int first_row,
                                        const int* parents) {
  const int at_once = kThreads / p.beam;
  const int child = threadIdx.x % p.beam;
  for (int first = 0; first < step; first += at_once) {
    const int position = first + static_cast<int>(threadIdx.x) / p.beam;
    const bool works = position < min(step, first + at_once);
    const int64_t row = position * p.memory_rows;
    const int ancestor = works ? p.ancestry[row + parents[child]] : 0;
    __syncthreads();  // all of a position have been read
    if (works) p.ancestry[row + first_row + child] = ancestor;
  }
}

__device__ __forceinline__ void advance_slot(const Advance& p, int slot, int step, float* scores,
                                             int* tokens) {
  __shared__ Merged merged;
  __shared__ int parents[kMaxBeam];
  const int sentence = p.sentences[slot];
  if (sentence < 0) return;
  const int first_row = slot * p.beam;
  const int64_t first_column = static_cast<int64_t>(sentence) * p.beam;
  const int64_t now = step * p.memory_rows;
  for (int i = threadIdx.x; i < p.beam; i += kThreads) {
    p.past_tokens[now + first_row + i] = p.tokens[first_row + i];
    p.past_scores[now + first_row + i] = p.scores[first_row + i];
  }
  int results = 0;  // counted by every thread for itself
  for (int i = 0; i < p.beam; ++i) results += p.lengths[first_column + i] > 0;
  merge(p, first_row, scores, tokens, merged);

  // Only those that are among the first `beam` count as ends, as long as results are wanted.
  const auto ends = [&](int i) { return merged.token[i] == p.eos && merged.score[i] > -INFINITY; };
  for (int i = 0; i < p.beam && results < p.beam; ++i) {
    if (!ends(i)) continue;
    keep(p, step, first_column + results, merged.parent[i], merged.score[i]);
    ++results;
  }
  const bool finished = results == p.beam || step >= p.progress[kMaxLen];

  // The best that do not end go on; then, where tokens were drawn, those that do, as dead ones.
  int alive = 0;
  for (int i = 0; i < merged.count; ++i) alive += !ends(i);
  for (int i = threadIdx.x; i < merged.count; i += kThreads) {
    int child = ends(i) ? alive : 0;
    for (int n = 0; n < i; ++n) child += ends(n) == ends(i);
    if (child >= p.beam) continue;
    parents[child] = merged.parent[i];
    p.tokens[first_row + child] = merged.token[i];
    p.scores[first_row + child] = finished || ends(i) ? -INFINITY : merged.score[i];
    p.ancestry[now + first_row + child] = merged.parent[i];
  }
  __syncthreads();
  inherit(p, step, first_row, parents);
  if (threadIdx.x == 0 && finished) {
    p.sentences[slot] = -1;
    atomicSub(&p.progress[kUnfinished], 1);
  }
}

__global__ void __launch_bounds__(kThreads) beam_advance_kernel(const Advance p) {
  extern __shared__ float shared[];  // candidates: scores, then tokens
  wait_for_previous_kernel();
  start_next_kernel();
  const int step = p.progress[kStep];
  if (static_cast<int>(blockIdx.x) < p.slots) {
    int* const tokens = reinterpret_cast<int*>(shared + p.beam * p.width);
    advance_slot(p, blockIdx.x, step, shared, tokens);
  }
  __syncthreads();  // every thread has read the step
  if (threadIdx.x > 0) return;
  const int last = static_cast<int>(gridDim.x) - 1;
  if (atomicAdd(&p.progress[kScratch], 1) == last) {
    p.progress[kScratch] = 0;
    p.progress[kStep] = step + 1;
  }
}

// ---- launcher ----

void beam_advance(const Tensor& candidate_scores, const Tensor& candidate_tokens, Tensor progress,
                  Tensor sentences, Tensor tokens, Tensor scores, Tensor ancestry,
                  Tensor past_tokens, Tensor past_scores, Tensor hypothesis_tokens,
                  Tensor hypothesis_scores, Tensor lengths, Tensor totals, int64_t beam,
                  int64_t groups, double diversity, int64_t eos, double length_penalty) {
  constexpr const char* kOp = "beam_advance";
  require(beam <= kMaxBeam, kOp, ": beam must be at most ", kMaxBeam, " on a GPU, is ", beam);
  const auto contiguous = [&](const char* name, const Tensor& x) {
    require(x.is_contiguous(), kOp, ": ", name, " must be contiguous");
  };
  contiguous("candidate_scores", candidate_scores);
  contiguous("candidate_tokens", candidate_tokens);
  contiguous("progress", progress);
  contiguous("sentences", sentences);
  contiguous("tokens", tokens);
  contiguous("scores", scores);
  contiguous("ancestry", ancestry);
  contiguous("past_tokens", past_tokens);
  contiguous("past_scores", past_scores);
  contiguous("hypothesis_tokens", hypothesis_tokens);
  contiguous("hypothesis_scores", hypothesis_scores);
  contiguous("lengths", lengths);
  contiguous("totals", totals);
  const int64_t slots = sentences.size(0), width = candidate_scores.size(1);
  const Advance params{candidate_scores.const_data_ptr<float>(),
                       candidate_tokens.const_data_ptr<int>(),
                       progress.mutable_data_ptr<int>(),
                       sentences.mutable_data_ptr<int>(),
                       tokens.mutable_data_ptr<int>(),
                       ancestry.mutable_data_ptr<int>(),
                       past_tokens.mutable_data_ptr<int>(),
                       hypothesis_tokens.mutable_data_ptr<int>(),
                       lengths.mutable_data_ptr<int>(),
                       scores.mutable_data_ptr<float>(),
                       past_scores.mutable_data_ptr<float>(),
                       hypothesis_scores.mutable_data_ptr<float>(),
                       totals.mutable_data_ptr<float>(),
                       ancestry.size(1),
                       static_cast<int>(slots),
                       static_cast<int>(beam),
                       static_cast<int>(width),
                       static_cast<int>(groups),
                       static_cast<int>(eos),
                       static_cast<float>(diversity),
                       length_penalty};
  const int32_t device = progress.get_device();
  const torch::stable::accelerator::DeviceGuard guard(device);
  const size_t shared = beam * width * (sizeof(float) + sizeof(int));
  cudaFuncSetAttribute(beam_advance_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                       static_cast<int>(shared));
  launch_early(kOp, beam_advance_kernel, dim3(std::max<int64_t>(1, slots)), dim3(kThreads), shared,
               current_stream(device), params);
}

STABLE_TORCH_LIBRARY_IMPL(lightseq, CUDA, m) { m.impl("beam_advance", TORCH_BOX(&beam_advance)); }

}  // namespace
}  // namespace lightseq
