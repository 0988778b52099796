// The work list of the kernels for long sentences (method.h), and code that they share.
//
// The work is divided into items: in forward a tile of 128 queries of a head, in backward a block
// of 64 or 128 keys of a head. A small kernel lists the items of a batch on the device, so the host
// need not know the lengths. As many blocks as are resident take items from the list in its order.
#pragma once

#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>

#include "attention/method.h"
#include "attention/tiles.cuh"
#include "common/device.h"
#include "common/fp8_cast.cuh"

namespace lightseq::attention {

constexpr int kTile = 128;  // queries of an item

// A tile of queries or a block of keys, without its head.
struct alignas(16) Item {
  int first_q, length_q, first_k, length_k;  // the sentence
  int start;                                 // of the tile or block, in the sentence
  int unit;          // first unit of 64 queries of the sentence; sentences have different units
  int head, unused;  // head: of an item that was taken from the list (Claims)
};

struct ItemList {
  const Item* items;
  int* counts;  // how many items there are, and how many have been taken

  __device__ __forceinline__ Item load(int i) const {
    const int4* const at = reinterpret_cast<const int4*>(items + i);
    const int4 a = __ldg(at), b = __ldg(at + 1);
    return {a.x, a.y, a.z, a.w, b.x, b.y, -1, 0};
  }
};

__device__ __forceinline__ int tiles_of(int rows) { return (rows + kTile - 1) / kTile; }

// Makes the list of a pass. block_keys: keys of an item in backward; 0 in forward. interleaved:
// whether items of sentences with little work alternate. memory: keeps the list alive, and must
// outlive the kernel that reads it.
ItemList list_items(const Call& a, int block_keys, bool interleaved, Tensor& memory,
                    cudaStream_t stream);

inline int64_t most_long(const Call& a) {
  return most_long(a.sentences(), a.q.size(0), a.k.size(0), a.most_of_short);
}

// Number of units of 64 queries in a list, at most.
inline int64_t most_units(const Call& a) { return 2 * (a.q.size(0) / kTile + most_long(a)); }

// Distributes the bits of a row's 128 keys of a tile to the four lanes of a quad. `word` of lane c
// has the bits of keys 32 c ... 32 c + 31, in order. The result of lane c has the keys whose scores
// the lane has: bit 8 b + 2 k + e is key 32 k + 8 b + 2 c + e.
__device__ __forceinline__ uint32_t bits_of_lane(uint32_t word) {
  const int c = threadIdx.x % 4;
  uint32_t bits = 0;
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    const uint32_t other = __shfl_sync(kAllLanes, word, k, 4);
    bits |= __funnelshift_l(other, other, 2 * (k - c)) & (0x03030303u << (2 * k));
  }
  return bits;
}

// A warp's 32 x 32 bits: bit b of lane l becomes bit l of lane b.
__device__ __forceinline__ uint32_t transpose_bits(uint32_t x) {
  const int lane = threadIdx.x % kWarp;
#pragma unroll
  for (int s = 16; s > 0; s /= 2) {
    const uint32_t low = 0xffffffffu / ((1u << s) + 1);  // s zeros and s ones in turn
    const uint32_t y = __shfl_xor_sync(kAllLanes, x, s);
    x = lane & s ? (x & ~low) | ((y & ~low) >> s) : (x & low) | ((y & low) << s);
  }
  return x;
}

// All bits set if the highest bit of byte number `byte` of `bits` is set, otherwise none; `byte` is
// a constant. A thread has too few predicate registers to use predicates instead of masks: ptxas
// would pack the others into registers, bit by bit.
__device__ __forceinline__ uint32_t mask_of_bit(uint32_t bits, int byte) {
  uint32_t mask;
  asm("prmt.b32 %0, %1, %1, %2;" : "=r"(mask) : "r"(bits), "r"((8 + byte) * 0x1111));
  return mask;
}

// A mask for a pair of 16-bit numbers: bits of `low` for the lower half, of `high` for the upper.
__device__ __forceinline__ uint32_t mask_of_bits(uint32_t low, uint32_t high, int byte) {
  uint32_t mask;
  asm("prmt.b32 %0, %1, %2, %3;"
      : "=r"(mask)
      : "r"(low), "r"(high), "r"((8 + byte) * 0x11 + (12 + byte) * 0x1100));
  return mask;
}

