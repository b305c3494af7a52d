// T = (I + A)^-1 of a strictly lower triangular 64 x 64 matrix A_ij = beta_i Gamma_ij (k_i . k_j), by four warps.
//
// Gamma_ik Gamma_kj = Gamma_ij, so T_ij = Gamma_ij T0_ij with T0 the inverse without gates: products are of numbers that no gate
// has made small, and a gate scales their errors as it scales what they are errors of. So a factor may be one FP16 number: 11
// bits, where T has 8 in the end. N = -A without gates is rounded once, before anything is made of it: T0 is the inverse of what
// it was rounded to, and where one key repeats, sums of a row of T0 that are nearly zero stay so.
//
// The 8 x 8 corners of the 16 x 16 blocks on the diagonal are inverted by forward substitution in FP32, a lane a column, and make the
// blocks' inverses D with what is between them; the blocks below follow row by row, T0_ij = (sum_{j < k <= i} T0_ik N_kj) D_j.
// carry adds what rounding T to BF16 takes from its first subdiagonal.
#pragma once

#include "cake/gdn/any/carry_lost.cuh"
#include "cake/gdn/any/tile_copy.cuh"
#include "cake/gdn/sm90/params.h"

namespace cake::gdn {

// A head's matrix on the way. Below the blocks on the diagonal N in FP16; in their place the corners of N in FP32, a column where a
// row will be, then D in FP16, transposed and without its zeros; in the end T in BF16. Above it is zero from the beginning.
struct alignas(1024) BlockInverseTile {
  char bytes[kSquareTileBytes];
};

// The decay from a token to the last of its 16, and the exponents of these last ones; of all but the last 16.
struct BlockDecays {
  float fade[kChunk - 16];
  float end[kChunk / 16 - 1];
};

// Of tokens.
struct alignas(16) BlockInverseScalars {
  BlockDecays decays;
  uint16_t below[kChunk];    // N_{i,i-1}, FP16
  uint16_t carried[kChunk];  // what T_{i,i-2} gets, BF16
};

// `b` is the exponent of a token's decay, `own` what is added to that of this token alone. By two warps.
__device__ __forceinline__ void store_decays(BlockDecays& to, float b, float own, int token) {
  const float end = __shfl_sync(~0u, b, token | 15);
  if (token >= kChunk - 16) return;
  to.fade[token] = ptx::exp2_approx(__fsub_rn(end, __fadd_rn(b, own)));
  if ((token & 15) == 15) to.end[token >> 4] = end;
}

// Where a 16-byte unit of a row of a block on the diagonal is.
__device__ __forceinline__ uint32_t diagonal_unit(int row_block, int row, int unit) {
  return tile::unit_offset<kChunk>(16 * row_block + row, 2 * row_block + unit);
}

// N of a block below the diagonal, from the warp of its rows.
__device__ __forceinline__ void store_below(char* tile_to, const ChunkScalars& scalars, const float* kk, int row_block,
                                            int column_block, const tile::LaneOffsets& offsets, int lane) {
  const float* beta = &scalars[kBeta][16 * row_block + (lane >> 2)];
  uint32_t pairs[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float strength = -beta[8 * (i & 1)];
    pairs[i] = ptx::pack_f16(__fmul_rn(strength, kk[2 * i]), __fmul_rn(strength, kk[2 * i + 1]));
  }
  const uint32_t at = ptx::shared_address(tile_to);
  ptx::stmatrix_x4(tile::fragment_address<kChunk>(at, offsets.row_major, 16 * row_block, 2 * column_block), pairs[0], pairs[1],
                   pairs[2], pairs[3]);
}

// From the warp of its columns, whose K K^T holds the block transposed. The one next to the diagonal has an element of the first
// subdiagonal.
__device__ __forceinline__ void store_below_transposed(char* tile_to, BlockInverseScalars& smem, const ChunkScalars& scalars,
                                                       const float* kk, int row_block, int column_block,
                                                       const tile::LaneOffsets& offsets, int lane) {
  const float* beta = &scalars[kBeta][16 * row_block + 2 * (lane & 3)];
  uint32_t pairs[4];
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    const float2 strength = *reinterpret_cast<const float2*>(beta + 8 * n);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float* of = kk + 4 * n + 2 * half;
      pairs[2 * n + half] = ptx::pack_f16(__fmul_rn(-strength.x, of[0]), __fmul_rn(-strength.y, of[1]));
    }
  }
  const uint32_t at = ptx::shared_address(tile_to);
  ptx::stmatrix_x4_trans(tile::fragment_address<kChunk>(at, offsets.col_major, 16 * row_block, 2 * column_block), pairs[0], pairs[1],
                         pairs[2], pairs[3]);
  if (row_block == column_block + 1 && lane == 28) smem.below[16 * row_block] = static_cast<uint16_t>(pairs[1]);
}

