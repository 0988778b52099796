// Beam search, second step: merges the candidates of a sentence's hypotheses, stores those that end
// as results, and continues with the best others. ops/beam_advance.py explains the buffers and the
// rules.
//
//   bytes moved   the candidates; the ancestry, 4 bytes per position and hypothesis, read and
//                 rarely written; 16 bytes per position of each hypothesis that ends
//   determinism   the order of candidates has no ties, so no result depends on the order of
//                 execution
//
// A block processes a slot (the hypotheses of a sentence). The rank of a candidate is the number of
// better ones, which a few threads count in shared memory. Diverse beam search does this for one
// group of hypotheses after the other. The time is mostly latency, so the block prefetches
// everything except the candidates before it waits for the previous kernel, which computes the
// candidates.
//
// Slots may be at different steps: a sentence that begins in a slot begins at its own first step.
//
// The last block to finish counts the step and reports it to the host: it writes the count to
// pinned memory after a fence. A slot whose sentence has ended has written the count there, too. If
// the host sees the report of a step, all results of this step are complete.

#include <algorithm>
#include <cmath>
#include <cstdint>

#include "common/check.h"
#include "common/launch.cuh"
#include "common/prefetch.cuh"
#include "search/beam_search.cuh"

namespace lightseq {
namespace {

using namespace beam_search;

constexpr int kThreads = 256;
constexpr int kMaxBeam = 64;

// Indices into `progress`, int32 on the device (ops/beam_advance.py: Progress).
enum : int { kCount = 0, kScratch = 1 };

// When a sentence has ended (ops/beam_advance.py: Stopping).
enum : int { kFirst = 0, kFull = 1, kCurrent = 2, kLongest = 3 };

struct Advance {
  const float* candidate_scores;
  const int* candidate_tokens;
  int* progress;
  int* sentences;
  const int* last_steps;
  int *steps, *places, *tokens, *ancestry, *past_tokens, *hypothesis_tokens, *lengths;
  float *scores, *past_scores, *hypothesis_scores, *totals;
  int* reports;         // pinned host memory
  int64_t memory_rows;  // stride between positions: R of ops/beam_advance.py
  int positions, columns, slots, beam, width, groups, eos, stopping, prompt;
  float diversity;
  double length_penalty;
};

// State of a block, in shared memory. The candidates are there, too: scores [beam, width], then
// tokens [beam, width].
struct Slot {
  int step, last_step, place, sentence, first_row;
  int count;                                      // number of merged candidates; in order, their:
  float score[2 * kMaxBeam];                      // scores
  int token[2 * kMaxBeam], parent[2 * kMaxBeam];  // tokens, and rows of their parents
  int parents[kMaxBeam];                          // parents of the hypotheses that continue
  int ending[kMaxBeam], column[kMaxBeam];         // merged candidates that become results, where
  float divisor;                                  // of results of this step
  bool ended;                                     // whether the sentence has ended
  // Only with transformers' rules:
  float total[kMaxBeam];  // of the sentence's results; -inf: none
  int kept;               // number of candidates that become results
  bool finished;          // whether it has ended before its last step
};

// A score is divided by it for the total of a hypothesis of that length, without its prompt.
__device__ __forceinline__ float divisor(const Advance& p, int length) {
  return static_cast<float>(pow(static_cast<double>(length - p.prompt), p.length_penalty));
}

// The number of candidates of a group that are better than candidate `mine` of row `row`. Ties: the
// lowest row first, then the lowest token. `parts` adjacent threads, a power of two, split the
// work; all threads of the warp must call it. Ranks above `most` may be too low, but stay above
// `most`.
__device__ __forceinline__ int rank_of(const Advance& p, const float* scores, const int* tokens,
                                       int group, int row, int mine, int parts, int most) {
  const float score = scores[mine];
  const int token = tokens[mine], part = static_cast<int>(threadIdx.x) % parts;
  int rank = 0;
  for (int other = group; other < p.beam && rank <= most; other += p.groups) {
    for (int n = other * p.width + part; n < (other + 1) * p.width; n += parts) {
      const bool first = other == row ? tokens[n] < token : other < row;
      rank += scores[n] > score || (scores[n] == score && first);
    }
  }
  for (int offset = parts / 2; offset > 0; offset /= 2) {
    rank += __shfl_xor_sync(kAllLanes, rank, offset);
  }
  return rank;
}

// Writes the candidates of all groups to `slot`, in order. Ends with a barrier.
__device__ __forceinline__ void merge(const Advance& p, float* scores, int* tokens, Slot& slot) {
  const int candidates = p.beam * p.width;
  if (p.width == 1) {  // sampling: every hypothesis continues with its own candidate
    for (int i = threadIdx.x; i < p.beam; i += kThreads) {
      slot.score[i] = scores[i];
      slot.token[i] = tokens[i];
      slot.parent[i] = slot.first_row + i;
    }
    __syncthreads();
    return;
  }
  const int per_group = p.width / p.groups;
  int parts = 1;
  while (2 * parts <= kWarp && 2 * parts * candidates <= kThreads) parts *= 2;
  for (int group = 0; group < p.groups; ++group) {
    if (group > 0) {
      for (int i = threadIdx.x; i < candidates; i += kThreads) {
        if (i / p.width % p.groups != group) continue;
        int picked = 0;
        for (int n = 0; n < per_group * p.groups; ++n) {
          picked += n % p.groups < group && slot.token[n] == tokens[i];
        }
        scores[i] = __fsub_rn(scores[i], __fmul_rn(p.diversity, static_cast<float>(picked)));
      }
      __syncthreads();
    }
    for (int first = 0; first < candidates; first += kThreads / parts) {
      const int i = first + static_cast<int>(threadIdx.x) / parts;
      const int mine = min(i, candidates - 1), row = mine / p.width;
      const int rank = rank_of(p, scores, tokens, group, row, mine, parts, per_group);
      if (i > mine || row % p.groups != group || rank >= per_group) continue;
      const int place = rank * p.groups + group;  // groups alternate in the order
      slot.score[place] = scores[mine];
      slot.token[place] = tokens[mine];
      slot.parent[place] = slot.first_row + row;
    }
    __syncthreads();
  }
}

// transformers' rules, by one thread: of the results so far and the `count` candidates in
// slot.ending, best first, the `beam` best are the results. running: the best score that continues.
__device__ __forceinline__ void choose(const Advance& p, Slot& slot, int first_column, int count,
                                       float running) {
  const auto worst_result = [&] {
    int worst = 0;
    for (int i = 1; i < p.beam; ++i) worst = slot.total[i] < slot.total[worst] ? i : worst;
    return worst;
  };
  const int length = p.stopping == kLongest ? slot.last_step + 1 : slot.step + 1;
  const float now = divisor(p, slot.step + 1), best = running / divisor(p, length);
  int worst = worst_result(), kept = 0;
  for (; kept < count; ++kept) {  // a candidate replaces the worst result if it is better
    const float total = slot.score[slot.ending[kept]] / now;
    if (!(total > slot.total[worst])) break;
    slot.total[worst] = total;
    slot.column[kept] = first_column + worst;
    worst = worst_result();
  }
  slot.kept = kept;
  slot.finished =
      slot.total[worst] > -INFINITY && (p.stopping == kFull || !(best > slot.total[worst]));
}

// Stores the first `count` candidates of slot.ending as results.
// Position p of a result is the token of position p + 1 of the hypothesis.
__device__ __forceinline__ void keep(const Advance& p, const Slot& slot, int count) {
  const int last = slot.place, length = last + 1;
  for (int i = threadIdx.x; i < count * length; i += kThreads) {
    const int number = i / length, position = i - number * length;
    const int ending = slot.ending[number], parent = slot.parent[ending];
    const int column = slot.column[number];
    const int64_t to = static_cast<int64_t>(column) * p.positions + position;
    if (position == last) {
      const float score = slot.score[ending];
      p.hypothesis_tokens[to] = p.eos;
      p.hypothesis_scores[to] = score;
      p.lengths[column] = length;
      p.totals[column] = score / slot.divisor;
      continue;
    }
    const int64_t next = (position + 1) * p.memory_rows;
    const int64_t from = next + (position + 1 < last ? p.ancestry[next + parent] : parent);
    p.hypothesis_tokens[to] = p.past_tokens[from];
    p.hypothesis_scores[to] = p.past_scores[from];
  }
}

// Copies the ancestors of the parents to the rows of the children. A thread has one hypothesis and
// iterates over positions. It writes only if the ancestor changes, which is rare.
__device__ __forceinline__ void inherit(const Advance& p, const Slot& slot) {
  const int at_once = kThreads / p.beam;
  const int place = static_cast<int>(threadIdx.x) / p.beam;
  const int child = static_cast<int>(threadIdx.x) - place * p.beam;
  const int own = slot.first_row + child, parent = slot.parents[child];
  for (int first = 0; first < slot.place; first += at_once) {
    const int position = first + place;
    const bool works = position < min(slot.place, first + at_once);
    int* const row = p.ancestry + position * p.memory_rows;
    const int ancestor = works ? row[parent] : 0, before = works ? row[own] : 0;
    __syncthreads();  // all ancestors of these positions have been read
    if (works && ancestor != before) row[own] = ancestor;
  }
}

// Prefetches all data that the step reads, except the candidates.
__device__ __forceinline__ void prefetch_slot(const Advance& p) {
  const int first_row = static_cast<int>(blockIdx.x) * p.beam;
  const int thread = threadIdx.x, place = thread / p.beam, child = thread - place * p.beam;
  if (place == 0) {
    prefetch(p.tokens + first_row + child);
    prefetch(p.scores + first_row + child);
    const int64_t sentence = peek(p.sentences + blockIdx.x);
    const int64_t column = sentence * p.beam + child;
    if (sentence >= 0 && column < p.columns) prefetch(p.lengths + column);
  }
  if (place < min(peek(p.places + first_row), p.positions)) {
    prefetch(p.ancestry + place * p.memory_rows + first_row + child);
  }
}

// Called when the block has written all its results; ended: its sentence has ended. The last block
// counts the step and reports it. The fences order all results before the report: one thread's
// fence holds for its block, because it comes after a barrier; the last block's fence holds for all
// blocks, because it comes after their increments of the counter.
__device__ __forceinline__ void finish(const Advance& p, bool ended) {
  __syncthreads();
  if (threadIdx.x != 0) return;
  // Only the last block changes the count, after all blocks have read it.
  const int count = *static_cast<volatile int*>(p.progress + kCount) + 1;
  if (ended) {
    static_cast<volatile int*>(p.reports)[1 + blockIdx.x] = count;
    __threadfence_system();
  }
  __threadfence();
  if (atomicAdd(&p.progress[kScratch], 1) != static_cast<int>(gridDim.x) - 1) return;
  p.progress[kScratch] = 0;
  p.progress[kCount] = count;
  __threadfence_system();
  *static_cast<volatile int*>(p.reports) = count;
}

__global__ void __launch_bounds__(kThreads) beam_advance_kernel(const Advance p) {
  extern __shared__ float scores[];
  __shared__ Slot slot;
  int* const tokens = reinterpret_cast<int*>(scores + p.beam * p.width);
  const int thread = threadIdx.x, number = blockIdx.x;
  const bool exists = number < p.slots;  // without slots, there is still one block
  if (exists) prefetch_slot(p);
  griddepcontrol_wait();

  // All reads are in flight together. One thread reads the scalars, and passes them to the others
  // in `slot`.
  const int first_row = number * p.beam;
  const bool hypothesis = exists && thread < p.beam;
  const int token = hypothesis ? p.tokens[first_row + thread] : 0;
  const float score = hypothesis ? p.scores[first_row + thread] : 0.0f;
  if (thread == 0) {
    slot.first_row = first_row;
    slot.count = p.width == 1 ? p.beam : p.width;
    slot.step = exists ? p.steps[first_row] : 0;
    slot.place = exists ? p.places[first_row] : 0;
    slot.last_step = exists ? p.last_steps[first_row] : 0;
    slot.sentence = exists ? p.sentences[number] : -1;
  }
  const int64_t offset = static_cast<int64_t>(first_row) * p.width;
  for (int i = thread; exists && i < p.beam * p.width; i += kThreads) {
    scores[i] = p.candidate_scores[offset + i];
    tokens[i] = p.candidate_tokens[offset + i];
    // With transformers' rules the last eos is forced, and adds nothing to a score.
    if (p.stopping != kFirst && tokens[i] == p.eos && scores[i] > -INFINITY &&
        p.steps[first_row] >= p.last_steps[first_row]) {
      scores[i] = p.scores[first_row + i / p.width];
    }
  }
  griddepcontrol_launch_dependents();
  __syncthreads();
  const int step = slot.step;
  if (slot.sentence < 0) return finish(p, false);
  const int first_column = slot.sentence * p.beam;
  const int length = hypothesis ? p.lengths[first_column + thread] : 0;
  const int64_t now = slot.place * p.memory_rows;
  if (hypothesis) {
    p.past_tokens[now + first_row + thread] = token;
    p.past_scores[now + first_row + thread] = score;
    if (p.stopping != kFirst) {
      slot.total[thread] = length > 0 ? p.totals[first_column + thread] : -INFINITY;
    }
  }
  merge(p, scores, tokens, slot);
  const int columns = __syncthreads_count(length > 0);  // number of results of earlier steps

  // A candidate with eos becomes a result if it is among the first `beam` and the sentence has
  // fewer than `beam` results; or by transformers' rules. The best candidates without eos continue.
  // With sampling, those with eos follow them and continue as dead rows, with score -inf.
  const auto ends = [&](int i) { return slot.token[i] == p.eos && slot.score[i] > -INFINITY; };
  const int room = p.stopping == kFirst ? p.beam - columns : p.beam;
  int ended_before = 0, ended = 0, results = 0;
  float running = -INFINITY;  // the best score that continues
  for (int i = 0; i < slot.count; ++i) {
    const bool end = ends(i);
    if (end && i < p.beam && results < room) {
      if (thread == 0) {
        slot.ending[results] = i;
        slot.column[results] = first_column + columns + results;
      }
      ++results;
    }
    if (!end && ended == i) running = slot.score[i];
    ended += end;
    ended_before += end && i < thread;
  }
  bool finished = results == room;
  if (p.stopping != kFirst) {
    if (thread == 0) choose(p, slot, first_column, results, running);
    __syncthreads();
    results = slot.kept;
    finished = slot.finished;
  }
  finished |= step >= slot.last_step;
  if (thread < slot.count) {
    const bool end = ends(thread);
    const int child = end ? slot.count - ended + ended_before : thread - ended_before;
    if (child < p.beam) {
      const int parent = slot.parent[thread];
      slot.parents[child] = parent;
      p.tokens[first_row + child] = slot.token[thread];
      p.scores[first_row + child] = finished || end ? -INFINITY : slot.score[thread];
      p.ancestry[now + first_row + child] = parent;
    }
  }
  // A sentence that has ended stays at its last step, for which there is a position.
  if (hypothesis && !finished) {
    p.steps[first_row + thread] = step + 1;
    p.places[first_row + thread] = slot.place + 1;
  }
  if (thread == 0) {
    slot.ended = finished;
    if (results > 0) slot.divisor = divisor(p, step + 1);
    if (finished) p.sentences[number] = -1;
  }
  __syncthreads();
  keep(p, slot, results);
  __syncthreads();  // ancestors have been read
  inherit(p, slot);
  finish(p, slot.ended);
}

// The device address of the reports, which are in host memory.
int* reports_of(const char* op, const Tensor& reports) {
  cudaPointerAttributes memory{};
  const cudaError_t error = cudaPointerGetAttributes(&memory, reports.mutable_data_ptr());
  require(error == cudaSuccess, op, ": reports: ", cudaGetErrorString(error));
  require(memory.type == cudaMemoryTypeHost && memory.devicePointer != nullptr, op,
          ": reports must be in pinned memory of the CPU");
  return static_cast<int*>(memory.devicePointer);
}

void beam_advance(const Tensor& candidate_scores, const Tensor& candidate_tokens,
                  const Tensor& last_steps, Tensor progress, Tensor sentences, Tensor steps,
                  Tensor places, Tensor tokens, Tensor scores, Tensor ancestry, Tensor past_tokens,
                  Tensor past_scores, Tensor hypothesis_tokens, Tensor hypothesis_scores,
                  Tensor lengths, Tensor totals, Tensor reports, int64_t beam, int64_t groups,
                  double diversity, int64_t eos, double length_penalty, int64_t stopping,
                  int64_t prompt) {
  constexpr const char* kOp = "beam_advance";
  require(beam <= kMaxBeam, kOp, ": beam must be at most ", kMaxBeam, " on a GPU, got ", beam);
  const auto contiguous = [&](const char* name, const Tensor& x) -> const Tensor& {
    require(x.is_contiguous(), kOp, ": ", name, " must be contiguous");
    return x;
  };
  const auto ints = [&](const char* name, const Tensor& x) {
    return contiguous(name, x).mutable_data_ptr<int>();
  };
  const auto floats = [&](const char* name, const Tensor& x) {
    return contiguous(name, x).mutable_data_ptr<float>();
  };
  const int64_t slots = sentences.size(0), width = candidate_scores.size(1);
  const Advance params{.candidate_scores = floats("candidate_scores", candidate_scores),
                       .candidate_tokens = ints("candidate_tokens", candidate_tokens),
                       .progress = ints("progress", progress),
                       .sentences = ints("sentences", sentences),
                       .last_steps = ints("last_steps", last_steps),
                       .steps = ints("steps", steps),
                       .places = ints("places", places),
                       .tokens = ints("tokens", tokens),
                       .ancestry = ints("ancestry", ancestry),
                       .past_tokens = ints("past_tokens", past_tokens),
                       .hypothesis_tokens = ints("hypothesis_tokens", hypothesis_tokens),
                       .lengths = ints("lengths", lengths),
                       .scores = floats("scores", scores),
                       .past_scores = floats("past_scores", past_scores),
                       .hypothesis_scores = floats("hypothesis_scores", hypothesis_scores),
                       .totals = floats("totals", totals),
                       .reports = reports_of(kOp, contiguous("reports", reports)),
                       .memory_rows = ancestry.size(1),
                       .positions = static_cast<int>(ancestry.size(0)),
                       .columns = static_cast<int>(lengths.size(0)),
                       .slots = static_cast<int>(slots),
                       .beam = static_cast<int>(beam),
                       .width = static_cast<int>(width),
                       .groups = static_cast<int>(groups),
                       .eos = static_cast<int>(eos),
                       .stopping = static_cast<int>(stopping),
                       .prompt = static_cast<int>(prompt),
                       .diversity = static_cast<float>(diversity),
                       .length_penalty = length_penalty};
  const DeviceGuard guard(progress.get_device());
  launch({.op = kOp,
          .grid = dim3(std::max<int64_t>(1, slots)),
          .block = kThreads,
          .shared = beam * width * (sizeof(float) + sizeof(int)),
          .dependent = true},
         beam_advance_kernel, params);
}

STABLE_TORCH_LIBRARY_IMPL(lightseq, CUDA, m) { m.impl("beam_advance", TORCH_BOX(&beam_advance)); }

}  // namespace
}  // namespace lightseq
