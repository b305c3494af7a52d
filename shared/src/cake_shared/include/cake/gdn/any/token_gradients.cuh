// token_gradients_any: dq, dk, the gradients of the gates and of beta, one CTA per chunk and key head, its value heads in order.
//
//   dP   = scale (dO V'^T) Gamma                       N = -strict_lower(dR V'^T) Gamma,   M = beta N
//   dQ  += scale gamma (dO S0^T) + dP K                dK += -beta gamma (dR S0^T) + e (V' dS1^T) + (M + M^T) K + dP^T Q
//   dbeta_i = dR_i . X_i + sum_j N_ij (K K^T)_ij       E = M (K K^T) + dP (Q K^T), below the diagonal
//   dg_t = sum_{i >= t > j} E_ij + sum_{i >= t} in_i + sum_{j < t} end_j + gamma_C <dS1, S0>
//
// The crossing sums add the terms that gate t scales and nothing else, so they keep their digits under strong decay.
// Eight warps: warp w owns token rows 16 (w & 3) .. + 15 and column half w >> 2 of dQ and dK; half 0 makes dP, half 1
// makes N and M. dQ and dK stay in registers over the group: no atomics, one order. Every reduction over a row, the halves
// and the tokens has a fixed order.
// barriers  K, Q arrived | dO, dR, V', scalars arrived | dP, M, E written and S0, X arrived | dS1 arrived | sums of rows written |
//           tiles read, the next head's may come; each is a __syncthreads of all threads
#pragma once

#include "cake/gdn/any/chain_products.cuh"
#include "cake/gdn/any/gate_option.cuh"
#include "cake/gdn/any/uncovered.cuh"
#include "cake/gdn/smem_sizes.h"

namespace cake::gdn {

struct TokenGradientsSmem {
  alignas(1024) char k[kTokenTileBytes];
  char q[kTokenTileBytes];
  char grad_o[kTokenTileBytes];
  char residual_grad[kTokenTileBytes];
  char writes[kTokenTileBytes];
  char residual[kTokenTileBytes];
  char entry_state[kStateTileBytes];
  char exit_grad[kStateTileBytes];
  char attention_grad[kSquareTileBytes];        // dP
  char interaction_grad[kSquareTileBytes];      // M
  char crossing[2][kSquareTileBytes];           // the two summands of E
  alignas(16) float scalars[kScalarRows][kChunk];
  float crossing_sum[2][kChunk];
  float entering[2][kChunk];
  float leaving[2][kChunk];
  float beta_direct[2][kChunk];
  float beta_matrix[kChunk];
  float state_dot[8];
};
static_assert(sizeof(TokenGradientsSmem) == kTokenGradientsSmemBytes);

namespace token_gradients {

inline constexpr int kThreads = kTokenGradientsThreads;

__device__ __forceinline__ float quad_sum(float x) {
  x = __fadd_rn(x, __shfl_xor_sync(~0u, x, 1));
  return __fadd_rn(x, __shfl_xor_sync(~0u, x, 2));
}

// acc (16 x 64) += rows (16 of a 64 x 128 tile) times the column half of a transposed 128 x 128 state tile, [v][k].
__device__ __forceinline__ void add_rows_times_state(float (&acc)[8][4], uint32_t rows, int first_row, uint32_t state,
                                                     int half, const LaneOffsets& offsets) {
#pragma unroll 4  // a block of columns of the rows at a time: more in flight would spill
  for (int s = 0; s < 8; ++s) {
    uint32_t a[4];
    tile::load_a<kChunk>(a, rows, offsets, first_row, 2 * s);
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      uint32_t b[4];
      tile::load_b_trans<kHeadDim>(b, state, offsets, 16 * s, 8 * half + 2 * n);
      ptx::mma_bf16(acc[2 * n], a, b[0], b[1]);
      ptx::mma_bf16(acc[2 * n + 1], a, b[2], b[3]);
    }
  }
}

// acc (16 x 64) += a row block of a lower triangular 64 x 64 tile, or of its transpose, times the column half of a token tile.
template <bool kTransposed>
__device__ __forceinline__ void add_lower_times_rows(float (&acc)[8][4], uint32_t lower, int block, uint32_t rows, int half,
                                                     const LaneOffsets& offsets) {
#pragma unroll
  for (int s = 0; s < 4; ++s) {
    if (kTransposed ? s < block : s > block) continue;
    uint32_t a[4];
    if constexpr (kTransposed) {
      tile::load_a_trans<kChunk>(a, lower, offsets, 16 * s, 2 * block);
    } else {
      tile::load_a<kChunk>(a, lower, offsets, 16 * block, 2 * s);
    }
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      uint32_t b[4];
      tile::load_b_trans<kChunk>(b, rows, offsets, 16 * s, 8 * half + 2 * n);
      ptx::mma_bf16(acc[2 * n], a, b[0], b[1]);
      ptx::mma_bf16(acc[2 * n + 1], a, b[2], b[3]);
    }
  }
}

