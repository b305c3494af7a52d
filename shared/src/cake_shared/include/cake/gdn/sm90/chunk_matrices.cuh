// P and the scalars of one chunk and value head by one warpgroup, from Q K^T in its accumulators.
//
//   P_ij = scale Gamma_ij (q_i . k_j),   Gamma_ij = 2^(b_i - b_j) for i >= j
//
// A warp owns 16 rows; K and Q rows past the end of the sequence are zero, and so are those of P.
#pragma once

#include "cake/gdn/any/tile_copy.cuh"
#include "cake/gdn/sm90/params.h"
#include "cake/ptx/bulk_copy.cuh"
#include "cake/ptx/wgmma.cuh"

namespace cake::gdn {

// What the thread of a token reads of one value head; fetched one ahead, so beta's bits are looked at when it is needed.
struct HeadGates {
  float sum, end;
  uint32_t beta_bits;
};

__device__ __forceinline__ HeadGates load_head_gates(const float* sums, const BetaOption& option, TokenPlace at, int tokens,
                                                     int64_t record, int head, int token) {
  HeadGates gates{sums[record * kChunk + token], sums[record * kChunk + kChunk - 1], 0};
  if (token < tokens) {
    const TokenScalars& beta = option.beta;
    const int64_t element = element_of(beta, {at.row, at.token + token}, head);
    gates.beta_bits =
        beta.is_bf16 ? static_cast<const uint16_t*>(beta.data)[element] : static_cast<const uint32_t*>(beta.data)[element];
  }
  return gates;
}

// Returns the exponent of the token's decay.
__device__ __forceinline__ float store_scalars(ChunkScalars& to, const HeadGates& gates, const BetaOption& option, int tokens,
                                               int token) {
  constexpr float kLog2E = 1.4426950408889634f;
  const float b = __fmul_rn(gates.sum, kLog2E), b_end = __fmul_rn(gates.end, kLog2E);
  float beta = __uint_as_float(option.beta.is_bf16 ? gates.beta_bits << 16 : gates.beta_bits);
  if (token < tokens && option.top != 0.f) beta = __fdiv_rn(option.top, __fadd_rn(1.f, expf(-beta)));
  to[kGamma][token] = ptx::exp2_approx(b);
  to[kEnd][token] = ptx::exp2_approx(__fsub_rn(b_end, b));
  to[kBeta][token] = beta;
  to[kLog2Decay][token] = b;
  return b;
}

// acc = rows (64 x 128) keys^T, both K-major tiles. Commits, does not wait.
__device__ __forceinline__ void multiply_rows_keys(float (&acc)[32], uint64_t rows, uint64_t keys) {
  ptx::wgmma_keep(acc);
  ptx::wgmma_fence();
#pragma unroll
  for (int s = 0; s < 8; ++s) {
    const uint64_t step = ptx::wgmma_advance((s >> 2) * kSquareTileBytes + (s & 3) * 32);
    ptx::wgmma_bf16<ptx::Major::kK, ptx::Major::kK>(acc, rows + step, keys + step, s > 0);
  }
  ptx::wgmma_commit();
}

// The lane's view of the 16 rows of its warp: those of fragment elements 0, 1 and of 2, 3.
struct RowPair {
  int g, c;
  float b[2];

  __device__ __forceinline__ RowPair(const ChunkScalars& scalars, int row_block, int lane) : g(lane >> 2), c(lane & 3) {
#pragma unroll
    for (int half = 0; half < 2; ++half) b[half] = scalars[kLog2Decay][16 * row_block + g + 8 * half];
  }

  // Gamma in the fragments of one 16 x 16 block; above the diagonal it may be infinite.
  __device__ __forceinline__ void decays(float (&decay)[2][4], const ChunkScalars& scalars, int block) const {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const float2 column = *reinterpret_cast<const float2*>(&scalars[kLog2Decay][16 * block + 8 * n + 2 * c]);
#pragma unroll
      for (int i = 0; i < 4; ++i) decay[n][i] = ptx::exp2_approx(__fsub_rn(b[i >> 1], i & 1 ? column.y : column.x));
    }
  }

  // How far an element of a diagonal block lies below the diagonal.
  __device__ __forceinline__ int below(int n, int i) const { return g + 8 * (i >> 1) - (8 * n + 2 * c + (i & 1)); }

  // P of one block from its Q K^T, as a left operand.
  template <bool kDiagonal>
  __device__ __forceinline__ void attention(uint32_t (&to)[4], const ChunkScalars& scalars, const float* qk, float scale,
                                            int block) const {
    float decay[2][4];
    decays(decay, scalars, block);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      float p[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        p[i] = __fmul_rn(__fmul_rn(scale, decay[n][i]), qk[4 * n + i]);
        if (kDiagonal) p[i] = below(n, i) >= 0 ? p[i] : 0.f;  // select, never multiply by zero
      }
      to[2 * n] = ptx::pack_bf16(p[0], p[1]);
      to[2 * n + 1] = ptx::pack_bf16(p[2], p[3]);
    }
  }
};

// P of a warp's rows, into a swizzled tile.
__device__ __forceinline__ void store_attention_rows(char* tile_to, const ChunkScalars& scalars, const float (&qk)[32],
                                                     float scale, int warp,
                                                     const tile::LaneOffsets& offsets, int lane) {
  const RowPair rows(scalars, warp, lane);
#pragma unroll
  for (int block = 0; block < 4; ++block) {
    uint32_t packed[4] = {};
    if (block < warp) {
      rows.attention<false>(packed, scalars, qk + 8 * block, scale, block);
    } else if (block == warp) {
      rows.attention<true>(packed, scalars, qk + 8 * block, scale, block);
    }
    ptx::stmatrix_x4(tile::fragment_address<kChunk>(ptx::shared_address(tile_to), offsets.row_major, 16 * warp, 2 * block),
                     packed[0],
                     packed[1], packed[2], packed[3]);
  }
}

}  // namespace cake::gdn
