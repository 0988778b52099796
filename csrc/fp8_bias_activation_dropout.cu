// bias_activation_dropout.cu with results in E4M3, and their transposes. T rows (tokens), F columns
// (FFN width).
//
//   forward                 y  = dropout(activation(x + bias))
//   backward                dx = dropout(dy) * activation'(x + bias)
//   fp8_relu_dropout_bwd    dz = dy / (1 - p) where forward's result y is positive or NaN, else 0;
//                           y is read in E4M3 from its transpose
//   dbias                   (+)= column sum of dx or dz before the cast
//
//   saved for backward   x; for relu only y's transpose, which a product also reads
//   bytes moved          per number of a 16-bit type: forward 4, backward 6 (identity: 4),
//                        fp8_relu_dropout_bwd 5
//   determinism          identity and relu have the bits of the references; the order of dbias'
//                        sums depends only on the sizes
//
// Results are cast from float32, without a rounding between. common/fp8_cast.cuh explains the
// kernels.

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <optional>
#include <string>
#include <tuple>

#include "common/activation.cuh"
#include "common/check.h"
#include "common/column_sum.cuh"
#include "common/columns.cuh"
#include "common/fp8_cast.cuh"
#include "common/optional.h"

namespace lightseq {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

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

// The state of forward and backward.
template <typename T>
struct BiasAndDropout {
  Columns<T> bias;  // packed, because registers are few
  Kept kept;

  // of_columns null: no bias. Then the values are -0: adding -0 changes no number.
  __device__ __forceinline__ BiasAndDropout(const T* of_columns, const DropoutFactors& dropout,
                                            const CastPlace& place)
      : kept(draw(dropout, place)) {
#pragma unroll
    for (uint32_t& word : bias.words) word = sizeof(T) == 2 ? 0x80008000u : 0x80000000u;
    if (of_columns != nullptr && place.thread_rows > 0) bias.load(of_columns + place.column());
  }
};

template <typename T, Activation kActivation>
struct Forward {
  static constexpr int kBlocks = sizeof(T) == 2 ? 4 : 3 - kFewerBlocks;
  static constexpr int kRowsAhead = kCastRowsAhead<T>;
  static constexpr bool kSums = false;
  using Row = Columns<T>;
  struct State : BiasAndDropout<T> {
    __device__ __forceinline__ State(const Forward& source, const Cast&, const CastPlace& place,
                                     CastTile&)
        : BiasAndDropout<T>(source.bias, source.dropout, place) {}
  };

  const T *x, *bias;  // bias null: none
  int64_t stride;
  DropoutFactors dropout;

  __device__ __forceinline__ const T* at(const CastPlace& place, int first) const {
    return x + (place.row() + first) * stride + place.column();
  }
  __device__ __forceinline__ Row load(const T* at, int i) const {
    Row row;
    row.load_cg(at + i * stride);
    return row;
  }

  __device__ __forceinline__ void numbers(const State& state, const Row& row, int i,
                                          float (&y)[kColumnsPerDraw]) const {
    float bias_of[kColumnsPerDraw];
    state.bias.unpack(bias_of);
    row.unpack(y);
#pragma unroll
    for (int e = 0; e < kColumnsPerDraw; ++e) {
      y[e] = activate<T, kActivation>(y[e] + bias_of[e]).value;
    }
    dropout.apply(state.kept.of_row(i), y);
  }
};

template <typename T, Activation kActivation>
struct Backward {
  static constexpr bool kReadsX = Derivative<kActivation>::kReadsX;
  static constexpr int kBlocks = sizeof(T) == 2 && !kReadsX ? 3 : 2;
  static constexpr int kRowsAhead = kCastRowsAhead<T>;
  static constexpr bool kSums = true;
  struct Row {
    Columns<T> dy, x;
  };
  struct At {
    const T *dy, *x;
  };
  struct State : BiasAndDropout<T> {
    __device__ __forceinline__ State(const Backward& source, const Cast&, const CastPlace& place,
                                     CastTile&)
        : BiasAndDropout<T>(source.bias, source.dropout, place) {}
  };

