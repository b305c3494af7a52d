// The forward chain of one segment, value head and slice of value columns.
//
//   X  = V - gamma (K S0)      V' = T (beta X)      O = scale gamma (Q S0) + P V'      S1 = gamma_C S0 + (e K)^T V'
//
// kOutput writes O and the final state; kState, for the backward, writes S0, X and V' of every chunk instead; kPair runs
// segments of long sequences from a zero state, and once more from the identity without values, and writes the pair (N, M).
//
// A warp owns 16 value columns and keeps S^T in registers; tiles of K, Q, T, P, V come through a double buffer in shared
// memory. Order of accumulation: tokens and keys ascending inside a product, chunks ascending.
#pragma once

#include "any/state_io.cuh"
#include "any/tile_copy.cuh"

namespace cake::gdn {

enum class Chain { kOutput, kState, kPair };

template <Chain kKind, int kWarps>
struct ChainSmem {
  static constexpr bool kOutput = kKind == Chain::kOutput;
  static constexpr int kValueBytes = kWarps <= 4 ? kTileBytes : kTokenTileBytes;
  struct Stage {
    alignas(1024) char k[kTokenTileBytes];
    char q[kOutput ? kTokenTileBytes : 0];
    char inverse[kTileBytes];
    char attention[kOutput ? kTileBytes : 0];
    char v[kValueBytes];
    alignas(1024) float scalars[kScalarRows][kChunk];
  };
  Stage stage[2];
  char staging[kKind == Chain::kState ? kWarps : 0][4096];
};

template <Chain kKind, int kWarps>
__device__ __forceinline__ void chain_load(typename ChainSmem<kKind, kWarps>::Stage& stage, const ChainParams& p,
                                           int64_t chunk_index, int head, int first_unit, bool values, int thread) {
  constexpr int kThreads = 32 * kWarps;
  const Chunk chunk = p.chunks[chunk_index];
  const int key_head = head / p.heads.group;
  const int64_t record = chunk_index * p.heads.value_heads + head;
  load_rows_async<kThreads, 16>(ptx::shared_address(stage.k), p.k, chunk, key_head, 0, thread);
  load_linear_async<kThreads, kTileBytes>(ptx::shared_address(stage.inverse), p.inverse + record * kTileBytes, thread);
  load_linear_async<kThreads, kScalarBytes>(ptx::shared_address(stage.scalars), p.scalars + record * (kScalarRows * kChunk),
                                            thread);
  if (values) load_rows_async<kThreads, 2 * kWarps>(ptx::shared_address(stage.v), p.v, chunk, head, first_unit, thread);
  if constexpr (kKind == Chain::kOutput) {
    load_rows_async<kThreads, 16>(ptx::shared_address(stage.q), p.q, chunk, key_head, 0, thread);
    load_linear_async<kThreads, kTileBytes>(ptx::shared_address(stage.attention), p.attention + record * kTileBytes, thread);
  }
}

template <Chain kKind, int kWarps>
__device__ __forceinline__ void chain_body(const ChainParams& p) {
  auto& smem = *reinterpret_cast<ChainSmem<kKind, kWarps>*>(smem_bytes);
  const int thread = threadIdx.x, warp = thread >> 5, lane = thread & 31, c = lane & 3;
  const LaneOffsets offsets(lane);

  // A pair has twice the columns: those of N, then those of M.
  const int slice = blockIdx.x % p.slices;
  const int64_t work = blockIdx.x / p.slices;
  const int head = work % p.heads.value_heads;
  const Segment segment = p.segments[work / p.heads.value_heads];
  if (segment.sequence < 0) return;
  int first_column = (slice * kWarps + warp) * 16, slice_unit = 2 * slice * kWarps;
  bool factor = false;
  if constexpr (kKind == Chain::kPair) {
    if (segment.segments == 1 || segment.index + 1 == segment.segments) return;  // nothing is entered from it
    factor = first_column >= kHeadDim;
    if (factor) {
      if (segment.index == 0) return;  // its entry state is known, so its exit state is all that is needed
      first_column -= kHeadDim;
    }
  }

  StateAcc state;
  clear(state);
  if (factor) {
    for_state_elements(first_column, lane, [&](int j, int i, int k, int v) { state[j][i] = k == v ? 1.f : 0.f; });
  } else if (segment.index == 0) {
    if (p.initial.data) {
      load_state(state, sequence_state(p.initial, segment, p.heads, head), p.initial.k_stride, p.initial.v_stride,
                 first_column, lane);
    }
  } else if constexpr (kKind != Chain::kPair) {
    load_state(state, p.segment_entry + long_matrix(segment, p.heads, head), 1, kHeadDim, first_column, lane);
  }

  auto load = [&](int n) {
    if (n < segment.chunks) {
      chain_load<kKind, kWarps>(smem.stage[n & 1], p, segment.first_chunk + n, head, slice_unit, !factor, thread);
    }
    ptx::cp_async_commit();
  };
  load(0);
  load(1);

#pragma unroll 1
  for (int n = 0; n < segment.chunks; ++n) {
    auto& stage = smem.stage[n & 1];
    const int64_t chunk_index = segment.first_chunk + n;
    const int64_t record = chunk_index * p.heads.value_heads + head;
    const uint32_t k_tile = ptx::shared_address(stage.k), v_tile = ptx::shared_address(stage.v);
    StateOperand packed_state;
    pack_operand(packed_state, state);
    ptx::cp_async_wait<1>();
    __syncthreads();

    if constexpr (kKind == Chain::kState) {
      store_state_tile(p.entry_states + record * kStateTileBytes, packed_state, smem.staging[warp], first_column, offsets,
                       lane);
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
    if constexpr (kKind == Chain::kState) {
      pack_operand(operand, acc);
      stage_token_columns(v_tile, operand, 2 * warp, offsets);
      char* to = p.residuals + record * kTokenTileBytes;
      copy_token_columns(stage.v, 2 * warp, lane, [&](int row, int unit) -> void* {
        return to + tile::unit_offset<kChunk>(row, first_column / 8 + unit);
      });
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 beta = *reinterpret_cast<const float2*>(&stage.scalars[kBeta][8 * j + 2 * c]);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        acc[j][2 * half] = __fmul_rn(beta.x, acc[j][2 * half]);
        acc[j][2 * half + 1] = __fmul_rn(beta.y, acc[j][2 * half + 1]);
      }
    }
    pack_operand(operand, acc);
    TokenAcc writes;
    clear(writes);
    add_times_lower_transposed(writes, operand, ptx::shared_address(stage.inverse), offsets);

    if constexpr (kKind != Chain::kPair) pack_operand(operand, writes);
    if constexpr (kKind == Chain::kState) {
      stage_token_columns(v_tile, operand, 2 * warp, offsets);
      char* to = p.writes + record * kTokenTileBytes;
      copy_token_columns(stage.v, 2 * warp, lane, [&](int row, int unit) -> void* {
        return to + tile::unit_offset<kChunk>(row, first_column / 8 + unit);
      });
    }
    if constexpr (kKind == Chain::kOutput) {
      clear(acc);
      add_state_times_rows(acc, packed_state, ptx::shared_address(stage.q), offsets);
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float2 gamma = *reinterpret_cast<const float2*>(&stage.scalars[kGamma][8 * j + 2 * c]);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          acc[j][i] = __fmul_rn(__fmul_rn(p.scale, i & 1 ? gamma.y : gamma.x), acc[j][i]);
        }
      }
      add_times_lower_transposed(acc, operand, ptx::shared_address(stage.attention), offsets);
      pack_operand(operand, acc);
      stage_token_columns(v_tile, operand, 2 * warp, offsets);
      const Chunk chunk = p.chunks[chunk_index];
      char* to = row_pointer(p.o, chunk.first_token, head) + 2 * first_column;
      copy_token_columns(stage.v, 2 * warp, lane, [&](int row, int unit) -> void* {
        return row < chunk.tokens ? to + row * 2 * p.o.token_stride + 16 * unit : nullptr;
      });
    }

#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 end = *reinterpret_cast<const float2*>(&stage.scalars[kEnd][8 * j + 2 * c]);
#pragma unroll
      for (int i = 0; i < 4; ++i) writes[j][i] = __fmul_rn(i & 1 ? end.y : end.x, writes[j][i]);
    }
    pack_operand(operand, writes);
    const float gamma_end = stage.scalars[kGamma][kChunk - 1];
