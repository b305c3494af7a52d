// The products of a chain whose state stays in the registers of a warpgroup.
//
// A warpgroup owns 64 value columns. Its state S^T (64 x 128) is a wgmma accumulator; packed to BF16 it is the left operand
// of the next product, so nothing of the chain passes through shared memory. Right operands are shared tiles. The same
// instructions for every slice of columns: how slices are spread over warpgroups and CTAs cannot change a bit.
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

// acc[v][t] (+)= sum_k state[v][k] rows[t][k], steps [kFrom, kTo) of the eight, of which `state` has those from kFrom - kSkipped on.
template <int kFrom, int kTo, int kSkipped = kFrom, int kCount>
__device__ __forceinline__ void multiply_state_rows(float (&acc)[32], const uint32_t (&state)[kCount], uint64_t rows) {
#pragma unroll
  for (int s = kFrom; s < kTo; ++s) {
    const int at = 4 * (s - kFrom + kSkipped);
    ptx::wgmma_bf16<ptx::Major::kK>(acc, state[at], state[at + 1], state[at + 2], state[at + 3],
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
    ptx::wgmma_bf16<ptx::Major::kMN>(state, a[4 * s], a[4 * s + 1], a[4 * s + 2], a[4 * s + 3],
                                     rows + ptx::wgmma_advance(2048 * s), true);
  }
}

// The same for the 64 keys of one block.
__device__ __forceinline__ void add_token_rows(float (&state)[32], const uint32_t (&a)[16], uint64_t rows) {
#pragma unroll
  for (int s = 0; s < 4; ++s) {
    ptx::wgmma_bf16<ptx::Major::kMN>(state, a[4 * s], a[4 * s + 1], a[4 * s + 2], a[4 * s + 3],
                                     rows + ptx::wgmma_advance(2048 * s), true);
  }
}

// What of an address of a warp's 16 columns of a slice depends on the lane and on the warp. A value that the compiler cannot know, so
// that it stays in a register: made again in every chunk it would hold up what waits for it.
__device__ __forceinline__ uint32_t value_columns_lane(int warp, int lane) {
  uint32_t offset = tile::fragment_address<kChunk>(0, tile::LaneOffsets(lane).col_major, 0, 2 * warp);
  asm volatile("" : "+r"(offset));
  return offset;
}

// A warp's 16 columns of a slice of V as a left operand.
__device__ __forceinline__ void load_value_columns(uint32_t (&values)[16], uint32_t v_tile, uint32_t columns_lane) {
#pragma unroll
  for (int s = 0; s < 4; ++s) {
    ptx::ldmatrix_x4_trans(*reinterpret_cast<uint32_t(*)[4]>(&values[4 * s]), v_tile + columns_lane + 2048 * s);
  }
}

// values become R = beta (V - gamma acc).
__device__ __forceinline__ void make_residuals(uint32_t (&values)[16], const float (&acc)[32], const float* gammas,
                                               const float* betas, int c) {
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float2 gamma = *reinterpret_cast<const float2*>(gammas + 8 * j + 2 * c);
    const float2 beta = *reinterpret_cast<const float2*>(betas + 8 * j + 2 * c);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      uint32_t& pair = values[2 * j + half];
      const float x = fmaf(-gamma.x, acc[4 * j + 2 * half], ptx::low_bf16(pair));
      const float y = fmaf(-gamma.y, acc[4 * j + 2 * half + 1], ptx::high_bf16(pair));
      pair = ptx::pack_bf16(__fmul_rn(beta.x, x), __fmul_rn(beta.y, y));
    }
  }
}

__device__ __forceinline__ void scale_all(float (&acc)[32], float by) {
#pragma unroll
  for (float& x : acc) x = __fmul_rn(by, x);
}

// Both halves of the keys of a state whose products are done. A block of its own, which ptxas does not move behind a wait that follows.
__device__ __forceinline__ void decay_halves(float (&left)[32], float (&right)[32], float decay) {
  ptx::wgmma_keep(left);
  ptx::wgmma_keep(right);
  if (decay != 1.f) {
    scale_all(left, decay);
    scale_all(right, decay);
  }
  ptx::wgmma_keep(left);
  ptx::wgmma_keep(right);
}

// Of a row of scalars those of a lane's tokens in an accumulator [v][t]; c is the lane's place in its group of four. Loaded here, and
// not where they are used.
__device__ __forceinline__ void load_per_token(float (&to)[16], const float* per_token, int c) {
#pragma unroll
  for (int j = 0; j < 8; ++j) reinterpret_cast<float2*>(to)[j] = *reinterpret_cast<const float2*>(per_token + 8 * j + 2 * c);
  ptx::wgmma_keep(to);
}

// acc[v][t] * per_token[t], packed.
__device__ __forceinline__ void pack_scaled_by_token(uint32_t (&to)[16], const float (&acc)[32], const float (&per_token)[16]) {
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const int j = i >> 1;
    to[i] = ptx::pack_bf16(__fmul_rn(per_token[2 * j], acc[2 * i]), __fmul_rn(per_token[2 * j + 1], acc[2 * i + 1]));
  }
}

// acc[v][t] becomes per_token[t] acc[v][t].
__device__ __forceinline__ void scale_by_token(float (&acc)[32], const float* per_token, int c) {
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const float2 by = *reinterpret_cast<const float2*>(per_token + 8 * j + 2 * c);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      acc[4 * j + 2 * half] = __fmul_rn(by.x, acc[4 * j + 2 * half]);
      acc[4 * j + 2 * half + 1] = __fmul_rn(by.y, acc[4 * j + 2 * half + 1]);
    }
  }
}

// Puts a warp's 16 columns of a slice of O into its tile: load_value_columns backwards.
__device__ __forceinline__ void store_value_columns(uint32_t o_tile, const uint32_t (&values)[16], uint32_t columns_lane) {
#pragma unroll
  for (int s = 0; s < 4; ++s) {
    ptx::stmatrix_x4_trans(o_tile + columns_lane + 2048 * s, values[4 * s], values[4 * s + 1], values[4 * s + 2], values[4 * s + 3]);
  }
}

}  // namespace cake::gdn
