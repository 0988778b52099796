// Attention of long sentences in 16 bits, forward, on GPUs of compute capability 9.0. short_fwd.cu
// has the formula, work_list.cuh explains the work list.
//
// A block processes tiles of 128 queries of one head. One warp loads by TMA: queries, and tiles of
// 128 keys and values, the last one first. Two consumer warpgroups have 64 queries each. While a
// warpgroup computes the softmax of a tile, the product of the previous tile with V is in flight.
// While it draws dropout bits, its scores are in flight, too. Probabilities stay in registers.
//
//   saved for backward   out, and lse = log(sum of exp(scores)), float32 [T, H]
//   bytes moved          q, out and lse once; k and v once for each tile of queries, from the cache
//   determinism          every sum has a fixed order, which depends only on the sentence;
//                        another batch may choose another method (method.h)

#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include "attention/cast.cuh"
#include "attention/wgmma.cuh"
#include "common/ptx/wgmma.cuh"

namespace lightseq::attention {
namespace {

struct FwdParams {
  CUtensorMap q, k, v;  // boxes of kTile rows
  ItemList list;
  void* out;   // [Tq, H, D]
  float* lse;  // [Tq, H]
  int heads, width;
  Band band;
  float scale, keep_scale;  // keep_scale: 1 / (1 - p)
  Dropout dropout;
  Cast cast;  // of out
};

template <int kWidth>
struct FwdTiles {
  using Rows = uint16_t[kBoxes<kWidth>][kTile * kSwizzleColumns];
  Rows q[2], k[2], v[2];
  Claims claims;
  BlockStatistics<kWgmmaThreads / kWarp> statistics;
  Mbarrier q_full[2], q_empty[2], k_full[2], k_empty[2], v_loaded[2], v_full[2], v_empty[2];
};

#ifdef LIGHTSEQ_HAS_WGMMA

// Tiles of keys to which a tile of queries attends: from `begin` to before `end`. Without a window
// they begin with tile 0, which the compiler knows.
template <bool kWindow>
__device__ __forceinline__ Range key_tiles(const FwdParams& p, const Item& item) {
  const Range seen = p.band.seen(item.start, kTile).within(item.length_k);
  return {kWindow ? seen.begin / kTile : 0, tiles_of(seen.end)};
}

template <int kWidth, bool kWindow>
__device__ __forceinline__ void load(const FwdParams& p, FwdTiles<kWidth>& tiles) {
  const auto load_tile = [&](auto& to, const CUtensorMap& from, int head, int row, Mbarrier& full) {
    full.arrive_expect_tx(kBoxes<kWidth> * kBoxBytes);
#pragma unroll
    for (int box = 0; box < kBoxes<kWidth>; ++box) {
      tma_load(to[box], from, box * kSwizzleColumns, head, row, full);
    }
  };
  Stage<2> claim, q, kv;
  const auto take = [&] { return tiles.claims.take(claim, p.list, p.heads); };
  for (Item item = take(); item.head >= 0; item = take()) {
    const Range of_keys = key_tiles<kWindow>(p, item);
    if (of_keys.end == 0) continue;
    tiles.q_empty[q.index].wait(q.parity ^ 1);
    load_tile(tiles.q[q.index], p.q, item.head, item.first_q + item.start, tiles.q_full[q.index]);
    q.advance();
    for (int t = of_keys.end - 1; t >= of_keys.begin; --t, kv.advance()) {
      tiles.k_empty[kv.index].wait(kv.parity ^ 1);
      load_tile(tiles.k[kv.index], p.k, item.head, item.first_k + t * kTile,
                tiles.k_full[kv.index]);
      tiles.v_empty[kv.index].wait(kv.parity ^ 1);
      load_tile(tiles.v[kv.index], p.v, item.head, item.first_k + t * kTile,
                tiles.v_loaded[kv.index]);
    }
  }
}

// Passes tiles of V from the TMA to the consumers; zeroes the rows after the end of the sentence.
template <int kWidth, bool kWindow>
__device__ __forceinline__ void zero_values(const FwdParams& p, FwdTiles<kWidth>& tiles) {
  Stage<2> claim, kv;
  const auto read = [&] { return tiles.claims.read(claim); };
  for (Item item = read(); item.head >= 0; item = read()) {
    const Range of_keys = key_tiles<kWindow>(p, item);
    for (int t = of_keys.end - 1; t >= of_keys.begin; --t, kv.advance()) {
      tiles.v_loaded[kv.index].wait(kv.parity);
      const int rows = item.length_k - t * kTile;
      if (rows < kTile) {
#pragma unroll
        for (int box = 0; box < kBoxes<kWidth>; ++box) {
          zero_rows_of_box<kTile>(tiles.v[kv.index][box], rows);
        }
        fence_proxy_async();
        __syncwarp();
      }
      if (threadIdx.x % kWarp == 0) tiles.v_full[kv.index].arrive();
    }
  }
}

template <typename T, int kWidth, bool kWindow, bool kDrops, bool kCasts>
__device__ __forceinline__ void attend(const FwdParams& p, FwdTiles<kWidth>& tiles) {
  const int group = of_warp(threadIdx.x / kWarpgroup) - 1, lane = threadIdx.x % kWarp;
  const int c = lane % 4;
  const int row = group * kWgmmaM + threadIdx.x % kWarpgroup / kWarp * 16 + lane / 4;  // and + 8
  const float scale = p.scale * kLog2E;
  const AttentionDropout dropout = kDrops ? AttentionDropout(p.dropout) : AttentionDropout();
  const int64_t token_stride = static_cast<int64_t>(p.heads) * p.width;

  if constexpr (kCasts) tiles.statistics.clear();
  Stage<2> claim, qs, ks, vs;
  const auto read = [&] { return tiles.claims.read(claim); };
  for (Item item = read(); item.head >= 0; item = read()) {
    const Range of_keys = key_tiles<kWindow>(p, item);
    const int position = item.start + row;
    const int rows = item.length_q - position;  // from `row` on
    const int64_t token = item.first_q + position;
    T* const out = static_cast<T*>(p.out) + token * token_stride + item.head * p.width;
    float* const lse = p.lse + token * p.heads + item.head;

    float o[kWidth / 2];
#pragma unroll
    for (int e = 0; e < kWidth / 2; ++e) o[e] = 0.0f;
    const auto store = [&](float low, float high) {
      store_sums<T>(out, token_stride, rows, p.width, o, low, high);
      if constexpr (kCasts) {
        cast_sums(p.cast, tiles.statistics, token, item.head * p.width, rows, p.width, by_group(o),
                  low, high);
      }
    };
    if (of_keys.end == 0) {
      store(0.0f, 0.0f);
      if (c == 0 && rows > 0) lse[0] = 0.0f;
      if (c == 0 && rows > 8) lse[8 * p.heads] = 0.0f;
      continue;
    }

    float s[kTile / 2];
    uint32_t probabilities[kTile / 4], keep[2] = {~0u, ~0u};
    float shift[2], sum[2] = {0.0f, 0.0f}, shrink[2] = {1.0f, 1.0f};

    const WgmmaOperand q(shared_address(tiles.q[qs.index]) + group * kWgmmaM * kSwizzleBytes);
    const auto start_scores = [&] {
      tiles.k_full[ks.index].wait(ks.parity);
      const WgmmaOperand k(shared_address(tiles.k[ks.index]));
      wgmma_fence();
      wgmma_first<T, 0, 0>(s, q.at(0), k.at(0));
#pragma unroll
      for (int step = 1; step < kWidth / kWgmmaK; ++step) {
        const int at = step / 4 * kBoxBytes + step % 4 * 32;
        wgmma<T, 0, 0>(s, q.at(at), k.at(at));
      }
      wgmma_commit();
    };
    const auto start_values = [&] {
      tiles.v_loaded[vs.index].wait(vs.parity);  // makes the TMA's writes visible here
      tiles.v_full[vs.index].wait(vs.parity);
      const WgmmaOperand v(shared_address(tiles.v[vs.index]), kBoxBytes);
      wgmma_hold(o);
      wgmma_fence();
#pragma unroll
      for (int step = 0; step < kTile / kWgmmaK; ++step) {
        wgmma_registers<T, 1>(o, probabilities + 4 * step, v.at(step * kSixteenRows));
      }
      wgmma_commit();
    };
    const auto draw = [&](int t) {
      if constexpr (kDrops) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint32_t id = static_cast<uint32_t>(token + half * 8) * p.heads + item.head;
          keep[half] = bits_of_lane(dropout.keep_word(id, t * (kTile / 32) + c));
        }
      }
    };
    // Hides keys of tile t from queries.
    const auto hide = [&](int t) {
      const Range keys{t * kTile, t * kTile + kTile};
      const int first_query = item.start + group * kWgmmaM;
      const Range clear = p.band.seen_by_all(first_query, kWgmmaM).within(item.length_k);
      if (kWindow ? clear.has(keys) : keys.end <= clear.end) return;
#pragma unroll
      for (int e = 0; e < kTile / 2; ++e) {
        const int key = keys.begin + e / 4 * 8 + c * 2 + e % 2, query = position + e / 2 % 2 * 8;
        const int last = min(item.length_k - 1, query + p.band.after);
        if (key > last || (kWindow && key < query - p.band.before)) s[e] = -INFINITY;
      }
    };
    // Replaces the scores by exponentials. Returns whether the shift grew; then o must shrink.
    const auto exponentials = [&](bool first) {
      float largest[2] = {-INFINITY, -INFINITY};
#pragma unroll
      for (int e = 0; e < kTile / 2; ++e) largest[e / 2 % 2] = fmaxf(largest[e / 2 % 2], s[e]);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        largest[half] = fmaxf(largest[half], __shfl_xor_sync(kAllLanes, largest[half], 1));
        largest[half] = fmaxf(largest[half], __shfl_xor_sync(kAllLanes, largest[half], 2));
      }
      bool grew = false;
      if (first) {
        shift[0] = kWindow ? fmaxf(largest[0], kLeastShift) : largest[0];
        shift[1] = kWindow ? fmaxf(largest[1], kLeastShift) : largest[1];
      } else {
        const float tolerance = kTolerance / scale;
        grew = __any_sync(kAllLanes,
                          largest[0] > shift[0] + tolerance || largest[1] > shift[1] + tolerance);
        if (grew) {
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            // Each row alone: rows after the end of the sentence must not change other rows.
            const bool outgrown = largest[half] > shift[half] + tolerance;
            const float next = outgrown ? largest[half] : shift[half];
            shrink[half] = exp2_approximate((shift[half] - next) * scale);
            shift[half] = next;
            sum[half] *= shrink[half];
          }
        }
      }
      const float offset[2] = {-shift[0] * scale, -shift[1] * scale};
#pragma unroll
      for (int e = 0; e < kTile / 2; ++e) {
        s[e] = exp2_approximate(fmaf(s[e], scale, offset[e / 2 % 2]));
        sum[e / 2 % 2] += s[e];
      }
      return grew;
    };
    // Rounds the exponentials to operands of the next product, zero where they are dropped.
    const auto round = [&] {
#pragma unroll
      for (int i = 0; i < kTile / 4; ++i) {  // a pair of columns of a row
        probabilities[i] = pack_pair<T>(s[2 * i], s[2 * i + 1]);
        if constexpr (kDrops) {
          const uint32_t word = keep[i % 2];
          const int first = i / 8 * 2;
          probabilities[i] &= mask_of_bits(word << (7 - first), word << (6 - first), i / 2 % 4);
        }
      }
    };

    tiles.q_full[qs.index].wait(qs.parity);
    start_scores();
    draw(of_keys.end - 1);
    wgmma_wait<0>();
    wgmma_hold(s);
    release(tiles.k_empty[ks.index]);
    ks.advance();
    hide(of_keys.end - 1);  // without a window, only this tile has keys that a query does not see
    exponentials(true);
    round();
