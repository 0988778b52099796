// The work list of the kernels for long sentences (work_list.cuh), and lse and D of every query for
// their backward.
//
// The kernel for short sentences is launched before the kernels here. They start while it runs,
// because they read nothing that it writes. At the end, one thread block of each waits for it.

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "attention/work_list.cuh"

namespace lightseq::attention {
namespace {

constexpr int kListThreads = 1024;

struct Boundaries {
  const int *q, *k;
  int sentences;
  bool causal;
  bool of_keys;  // items are blocks of keys (backward), not tiles of queries (forward)
  int rows;      // of an item
  int most_of_short;
  bool interleaved;

  __device__ __forceinline__ Item sentence(int s) const {
    return {q[s], q[s + 1] - q[s], k[s], k[s + 1] - k[s]};
  }
  // A query without keys has a gradient, too, which is zero: a block of keys writes it.
  __device__ __forceinline__ int blocks_of(const Item& s) const {
    return max((s.length_k + rows - 1) / rows, s.length_q > 0 ? 1 : 0);
  }
  __device__ __forceinline__ int items_of(const Item& s) const {
    return of_keys ? blocks_of(s) : tiles_of(s.length_q);
  }
};

// The sum of x over the threads before this one. total: over all threads of the block.
__device__ __forceinline__ int sum_before(int x, int& total) {
  __shared__ int sums_of_warps[kListThreads / kWarp];
  const int lane = threadIdx.x % kWarp;
  int sum = x;
#pragma unroll
  for (int offset = 1; offset < kWarp; offset *= 2) {
    const int other = __shfl_up_sync(kAllLanes, sum, offset);
    if (lane >= offset) sum += other;
  }
  __syncthreads();  // all threads have read the sums of the previous call
  if (lane == kWarp - 1) sums_of_warps[threadIdx.x / kWarp] = sum;
  __syncthreads();
  const int of_warp = sums_of_warps[lane];
  total = warp_reduce(of_warp, Sum());
  return warp_reduce(lane < threadIdx.x / kWarp ? of_warp : 0, Sum()) + sum - x;
}

// Lists tiles of queries (forward) or blocks of keys (backward) of the long sentences, those of
// sentences with much work first. One block; all threads list, a sentence each.
//
// A sentence has a place in the order of the batch, and a rank in the order of work. With a causal
// mask, the last tile of queries and the first block of keys of a sentence have the most work: they
// come first, so that all thread blocks end at about the same time. Blocks of keys add to dQ in
// order, so a block comes after those that it waits for. Sentences with little work may be
// interleaved in groups, so that blocks that start at the same time seldom wait for each other.
__global__ __launch_bounds__(kListThreads) void list_kernel(const Boundaries boundaries,
                                                            Item* items, int* counts) {
  griddepcontrol_launch_dependents();
  __shared__ int sentence_of_place[kMostLong];
  __shared__ uint16_t place_of_rank[kMostLong];
  // First the work of the sentences by place, with the place in the lower bits; then, by rank, how
  // many items the sentences before have.
  __shared__ __align__(16) int numbers[kMostLong + 4];
  constexpr int kPlaceBits = 12;
  static_assert(kMostLong == 1 << kPlaceBits);

  // Classes of sentences by work; groups of a later class have more sentences.
  constexpr int kClasses = 4;
  constexpr int kLeastWork[kClasses - 1] = {24, 12, 6};  // of a class; the last one has the rest
  int class_begin[kClasses] = {};                        // the first rank
  int count = 0;
  for (int first = 0; first < boundaries.sentences; first += kListThreads) {
    const int s = first + threadIdx.x;
    const Item item = s < boundaries.sentences ? boundaries.sentence(s) : Item{};
    const bool is_long = max(item.length_q, item.length_k) > boundaries.most_of_short;
    const int work = is_long ? tiles_of(item.length_q) + boundaries.blocks_of(item) : 0;
    int more;
    const int place = count + sum_before(is_long, more);
    count += more;
    if (is_long) {
      sentence_of_place[place] = s;
      numbers[place] = work << kPlaceBits | place;
    }
#pragma unroll
    for (int c = 1; c < kClasses; ++c)
      class_begin[c] += __syncthreads_count(work >= kLeastWork[c - 1]);
  }
  if (threadIdx.x < 4) numbers[count + threadIdx.x] = 0;  // the comparison below reads four
  __syncthreads();

  // Adjacent lanes compare a sentence with the others, four at a time.
  int lanes = kWarp;
  while (lanes > 1 && lanes * count > kListThreads) lanes /= 2;
  for (int first = 0; first < count; first += kListThreads / lanes) {
    const int place = first + threadIdx.x / lanes;
    const int mine = place < count ? numbers[place] : 0;
    int rank = 0;
    for (int i = threadIdx.x % lanes * 4; i < count; i += lanes * 4) {
      const int4 others = *reinterpret_cast<const int4*>(numbers + i);
      rank += (others.x > mine) + (others.y > mine) + (others.z > mine) + (others.w > mine);
    }
    for (int offset = lanes / 2; offset > 0; offset /= 2) {
      rank += __shfl_xor_sync(kAllLanes, rank, offset);
    }
    if (place < count && threadIdx.x % lanes == 0) {
      place_of_rank[rank] = static_cast<uint16_t>(place);
    }
  }
  __syncthreads();

  int total = 0;
  for (int first = 0; first < count; first += kListThreads) {
    const int rank = first + threadIdx.x;
    int of_sentence = 0, more;
    if (rank < count) {
      of_sentence =
          boundaries.items_of(boundaries.sentence(sentence_of_place[place_of_rank[rank]]));
    }
    const int before = total + sum_before(of_sentence, more);
    total += more;
    if (rank < count) numbers[rank] = before;
  }
  if (threadIdx.x == 0) {
    numbers[count] = total;
    counts[0] = total;
    counts[1] = 0;
  }
  __syncthreads();

  const auto items_of = [&](int rank) { return numbers[rank + 1] - numbers[rank]; };
  for (int rank = threadIdx.x; rank < count; rank += kListThreads) {
    int begin, end;  // of the group
#pragma unroll
    for (int c = 0; c < kClasses; ++c) {
      if (rank < class_begin[c]) continue;
      const int together = !boundaries.interleaved      ? 1
                           : boundaries.causal && c < 2 ? 2 << c
                                                        : 1 << c;
      begin = rank - (rank - class_begin[c]) % together;
      end = min(begin + together, c + 1 < kClasses ? class_begin[c + 1] : count);
    }
    const int place = place_of_rank[rank], mine = items_of(rank);
    Item item = boundaries.sentence(sentence_of_place[place]);
    item.unit = 2 * (item.first_q / kTile + place);
    for (int i = 0; i < mine; ++i) {
      // Before it: earlier items of the group's sentences, and equally early ones of sentences
      // before this one.
      int to = numbers[begin];
      for (int r = begin; r < end; ++r) to += min(items_of(r), i + (r < rank ? 1 : 0));
      item.start = (boundaries.of_keys ? i : mine - 1 - i) * boundaries.rows;
      items[to] = item;
    }
  }
  griddepcontrol_wait();
}

// Computes lse, lse_low and rowsum of the workspace, and zeroes the counters in `turns`. Eight
// lanes process one head of a row, 16 bytes per lane at a time.
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
  if (blockIdx.x == 0) griddepcontrol_wait();  // the other blocks end and make room for more
}

}  // namespace

