// The backward chain of one segment, value head and 64 or 128 value columns, last chunk first; its two uses are stages.
//
//   dV' = scale P^T dO + (e K) dS1        dR = T^T dV'        dV = beta dR
//   dS0 = gamma_C dS1 + scale (gamma Q)^T dO - (beta gamma K)^T dR
//
// A segment's later half runs first and leaves its gradient in FP32 in the cut's slot, from which the earlier half goes on: a cut moves no
// bit. P is made from Q and K. What dV' loses in BF16 is added to dR: T's diagonal is 1. Rows of dv whose beta is
// too small to divide by hold dR, see ReverseParams.
// warps   one or two warpgroups that run the chain, one that makes P, and one whose first warps store dS1 and dv of a warpgroup each and
//         whose third loads
// barriers  keys_full[stage]: K and Q arrived; full[stage]: all else, and P is made; free[stage]: every warp of the chain is past the
//           stage, and dv has left it
//           state_full, tokens_full: a warpgroup's dS1 is staged; dv is in dO's place
//           named 1, 2: a warpgroup has read dO
#pragma once

#include "cake/gdn/sm90/backward_chain.cuh"

namespace cake::gdn::sm90 {

enum class Reverse { kGradients, kPairs };
inline constexpr int kLoadingWarp = 2;  // of the last warpgroup, behind those that store

template <int kGroups>
struct ReverseSmem {
  static constexpr int kStages = 3;
  struct Stage {
    alignas(1024) char k[kTokenTileBytes];
    char q[kTokenTileBytes];
    char inverse[kSquareTileBytes];
    char attention[kSquareTileBytes];
    char grad_o[kGroups][kBlockBytes];
  };
  Stage stage[kStages];
  char staging[kGroups][2 * kHalfStateBlockBytes];
  alignas(128) float scalars[kStages][kStageScalars][kChunk];
  StageBarriers<kStages> barriers;
  uint64_t keys_full[kStages];  // K and Q
  StoreBarriers<kGroups, kStages> stores;
};
static_assert(sizeof(ReverseSmem<2>) == reverse_chain_sm90_smem_bytes(2) && sizeof(ReverseSmem<1>) == reverse_chain_sm90_smem_bytes(1));

// What a thread needs to make its part of a chunk's P: b of its two rows and of its columns.
struct RowDecays {
  float row[2];
  float2 column[4][2];

  __device__ __forceinline__ void load(const float* log2_decay, int block, int lane) {
    const int g = lane >> 2, c = lane & 3;
#pragma unroll
    for (int i = 0; i < 2; ++i) row[i] = log2_decay[16 * block + g + 8 * i];
#pragma unroll
    for (int s = 0; s < 4; ++s) {
#pragma unroll
      for (int n = 0; n < 2; ++n) column[s][n] = *reinterpret_cast<const float2*>(log2_decay + 16 * s + 8 * n + 2 * c);
    }
  }
};

// A warp's rows of P from its Q K^T, with the bits of the chunk_output program's.
__device__ __forceinline__ void store_attention(char* tile_to, const Fragment& products, const RowDecays& b, float scale, int block,
                                                int lane) {
  const LaneOffsets offsets(lane);
  const int g = lane >> 2, c = lane & 3;
#pragma unroll
  for (int s = 0; s < 4; ++s) {
    uint32_t packed[4] = {};
    if (s <= block) {
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        float x[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const float decay = ptx::exp2_approx(__fsub_rn(b.row[i >> 1], i & 1 ? b.column[s][n].y : b.column[s][n].x));
          const int below = 16 * (block - s) + g + 8 * (i >> 1) - (8 * n + 2 * c + (i & 1));
          // Above the diagonal the decay may be infinite: select, never multiply by zero.
          x[i] = below >= 0 ? __fmul_rn(__fmul_rn(scale, decay), products[8 * s + 4 * n + i]) : 0.f;
        }
        packed[2 * n] = ptx::pack_bf16(x[0], x[1]);
        packed[2 * n + 1] = ptx::pack_bf16(x[2], x[3]);
      }
    }
    ptx::stmatrix_x4(tile::fragment_address<kChunk>(ptx::shared_address(tile_to), offsets.row_major, 16 * block, 2 * s), packed[0],
                     packed[1], packed[2], packed[3]);
  }
}