#pragma unroll 1
    for (int t = of_keys.end - 2; t >= of_keys.begin; --t) {
      start_scores();
      start_values();
      draw(t);
      wgmma_wait<1>();
      wgmma_hold(s);
      release(tiles.k_empty[ks.index]);
      ks.advance();
      if constexpr (kWindow) hide(t);
      const bool grew = exponentials(false);
      // ptxas would move most of the exponentials behind the next wait. They stay here, while the
      // product with V is in flight, because of this branch on their sum, which is never negative.
      if (sum[0] + sum[1] < 0.0f) asm volatile("trap;");
      wgmma_wait<0>();
      wgmma_hold(o);
      release(tiles.v_empty[vs.index]);
      vs.advance();
      if (grew) {
#pragma unroll
        for (int e = 0; e < kWidth / 2; ++e) o[e] *= shrink[e / 2 % 2];
      }
      round();
    }
    release(tiles.q_empty[qs.index]);
    qs.advance();
    start_values();
    wgmma_wait<0>();
    wgmma_hold(o);
    release(tiles.v_empty[vs.index]);
    vs.advance();

    const float2 factor = end_softmax<T>(shift, sum, scale, p.keep_scale, true, lse, p.heads, rows);
    store(factor.x, factor.y);
  }
  if (kCasts && lane == 0) tiles.statistics.of_warp[threadIdx.x / kWarp].publish(p.cast);
}

