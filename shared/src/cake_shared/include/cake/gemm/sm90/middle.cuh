// Tiles of 128 x 128: results of few tiles.
#pragma once

#include "cake/gemm/sm90/tile_gemm.cuh"

namespace cake::gemm {

extern "C" __global__ void __launch_bounds__(sm90::kThreads, 1) gemm_middle_sm90(const __grid_constant__ NativeParams p) {
  sm90::tile_gemm<TileKind::kMiddle>(p);
}

}  // namespace cake::gemm
