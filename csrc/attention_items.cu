// The work list of the kernels for long sentences, and lse and D of every query for their backward.
// common/attention_items.cuh explains the list.
//
// The kernel for short sentences is launched before the kernels here. They start while it runs,
// because they read nothing that it writes, and wait for it after their own work.

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "common/attention_items.cuh"
#include "common/wgmma.cuh"

namespace lightseq::attention {
namespace {

constexpr int64_t kTokensOfSentence = 48;  // see most_tokens_of_short

struct Boundaries {
  const int *q, *k;
  int sentences;
  int block_keys;  // 0 in forward
  int most_of_short;

  __device__ __forceinline__ Item sentence(int s) const {
    return {q[s], q[s + 1] - q[s], k[s], k[s + 1] - k[s]};
  }
  // A query without keys has a gradient, too, which is zero: a block of keys writes it.
  __device__ __forceinline__ int blocks_of(const Item& s) const {
    const int rows = block_keys > 0 ? block_keys : kTile;
    return max((s.length_k + rows - 1) / rows, s.length_q > 0 ? 1 : 0);
  }
};

// Lists tiles of queries (forward) or blocks of keys (backward) of the long sentences, those of
// sentences with much work first. One block; all threads list, a sentence each.
//
// Order of the blocks of keys: they add to dQ in the order of descending blocks of a sentence, so a
// block comes after those that it waits for. Sentences with little work are interleaved in groups,
// so that blocks that start at the same time seldom wait for each other.
__global__ __launch_bounds__(1024) void list_kernel(const Boundaries boundaries, Item* items,
                                                    int* counts) {
  griddepcontrol_launch_dependents();
  __shared__ int chosen[kMostLong];
  __shared__ uint16_t tiles[kMostLong], blocks[kMostLong], order[kMostLong];
  __shared__ int count;
  if (threadIdx.x == 0) count = 0;
  __syncthreads();
  const int rounded = (boundaries.sentences + kWarp - 1) / kWarp * kWarp;
  for (int s = threadIdx.x; s < rounded; s += blockDim.x) {
    const Item item = s < boundaries.sentences ? boundaries.sentence(s) : Item{};
    const bool is_long = max(item.length_q, item.length_k) > boundaries.most_of_short;
    const unsigned votes = __ballot_sync(kAllLanes, is_long);
    const int lane = threadIdx.x % kWarp;
    int place = 0;
    if (lane == 0 && votes != 0) place = atomicAdd(&count, __popc(votes));
    place = of_warp(place) + __popc(votes & ((1u << lane) - 1));
    if (!is_long) continue;
    chosen[place] = s;
    tiles[place] = static_cast<uint16_t>(tiles_of(item.length_q));
    blocks[place] = static_cast<uint16_t>(boundaries.blocks_of(item));
  }
  __syncthreads();

  const auto work = [&](int i) { return tiles[i] + blocks[i]; };
  for (int i = threadIdx.x; i < count; i += blockDim.x) {
    int rank = 0;
    for (int other = 0; other < count; ++other) {
      const bool first =
          work(other) > work(i) || (work(other) == work(i) && chosen[other] < chosen[i]);
      rank += first;
    }
    order[rank] = static_cast<uint16_t>(i);
  }
  __syncthreads();

  // Sentences of a class are interleaved, 2^class of them at a time.
  const auto class_of = [&](int rank) {
    const int much = work(order[rank]);
    return much >= 24 ? 0 : much >= 12 ? 1 : much >= 6 ? 2 : 3;
  };
  for (int rank = threadIdx.x; rank < count; rank += blockDim.x) {
    const int i = order[rank], mine = class_of(rank);
    int tiles_before = 0, blocks_before = 0, class_begin = 0;
    for (int r = 0; r < rank; ++r) {
      tiles_before += tiles[order[r]];
      blocks_before += blocks[order[r]];
      class_begin += class_of(r) < mine;
    }
    Item item = boundaries.sentence(chosen[i]);
    item.unit = 2 * tiles_before;
    if (boundaries.block_keys == 0) {
      for (int t = 0; t < tiles[i]; ++t) {
        item.start = t * kTile;
        items[tiles_before + tiles[i] - 1 - t] = item;
      }
    } else {
      const int together = 1 << mine;
      const int begin = class_begin + (rank - class_begin) / together * together;
      int end = begin;
      while (end < min(begin + together, count) && class_of(end) == mine) ++end;
      int group_begin = blocks_before;
      for (int r = begin; r < rank; ++r) group_begin -= blocks[order[r]];
      for (int block = 0; block < blocks[i]; ++block) {
        // Before it: the blocks of the group with a larger number, and those with the same number
        // of sentences before this one.
        int place = group_begin;
        for (int r = begin; r < end; ++r) {
          place += max(0, blocks[order[r]] - block - (r < rank ? 0 : 1));
        }
        item.start = block * boundaries.block_keys;
        items[place] = item;
      }
    }
    if (rank == count - 1) {
      counts[0] = boundaries.block_keys > 0 ? blocks_before + blocks[i] : tiles_before + tiles[i];
    }
  }
  if (threadIdx.x == 0) {
    if (count == 0) counts[0] = 0;
    counts[1] = 0;
  }
  griddepcontrol_wait();
}

// Computes the members of OfQueries, [H, Tq] each, and zeroes the counters in `turns`. Eight lanes
// process one head of a row, 16 bytes per lane at a time.
template <typename T>
__global__ __launch_bounds__(256) void rowsum_kernel(Packed<const T> dout, Packed<const T> out,
                                                     const Lse<T>* lse, float* lse_of_heads,
                                                     float* lse_low, float* rowsum, uint32_t* turns,
                                                     int64_t turn_count, int rows, int heads,
                                                     int width, float keep) {
  griddepcontrol_launch_dependents();
  constexpr int kLanes = 8, kSize = Vec<T>::kSize;
  const int64_t thread = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (int64_t i = thread; i < turn_count; i += static_cast<int64_t>(gridDim.x) * blockDim.x) {
    turns[i] = 0;
  }
  const int64_t line = thread / kLanes;
  const int row = static_cast<int>(line / heads), head = static_cast<int>(line % heads);
  float sum = 0.0f;
  if (row < rows) {
    for (int column = threadIdx.x % kLanes * kSize; column < width; column += kLanes * kSize) {
      const Vec<T> x = lightseq::load(dout.at(row, head) + column);
      const Vec<T> y = lightseq::load(out.at(row, head) + column);
#pragma unroll
      for (int i = 0; i < kSize; ++i) sum += to_float(x.values[i]) * to_float(y.values[i]);
    }
  }
#pragma unroll
  for (int offset = kLanes / 2; offset > 0; offset /= 2) {
    sum += __shfl_xor_sync(kAllLanes, sum, offset);
  }
  if (row < rows && threadIdx.x % kLanes == 0) {
    const int64_t to = static_cast<int64_t>(head) * rows + row;
    const PreparedLse<T> mine = prepared(lse[line]);
    if constexpr (Base<T>::kIsTwo) {
      lse_of_heads[to] = mine;
    } else {
      lse_of_heads[to] = mine.high;
      lse_low[to] = mine.low;
    }
    rowsum[to] = sum * keep;
  }
  griddepcontrol_wait();
}

}  // namespace

// In backward, the kernel for short sentences has tiles of 128 rows for 16-bit heads of up to 64
// columns, but of 64 rows for wider heads.
int most_tokens_of_short(const Tensor& q, const Tensor& k, const Tensor& cu_q, bool causal) {
  if (q.scalar_type() == ScalarType::Float || !has_wgmma(q.get_device())) return 128;
  const bool pays = q.size(0) + k.size(0) >= 2 * kTokensOfSentence * (cu_q.size(0) - 1);
  return q.size(2) > 64 || (pays && !causal) ? 64 : 128;
}

bool has_long_kernels(const Tensor& q, const Tensor& k, const Tensor& cu_q, int64_t max_q,
                      int64_t max_k, int most_of_short, bool backward) {
  const bool supports = q.scalar_type() == ScalarType::Float
                            ? backward && q.size(2) <= 64
                            : !backward || has_wgmma(q.get_device());
  return supports && std::max(max_q, max_k) > most_of_short && std::min(q.size(0), k.size(0)) > 0 &&
         most_long(q, k, cu_q, most_of_short) <= kMostLong;
}

ItemList list_items(const LongArguments& a, int block_keys, Tensor& memory, cudaStream_t stream) {
  const int64_t sentences = most_long(a.q, a.k, a.cu_q, a.most_of_short);
  const int64_t items =
      block_keys > 0 ? a.k.size(0) / block_keys + 2 * sentences : a.q.size(0) / kTile + sentences;
  constexpr int64_t kCounts = 32;  // bytes in front of the items
  memory = allocate(a.q, {kCounts + items * static_cast<int64_t>(sizeof(Item))}, ScalarType::Byte);
  char* const bytes = static_cast<char*>(memory.data_ptr());
  int* const counts = reinterpret_cast<int*>(bytes);
  Item* const list = reinterpret_cast<Item*>(bytes + kCounts);
  launch({.op = "attention", .grid = 1, .block = 1024, .stream = stream, .dependent = true},
         list_kernel,
         Boundaries{a.cu_q.const_data_ptr<int>(), a.cu_k.const_data_ptr<int>(),
                    static_cast<int>(a.cu_q.size(0) - 1), block_keys, a.most_of_short},
         list, counts);
  return {list, counts};
}

OfQueries of_queries(const LongArguments& a, const Tensor& dout, const Tensor& out,
                     const Tensor& lse, const Tensor& turns, cudaStream_t stream) {
  constexpr const char* kOp = "attention_bwd";
  constexpr int kThreads = 256, kLines = kThreads / 8;
  const int64_t rows = a.q.size(0), heads = a.q.size(1);
  const bool has_low = a.q.scalar_type() == ScalarType::Float;
  const Tensor memory = allocate(a.q, {has_low ? 3 : 2, heads, rows}, ScalarType::Float);
  float* const lse_of_heads = memory.mutable_data_ptr<float>();
  float* const rowsum = lse_of_heads + heads * rows;
  float* const lse_low = has_low ? rowsum + heads * rows : nullptr;
  const auto start = [&](auto zero) {
    using T = decltype(zero);
    launch({.op = kOp,
            .grid = static_cast<unsigned>(blocks_for(rows * heads, kLines)),
            .block = kThreads,
            .stream = stream,
            .dependent = true},
           rowsum_kernel<T>, packed<const T>(kOp, "dout", dout), packed<const T>(kOp, "out", out),
           lse.const_data_ptr<Lse<T>>(), lse_of_heads, lse_low, rowsum,
           static_cast<uint32_t*>(turns.data_ptr()), turns.numel(), static_cast<int>(rows),
           static_cast<int>(heads), static_cast<int>(a.q.size(2)),
           static_cast<float>(1.0 - a.dropout_p));
  };
  dispatch_float(a.q.scalar_type(), "attention_bwd: q", start);
  return {memory, lse_of_heads, lse_low, rowsum};
}

}  // namespace lightseq::attention
