// LayerNorm: distribution of rows among threads, and the forward computation of a row.
//
// The grid has as many blocks as are resident at a time (persistent blocks). In a block, each team
// of threads processes one row at a time. A thread always has the same columns, so it keeps their
// data (bias, gamma, sums over rows) in registers. Rows are copied through shared memory, and each
// thread copies exactly the parts that it reads itself; so only sums over a row need a barrier of
// the team. If forward has few rows, each row gets its own team (one_each) and is loaded directly
// to registers.
#pragma once

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>

#include "async_copy.cuh"
#include "check.h"
#include "columns.cuh"
#include "occupancy.h"
#include "reduce.cuh"

namespace lightseq {

constexpr int kMaxColumns = 8192;
constexpr int kBlockThreads = 512;

// A row is divided among the kThreads threads of a team: each has every kThreads-th group of eight
// columns. If the row is shorter, the last threads idle.
template <int kThreads_, int kGroups_>
struct Shape {
  static constexpr int kThreads = kThreads_;
  static constexpr int kGroups = kGroups_;
  static constexpr int kTeams = kBlockThreads / kThreads;
  static constexpr int kWarps = kThreads / kWarp;             // per team
  static constexpr int kStride = kThreads * kColumnsPerDraw;  // between a thread's groups
  static constexpr int kColumns = kStride * kGroups;

  // First column of this thread's i-th group.
  static __device__ __forceinline__ int column(int i) {
    return i * kStride + static_cast<int>(threadIdx.x) * kColumnsPerDraw;
  }
};

// kGroups: groups per thread; always two if one group each would need more threads than a block.
template <int kGroups, typename Function>
void dispatch_shape(int64_t columns, Function&& function) {
  if (columns <= 512) return function(Shape<64 / kGroups, kGroups>{});
  if (columns <= 1024) return function(Shape<128 / kGroups, kGroups>{});
  if (columns <= 2048) return function(Shape<256 / kGroups, kGroups>{});
  if (columns <= 4096) return function(Shape<512 / kGroups, kGroups>{});
  return function(Shape<kBlockThreads, 2>{});
}

inline void check_width(const char* op, int64_t columns) {
  require(columns <= kMaxColumns, op, ": rows must have at most ", kMaxColumns,
          " elements on a GPU, got ", columns);
}

// A tensor like x, or an empty one if the output does not exist.
inline torch::stable::Tensor empty_rows(const torch::stable::Tensor& x, bool exists) {
  return exists ? allocate(x, {x.size(0), x.size(1)}) : allocate(x, {0});
}

// Assignment of rows to teams. Adjacent rows go to different blocks, so that the last rows are
// spread over all blocks.
struct Rows {
  int64_t step;      // distance between a team's rows: the number of teams
  int each, longer;  // a team has `each` rows, the first `longer` teams have one more
  int stages;        // rows in shared memory per team: 2, or 1 if two do not fit
  int shared;        // bytes of shared memory
  unsigned blocks;

  __device__ __forceinline__ int64_t first() const {
    return static_cast<int64_t>(threadIdx.y) * gridDim.x + blockIdx.x;
  }
  __device__ __forceinline__ int count() const { return each + (first() < longer ? 1 : 0); }
};

// row_bytes: bytes of a row in all inputs. least: minimum bytes of shared memory.
template <typename S, typename Kernel>
Rows share_out(Kernel kernel, int64_t rows, int row_bytes, int least, int32_t device) {
  const int room = dynamic_shared_memory_of(reinterpret_cast<const void*>(kernel), device);
  const int stages = 2 * S::kTeams * row_bytes <= room ? 2 : 1;
  const int bytes = std::max(stages * S::kTeams * row_bytes, least);
  const int64_t blocks = std::min(rows, resident_blocks(kernel, kBlockThreads, device, bytes));
  const int64_t teams = std::max<int64_t>(1, blocks * S::kTeams);
  return {.step = teams,
          .each = static_cast<int>(rows / teams),
          .longer = static_cast<int>(rows % teams),
          .stages = stages,
          .shared = bytes,
          .blocks = static_cast<unsigned>(blocks)};
}

// One row per team, with `teams` teams per block.
inline Rows one_each(int64_t rows, int64_t teams) {
  const int64_t blocks = blocks_for(rows, teams);
  return {.step = blocks * teams,
          .each = 0,
          .longer = static_cast<int>(rows),
          .stages = 0,
          .shared = 0,
          .blocks = static_cast<unsigned>(blocks)};
}

// Keeps x in a register: nvcc would recompute it for each row.
__device__ __forceinline__ void keep(int64_t& x) { asm volatile("" : "+l"(x)); }
__device__ __forceinline__ void keep(uint32_t& x) { asm volatile("" : "+r"(x)); }

// Queue of a team's rows in shared memory. The rows of the kInputs tensors are stored side by side.
template <typename T, typename S, int kInputs>
class RowQueue {
 public:
  static constexpr int kInputBytes = S::kColumns * static_cast<int>(sizeof(T));
  static constexpr int kRowBytes = kInputs * kInputBytes;