// acc (16 x 64) = rows of `a` times rows of `b`, both 64 x 128 token tiles; only the lower triangle is used.
__device__ __forceinline__ void lower_rows_times_rows(float (&acc)[8][4], uint32_t a_tile, uint32_t b_tile, int block,
                                                      const LaneOffsets& offsets) {
  clear(acc);
#pragma unroll
  for (int s = 0; s < 8; ++s) {
    uint32_t a[4];
    tile::load_a<kChunk>(a, a_tile, offsets, 16 * block, 2 * s);
#pragma unroll
    for (int n = 0; n < 4; ++n) {
      if (n > block) continue;
      uint32_t b[4];
      tile::load_b<kChunk>(b, b_tile, offsets, 16 * n, 2 * s);
      ptx::mma_bf16(acc[2 * n], a, b[0], b[1]);
      ptx::mma_bf16(acc[2 * n + 1], a, b[2], b[3]);
    }
  }
}

// Scales the two rows of z, adds it to the gradient, and returns per row its dot product with the tile's columns.
__device__ __forceinline__ float2 scale_dot_add(float (&z)[8][4], float by0, float by1, float (&gradient)[8][4],
                                                const char* rows, int row, int half, int c) {
  float dot0 = 0.f, dot1 = 0.f;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const char* at = rows + tile::unit_offset<kChunk>(row, 8 * half + j) + 4 * c;
    const uint32_t x0 = *reinterpret_cast<const uint32_t*>(at), x1 = *reinterpret_cast<const uint32_t*>(at + 1024);
    z[j][0] = __fmul_rn(by0, z[j][0]);
    z[j][1] = __fmul_rn(by0, z[j][1]);
    z[j][2] = __fmul_rn(by1, z[j][2]);
    z[j][3] = __fmul_rn(by1, z[j][3]);
    dot0 = fmaf(ptx::high_bf16(x0), z[j][1], fmaf(ptx::low_bf16(x0), z[j][0], dot0));
    dot1 = fmaf(ptx::high_bf16(x1), z[j][3], fmaf(ptx::low_bf16(x1), z[j][2], dot1));
#pragma unroll
    for (int i = 0; i < 4; ++i) gradient[j][i] = __fadd_rn(gradient[j][i], z[j][i]);
  }
  return make_float2(quad_sum(dot0), quad_sum(dot1));
}

// Stores a packed 16 x 64 accumulator as rows of a 64-column block.
__device__ __forceinline__ void stage_rows(uint32_t block_tile, const float (&acc)[8][4], int first_row,
                                           const LaneOffsets& offsets) {
#pragma unroll
  for (int s = 0; s < 4; ++s) {
    ptx::stmatrix_x4(tile::fragment_address<kChunk>(block_tile, offsets.row_major, first_row, 2 * s),
                     ptx::pack_bf16(acc[2 * s][0], acc[2 * s][1]), ptx::pack_bf16(acc[2 * s][2], acc[2 * s][3]),
                     ptx::pack_bf16(acc[2 * s + 1][0], acc[2 * s + 1][1]), ptx::pack_bf16(acc[2 * s + 1][2], acc[2 * s + 1][3]));
  }
}

