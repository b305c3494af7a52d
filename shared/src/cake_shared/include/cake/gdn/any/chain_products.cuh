// The four products of a chain whose state stays in registers.
//
// A warp owns 16 value columns. Its state S^T (16 x 128) is a matrix accumulator; packed to BF16 it is the left operand
// of the next product, so nothing of the chain passes through shared memory and warps never exchange anything. Only the
// right operands (K, Q, T, P) are read from shared tiles, the same bytes by every warp. How value columns are spread over
// warps and CTAs therefore cannot change a bit.
#pragma once

#include "cake/gdn/any/tile_copy.cuh"

namespace cake::gdn {

using tile::LaneOffsets;

using TokenAcc = float[8][4];    // 16 value columns x 64 tokens
using StateAcc = float[16][4];   // 16 value columns x 128 key columns
using TokenOperand = uint32_t[4][4];
using StateOperand = uint32_t[8][4];

template <int kFragments>
__device__ __forceinline__ void clear(float (&acc)[kFragments][4]) {
#pragma unroll
  for (int j = 0; j < kFragments; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) acc[j][i] = 0.f;
  }
}

// An accumulator is, rounded, the left operand of the next product: two neighbouring fragments make one.
template <int kFragments>
__device__ __forceinline__ void pack_operand(uint32_t (&a)[kFragments][4], const float (&acc)[2 * kFragments][4]) {
#pragma unroll
  for (int s = 0; s < kFragments; ++s) {
    a[s][0] = ptx::pack_bf16(acc[2 * s][0], acc[2 * s][1]);
    a[s][1] = ptx::pack_bf16(acc[2 * s][2], acc[2 * s][3]);
    a[s][2] = ptx::pack_bf16(acc[2 * s + 1][0], acc[2 * s + 1][1]);
    a[s][3] = ptx::pack_bf16(acc[2 * s + 1][2], acc[2 * s + 1][3]);
  }
}

// acc[v][t] += sum_k state[v][k] rows[t][k]
__device__ __forceinline__ void add_state_times_rows(TokenAcc& acc, const StateOperand& state, uint32_t rows,
                                                     const LaneOffsets& lane) {
#pragma unroll
  for (int s = 0; s < 8; ++s) {
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      uint32_t b[4];
      tile::load_b<kChunk>(b, rows, lane, 16 * n, 2 * s);
      ptx::mma_bf16(acc[2 * n], state[s], b[0], b[1]);
      ptx::mma_bf16(acc[2 * n + 1], state[s], b[2], b[3]);
    }
  }
}

// acc[v][i] += sum_{j <= i} a[v][j] lower[i][j]
__device__ __forceinline__ void add_times_lower_transposed(TokenAcc& acc, const TokenOperand& a, uint32_t lower,
                                                           const LaneOffsets& lane) {
#pragma unroll
  for (int n = 0; n < 4; ++n) {
#pragma unroll
    for (int s = 0; s <= n; ++s) {
      uint32_t b[4];
      tile::load_b<kChunk>(b, lower, lane, 16 * n, 2 * s);
      ptx::mma_bf16(acc[2 * n], a[s], b[0], b[1]);
      ptx::mma_bf16(acc[2 * n + 1], a[s], b[2], b[3]);
    }
  }
}

// acc[v][j] += sum_{i >= j} a[v][i] lower[i][j]
__device__ __forceinline__ void add_times_lower(TokenAcc& acc, const TokenOperand& a, uint32_t lower,
                                                const LaneOffsets& lane) {
#pragma unroll
  for (int n = 0; n < 4; ++n) {
#pragma unroll
    for (int s = n; s < 4; ++s) {
      uint32_t b[4];
      tile::load_b_trans<kChunk>(b, lower, lane, 16 * s, 2 * n);
      ptx::mma_bf16(acc[2 * n], a[s], b[0], b[1]);
      ptx::mma_bf16(acc[2 * n + 1], a[s], b[2], b[3]);
    }
  }
}

// state[v][k] += sum_t a[v][t] rows[t][k]
__device__ __forceinline__ void add_times_rows(StateAcc& state, const TokenOperand& a, uint32_t rows,
                                               const LaneOffsets& lane) {
#pragma unroll
  for (int n = 0; n < 8; ++n) {
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      uint32_t b[4];
      tile::load_b_trans<kChunk>(b, rows, lane, 16 * s, 2 * n);
      ptx::mma_bf16(state[2 * n], a[s], b[0], b[1]);
      ptx::mma_bf16(state[2 * n + 1], a[s], b[2], b[3]);
    }
  }
}

// Multiplies column t of an accumulator by factor * per_token[t]; c is the lane's place in its group of four.
__device__ __forceinline__ void scale_tokens(TokenAcc& acc, const float* per_token, float factor, int c) {
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float2 by = *reinterpret_cast<const float2*>(per_token + 8 * j + 2 * c);
    const float x = __fmul_rn(factor, by.x), y = __fmul_rn(factor, by.y);
#pragma unroll
    for (int i = 0; i < 4; ++i) acc[j][i] = __fmul_rn(i & 1 ? y : x, acc[j][i]);
  }
}

// The same on a packed operand, which is rounded again.
__device__ __forceinline__ void scale_operand_tokens(TokenOperand& a, const float* per_token, float factor, int c) {
#pragma unroll
  for (int s = 0; s < 4; ++s) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float2 by = *reinterpret_cast<const float2*>(per_token + 16 * s + 8 * half + 2 * c);
      const float x = __fmul_rn(factor, by.x), y = __fmul_rn(factor, by.y);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        uint32_t& pair = a[s][2 * half + i];
        pair = ptx::pack_bf16(__fmul_rn(x, ptx::low_bf16(pair)), __fmul_rn(y, ptx::high_bf16(pair)));
      }
    }
  }
}

__device__ __forceinline__ void scale_state(StateAcc& state, float by) {
#pragma unroll
  for (int j = 0; j < 16; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) state[j][i] = __fmul_rn(by, state[j][i]);
  }
}

}  // namespace cake::gdn