  const T *dy, *x, *bias;  // bias null: none
  int64_t dy_stride, x_stride;
  DropoutFactors dropout;

  __device__ __forceinline__ At at(const CastPlace& place, int first) const {
    const int64_t row = place.row() + first;
    return {dy + row * dy_stride + place.column(), x + row * x_stride + place.column()};
  }
  __device__ __forceinline__ Row load(const At& at, int i) const {
    Row row = {};
    row.dy.load_cg(at.dy + i * dy_stride);
    if constexpr (kReadsX) row.x.load_cg(at.x + i * x_stride);
    return row;
  }

  __device__ __forceinline__ void numbers(const State& state, const Row& row, int i,
                                          float (&dx)[kColumnsPerDraw]) const {
    float before[kColumnsPerDraw] = {}, bias_of[kColumnsPerDraw];
    state.bias.unpack(bias_of);
    row.dy.unpack(dx);
    if constexpr (kReadsX) row.x.unpack(before);
    dropout.apply(state.kept.of_row(i), dx);
#pragma unroll
    for (int e = 0; e < kColumnsPerDraw; ++e) {
      dx[e] = Derivative<kActivation>::template times<T>(dx[e], before[e] + bias_of[e]);
    }
  }
};

// Bit 7 of each byte of the result: whether the E4M3 number is positive or NaN. Other bits are 0.
__device__ __forceinline__ uint32_t positive_or_nan(uint32_t four) {
  const uint32_t size = four & 0x7f7f7f7fu;  // so a sum of two bytes does not carry
  const uint32_t is_not_zero = size + 0x7f7f7f7fu, is_nan = size + 0x01010101u;
  return is_not_zero & (~four | is_nan) & 0x80808080u;
}

template <typename T>
struct ReluDropoutBackward {
  static constexpr int kBlocks = sizeof(T) == 2 ? 3 - kFewerBlocks : 2;
  static constexpr int kRowsAhead = kCastHalf;  // and 64 bytes of y
  static constexpr bool kSums = true;
  using Row = Columns<T>;
  // Reads y by whole cache lines of its transpose, through shared memory.
  struct State {
    Kept passed;

