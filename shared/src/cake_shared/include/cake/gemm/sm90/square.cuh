// Tiles of 192 x 192 of three consumers: results that it fits, many and with short contractions.
#pragma once

#include "cake/gemm/sm90/tile_gemm.cuh"

namespace cake::gemm {

extern "C" __global__ void __launch_bounds__(sm90::Config<TileKind::kSquare>::kThreads, 1)
    gemm_square_sm90(const __grid_constant__ NativeParams p) {
  sm90::tile_gemm<TileKind::kSquare>(p);
}

}  // namespace cake::gemm