// Of the block on the diagonal the two corners; returns what is between them, transposed, as a right operand.
__device__ __forceinline__ uint32_t store_diagonal(char* tile_to, BlockInverseScalars& smem, const ChunkScalars& scalars,
                                                   const float* kk, int row_block, int lane) {
  const int g = lane >> 2, c = lane & 3, row = 16 * row_block + g;
  const float strength[2] = {-scalars[kBeta][row], -scalars[kBeta][row + 8]};
  const uint32_t first = ptx::pack_f16(__fmul_rn(strength[0], kk[0]), __fmul_rn(strength[0], kk[1]));
  const uint32_t between = ptx::pack_f16(__fmul_rn(strength[1], kk[2]), __fmul_rn(strength[1], kk[3]));
  const uint32_t second = ptx::pack_f16(__fmul_rn(strength[1], kk[6]), __fmul_rn(strength[1], kk[7]));
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    char* column = tile_to + diagonal_unit(row_block, 2 * c + i, g >> 2) + 4 * (g & 3);
    *reinterpret_cast<float*>(column) = i ? ptx::high_f16(first) : ptx::low_f16(first);
    *reinterpret_cast<float*>(column + 8 * 128) = i ? ptx::high_f16(second) : ptx::low_f16(second);
  }
  if (c == (((g - 1) >> 1) & 3)) {  // the first subdiagonal's
    const int shift = g & 1 ? 0 : 16;
    if (g > 0) smem.below[row] = static_cast<uint16_t>(first >> shift);
    smem.below[row + 8] = static_cast<uint16_t>((g > 0 ? second : between) >> shift);
  }
  return between;
}

// What a warp makes of N from the 16 rows of K K^T that it has: one or two blocks below the diagonal, whosever rows they are, and
// its own on the diagonal.
template <int kWarp>
__device__ __forceinline__ uint32_t store_coefficients(char* tile_to, BlockInverseScalars& smem, const ChunkScalars& scalars,
                                                       const float (&kk)[32], const tile::LaneOffsets& offsets, int lane) {
  const auto direct = [&](int column_block) {
    store_below(tile_to, scalars, kk + 8 * column_block, kWarp, column_block, offsets, lane);
  };
  const auto transposed = [&](int row_block) {
    store_below_transposed(tile_to, smem, scalars, kk + 8 * row_block, row_block, kWarp, offsets, lane);
  };
  if (kWarp == 2) direct(0);
  if (kWarp == 3) direct(1);
  if (kWarp < 3) transposed(kWarp + 1);
  if (kWarp == 0) transposed(3);
  if (kWarp == 0 && lane == 0) smem.below[0] = 0;
  return store_diagonal(tile_to, smem, scalars, kk + 8 * kWarp, kWarp, lane);
}

