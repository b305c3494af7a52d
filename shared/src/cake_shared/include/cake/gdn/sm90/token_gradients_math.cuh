// Register arithmetic of token_gradients_sm90 between its products.
#pragma once

#include "cake/gdn/any/chain_products.cuh"
#include "cake/gdn/sm90/token_gradients_smem.cuh"

namespace cake::gdn::sm90 {

__device__ __forceinline__ float quad_sum(float x) {
  x = __fadd_rn(x, __shfl_xor_sync(~0u, x, 1));
  return __fadd_rn(x, __shfl_xor_sync(~0u, x, 2));
}

// A thread's place: warp `block` of its warpgroup has token rows 16 block .. + 15, the thread rows `row` and row + 8.
struct Place {
  int warp, lane, half, block, row, c;
};

// Two rows' values of a per-token array.
struct Rows {
  float x, y;
};
__device__ __forceinline__ Rows of_rows(const float (&per_token)[kChunk], int row) { return {per_token[row], per_token[row + 8]}; }

// What makes dV of the rows that the tile of dV holds: beta where they are dR.
__device__ __forceinline__ Rows from_rows(const float (&beta)[kChunk], int row) {
  const Rows b = of_rows(beta, row);
  return {is_deferred(b.x) ? b.x : 1.f, is_deferred(b.y) ? b.y : 1.f};
}

// The thread's words of rows `row` and row + 8 in columns 8 j + 2 c, + 1 of a block of 64 columns.
__device__ __forceinline__ uint32_t word_of(const char* block, const Place& at, int j, int i) {
  return *reinterpret_cast<const uint32_t*>(block + tile::unit_offset<kChunk>(at.row + 8 * i, j) + 4 * at.c);
}

using Products = uint32_t[16];  // a fragment rounded to BF16: what a CTA keeps through the heads of a group

// Turns dO V'^T (half 0) into dP, or dV V'^T (half 1) into M, in a tile of shared memory, and leaves the summands of E as right
// operands: element (i, j) of E in terms[j / 8][i / 8]. `by` is what M has beyond -z Gamma in the thread's rows. Returns, of half 1, the
// sums of -z Gamma (K K^T) over its rows.
__device__ __forceinline__ Rows make_matrices(const Fragment& z, const Products& products, uint32_t matrix_tile,
                                              uint32_t (&terms)[8][2], const float (&log2_decay)[kChunk], float scale, Rows by,
                                              const Place& at, const LaneOffsets& offsets) {
  const Rows b = of_rows(log2_decay, at.row);
  const float sign = at.half ? -1.f : scale;
  float sum[2] = {0.f, 0.f};
  const int below = at.row - 2 * at.c, kept = below - at.half;  // how far the thread's first element is below the diagonal
#pragma unroll
  for (int s = 0; s < 4; ++s) {
    uint32_t packed[4];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      const int j = 2 * s + n, column = 8 * j + 2 * at.c;
      const float2 b_column = *reinterpret_cast<const float2*>(&log2_decay[column]);
      float x[4], e[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int right = 8 * j + (i & 1) - 8 * (i >> 1);
        const float decay = ptx::exp2_approx(__fsub_rn(i >> 1 ? b.y : b.x, i & 1 ? b_column.y : b_column.x));
        // Above the diagonal the decay may be infinite: select, never multiply by zero.
        x[i] = kept >= right ? __fmul_rn(__fmul_rn(sign, decay), z[4 * j + i]) : 0.f;
        const uint32_t pair = products[2 * j + (i >> 1)];
        const float product = i & 1 ? ptx::high_bf16(pair) : ptx::low_bf16(pair);
        sum[i >> 1] = fmaf(x[i], product, sum[i >> 1]);
        x[i] = __fmul_rn(i >> 1 ? by.y : by.x, x[i]);
        e[i] = below > right ? __fmul_rn(x[i], product) : 0.f;
      }
      packed[2 * n] = ptx::pack_bf16(x[0], x[1]);
      packed[2 * n + 1] = ptx::pack_bf16(x[2], x[3]);
      terms[j][0] = ptx::pack_bf16(e[0], e[1]);
      terms[j][1] = ptx::pack_bf16(e[2], e[3]);
    }
    ptx::stmatrix_x4(tile::fragment_address<kChunk>(matrix_tile, offsets.row_major, 16 * at.block, 2 * s), packed[0], packed[1],
                     packed[2], packed[3]);
  }
  return {quad_sum(sum[0]), quad_sum(sum[1])};
}

