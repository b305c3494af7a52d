// Rows of q and k brought to unit norm: y = x r with r = 1 / sqrt(sum x^2 + 1e-6), a warp a row of 128. A lane sums four
// neighbouring elements, the warp adds by halving distances. A row whose sum overflows is scaled by a power of two first.
#pragma once

#include "cake/gdn/any/tile_copy.cuh"

namespace cake::gdn {

// Brings the largest BF16 to 2^32, and of a row whose sum of squares overflows the largest element to 2^-36 or more.
inline constexpr float kOverflownRowScale = 0x1p-96f;

// Of a row, whose elements the warp's lanes have four each; the same bits in every lane.
__device__ __forceinline__ float sum_of_squares(const float (&x)[4]) {
  float sum = __fmul_rn(x[0], x[0]);
  for (int j = 1; j < 4; ++j) sum = fmaf(x[j], x[j], sum);
  for (int distance = 16; distance > 0; distance /= 2) sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, distance));
  return sum;
}

// kRows neighbouring rows of [B * T, heads], whose loads are in flight together.
template <int kRows>
__device__ __forceinline__ void normalise_rows(const NormalisedRows& rows, int64_t first, int64_t count, int heads,
                                               int tokens_per_row, int lane) {
  uint2 words[kRows];
  int64_t token = first / heads;
  int head = static_cast<int>(first - token * heads);
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    if (first + i < count) {
      const TokenPlace at = place_of(static_cast<int32_t>(token), tokens_per_row);
      words[i] = reinterpret_cast<const uint2*>(row_pointer(rows.from, at, head))[lane];
    }
    if (++head == heads) {
      head = 0;
      ++token;
    }
  }
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int64_t item = first + i;
    if (item >= count) return;
    float x[4] = {ptx::low_bf16(words[i].x), ptx::high_bf16(words[i].x), ptx::low_bf16(words[i].y),
                  ptx::high_bf16(words[i].y)};
    float r = __fdiv_rn(1.f, __fsqrt_rn(__fadd_rn(sum_of_squares(x), 1e-6f)));
    float scale = 1.f;
    if (r == 0.f) {  // the sum is infinite, and 1e-6 nothing beside it
      scale = kOverflownRowScale;
      for (float& element : x) element = __fmul_rn(element, scale);
      r = __fdiv_rn(1.f, __fsqrt_rn(sum_of_squares(x)));
    }
    uint2 out;
    out.x = ptx::pack_bf16(__fmul_rn(x[0], r), __fmul_rn(x[1], r));
    out.y = ptx::pack_bf16(__fmul_rn(x[2], r), __fmul_rn(x[3], r));
    reinterpret_cast<uint2*>(rows.to + item * kHeadDim)[lane] = out;
    if (lane == 0) rows.reciprocal[item] = __fmul_rn(r, scale);
  }
}

}  // namespace cake::gdn
