// The cast of attention's result to E4M3, in the kernels that compute it. Kernels that cast are
// variants of their own, so that the others have no code of it. fp8_cast.cuh has the rule.
//
// Numbers are cast as they are stored, rounded to bfloat16. So backward, which makes the transpose
// of the stored numbers, gets the same bytes.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>
#include <type_traits>

#include "common/columns.cuh"
#include "common/fp8_cast.cuh"

namespace lightseq::attention {

// Calls function(whether the kernel casts): std::true_type if Cast::values is not null. Only
// bfloat16 is cast.
template <typename T, typename Function>
void dispatch_cast(const Cast& cast, Function&& function) {
  constexpr bool kMayCast = std::is_same_v<T, __nv_bfloat16>;
  if (kMayCast && cast.values != nullptr) {
    function(std::bool_constant<kMayCast>{});
  } else {
    function(std::false_type{});
  }
}

// What a thread casts of one head, from row `row` of the result on. Without kCasts, nothing.
template <bool kCasts>
class ResultCast {
 public:
  __device__ __forceinline__ ResultCast(const Cast& cast, int64_t row, int head, int width)
      : values_(cast.values), stride_(static_cast<int>(cast.columns)) {
    if constexpr (kCasts) {
      values_ += row * stride_ + head * width;
      inverse_ = 1.0f / *cast.scale;
    }
  }

  // numbers: adjacent numbers of the result, four or eight.
  template <typename Numbers>
  __device__ __forceinline__ void put(int row, int column, const Numbers& numbers) {
    if constexpr (kCasts) {
      constexpr int kWords = sizeof(Numbers) / sizeof(uint32_t);
      const auto& words = reinterpret_cast<const uint32_t (&)[kWords]>(numbers);
      float x[1][2 * kWords];
#pragma unroll
      for (int i = 0; i < kWords; ++i) {
        const float2 pair = unpack_pair<__nv_bfloat16>(words[i]);
        x[0][2 * i] = pair.x;
        x[0][2 * i + 1] = pair.y;
      }
      statistics_.note(x, inverse_, {true});
      uint8_t* const to = values_ + row * stride_ + column;
#pragma unroll
      for (int i = 0; i < kWords / 2; ++i) {
        const uint32_t low = pack_e4m3(x[0][4 * i] * inverse_, x[0][4 * i + 1] * inverse_);
        const uint32_t high = pack_e4m3(x[0][4 * i + 2] * inverse_, x[0][4 * i + 3] * inverse_);
        reinterpret_cast<uint32_t*>(to)[i] = low | high << 16;
      }
    }
  }

  // All lanes of a warp call it at the end.
  template <int kWarps>
  __device__ __forceinline__ void add_to(BlockStatistics<kWarps>& statistics) const {
    if constexpr (kCasts) statistics.add(statistics_);
  }

 private:
  uint8_t* values_;
  int stride_;
  float inverse_ = 1.0f;
  CastStatistics statistics_ = {};
};

}  // namespace lightseq::attention
