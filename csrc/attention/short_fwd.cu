// Attention over packed sentences, forward, for sentences of any length; the other methods are
// faster for long ones. units.cuh explains how the work is divided.
//
//   out = dropout(softmax(scale * q k^T)) v       within each sentence and head
//
// A warp processes 16 queries. It holds their scores with up to 32 keys at a time in registers.
// Softmax is online: it keeps a running maximum and a running sum (Milakov and Gimelshein 2018). So
// the same code serves sentences of any length, and no score is written to global memory.
//
// T is the number of packed tokens, H the number of heads.
//
//   saved for backward   out, and lse = log(sum of exp(scores)) [T, H]: float32 in 16 bits, float64
//                        for float32
//   in fp8               out also in E4M3, for the product that reads it (cast.cuh)
//   bytes moved          If a sentence fits into a tile, q, k, v, out and lse are each read or
//                        written once. In a longer sentence each tile of queries reads k and v
//                        again, from the cache.
//   determinism          no atomics; every sum has a fixed order, which depends only on the
//                        sentence and on which kernels compute the batch (method.h)
//
// Dropped probabilities are zeros in the product with v. They still count in the sum of the row,
// because softmax comes before dropout. The dropout bits are generated into shared memory while
// keys and values are being copied there.

#include "attention/cast.cuh"
#include "attention/tiles.cuh"

namespace lightseq::attention {
namespace {

template <typename T>
struct FwdParams : UnitParams<T> {
  Packed<T> out;
  Lse<T>* lse;
  Cast cast;  // of out
};

// Small blocks: many are resident on an SM, and some of them load while others compute.
template <typename T, int kWidth>
constexpr int kRows = kTileRows<64, T, kWidth>;
template <typename T, int kWidth>
constexpr int kThreads = kRows<T, kWidth> / kWarpRows * kWarp;

template <typename T, int kWidth>
struct FwdTiles {
  Tile<T, kRows<T, kWidth>, kWidth> q, k, v;
  Keep<kRows<T, kWidth>> keep;
  Plan plan;
  BlockStatistics<kThreads<T, kWidth> / kWarp> statistics;
};

// Online softmax state of a warp's queries: the results o, and for rows g and g + 8 (see
// common/ptx/mma.cuh) the shift and this lane's part of the sum.
template <int kWidth>
struct Softmax {
  float o[kWidth / 8][4] = {};
  float shift[2] = {}, sum[2] = {};
};

// The first of several adjacent keys.
struct Keys {
  int first;      // number in the sentence
  int row;        // row in the tiles
  int word;       // word of dropout bits
  bool is_first;  // no key has been processed before
};

// Processes kChunk more keys. clear_end: see hide().
template <int kChunk, typename T, int kWidth>
__device__ __forceinline__ void attend(Softmax<kWidth>& state, FwdTiles<T, kWidth>& tiles,
                                       const FwdParams<T>& p, const Unit& unit, const Place& place,
                                       const Keys& keys, int clear_end) {
  const float scale = p.scale * Base<T>::kLogE;
  float s[kChunk / 8][4];
  multiply_nt<T, kWidth>(s, tiles.q.row(place.row), tiles.k.row(keys.row));
  hide(s, place.position, keys.first, unit.length_k, p.work.band, clear_end);

  float largest[2];
  find_largest(largest, s);
  const float tolerance = kTolerance / scale;
  const bool outgrown =
      largest[0] > state.shift[0] + tolerance || largest[1] > state.shift[1] + tolerance;
  if (keys.is_first) {
    state.shift[0] = fmaxf(largest[0], kLeastShift);
    state.shift[1] = fmaxf(largest[1], kLeastShift);
  } else if (__any_sync(kAllLanes, outgrown)) {
    raise_shift<T>(state.shift, state.sum, state.o, largest, scale);
  }

#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float offset = -state.shift[half] * scale;
    uint32_t keep = ~0u;
    if (p.dropout.threshold > 0) {
      keep = tiles.keep[place.row + lane_row() + half * 8][keys.word] >> lane_column();
    }
#pragma unroll
    for (int n = 0; n < kChunk / 8; ++n) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& score = s[n][half * 2 + e];
        const float probability = Base<T>::exp(fmaf(score, scale, offset));
        state.sum[half] += probability;
        score = keep >> (n * 8 + e) & 1u ? probability : 0.0f;
      }
    }
  }
  multiply_nn<T, kWidth>(state.o, s, tiles.v.row(keys.row));
}