// By a warp: all that a chunk reads, whole chunks by the copy engine and others row by row.
template <int kGroups>
__device__ __forceinline__ void load_chunks(ReverseSmem<kGroups>& smem, const MappedReverseParams& m, const ChainPlace& work, int lane) {
  const ReverseParams& p = m.reverse;
  const int key_head = work.head / p.heads.group;
  constexpr uint32_t kScalarBytes = sizeof(smem.scalars[0]);
  Turn<ReverseSmem<kGroups>::kStages> turn;
#pragma unroll 1
  for (int chunk = work.last_chunk(); chunk >= work.half.first; --chunk, turn.advance()) {
    auto& stage = smem.stage[turn.stage];
    const TokenPlace at = work.place_of_chunk(chunk, p.heads);
    const int tokens = work.tokens_of(chunk);
    const bool whole = tokens == kChunk;
    const bool maps_k = whole && mappable(p.k), maps_q = whole && mappable(p.q), maps_grad_o = whole && mappable(p.grad_o);
    ptx::mbarrier_wait(&smem.barriers.free[turn.stage], turn.parity ^ 1);
    if (!maps_k) copy_rows_slowly<16>(stage.k, p.k, at, tokens, key_head, 0, lane);
    if (!maps_q) copy_rows_slowly<16>(stage.q, p.q, at, tokens, key_head, 0, lane);
    if (!maps_grad_o) {
      copy_rows_slowly<8 * kGroups>(stage.grad_o[0], p.grad_o, at, tokens, work.head, work.first_column / 8, lane);
    }
    if (lane == 0) {
      uint64_t *keys = &smem.keys_full[turn.stage], *full = &smem.barriers.full[turn.stage];
      ptx::mbarrier_arrive_expect_bytes(keys, (maps_k ? kTokenTileBytes : 0) + (maps_q ? kTokenTileBytes : 0));
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int32_t from[4] = {64 * i, key_head, at.token, at.row};
        if (maps_k) ptx::tensor_load(stage.k + i * kBlockBytes, &m.k, from, keys);
        if (maps_q) ptx::tensor_load(stage.q + i * kBlockBytes, &m.q, from, keys);
      }
      const int64_t record = int64_t{chunk} * p.heads.value_heads + work.head;
      ptx::mbarrier_arrive_expect_bytes(full, kSquareTileBytes + kScalarBytes + (maps_grad_o ? kGroups * kBlockBytes : 0));
      ptx::bulk_load(stage.inverse, p.inverse + record * kSquareTileBytes, kSquareTileBytes, full);
      ptx::bulk_load(smem.scalars[turn.stage], p.scalars + record * kScalarFloats, kScalarBytes, full);
      if (maps_grad_o) {
#pragma unroll
        for (int i = 0; i < kGroups; ++i) {
          ptx::tensor_load(stage.grad_o[i], &m.grad_o, {work.first_column + 64 * i, work.head, at.token, at.row}, full);
        }
      }
    }
    __syncwarp();
  }
}

// By a warpgroup: P of every chunk, as far ahead of the chain as its rows are.
template <int kGroups>
__device__ __forceinline__ void make_attention(ReverseSmem<kGroups>& smem, const ReverseParams& p, const ChainPlace& work, int block,
                                               int lane) {
  Turn<ReverseSmem<kGroups>::kStages> turn;
#pragma unroll 1
  for (int chunk = work.last_chunk(); chunk >= work.half.first; --chunk, turn.advance()) {
    auto& stage = smem.stage[turn.stage];
    RowDecays b;
    b.load(p.scalars + (int64_t{chunk} * p.heads.value_heads + work.head) * kScalarFloats + kLog2Decay * kChunk, block, lane);
    ptx::mbarrier_wait(&smem.keys_full[turn.stage], turn.parity);
    Fragment products;
    ptx::wgmma_keep(products);
    ptx::wgmma_fence();
    rows_times_rows(products, ptx::shared_address(stage.q), ptx::shared_address(stage.k));
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    ptx::wgmma_keep(products);
    store_attention(stage.attention, products, b, p.scale, block, lane);
    ptx::fence_async_shared();
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(&smem.barriers.full[turn.stage]);
  }
}