#endif

template <typename T, int kWidth, bool kWindow, bool kDrops, bool kCasts>
__global__ __launch_bounds__(kWgmmaThreads, 1) void attention_wgmma_fwd_kernel(
    const __grid_constant__ FwdParams p) {
#ifdef LIGHTSEQ_HAS_WGMMA
  extern __shared__ __align__(1024) unsigned char shared[];
  FwdTiles<kWidth>& tiles = *reinterpret_cast<FwdTiles<kWidth>*>(shared);
  constexpr int kConsumerWarps = 2 * kWarpgroup / kWarp;
  if (threadIdx.x == 0) {
    tiles.claims.init(kConsumerWarps + 1);
    for (int i = 0; i < 2; ++i) {
      tiles.q_full[i].init(1);
      tiles.k_full[i].init(1);
      tiles.v_loaded[i].init(1);
      tiles.v_full[i].init(1);
      tiles.q_empty[i].init(kConsumerWarps);
      tiles.k_empty[i].init(kConsumerWarps);
      tiles.v_empty[i].init(kConsumerWarps);
    }
    fence_mbarrier_init();
  }
  __syncthreads();
  griddepcontrol_wait();
  // An SM has 64 Ki registers, which is 168 per thread.
  if (threadIdx.x >= kWarpgroup) {
    setmaxnreg_inc<232>();
    attend<T, kWidth, kWindow, kDrops, kCasts>(p, tiles);
  } else {
    setmaxnreg_dec<40>();
    if (threadIdx.x == 0) load<kWidth, kWindow>(p, tiles);
    if (threadIdx.x / kWarp == 1) zero_values<kWidth, kWindow>(p, tiles);
  }
#else
  asm volatile("trap;");
#endif
}

}  // namespace

