// Tiles of 64 x 128: results of up to 64 rows, whose contraction is then cut into fewer pieces.
#pragma once

#include "cake/gemm/sm90/tile_gemm.cuh"

namespace cake::gemm {

extern "C" __global__ void __launch_bounds__(sm90::kThreads, 1) gemm_slim_sm90(const __grid_constant__ NativeParams p) {
  sm90::tile_gemm<TileKind::kSlim>(p);
}

}  // namespace cake::gemm