#pragma unroll
    for (int j = 0; j < 16; ++j) {
#pragma unroll
      for (int i = 0; i < 4; ++i) state[j][i] = __fmul_rn(gamma_end, state[j][i]);
    }
    add_times_rows(state, operand, k_tile, offsets);
    __syncthreads();  // the stage may be overwritten
    load(n + 2);
  }

  if constexpr (kKind == Chain::kPair) {
    float* to = (factor ? p.segment_factor : p.segment_exit) + long_matrix(segment, p.heads, head);
    store_state(state, to, 1, kHeadDim, first_column, lane);
  } else if constexpr (kKind == Chain::kOutput) {
    if (p.final.data && segment.index + 1 == segment.segments) {
      store_state(state, sequence_state(p.final, segment, p.heads, head), p.final.k_stride, p.final.v_stride, first_column,
                  lane);
    }
  }
}

#define CAKE_GDN_CHAIN(name, kind, warps)                                                                          \
  extern "C" __global__ void __launch_bounds__(32 * warps, 1) name(const __grid_constant__ ChainParams p) {         \
    chain_body<kind, warps>(p);                                                                                    \
  }
CAKE_GDN_CHAIN(gdn_chain_output_w4, Chain::kOutput, 4)
CAKE_GDN_CHAIN(gdn_chain_output_w8, Chain::kOutput, 8)
CAKE_GDN_CHAIN(gdn_chain_state_w4, Chain::kState, 4)
CAKE_GDN_CHAIN(gdn_chain_state_w8, Chain::kState, 8)
CAKE_GDN_CHAIN(gdn_chain_pair_w4, Chain::kPair, 4)
CAKE_GDN_CHAIN(gdn_chain_pair_w8, Chain::kPair, 8)
#undef CAKE_GDN_CHAIN

}  // namespace cake::gdn