  // Starts the first copies. inputs: number of tensors in `data`; the others read as zeros.
  __device__ __forceinline__ RowQueue(const Rows& rows, const T* const (&data)[kInputs],
                                      const int64_t (&strides)[kInputs], int inputs, int columns,
                                      void* shared)
      : left_(rows.count()), inputs_(inputs), columns_(columns), pair_(rows.stages == 2) {
#pragma unroll
    for (int k = 0; k < kInputs; ++k) {
      next_[k] = reinterpret_cast<const char*>(data[k] + rows.first() * strides[k] + S::column(0));
      step_[k] = rows.step * strides[k] * static_cast<int>(sizeof(T));
      keep(step_[k]);
    }
    stage_ = shared_address(shared) + threadIdx.y * rows.stages * kRowBytes +
             S::column(0) * static_cast<int>(sizeof(T));
    both_ = 2 * stage_ + (pair_ ? kRowBytes : 0);
    keep(stage_);
    keep(both_);
    copy();
    if (pair_) {
      stage_ = both_ - stage_;
      copy();
      stage_ = both_ - stage_;
    }
    for (int i = 0; i < S::kGroups; ++i) {
      for (int k = 0; k < kInputs; ++k) {
        if (S::column(i) < columns && k < inputs) continue;
        clear(stage_ + place(k, i));
        clear(both_ - stage_ + place(k, i));
      }
    }
  }

  // Waits until the current row has arrived.
  __device__ __forceinline__ void wait() const {
    if (pair_) {
      cp_async_wait<1>();
    } else {
      cp_async_wait<0>();
    }
  }

  // Reads this thread's i-th group of the row from the k-th tensor; zeros past the row's end.
  __device__ __forceinline__ void get(int k, int i, float (&x)[kColumnsPerDraw]) const {
    Columns<T> packed;
    packed.load_shared(stage_ + place(k, i));
    packed.unpack(x);
  }

  // Releases the row that has been read, and starts the copy of another one in its place.
  __device__ __forceinline__ void pop() {
    copy();
    stage_ = both_ - stage_;
  }

 private:
  static __device__ __forceinline__ uint32_t place(int k, int i) {
    return k * kInputBytes + i * S::kStride * static_cast<int>(sizeof(T));
  }

  __device__ __forceinline__ void copy() {
    if (left_ > 0) {
      --left_;
#pragma unroll
      for (int k = 0; k < kInputs; ++k) {
        if (k >= inputs_) continue;
#pragma unroll
        for (int i = 0; i < S::kGroups; ++i) {
          if (S::column(i) >= columns_) continue;
#pragma unroll
          for (int bytes = 0; bytes < kGroupBytes; bytes += kVecBytes) {
            cp_async(stage_ + place(k, i) + bytes, next_[k] + place(0, i) + bytes);
          }
        }
        next_[k] += step_[k];
      }
    }
    cp_async_commit();
  }

