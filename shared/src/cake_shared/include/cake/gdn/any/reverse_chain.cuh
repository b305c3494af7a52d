// The backward chain of one segment, value head and slice of value columns, last chunk first; its two uses are stages.
//
//   dV' = scale P^T dO + (e K) dS1        dR = T^T dV'        dV = beta dR
//   dS0 = gamma_C dS1 + scale (gamma Q)^T dO - (beta gamma K)^T dR
//
// What dV' loses in BF16 is added to dR: T's diagonal is 1. Registers, double buffer, slices, order of accumulation and barriers are
// as in chain.cuh.
#pragma once

#include "cake/gdn/any/state_io.cuh"
#include "cake/gdn/smem_sizes.h"

namespace cake::gdn {

enum class Reverse { kGradients, kPairs };

template <Reverse kUse, int kWarps>
struct ReverseSmem {
  struct Stage {
    alignas(1024) char k[kTokenTileBytes];
    char q[kTokenTileBytes];
    char inverse[kSquareTileBytes];
    char attention[kSquareTileBytes];
    char grad_o[kWarps <= 4 ? kSquareTileBytes : kTokenTileBytes];
    alignas(1024) float scalars[kScalarRows][kChunk];
  };
  Stage stage[2];
  char staging[kUse == Reverse::kGradients ? kWarps : 0][4096];
};

template <Reverse kUse, int kWarps>
__device__ __forceinline__ void load_reverse_stage(typename ReverseSmem<kUse, kWarps>::Stage& stage, const ReverseParams& p,
                                                   int chunk_index, int head, int first_unit, int thread) {
  constexpr int kThreads = 32 * kWarps;
  const ChunkEntry chunk = p.tables.chunks[chunk_index];
  const TokenPlace at = place_of(chunk.first_token, p.heads.tokens_per_row);
  const int key_head = head / p.heads.group;
  const int64_t record = int64_t{chunk_index} * p.heads.value_heads + head;
  load_rows_async<kThreads, 16>(ptx::shared_address(stage.k), p.k, at, chunk.tokens, key_head, 0, thread);
  load_rows_async<kThreads, 2 * kWarps>(ptx::shared_address(stage.grad_o), p.grad_o, at, chunk.tokens, head, first_unit, thread);
  load_linear_async<kThreads, kSquareTileBytes>(ptx::shared_address(stage.attention), p.attention + record * kSquareTileBytes,
                                                thread);
  load_linear_async<kThreads, kSquareTileBytes>(ptx::shared_address(stage.inverse), p.inverse + record * kSquareTileBytes,
                                                thread);
  load_linear_async<kThreads, 4 * kScalarFloats>(ptx::shared_address(stage.scalars), p.scalars + record * kScalarFloats, thread);
  load_rows_async<kThreads, 16>(ptx::shared_address(stage.q), p.q, at, chunk.tokens, key_head, 0, thread);
}

// What an accumulator lost where it was rounded to an operand.
__device__ __forceinline__ void keep_lost(TokenAcc& acc, const TokenOperand& rounded) {
#pragma unroll
  for (int j = 0; j < 8; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t pair = rounded[j >> 1][2 * (j & 1) + (i >> 1)];
      acc[j][i] = __fsub_rn(acc[j][i], i & 1 ? ptx::high_bf16(pair) : ptx::low_bf16(pair));
    }
  }
}

// The same as an operand, of a state.
__device__ __forceinline__ void pack_lost(StateOperand& a, const StateAcc& acc, const StateOperand& rounded) {
#pragma unroll
  for (int j = 0; j < 16; ++j) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint32_t pair = rounded[j >> 1][2 * (j & 1) + half];
      a[j >> 1][2 * (j & 1) + half] = ptx::pack_bf16(__fsub_rn(acc[j][2 * half], ptx::low_bf16(pair)),
                                                     __fsub_rn(acc[j][2 * half + 1], ptx::high_bf16(pair)));
    }
  }
}

// What scale_operand_tokens lost of `a`, as an operand; `scaled` is what it made.
__device__ __forceinline__ void lost_operand_tokens(TokenOperand& a, const TokenOperand& scaled, const float* per_token, float factor,
                                                    int c) {
#pragma unroll
  for (int s = 0; s < 4; ++s) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float2 by = *reinterpret_cast<const float2*>(per_token + 16 * s + 8 * half + 2 * c);
      const float x = __fmul_rn(factor, by.x), y = __fmul_rn(factor, by.y);
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        uint32_t& pair = a[s][2 * half + i];
        const uint32_t rounded = scaled[s][2 * half + i];
        pair = ptx::pack_bf16(__fsub_rn(__fmul_rn(x, ptx::low_bf16(pair)), ptx::low_bf16(rounded)),
                              __fsub_rn(__fmul_rn(y, ptx::high_bf16(pair)), ptx::high_bf16(rounded)));
      }
    }
  }
}