__device__ __forceinline__ float dot_packed(uint32_t x, uint32_t y, float sum) {
  return fmaf(ptx::high_bf16(x), ptx::high_bf16(y), fmaf(ptx::low_bf16(x), ptx::low_bf16(y), sum));
}

// This thread's part of <dS1, S0>: both tiles have one layout, so the sum runs over equal positions.
__device__ __forceinline__ float state_dot(const TokenGradientsSmem& smem, int thread) {
  float sum = 0.f;
#pragma unroll 4
  for (int i = 0; i < kStateTileBytes / 16 / kThreads; ++i) {
    const uint4 x = reinterpret_cast<const uint4*>(smem.entry_state)[thread + i * kThreads];
    const uint4 y = reinterpret_cast<const uint4*>(smem.exit_grad)[thread + i * kThreads];
    sum = dot_packed(x.x, y.x, sum);
    sum = dot_packed(x.y, y.y, sum);
    sum = dot_packed(x.z, y.z, sum);
    sum = dot_packed(x.w, y.w, sum);
  }
#pragma unroll
  for (int k = 16; k > 0; k >>= 1) sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, k));
  return sum;
}

// The sums over tokens and the stores of one value head, by one warp; a lane has tokens 2 lane and 2 lane + 1.
__device__ __forceinline__ void store_token_gradients(const TokenGradientsParams& p, const TokenGradientsSmem& smem,
                                                      const ChunkEntry& chunk, int head, int64_t record, int lane) {
  auto pair = [&](const float (&parts)[2][kChunk]) {
    return make_float2(__fadd_rn(parts[0][2 * lane], parts[1][2 * lane]),
                       __fadd_rn(parts[0][2 * lane + 1], parts[1][2 * lane + 1]));
  };
  const float2 crossing = pair(smem.crossing_sum), entering = pair(smem.entering), leaving = pair(smem.leaving);
  float states = smem.state_dot[0];
#pragma unroll
  for (int i = 1; i < 8; ++i) states = __fadd_rn(states, smem.state_dot[i]);
  states = __fmul_rn(smem.scalars[kGamma][kChunk - 1], states);

  float from_here = __fadd_rn(entering.x, entering.y), up_to_here = __fadd_rn(leaving.x, leaving.y);
#pragma unroll
  for (int k = 1; k < 32; k <<= 1) {
    const float later = __shfl_down_sync(~0u, from_here, k), earlier = __shfl_up_sync(~0u, up_to_here, k);
    if (lane + k < 32) from_here = __fadd_rn(from_here, later);
    if (lane >= k) up_to_here = __fadd_rn(up_to_here, earlier);
  }
  const float behind = __shfl_down_sync(~0u, from_here, 1), before = __shfl_up_sync(~0u, up_to_here, 1);
  const float later_tokens = lane < 31 ? behind : 0.f;   // in_i of tokens after 2 lane + 1
  const float earlier_tokens = lane > 0 ? before : 0.f;  // end_j of tokens before 2 lane
  const float gate[2] = {
      __fadd_rn(__fadd_rn(crossing.x, from_here), __fadd_rn(earlier_tokens, states)),
      __fadd_rn(__fadd_rn(crossing.y, __fadd_rn(entering.y, later_tokens)),
                __fadd_rn(__fadd_rn(earlier_tokens, leaving.x), states))};
  const TokenPlace at = place_of(chunk.first_token, p.heads.tokens_per_row);
  double partial[2] = {0., 0.};
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = 2 * lane + i;
    if (row >= chunk.tokens) continue;
    const TokenPlace token = {at.row, at.token + row};
    float grad_gate = gate[i];
    if (p.gate.raw.data) {
      const GateSlopes slopes = gate_slopes(p.gate, token, head);
      partial[0] += __fmul_rn(grad_gate, slopes.value);
      grad_gate = __fmul_rn(grad_gate, slopes.of_raw);
      partial[1] += grad_gate;
    }
    store_scalar(p.grad_gate, token, head, grad_gate);
    float grad_beta = __fadd_rn(__fadd_rn(smem.beta_direct[0][row], smem.beta_direct[1][row]), smem.beta_matrix[row]);
    if (p.beta_top != 0.f) {
      const float beta = smem.scalars[kBeta][row];
      grad_beta = __fmul_rn(grad_beta, __fmul_rn(beta, __fsub_rn(1.f, __fdiv_rn(beta, p.beta_top))));
    }
    store_scalar(p.grad_beta, token, head, grad_beta);
  }
  if (p.gate_partials) {
#pragma unroll
    for (int k = 16; k > 0; k >>= 1) {
      partial[0] += __shfl_xor_sync(~0u, partial[0], k);
      partial[1] += __shfl_xor_sync(~0u, partial[1], k);
    }
    if (lane < 2) p.gate_partials[2 * record + lane] = lane == 0 ? partial[0] : partial[1];
  }
}

