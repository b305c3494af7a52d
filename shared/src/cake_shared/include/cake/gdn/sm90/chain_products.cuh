// The products of a chain whose state stays in the registers of a warpgroup.
//
// A warpgroup owns 64 value columns. Its state S^T (64 x 128) is a wgmma accumulator; packed to BF16 it is the left operand of the next
// product, so nothing of the chain passes through shared memory. Right operands are shared tiles. The same instructions for every slice of
// columns: how slices are spread over warpgroups and CTAs cannot change a bit.
#pragma once

#include "cake/gdn/any/tile_copy.cuh"
#include "cake/ptx/wgmma.cuh"

namespace cake::gdn {

// An accumulator, rounded, is the left operand of the next product.
template <int kCount>
__device__ __forceinline__ void pack_accumulator(uint32_t (&to)[kCount], const float (&from)[2 * kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) to[i] = ptx::pack_bf16(from[2 * i], from[2 * i + 1]);
}

// acc[v][t] (+)= sum_k state[v][k] rows[t][k], steps [kFrom, kTo) of the eight.
template <int kFrom, int kTo>
__device__ __forceinline__ void multiply_state_rows(float (&acc)[32], const uint32_t (&state)[32], uint64_t rows) {
#pragma unroll
  for (int s = kFrom; s < kTo; ++s) {
    ptx::wgmma_bf16<ptx::Major::kK>(acc, state[4 * s], state[4 * s + 1], state[4 * s + 2], state[4 * s + 3],
                                    rows + ptx::wgmma_advance((s >> 2) * kSquareTileBytes + (s & 3) * 32), s > 0);
  }
}

// acc[v][i] (+)= sum_j a[v][j] square[i][j]
template <bool kAccumulate>
__device__ __forceinline__ void multiply_square(float (&acc)[32], const uint32_t (&a)[16], uint64_t square) {
#pragma unroll
  for (int s = 0; s < 4; ++s) {
    ptx::wgmma_bf16<ptx::Major::kK>(acc, a[4 * s], a[4 * s + 1], a[4 * s + 2], a[4 * s + 3], square + ptx::wgmma_advance(32 * s),
                                    kAccumulate || s > 0);
  }
}

// state[v][k] += sum_t a[v][t] rows[t][k]; the descriptor knows the distance of the blocks of 64 columns.
__device__ __forceinline__ void add_token_rows(float (&state)[64], const uint32_t (&a)[16], uint64_t rows) {
#pragma unroll
  for (int s = 0; s < 4; ++s) {
    ptx::wgmma_bf16<ptx::Major::kMN>(state, a[4 * s], a[4 * s + 1], a[4 * s + 2], a[4 * s + 3], rows + ptx::wgmma_advance(2048 * s), true);
  }
}

// a[v][t] *= factor * per_token[t]; c is the lane's place in its group of four.
__device__ __forceinline__ void scale_by_token(float (&acc)[32], const float* per_token, float factor, int c) {
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float2 by = *reinterpret_cast<const float2*>(per_token + 8 * j + 2 * c);
    const float x = __fmul_rn(factor, by.x), y = __fmul_rn(factor, by.y);
#pragma unroll
    for (int i = 0; i < 4; ++i) acc[4 * j + i] = __fmul_rn(i & 1 ? y : x, acc[4 * j + i]);
  }
}

// R = beta (V - gamma acc), packed; v_tile holds the warpgroup's slice of V.
__device__ __forceinline__ void make_residuals(uint32_t (&packed)[16], const float (&acc)[32], uint32_t v_tile, const float* gammas,
                                               const float* betas, const tile::LaneOffsets& offsets, int warp, int c) {
#pragma unroll
  for (int s = 0; s < 4; ++s) {
    uint32_t v[4];
    tile::load_a_trans<kChunk>(v, v_tile, offsets, 16 * s, 2 * warp);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int j = 2 * s + n;
      const float2 gamma = *reinterpret_cast<const float2*>(gammas + 8 * j + 2 * c);
      const float2 beta = *reinterpret_cast<const float2*>(betas + 8 * j + 2 * c);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t pair = v[2 * n + half];
        const float x = fmaf(-gamma.x, acc[4 * j + 2 * half], ptx::low_bf16(pair));
        const float y = fmaf(-gamma.y, acc[4 * j + 2 * half + 1], ptx::high_bf16(pair));
        packed[2 * j + half] = ptx::pack_bf16(__fmul_rn(beta.x, x), __fmul_rn(beta.y, y));
      }
    }
  }
}

// Puts a packed accumulator of 64 tokens into the warp's columns of a [token][value] tile.
__device__ __forceinline__ void store_token_columns(uint32_t tile_to, const float (&acc)[32], const tile::LaneOffsets& offsets, int warp) {
#pragma unroll
  for (int s = 0; s < 4; ++s) {
    ptx::stmatrix_x4_trans(tile::fragment_address<kChunk>(tile_to, offsets.col_major, 16 * s, 2 * warp),
                           ptx::pack_bf16(acc[8 * s], acc[8 * s + 1]), ptx::pack_bf16(acc[8 * s + 2], acc[8 * s + 3]),
                           ptx::pack_bf16(acc[8 * s + 4], acc[8 * s + 5]), ptx::pack_bf16(acc[8 * s + 6], acc[8 * s + 7]));
  }
}

}  // namespace cake::gdn