template <Reverse kUse, int kWarps>
__device__ __forceinline__ void run_reverse_chain(const ReverseParams& p) {
  using Smem = ReverseSmem<kUse, kWarps>;
  static_assert(sizeof(Smem) == chain_smem_bytes(kWarps, true, kUse == Reverse::kGradients));
  auto& smem = *reinterpret_cast<Smem*>(smem_bytes);
  const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31, c = lane & 3;
  const LaneOffsets offsets(lane);
  constexpr int kSlices = kHeadDim / (16 * kWarps);
  const int slice = blockIdx.x % kSlices;
  const uint32_t work = blockIdx.x / kSlices;
  const uint32_t segment_row = work / static_cast<uint32_t>(p.heads.value_heads);
  const int head = static_cast<int>(work - segment_row * p.heads.value_heads);
  const SegmentPlace segment = segment_place(p.tables, segment_row);
  if (segment.sequence < 0) return;
  if constexpr (kUse == Reverse::kPairs) {
    if (segment.first()) return;  // nothing precedes it
  }
  const int slice_column = slice * kWarps * 16, first_column = slice_column + 16 * warp;

  StateAcc state;
  clear(state);
  if (segment.last()) {
    if (p.grad_final.data) {
      load_state(state, state_of(p.grad_final, segment.sequence, p.heads, head), p.grad_final.k_stride, p.grad_final.v_stride,
                 first_column, lane);
    }
  } else if constexpr (kUse == Reverse::kGradients) {
    load_state(state, p.segment_exits + slot_offset(segment, p.heads, p.slots_per_row, head, 1), 1, kHeadDim, first_column, lane);
  }

  const bool has_final = p.grad_final.data && segment.last();
  const int first_chunk = segment.first_chunk;
  auto load = [&](int chunk) {
    if (chunk >= first_chunk) {
      load_reverse_stage<kUse, kWarps>(smem.stage[chunk & 1], p, chunk, head, slice_column / 8, thread);
    }
    ptx::cp_async_commit();
  };
  const int last_chunk = first_chunk + segment.chunks - 1;
  load(last_chunk);
  load(last_chunk - 1);

#pragma unroll 1
  for (int chunk = last_chunk; chunk >= first_chunk; --chunk) {
    auto& stage = smem.stage[chunk & 1];
    const int64_t record = int64_t{chunk} * p.heads.value_heads + head;
    const uint32_t k_tile = ptx::shared_address(stage.k), grad_tile = ptx::shared_address(stage.grad_o);
    TokenAcc acc;
    clear(acc);
    {
      StateOperand packed_state;
      pack_operand(packed_state, state);
      ptx::cp_async_wait<1>();
      __syncthreads();
      if constexpr (kUse == Reverse::kGradients) {
        store_state_tile(p.exit_gradients + record * kStateTileBytes, packed_state, smem.staging[warp], first_column, offsets,
                         lane);
      }
      // The gradient of a final state comes in FP32 and may be all that a sequence's last tokens have: its low words, too.
      if (has_final && chunk == last_chunk) {
        StateOperand low;
        pack_lost(low, state, packed_state);
        add_state_times_rows(acc, low, k_tile, offsets);
      }
      add_state_times_rows(acc, packed_state, k_tile, offsets);
    }
    scale_tokens(acc, stage.scalars[kEnd], 1.f, c);
    TokenOperand grad_o, operand;
#pragma unroll
    for (int s = 0; s < 4; ++s) tile::load_a_trans<kChunk>(grad_o[s], grad_tile, offsets, 16 * s, 2 * warp);
    add_times_lower(acc, grad_o, ptx::shared_address(stage.attention), offsets);
    pack_operand(operand, acc);
    keep_lost(acc, operand);
    scale_state(state, stage.scalars[kGamma][kChunk - 1]);
    scale_operand_tokens(grad_o, stage.scalars[kGamma], p.scale, c);
    add_times_rows(state, grad_o, ptx::shared_address(stage.q), offsets);
    if constexpr (kUse == Reverse::kGradients) {
      // The gradient of an initial state keeps FP32's digits of its largest part: the low words of gamma dO, too.
      if (p.grad_initial.data && chunk == first_chunk && segment.first()) {
        TokenOperand low;
#pragma unroll
        for (int s = 0; s < 4; ++s) tile::load_a_trans<kChunk>(low[s], grad_tile, offsets, 16 * s, 2 * warp);
        lost_operand_tokens(low, grad_o, stage.scalars[kGamma], p.scale, c);
        add_times_rows(state, low, ptx::shared_address(stage.q), offsets);
      }
    }

    add_times_lower(acc, operand, ptx::shared_address(stage.inverse), offsets);
    if constexpr (kUse == Reverse::kGradients) {
      pack_operand(operand, acc);
      store_token_tile(p.residual_gradients + record * kTokenTileBytes, operand, stage.grad_o, 2 * warp, first_column / 8, offsets,
                       lane);
    }
    scale_tokens(acc, stage.scalars[kBeta], 1.f, c);
    if constexpr (kUse == Reverse::kGradients) {
      pack_operand(operand, acc);
      store_token_rows(p.grad_v, p.tables.chunks[chunk], p.heads, head, operand, stage.grad_o, 2 * warp, first_column,
                       offsets, lane);
    }
    scale_tokens(acc, stage.scalars[kGamma], -1.f, c);
    pack_operand(operand, acc);
    add_times_rows(state, operand, k_tile, offsets);
    __syncthreads();  // the stage may be overwritten
    load(chunk - 2);
  }
  ptx::cp_async_wait<0>();  // the groups behind the last chunk are empty; none may be left

  // Read again rather than kept in registers through the loop.
  const SegmentPlace done = segment_place(p.tables, p.tables.chunks[first_chunk].segment);
  if constexpr (kUse == Reverse::kPairs) {
    store_state(state, p.segment_exits + slot_offset(done, p.heads, p.slots_per_row, head), 1, kHeadDim, first_column, lane);
  } else {
    if (p.grad_initial.data && done.first()) {
      store_state(state, state_of(p.grad_initial, done.sequence, p.heads, head), p.grad_initial.k_stride,
                  p.grad_initial.v_stride, first_column, lane);
    }
  }
}

}  // namespace cake::gdn
