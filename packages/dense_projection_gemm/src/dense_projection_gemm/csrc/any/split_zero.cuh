// Zeros where partial sums will be added: the split tiles' own rows, or their place in an FP32 result.
//
// One warp a row. Widths are multiples of four columns, rows of 16 bytes.
#pragma once

#include "any/split_rows.cuh"
#include "cake/ptx/grid_dependency.cuh"

namespace dense_projection_gemm {

extern "C" __global__ void __launch_bounds__(kThreads) gemm_split_zero_any(const __grid_constant__ SplitRowsParams p) {
  // In this order: what comes next reads operands at once, which the launches before this one may have written.
  cake::ptx::wait_for_predecessor();
  cake::ptx::launch_dependents();
  const int64_t warps = int64_t{gridDim.x} * (kThreads / 32), rows = split_rows(p);
  const float4 zeros = make_float4(0.f, 0.f, 0.f, 0.f);
  for (int64_t i = (int64_t{blockIdx.x} * kThreads + threadIdx.x) / 32; i < rows; i += warps) {
    const SplitRow row = split_row(p, i);
    float* const to = p.sums != nullptr ? p.sums + row.sum : static_cast<float*>(p.out) + row.out;
    const int columns = p.sums != nullptr ? p.tile_n : row.columns;
    for (int c = threadIdx.x % 32 * 4; c < columns; c += 128) *reinterpret_cast<float4*>(to + c) = zeros;
  }
}

}  // namespace dense_projection_gemm
