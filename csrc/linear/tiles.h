// linear_fwd for a moderate number of rows, as in decoding: see tiles.cu.
#pragma once

#include <cuda_runtime.h>

namespace lightseq {

struct Product;

constexpr int kTiles = 3;                // number of tile shapes, numbered from 1
constexpr int64_t kMostTiledRows = 128;  // no speed-up for more rows

// False if a block of this GPU has too little shared memory for these tiles.
bool multiply_by_tiles(const Product& p, int tile, cudaStream_t stream);

}  // namespace lightseq
