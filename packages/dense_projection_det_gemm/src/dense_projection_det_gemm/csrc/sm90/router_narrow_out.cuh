// The router's product in tiles of 128 x 64, for up to 128 columns: see sm90/router_native.cuh.
#pragma once

#include "sm90/router_native.cuh"

extern "C" __global__ void __launch_bounds__(dense_projection_det_gemm::kRouterNativeThreads, 1)
    router_narrow_out_sm90(const __grid_constant__ dense_projection_det_gemm::RouterOutParams p) {
  using namespace dense_projection_det_gemm;
  extern __shared__ __align__(1024) char smem_bytes[];
  p.p.is_bf16 ? run_router<__nv_bfloat16, 1>(p, smem_bytes) : run_router<float, 1>(p, smem_bytes);
}
