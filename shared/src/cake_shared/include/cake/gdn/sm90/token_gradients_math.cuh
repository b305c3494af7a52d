// Register arithmetic of token_gradients_sm90 between its products.
#pragma once

#include <type_traits>

#include "cake/gdn/any/chain_products.cuh"
#include "cake/gdn/sm90/token_gradients_smem.cuh"

namespace cake::gdn::sm90 {

__device__ __forceinline__ float quad_sum(float x) {
  x = __fadd_rn(x, __shfl_xor_sync(~0u, x, 1));
  return __fadd_rn(x, __shfl_xor_sync(~0u, x, 2));
}

// A thread's place: warp `block` of its warpgroup has token rows 16 block .. + 15, the thread rows `row` and row + 8. `warp` counts through
// both warpgroups of products, whose `half` of the key columns is theirs.
struct Place {
  int warp, lane, half, block, row, c;

  static __device__ __forceinline__ Place place_in(int warp, int lane) {
    return {warp, lane, warp >> 2, warp & 3, 16 * (warp & 3) + (lane >> 2), lane & 3};
  }
  // The same, but the compiler does not know it: what it makes of lanes then has registers no longer than it is used.
  __device__ __forceinline__ Place again() const {
    int same_warp = warp, same_lane = lane;
    asm volatile("" : "+r"(same_warp), "+r"(same_lane));
    return place_in(same_warp, same_lane);
  }
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

// What makes V' of a row of U.
__device__ __forceinline__ float write_strength(float beta) { return is_divided(beta) ? beta : 1.f; }

// The thread's words of rows `row` and row + 8 in columns 8 j + 2 c, + 1 of a block of 64 columns.
__device__ __forceinline__ uint32_t word_of(const char* block, const Place& at, int j, int i) {
  return *reinterpret_cast<const uint32_t*>(block + tile::unit_offset<kChunk>(at.row + 8 * i, j) + 4 * at.c);
}

using Products = uint32_t[16];  // a fragment rounded to BF16: what a CTA keeps through the heads of a group

// A thread's share of E = dP (Q K^T) + M (K K^T), below the diagonal, as right operands, element (i, j) in [j / 8][i / 8]: of the blocks of
// 16 columns before its rows' diagonal, of the one on the diagonal, and what that one loses in BF16: where gates are strong, a gate's
// gradient is little else.
struct PairTerms {
  uint32_t before[6][2], diagonal[2][2], lost[2][2];
};

// A row of two columns of a fragment's block.
struct PairPlace {
  int fragment, row;  // of 8; 0 or 1
  float b;            // of the row, as of the columns
  float2 b_columns;
  float by;
  int below;  // how far the thread's first element is below the diagonal
};

// Of x = dO U^T, y = dV U^T, both products: dP, M and E of a pair of columns.
template <bool kDiagonal>
__device__ __forceinline__ void make_pair(uint32_t& attention, uint32_t& interaction, uint32_t& terms, uint32_t& lost, const float* x,
                                          const float* y, uint32_t query_key, uint32_t key_key, float scale, const PairPlace& at) {
  float p[2], m[2], e[2];
#pragma unroll
  for (int k = 0; k < 2; ++k) {
    const int right = 8 * at.fragment + k - 8 * at.row;
    const float decay = ptx::exp2_approx(__fsub_rn(at.b, k ? at.b_columns.y : at.b_columns.x));
    const float query_product = k ? ptx::high_bf16(query_key) : ptx::low_bf16(query_key);
    const float key_product = k ? ptx::high_bf16(key_key) : ptx::low_bf16(key_key);
    p[k] = __fmul_rn(__fmul_rn(scale, decay), x[k]);
    m[k] = __fmul_rn(-decay, y[k]);
    if constexpr (kDiagonal) {  // above it the decay may be infinite: select, never multiply by zero
      p[k] = at.below >= right ? p[k] : 0.f;
      m[k] = at.below > right ? m[k] : 0.f;
    }
    m[k] = __fmul_rn(at.by, m[k]);
    e[k] = fmaf(p[k], query_product, __fmul_rn(m[k], key_product));
    if constexpr (kDiagonal) e[k] = at.below > right ? e[k] : 0.f;
  }
  attention = ptx::pack_bf16(p[0], p[1]);
  interaction = ptx::pack_bf16(m[0], m[1]);
  terms = ptx::pack_bf16(e[0], e[1]);
  if constexpr (kDiagonal) {
    lost = ptx::pack_bf16(__fsub_rn(e[0], ptx::low_bf16(terms)), __fsub_rn(e[1], ptx::high_bf16(terms)));
  }
}

// Makes dP and M + M^T from x = dO U^T and y = dV U^T, in their tiles of shared memory. `by` is what makes dV of the thread's rows of dV;
// `columns` has b - log2 beta. `block` is the warp's, and known to be uniform; key_key has the thread's share of K K^T, a block of 16
// columns every 32 words.
__device__ __forceinline__ void make_matrices(uint32_t attention_grad, uint32_t interaction_grad, PairTerms& made, const Fragment& x,
                                              const Fragment& y, const Products& query_key, const uint4* key_key,
                                              const float (&log2_decay)[kChunk], const float (&columns)[kChunk], Rows by, float scale,
                                              int block, const Place& at, const LaneOffsets& offsets) {
  const Rows b = of_rows(log2_decay, at.row);
#pragma unroll
  for (int s = 0; s < 4; ++s) {
    uint32_t attention[4] = {}, interaction[4] = {};
    auto make = [&](auto diagonal, uint32_t(*terms)[2]) {
      const uint4 words = key_key[32 * s];
      const uint32_t key_pairs[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        const int j = 2 * s + n;
        const float2 b_columns = *reinterpret_cast<const float2*>(&columns[8 * j + 2 * at.c]);
#pragma unroll
        for (int row = 0; row < 2; ++row) {
          const int pair = 2 * j + row;
          make_pair<decltype(diagonal)::value>(
              attention[2 * n + row], interaction[2 * n + row], terms[n][row], made.lost[n][row], x + 2 * pair, y + 2 * pair,
              query_key[pair], key_pairs[2 * n + row], scale, {j, row, row ? b.y : b.x, b_columns, row ? by.y : by.x, at.row - 2 * at.c});
        }
      }
    };
    if (s == block) make(std::true_type{}, made.diagonal);
    if (s < 3) {
      if (s < block) {
        make(std::false_type{}, made.before + 2 * s);
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) made.before[2 * s + (i >> 1)][i & 1] = 0;
      }
    }
    ptx::stmatrix_x4(tile::fragment_address<kChunk>(attention_grad, offsets.row_major, 16 * at.block, 2 * s), attention[0],
                     attention[1], attention[2], attention[3]);
    if (s == block) {
      interaction[0] |= ptx::transposed(interaction[0]);
      interaction[2] = ptx::transposed(interaction[1]);
      interaction[3] |= ptx::transposed(interaction[3]);
    }
    if (s <= block) {
      ptx::stmatrix_x4(tile::fragment_address<kChunk>(interaction_grad, offsets.row_major, 16 * at.block, 2 * s), interaction[0],
                       interaction[1], interaction[2], interaction[3]);
    }
    if (s < block) {
      ptx::stmatrix_x4_trans(tile::fragment_address<kChunk>(interaction_grad, offsets.row_major, 16 * s, 2 * at.block), interaction[0],
                             interaction[2], interaction[1], interaction[3]);
    }
  }
}

// sums[t] = sum over the warp's rows i >= t and all j < t of E_ij, as products of triangles of ones with E^T.
__device__ __forceinline__ void sum_crossing(float (&sums)[kChunk], const PairTerms& made, int block, const Place& at) {
  constexpr uint32_t kOnes = 0x3f803f80u;
  const uint32_t ones[4] = {kOnes, kOnes, kOnes, kOnes};
  const int g = at.lane >> 2, ahead = 2 * at.c - g;
  // Ones where column 2 c or 2 c + 1, and eight further on, is before row g or g + 8.
  const uint32_t corner = (ahead < 0 ? 0x3f80u : 0u) | (ahead < -1 ? 0x3f800000u : 0u);
  const uint32_t triangle[4] = {corner, kOnes, 0u, corner};
  float whole[2][4] = {};  // of the blocks of columns before this one
  float parts[8];          // of gates g and g + 8 of the blocks 0 to 2 and of the warp's own, over the thread's tokens
#pragma unroll
  for (int s = 0; s < 4; ++s) {
    float z[2][4];
#pragma unroll
    for (int n = 0; n < 2; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) z[n][i] = whole[n][i];
      if (s < 3) {
        ptx::mma_bf16(z[n], triangle, made.before[2 * s][n], made.before[2 * s + 1][n]);
        ptx::mma_bf16(whole[n], ones, made.before[2 * s][n], made.before[2 * s + 1][n]);
      } else {
        ptx::mma_bf16(z[n], triangle, made.diagonal[0][n], made.diagonal[1][n]);
        ptx::mma_bf16(z[n], triangle, made.lost[0][n], made.lost[1][n]);
#pragma unroll
        for (int i = 0; i < 4; ++i) {  // gates past a token are none of its own
          z[n][i] = ahead + 8 * n + (i & 1) - 8 * (i >> 1) >= 0 ? z[n][i] : 0.f;
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      parts[2 * s + i] = __fadd_rn(__fadd_rn(z[0][2 * i], z[0][2 * i + 1]), __fadd_rn(z[1][2 * i], z[1][2 * i + 1]));
    }
  }
  // The four lanes' sums of eight parts, two of which each keeps: parts c and c + 4.
  float kept[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const bool odd = at.c & 1;
    const float other = __shfl_xor_sync(~0u, odd ? parts[2 * i] : parts[2 * i + 1], 1);
    kept[i] = __fadd_rn(odd ? parts[2 * i + 1] : parts[2 * i], other);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const bool upper = at.c & 2;
    const float other = __shfl_xor_sync(~0u, upper ? kept[2 * i] : kept[2 * i + 1], 2);
    const float sum = __fadd_rn(upper ? kept[2 * i + 1] : kept[2 * i], other);
    const int s = 2 * i + (at.c >> 1), of_block = s == 3 ? block : s;
    if (s == 3 || s < block) sums[16 * of_block + g + 8 * (at.c & 1)] = sum;
  }
}

// gradient += by * z for the thread's two rows; returns their dot products of z with the rows' block of columns.
__device__ __forceinline__ Rows add_scaled(Fragment& gradient, const Fragment& z, Rows by, uint32_t block, const Place& at,
                                           const LaneOffsets& offsets) {
  float dot[2] = {0.f, 0.f};
#pragma unroll
  for (int s = 0; s < 4; ++s) {
    uint32_t words[4];  // of rows `row`, row + 8 in columns 16 s + 2 c, + 1, then in the columns eight further on
    tile::load_a<kChunk>(words, block, offsets, 16 * at.block, 2 * s);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      const int i = k & 1, element = 8 * s + 2 * k;
      const float low = z[element], high = z[element + 1], scale = i ? by.y : by.x;
      dot[i] = fmaf(ptx::high_bf16(words[k]), high, fmaf(ptx::low_bf16(words[k]), low, dot[i]));
      gradient[element] = fmaf(scale, low, gradient[element]);
      gradient[element + 1] = fmaf(scale, high, gradient[element + 1]);
    }
  }
  return {quad_sum(dot[0]), quad_sum(dot[1])};
}

// A warp's 16 elements of a fragment's diagonal: two to each lane that has_diagonal, of its rows. `block` is the warp's, and known to be
// uniform.
__device__ __forceinline__ Rows diagonal(const Fragment& z, int block, const Place& at) {
  const bool odd = at.lane & 4;
  Rows rows = {0.f, 0.f};
#pragma unroll
  for (int s = 0; s < 4; ++s) {
    if (s == block) rows = odd ? Rows{z[8 * s + 1], z[8 * s + 7]} : Rows{z[8 * s], z[8 * s + 6]};
  }
  return rows;
}
__device__ __forceinline__ bool has_diagonal(const Place& at) { return at.lane >> 3 == at.c; }

// Whether one of the warp's rows of U is V' itself.
__device__ __forceinline__ bool any_undivided(const float (&beta)[kChunk], int tokens, const Place& at) {
  const int row = 16 * at.block + (at.lane & 15);
  return __any_sync(~0u, row < tokens && !is_divided(beta[row]));
}

// dV . V of the thread's rows, V from global memory, in lanes that have diagonals: those of dV V^T. Where it is rare.
__device__ __forceinline__ Rows dot_values(const char* grad_rows, const TokenRows& values, TokenPlace first, int tokens, int head,
                                           const Place& at) {
  const char* source = row_pointer(values, first, head) + at.row * 2 * values.token_stride + 16 * at.c;
  float dot[2][4] = {};
#pragma unroll 1
  for (int s = 0; s < 4; ++s) {  // of 32 columns, in an order that both sides share
    const char* const rows = grad_rows + (s >> 1) * kBlockBytes + tile::unit_offset<kChunk>(at.row, 4 * (s & 1) + at.c);
    const uint4 x = *reinterpret_cast<const uint4*>(rows), y = *reinterpret_cast<const uint4*>(rows + 1024);
    const uint32_t low[4] = {x.x, y.x, x.y, y.y}, high[4] = {x.z, y.z, x.w, y.w};
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      uint4 v = make_uint4(0, 0, 0, 0);
      if (at.row + 8 * i < tokens) v = *reinterpret_cast<const uint4*>(source + i * 16 * values.token_stride + 64 * s);
      ptx::mma_bf16(dot[i], low, v.x, v.y);
      ptx::mma_bf16(dot[i], high, v.z, v.w);
    }
  }
  return at.lane & 4 ? Rows{dot[0][1], dot[1][3]} : Rows{dot[0][0], dot[1][2]};
}