    __device__ __forceinline__ State(const ReluDropoutBackward& source, const Cast& cast,
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

  const T* dy;
  int64_t dy_stride;
  const uint8_t* y_transpose;
  int64_t y_stride;
  float scale;  // 1 / (1 - p)

  __device__ __forceinline__ const T* at(const CastPlace& place, int first) const {
    return dy + (place.row() + first) * dy_stride + place.column();
  }
  __device__ __forceinline__ Row load(const T* at, int i) const {
    Row row;
    row.load_cg(at + i * dy_stride);
    return row;
  }

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

// The scalars of an op's cast.
struct CastArguments {
  Tensor scale, amax, saturated;
};

std::tuple<Tensor, Tensor> fp8_bias_activation_dropout_fwd(
    const Tensor& x, std::optional<Tensor> bias, std::string activation, double p,
    const Tensor& rng, int64_t site, const Tensor& scale, Tensor amax, Tensor saturated) {
  constexpr const char* kOp = "fp8_bias_activation_dropout_fwd";
  check_cast(kOp, "x", x);
  check_optional_rows(kOp, "bias", bias);
  const torch::stable::accelerator::DeviceGuard guard(x.get_device());
  const auto results = allocate_cast(x);
  const Cast cast = cast_into(results, scale, amax, saturated);
  const DropoutFactors dropout(rng.const_data_ptr<int64_t>(), site, p);
  dispatch_float(x.scalar_type(), "fp8_bias_activation_dropout_fwd: x", [&](auto zero) {
    using T = decltype(zero);
    dispatch_activation(activation_of(kOp, activation), [&](auto chosen) {
      const Forward<T, chosen.value> source{
          .x = data_of<T>(x), .bias = data_of<T>(bias), .stride = x.stride(0), .dropout = dropout};
      launch_cast(kOp, source, cast, current_stream(x.get_device()));
    });
  });
  return results;
}

// launch(cast) starts the kernel. Then adds its partial column sums to dbias.
template <typename Launch>
std::tuple<Tensor, Tensor> cast_and_sum(const char* op, const Tensor& like,
                                        const std::optional<Tensor>& dbias, bool accumulate,
                                        const CastArguments& of_cast, Launch&& launch) {
  const Gradients gradients{{gradient_of(op, "dbias", dbias)}};
  const auto results = allocate_cast(like);
  Cast cast = cast_into(results, of_cast.scale, of_cast.amax, of_cast.saturated);
  const Tensor partials = allocate(
      like, {dbias.has_value() ? cast.tiles_down() : 0, 1, cast.columns}, ScalarType::Float);
  if (dbias.has_value()) cast.partials = partials.mutable_data_ptr<float>();
  launch(cast);
  if (dbias.has_value()) {
    add_partials(partials, gradients, accumulate, current_stream(like.get_device()));
  }
  return results;
}

std::tuple<Tensor, Tensor> fp8_bias_activation_dropout_bwd(
    const Tensor& dy, const Tensor& x, std::optional<Tensor> bias, std::string activation, double p,
    const Tensor& rng, int64_t site, std::optional<Tensor> dbias, bool accumulate,
    const Tensor& scale, Tensor amax, Tensor saturated) {
  constexpr const char* kOp = "fp8_bias_activation_dropout_bwd";
  check_cast(kOp, "x", x);
  check_rows(kOp, "dy", dy);
  check_optional_rows(kOp, "bias", bias);
  const torch::stable::accelerator::DeviceGuard guard(x.get_device());
  const DropoutFactors dropout(rng.const_data_ptr<int64_t>(), site, p);
  return cast_and_sum(kOp, x, dbias, accumulate, {scale, amax, saturated}, [&](const Cast& cast) {
    dispatch_float(x.scalar_type(), "fp8_bias_activation_dropout_bwd: x", [&](auto zero) {
      using T = decltype(zero);
      dispatch_activation(activation_of(kOp, activation), [&](auto chosen) {
        const Backward<T, chosen.value> source{.dy = data_of<T>(dy),
                                               .x = data_of<T>(x),
                                               .bias = data_of<T>(bias),
                                               .dy_stride = dy.stride(0),
                                               .x_stride = x.stride(0),
                                               .dropout = dropout};
        launch_cast(kOp, source, cast, current_stream(x.get_device()));
      });
    });
  });
}

std::tuple<Tensor, Tensor> fp8_relu_dropout_bwd(const Tensor& dy, const Tensor& y_transpose,
                                                double p, std::optional<Tensor> dbias,
                                                bool accumulate, const Tensor& scale, Tensor amax,
                                                Tensor saturated) {
  constexpr const char* kOp = "fp8_relu_dropout_bwd";
  check_cast(kOp, "dy", dy);
  check_rows(kOp, "y_transpose", y_transpose);
  const torch::stable::accelerator::DeviceGuard guard(dy.get_device());
  return cast_and_sum(kOp, dy, dbias, accumulate, {scale, amax, saturated}, [&](const Cast& cast) {
    dispatch_float(dy.scalar_type(), "fp8_relu_dropout_bwd: dy", [&](auto zero) {
      using T = decltype(zero);
      const ReluDropoutBackward<T> source{.dy = data_of<T>(dy),
                                          .dy_stride = dy.stride(0),
                                          .y_transpose = data_of<uint8_t>(y_transpose),
                                          .y_stride = y_transpose.stride(0),
                                          .scale = static_cast<float>(1.0 / (1.0 - p))};
      launch_cast(kOp, source, cast, current_stream(dy.get_device()));
    });
  });
}

STABLE_TORCH_LIBRARY_IMPL(lightseq, CUDA, m) {
  m.impl("fp8_bias_activation_dropout_fwd", TORCH_BOX(&fp8_bias_activation_dropout_fwd));
  m.impl("fp8_bias_activation_dropout_bwd", TORCH_BOX(&fp8_bias_activation_dropout_bwd));
  m.impl("fp8_relu_dropout_bwd", TORCH_BOX(&fp8_relu_dropout_bwd));
}

}  // namespace
}  // namespace lightseq
