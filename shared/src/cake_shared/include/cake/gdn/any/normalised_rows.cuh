#pragma once

#include "cake/gdn/any/tile_copy.cuh"

// normalised_rows_any: y = x r with r = 1 / sqrt(sum x^2 + 1e-6), one warp a row of 128.
// reads   q or k (any strides of tokens and heads)
// writes  y, BF16 and contiguous, and r, every row of the buffer
// order   a lane sums four neighbouring elements, the warp adds by halving distances
extern "C" __global__ void __launch_bounds__(cake::gdn::kNormalisedRowsThreads)
    normalised_rows_any(const __grid_constant__ cake::gdn::NormalisedRowsParams p) {
  using namespace cake::gdn;
  const int64_t item = int64_t{blockIdx.x} * (kNormalisedRowsThreads / 32) + threadIdx.x / 32;
  const int lane = threadIdx.x % 32;
  if (item >= p.tokens * p.heads) return;
  const int64_t token = item / p.heads;
  const int head = static_cast<int>(item - token * p.heads);
  const uint2 words = reinterpret_cast<const uint2*>(row_pointer(p.from, place_of(static_cast<int32_t>(token), p.tokens_per_row), head))[lane];
  const float x[4] = {ptx::low_bf16(words.x), ptx::high_bf16(words.x), ptx::low_bf16(words.y), ptx::high_bf16(words.y)};
  float sum = __fmul_rn(x[0], x[0]);
  for (int i = 1; i < 4; ++i) sum = fmaf(x[i], x[i], sum);
  for (int distance = 16; distance > 0; distance /= 2) sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, distance));
  const float r = __fdiv_rn(1.f, __fsqrt_rn(__fadd_rn(sum, 1e-6f)));
  uint2 out;
  out.x = ptx::pack_bf16(__fmul_rn(x[0], r), __fmul_rn(x[1], r));
  out.y = ptx::pack_bf16(__fmul_rn(x[2], r), __fmul_rn(x[3], r));
  reinterpret_cast<uint2*>(p.to + item * kHeadDim)[lane] = out;
  if (lane == 0) p.reciprocal[item] = r;
}
