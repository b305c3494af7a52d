// T = (I + A)^-1 of a strictly lower triangular 64 x 64 matrix, by four warps, as cake/gdn/any/unit_lower_inverse.cuh but for
// operands in two BF16 words.
//
// The 16 x 16 diagonal blocks are inverted by forward substitution in FP32, a lane a column; the blocks below follow row by row,
// T_ij = -(sum_{j < k <= i} T_ik A_kj) D_j. A factor of these products is the sum of two BF16 numbers (16 bits of
// significand) and a product has three terms, so their error is far below that of T's own rounding to BF16. The first word of
// a block of T is the result, to which carry adds.
#pragma once

#include "cake/gdn/any/carry_lost.cuh"
#include "cake/gdn/any/tile_copy.cuh"

namespace cake::gdn {

inline constexpr int kDiagonalFloats = 16 * 20;  // a diagonal block, column by column: pitch 20 floats keeps float4 aligned

// A matrix' diagonal blocks, transposed: [column][row]. Padded, so that two matrices' columns lie in different banks.
struct alignas(16) DiagonalBlocks {
  float of[4][kDiagonalFloats];
  float padding[4];
};

// Blocks below the diagonal hold A, diagonal blocks the inverses of those of I + A. The second words of the upper 32 rows lie
// where the first ones of blocks above the diagonal would be, those of the lower 32 rows behind the tile.
struct BlockInverseSmem {
  alignas(1024) char high[kSquareTileBytes];
  char low[kSquareTileBytes / 2];
};

// Where the second words of a block are whose first words are there; a tile starts at a multiple of 1024 bytes.
__device__ __forceinline__ uint32_t second_words(uint32_t first_words, int row_block) {
  return row_block < 2 ? first_words ^ 64 : first_words + kSquareTileBytes / 2;
}

// A 16 x 16 block as mma.sync's left operand in two words.
struct SplitBlock {
  uint32_t high[4], low[4];

  // From accumulators of two neighbouring fragments.
  __device__ __forceinline__ void set(const float (&left)[4], const float (&right)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* from = i < 2 ? left : right;
      const float x = from[2 * (i & 1)], y = from[2 * (i & 1) + 1];
      high[i] = ptx::pack_bf16(x, y);
      low[i] = ptx::pack_bf16(__fsub_rn(x, ptx::low_bf16(high[i])), __fsub_rn(y, ptx::high_bf16(high[i])));
    }
  }

  __device__ __forceinline__ void store(BlockInverseSmem& smem, const tile::LaneOffsets& lane, int row_block,
                                        int column_block) const {
    const uint32_t to =
        tile::fragment_address<kChunk>(ptx::shared_address(smem.high), lane.row_major, 16 * row_block, 2 * column_block);
    ptx::stmatrix_x4(to, high[0], high[1], high[2], high[3]);
    ptx::stmatrix_x4(second_words(to, row_block), low[0], low[1], low[2], low[3]);
  }
};

// Inverts the diagonal blocks of a row of blocks of two matrices, which this warp wrote, and puts them where the products of A
// leave room: a half warp a matrix, a lane a column.
__device__ __forceinline__ void invert_diagonals(BlockInverseSmem (&smem)[2], const DiagonalBlocks (&blocks)[2], int matrices,
                                                 int row_block, int lane) {
  const int column = lane & 15, matrix = lane >> 4;
  const float* block = blocks[matrix < matrices ? matrix : 0].of[row_block];
  float x[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) x[i] = i == column ? 1.f : 0.f;
#pragma unroll
  for (int j = 0; j < 15; ++j) {  // x[j] is final: take it out of the rows below
    const float* below = block + 20 * j;
#pragma unroll
    for (int i = (j + 1) / 4 * 4; i < 16; i += 4) {
      const float4 a = *reinterpret_cast<const float4*>(below + i);
      if (i > j) x[i] = fmaf(-a.x, x[j], x[i]);
      if (i + 1 > j) x[i + 1] = fmaf(-a.y, x[j], x[i + 1]);
      if (i + 2 > j) x[i + 2] = fmaf(-a.z, x[j], x[i + 2]);
      x[i + 3] = fmaf(-a.w, x[j], x[i + 3]);
    }
  }
  if (matrix >= matrices) return;
  const uint32_t unit = 2 * row_block + (column >> 3), word = 2 * (column & 7);
#pragma unroll
  for (int i = 0; i < 16; i += 2) {
    const uint32_t high = ptx::pack_bf16(x[i], x[i + 1]);
    const uint32_t low = ptx::pack_bf16(__fsub_rn(x[i], ptx::low_bf16(high)), __fsub_rn(x[i + 1], ptx::high_bf16(high)));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t at = tile::unit_offset<kChunk>(16 * row_block + i + half, unit) + word;
      *reinterpret_cast<uint16_t*>(smem[matrix].high + at) = static_cast<uint16_t>(half ? high >> 16 : high);
      *reinterpret_cast<uint16_t*>(smem[matrix].high + second_words(at, row_block)) =
          static_cast<uint16_t>(half ? low >> 16 : low);
    }
  }
}

