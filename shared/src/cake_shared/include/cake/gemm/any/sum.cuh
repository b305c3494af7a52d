// out[l, m, n] (+)= the sum of a cut unit's pieces, ascending in FP32, rounded once.
//
// One thread four columns of a row of a unit.
#pragma once

#include "cake/gemm/work.h"
#include "cake/ptx/grid_dependency.cuh"
#include "cake/ptx/warp.cuh"

namespace cake::gemm {

inline constexpr int kSumThreads = 256;

extern "C" __global__ void __launch_bounds__(kSumThreads) gemm_sum_any(const __grid_constant__ SumParams p) {
  ptx::launch_dependents();
  ptx::wait_for_predecessor();
  const Tiling& tiling = p.tiling;
  const int32_t cut_units = tiling.batches * tiling.row_units * tiling.column_units - tiling.whole_units;
  const int32_t row_quads = tiling.unit_columns / 4, unit_quads = tiling.unit_rows * row_quads;
  const int64_t quads = int64_t{cut_units} * unit_quads;
  for (int64_t i = int64_t{blockIdx.x} * kSumThreads + threadIdx.x; i < quads; i += int64_t{gridDim.x} * kSumThreads) {
    const int32_t cut = static_cast<int32_t>(i / unit_quads), quad = static_cast<int32_t>(i - int64_t{cut} * unit_quads);
    const Unit unit = place_of(tiling, tiling.whole_units + cut);
    const int32_t row = unit.row_unit * tiling.unit_rows + quad / row_quads;
    const int32_t column = unit.column_unit * tiling.unit_columns + quad % row_quads * 4;
    if (row >= p.m || column >= p.n) continue;
    const float4* from = reinterpret_cast<const float4*>(p.partials) + int64_t{cut} * tiling.pieces * unit_quads + quad;
    float4 sum = __ldcg(from);
    for (int s = 1; s < tiling.pieces; ++s) {
      const float4 part = __ldcg(from + int64_t{s} * unit_quads);
      sum.x = __fadd_rn(sum.x, part.x);
      sum.y = __fadd_rn(sum.y, part.y);
      sum.z = __fadd_rn(sum.z, part.z);
      sum.w = __fadd_rn(sum.w, part.w);
    }
    const int64_t to = unit.batch * p.output.batch_stride + row * p.output.row_stride + column;
    const bool whole = column + 4 <= p.n;
    const float values[4] = {sum.x, sum.y, sum.z, sum.w};
    if (p.output.is_fp32) {
      float* out = static_cast<float*>(p.output.data) + to;
      if (whole) {
        if (p.output.accumulate) {
          const float4 before = *reinterpret_cast<const float4*>(out);
          sum = make_float4(__fadd_rn(before.x, sum.x), __fadd_rn(before.y, sum.y), __fadd_rn(before.z, sum.z),
                            __fadd_rn(before.w, sum.w));
        }
        *reinterpret_cast<float4*>(out) = sum;
      } else {
        #pragma unroll
        for (int c = 0; c < 4; ++c) {
          if (column + c < p.n) out[c] = p.output.accumulate ? __fadd_rn(out[c], values[c]) : values[c];
        }
      }
    } else {
      uint16_t* out = static_cast<uint16_t*>(p.output.data) + to;
      if (whole) {
        *reinterpret_cast<uint2*>(out) = make_uint2(ptx::pack_bf16(sum.x, sum.y), ptx::pack_bf16(sum.z, sum.w));
      } else {
        #pragma unroll
        for (int c = 0; c < 4; ++c) {
          if (column + c < p.n) out[c] = static_cast<uint16_t>(ptx::pack_bf16(values[c], 0.f));
        }
      }
    }
  }
}

}  // namespace cake::gemm
