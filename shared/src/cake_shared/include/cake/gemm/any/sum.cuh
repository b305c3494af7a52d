// out[l, m, n] (+)= the sum over pieces s of partials[l, s, m, n], s ascending in FP32, rounded once.
//
// One thread four columns of a row.
#pragma once

#include "cake/gemm/params.h"
#include "cake/ptx/grid_dependency.cuh"
#include "cake/ptx/warp.cuh"

namespace cake::gemm {

inline constexpr int kSumThreads = 256;

extern "C" __global__ void __launch_bounds__(kSumThreads) gemm_sum_any(const __grid_constant__ SumParams p) {
  ptx::launch_dependents();
  ptx::wait_for_predecessor();
  const int64_t quads = (p.n + 3) / 4, rows = int64_t{p.batches} * p.m;
  const int64_t piece_stride = int64_t{p.m} * p.pitch;
  for (int64_t i = int64_t{blockIdx.x} * kSumThreads + threadIdx.x; i < rows * quads; i += int64_t{gridDim.x} * kSumThreads) {
    const int64_t row = i / quads;
    const int column = static_cast<int>(i - row * quads) * 4;
    const int64_t batch = row / p.m, m = row - batch * p.m;
    const float* from = p.partials + batch * p.pieces * piece_stride + m * p.pitch + column;
    const int64_t to = batch * p.output.batch_stride + m * p.output.row_stride + column;
    const int count = p.n - column < 4 ? p.n - column : 4;
    float sum[4];
    for (int s = 0; s < p.pieces; ++s, from += piece_stride) {
      const float4 read = __ldcg(reinterpret_cast<const float4*>(from));
      const float part[4] = {read.x, read.y, read.z, read.w};
#pragma unroll
      for (int c = 0; c < 4; ++c) sum[c] = s == 0 ? part[c] : __fadd_rn(sum[c], part[c]);
    }
    if (p.output.is_fp32) {
      float* out = static_cast<float*>(p.output.data) + to;
#pragma unroll
      for (int c = 0; c < 4; ++c) {
        if (c < count) out[c] = p.output.accumulate ? __fadd_rn(out[c], sum[c]) : sum[c];
      }
    } else {
      uint16_t* out = static_cast<uint16_t*>(p.output.data) + to;
      if (p.n % 8 == 0) {
        *reinterpret_cast<uint2*>(out) = make_uint2(ptx::pack_bf16(sum[0], sum[1]), ptx::pack_bf16(sum[2], sum[3]));
      } else {
        for (int c = 0; c < count; ++c) out[c] = static_cast<uint16_t>(ptx::pack_bf16(sum[c], 0.f));
      }
    }
  }
}

}  // namespace cake::gemm
