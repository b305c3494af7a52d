// The router's product in tiles of 128 x 256 of FP32 operands: see sm90/router_native.cuh.
#pragma once

#include "sm90/router_native.cuh"

extern "C" __global__ void __launch_bounds__(dense_projection_det_gemm::kRouterNativeThreads, 1)
    router_out_sm90(const __grid_constant__ dense_projection_det_gemm::RouterOutParams p) {
  using namespace dense_projection_det_gemm;
  extern __shared__ __align__(1024) char smem_bytes[];
  run_router<float, 4>(p, smem_bytes);
}