ItemList list_items(const Call& a, int block_keys, bool interleaved, Tensor& memory,
                    cudaStream_t stream) {
  const int64_t sentences = most_long(a);
  const int64_t items =
      block_keys > 0 ? a.k.size(0) / block_keys + 2 * sentences : a.q.size(0) / kTile + sentences;
  constexpr int64_t kCounts = 32;  // bytes in front of the items
  memory = allocate(a.q, {kCounts + items * static_cast<int64_t>(sizeof(Item))}, ScalarType::Byte);
  char* const bytes = static_cast<char*>(memory.data_ptr());
  int* const counts = reinterpret_cast<int*>(bytes);
  Item* const list = reinterpret_cast<Item*>(bytes + kCounts);
  launch({.op = a.op, .grid = 1, .block = kListThreads, .stream = stream, .dependent = true},
         list_kernel,
         Boundaries{a.cu_q.const_data_ptr<int>(), a.cu_k.const_data_ptr<int>(),
                    static_cast<int>(a.sentences()), a.causal, block_keys > 0,
                    block_keys > 0 ? block_keys : kTile, a.most_of_short, interleaved},
         list, counts);
  return {list, counts};
}

Workspace prepare_workspace(const Call& a, const Backward& b, int64_t parts, int64_t numbers,
                            cudaStream_t stream) {
  constexpr int kThreads = 256, kLines = kThreads / 8;
  const int64_t rows = a.q.size(0), heads = a.q.size(1);
  const bool has_low = a.q.scalar_type() == ScalarType::Float;
  parts *= most_units(a) * heads;
  const Tensor of_queries = allocate(a.q, {has_low ? 3 : 2, heads, rows}, ScalarType::Float);
  const Tensor counters = allocate(a.q, {parts}, ScalarType::Int);
  const Tensor sums = allocate(a.q, {parts, numbers}, ScalarType::Float);
  float* const lse = of_queries.mutable_data_ptr<float>();
  float *const rowsum = lse + heads * rows, *const lse_low = rowsum + heads * rows;
  uint32_t* const turns = static_cast<uint32_t*>(counters.data_ptr());
  dispatch_float(a.q.scalar_type(), "attention_bwd: q", [&](auto zero) {
    using T = decltype(zero);
    launch({.op = a.op,
            .grid = static_cast<unsigned>(blocks_for(rows * heads, kLines)),
            .block = kThreads,
            .stream = stream,
            .dependent = true},
           rowsum_kernel<T>, packed<const T>(a.op, "dout", b.dout),
           packed<const T>(a.op, "out", b.out), b.lse.const_data_ptr<Lse<T>>(), lse, lse_low,
           rowsum, turns, parts, static_cast<int>(rows), static_cast<int>(heads),
           static_cast<int>(a.q.size(2)), static_cast<float>(1.0 - a.dropout_p));
  });
  return {of_queries, counters, sums, lse, rowsum, lse_low, turns, sums.mutable_data_ptr<float>()};
}

}  // namespace lightseq::attention