// By a warp: dS1 and dv of a warpgroup's columns.
template <int kGroups>
__device__ __forceinline__ void store_gradients(ReverseSmem<kGroups>& smem, const ReverseParams& p, const ChainPlace& work, int group,
                                                int lane) {
  const int group_column = work.first_column + 64 * group;
  Turn<ReverseSmem<kGroups>::kStages> turn;
  uint32_t parity = 0;
#pragma unroll 1
  for (int chunk = work.last_chunk(); chunk >= work.half.first; --chunk, turn.advance(), parity ^= 1) {
    ptx::mbarrier_wait(&smem.stores.state_full[group], parity);
    if (lane == 0) {
      store_staged_state(p.exit_gradients + work.tile(p.part, p.heads, chunk) * kStateTileBytes, smem.staging[group], group_column);
      ptx::bulk_wait_read<0>();
      ptx::mbarrier_arrive(&smem.stores.state_free[group]);
    }
    const char* const from = smem.stage[turn.stage].grad_o[group];
    const int tokens = work.tokens_of(chunk);
    const int64_t row_bytes = 2 * p.grad_v.token_stride;
    char* to = row_pointer(p.grad_v, work.place_of_chunk(chunk, p.heads), work.head) + 2 * group_column + (lane >> 3) * row_bytes +
               16 * (lane & 7);
    ptx::mbarrier_wait(&smem.stores.tokens_full[group][turn.stage], turn.parity);
#pragma unroll 4
    for (int row = lane >> 3; row < tokens; row += 4, to += 4 * row_bytes) {
      *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from + tile::unit_offset<kChunk>(row, lane & 7));
    }
    ptx::fence_async_shared();  // a copy fills dO's place next
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(&smem.barriers.free[turn.stage]);
  }
  if (lane == 0) ptx::bulk_wait<0>();
}