template <typename T, int kWidth, bool kCasts>
__global__ __launch_bounds__(kThreads<T, kWidth>, kMinBlocks<T, kWidth, kThreads<T, kWidth>>)  //
    void attention_short_fwd_kernel(const FwdParams<T> p) {
  extern __shared__ __align__(16) unsigned char shared[];
  FwdTiles<T, kWidth>& tiles = *reinterpret_cast<FwdTiles<T, kWidth>*>(shared);
  const Work& work = p.work;

  if (work.longest != INT_MAX) griddepcontrol_launch_dependents();  // see work_list.cu
  if (blockIdx.x >= work.blocks) {
    check_boundaries(work);
    const int first = work.cu_q[work.sentences];
    zero_rows(p.out, first, work.rows_q, work);
    for (int row = first + blockIdx.x - work.blocks; row < work.rows_q; row += kZeroBlocks) {
      for (int head = threadIdx.x; head < work.heads; head += blockDim.x) {
        p.lse[static_cast<int64_t>(row) * work.heads + head] = 0;
      }
    }
    if constexpr (kCasts) zero_values(p.cast, first, work.rows_q, work);
    return;
  }

  if constexpr (kCasts) tiles.statistics.clear();
  for_each_unit<kRows<T, kWidth>>(tiles.plan, work, p.dropout, kQueries, [&](const Unit unit) {
    const Place place(unit);
    const bool works = place.exists && place.position < unit.length_q;
    // The keys that one of the tile's or warp's queries sees.
    const Range of_tile = work.band.seen(unit.start, unit.slot()).within(unit.length_k);
    const Range of_warp = work.band.seen(place.position, kWarpRows).within(unit.length_k);
    const int clear_end = min(unit.length_k, place.position + 1 + work.band.after);
    const int first_tile = of_tile.begin & -unit.slot(), first_chunk = of_warp.begin & -32;

    Softmax<kWidth> state;
    for (int tile = first_tile; tile < of_tile.end; tile += unit.slot()) {
      if (tile == first_tile) {
        load_tiles({&tiles.q}, {p.q}, unit, unit.first_q + unit.start, unit.length_q - unit.start,
                   work.width);
      } else {
        __syncthreads();
      }
      load_tiles({&tiles.k, &tiles.v}, {p.k, p.v}, unit, unit.first_k + tile, unit.length_k - tile,
                 work.width);
      draw(tiles.keep, tiles.plan, p.dropout, work, unit, unit.start, tile);
      cp_async_wait_all();
      __syncthreads();
      if (!works) continue;
      if (unit.slot() == 16) {
        attend<16>(state, tiles, p, unit, place,
                   {.first = 0, .row = place.slot, .word = 0, .is_first = true}, clear_end);
        continue;
      }
#pragma unroll 1
      for (int chunk = max(first_chunk - tile, 0); chunk < min(unit.slot(), of_warp.end - tile);
           chunk += 32) {
        attend<32>(state, tiles, p, unit, place,
                   {.first = tile + chunk,
                    .row = place.slot + chunk,
                    .word = chunk / 32,
                    .is_first = tile + chunk == first_chunk},
                   clear_end);
      }
    }

    if (!works) return;
    const HeadRows queries = queries_of(unit, place);
    const int row = queries.first + lane_row(), rows = queries.length - lane_row();
    const float2 factor = end_softmax<T>(
        state.shift, state.sum, p.scale * Base<T>::kLogE, p.keep_scale, unit.length_k > 0,
        p.lse + static_cast<int64_t>(row) * work.heads + place.head, work.heads, rows);
    store_rows<T, kWidth>(p.out, queries, tiles.q.row(place.row), state.o, factor.x, factor.y,
                          work.width);
    if constexpr (kCasts) {
      cast_sums(p.cast, tiles.statistics, row, queries.head * work.width, rows, work.width, state.o,
                factor.x, factor.y);
    }
  });
  if (kCasts && threadIdx.x == 0) tiles.statistics.publish(p.cast);
}

}  // namespace

void short_fwd(const Call& a, const Forward& f) {
  dispatch(a, [&](auto zero, auto width) {
    using T = decltype(zero);
    const UnitParams<T> of_both(a);
    if (f.out.numel() == 0) return;
    const FwdParams<T> p{of_both, packed<T>(a.op, "out", f.out), f.lse.mutable_data_ptr<Lse<T>>(),
                         f.cast};
    dispatch_cast<T>(f.cast, [&](auto casts) {
      launch_units(a, attention_short_fwd_kernel<T, width, casts>, p, kThreads<T, width>,
                   sizeof(FwdTiles<T, width>));
    });
  });
}

}  // namespace lightseq::attention
