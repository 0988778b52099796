// The random bits of dropout: Philox-4x32 with 7 rounds (Salmon, Moraes, Dror, Shaw: "Parallel
// random numbers: as easy as 1, 2, 3", SC 2011). ops/philox.py draws the same bits in torch.
//
// Nothing is stored between forward and backward. A bit is a pure function of where it is used:
//
//   key      (seed low, seed high)                             32 bits each
//   counter  (column / 8, row, site, micro-batch)              32 bits each
//
// `site` numbers the dropouts in the model; `row` and `column` are the coordinates of the element,
// not of the thread. So tiling, fusion and packing can change without changing any bit. One call
// gives 128 bits = eight 16-bit numbers, one per column of the group, low half of each word first.
// With 16 bits the drop rate is exact to 2^-17, a difference that no run can show.
//
// Attention probabilities have many more columns, and their bits are drawn by forward and backward.
// There a call gives 16 decisions, by numbers of 8 bits:
//
//   counter  (2w and 2w + 1, row, site, micro-batch)           for the columns 32w ... 32w + 31
//
// Bit c of the eight words is the number of column 32w + c, lowest bit first. So eight instructions
// compare 32 numbers with the threshold. The threshold 256 p is rounded up or down by a number that
// is drawn once for (seed, micro-batch, site); so the drop rate is p on average.
//
// The functions also compile for the host, which is how the tests check them without a GPU.
#pragma once

#include <vector_types.h>

#include <cmath>
#include <cstdint>

namespace lightseq {

constexpr int kPhiloxRounds = 7;
constexpr int kColumnsPerDraw = 8;

// Upper half of a product. ptxas fuses __umulhi() and the lower half into one instruction; a 64-bit
// product with a constant takes two.
__host__ __device__ __forceinline__ uint32_t multiply_high(uint32_t a, uint32_t b) {
#ifdef __CUDA_ARCH__
  return __umulhi(a, b);
#else
  return static_cast<uint32_t>(uint64_t{a} * b >> 32);
#endif
}

__host__ __device__ __forceinline__ uint4 philox_round(uint4 counter, uint2 key) {
  constexpr uint32_t kEven = 0xD2511F53u, kOdd = 0xCD9E8D57u;
  return {multiply_high(kOdd, counter.z) ^ counter.y ^ key.x, kOdd * counter.z,
          multiply_high(kEven, counter.x) ^ counter.w ^ key.y, kEven * counter.x};
}

// The key of the next round.
__host__ __device__ __forceinline__ uint2 next_key(uint2 key) {
  return {key.x + 0x9E3779B9u, key.y + 0xBB67AE85u};
}

__host__ __device__ __forceinline__ uint4 philox4x32(uint4 counter, uint2 key) {
#pragma unroll
  for (int round = 0; round < kPhiloxRounds; ++round) {
    counter = philox_round(counter, key);
    key = next_key(key);
  }
  return counter;
}

// Parameters of one dropout in the model for one micro-batch, passed to a kernel by value.
struct Dropout {
  const int64_t* rng;  // device memory: (seed, micro-batch), read by the kernel so that each replay
                       // of a captured graph generates new bits
  uint32_t site;
  uint32_t threshold;  // a column is kept where its 16 bits are >= threshold

  // Rounds half to even, as Python does. At most 65535, so that the largest number is always kept.
  static uint32_t threshold_of(double p) {
    return static_cast<uint32_t>(std::fmin(std::nearbyint(p * 65536.0), 65535.0));
  }
};

// Bit e of the result is set when column 8 * group + e of the row is kept.
__host__ __device__ __forceinline__ uint32_t keep_bits(const Dropout& dropout, int64_t row,
                                                       int64_t group) {
  const uint64_t seed = static_cast<uint64_t>(dropout.rng[0]);
  const uint4 words = philox4x32({static_cast<uint32_t>(group), static_cast<uint32_t>(row),
                                  dropout.site, static_cast<uint32_t>(dropout.rng[1])},
                                 {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)});
  const uint32_t word[4] = {words.x, words.y, words.z, words.w};
  const uint32_t high = dropout.threshold << 16;  // saves the shift of every word
  uint32_t bits = 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    bits |= static_cast<uint32_t>((word[i] & 0xffffu) >= dropout.threshold) << (2 * i);
    bits |= static_cast<uint32_t>(word[i] >= high) << (2 * i + 1);
  }
  return bits;
}

// Draws the decisions of attention's dropout. Made once by a thread: all its members depend only on
// the launch.
struct AttentionDropout {
  uint2 keys[kPhiloxRounds];
  uint32_t site, micro_batch;
  uint32_t least;  // a column is kept where its 8 bits are >= this; 256: none is

  AttentionDropout() = default;
  __host__ __device__ __forceinline__ explicit AttentionDropout(const Dropout& dropout)
      : site(dropout.site), micro_batch(static_cast<uint32_t>(dropout.rng[1])) {
    const uint64_t seed = static_cast<uint64_t>(dropout.rng[0]);
    keys[0] = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32)};
#pragma unroll
    for (int i = 1; i < kPhiloxRounds; ++i) keys[i] = next_key(keys[i - 1]);
    const uint32_t rounding = call(~0u, ~0u).x & 0xffu;
    least = (dropout.threshold + rounding) >> 8;
  }

  // Bit c of the result is set when column 32 * word + c of the row is kept.
  __host__ __device__ __forceinline__ uint32_t keep_word(uint32_t row, uint32_t word) const {
    const uint4 low = call(2 * word, row), high = call(2 * word + 1, row);
    const uint32_t bits[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    uint32_t below = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      // Where a number's bit differs from the threshold's, it decides; a higher bit decides later.
      const uint32_t zero = ~bits[i], of_least = 0u - (least >> i & 1u);
      below = (below & (zero | of_least)) | (zero & of_least);
    }
    return ~(below | (0u - (least >> 8)));
  }

 private:
  __host__ __device__ __forceinline__ uint4 call(uint32_t group, uint32_t row) const {
    uint4 counter = {group, row, site, micro_batch};
#pragma unroll
    for (int i = 0; i < kPhiloxRounds; ++i) counter = philox_round(counter, keys[i]);
    return counter;
  }
};

}  // namespace lightseq