// sums[t] = sum over the warp's rows i >= t and all j < t of E_ij, as products of triangles of ones with E^T.
__device__ __forceinline__ void sum_crossing(float (&sums)[kChunk], const uint32_t (&terms)[8][2], const Place& at) {
  constexpr uint32_t kOnes = 0x3f803f80u;
  const uint32_t ones[4] = {kOnes, kOnes, kOnes, kOnes};
  const int g = at.lane >> 2;
  const auto before = [&](int t, int j) { return (j < t ? 0x3f80u : 0u) | (j + 1 < t ? 0x3f800000u : 0u); };
  const uint32_t triangle[4] = {before(g, 2 * at.c), before(g + 8, 2 * at.c), before(g, 8 + 2 * at.c), before(g + 8, 8 + 2 * at.c)};
  float whole[2][4] = {};  // of the blocks of columns before this one
#pragma unroll
  for (int block = 0; block < 4; ++block) {
    if (block > at.block) break;
    float sum[2] = {0.f, 0.f};
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      float z[4] = {whole[n][0], whole[n][1], whole[n][2], whole[n][3]};
      ptx::mma_bf16(z, triangle, terms[2 * block][n], terms[2 * block + 1][n]);
      ptx::mma_bf16(whole[n], ones, terms[2 * block][n], terms[2 * block + 1][n]);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int token = 16 * at.block + 8 * n + 2 * at.c + (i & 1), gate = 16 * block + g + 8 * (i >> 1);
        sum[i >> 1] = __fadd_rn(sum[i >> 1], token >= gate ? z[i] : 0.f);
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      sum[i] = quad_sum(sum[i]);
      if (at.c == 0) sums[16 * block + g + 8 * i] = sum[i];
    }
  }
}

// gradient += by * z for the thread's two rows; returns their dot products of z with the rows' block of columns.
__device__ __forceinline__ Rows add_scaled(Fragment& gradient, const Fragment& z, Rows by, const char* block, const Place& at) {
  float dot[2] = {0.f, 0.f};
#pragma unroll
  for (int j = 0; j < 8; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t x = word_of(block, at, j, i);
      const float low = z[4 * j + 2 * i], high = z[4 * j + 2 * i + 1], scale = i ? by.y : by.x;
      dot[i] = fmaf(ptx::high_bf16(x), high, fmaf(ptx::low_bf16(x), low, dot[i]));
      gradient[4 * j + 2 * i] = fmaf(scale, low, gradient[4 * j + 2 * i]);
      gradient[4 * j + 2 * i + 1] = fmaf(scale, high, gradient[4 * j + 2 * i + 1]);
    }
  }
  return {quad_sum(dot[0]), quad_sum(dot[1])};
}

// The thread's share of V: 16 bytes of each of its rows from every 32 columns of its half. Zeros past the last token.
using Values = uint4[2][2];
__device__ __forceinline__ void load_values(Values& v, const TokenRows& values, TokenPlace first, int tokens, int head, const Place& at) {
  const char* source = row_pointer(values, first, head) + at.row * 2 * values.token_stride + 128 * at.half + 16 * at.c;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const bool valid = at.row + 8 * i < tokens;
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      v[i][s] = make_uint4(0, 0, 0, 0);
      if (valid) v[i][s] = *reinterpret_cast<const uint4*>(source + i * 16 * values.token_stride + 64 * s);
    }
  }
}

// sums[row] = dV . V over the half's columns: diagonals of dV V^T, whose contraction takes columns in the order of `load_values`.
__device__ __forceinline__ void dot_values(float (&sums)[kChunk], const char* grad_block, const Values& v, const Place& at) {
  float dot[2][4] = {};
#pragma unroll
  for (int s = 0; s < 2; ++s) {
    const char* source = grad_block + tile::unit_offset<kChunk>(at.row, 4 * s + at.c);
    const uint4 x = *reinterpret_cast<const uint4*>(source), y = *reinterpret_cast<const uint4*>(source + 1024);
    const uint32_t low[4] = {x.x, y.x, x.y, y.y}, high[4] = {x.z, y.z, x.w, y.w};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      ptx::mma_bf16(dot[i], low, v[i][s].x, v[i][s].y);
      ptx::mma_bf16(dot[i], high, v[i][s].z, v[i][s].w);
    }
  }
  const int g = at.lane >> 2;
  if (g >> 1 == at.c) {
    sums[at.row] = g & 1 ? dot[0][1] : dot[0][0];
    sums[at.row + 8] = g & 1 ? dot[1][3] : dot[1][2];
  }
}

