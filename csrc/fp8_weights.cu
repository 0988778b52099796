// Cast of M matrices in one flat buffer to E4M3, with their transposes. A matrix has N rows and K
// columns, both multiples of 16, and a scale of its own.
//
//   values, transposes   [N, K] and [K, N] of each matrix
//   amax, saturated      of each matrix, raised and added to
//
//   bytes moved   the matrices, values and transposes once: 4 per number of a 16-bit type
//   determinism   the same bits as the reference, ops/fp8_weights.py
//
// The resident blocks share all tiles, because only the device knows the sizes of the matrices. A
// block walks over the matrices once, since its tiles have ascending numbers.
// common/fp8_cast.cuh explains the cast of a tile.

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>

#include "common/check.h"
#include "common/fp8_cast.cuh"
#include "common/occupancy.h"
#include "common/optional.h"

namespace lightseq {
namespace {

using torch::stable::Tensor;

// A row of `places`.
struct Place {
  int64_t from;  // first element in weights
  int64_t to;    // first element in values and in transposes
  int64_t rows, columns;
};

// A matrix of the buffer; its tile follows another one of the same block.
template <typename T>
struct Weight : Given<T> {
  struct State {
    // The loads are in flight while the other threads still read the tile before.
    __device__ __forceinline__ State(const Weight&, const Cast&, const CastPlace&, CastTile&) {
      __syncthreads();
    }
  };
};

__device__ __forceinline__ unsigned tiles_in(int64_t numbers) {
  return static_cast<unsigned>((numbers + kCastTile - 1) / kCastTile);
}

struct Weights {
  const Place* places;
  int count;  // M
  uint8_t *values, *transposes;
  const float* scale;
  int64_t scale_stride;
  int* amax;
  unsigned long long* saturated;
};

template <typename T>
__global__ void __launch_bounds__(kCastThreads, Weight<T>::kBlocks)
    fp8_weights_kernel(const T* __restrict__ from, const __grid_constant__ Weights weights) {
  int matrix = 0;
  unsigned before = 0;  // tiles of the matrices before
  for (unsigned number = blockIdx.x;; number += gridDim.x) {
    Place place;
    unsigned tiles_across;
    for (;; ++matrix) {
      if (matrix == weights.count) return;
      place = weights.places[matrix];
      tiles_across = tiles_in(place.columns);
      const unsigned tiles = tiles_in(place.rows) * tiles_across;
      if (number - before < tiles) break;
      before += tiles;
    }
    const Cast cast{.values = weights.values + place.to,
                    .transpose = weights.transposes + place.to,
                    .scale = weights.scale + matrix * weights.scale_stride,
                    .amax = weights.amax + matrix,
                    .saturated = weights.saturated + matrix,
                    .rows = place.rows,
                    .columns = place.columns,
                    .pitch = place.rows,
                    .tiles_across = tiles_across};
    const Weight<T> source{{.x = from + place.from, .stride = place.columns}};
    cast_tile(source, cast, CastPlace(cast, number - before));
  }
}

void fp8_weights(const Tensor& weights, const Tensor& places, const Tensor& scale, Tensor amax,
                 Tensor saturated, Tensor values, Tensor transposes) {
  constexpr const char* kOp = "fp8_weights";
  const int32_t device = weights.get_device();
  require_fp8(kOp, device);
  check_aligned(kOp, "weights", weights, 16);
  check_aligned(kOp, "values", values, 16);
  check_aligned(kOp, "transposes", transposes, 16);
  if (places.size(0) == 0) return;
  const torch::stable::accelerator::DeviceGuard guard(device);
  const Weights given{.places = static_cast<const Place*>(places.const_data_ptr()),
                      .count = static_cast<int>(places.size(0)),
                      .values = static_cast<uint8_t*>(values.mutable_data_ptr()),
                      .transposes = static_cast<uint8_t*>(transposes.mutable_data_ptr()),
                      .scale = scale.const_data_ptr<float>(),
                      .scale_stride = scale.stride(0),
                      .amax = static_cast<int*>(amax.mutable_data_ptr()),
                      .saturated = static_cast<unsigned long long*>(saturated.mutable_data_ptr())};
  // There are no more tiles than squares of 16 numbers.
  const int64_t squares = values.numel() / (kFp8Alignment * kFp8Alignment);
  dispatch_float(weights.scalar_type(), "fp8_weights: weights", [&](auto zero) {
    using T = decltype(zero);
    const auto kernel = fp8_weights_kernel<T>;
    const int64_t blocks = std::min(resident_blocks(kernel, kCastThreads, device), squares);
    if (blocks == 0) return;
    launch({.op = kOp,
            .grid = static_cast<unsigned>(blocks),
            .block = kCastThreads,
            .stream = current_stream(device)},
           kernel, data_of<T>(weights), given);
  });
}

STABLE_TORCH_LIBRARY_IMPL(lightseq, CUDA, m) { m.impl("fp8_weights", TORCH_BOX(&fp8_weights)); }

}  // namespace
}  // namespace lightseq
