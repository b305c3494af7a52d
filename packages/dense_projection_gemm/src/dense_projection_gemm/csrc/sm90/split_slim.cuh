// Tiles of 64 x 128: results of up to 64 rows.
#pragma once

#include "sm90/split_gemm.cuh"

namespace dense_projection_gemm {

extern "C" __global__ void __launch_bounds__(cake::gemm::sm90::kThreads, 1)
    gemm_split_slim_sm90(const __grid_constant__ SplitParams p) {
  sm90::split_gemm<cake::gemm::TileKind::kSlim>(p);
}

}  // namespace dense_projection_gemm
