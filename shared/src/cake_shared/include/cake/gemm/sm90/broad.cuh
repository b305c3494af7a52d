// Tiles of 128 x 192: results that it fits better than 256 columns.
#pragma once

#include "cake/gemm/sm90/tile_gemm.cuh"

namespace cake::gemm {

extern "C" __global__ void __launch_bounds__(sm90::kThreads, 1) gemm_broad_sm90(const __grid_constant__ NativeParams p) {
  sm90::tile_gemm<TileKind::kBroad>(p);
}

}  // namespace cake::gemm
