// Tiles of 128 x 128 that a warpgroup stores while the other multiplies: contractions of a few blocks.
#pragma once

#include "cake/gemm/sm90/tile_gemm.cuh"

namespace cake::gemm {

extern "C" __global__ void __launch_bounds__(sm90::kThreads, 1) gemm_turns_sm90(const __grid_constant__ NativeParams p) {
  sm90::tile_gemm<TileKind::kTurns>(p);
}

}  // namespace cake::gemm
