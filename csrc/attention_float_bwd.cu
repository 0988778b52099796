// Attention of long sentences (more than 128 tokens), backward, in float32, for heads of at most 64
// columns. attention_bwd.cu has other sentences and heads; attention_long_bwd.cu has the formulas,
// and explains how blocks of keys add to dQ in turn. Here each warp waits for its own turns and
// passes them on.
//
// Fused multiply-adds keep all 24 bits. A block has 64 keys of a head and iterates over tiles of 64
// queries. A thread has 8 x 4 numbers of each of the five products, so it loads 16 bytes from
// shared memory for every 11 multiply-adds. P, and then dS, pass through shared memory, row by row.
//
//   S = Q K^T, dP = dO V^T        queries y + 8 i, keys x + 16 j of thread (y, x); 8 x 16 threads
//   dV += P^T dO, dK += dS^T Q    keys 8 y + i, columns 4 x + j
//   dQ  = dS K                    queries y + 8 i, columns 4 x + j
//
// Sums over one tile are computed separately and then added: one chain of additions over all rows
// of a long sentence would lose more bits. In the first two products, sums over 16 columns are also
// computed separately.
//
// With few keys dS is hardly larger than the rounding errors of its two terms. So if a tile of
// queries attends to keys of one tile only, D is computed from P and dP: rowsum(P * dP) has the
// same errors as the other term. It is divided by rowsum(P), which errors of S make differ from 1.

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "common/attention_tiles.cuh"

namespace lightseq::attention {
namespace {

constexpr int kSide = 64;               // queries and keys of a tile, and columns
constexpr int kPitch = kSide + 4;       // numbers of a row in shared memory
constexpr int kYs = 8, kXs = 16;        // threads of a block
constexpr int kRows = 8, kNumbers = 4;  // of a thread

struct Params {
  Packed<const float> dout, q, k, v;
  Packed<float> dq, dk, dv;
  ItemList list;
  const float *lse, *lse_low;  // [H, Tq]: lse is their sum
  const float* rowsum;         // [H, Tq]: D
  float4* sums;                // dQ: [tiles of queries, H, warps, rows of a thread, 32]
  uint32_t* turns;  // [tiles of queries, H, warps]: how many blocks have added; zero at the start
  int rows_q, heads, width;
  bool causal;
  float scale, keep_scale, grad_scale;  // keep_scale: 1 / (1 - p); grad_scale: scale / (1 - p)
  Dropout dropout;
};

// An item, its head, and the tiles of 64 queries end - 1 ... begin that its block of keys iterates
// over.
struct Work {
  Item item;
  int head, begin, end;

  __device__ __forceinline__ Work(const Params& p, int number) {
    item = p.list.load(number / p.heads);
    head = number % p.heads;
    end = (item.length_q + kSide - 1) / kSide;
    begin = p.causal ? min(item.start / kSide, end) : 0;
  }
  __device__ __forceinline__ int first_tile() const { return max(end - 1, begin); }
  // How many blocks add to the dQ of a tile before this one.
  __device__ __forceinline__ int turn() const { return item.start / kSide; }
  // Whether this block is the last one that adds to the dQ of tile i.
  __device__ __forceinline__ bool is_last(const Params& p, int i) const {
    const int last = max((item.length_k + kSide - 1) / kSide, 1) - 1;
    return turn() == (p.causal ? min(last, i) : last);
  }
  // Number of a warp's part of the dQ of tile i.
  __device__ __forceinline__ int64_t part(const Params& p, int i, int warp) const {
    return (static_cast<int64_t>(item.unit + i) * p.heads + head) * kTilesWarps + warp;
  }
};

// Waits until it is this block's turn to add to a warp's part of dQ. The lanes vote, so that the
// compiler knows that the warp does not diverge.
__device__ __forceinline__ void wait_for_turn(const uint32_t* turn, int mine) {
  while (__any_sync(kAllLanes, load_acquire(turn) != static_cast<uint32_t>(mine))) {
  }
}

// Passes the turn on, after all lanes have added.
__device__ __forceinline__ void pass_turn(uint32_t* turn) {
  __syncwarp();
  if (threadIdx.x % kWarp == 0) {
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
    asm volatile("red.relaxed.gpu.global.add.u32 [%0], 1;" ::"l"(turn) : "memory");
  }
}

__device__ __forceinline__ void add_relaxed(float4* to, const float (&x)[4]) {
#if __CUDA_ARCH__ >= 900
  asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(x[0]),
               "f"(x[1]), "f"(x[2]), "f"(x[3])
               : "memory");
#else
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(reinterpret_cast<float*>(to) + i),
                 "f"(x[i])
                 : "memory");
  }
