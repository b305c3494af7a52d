// wy: T = (I + A)^-1, P = scale * Gamma * (Q K^T) and the scalars of every chunk and value head.
//
//   A_ij = beta_i Gamma_ij (k_i . k_j) for i > j,   Gamma_ij = 2^(b_i - b_j) for i >= j,   b in units of log 2
//
// One CTA of four warps per chunk and key head; it makes K K^T and Q K^T once and walks the value heads of the group.
// A warp owns 16 rows. Reads q, k, the summed gates, beta; writes 8 KB of T, 8 KB of P and 1 KB of scalars a value head.
// Rows past the end of the sequence are zero in A and P, so T is the identity there and beta is 0.
// barriers  K, Q arrived | products read, or copies of the head before done | scalars written | A, P, diagonal inverses written |
//           T written; each is a __syncthreads of all threads. A diagonal block is read by the warp that wrote it: __syncwarp
#pragma once

#include "cake/gdn/any/carry_lost.cuh"
#include "cake/gdn/any/tile_copy.cuh"
#include "cake/gdn/any/unit_lower_inverse.cuh"
#include "cake/gdn/smem_sizes.h"

namespace cake::gdn {

struct WySmem {
  union {
    struct {
      alignas(1024) char k[kTokenTileBytes];
      char q[kTokenTileBytes];
    } rows;
    struct {
      alignas(1024) char inverse[kSquareTileBytes];
      char attention[kSquareTileBytes];
      InverseScratch scratch;
    } out;
  };
  alignas(16) float scalars[kScalarRows][kChunk];
};
static_assert(sizeof(WySmem) == kWySmemBytes);

__device__ __forceinline__ void wy_scalars(const WyParams& p, TokenPlace at, int tokens, int64_t record, int head, WySmem& smem,
                                           int thread) {
  if (thread < kChunk) {
    constexpr float kLog2E = 1.4426950408889634f;
    const float* sums = p.sums + record * kChunk;
    const float b = __fmul_rn(sums[thread], kLog2E), b_end = __fmul_rn(sums[kChunk - 1], kLog2E);
    float beta = 0.f;
    if (thread < tokens) {
      beta = load_scalar(p.beta.beta, {at.row, at.token + thread}, head);
      if (p.beta.top != 0.f) beta = __fdiv_rn(p.beta.top, __fadd_rn(1.f, expf(-beta)));
    }
    smem.scalars[kGamma][thread] = ptx::exp2_approx(b);
    smem.scalars[kEnd][thread] = ptx::exp2_approx(__fsub_rn(b_end, b));
    smem.scalars[kBeta][thread] = beta;
    smem.scalars[kLog2Decay][thread] = b;
  }
}

// Writes block row kRow of T as BF16 into the shared tile; blocks above the diagonal are zero.
template <int kRow>
__device__ __forceinline__ void store_inverse_row(WySmem& smem, int lane) {
  float t[4][2][4];
  invert_block_row<kRow>(smem.out.scratch, lane, t);
  const int g = lane >> 2, c = lane & 3, row = 16 * kRow + g;
  char* tile = smem.out.inverse;
#pragma unroll
  for (int j = 0; j < 4; ++j) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t at = tile::unit_offset<kChunk>(row, 2 * j + half) + 4 * c;  // row + 8 has the same permutation
      const bool filled = j <= kRow;
      *reinterpret_cast<uint32_t*>(tile + at) = filled ? ptx::pack_bf16(t[j][half][0], t[j][half][2]) : 0u;
      *reinterpret_cast<uint32_t*>(tile + at + 1024) = filled ? ptx::pack_bf16(t[j][half][1], t[j][half][3]) : 0u;
    }
  }
  __syncwarp();
  const int last = 16 * kRow + lane;
  if (lane < 16 && last >= 2) {
    const float* a = &smem.out.scratch.a[(last - 1) * kMatrixPitch + last - 2];  // T is -A there
    carry_lost(tile, last, carried_loss(-a[0], -a[kMatrixPitch + 1]));
  }
}

}  // namespace cake::gdn