// Writes a warp's 16 rows of sums, multiplied by `low` (rows r) and `high` (rows r + 8); 32 bytes
// of a row at a time. to: column 0 of row lane / 4; row_stride in numbers. rows: how many rows
// exist from row lane / 4 on; columns: how many columns exist.
template <typename T, int kCount>
__device__ __forceinline__ void store_sums(T* to, int64_t row_stride, int rows, int columns,
                                           const float (&sums)[kCount], float low, float high) {
  const int c = threadIdx.x % 4, first = c % 2 * 8 + c / 2 * 4;
#pragma unroll
  for (int i = 0; i < kCount / 4; i += 2) {
    const uint32_t w0 = pack_pair<T>(sums[4 * i] * low, sums[4 * i + 1] * low);
    const uint32_t w1 = pack_pair<T>(sums[4 * i + 2] * high, sums[4 * i + 3] * high);
    const uint32_t w2 = pack_pair<T>(sums[4 * i + 4] * low, sums[4 * i + 5] * low);
    const uint32_t w3 = pack_pair<T>(sums[4 * i + 6] * high, sums[4 * i + 7] * high);
    const uint32_t other0 = __shfl_xor_sync(kAllLanes, c % 2 ? w0 : w2, 1);
    const uint32_t other1 = __shfl_xor_sync(kAllLanes, c % 2 ? w1 : w3, 1);
    const uint2 above = c % 2 ? uint2{other0, w2} : uint2{w0, other0};
    const uint2 below = c % 2 ? uint2{other1, w3} : uint2{w1, other1};
    const bool exists = first + 8 * i < columns;
    if (exists && rows > 0) *reinterpret_cast<uint2*>(to + first + 8 * i) = above;
    if (exists && rows > 8) {
      *reinterpret_cast<uint2*>(to + 8 * row_stride + first + 8 * i) = below;
    }
  }
}

__device__ __forceinline__ uint32_t load_acquire(const uint32_t* p) {
  uint32_t x;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(x) : "l"(p) : "memory");
  return x;
}

// Lets the next block add. One thread calls it, after a barrier with those that have added. It
// waits until their additions are complete.
__device__ __forceinline__ void pass_turn(uint32_t* passed) {
  asm volatile("fence.acq_rel.gpu;" ::: "memory");
  asm volatile("red.relaxed.gpu.global.add.u32 [%0], 1;" ::"l"(passed) : "memory");
}

// Backward's memory, which must outlive the kernel. A block has a turn to add to a part of dQ; each
// tile of queries has one part or several.
struct Workspace {
  Tensor of_queries, counters, parts;
  const float* lse;      // [H, Tq], times log2(e) in 16 bits
  const float* rowsum;   // [H, Tq]: D = (1 - p) rowsum(dO * O)
  const float* lse_low;  // [H, Tq]: the remainder that lse lacks; only in float32
  uint32_t* turns;       // [tiles of queries, H, parts]: how many blocks have added; zero at first
  float* sums;           // dQ: [tiles of queries, H, parts, numbers of a part]
};

// Allocates the workspace, computes lse, rowsum and lse_low, and zeroes the counters. parts: of a
// tile of queries of a head, with `numbers` of dQ each.
Workspace prepare_workspace(const Call& a, const Backward& b, int64_t parts, int64_t numbers,
                            cudaStream_t stream);

// Calls function(zero of the element type, columns that products have, whether there is dropout,
// whether the kernel casts its results).
template <typename Function>
void dispatch_long(const Call& a, const Cast& cast, Function&& function) {
  const int64_t columns = a.q.size(2);
  dispatch_16_bits(a.q.scalar_type(), [&](auto zero) {
    dispatch_value<64, 96, 128>(
        columns <= 64   ? 64
        : columns <= 96 ? 96
                        : 128,
        [&](auto width) {
          dispatch_value<false, true>(Dropout::threshold_of(a.dropout_p) > 0, [&](auto drops) {
            dispatch_cast<decltype(zero)>(cast,
                                          [&](auto casts) { function(zero, width, drops, casts); });
          });
        });
  });
}

}  // namespace lightseq::attention