// The sums of -(dV V'^T) Gamma (K K^T) below the diagonal over the thread's rows, of which y = dV U^T.
__device__ __forceinline__ Rows sum_interactions(const Fragment& y, const uint4* key_key, const float (&log2_decay)[kChunk],
                                                 const float (&columns)[kChunk], int block, const Place& at) {
  const Rows b = of_rows(log2_decay, at.row);
  float sum[2] = {0.f, 0.f};
#pragma unroll
  for (int s = 0; s < 4; ++s) {
    if (s > block) continue;
    const uint4 words = key_key[32 * s];
    const uint32_t key_pairs[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int row = i >> 1 & 1, column = 16 * s + 8 * (i >> 2) + 2 * at.c + (i & 1);
      const float decay = ptx::exp2_approx(__fsub_rn(row ? b.y : b.x, columns[column]));
      const float product = i & 1 ? ptx::high_bf16(key_pairs[i >> 1]) : ptx::low_bf16(key_pairs[i >> 1]);
      sum[row] = column < at.row + 8 * row ? fmaf(__fmul_rn(-decay, y[8 * s + i]), product, sum[row]) : sum[row];
    }
  }
  return {quad_sum(sum[0]), quad_sum(sum[1])};
}

// d = a b^T of the 64 value columns of a half of transposed state tiles: its diagonal has a share of <dS1, S0>. The rest is for nothing,
// and still nobody waits for it.
__device__ __forceinline__ void states_times_states(Fragment& d, const uint32_t (&a)[2], const uint32_t (&b)[2], int half) {
  using ptx::Major;
#pragma unroll
  for (int block = 0; block < 2; ++block) {
    const uint64_t left = ptx::wgmma_descriptor(a[block] + half * kBlockBytes);
    const uint64_t right = ptx::wgmma_descriptor(b[block] + half * kBlockBytes);
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      ptx::wgmma_bf16<Major::kK, Major::kK>(d, left + along_columns(s), right + along_columns(s), block + s > 0);
    }
  }
}

