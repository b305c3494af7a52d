// The sums of the split tiles, rounded once, to their place in a BF16 result.
//
// One warp a row. Widths are multiples of four columns, rows of 8 bytes.
#pragma once

#include "any/split_rows.cuh"
#include "cake/ptx/grid_dependency.cuh"
#include "cake/ptx/warp.cuh"

namespace dense_projection_gemm {

extern "C" __global__ void __launch_bounds__(kThreads) gemm_split_round_any(const __grid_constant__ SplitRowsParams p) {
  cake::ptx::launch_dependents();
  cake::ptx::wait_for_predecessor();
  const int64_t warps = int64_t{gridDim.x} * (kThreads / 32), rows = split_rows(p);
  for (int64_t i = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / 32; i < rows; i += warps) {
    const SplitRow row = split_row(p, i);
    uint16_t* const to = static_cast<uint16_t*>(p.out) + row.out;
    for (int c = threadIdx.x % 32 * 4; c < row.columns; c += 128) {
      const float4 sum = __ldcg(reinterpret_cast<const float4*>(p.sums + row.sum + c));
      *reinterpret_cast<uint2*>(to + c) = make_uint2(cake::ptx::pack_bf16(sum.x, sum.y), cake::ptx::pack_bf16(sum.z, sum.w));
    }
  }
}

}  // namespace dense_projection_gemm
