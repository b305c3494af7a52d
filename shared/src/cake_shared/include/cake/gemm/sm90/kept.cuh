// Tiles of 128 x 256 whose B stays in shared memory: many short contractions with one B.
#pragma once

#include "cake/gemm/sm90/kept_gemm.cuh"

namespace cake::gemm {

extern "C" __global__ void __launch_bounds__(sm90::kThreads, 1) gemm_kept_sm90(const __grid_constant__ NativeParams p) {
  sm90::kept_gemm<TileKind::kKept>(p);
}

}  // namespace cake::gemm
