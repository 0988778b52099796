// Activation and dropout between two products, for results in E4M3 with their transposes. T rows
// (tokens), F columns (FFN width). linear_activation_fwd_fp8.cu and activation_linear_bwd_fp8.cu
// call it if they cannot do the same next to the product.
//
//   forward    y  = dropout(activation(z + bias))   and the slope (slope.cuh), not of ReLU
//   backward   dz = dy slope / (1 - p); ReLU's slope is 1 where y is positive or NaN, else 0, and y
//              is read in E4M3 from its transpose
//   dbias      (+)= column sum of dz before the cast
//
//   bytes moved   per number: forward 4, with the slope 5; backward 5
//   determinism   relu has the bits of the references; the order of dbias' sums depends only on the
//                 sizes
//
// Results are cast from float32, without a rounding between. common/fp8_cast.cuh explains the
// kernels.

#include <optional>

#include "common/check.h"
#include "common/columns.cuh"
#include "common/fp8_cast.cuh"
#include "linear/activation.cuh"
#include "linear/ops.h"
#include "linear/slope.cuh"

namespace lightseq {
namespace {

// Code for compute capability 10.0 and later needs a few more registers.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr int kFewerBlocks = 1;
#else
constexpr int kFewerBlocks = 0;
#endif

// For each number of a thread whether it is kept: byte i of the two words has the bits of row i.
struct Kept {
  uint32_t words[kCastRows / kCastHalf];

  __device__ __forceinline__ uint32_t of_row(int i) const {
    return (i < kCastHalf ? words[0] : words[1]) >> (kColumnsPerDraw * (i % kCastHalf));
  }
};

__device__ __forceinline__ Kept draw(const DropoutFactors& dropout, const CastPlace& place) {
  Kept kept = {~0u, ~0u};
  if (!dropout.drops()) return kept;
  const Rng rng(dropout.dropout.rng);
#pragma unroll
  for (int half = 0; half < kCastRows / kCastHalf; ++half) {
    kept.words[half] = 0;
#pragma unroll
    for (int i = 0; i < kCastHalf; ++i) {
      const int64_t row = place.row() + half * kCastHalf + i;
      kept.words[half] |= dropout.draw(rng, row, place.column() / kColumnsPerDraw)
                          << (kColumnsPerDraw * i);
    }
  }
  return kept;
}

template <Activation kActivation>
struct Forward {
  static constexpr int kBlocks = 4 - kFewerBlocks;
  static constexpr int kRowsAhead = kCastRowsAhead<__nv_bfloat16>;
  static constexpr bool kSums = false;
  using Row = Columns<__nv_bfloat16>;
  struct State {
    Columns<__nv_bfloat16> bias = {};  // packed, because registers are few
    Kept kept;
    uint8_t* slope;  // of the thread's first row; null: do not write
    int rows;

    __device__ __forceinline__ State(const Forward& source, const Cast& cast,
                                     const CastPlace& place, CastTile&)
        : kept(draw(source.dropout, place)), slope(nullptr), rows(place.thread_rows) {
      if (rows == 0) return;
      bias.load(source.bias + place.column());
      if (source.slope != nullptr) {
        slope = source.slope + place.row() * cast.columns + place.column();
      }
    }
  };

  const __nv_bfloat16 *z, *bias;
  int64_t stride, columns;
  DropoutFactors dropout;
  uint8_t* slope;  // null: do not write

  __device__ __forceinline__ const __nv_bfloat16* at(const CastPlace& place, int first) const {
    return z + (place.row() + first) * stride + place.column();
  }
  __device__ __forceinline__ Row load(const __nv_bfloat16* at, int i) const {
    Row row;
    row.load_cg(at + i * stride);
    return row;
  }

  __device__ __forceinline__ void numbers(const State& state, const Row& row, int i,
                                          float (&y)[kColumnsPerDraw]) const {
    float of_bias[kColumnsPerDraw], slopes[kColumnsPerDraw];
    state.bias.unpack(of_bias);
    row.unpack(y);
    activate<__nv_bfloat16, kActivation>(y, of_bias, dropout, true, state.kept.of_row(i), slopes);
    if constexpr (has_slope(kActivation)) {
      if (state.slope == nullptr || i >= state.rows) return;
      SlopeColumns<__nv_bfloat16> codes;
      codes.pack(slopes);
      codes.store(state.slope + i * columns);
    }
  }
};

struct ReluBackward : Given<__nv_bfloat16, true> {  // of dy
  static constexpr int kBlocks = 3 - kFewerBlocks;
  static constexpr int kRowsAhead = kCastHalf;  // and 64 bytes of y
  // Reads y by whole cache lines of its transpose, through shared memory.
  struct State {
    Kept passed;

