// Eight adjacent columns of a row. One call of Philox generates their dropout bits, and a thread of
// a row-wise kernel processes them together. 16 bytes of a 16-bit type, 32 bytes of float.
#pragma once

#include "common/philox.cuh"
#include "common/ptx/async_copy.cuh"
#include "common/vec.cuh"

namespace lightseq {

// Packed as in memory: eight 16-bit numbers of a load in flight occupy four registers, not eight.
template <typename T>
struct Columns {
  using Number = T;
  static constexpr int kWords = kColumnsPerDraw * sizeof(T) / sizeof(uint32_t);
  uint32_t words[kWords];

  // For data that is read again soon, such as a bias. In assembly, so that nvcc loads it again
  // instead of keeping it in registers.
  __device__ __forceinline__ void load(const T* address) {
#pragma unroll
    for (int i = 0; i < kWords; i += 4) {
      uint4 four;
      asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(four.x), "=r"(four.y), "=r"(four.z), "=r"(four.w)
                   : "l"(reinterpret_cast<const uint32_t*>(address) + i));
      set(i, four);
    }
  }

  // Bypasses L1: for data that no kernel reads again soon.
  __device__ __forceinline__ void load_cg(const T* address) {
#pragma unroll
    for (int i = 0; i < kWords; i += 4) {
      set(i, __ldcg(reinterpret_cast<const uint4*>(address) + i / 4));
    }
  }

  // volatile: must not move before the instructions that wait for a copy to shared memory.
  __device__ __forceinline__ void load_shared(uint32_t address) {
#pragma unroll
    for (int i = 0; i < kWords; i += 4) {
      uint4 four;
      asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(four.x), "=r"(four.y), "=r"(four.z), "=r"(four.w)
                   : "r"(address + i * static_cast<int>(sizeof(uint32_t))));
      set(i, four);
    }
  }
  __device__ __forceinline__ void load_shared(const T* address) {
    load_shared(shared_address(address));
  }

  // In assembly, because nvcc compiles a plain assignment to four stores here.
  __device__ __forceinline__ void store(T* address) const {
#pragma unroll
    for (int i = 0; i < kWords; i += 4) {
      asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(
                       reinterpret_cast<uint32_t*>(address) + i),
                   "r"(words[i]), "r"(words[i + 1]), "r"(words[i + 2]), "r"(words[i + 3])
                   : "memory");
    }
  }

  __device__ __forceinline__ void unpack(float (&x)[kColumnsPerDraw]) const {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      if constexpr (sizeof(T) == sizeof(float)) {
        x[i] = __uint_as_float(words[i]);
      } else {
        const float2 pair = unpack_pair<T>(words[i]);
        x[2 * i] = pair.x;
        x[2 * i + 1] = pair.y;
      }
    }
  }

  __device__ __forceinline__ void pack(const float (&x)[kColumnsPerDraw]) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      if constexpr (sizeof(T) == sizeof(float)) {
        words[i] = __float_as_uint(x[i]);
      } else {
        words[i] = pack_pair<T>(x[2 * i], x[2 * i + 1]);
      }
    }
  }

 private:
  __device__ __forceinline__ void set(int i, const uint4& four) {
    words[i] = four.x;
    words[i + 1] = four.y;
    words[i + 2] = four.z;
    words[i + 3] = four.w;
  }
};

// A kernel's copy of rng in registers: through the pointer it would be loaded again after every
// store. Zeros if nothing is dropped.
struct Rng {
  int64_t numbers[2] = {};
  Rng() = default;
  __device__ __forceinline__ explicit Rng(const int64_t* rng) : numbers{rng[0], rng[1]} {}
};

constexpr uint32_t kKeepAll = 0xffu;

// Dropout's factors of columns in forward and backward: 0 or 1 / (1 - p). A kernel generates the
// bits while it waits for memory, and applies them when the data has arrived.
struct DropoutFactors {
  Dropout dropout;
  float scale;  // 1 / (1 - p)

  DropoutFactors(const int64_t* rng, int64_t site, double p)
      : dropout{rng, static_cast<uint32_t>(site), Dropout::threshold_of(p)},
        scale(static_cast<float>(1.0 / (1.0 - p))) {}

  // Whether bits must be generated; otherwise use kKeepAll.
  __host__ __device__ __forceinline__ bool drops() const { return dropout.threshold > 0; }

  __device__ __forceinline__ uint32_t draw(const Rng& rng, int64_t row, int64_t group) const {
    return keep_bits({rng.numbers, dropout.site, dropout.threshold}, row, group);
  }

  // Multiply, do not select: a NaN must propagate even if its element is dropped.
  __device__ __forceinline__ void apply(uint32_t keep, float (&x)[kColumnsPerDraw]) const {
#pragma unroll
    for (int e = 0; e < kColumnsPerDraw; ++e) x[e] *= keep >> e & 1u ? scale : 0.0f;
  }
};

}  // namespace lightseq