// The warp's share of <dS1, S0>: 16 rows of both tiles, as the diagonals of products of their 16 x 16 blocks.
__device__ __forceinline__ float state_dot(const uint32_t (&exit)[2], const uint32_t (&entry)[2], const Place& at,
                                           const LaneOffsets& offsets) {
  float z[2][4] = {};
#pragma unroll
  for (int s = 0; s < 8; ++s) {
    uint32_t a[4], b[4];
    tile::load_a<kHeadDim>(a, exit[s >> 2], offsets, 16 * at.warp, 2 * (s & 3));
    tile::load_b<kHeadDim>(b, entry[s >> 2], offsets, 16 * at.warp, 2 * (s & 3));
    ptx::mma_bf16(z[0], a, b[0], b[1]);
    ptx::mma_bf16(z[1], a, b[2], b[3]);
  }
  const int g = at.lane >> 2;
  float sum = 0.f;
  if (g >> 1 == at.c) sum = g & 1 ? __fadd_rn(z[0][1], z[1][3]) : __fadd_rn(z[0][0], z[1][2]);
#pragma unroll
  for (int k = 16; k > 0; k >>= 1) sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, k));
  return sum;
}

// Turns the gradient of y = x r, r = 1 / |x|, into that of x: r (dy - y (y . dy)). `dots` has y . dy of both halves.
__device__ __forceinline__ void through_normalisation(Fragment& gradient, const char* block, const float (&dots)[2][kChunk],
                                                      const float* reciprocal, int64_t first, int heads, int tokens,
                                                      const Place& at) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = at.row + 8 * i;
    const float dot = __fadd_rn(dots[0][row], dots[1][row]);
    const float r = row < tokens ? reciprocal[first + int64_t{row} * heads] : 0.f;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const uint32_t y = word_of(block, at, j, i);
      float& low = gradient[4 * j + 2 * i];
      float& high = gradient[4 * j + 2 * i + 1];
      low = __fmul_rn(r, fmaf(-ptx::low_bf16(y), dot, low));
      high = __fmul_rn(r, fmaf(-ptx::high_bf16(y), dot, high));
    }
  }
}

// The thread's rows' dot products of a gradient with their block of columns, for through_normalisation.
__device__ __forceinline__ void leave_normal_dots(float (&dots)[2][kChunk], const Fragment& gradient, const char* block,
                                                  const Place& at) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    float dot = 0.f;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const uint32_t y = word_of(block, at, j, i);
      dot = fmaf(ptx::high_bf16(y), gradient[4 * j + 2 * i + 1], fmaf(ptx::low_bf16(y), gradient[4 * j + 2 * i], dot));
    }
    dot = quad_sum(dot);
    if (at.c == 0) dots[at.half][at.row + 8 * i] = dot;
  }
}

// Writes the warp's 16 rows of a gradient's block of columns, through the same rows of a shared tile.
__device__ __forceinline__ void store_gradient(const Fragment& gradient, char* block, const TokenRows& rows, TokenPlace first,
                                               int tokens, int head, const Place& at, const LaneOffsets& offsets) {
  const uint32_t shared = ptx::shared_address(block);
#pragma unroll
  for (int s = 0; s < 4; ++s) {
    const float* x = gradient + 8 * s;
    ptx::stmatrix_x4(tile::fragment_address<kChunk>(shared, offsets.row_major, 16 * at.block, 2 * s), ptx::pack_bf16(x[0], x[1]),
                     ptx::pack_bf16(x[2], x[3]), ptx::pack_bf16(x[4], x[5]), ptx::pack_bf16(x[6], x[7]));
  }
  __syncwarp();
  char* to = row_pointer(rows, first, head) + 128 * at.half;
  const int64_t row_bytes = 2 * rows.token_stride;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = 16 * at.block + 4 * i + (at.lane >> 3), unit = at.lane & 7;
    if (row < tokens) {
      *reinterpret_cast<uint4*>(to + row * row_bytes + 16 * unit) =
          *reinterpret_cast<const uint4*>(block + tile::unit_offset<kChunk>(row, unit));
    }
  }
}

}  // namespace cake::gdn::sm90
