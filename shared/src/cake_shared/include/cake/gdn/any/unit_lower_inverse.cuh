// T = (I + A)^-1 of a strictly lower triangular 64 x 64 matrix, by four warps.
//
// The four 16 x 16 diagonal blocks are inverted by forward substitution in FP32, a lane a column; the blocks below follow
// row by row, T_ij = -(sum_{j < k <= i} T_ik A_kj) D_j, as tensor-core products whose operands are split into two TF32
// words and multiplied in three terms, so that they are as good as FP32. Substitution does not grow on identical keys,
// where a sum of powers of A loses everything.
#pragma once

#include "cake/ptx/warp.cuh"
#include "cake/gdn/rule_params.h"

namespace cake::gdn {

namespace ptx = cake::ptx;

inline constexpr int kMatrixPitch = 68;    // floats a row of A: rows 16-byte aligned, columns spread over the banks
inline constexpr int kDiagonalPitch = 20;  // floats a row of a diagonal inverse

struct InverseScratch {
  float a[kChunk * kMatrixPitch];
  float diagonal[4][16 * kDiagonalPitch];
};

// Fragment of a 16 x 8 left operand in which slot k = c holds column 2c and slot c + 4 column 2c + 1 (c = lane & 3): then
// an accumulator is a left operand as it stands, if the rows of the right operand are taken in the same order.
using PairedOperand = float[4];

__device__ __forceinline__ float tf32_head(float x) { return __uint_as_float(__float_as_uint(x) & 0xffffe000u); }

__device__ __forceinline__ void mma_three_terms(float (&c)[4], const PairedOperand& a, float b0, float b1) {
  float a_head[4], a_tail[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    a_head[i] = tf32_head(a[i]);
    a_tail[i] = __fsub_rn(a[i], a_head[i]);
  }
  const float b0_head = tf32_head(b0), b1_head = tf32_head(b1);
  ptx::mma_tf32(c, a_tail, b0_head, b1_head);
  ptx::mma_tf32(c, a_head, __fsub_rn(b0, b0_head), __fsub_rn(b1, b1_head));
  ptx::mma_tf32(c, a_head, b0_head, b1_head);
}

// Inverts the diagonal block of `warp`; reads rows that this warp wrote.
__device__ __forceinline__ void invert_diagonal_block(InverseScratch& scratch, int warp, int lane) {
  const int column = lane & 15;
  float x[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const float* row = &scratch.a[(16 * warp + i) * kMatrixPitch + 16 * warp];
    float even = i == column ? 1.f : 0.f, odd = 0.f;
#pragma unroll
    for (int j = 0; j < i; j += 4) {
      const float4 a = *reinterpret_cast<const float4*>(row + j);
      even = fmaf(-a.x, x[j], even);
      if (j + 1 < i) odd = fmaf(-a.y, x[j + 1], odd);
      if (j + 2 < i) even = fmaf(-a.z, x[j + 2], even);
      if (j + 3 < i) odd = fmaf(-a.w, x[j + 3], odd);
    }
    x[i] = __fadd_rn(even, odd);
  }
  if (lane < 16) {
#pragma unroll
    for (int i = 0; i < 16; ++i) scratch.diagonal[warp][i * kDiagonalPitch + column] = x[i];
  }
}

// Block row kRow of T as left operands: t[k][half] is columns 16 k + 8 half .. + 7.
template <int kRow>
__device__ __forceinline__ void invert_block_row(const InverseScratch& scratch, int lane, float (&t)[4][2][4]) {
  const int g = lane >> 2, c = lane & 3;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float* d = &scratch.diagonal[kRow][g * kDiagonalPitch + 8 * half + 2 * c];
    const float2 upper = *reinterpret_cast<const float2*>(d);
    const float2 lower = *reinterpret_cast<const float2*>(d + 8 * kDiagonalPitch);
    t[kRow][half][0] = upper.x;
    t[kRow][half][1] = lower.x;
    t[kRow][half][2] = upper.y;
    t[kRow][half][3] = lower.y;
  }
#pragma unroll
  for (int j = kRow - 1; j >= 0; --j) {
    float sum[2][4] = {};
#pragma unroll
    for (int k = kRow; k > j; --k) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const float* b = &scratch.a[(16 * k + 8 * half + 2 * c) * kMatrixPitch + 16 * j + 8 * n + g];
          mma_three_terms(sum[n], t[k][half], b[0], b[kMatrixPitch]);
        }
      }
    }
    float block[2][4] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const PairedOperand a = {-sum[half][0], -sum[half][2], -sum[half][1], -sum[half][3]};
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const float* b = &scratch.diagonal[j][(8 * half + 2 * c) * kDiagonalPitch + 8 * n + g];
        mma_three_terms(block[n], a, b[0], b[kDiagonalPitch]);
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      t[j][half][0] = block[half][0];
      t[j][half][1] = block[half][2];
      t[j][half][2] = block[half][1];
      t[j][half][3] = block[half][3];
    }
  }
}

}  // namespace cake::gdn