// D of a row of blocks of two heads, from what this warp wrote: 8 lanes a corner, a lane a column.
__device__ __forceinline__ void invert_diagonals(BlockInverseTile (&tiles)[2], const uint32_t (&between)[2], int heads,
                                                 int row_block, int lane) {
  const int column = lane & 7, corner = (lane >> 3) & 1, head = lane >> 4, row = 8 * corner + column;
  // Column j of a corner is a row of which the swizzle permutes the units by ^ j.
  const uint32_t n = ptx::shared_address(tiles[head < heads ? head : 0].bytes) + diagonal_unit(row_block, 8 * corner, 0);
  float x[8];
#pragma unroll
  for (int i = 0; i < 8; ++i) x[i] = i == column ? 1.f : 0.f;
#pragma unroll
  for (int j = 0; j < 7; ++j) {  // x[j] is final: take it out of the rows below
#pragma unroll
    for (int i = (j + 1) / 4 * 4; i < 8; i += 4) {
      const float4 a = ptx::load_float4((n ^ ((j ^ (i >> 2)) << 4)) + 128 * j);
      if (i > j) x[i] = fmaf(a.x, x[j], x[i]);
      if (i + 1 > j) x[i + 1] = fmaf(a.y, x[j], x[i + 1]);
      if (i + 2 > j) x[i + 2] = fmaf(a.z, x[j], x[i + 2]);
      x[i + 3] = fmaf(a.w, x[j], x[i + 3]);
    }
  }
  __syncwarp();
  *reinterpret_cast<uint4*>(tiles[head].bytes + diagonal_unit(row_block, row, corner)) =
      uint4{ptx::pack_f16(x[0], x[1]), ptx::pack_f16(x[2], x[3]), ptx::pack_f16(x[4], x[5]), ptx::pack_f16(x[6], x[7])};
  __syncwarp();
  // X = D2 N21 D1 as X^T = (D1^T N21^T) D2^T of both heads; lanes 0 to 15 hold the addresses of their rows.
  const uint32_t tile_at = ptx::shared_address(tiles[(lane >> 3) & 1].bytes);
  uint32_t first[2], second[2];
  ptx::ldmatrix_x2(first, tile_at + diagonal_unit(row_block, column, 0));
  ptx::ldmatrix_x2_trans(second, tile_at + diagonal_unit(row_block, 8 + column, 1));
  uint32_t x_transposed[2];
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    float left[4] = {}, sum[4] = {};
    ptx::mma_f16(left, first[h], first[h], between[h]);
    const uint32_t packed = ptx::pack_f16(left[0], left[1]);
    ptx::mma_f16(sum, packed, packed, second[h]);
    x_transposed[h] = ptx::pack_f16(sum[0], sum[1]);
  }
  ptx::stmatrix_x2(tile_at + diagonal_unit(row_block, column, 1), x_transposed[0], x_transposed[1]);
}

// T on the first subdiagonal is N there. What rounding it to BF16 takes from a row goes to the element below, as
// cake/gdn/any/carry_lost.cuh says. A thread a token.
__device__ __forceinline__ void find_carried(BlockInverseScalars& smem, const ChunkScalars& scalars, int token) {
  const int before = max(token - 1, 0), above = max(token - 2, 0);
  const float b = scalars[kLog2Decay][before];
  // As the row's own warp finds it.
  const float decayed = __fmul_rn(ptx::low_f16(smem.below[before]), ptx::exp2_approx(__fsub_rn(b, scalars[kLog2Decay][above])));
  const float here = __fmul_rn(ptx::low_f16(smem.below[token]), ptx::exp2_approx(__fsub_rn(scalars[kLog2Decay][token], b)));
  const float carried = token < 2 ? 0.f : carried_loss(decayed, here);
  smem.carried[token] = static_cast<uint16_t>(ptx::pack_bf16(carried, 0.f));
}

// Block row kRow of T.
template <int kRow>
struct InverseRow {
  uint32_t t[kRow + 1][4];  // pairs of BF16

