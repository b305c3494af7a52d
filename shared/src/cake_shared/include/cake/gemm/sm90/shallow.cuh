// Tiles of 128 x 256 whose contraction is one or two stages: bound by what is written.
#pragma once

#include "cake/gemm/sm90/tile_gemm.cuh"

namespace cake::gemm {

extern "C" __global__ void __launch_bounds__(sm90::kThreads, 1) gemm_shallow_sm90(const __grid_constant__ NativeParams p) {
  sm90::tile_gemm<TileKind::kShallow>(p);
}

}  // namespace cake::gemm
