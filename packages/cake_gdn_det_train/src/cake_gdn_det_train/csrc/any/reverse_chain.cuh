// The backward chain of one segment, value head and slice of value columns, last chunk first.
//
//   dV' = scale P^T dO + (e K) dS1        dR = T^T dV'        dV = beta dR
//   dS0 = gamma_C dS1 + scale (gamma Q)^T dO - (beta gamma K)^T dR
//
// kGradients writes dV, and dR and dS1 of every chunk for chunk_grads, and the gradient of the initial state; kPair runs
// segments of long sequences from a zero gradient (the last one from the final state's) and writes Y only: the factor of
// the pair is the forward's M, transposed. Registers, double buffer and order of accumulation as in chain.cuh.
#pragma once

#include "any/state_io.cuh"
#include "any/tile_copy.cuh"

namespace cake::gdn {

enum class Reverse { kGradients, kPair };

template <Reverse kKind, int kWarps>
struct ReverseSmem {
  struct Stage {
    alignas(1024) char k[kTokenTileBytes];
    char q[kTokenTileBytes];
    char inverse[kTileBytes];
    char attention[kTileBytes];
    char grad_o[kWarps <= 4 ? kTileBytes : kTokenTileBytes];
    alignas(1024) float scalars[kScalarRows][kChunk];
  };
  Stage stage[2];
  char staging[kKind == Reverse::kGradients ? kWarps : 0][4096];
};

template <Reverse kKind, int kWarps>
__device__ __forceinline__ void reverse_load(typename ReverseSmem<kKind, kWarps>::Stage& stage, const ReverseParams& p,
                                             int64_t chunk_index, int head, int first_unit, int thread) {
  constexpr int kThreads = 32 * kWarps;
  const Chunk chunk = p.chunks[chunk_index];
  const int key_head = head / p.heads.group;
  const int64_t record = chunk_index * p.heads.value_heads + head;
  load_rows_async<kThreads, 16>(ptx::shared_address(stage.k), p.k, chunk, key_head, 0, thread);
  load_rows_async<kThreads, 2 * kWarps>(ptx::shared_address(stage.grad_o), p.grad_o, chunk, head, first_unit, thread);
  load_linear_async<kThreads, kTileBytes>(ptx::shared_address(stage.attention), p.attention + record * kTileBytes, thread);
  load_linear_async<kThreads, kTileBytes>(ptx::shared_address(stage.inverse), p.inverse + record * kTileBytes, thread);
  load_linear_async<kThreads, kScalarBytes>(ptx::shared_address(stage.scalars), p.scalars + record * (kScalarRows * kChunk),
                                            thread);
  load_rows_async<kThreads, 16>(ptx::shared_address(stage.q), p.q, chunk, key_head, 0, thread);
}

// Scales the tokens of a packed operand and rounds again.
__device__ __forceinline__ void scale_tokens(TokenOperand& a, const float* per_token, float factor, int lane) {
  const int c = lane & 3;
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

template <Reverse kKind, int kWarps>
__device__ __forceinline__ void reverse_body(const ReverseParams& p) {
  auto& smem = *reinterpret_cast<ReverseSmem<kKind, kWarps>*>(smem_bytes);
  const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31, c = lane & 3;
  const LaneOffsets offsets(lane);
  const int slice = blockIdx.x % p.slices;
  const int64_t work = blockIdx.x / p.slices;
  const int head = work % p.heads.value_heads;
  const Segment segment = p.segments[work / p.heads.value_heads];
  if (segment.sequence < 0) return;
  const int first_column = (slice * kWarps + warp) * 16, slice_unit = 2 * slice * kWarps;
  const bool last = segment.index + 1 == segment.segments;
  if constexpr (kKind == Reverse::kPair) {
    if (segment.segments == 1 || segment.index == 0) return;  // nothing precedes it
  }

  StateAcc state;
  clear(state);
  if (last) {
    if (p.grad_final.data) {
      load_state(state, sequence_state(p.grad_final, segment, p.heads, head), p.grad_final.k_stride, p.grad_final.v_stride,
                 first_column, lane);
    }
  } else if constexpr (kKind == Reverse::kGradients) {
    load_state(state, p.segment_exit_grad + long_matrix(segment, p.heads, head), 1, kHeadDim, first_column, lane);
  }

  auto load = [&](int n) {
    if (n >= 0) {
      reverse_load<kKind, kWarps>(smem.stage[n & 1], p, segment.first_chunk + n, head, slice_unit, thread);
    }
    ptx::cp_async_commit();
  };
  load(segment.chunks - 1);
  load(segment.chunks - 2);

#pragma unroll 1
  for (int n = segment.chunks - 1; n >= 0; --n) {
    auto& stage = smem.stage[n & 1];
    const int64_t chunk_index = segment.first_chunk + n;
    const int64_t record = chunk_index * p.heads.value_heads + head;
    const uint32_t k_tile = ptx::shared_address(stage.k), grad_tile = ptx::shared_address(stage.grad_o);
    TokenAcc acc;
    clear(acc);
    {
      StateOperand packed_state;
      pack_operand(packed_state, state);
      ptx::cp_async_wait<1>();
      __syncthreads();
      if constexpr (kKind == Reverse::kGradients) {
        store_state_tile(p.exit_grads + record * kStateTileBytes, packed_state, smem.staging[warp], first_column, offsets,
                         lane);
      }
      add_state_times_rows(acc, packed_state, k_tile, offsets);
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 end = *reinterpret_cast<const float2*>(&stage.scalars[kEnd][8 * j + 2 * c]);
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[j][i] = __fmul_rn(i & 1 ? end.y : end.x, acc[j][i]);
    }
    TokenOperand grad_o, operand;
#pragma unroll
    for (int s = 0; s < 4; ++s) tile::load_a_trans<kChunk>(grad_o[s], grad_tile, offsets, 16 * s, 2 * warp);
    add_times_lower(acc, grad_o, ptx::shared_address(stage.attention), offsets);
    pack_operand(operand, acc);
    clear(acc);
    add_times_lower(acc, operand, ptx::shared_address(stage.inverse), offsets);

    const float gamma_end = stage.scalars[kGamma][kChunk - 1];
#pragma unroll
    for (int j = 0; j < 16; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) state[j][i] = __fmul_rn(gamma_end, state[j][i]);
    }
    scale_tokens(grad_o, stage.scalars[kGamma], p.scale, lane);
    add_times_rows(state, grad_o, ptx::shared_address(stage.q), offsets);

    if constexpr (kKind == Reverse::kGradients) {
      pack_operand(operand, acc);
      stage_token_columns(grad_tile, operand, 2 * warp, offsets);
      char* to = p.residual_grads + record * kTokenTileBytes;
      copy_token_columns(stage.grad_o, 2 * warp, lane, [&](int row, int unit) -> void* {
        return to + tile::unit_offset<kChunk>(row, first_column / 8 + unit);
      });
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 beta = *reinterpret_cast<const float2*>(&stage.scalars[kBeta][8 * j + 2 * c]);
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[j][i] = __fmul_rn(i & 1 ? beta.y : beta.x, acc[j][i]);
    }
    if constexpr (kKind == Reverse::kGradients) {
      pack_operand(operand, acc);
      stage_token_columns(grad_tile, operand, 2 * warp, offsets);
      const Chunk chunk = p.chunks[chunk_index];
      char* to = row_pointer(p.grad_v, chunk.first_token, head) + 2 * first_column;
      copy_token_columns(stage.grad_o, 2 * warp, lane, [&](int row, int unit) -> void* {
        return row < chunk.tokens ? to + row * 2 * p.grad_v.token_stride + 16 * unit : nullptr;
      });
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 gamma = *reinterpret_cast<const float2*>(&stage.scalars[kGamma][8 * j + 2 * c]);
#pragma unroll
      for (int i = 0; i < 4; ++i) acc[j][i] = -__fmul_rn(i & 1 ? gamma.y : gamma.x, acc[j][i]);
    }
    pack_operand(operand, acc);
    add_times_rows(state, operand, k_tile, offsets);
    __syncthreads();  // the stage may be overwritten
    load(n - 2);
  }

  if constexpr (kKind == Reverse::kPair) {
    store_state(state, p.segment_entry_grad + long_matrix(segment, p.heads, head), 1, kHeadDim, first_column, lane);
  } else {
    if (p.grad_initial.data && segment.index == 0) {
      store_state(state, sequence_state(p.grad_initial, segment, p.heads, head), p.grad_initial.k_stride,
                  p.grad_initial.v_stride, first_column, lane);
    }
  }
}

#define CAKE_GDN_REVERSE(name, kind, warps)                                                                     \
  extern "C" __global__ void __launch_bounds__(32 * warps, 1) name(const __grid_constant__ ReverseParams p) {   \
    reverse_body<kind, warps>(p);                                                                               \
  }
CAKE_GDN_REVERSE(gdn_reverse_w4, Reverse::kGradients, 4)
CAKE_GDN_REVERSE(gdn_reverse_w8, Reverse::kGradients, 8)
CAKE_GDN_REVERSE(gdn_reverse_pair_w4, Reverse::kPair, 4)
CAKE_GDN_REVERSE(gdn_reverse_pair_w8, Reverse::kPair, 8)
#undef CAKE_GDN_REVERSE

}  // namespace cake::gdn