// A sum of products of split blocks: the products of first words, and what the others add, apart, so that neither waits for
// the other.
struct SplitSum {
  float first[2][4] = {}, rest[2][4] = {};

  // += a b, b a block of the scratch stored [k][n].
  __device__ __forceinline__ void add(const SplitBlock& a, const BlockInverseSmem& smem, const tile::LaneOffsets& lane,
                                      int row_block,
                                      int column_block) {
    uint32_t high[4], low[4];
    const uint32_t from =
        tile::fragment_address<kChunk>(ptx::shared_address(smem.high), lane.row_major, 16 * row_block, 2 * column_block);
    ptx::ldmatrix_x4_trans(high, from);
    ptx::ldmatrix_x4_trans(low, second_words(from, row_block));
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      ptx::mma_bf16(first[n], a.high, high[2 * n], high[2 * n + 1]);
      ptx::mma_bf16(rest[n], a.low, high[2 * n], high[2 * n + 1]);
    }
#pragma unroll
    for (int n = 0; n < 2; ++n) ptx::mma_bf16(rest[n], a.high, low[2 * n], low[2 * n + 1]);
  }

  __device__ __forceinline__ void split(SplitBlock& to, bool negated) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const float sum = __fadd_rn(first[i >> 2][i & 3], rest[i >> 2][i & 3]);
      first[i >> 2][i & 3] = negated ? -sum : sum;
    }
    to.set(first[0], first[1]);
  }
};

// T of a row and the column before it, exactly.
__device__ __forceinline__ float first_subdiagonal(const BlockInverseSmem& smem, const DiagonalBlocks& diagonal, int row) {
  const int block = row >> 4, i = row & 15;
  if (i > 0) return -diagonal.of[block][20 * (i - 1) + i];
  const uint32_t at = tile::unit_offset<kChunk>(row, 2 * block - 1) + 14;  // as the products have it
  return -__fadd_rn(__bfloat162float(*reinterpret_cast<const __nv_bfloat16*>(smem.high + at)),
                    __bfloat162float(*reinterpret_cast<const __nv_bfloat16*>(smem.high + second_words(at, block))));
}

// Adds `lost` to one half of a pair of BF16.
__device__ __forceinline__ void carry_into(uint32_t& pair, bool upper, float lost) {
  const float low = ptx::low_bf16(pair), high = ptx::high_bf16(pair);
  pair = ptx::pack_bf16(upper ? low : __fadd_rn(low, lost), upper ? __fadd_rn(high, lost) : high);
}

// Block row kRow of T.
template <int kRow>
struct InverseRow {
  SplitBlock t[kRow + 1];
  float lost[2];  // what rows g and g + 8 of the block row get of the losses above them

  // Reads A; other warps may do so at the same time.
  __device__ __forceinline__ void make(const BlockInverseSmem& smem, const DiagonalBlocks& diagonal,
                                       const tile::LaneOffsets& offsets, int lane) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = 16 * kRow + (lane >> 2) + 8 * half;
      lost[half] = 0.f;
      if (row >= 2) {
        lost[half] = carried_loss(first_subdiagonal(smem, diagonal, row - 1), first_subdiagonal(smem, diagonal, row));
      }
    }
    const uint32_t from =
        tile::fragment_address<kChunk>(ptx::shared_address(smem.high), offsets.row_major, 16 * kRow, 2 * kRow);
    ptx::ldmatrix_x4(t[kRow].high, from);
    ptx::ldmatrix_x4(t[kRow].low, second_words(from, kRow));
#pragma unroll
    for (int j = kRow - 1; j >= 0; --j) {
      SplitSum sum, block;
#pragma unroll
      for (int k = kRow; k > j; --k) sum.add(t[k], smem, offsets, k, j);
      SplitBlock left;
      sum.split(left, true);
      block.add(left, smem, offsets, j, j);
      block.split(t[j], false);
    }
  }

  // It goes two columns left of the diagonal, where this lane holds that: of rows 0 and 1 into the block before the diagonal one.
  __device__ __forceinline__ void carry(int lane) {
    const int g = lane >> 2, c = lane & 3;
    if (2 * c != ((g - 2) & 6)) return;
    const bool upper = g & 1;
    if (g >= 2) {
      carry_into(t[kRow].high[0], upper, lost[0]);
      carry_into(t[kRow].high[3], upper, lost[1]);
    } else {
      if (kRow > 0) carry_into(t[kRow > 0 ? kRow - 1 : 0].high[2], upper, lost[0]);
      carry_into(t[kRow].high[1], upper, lost[1]);
    }
  }

  // Puts it as BF16 into a swizzled tile, zeros above the diagonal.
  __device__ __forceinline__ void store(char* tile_to, const tile::LaneOffsets& offsets) const {
    const uint32_t to = ptx::shared_address(tile_to);
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const uint32_t at = tile::fragment_address<kChunk>(to, offsets.row_major, 16 * kRow, 2 * j);
      if (j <= kRow) {
        const uint32_t(&h)[4] = t[j <= kRow ? j : 0].high;
        ptx::stmatrix_x4(at, h[0], h[1], h[2], h[3]);
      } else {
        ptx::stmatrix_x4(at, 0, 0, 0, 0);
      }
    }
  }
};

}  // namespace cake::gdn