#endif
}

using Rows = float[kSide][kPitch];
using Sums = float[kRows][kNumbers];

struct FloatTiles {
  Rows q, k, v, dout;
  Rows p;  // P, then dS: [queries, keys]
  float lse[kSide], lse_low[kSide], rowsum[kSide];
  float2 parts[2][kSide];   // of rowsum(P * dP) and rowsum(P)
  uint32_t keep[kSide][2];  // bits of 64 keys
  NextItems next;
};

__device__ __forceinline__ void clear(Sums& sums) {
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
#pragma unroll
    for (int j = 0; j < kNumbers; ++j) sums[i][j] = 0.0f;
  }
}

__device__ __forceinline__ void add(Sums& sums, const Sums& more) {
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
#pragma unroll
    for (int j = 0; j < kNumbers; ++j) sums[i][j] += more[i][j];
  }
}

__device__ __forceinline__ float4 four_at(const float* x) {
  return *reinterpret_cast<const float4*>(x);
}

// sums += number * four
__device__ __forceinline__ void multiply_add(float (&sums)[4], float number, const float4& four) {
  sums[0] = fmaf(number, four.x, sums[0]);
  sums[1] = fmaf(number, four.y, sums[1]);
  sums[2] = fmaf(number, four.z, sums[2]);
  sums[3] = fmaf(number, four.w, sums[3]);
}

// sums = rows y + 8 i of a times rows x + 16 j of b
__device__ __forceinline__ void multiply_rows(Sums& sums, const Rows& a, const Rows& b, int y,
                                              int x) {
  clear(sums);
#pragma unroll 1
  for (int first = 0; first < kSide; first += 16) {
    Sums part;
    clear(part);
#pragma unroll
    for (int k = first; k < first + 16; k += 4) {
      float4 right[kNumbers];
#pragma unroll
      for (int j = 0; j < kNumbers; ++j) right[j] = four_at(&b[x + kXs * j][k]);
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const float4 left = four_at(&a[y + kYs * i][k]);
#pragma unroll
        for (int j = 0; j < kNumbers; ++j) {
          float& sum = part[i][j];
          sum = fmaf(left.x, right[j].x, sum);
          sum = fmaf(left.y, right[j].y, sum);
          sum = fmaf(left.z, right[j].z, sum);
          sum = fmaf(left.w, right[j].w, sum);
        }
      }
    }
    add(sums, part);
  }
}

// sums += columns 8 y + i of a, transposed, times columns 4 x + j of b
__device__ __forceinline__ void multiply_columns(Sums& sums, const Rows& a, const Rows& b, int y,
                                                 int x) {
  Sums part;
  clear(part);
#pragma unroll 8
  for (int k = 0; k < kSide; ++k) {
    const float4 right = four_at(&b[k][kNumbers * x]);
#pragma unroll
    for (int i = 0; i < kRows; i += 4) {
      const float4 left = four_at(&a[k][kRows * y + i]);
      multiply_add(part[i], left.x, right);
      multiply_add(part[i + 1], left.y, right);
      multiply_add(part[i + 2], left.z, right);
      multiply_add(part[i + 3], left.w, right);
    }
  }
  add(sums, part);
}

// sums = rows y + 8 i of a times columns 4 x + j of b
__device__ __forceinline__ void multiply(Sums& sums, const Rows& a, const Rows& b, int y, int x) {
  clear(sums);
#pragma unroll 4
  for (int k = 0; k < kSide; k += 4) {
    float4 right[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) right[j] = four_at(&b[k + j][kNumbers * x]);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const float4 left = four_at(&a[y + kYs * i][k]);
      multiply_add(sums[i], left.x, right[0]);
      multiply_add(sums[i], left.y, right[1]);
      multiply_add(sums[i], left.z, right[2]);
      multiply_add(sums[i], left.w, right[3]);
    }
  }
}

