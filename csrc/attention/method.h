// Which kernels compute a batch of attention; this depends on nothing else.
#pragma once

#include <algorithm>
#include <climits>
#include <cstdint>

namespace lightseq::attention {

enum class Method {
  kShort,  // any type and GPU, quick for short sentences
  kWgmma,  // 16 bits, compute capability 9.0
  kMma,    // 16 bits, other GPUs
  kTf32,   // float32, backward, heads of up to 64 columns
};

// What the choice depends on. A batch has `sentences` sentences, empty ones included.
struct Batch {
  bool is_float;   // otherwise 16 bits
  bool has_wgmma;  // of the GPU
  bool backward, causal;
  int64_t width, rows_q, rows_k, sentences;
  int64_t longest;  // no sentence has more queries or more keys
  bool is_empty;    // no queries or no keys
};

struct Choice {
  Method of_long;     // computes the sentences with more queries or more keys than most_of_short
  int most_of_short;  // kShort computes the others; INT_MAX if it computes all
};

constexpr int64_t kMostLong = 4096;  // maximum number of long sentences in a batch

// How many sentences of a batch are long, at most.
constexpr int64_t most_long(int64_t sentences, int64_t rows_q, int64_t rows_k, int most_of_short) {
  const int64_t least = static_cast<int64_t>(most_of_short) + 1;
  return std::min(sentences, rows_q / least + rows_k / least);
}

// kWgmma computes all sentences, or those of more than 64 tokens, if a sentence has so many tokens
// on average. Measured: lab notebook, "attention: all sentences of a batch by the kernels for long
// ones".
constexpr int64_t kAverageOfAll = 104, kAverageOfAllWide = 72, kAverageOf64 = 48;

constexpr int most_of_short_beside_wgmma(const Batch& b) {
  const bool is_wide = b.width > 64;
  const int64_t tokens = (b.rows_q + b.rows_k) / 2;
  const auto have = [&](int64_t average) { return tokens >= average * b.sentences; };
  if (have(is_wide ? kAverageOfAllWide : kAverageOfAll) && b.sentences <= kMostLong) return 0;
  // In backward, kShort has tiles of 128 rows for heads of up to 64 columns, but of 64 for others.
  return is_wide || (have(kAverageOf64) && !b.causal) ? 64 : 128;
}

constexpr Choice choose(const Batch& b) {
  constexpr Choice kAllShort{Method::kShort, INT_MAX};
  const Method method = b.is_float ? Method::kTf32 : b.has_wgmma ? Method::kWgmma : Method::kMma;
  if (method == Method::kTf32 && !(b.backward && b.width <= 64)) return kAllShort;
  const int most = method == Method::kWgmma ? most_of_short_beside_wgmma(b) : 128;
  const bool has_long = b.longest > most && !b.is_empty &&
                        most_long(b.sentences, b.rows_q, b.rows_k, most) <= kMostLong;
  return has_long ? Choice{method, most} : kAllShort;
}

}  // namespace lightseq::attention