template <Reverse kUse, int kGroups>
__device__ __forceinline__ void run_reverse(ReverseSmem<kGroups>& smem, const ReverseParams& p, const ChainPlace& work, int group,
                                            int warp_in_group, int lane) {
  using Smem = ReverseSmem<kGroups>;
  const int c = lane & 3, block = warp_in_group;
  // Made again where they are used: the chain has no register to spare.
  auto offsets = [&] {
    int same = lane;
    asm volatile("" : "+r"(same));
    return LaneOffsets(same);
  };
  const int group_column = work.first_column + 64 * group, first_column = group_column + 16 * block;
  char* const staging = smem.staging[group];

  State state;
#pragma unroll
  for (int i = 0; i < 64; ++i) state[i] = 0.f;
  if (work.forgets) {
    // Y is that of a zero gradient.
  } else if (kUse == Reverse::kGradients && !work.ends_segment()) {
    load_state(state, p.cut_gradients + cut_offset(work, p.part, p.heads), 1, kHeadDim, first_column, lane);
  } else if (work.segment.last()) {
    if (p.grad_final.data) {
      load_state(state, state_of(p.grad_final, work.segment.sequence, p.heads, work.head), p.grad_final.k_stride,
                 p.grad_final.v_stride, first_column, lane);
    }
  } else if constexpr (kUse == Reverse::kGradients) {
    load_state(state, p.segment_exits + slot_offset(work.segment, p.heads, p.slots_per_row, work.head, 1), 1, kHeadDim, first_column,
               lane);
  }

  const bool has_final = p.grad_final.data && work.segment.last() && !work.forgets;
  const bool wants_initial = p.grad_initial.data && work.segment.first();
  Turn<Smem::kStages> turn;
  uint32_t state_parity = 1;
#pragma unroll 1
  for (int chunk = work.last_chunk(); chunk >= work.half.first; --chunk) {
    auto& stage = smem.stage[turn.stage];
    const auto& scalars = smem.scalars[turn.stage];
    char* const grad_o = stage.grad_o[group];
    const uint32_t k_tile = ptx::shared_address(stage.k), grad_tile = ptx::shared_address(grad_o);
    uint32_t packed[32];
    pack_operand(packed, state);
    ptx::mbarrier_wait(&smem.keys_full[turn.stage], turn.parity);
    ptx::mbarrier_wait(&smem.barriers.full[turn.stage], turn.parity);

    Fragment y, z;  // dS1 K^T, dO^T P
    // The gradient of a final state comes in FP32 and may be all that a sequence's last tokens have: its low words, too.
    const bool ends = has_final && chunk == work.segment.first_chunk + work.segment.chunks - 1;
    if (ends) {
      uint32_t low[32];
      pack_lost(low, state, packed);
      ptx::wgmma_keep(low);
      ptx::wgmma_keep(y);
      ptx::wgmma_fence();
      state_times_rows(y, low, k_tile);
      ptx::wgmma_commit();
      ptx::wgmma_wait<0>();
      ptx::wgmma_keep(y);
    }
    // Where ptxas sees the one-warpgroup form, it would wait for the products in flight before it let the state be scaled.
    if constexpr (kGroups == 1) scale_state(state, scalars[kGamma][kChunk - 1]);

    ptx::wgmma_keep(packed);
    ptx::wgmma_keep(y);
    ptx::wgmma_fence();
    state_times_rows(y, packed, k_tile, ends);
    ptx::wgmma_commit();
    {
      using ptx::Major;
      const uint64_t left = ptx::wgmma_descriptor(grad_tile), right = ptx::wgmma_descriptor(ptx::shared_address(stage.attention));
      ptx::wgmma_keep(z);
      ptx::wgmma_fence();
#pragma unroll
      for (int s = 0; s < 4; ++s) {
        ptx::wgmma_bf16<Major::kMN, Major::kMN>(z, left + along_rows(s), right + along_rows(s), s > 0);
      }
      ptx::wgmma_commit();
    }

    if constexpr (kUse == Reverse::kGradients) {
      ptx::mbarrier_wait(&smem.stores.state_free[group], state_parity);
      state_parity ^= 1;
      stage_state(staging, packed, block, offsets());
      ptx::fence_async_shared();
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(&smem.stores.state_full[group]);
    }

    uint32_t operand[16];
    load_tokens(operand, grad_o, block, offsets());
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const float2 gamma = pair_of(scalars[kGamma], i, c);
      operand[i] = ptx::pack_bf16(__fmul_rn(__fmul_rn(p.scale, gamma.x), ptx::low_bf16(operand[i])),
                                  __fmul_rn(__fmul_rn(p.scale, gamma.y), ptx::high_bf16(operand[i])));
    }
    if constexpr (kGroups == 2) scale_state(state, scalars[kGamma][kChunk - 1]);

    ptx::wgmma_wait<0>();
    ptx::wgmma_keep(y);
    ptx::wgmma_keep(z);
    if constexpr (kUse == Reverse::kGradients) {
      // The gradient of an initial state keeps FP32's digits of its largest part: the low words of gamma dO, too.
      if (wants_initial && chunk == work.segment.first_chunk) {
        uint32_t low[16];
        load_tokens(low, grad_o, block, offsets());
#pragma unroll
        for (int i = 0; i < 16; ++i) {
          const float2 gamma = pair_of(scalars[kGamma], i, c);
          const float x = __fmul_rn(__fmul_rn(p.scale, gamma.x), ptx::low_bf16(low[i]));
          const float w = __fmul_rn(__fmul_rn(p.scale, gamma.y), ptx::high_bf16(low[i]));
          low[i] = ptx::pack_bf16(__fsub_rn(x, ptx::low_bf16(operand[i])), __fsub_rn(w, ptx::high_bf16(operand[i])));
        }
        ptx::wgmma_keep(low);
        ptx::wgmma_keep(state);
        ptx::wgmma_fence();
        add_operand_times_rows(state, low, ptx::shared_address(stage.q));
        ptx::wgmma_commit();
        ptx::wgmma_wait<0>();
        ptx::wgmma_keep(state);
      }
    }
    uint32_t grad_writes[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const float2 end = pair_of(scalars[kEnd], i, c);
      const float x = fmaf(end.x, y[2 * i], z[2 * i]), w = fmaf(end.y, y[2 * i + 1], z[2 * i + 1]);
      grad_writes[i] = ptx::pack_bf16(x, w);
      y[2 * i] = __fsub_rn(x, ptx::low_bf16(grad_writes[i]));
      y[2 * i + 1] = __fsub_rn(w, ptx::high_bf16(grad_writes[i]));
    }
    ptx::wgmma_keep(grad_writes);
    ptx::wgmma_keep(y);
    ptx::wgmma_fence();
    operand_times_square<true, true>(y, grad_writes, ptx::shared_address(stage.inverse));
    ptx::wgmma_commit();
    ptx::wgmma_keep(operand);
    ptx::wgmma_keep(state);
    ptx::wgmma_fence();
    add_operand_times_rows(state, operand, ptx::shared_address(stage.q));
    ptx::wgmma_commit();
    ptx::wgmma_wait<1>();
    ptx::wgmma_keep(y);

    uint32_t grad_v[16], grad_keys[16];
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const float2 gamma = pair_of(scalars[kGamma], i, c), beta = pair_of(scalars[kBeta], i, c);
      const float x = __fmul_rn(beta.x, y[2 * i]), w = __fmul_rn(beta.y, y[2 * i + 1]);
      grad_v[i] = ptx::pack_bf16(x, w);
      grad_keys[i] = ptx::pack_bf16(__fmul_rn(-gamma.x, x), __fmul_rn(-gamma.y, w));
    }
    ptx::wgmma_keep(grad_keys);
    ptx::wgmma_fence();
    add_operand_times_rows(state, grad_keys, k_tile);
    ptx::wgmma_commit();

    if constexpr (kUse == Reverse::kGradients) {
      const float least = fminf(fabsf(scalars[kBeta][lane]), fabsf(scalars[kBeta][lane + 32]));
      if (__any_sync(~0u, least < p.deferred_below)) {
#pragma unroll
        for (int i = 0; i < 16; ++i) {
          const float2 beta = pair_of(scalars[kBeta], i, c);
          const bool low = fabsf(beta.x) < p.deferred_below, high = fabsf(beta.y) < p.deferred_below;
          grad_v[i] = ptx::pack_bf16(low ? y[2 * i] : __fmul_rn(beta.x, y[2 * i]), high ? y[2 * i + 1] : __fmul_rn(beta.y, y[2 * i + 1]));
        }
      }
      ptx::named_barrier_sync(1 + group, kWarpgroupThreads);
      stage_tokens(grad_o, grad_v, block, offsets());
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(&smem.stores.tokens_full[group][turn.stage]);
    }
    ptx::wgmma_wait<0>();
    ptx::wgmma_keep(state);
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(&smem.barriers.free[turn.stage]);
    turn.advance();
  }
  if constexpr (kUse == Reverse::kPairs) {
    store_state(state, p.segment_exits + slot_offset(work.segment, p.heads, p.slots_per_row, work.head), 1, kHeadDim, first_column, lane);
  } else if (!work.begins_segment()) {
    store_state(state, p.cut_gradients + cut_offset(work, p.part, p.heads), 1, kHeadDim, first_column, lane);
  } else if (wants_initial) {
    store_state(state, state_of(p.grad_initial, work.segment.sequence, p.heads, work.head), p.grad_initial.k_stride,
                p.grad_initial.v_stride, first_column, lane);
  }
}