  // Reads what other warps may read at the same time.
  __device__ __forceinline__ void make(const char* tile_of, const BlockInverseScalars& smem, const ChunkScalars& scalars,
                                       const tile::LaneOffsets& offsets, int lane) {
    const int g = lane >> 2, c = lane & 3, row = 16 * kRow + g;
    const uint32_t tile_at = ptx::shared_address(tile_of);
    const float b[2] = {scalars[kLog2Decay][row], scalars[kLog2Decay][row + 8]};
    uint32_t left[kRow + 1][4];
    tile::load_a_trans<kChunk>(left[kRow], tile_at, offsets, 16 * kRow, 2 * kRow);
    left[kRow][2] = 0;
    {  // D's decays one by one: no token lies between all rows and all columns
      const auto& d = left[kRow];
      const float2 upper = *reinterpret_cast<const float2*>(&scalars[kLog2Decay][16 * kRow + 2 * c]);
      const float2 lower = *reinterpret_cast<const float2*>(&scalars[kLog2Decay][16 * kRow + 8 + 2 * c]);
      const bool even_below = g >= 2 * c, odd_below = g > 2 * c;
      auto decayed = [](uint32_t pair, float of_row, float2 of_column) {
        return float2{__fmul_rn(ptx::low_f16(pair), ptx::exp2_approx(__fsub_rn(of_row, of_column.x))),
                      __fmul_rn(ptx::high_f16(pair), ptx::exp2_approx(__fsub_rn(of_row, of_column.y)))};
      };
      const float2 first = decayed(d[0], b[0], upper), between = decayed(d[1], b[1], upper);
      const float2 second = decayed(d[3], b[1], lower);
      // Above the diagonal a decay may be infinite: select, never multiply by zero.
      t[kRow][0] = ptx::pack_bf16(even_below ? first.x : 0.f, odd_below ? first.y : 0.f);
      t[kRow][1] = ptx::pack_bf16(between.x, between.y);
      t[kRow][2] = 0;
      t[kRow][3] = ptx::pack_bf16(even_below ? second.x : 0.f, odd_below ? second.y : 0.f);
    }
#pragma unroll
    for (int j = kRow - 1; j >= 0; --j) {
      float sum[2][4] = {}, block[2][4] = {};
#pragma unroll
      for (int k = kRow; k > j; --k) {
        uint32_t n[4];
        tile::load_b_trans<kChunk>(n, tile_at, offsets, 16 * k, 2 * j);
        ptx::mma_f16(sum[0], left[k], n[0], n[1]);
        ptx::mma_f16(sum[1], left[k], n[2], n[3]);
      }
      const uint32_t s[4] = {ptx::pack_f16(sum[0][0], sum[0][1]), ptx::pack_f16(sum[0][2], sum[0][3]),
                             ptx::pack_f16(sum[1][0], sum[1][1]), ptx::pack_f16(sum[1][2], sum[1][3])};
      uint32_t d[4];
      tile::load_b<kChunk>(d, tile_at, offsets, 16 * j, 2 * j);
      ptx::mma_f16(block[0], s, d[0], d[1]);
      ptx::mma_f16(block[1], s[2], s[3], d[3]);
      if (j > 0) {
#pragma unroll
        for (int i = 0; i < 4; ++i) left[j][i] = ptx::pack_f16(block[i >> 1][2 * (i & 1)], block[i >> 1][2 * (i & 1) + 1]);
      }
      const float end = smem.decays.end[j];
      const float fade[2] = {ptx::exp2_approx(__fsub_rn(b[0], end)), ptx::exp2_approx(__fsub_rn(b[1], end))};
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const float2 column = *reinterpret_cast<const float2*>(&smem.decays.fade[16 * j + 8 * n + 2 * c]);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          t[j][2 * n + half] = ptx::pack_bf16(__fmul_rn(__fmul_rn(block[n][2 * half], column.x), fade[half]),
                                              __fmul_rn(__fmul_rn(block[n][2 * half + 1], column.y), fade[half]));
        }
      }
    }
  }

  // It goes two columns left of the diagonal, where this lane holds that: of rows 0 and 1 into the block before the diagonal one.
  __device__ __forceinline__ void carry(const BlockInverseScalars& smem, int lane) {
    const int g = lane >> 2, c = lane & 3;
    uint32_t upper = 0, lower = 0;
    if (2 * c == ((g - 2) & 6)) {
      const int shift = g & 1 ? 16 : 0;
      upper = uint32_t{smem.carried[16 * kRow + g]} << shift;
      lower = uint32_t{smem.carried[16 * kRow + g + 8]} << shift;
    }
    const bool inside = g >= 2;
    t[kRow][0] = ptx::add_bf16(t[kRow][0], inside ? upper : 0);
    t[kRow][3] = ptx::add_bf16(t[kRow][3], inside ? lower : 0);
    t[kRow][1] = ptx::add_bf16(t[kRow][1], inside ? 0 : lower);
    if (kRow > 0) t[kRow > 0 ? kRow - 1 : 0][2] = ptx::add_bf16(t[kRow > 0 ? kRow - 1 : 0][2], inside ? 0 : upper);
  }

  // Puts it as BF16 into a swizzled tile.
  __device__ __forceinline__ void store(char* tile_to, const tile::LaneOffsets& offsets) const {
    const uint32_t to = ptx::shared_address(tile_to);
#pragma unroll
    for (int j = 0; j <= kRow; ++j) {
      const uint32_t at = tile::fragment_address<kChunk>(to, offsets.row_major, 16 * kRow, 2 * j);
      ptx::stmatrix_x4(at, t[j][0], t[j][1], t[j][2], t[j][3]);
    }
  }
};

}  // namespace cake::gdn
