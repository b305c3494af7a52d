// out[l, m, n] (+)= the sum of a cut unit's pieces, ascending in FP32, rounded once.
//
// One thread four columns of a row of a unit.
#pragma once

#include "cake/gemm/work.h"
#include "cake/ptx/grid_dependency.cuh"
#include "cake/ptx/warp.cuh"

namespace cake::gemm {

inline constexpr int kSumThreads = 256;

// Four columns of a row of a cut unit, a quad: where the first piece has them and where they go.
struct SumPlace {
  const float4* from;
  int64_t to;       // element of the result
  int32_t columns;  // of it that lie in the result; 0 or less: none
};

__device__ __forceinline__ int32_t sum_unit_quads(const SumParams& p) { return p.tiling.unit_rows * (p.tiling.unit_columns / 4); }
__device__ __forceinline__ uint32_t sum_quads(const SumParams& p) {
  const Tiling& tiling = p.tiling;
  return static_cast<uint32_t>(tiling.batches * tiling.row_units * tiling.column_units - tiling.whole_units) * sum_unit_quads(p);
}

__device__ __forceinline__ SumPlace sum_place(const SumParams& p, uint32_t index) {
  const Tiling& tiling = p.tiling;
  const int32_t row_quads = tiling.unit_columns / 4;
  const uint32_t unit_quads = sum_unit_quads(p), cut = index / unit_quads;
  const int32_t quad = static_cast<int32_t>(index - cut * unit_quads), row_in_unit = quad / row_quads;
  const Unit unit = place_of(tiling, tiling.whole_units + static_cast<int32_t>(cut));
  const int32_t row = unit.row_unit * tiling.unit_rows + row_in_unit;
  const int32_t column = unit.column_unit * tiling.unit_columns + (quad - row_in_unit * row_quads) * 4;
  return {reinterpret_cast<const float4*>(p.partials) + int64_t{cut} * tiling.pieces * unit_quads + quad,
          unit.batch * p.output.batch_stride + row * p.output.row_stride + column, row < p.m ? p.n - column : 0};
}

__device__ __forceinline__ float4 add_quads(const float4& a, const float4& b) {
  return make_float4(__fadd_rn(a.x, b.x), __fadd_rn(a.y, b.y), __fadd_rn(a.z, b.z), __fadd_rn(a.w, b.w));
}

__device__ __forceinline__ void store_sum(const Output& output, const SumPlace& place, float4 sum) {
  const bool whole = place.columns >= 4;
  const float values[4] = {sum.x, sum.y, sum.z, sum.w};
  if (output.is_fp32) {
    float* out = static_cast<float*>(output.data) + place.to;
    if (whole) {
      float4* const to = reinterpret_cast<float4*>(out);
      *to = output.accumulate ? add_quads(*to, sum) : sum;
    } else {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        if (c < place.columns) out[c] = output.accumulate ? __fadd_rn(out[c], values[c]) : values[c];
      }
    }
  } else {
    uint16_t* out = static_cast<uint16_t*>(output.data) + place.to;
    if (whole) {
      *reinterpret_cast<uint2*>(out) = make_uint2(ptx::pack_bf16(sum.x, sum.y), ptx::pack_bf16(sum.z, sum.w));
    } else {
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        if (c < place.columns) out[c] = static_cast<uint16_t>(ptx::pack_bf16(values[c], 0.f));
      }
    }
  }
}

// The quads `index`, `index + step` and so on; where the first of them lies is found before the pieces are waited for.
__device__ __forceinline__ void sum_pieces(const SumParams& p, uint32_t index, uint32_t step) {
  constexpr int kAtOnce = 4;  // pieces whose loads are under way together
  const int32_t pieces = p.tiling.pieces, unit_quads = sum_unit_quads(p);
  const uint32_t quads = sum_quads(p);
  SumPlace place{nullptr, 0, 0};
  if (index < quads) place = sum_place(p, index);
  ptx::wait_for_predecessor();
  while (index < quads) {
    if (place.columns > 0) {
      float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 1
      for (int first = 0; first < pieces; first += kAtOnce) {
        float4 part[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          if (first + i < pieces) part[i] = __ldcg(place.from + int64_t{first + i} * unit_quads);
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          if (first + i < pieces) sum = first + i == 0 ? part[i] : add_quads(sum, part[i]);
        }
      }
      store_sum(p.output, place, sum);
    }
    index += step;
    if (index < quads) place = sum_place(p, index);
  }
}

extern "C" __global__ void __launch_bounds__(kSumThreads) gemm_sum_any(const __grid_constant__ SumParams p) {
  ptx::launch_dependents();
  sum_pieces(p, blockIdx.x * kSumThreads + threadIdx.x, gridDim.x * kSumThreads);
}

}  // namespace cake::gemm