    __device__ __forceinline__ State(const ReluBackward& source, const Cast& cast,
                                     const CastPlace& place, CastTile& tile)
        : passed{} {
      uint4 y[CastTile::kThreadQuads];  // nvcc moves no load ahead of a store to shared memory
      tile.for_each_quad(place, source.y_transpose, source.y_stride,
                         [&](int i, const uint8_t* from, const uint4&, bool) {
                           y[i] = __ldcg(reinterpret_cast<const uint4*>(from));
                         });
      tile.for_each_quad(place, source.y_transpose, source.y_stride,
                         [&](int i, const uint8_t*, uint4& quad, bool swap) {
                           quad = CastTile::swapped(y[i], swap);
                         });
      __syncthreads();
#pragma unroll
      for (int e = 0; e < kColumnsPerDraw; ++e) {
        for (int half = 0; half < kCastRows / kCastHalf; ++half) {
          const uint32_t passes = positive_or_nan(tile.word(place, half, e));
          passed.words[half] |= passes >> (kColumnsPerDraw - 1 - e);
        }
      }
    }
  };

  const uint8_t* y_transpose;
  int64_t y_stride;
  float scale;  // 1 / (1 - p)

  __device__ __forceinline__ void numbers(const State& state, const Row& row, int i,
                                          float (&dz)[kColumnsPerDraw]) const {
    row.unpack(dz);
    const uint32_t passed = state.passed.of_row(i);
#pragma unroll
    for (int e = 0; e < kColumnsPerDraw; ++e) {
      dz[e] = passed >> e & 1u ? dz[e] * scale : 0.0f;  // also if dz is NaN
    }
  }
};

struct SlopeBackward {
  static constexpr int kBlocks = 3 - kFewerBlocks;
  static constexpr int kRowsAhead = kCastHalf;
  static constexpr bool kSums = true;
  struct Row {
    Columns<__nv_bfloat16> dy;
    SlopeColumns<__nv_bfloat16> slope;
  };
  struct At {
    const __nv_bfloat16* dy;
    const uint8_t* slope;
  };
  struct State {
    __device__ __forceinline__ State(const SlopeBackward&, const Cast&, const CastPlace&,
                                     CastTile&) {}
  };

  const __nv_bfloat16* dy;
  const uint8_t* slope;
  int64_t dy_stride, slope_stride;
  float scale;  // 1 / (1 - p)

  __device__ __forceinline__ At at(const CastPlace& place, int first) const {
    const int64_t row = place.row() + first;
    return {dy + row * dy_stride + place.column(), slope + row * slope_stride + place.column()};
  }
  __device__ __forceinline__ Row load(const At& at, int i) const {
    Row row;
    row.dy.load_cg(at.dy + i * dy_stride);
    row.slope.load_cg(at.slope + i * slope_stride);
    return row;
  }

  __device__ __forceinline__ void numbers(const State&, const Row& row, int,
                                          float (&dz)[kColumnsPerDraw]) const {
    float of_slope[kColumnsPerDraw];
    row.dy.unpack(dz);
    row.slope.unpack(of_slope);
#pragma unroll
    for (int e = 0; e < kColumnsPerDraw; ++e) dz[e] *= scale * of_slope[e];
  }
};

}  // namespace

void fp8_activation_fwd(const char* op, const Tensor& z, const Tensor& bias, Activation activation,
                        const DropoutFactors& dropout, const Tensor& slope, const Cast& cast) {
  dispatch_activation(activation, [&](auto chosen) {
    const Forward<chosen.value> source{.z = data_of<__nv_bfloat16>(z),
                                       .bias = data_of<__nv_bfloat16>(bias),
                                       .stride = z.stride(0),
                                       .columns = z.size(1),
                                       .dropout = dropout,
                                       .slope = output_of<uint8_t>(slope)};
    launch_cast(op, source, cast);
  });
}

void fp8_activation_bwd(const char* op, const Tensor& dy, const Tensor& y_transpose,
                        const std::optional<Tensor>& slope, float scale, const Cast& cast) {
  const auto* const data = data_of<__nv_bfloat16>(dy);
  if (slope.has_value()) {
    return launch_cast(op,
                       SlopeBackward{.dy = data,
                                     .slope = data_of<uint8_t>(slope),
                                     .dy_stride = dy.stride(0),
                                     .slope_stride = slope->stride(0),
                                     .scale = scale},
                       cast);
  }
  launch_cast(op,
              ReluBackward{{.x = data, .stride = dy.stride(0)},
                           data_of<uint8_t>(y_transpose),
                           y_transpose.stride(0),
                           scale},
              cast);
}

}  // namespace lightseq