// Turns the gradient of y = x r, r = 1 / |x|, into that of x: r (dy - y (y . dy)). Every warp has half of its rows' columns.
__device__ __forceinline__ void through_normalisation(float (&gradient)[8][4], const char* rows, float (&parts)[2][kChunk],
                                                      const float* reciprocal, int64_t first, int heads, int tokens, int row,
                                                      int half, int c) {
  float dot[2] = {0.f, 0.f};
  auto word = [&](int j, int i) {
    return *reinterpret_cast<const uint32_t*>(rows + tile::unit_offset<kChunk>(row, 8 * half + j) + 4 * c + 1024 * i);
  };
#pragma unroll
  for (int j = 0; j < 8; ++j) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t y = word(j, i);
      dot[i] = fmaf(ptx::high_bf16(y), gradient[j][2 * i + 1], fmaf(ptx::low_bf16(y), gradient[j][2 * i], dot[i]));
    }
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    dot[i] = quad_sum(dot[i]);
    if (c == 0) parts[half][row + 8 * i] = dot[i];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int at = row + 8 * i;
    const float all = __fadd_rn(parts[0][at], parts[1][at]);
    const float r = at < tokens ? reciprocal[first + int64_t{at} * heads] : 0.f;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const uint32_t y = word(j, i);
      gradient[j][2 * i] = __fmul_rn(r, fmaf(-ptx::low_bf16(y), all, gradient[j][2 * i]));
      gradient[j][2 * i + 1] = __fmul_rn(r, fmaf(-ptx::high_bf16(y), all, gradient[j][2 * i + 1]));
    }
  }
}

}  // namespace token_gradients

}  // namespace cake::gdn