// The sum of the warp's part of a fragment's diagonal.
__device__ __forceinline__ float diagonal_sum(const Fragment& z, int block, const Place& at) {
  const Rows rows = diagonal(z, block, at);
  float sum = has_diagonal(at) ? __fadd_rn(rows.x, rows.y) : 0.f;
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

// The warp's 16 rows of a gradient's block of columns, 16 bytes of each fourth one to a lane, through the same rows of a shared tile.
using GradientRows = uint4[4];
__device__ __forceinline__ void take_rows(GradientRows& out, const Fragment& gradient, char* block, const Place& at,
                                          const LaneOffsets& offsets) {
  const uint32_t shared = ptx::shared_address(block);
#pragma unroll
  for (int s = 0; s < 4; ++s) {
    const float* x = gradient + 8 * s;
    ptx::stmatrix_x4(tile::fragment_address<kChunk>(shared, offsets.row_major, 16 * at.block, 2 * s), ptx::pack_bf16(x[0], x[1]),
                     ptx::pack_bf16(x[2], x[3]), ptx::pack_bf16(x[4], x[5]), ptx::pack_bf16(x[6], x[7]));
  }
  __syncwarp();
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    out[i] = *reinterpret_cast<const uint4*>(block + tile::unit_offset<kChunk>(16 * at.block + 4 * i + (at.lane >> 3), at.lane & 7));
  }
}
__device__ __forceinline__ void store_rows(const GradientRows& out, const TokenRows& rows, TokenPlace first, int tokens, int head,
                                           const Place& at) {
  char* to = row_pointer(rows, first, head) + 128 * at.half + 16 * (at.lane & 7);
  const int64_t row_bytes = 2 * rows.token_stride;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = 16 * at.block + 4 * i + (at.lane >> 3);
    if (row < tokens) *reinterpret_cast<uint4*>(to + row * row_bytes) = out[i];
  }
}

}  // namespace cake::gdn::sm90