  static __device__ __forceinline__ void clear(uint32_t address) {
#pragma unroll
    for (int bytes = 0; bytes < kGroupBytes; bytes += kVecBytes) {
      asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(address + bytes), "r"(0)
                   : "memory");
    }
  }

  static constexpr int kGroupBytes = kColumnsPerDraw * static_cast<int>(sizeof(T));
  const char* next_[kInputs];  // this thread's columns of the next row to copy
  int64_t step_[kInputs];
  uint32_t stage_, both_;  // address of this thread's columns; the sum of both stages' addresses
  int left_;               // rows still to be copied
  int inputs_, columns_;
  bool pair_;
};

// A named barrier of the team's threads.
template <typename S>
__device__ __forceinline__ void sync_team() {
  asm volatile("bar.sync %0, %1;" ::"r"(threadIdx.y + 1), "n"(S::kThreads) : "memory");
}

// Sum over a row. room: shared memory of the team; consecutive sums need different rooms.
template <typename S>
__device__ __forceinline__ float team_sum(float x, float (&room)[S::kWarps]) {
  x = warp_reduce(x, Sum{});
  if constexpr (S::kWarps > 1) {
    if (threadIdx.x % kWarp == 0) room[threadIdx.x / kWarp] = x;
    sync_team<S>();
    x = room[0];
#pragma unroll
    for (int warp = 1; warp < S::kWarps; ++warp) x += room[warp];
  }
  return x;
}

// Two sums with the shuffles of one: half of a warp adds the first, the other half the second.
template <typename S>
__device__ __forceinline__ float2 team_sum(float2 x, float2 (&room)[S::kWarps]) {
  constexpr int kHalf = kWarp / 2;
  const bool second = threadIdx.x & kHalf;
  float sum = second ? x.y : x.x;
  sum += __shfl_xor_sync(kAllLanes, second ? x.x : x.y, kHalf);
#pragma unroll
  for (int offset = kHalf / 2; offset > 0; offset /= 2) {
    sum += __shfl_xor_sync(kAllLanes, sum, offset);
  }
  float* const half = &room[threadIdx.x / kWarp].x;
  if (threadIdx.x % kHalf == 0) half[second ? 1 : 0] = sum;
  sync_team<S>();
  x = room[0];
#pragma unroll
  for (int warp = 1; warp < S::kWarps; ++warp) {
    x.x += room[warp].x;
    x.y += room[warp].y;
  }
  return x;
}

// LayerNorm of a team's row. x: this thread's columns, zeros past the row's end; overwritten with
// the result. sum: of these elements. inverse: 1 / columns. Returns mean and 1 / standard
// deviation.
template <typename T, typename S>
__device__ __forceinline__ float2 normalize_row(float (&x)[S::kGroups][kColumnsPerDraw], float sum,
                                                const Columns<T> (&gamma)[S::kGroups],
                                                const Columns<T> (&beta)[S::kGroups], int columns,
                                                float inverse, float eps) {
  __shared__ float sum_rooms[S::kTeams][S::kWarps], square_rooms[S::kTeams][S::kWarps];
  const float mean = team_sum<S>(sum, sum_rooms[threadIdx.y]) * inverse;
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < S::kGroups; ++i) {
    const float centre = S::column(i) < columns ? mean : 0.0f;  // keeps zeros past the row's end
#pragma unroll
    for (int e = 0; e < kColumnsPerDraw; ++e) {
      x[i][e] -= centre;
      squares += x[i][e] * x[i][e];
    }
  }
  squares = team_sum<S>(squares, square_rooms[threadIdx.y]);
  const float rstd = rsqrtf(squares * inverse + eps);
#pragma unroll
  for (int i = 0; i < S::kGroups; ++i) {
    float weight[kColumnsPerDraw], shift[kColumnsPerDraw];
    gamma[i].unpack(weight);
    beta[i].unpack(shift);
#pragma unroll
    for (int e = 0; e < kColumnsPerDraw; ++e) x[i][e] = x[i][e] * rstd * weight[e] + shift[e];
  }
  return {mean, rstd};
}

}  // namespace lightseq