extern "C" __global__ void __launch_bounds__(cake::gdn::kTokenGradientsThreads, 1)
    token_gradients_any(const __grid_constant__ cake::gdn::TokenGradientsParams p) {
  using namespace cake::gdn;
  using namespace cake::gdn::token_gradients;
  begin_stage();
  fill_uncovered_by_stage<kThreads>(p.uncovered, p.tables, p.heads, threadIdx.x);
  TokenGradientsSmem& smem = *reinterpret_cast<TokenGradientsSmem*>(smem_bytes);
  const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31, g = lane >> 2, c = lane & 3;
  const int block = warp & 3, half = warp >> 2, row = 16 * block + g;
  const LaneOffsets offsets(lane);
  const int64_t chunk_index = blockIdx.x / static_cast<uint32_t>(p.heads.key_heads);
  const int key_head = static_cast<int>(blockIdx.x - chunk_index * p.heads.key_heads);
  const ChunkEntry chunk = p.tables.chunks[chunk_index];
  if (chunk.sequence < 0) return;
  const TokenPlace at = place_of(chunk.first_token, p.heads.tokens_per_row);

  const uint32_t k_tile = ptx::shared_address(smem.k), q_tile = ptx::shared_address(smem.q);
  const uint32_t grad_o = ptx::shared_address(smem.grad_o), residual_grad = ptx::shared_address(smem.residual_grad);
  const uint32_t writes = ptx::shared_address(smem.writes), entry_state = ptx::shared_address(smem.entry_state);
  const uint32_t exit_grad = ptx::shared_address(smem.exit_grad);
  const uint32_t attention_grad = ptx::shared_address(smem.attention_grad);
  const uint32_t interaction_grad = ptx::shared_address(smem.interaction_grad);
  const uint32_t crossing = ptx::shared_address(smem.crossing[half]);

  auto load_head = [&](int member) {
    const int head = key_head * p.heads.group + member;
    const int64_t record = chunk_index * p.heads.value_heads + head;
    load_linear_async<kThreads, kTokenTileBytes>(writes, p.writes + record * kTokenTileBytes, thread);
    load_linear_async<kThreads, kTokenTileBytes>(residual_grad, p.residual_gradients + record * kTokenTileBytes, thread);
    load_rows_async<kThreads, 16>(grad_o, p.grad_o, at, chunk.tokens, head, 0, thread);
    load_linear_async<kThreads, 4 * kScalarFloats>(ptx::shared_address(smem.scalars), p.scalars + record * kScalarFloats, thread);
    ptx::cp_async_commit();
    load_linear_async<kThreads, kStateTileBytes>(entry_state, p.entry_states + record * kStateTileBytes, thread);
    load_linear_async<kThreads, kTokenTileBytes>(ptx::shared_address(smem.residual), p.residuals + record * kTokenTileBytes,
                                                 thread);
    ptx::cp_async_commit();
    load_linear_async<kThreads, kStateTileBytes>(exit_grad, p.exit_gradients + record * kStateTileBytes, thread);
    ptx::cp_async_commit();
  };
  load_rows_async<kThreads, 16>(k_tile, p.k, at, chunk.tokens, key_head, 0, thread);
  load_rows_async<kThreads, 16>(q_tile, p.q, at, chunk.tokens, key_head, 0, thread);
  ptx::cp_async_commit();
  load_head(0);
  ptx::cp_async_wait<3>();
  __syncthreads();

  float products[8][4];  // Q K^T in half 0, K K^T in half 1
  lower_rows_times_rows(products, half ? k_tile : q_tile, k_tile, block, offsets);
  float grad_q[8][4], grad_k[8][4];
  clear(grad_q);
  clear(grad_k);

#pragma unroll 1
  for (int member = 0; member < p.heads.group; ++member) {
    const int head = key_head * p.heads.group + member;
    float z[8][4];
    ptx::cp_async_wait<2>();
    __syncthreads();
    lower_rows_times_rows(z, half ? residual_grad : grad_o, writes, block, offsets);
    const float gamma0 = smem.scalars[kGamma][row], gamma1 = smem.scalars[kGamma][row + 8];
    const float beta0 = smem.scalars[kBeta][row], beta1 = smem.scalars[kBeta][row + 8];
    {
      const float b0 = smem.scalars[kLog2Decay][row], b1 = smem.scalars[kLog2Decay][row + 8];
      float matrix0 = 0.f, matrix1 = 0.f;
#pragma unroll
      for (int s = 0; s < 4; ++s) {
        uint32_t packed[4], crossing_terms[4];
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          const int column = 16 * s + 8 * n + 2 * c;
          const float2 b = *reinterpret_cast<const float2*>(&smem.scalars[kLog2Decay][column]);
          const float decay[4] = {ptx::exp2_approx(__fsub_rn(b0, b.x)), ptx::exp2_approx(__fsub_rn(b0, b.y)),
                                  ptx::exp2_approx(__fsub_rn(b1, b.x)), ptx::exp2_approx(__fsub_rn(b1, b.y))};
          float x[4], e[4];
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const float product = products[2 * s + n][i];
            const int below = row + 8 * (i >> 1) - (column + (i & 1));
            // Above the diagonal the decay may be infinite: select, never multiply by zero.
            x[i] = below >= half ? __fmul_rn(__fmul_rn(half ? -1.f : p.scale, decay[i]), z[2 * s + n][i]) : 0.f;
            if (half) {
              float& matrix = i < 2 ? matrix0 : matrix1;
              matrix = fmaf(x[i], product, matrix);
              x[i] = __fmul_rn(i < 2 ? beta0 : beta1, x[i]);
            }
            e[i] = below > 0 ? __fmul_rn(x[i], product) : 0.f;
          }
          packed[2 * n] = ptx::pack_bf16(x[0], x[1]);
          packed[2 * n + 1] = ptx::pack_bf16(x[2], x[3]);
          crossing_terms[2 * n] = ptx::pack_bf16(e[0], e[1]);
          crossing_terms[2 * n + 1] = ptx::pack_bf16(e[2], e[3]);
        }
        const uint32_t matrix_tile = half ? interaction_grad : attention_grad;
        ptx::stmatrix_x4(tile::fragment_address<kChunk>(matrix_tile, offsets.row_major, 16 * block, 2 * s), packed[0],
                         packed[1], packed[2], packed[3]);
        ptx::stmatrix_x4(tile::fragment_address<kChunk>(crossing, offsets.row_major, 16 * block, 2 * s),
                         crossing_terms[0], crossing_terms[1], crossing_terms[2], crossing_terms[3]);
      }
      if (half) {
        matrix0 = quad_sum(matrix0);
        matrix1 = quad_sum(matrix1);
        if (c == 0) {
          smem.beta_matrix[row] = matrix0;
          smem.beta_matrix[row + 8] = matrix1;
        }
      }
    }
    ptx::cp_async_wait<1>();
    __syncthreads();

    clear(z);
    add_rows_times_state(z, grad_o, 16 * block, entry_state, half, offsets);
    float2 entering =
        scale_dot_add(z, __fmul_rn(p.scale, gamma0), __fmul_rn(p.scale, gamma1), grad_q, smem.q, row, half, c);
    clear(z);
    add_rows_times_state(z, residual_grad, 16 * block, entry_state, half, offsets);
    const float2 through =
        scale_dot_add(z, -__fmul_rn(beta0, gamma0), -__fmul_rn(beta1, gamma1), grad_k, smem.k, row, half, c);
    float direct0 = 0.f, direct1 = 0.f;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const uint32_t offset = tile::unit_offset<kChunk>(row, 8 * half + j) + 4 * c;
      auto word = [&](const char* rows, int i) { return *reinterpret_cast<const uint32_t*>(rows + offset + 1024 * i); };
      direct0 = dot_packed(word(smem.residual_grad, 0), word(smem.residual, 0), direct0);
      direct1 = dot_packed(word(smem.residual_grad, 1), word(smem.residual, 1), direct1);
    }
    direct0 = quad_sum(direct0);
    direct1 = quad_sum(direct1);

    // Sums over the rows at and after t of E, column by column, as a product with a triangle of ones.
    clear(z);
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      if (s < block) continue;
      const auto ones = [&](int t, int i) { return (i >= t ? 0x3f80u : 0u) | (i + 1 >= t ? 0x3f800000u : 0u); };
      const uint32_t a[4] = {ones(row, 16 * s + 2 * c), ones(row + 8, 16 * s + 2 * c), ones(row, 16 * s + 8 + 2 * c),
                             ones(row + 8, 16 * s + 8 + 2 * c)};
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        if (n > block) continue;
        uint32_t b[4];
        tile::load_b_trans<kChunk>(b, crossing, offsets, 16 * s, 2 * n);
        ptx::mma_bf16(z[2 * n], a, b[0], b[1]);
        ptx::mma_bf16(z[2 * n + 1], a, b[2], b[3]);
      }
    }
    float crossing0 = 0.f, crossing1 = 0.f;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int column = 8 * j + 2 * c + i;
        crossing0 = __fadd_rn(crossing0, column < row ? z[j][i] : 0.f);
        crossing1 = __fadd_rn(crossing1, column < row + 8 ? z[j][2 + i] : 0.f);
      }
    }
    crossing0 = quad_sum(crossing0);
    crossing1 = quad_sum(crossing1);

    ptx::cp_async_wait<0>();
    __syncthreads();
    clear(z);
    add_rows_times_state(z, writes, 16 * block, exit_grad, half, offsets);
    const float2 leaving =
        scale_dot_add(z, smem.scalars[kEnd][row], smem.scalars[kEnd][row + 8], grad_k, smem.k, row, half, c);
    const float dot = state_dot(smem, thread);
    if (lane == 0) smem.state_dot[warp] = dot;
    if (c == 0) {
      smem.entering[half][row] = __fadd_rn(entering.x, through.x);
      smem.entering[half][row + 8] = __fadd_rn(entering.y, through.y);
      smem.leaving[half][row] = leaving.x;
      smem.leaving[half][row + 8] = leaving.y;
      smem.beta_direct[half][row] = direct0;
      smem.beta_direct[half][row + 8] = direct1;
      smem.crossing_sum[half][row] = crossing0;
      smem.crossing_sum[half][row + 8] = crossing1;
    }
    __syncthreads();
    if (warp == (member & 7)) {
      store_token_gradients(p, smem, chunk, head, chunk_index * p.heads.value_heads + head, lane);
    }
    add_lower_times_rows<false>(grad_q, attention_grad, block, k_tile, half, offsets);
    add_lower_times_rows<false>(grad_k, interaction_grad, block, k_tile, half, offsets);
    add_lower_times_rows<true>(grad_k, interaction_grad, block, k_tile, half, offsets);
    add_lower_times_rows<true>(grad_k, attention_grad, block, q_tile, half, offsets);
    __syncthreads();
    if (member + 1 < p.heads.group) load_head(member + 1);
  }

  const int64_t first_row = int64_t{chunk.first_token} * p.heads.key_heads + key_head;
  if (p.q_reciprocal) {
    through_normalisation(grad_q, smem.q, smem.entering, p.q_reciprocal, first_row, p.heads.key_heads, chunk.tokens, row, half, c);
    through_normalisation(grad_k, smem.k, smem.leaving, p.k_reciprocal, first_row, p.heads.key_heads, chunk.tokens, row, half, c);
  }
  // The tiles of dO and dR carry dQ and dK out.
  stage_rows(grad_o + half * kSquareTileBytes, grad_q, 16 * block, offsets);
  stage_rows(residual_grad + half * kSquareTileBytes, grad_k, 16 * block, offsets);
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kChunk * 16 / kThreads; ++i) {
    const int token = (thread + i * kThreads) / 16, unit = thread % 16;
    if (token < chunk.tokens) {
      const uint32_t offset = tile::unit_offset<kChunk>(token, unit);
      const TokenPlace place = {at.row, at.token + token};
      *reinterpret_cast<uint4*>(row_pointer(p.grad_q, place, key_head) + 16 * unit) =
          *reinterpret_cast<const uint4*>(smem.grad_o + offset);
      *reinterpret_cast<uint4*>(row_pointer(p.grad_k, place, key_head) + 16 * unit) =
          *reinterpret_cast<const uint4*>(smem.residual_grad + offset);
    }
  }
}