// Copies rows first ... first + 63 of a head; rows from `length` on and columns from `width` on
// become zero.
__device__ __forceinline__ void load_rows(Rows& to, const Packed<const float>& x, int head,
                                          int first, int length, int width) {
  constexpr int kPerRow = kSide / 4, kRowsAtOnce = kTilesThreads / kPerRow;
  const int row = threadIdx.x / kPerRow, column = threadIdx.x % kPerRow * 4;
  if (column >= width) length = 0;
#pragma unroll
  for (int i = 0; i < kSide; i += kRowsAtOnce) {
    cp_async_zfill(shared_address(&to[row + i][column]), x.at(first + row + i, head) + column,
                   row + i < length);
  }
}

__device__ __forceinline__ void store_four(float* to, const float (&x)[4], float factor) {
  *reinterpret_cast<float4*>(to) = {x[0] * factor, x[1] * factor, x[2] * factor, x[3] * factor};
}

template <bool kDrops>
__global__ __launch_bounds__(kTilesThreads,
                             2) void attention_float_bwd_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) unsigned char shared[];
  FloatTiles& tiles = *reinterpret_cast<FloatTiles*>(shared);
  const int warp = of_warp(threadIdx.x / kWarp), lane = threadIdx.x % kWarp;
  // A warp has 4 x 8 of the threads (y, x), so it reads few rows, which are in different banks.
  const int y = warp / 2 * 4 + lane / 8, x = warp % 2 * 8 + lane % 8;
  const AttentionDropout dropout = kDrops ? AttentionDropout(p.dropout) : AttentionDropout();

  const auto load_keys = [&](const Work& work) {
    const Item& item = work.item;
    const int first = item.first_k + item.start, length = item.length_k - item.start;
    load_rows(tiles.k, p.k, work.head, first, length, p.width);
    load_rows(tiles.v, p.v, work.head, first, length, p.width);
  };
  // Inputs of a query without keys may be NaN. Treat it as one that does not exist; its dQ is zero.
  // For queries that do not exist, all is zero except P = exp(0), which is multiplied by zeros.
  const auto queries_from = [&](const Work& work, int i) {
    return work.item.length_k > 0 ? work.item.length_q - i * kSide : 0;
  };
  const auto load_queries = [&](Rows& to, const Packed<const float>& from, const Work& work,
                                int i) {
    load_rows(to, from, work.head, work.item.first_q + i * kSide, queries_from(work, i), p.width);
  };
  // Also lse and D.
  const auto load_dout = [&](const Work& work, int i) {
    load_queries(tiles.dout, p.dout, work, i);
    const int query = threadIdx.x % kSide;
    const int64_t from =
        static_cast<int64_t>(work.head) * p.rows_q + work.item.first_q + i * kSide + query;
    const bool exists = query < queries_from(work, i);
    if (threadIdx.x < kSide) {
      cp_async_4_zfill(shared_address(tiles.lse + query), p.lse + from, exists);
      cp_async_4_zfill(shared_address(tiles.lse_low + query), p.lse_low + from, exists);
    } else {
      cp_async_4_zfill(shared_address(tiles.rowsum + query), p.rowsum + from, exists);
    }
  };
  const auto draw = [&](const Work& work, int i) {
    if constexpr (kDrops) {
      const int query = threadIdx.x / 2, word = threadIdx.x % 2;
      const uint32_t row =
          static_cast<uint32_t>(work.item.first_q + i * kSide + query) * p.heads + work.head;
      tiles.keep[query][word] = dropout.keep_word(row, work.item.start / 32 + word);
    }
  };
  const auto load_first = [&](const Work& work) {
    load_keys(work);
    load_queries(tiles.q, p.q, work, work.first_tile());
    load_dout(work, work.first_tile());
    draw(work, work.first_tile());
  };

  const int count = p.list.counts[0] * p.heads;
  if (threadIdx.x == 0) {
    tiles.next.numbers[1] = claim(p.list);
    tiles.next.numbers[0] = claim(p.list);
  }
  __syncthreads();
  int number = tiles.next.numbers[1], place = 0;
  if (number >= count) return;
  Work work(p, number);
  load_first(work);

  while (true) {
    const int claimed = threadIdx.x == 0 ? claim(p.list) : 0;
    const Item& item = work.item;
    const float grad_scale = grad_scale_of(p.grad_scale, item.length_k);
    Sums dk, dv;
    clear(dk);
    clear(dv);
    uint32_t* to_pass = nullptr;  // the turn of the previous tile

#pragma unroll 1
    for (int i = work.end - 1; i >= work.begin; --i) {
      const int first_query = i * kSide;
      const bool continues = i > work.begin;
      cp_async_wait_all();
      __syncthreads();  // this tile has been loaded, and dS of the previous tile has been read
      Sums s, dp;
      multiply_rows(s, tiles.q, tiles.k, y, x);
      multiply_rows(dp, tiles.dout, tiles.v, y, x);
      const bool all_keys =
          item.length_k > 0 && (item.length_k <= kSide || (p.causal && first_query == 0));
      const bool clear_of_hidden = item.start + kSide <= item.length_k &&
                                   !(p.causal && first_query < item.start + kSide - 1);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const int row = y + kYs * r;
        const TwoFloats lse{tiles.lse[row], tiles.lse_low[row]};
        const float rowsum = all_keys ? 0.0f : tiles.rowsum[row];
        float sum = 0.0f, total = 0.0f;
#pragma unroll
        for (int j = 0; j < kNumbers; ++j) {
          const int column = x + kXs * j, key = item.start + column;
          float probability = probability_of(s[r][j], p.scale, lse);
          if (!clear_of_hidden && (key >= item.length_k || (p.causal && key > first_query + row))) {
            probability = 0.0f;
          }
          const bool kept = !kDrops || (tiles.keep[row][j / 2] >> (column % 32) & 1u);
          const float d = kept ? dp[r][j] : 0.0f;
          tiles.p[row][column] = kept ? probability : 0.0f;
          sum += probability * d;
          total += probability;
          s[r][j] = probability;
          dp[r][j] = d - rowsum;
        }
        if (all_keys) {
#pragma unroll
          for (int offset = 1; offset < 8; offset *= 2) {
            sum += __shfl_xor_sync(kAllLanes, sum, offset);
            total += __shfl_xor_sync(kAllLanes, total, offset);
          }
          if (lane % 8 == 0) tiles.parts[warp % 2][row] = {sum, total};
        }
      }
      if (to_pass != nullptr) pass_turn(to_pass);
      to_pass = nullptr;
      __syncthreads();  // P is complete
      multiply_columns(dv, tiles.p, tiles.dout, y, x);
      __syncthreads();  // P, dO, lse and D have been read
      if (continues) load_dout(work, i - 1);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const int row = y + kYs * r;
        float rowsum = 0.0f;
        if (all_keys) {
          const float2 left = tiles.parts[0][row], right = tiles.parts[1][row];
          rowsum = (left.x + right.x) / (left.y + right.y);
        }
#pragma unroll
        for (int j = 0; j < kNumbers; ++j) {
          tiles.p[row][x + kXs * j] = s[r][j] * (dp[r][j] - rowsum);
        }
      }
      __syncthreads();  // dS is complete
      multiply_columns(dk, tiles.p, tiles.q, y, x);
      __syncthreads();  // Q has been read
      if (continues) {
        load_queries(tiles.q, p.q, work, i - 1);
        draw(work, i - 1);
      }

      Sums dq;
      multiply(dq, tiles.p, tiles.k, y, x);
      const int64_t part = work.part(p, i, warp);
      float4* const sums = p.sums + part * (kRows * kWarp) + lane;
      const int turn = work.turn();
      const bool is_last = work.is_last(p, i);
      if (turn > 0) wait_for_turn(p.turns + part, turn);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        float4* const of_row = sums + r * kWarp;
        if (is_last) {
          if (turn > 0) {
            const float4 before = __ldcg(of_row);
            dq[r][0] += before.x;
            dq[r][1] += before.y;
            dq[r][2] += before.z;
            dq[r][3] += before.w;
          }
          const int position = first_query + y + kYs * r, column = kNumbers * x;
          if (position < item.length_q && column < p.width) {
            store_four(p.dq.at(item.first_q + position, work.head) + column, dq[r], grad_scale);
          }
        } else if (turn == 0) {
          __stcg(of_row, float4{dq[r][0], dq[r][1], dq[r][2], dq[r][3]});
        } else {
          add_relaxed(of_row, dq[r]);
        }
      }
      if (!is_last) to_pass = p.turns + part;
    }

    // After the barrier, all threads have finished the last tile.
    cp_async_wait_all();
    __syncthreads();
    number = tiles.next.numbers[place];
    Work next = work;
    if (number < count) {
      next = Work(p, number);
      load_first(next);
    }
    // This place was last read during the previous item. It is read again after a barrier of the
    // next item.
    if (threadIdx.x == 0) tiles.next.numbers[place ^ 1] = claimed;
    place ^= 1;
    if (to_pass != nullptr) pass_turn(to_pass);
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const int position = item.start + kRows * y + r, column = kNumbers * x;
      if (position < item.length_k && column < p.width) {
        store_four(p.dk.at(item.first_k + position, work.head) + column, dk[r], grad_scale);
        store_four(p.dv.at(item.first_k + position, work.head) + column, dv[r], p.keep_scale);
      }
    }
    if (number >= count) return;
    work = next;
  }
}

}  // namespace

