// The forward chain of one segment, value head and slice of value columns; its three uses are stages of their own.
//
//   X  = V - gamma (K S0)      V' = T (beta X)      O = scale gamma (Q S0) + P V'      S1 = gamma_C S0 + (e K)^T V'
//
// A warp owns 16 value columns and keeps S^T in registers; tiles of K, Q, T, P, V come through a double buffer in shared
// memory. Order of accumulation: keys and tokens ascending inside a product, chunks ascending. Which CTA or warp runs a
// column changes nothing, so the number of warps is free to follow the load.
// barriers  a chunk's tiles arrived | everyone is past them: two __syncthreads a chunk. Results leave through columns of the V tile
//           and staging that belong to one warp: __syncwarp
#pragma once

#include "cake/gdn/any/state_io.cuh"
#include "cake/gdn/smem_sizes.h"

namespace cake::gdn {

enum class Chain { kOutput, kStates, kPairs };

template <Chain kUse, int kWarps>
struct ChainSmem {
  static constexpr bool kOutput = kUse == Chain::kOutput;
  struct Stage {
    alignas(1024) char k[kTokenTileBytes];
    char q[kOutput ? kTokenTileBytes : 0];
    char inverse[kSquareTileBytes];
    char attention[kOutput ? kSquareTileBytes : 0];
    char v[kWarps <= 4 ? kSquareTileBytes : kTokenTileBytes];
    alignas(1024) float scalars[kScalarRows][kChunk];
  };
  Stage stage[2];
  char staging[kUse == Chain::kStates ? kWarps : 0][4096];
};

template <Chain kUse, int kWarps>
__device__ __forceinline__ void load_chain_stage(typename ChainSmem<kUse, kWarps>::Stage& stage, const ChainParams& p,
                                                 int chunk_index, int head, int first_unit, bool values, int thread) {
  constexpr int kThreads = 32 * kWarps;
  const ChunkEntry chunk = p.tables.chunks[chunk_index];
  const TokenPlace at = place_of(chunk.first_token, p.heads.tokens_per_row);
  const int key_head = head / p.heads.group;
  const int64_t record = int64_t{chunk_index} * p.heads.value_heads + head;
  load_rows_async<kThreads, 16>(ptx::shared_address(stage.k), p.k, at, chunk.tokens, key_head, 0, thread);
  load_linear_async<kThreads, kSquareTileBytes>(ptx::shared_address(stage.inverse), p.inverse + record * kSquareTileBytes,
                                                thread);
  load_linear_async<kThreads, 4 * kScalarFloats>(ptx::shared_address(stage.scalars), p.scalars + record * kScalarFloats, thread);
  if (values) {
    load_rows_async<kThreads, 2 * kWarps>(ptx::shared_address(stage.v), p.v, at, chunk.tokens, head, first_unit, thread);
  }
  if constexpr (kUse == Chain::kOutput) {
    load_rows_async<kThreads, 16>(ptx::shared_address(stage.q), p.q, at, chunk.tokens, key_head, 0, thread);
    load_linear_async<kThreads, kSquareTileBytes>(ptx::shared_address(stage.attention), p.attention + record * kSquareTileBytes,
                                                  thread);
  }
}

// What a warp of a pairs stage runs: a column of N from the values and a zero state (the first segment's true one), or a
// column of M from a column of the identity without values.
__device__ __forceinline__ bool runs_pair_column(const SegmentPlace& segment, bool factor) {
  if (segment.segments == 1 || segment.last()) return false;  // nothing is entered from it
  return !(factor && segment.first());                        // its entry state is known: the exit state says it all
}

template <Chain kUse, int kWarps>
__device__ __forceinline__ void run_chain(const ChainParams& p) {
  using Smem = ChainSmem<kUse, kWarps>;
  static_assert(sizeof(Smem) == chain_smem_bytes(kWarps, Smem::kOutput, kUse == Chain::kStates));
  auto& smem = *reinterpret_cast<Smem*>(smem_bytes);
  const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31, c = lane & 3;
  const LaneOffsets offsets(lane);

  const int slices = (kUse == Chain::kPairs ? p.pair_columns : kHeadDim) / (16 * kWarps);
  const int slice = blockIdx.x % slices;
  const uint32_t work = blockIdx.x / slices;
  const uint32_t segment_row = work / static_cast<uint32_t>(p.heads.value_heads);
  const int head = static_cast<int>(work - segment_row * p.heads.value_heads);
  const SegmentPlace segment = segment_place(p.tables, segment_row);
  if (segment.sequence < 0) return;
  int slice_column = slice * kWarps * 16;
  bool factor = false;
  if constexpr (kUse == Chain::kPairs) {
    factor = slice_column < kHeadDim;
    if (!runs_pair_column(segment, factor)) return;
    if (!factor) slice_column -= kHeadDim;
  }
  const int first_column = slice_column + 16 * warp;

  StateAcc state;
  clear(state);
  if (factor) {
    for_state_elements(first_column, lane, [&](int j, int i, int k, int v) { state[j][i] = k == v ? 1.f : 0.f; });
  } else if (segment.first()) {
    if (p.initial.data) {
      load_state(state, state_of(p.initial, segment.sequence, p.heads, head), p.initial.k_stride, p.initial.v_stride,
                 first_column, lane);
    }
  } else if constexpr (kUse != Chain::kPairs) {
    load_state(state, p.segment_entries + slot_offset(segment, p.heads, p.slots_per_row, head), 1, kHeadDim, first_column, lane);
  }

  const int end_chunk = segment.first_chunk + segment.chunks;
  auto load = [&](int chunk) {
    if (chunk < end_chunk) {
      load_chain_stage<kUse, kWarps>(smem.stage[chunk & 1], p, chunk, head, slice_column / 8, !factor, thread);
    }
    ptx::cp_async_commit();
  };
  load(segment.first_chunk);
  load(segment.first_chunk + 1);

#pragma unroll 1
  for (int chunk = segment.first_chunk; chunk < end_chunk; ++chunk) {
    auto& stage = smem.stage[chunk & 1];
    const int64_t record = int64_t{chunk} * p.heads.value_heads + head;
    const uint32_t k_tile = ptx::shared_address(stage.k), v_tile = ptx::shared_address(stage.v);
    StateOperand packed_state;
    pack_operand(packed_state, state);
    ptx::cp_async_wait<1>();
    __syncthreads();

    if constexpr (kUse == Chain::kStates) {
      store_state_tile(p.entry_states + record * kStateTileBytes, packed_state, smem.staging[warp], first_column, offsets, lane);
    }
    TokenAcc acc;
    clear(acc);
    add_state_times_rows(acc, packed_state, k_tile, offsets);

    TokenOperand operand;
#pragma unroll
    for (int s = 0; s < 4; ++s) {
      if (factor) {
#pragma unroll
        for (int i = 0; i < 4; ++i) operand[s][i] = 0;
      } else {
        tile::load_a_trans<kChunk>(operand[s], v_tile, offsets, 16 * s, 2 * warp);
      }
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 gamma = *reinterpret_cast<const float2*>(&stage.scalars[kGamma][8 * j + 2 * c]);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint32_t v = operand[j >> 1][2 * (j & 1) + half];
        acc[j][2 * half] = fmaf(-gamma.x, acc[j][2 * half], ptx::low_bf16(v));
        acc[j][2 * half + 1] = fmaf(-gamma.y, acc[j][2 * half + 1], ptx::high_bf16(v));
      }
    }
    if constexpr (kUse == Chain::kStates) {
      pack_operand(operand, acc);
      store_token_tile(p.residuals + record * kTokenTileBytes, operand, stage.v, 2 * warp, first_column / 8, offsets, lane);
    }
    scale_tokens(acc, stage.scalars[kBeta], 1.f, c);
    pack_operand(operand, acc);
    TokenAcc writes;
    clear(writes);
    add_times_lower_transposed(writes, operand, ptx::shared_address(stage.inverse), offsets);

    if constexpr (kUse != Chain::kPairs) pack_operand(operand, writes);
    if constexpr (kUse == Chain::kStates) {
      store_token_tile(p.writes + record * kTokenTileBytes, operand, stage.v, 2 * warp, first_column / 8, offsets, lane);
    }
    if constexpr (kUse == Chain::kOutput) {
      clear(acc);
      add_state_times_rows(acc, packed_state, ptx::shared_address(stage.q), offsets);
      scale_tokens(acc, stage.scalars[kGamma], p.scale, c);
      add_times_lower_transposed(acc, operand, ptx::shared_address(stage.attention), offsets);
      pack_operand(operand, acc);
      store_token_rows(p.o, p.tables.chunks[chunk], p.heads, head, operand, stage.v, 2 * warp, first_column, offsets, lane);
    }

    scale_tokens(writes, stage.scalars[kEnd], 1.f, c);
    pack_operand(operand, writes);
    scale_state(state, stage.scalars[kGamma][kChunk - 1]);
    add_times_rows(state, operand, k_tile, offsets);
    __syncthreads();  // the stage may be overwritten
    load(chunk + 2);
  }
  ptx::cp_async_wait<0>();  // the groups behind the last chunk are empty; none may be left

  // Read again rather than kept in registers through the loop.
  const SegmentPlace done = segment_place(p.tables, p.tables.chunks[end_chunk - 1].segment);
  if constexpr (kUse == Chain::kPairs) {
    float* to = factor ? p.segment_factors + slot_offset(done, p.heads, p.slots_per_row, head)
                       : p.segment_entries + slot_offset(done, p.heads, p.slots_per_row, head, 1);
    store_state(state, to, 1, kHeadDim, first_column, lane);
  } else if constexpr (kUse == Chain::kOutput) {
    if (p.final.data && done.last()) {
      store_state(state, state_of(p.final, done.sequence, p.heads, head), p.final.k_stride, p.final.v_stride, first_column,
                  lane);
    }
  }
}

}  // namespace cake::gdn