extern "C" __global__ void __launch_bounds__(cake::gdn::kWyThreads, 3)
    wy_any(const __grid_constant__ cake::gdn::WyParams p) {
  using namespace cake::gdn;
  begin_stage();
  WySmem& smem = *reinterpret_cast<WySmem*>(smem_bytes);
  const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31, g = lane >> 2, c = lane & 3;
  const int64_t chunk_index = blockIdx.x / static_cast<uint32_t>(p.heads.key_heads);
  const int key_head = static_cast<int>(blockIdx.x - chunk_index * p.heads.key_heads);
  const ChunkEntry chunk = p.tables.chunks[chunk_index];
  if (chunk.sequence < 0) return;
  const TokenPlace at = place_of(chunk.first_token, p.heads.tokens_per_row);

  const uint32_t k_tile = ptx::shared_address(smem.rows.k), q_tile = ptx::shared_address(smem.rows.q);
  load_rows_async<kWyThreads, 16>(k_tile, p.k, at, chunk.tokens, key_head, 0, thread);
  load_rows_async<kWyThreads, 16>(q_tile, p.q, at, chunk.tokens, key_head, 0, thread);
  ptx::cp_async_commit();
  ptx::cp_async_wait<0>();
  __syncthreads();

  float kk[8][4] = {}, qk[8][4] = {};
  const tile::LaneOffsets offsets(lane);
#pragma unroll
  for (int s = 0; s < 8; ++s) {
    uint32_t k_rows[4], q_rows[4];
    tile::load_a<kChunk>(k_rows, k_tile, offsets, 16 * warp, 2 * s);
    tile::load_a<kChunk>(q_rows, q_tile, offsets, 16 * warp, 2 * s);
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      uint32_t b[4];
      tile::load_b<kChunk>(b, k_tile, offsets, 16 * n, 2 * s);
      ptx::mma_bf16(kk[2 * n], k_rows, b[0], b[1]);
      ptx::mma_bf16(kk[2 * n + 1], k_rows, b[2], b[3]);
      ptx::mma_bf16(qk[2 * n], q_rows, b[0], b[1]);
      ptx::mma_bf16(qk[2 * n + 1], q_rows, b[2], b[3]);
    }
  }

  const int row = 16 * warp + g;
#pragma unroll 1
  for (int member = 0; member < p.heads.group; ++member) {
    const int head = key_head * p.heads.group + member;
    const int64_t record = chunk_index * p.heads.value_heads + head;
    __syncthreads();  // everyone is past the K and Q tiles, or past the copies of the head before
    wy_scalars(p, at, chunk.tokens, record, head, smem, thread);
    __syncthreads();

    const float b0 = smem.scalars[kLog2Decay][row], b1 = smem.scalars[kLog2Decay][row + 8];
    const float beta0 = smem.scalars[kBeta][row], beta1 = smem.scalars[kBeta][row + 8];
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const int column = 8 * j + 2 * c;
      const float2 b = *reinterpret_cast<const float2*>(&smem.scalars[kLog2Decay][column]);
      float decay[4] = {ptx::exp2_approx(__fsub_rn(b0, b.x)), ptx::exp2_approx(__fsub_rn(b0, b.y)),
                        ptx::exp2_approx(__fsub_rn(b1, b.x)), ptx::exp2_approx(__fsub_rn(b1, b.y))};
      float a[4], attention[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int below = row + 8 * (i >> 1) - (column + (i & 1));
        const float beta = i < 2 ? beta0 : beta1;
        // Above the diagonal the decay may be infinite: select, never multiply by zero.
        a[i] = below > 0 ? __fmul_rn(__fmul_rn(beta, decay[i]), kk[j][i]) : 0.f;
        attention[i] = below >= 0 ? __fmul_rn(__fmul_rn(p.scale, decay[i]), qk[j][i]) : 0.f;
      }
      float* a_row = &smem.out.scratch.a[row * kMatrixPitch + column];
      *reinterpret_cast<float2*>(a_row) = make_float2(a[0], a[1]);
      *reinterpret_cast<float2*>(a_row + 8 * kMatrixPitch) = make_float2(a[2], a[3]);
      char* to = smem.out.attention + tile::unit_offset<kChunk>(row, j) + 4 * c;
      *reinterpret_cast<uint32_t*>(to) = ptx::pack_bf16(attention[0], attention[1]);
      *reinterpret_cast<uint32_t*>(to + 1024) = ptx::pack_bf16(attention[2], attention[3]);
    }
    __syncwarp();
    invert_diagonal_block(smem.out.scratch, warp, lane);
    __syncthreads();
    // The longest row moves from warp to warp, so that CTAs of one SM do not load the same scheduler.
    switch ((warp + chunk_index + member) & 3) {
      case 0: store_inverse_row<0>(smem, lane); break;
      case 1: store_inverse_row<1>(smem, lane); break;
      case 2: store_inverse_row<2>(smem, lane); break;
      case 3: store_inverse_row<3>(smem, lane); break;
    }
    __syncthreads();
    store_linear<kWyThreads, kSquareTileBytes>(p.inverse + record * kSquareTileBytes, smem.out.inverse, thread);
    store_linear<kWyThreads, kSquareTileBytes>(p.attention + record * kSquareTileBytes, smem.out.attention, thread);
    store_linear<kWyThreads, 4 * kScalarFloats>(p.scalars + record * kScalarFloats, smem.scalars, thread);
  }
}