void attention_float_bwd(const LongArguments& a, const Tensor& dout, const Tensor& out,
                         const Tensor& lse, const Tensor& dq, const Tensor& dk, const Tensor& dv) {
  constexpr const char* kOp = "attention_bwd";
  const int32_t device = a.q.get_device();
  const cudaStream_t stream = current_stream(device);
  const int64_t heads = a.q.size(1);
  const float keep_scale = static_cast<float>(1.0 / (1.0 - a.dropout_p));
  Tensor memory;
  const ItemList list = list_items(a, kSide, memory, stream);
  const int64_t parts = most_units(a) * heads * kTilesWarps;
  const Tensor turns = allocate(a.q, {parts}, ScalarType::Int);
  const Tensor sums = allocate(a.q, {parts, kRows, kWarp, kNumbers}, ScalarType::Float);
  const OfQueries of_queries = attention::of_queries(a, dout, out, lse, turns, stream);
  const Params params{.dout = packed<const float>(kOp, "dout", dout),
                      .q = packed<const float>(kOp, "q", a.q),
                      .k = packed<const float>(kOp, "k", a.k),
                      .v = packed<const float>(kOp, "v", a.v),
                      .dq = packed<float>(kOp, "dq", dq),
                      .dk = packed<float>(kOp, "dk", dk),
                      .dv = packed<float>(kOp, "dv", dv),
                      .list = list,
                      .lse = of_queries.lse,
                      .lse_low = of_queries.lse_low,
                      .rowsum = of_queries.rowsum,
                      .sums = static_cast<float4*>(sums.data_ptr()),
                      .turns = static_cast<uint32_t*>(turns.data_ptr()),
                      .rows_q = static_cast<int>(a.q.size(0)),
                      .heads = static_cast<int>(heads),
                      .width = static_cast<int>(a.q.size(2)),
                      .causal = a.causal,
                      .scale = static_cast<float>(a.scale),
                      .keep_scale = keep_scale,
                      .grad_scale = static_cast<float>(a.scale) * keep_scale,
                      .dropout = dropout_of(kOp, a.rng, a.site, a.dropout_p)};
  const auto start = [&](auto kernel) {
    constexpr size_t kShared = sizeof(FloatTiles);
    launch({.op = kOp,
            .grid = static_cast<unsigned>(resident_blocks(kernel, kTilesThreads, device, kShared)),
            .block = kTilesThreads,
            .shared = kShared,
            .stream = stream},
           kernel, params);
  };
  if (params.dropout.threshold > 0) {
    start(attention_float_bwd_kernel<true>);
  } else {
    start(attention_float_bwd_kernel<false>);
  }
}

}  // namespace lightseq::attention
