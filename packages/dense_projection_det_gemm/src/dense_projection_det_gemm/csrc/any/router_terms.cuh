// Q as scaled BF16 terms (RouterPlanes), exponents, factors and flags of its rows.
//
// Reads Q [columns, depth], writes all of the planes (zeros past the edges). A thread holds 16 elements of a column at a time; a
// CTA has a block of 64 columns and kRouterTermsSteps steps. The scale of a row of Q comes from its first kRouterHint elements,
// so that CTAs need nothing of one another.
#pragma once

#include "any/router_split.cuh"
#include "cake/ptx/grid_dependency.cuh"

namespace dense_projection_det_gemm {

// Where in a block's planes a column stands: so that two neighbouring fragments of an accumulator give a lane four columns next
// to each other, the inverse of router_store.cuh's column_of.
__device__ __forceinline__ int place_in_block(int column) {
  return (column & 48) | (column & 2) << 2 | (column & 12) >> 1 | (column & 1);
}

// Element i of 16 for a lane that takes them in order, as the order of a step's planes is: halves of 8, interleaved or not.
__device__ __forceinline__ constexpr int place_in_step(int i, bool interleaved) {
  return interleaved ? 8 * ((i >> 1) & 1) + 2 * (i >> 2) + (i & 1) : i;
}

__device__ __forceinline__ void load_step(float (&x)[kRouterStep], const RouterOperand& q, int column, int step, bool valid,
                                          int depth) {
  const int k = step * kRouterStep;
  const int64_t offset = column * q.stride + k * q.depth_stride;
  if (valid && q.depth_stride == 1 && !q.is_bf16 && k + kRouterStep <= depth) {
    const float4* source = reinterpret_cast<const float4*>(static_cast<const float*>(q.data) + offset);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float4 four = source[i];
      x[4 * i] = four.x, x[4 * i + 1] = four.y, x[4 * i + 2] = four.z, x[4 * i + 3] = four.w;
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kRouterStep; ++i) {
    x[i] = valid && k + i < depth ? operand_element(q, offset + i * q.depth_stride) : 0.f;
  }
}

template <bool kInterleaved>
__device__ __forceinline__ void store_terms(char* planes, const RouterPlanes& layout, float (&x)[kRouterStep]) {
#pragma unroll
  for (int t = 0; t < kRouterTerms; ++t) {
    uint32_t halves[2][4];
#pragma unroll
    for (int i = 0; i < kRouterStep; i += 2) {
      const uint32_t pair = ptx::pack_bf16(x[i], x[i + 1]);
      x[i] = __fsub_rn(x[i], ptx::low_bf16(pair));
      x[i + 1] = __fsub_rn(x[i + 1], ptx::high_bf16(pair));
      const int place = place_in_step(i, kInterleaved);
      halves[place >> 3][(place & 7) >> 1] = pair;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint4* destination = reinterpret_cast<uint4*>(planes + t * layout.term_bytes() + half * layout.half_bytes());
      *destination = make_uint4(halves[half][0], halves[half][1], halves[half][2], halves[half][3]);
    }
  }
}

}  // namespace dense_projection_det_gemm

extern "C" __global__ void __launch_bounds__(dense_projection_det_gemm::kRouterTermsThreads)
    router_terms_any(const __grid_constant__ dense_projection_det_gemm::RouterTermsParams p) {
  using namespace dense_projection_det_gemm;
  __shared__ uint32_t flags[kRouterBlock];
  const int row = threadIdx.x % kRouterBlock, lane_step = threadIdx.x / kRouterBlock;
  constexpr int kStride = kRouterTermsThreads / kRouterBlock;
  const int block = blockIdx.y, column = block * kRouterBlock + row;
  const int column_tile = block / p.work.blocks, block_in_tile = block - column_tile * p.work.blocks;
  const bool valid = column < p.work.columns;
  if (threadIdx.x < kRouterBlock) flags[threadIdx.x] = 0;
  __syncthreads();
  cake::ptx::launch_dependents();
  cake::ptx::wait_for_predecessor();

  constexpr int kSteps = kRouterTermsSteps / kStride;
  float x[kSteps][kRouterStep], first[kRouterStep];
  const int step0 = blockIdx.x * kRouterTermsSteps + lane_step * kSteps;
#pragma unroll
  for (int i = 0; i < kSteps; ++i) load_step(x[i], p.q, column, step0 + i, valid, p.work.depth);
  load_step(first, p.q, column, 0, valid, p.work.depth);
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < kRouterStep; ++i) largest = max(largest, __float_as_uint(first[i]) & kMagnitudeBits);
  const int exponent = column_exponent(largest);
  const float up = power_of_two(exponent >> 1), up_again = power_of_two(exponent - (exponent >> 1));
  if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) *p.terms.any_redo = 0;
  if (blockIdx.x == 0 && lane_step == 0) {
    p.terms.exponents[column] = exponent;
    p.terms.factors[column] = exponent <= 126 ? power_of_two(-exponent) : 0.f;
  }

  uint32_t least_key = 0xffffffffu;
  largest = 0;
#pragma unroll
  for (int i = 0; i < kSteps; ++i) {
    if (step0 + i >= p.work.steps) break;
#pragma unroll
    for (int j = 0; j < kRouterStep; ++j) {
      least_key = min(least_key, nonzero_key(x[i][j]));
      largest = max(largest, __float_as_uint(x[i][j]) & kMagnitudeBits);
      x[i][j] = __fmul_rn(__fmul_rn(x[i][j], up), up_again);
    }
    const int64_t place = (int64_t{column_tile} * p.work.steps + step0 + i) * p.work.blocks;
    const RouterPlanes layout(p.work);
    char* destination = static_cast<char*>(p.terms.planes) + place * kRouterBlockBytes +
                        layout.offset(block_in_tile * kRouterBlock + place_in_block(row));
    p.terms.interleaved ? store_terms<true>(destination, layout, x[i]) : store_terms<false>(destination, layout, x[i]);
  }
  const int found = (is_tiny(least_key, column_lowest(exponent)) ? kRouterTiny : 0) |
                    (largest != 0 && binade(largest) + exponent > kRouterColumnHighest ? kRouterWide : 0);
  if (found) atomicOr(&flags[row], static_cast<uint32_t>(found));
  __syncthreads();
  if (lane_step == 0) {
    const int64_t padded = int64_t{p.work.column_tiles} * p.work.blocks * kRouterBlock;
    p.terms.flags[blockIdx.x * padded + column] = static_cast<uint8_t>(flags[row]);
  }
}