void wgmma_fwd(const Call& a, const Forward& f) {
  const int32_t device = a.q.get_device();
  const cudaStream_t stream = current_stream(device);
  Tensor memory;
  const ItemList list = list_items(a, 0, true, memory, stream);
  const FwdParams params{.q = tensor_map_of_heads(a.q, kTile),
                         .k = tensor_map_of_heads(a.k, kTile),
                         .v = tensor_map_of_heads(a.v, kTile),
                         .list = list,
                         .out = f.out.data_ptr(),
                         .lse = f.lse.mutable_data_ptr<float>(),
                         .heads = static_cast<int>(a.q.size(1)),
                         .width = static_cast<int>(a.q.size(2)),
                         .band = a.band(),
                         .scale = static_cast<float>(a.scale),
                         .keep_scale = a.keep_scale(),
                         .dropout = dropout_of(a),
                         .cast = f.cast};
  dispatch_long(a, f.cast, [&](auto zero, auto width, auto drops, auto casts) {
    dispatch_value<false, true>(a.window > 0, [&](auto window) {
      launch({.op = a.op,
              .grid = static_cast<unsigned>(resident_blocks(device, 1)),
              .block = kWgmmaThreads,
              .shared = sizeof(FwdTiles<width>),
              .stream = stream,
              .dependent = true},
             attention_wgmma_fwd_kernel<decltype(zero), width, window, drops, casts>, params);
    });
  });
}

}  // namespace lightseq::attention
