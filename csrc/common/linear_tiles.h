// linear_fwd of some rows, as decoding has them: see linear_tiles.cu.
#pragma once

#include <cuda_runtime.h>

namespace lightseq {

struct Product;

constexpr int kTiles = 3;                // shapes of a tile, numbered from 1 on
constexpr int64_t kMostTiledRows = 128;  // more rows gain nothing

// False where a block of this GPU has too little shared memory for such tiles.
bool multiply_by_tiles(const Product& p, int tile, cudaStream_t stream);

}  // namespace lightseq
