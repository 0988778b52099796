// Which keys a query sees, by their positions in the sentence: all, or those of a causal mask, of a
// window or of both.
#pragma once

namespace lightseq::attention {

// Positions begin ... end - 1 of a sentence; or none.
struct Range {
  int begin, end;

  __device__ __forceinline__ Range within(int length) const {
    return {max(begin, 0), min(end, length)};
  }
  // Whether it has all positions of another one.
  __device__ __forceinline__ bool has(const Range& other) const {
    return begin <= other.begin && other.end <= end;
  }
};

// A query sees the keys from `before` positions before it to `after` positions after it.
struct Band {
  static constexpr int kAll = 1 << 29;  // more positions than a sentence has
  int before, after;

  // The same band; a kernel without windows has no code for them, since `before` is constant.
  template <bool kWindow>
  __device__ __forceinline__ Band known() const {
    return {kWindow ? before : kAll, after};
  }
  // Whether every query sees all keys.
  __device__ __forceinline__ bool is_all() const { return min(before, after) == kAll; }
  // The queries by which a key is seen, as a band.
  __device__ __forceinline__ Band of_keys() const { return {after, before}; }
  __device__ __forceinline__ bool sees(int query, int key) const {
    return (before == kAll || query - before <= key) && key <= query + after;
  }
  // The keys that one of `count` queries sees, from number `first` on; those that all of them see.
  __device__ __forceinline__ Range seen(int first, int count) const {
    return {first - before, first + count + after};
  }
  __device__ __forceinline__ Range seen_by_all(int first, int count) const {
    return {first + count - 1 - before, first + 1 + after};
  }
};

}  // namespace lightseq::attention