template <Reverse kUse, int kGroups>
__device__ __forceinline__ void run_reverse_chain(const MappedReverseParams& m) {
  const ReverseParams& p = m.reverse;
  auto& smem = *reinterpret_cast<ReverseSmem<kGroups>*>(smem_bytes);
  const int warp = warp_index(), lane = threadIdx.x & 31;
  ChainPlace work = chain_place<kGroups>(p.tables, p.heads, p.part);
  if (work.half.chunks == 0) return;
  if constexpr (kUse == Reverse::kPairs) {
    if (work.segment.first()) return;  // nothing precedes it
    const int enough = forgetting_first_chunks(p.scalars, p.heads, work.segment, work.head, lane);
    if (enough > 0) {
      work.half.chunks = enough;
      work.forgets = true;
    }
  }
  if (threadIdx.x == 0) {
    smem.barriers.init(4, (kUse == Reverse::kGradients ? 5 : 4) * kGroups);
    smem.stores.init();
    for (uint64_t& keys : smem.keys_full) ptx::mbarrier_init(&keys, 1);
    ptx::mbarrier_init_fence();
  }
  __syncthreads();
  if (warp < 4 * kGroups) {
    ptx::take_registers<200>();
    run_reverse<kUse, kGroups>(smem, p, work, warp >> 2, warp & 3, lane);
  } else if (warp < 4 * kGroups + 4) {
    ptx::give_registers<72>();
    make_attention<kGroups>(smem, p, work, warp & 3, lane);
  } else {
    ptx::give_registers<40>();
    const int helper = warp - 4 * kGroups - 4;
    if (helper == kLoadingWarp) {
      load_chunks<kGroups>(smem, m, work, lane);
    } else if (kUse == Reverse::kGradients && helper < kGroups) {
      store_gradients<kGroups>(smem, p, work, helper, lane);
    }
  }
}

}  // namespace cake::gdn::sm90
