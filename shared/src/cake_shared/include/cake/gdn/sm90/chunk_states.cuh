// chunk_states_sm90: what the backward needs of the forward chain of one segment, value head and 64 or 128 value columns.
//
//   X  = V - gamma (K S0)      V' = T (beta X)      U = V' / beta      S1 = gamma_C S0 + (e K)^T V'
//
// What beta X loses in BF16 is added to V': T's diagonal is 1. So U is V, to the last digit, where nothing is taken from it.
// reads   k, v, T, scalars, initial states, entry states of segments
// writes  S0 and U of every chunk as BF16 tiles; U of tokens whose beta is below kDividedFrom is V'. A later half is reached from the
//         segment's entry: the chunks before it are run, and nothing of them is written
// start   beside value_gradients, before which all that this reads was made: it waits for its predecessor when it is done
// warps   one or two warpgroups that run the chain; of one more, warps 0 and 1 copy rows, warps 2 and 3 store S0 and U of a warpgroup each
// barriers  full[stage]: rows and tiles arrived; free[stage]: U has left it, the last that a warpgroup does with it
//           state_full, tokens_full: a warpgroup's S0 is staged; U is in its stage, and the chunk's products are done
#pragma once

#include "cake/gdn/sm90/backward_chain.cuh"

namespace cake::gdn::sm90 {

template <int kGroups>
struct StatesSmem {
  static constexpr int kStages = 4;
  struct Stage {
    alignas(1024) char k[kTokenTileBytes];
    char v[kGroups][kBlockBytes];
    char inverse[kSquareTileBytes];
  };
  Stage stage[kStages];
  char staging[kGroups][2 * kHalfStateBlockBytes];
  alignas(128) float scalars[kStages][kStageScalars][kChunk];
  StageBarriers<kStages> barriers;
  StoreBarriers<kGroups, kStages> stores;
};
static_assert(sizeof(StatesSmem<2>) <= chunk_states_sm90_smem_bytes(2) && sizeof(StatesSmem<1>) <= chunk_states_sm90_smem_bytes(1));

inline constexpr int kFeedingWarps = 2;

// What makes U of V'.
__device__ __forceinline__ float by_write_strength(float beta) { return is_divided(beta) ? ptx::reciprocal_approx(beta) : 1.f; }

template <int kGroups>
__device__ __forceinline__ void feed_states(StatesSmem<kGroups>& smem, const ChainParams& p, const ChainPlace& work, int thread) {
  using Smem = StatesSmem<kGroups>;
  const int key_head = work.head / p.heads.group;
  feed_stages<Smem::kStages>(
      smem.barriers, work.segment.first_chunk, 1, work.last_chunk() + 1 - work.segment.first_chunk, thread,
      [&](int stage, int chunk) {
        const int64_t record = int64_t{chunk} * p.heads.value_heads + work.head;
        uint64_t* full = &smem.barriers.full[stage];
        constexpr uint32_t kScalarBytes = sizeof(smem.scalars[0]);
        ptx::mbarrier_arrive_expect_bytes(full, kSquareTileBytes + kScalarBytes);
        ptx::bulk_load(smem.stage[stage].inverse, p.inverse + record * kSquareTileBytes, kSquareTileBytes, full);
        ptx::bulk_load(smem.scalars[stage], p.scalars + record * kScalarFloats, kScalarBytes, full);
      },
      [&](int stage, int chunk) {
        const TokenPlace at = work.place_of_chunk(chunk, p.heads);
        const int tokens = work.tokens_of(chunk);
        auto& to = smem.stage[stage];
        copy_rows<32 * kFeedingWarps, 16>(to.k, p.k, at, tokens, key_head, 0, thread);
        copy_rows<32 * kFeedingWarps, 8 * kGroups>(to.v[0], p.v, at, tokens, work.head, work.first_column / 8, thread);
      });
}

// By one thread of a warp: S0 and U of a warpgroup's columns.
template <int kGroups>
__device__ __forceinline__ void store_states(StatesSmem<kGroups>& smem, const ChainParams& p, const ChainPlace& work, int group) {
  const int group_column = work.first_column + 64 * group;
  Turn<StatesSmem<kGroups>::kStages> turn;
  uint32_t state_parity = 0;
  int before = -1;  // the stage whose U is on its way
#pragma unroll 1
  for (int chunk = work.segment.first_chunk; chunk <= work.last_chunk(); ++chunk, turn.advance()) {
    if (chunk < work.half.first) {
      ptx::mbarrier_wait(&smem.stores.tokens_full[group][turn.stage], turn.parity);
      ptx::mbarrier_arrive(&smem.barriers.free[turn.stage]);
      continue;
    }
    const int64_t record = work.tile(p.part, p.heads, chunk);
    ptx::mbarrier_wait(&smem.stores.state_full[group], state_parity);
    state_parity ^= 1;
    store_staged_state(p.entry_states + record * kStateTileBytes, smem.staging[group], group_column);
    if (before >= 0) {
      ptx::bulk_wait_read<1>();
      ptx::mbarrier_arrive(&smem.barriers.free[before]);
    }
    ptx::mbarrier_wait(&smem.stores.tokens_full[group][turn.stage], turn.parity);
    ptx::bulk_store(p.writes + record * kTokenTileBytes + group_column / 64 * kBlockBytes, smem.stage[turn.stage].v[group], kBlockBytes);
    ptx::bulk_commit();
    ptx::bulk_wait_read<1>();
    ptx::mbarrier_arrive(&smem.stores.state_free[group]);
    before = turn.stage;
  }
  ptx::bulk_wait<0>();
}

template <int kGroups>
__device__ __forceinline__ void run_states(StatesSmem<kGroups>& smem, const ChainParams& p, const ChainPlace& work, int group,
                                           int block, int lane) {
  using Smem = StatesSmem<kGroups>;
  const LaneOffsets offsets(lane);
  const int c = lane & 3;
  const int group_column = work.first_column + 64 * group, first_column = group_column + 16 * block;
  char* const staging = smem.staging[group];

  State state;
#pragma unroll
  for (int i = 0; i < 64; ++i) state[i] = 0.f;
  if (!work.segment.first()) {
    load_state(state, p.segment_entries + slot_offset(work.segment, p.heads, p.slots_per_row, work.head), 1, kHeadDim, first_column,
               lane);
  } else if (p.initial.data) {
    load_state(state, state_of(p.initial, work.segment.sequence, p.heads, work.head), p.initial.k_stride, p.initial.v_stride,
               first_column, lane);
  }

  Turn<Smem::kStages> turn;
  uint32_t state_parity = 1;
#pragma unroll 1
  for (int chunk = work.segment.first_chunk; chunk <= work.last_chunk(); ++chunk) {
    const bool stores = chunk >= work.half.first;
    auto& stage = smem.stage[turn.stage];
    const auto& scalars = smem.scalars[turn.stage];
    char* const values = stage.v[group];
    const uint32_t k_tile = ptx::shared_address(stage.k);
    uint32_t packed[32];
    pack_operand(packed, state);
    ptx::mbarrier_wait(&smem.barriers.full[turn.stage], turn.parity);

    Fragment y;
    ptx::wgmma_keep(packed);
    ptx::wgmma_keep(y);
    ptx::wgmma_fence();
    state_times_rows(y, packed, k_tile);
    ptx::wgmma_commit();

    if (stores) {
      ptx::mbarrier_wait(&smem.stores.state_free[group], state_parity);
      state_parity ^= 1;
      stage_state(staging, packed, block, offsets);
      ptx::fence_async_shared();
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(&smem.stores.state_full[group]);
    }
    uint32_t operand[16];
    load_tokens(operand, values, block, offsets);

    ptx::wgmma_wait<0>();
    ptx::wgmma_keep(y);
    Fragment lost;  // beta X, and then what it lost
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const float2 gamma = pair_of(scalars[kGamma], i, c), beta = pair_of(scalars[kBeta], i, c);
      const float x = fmaf(-gamma.x, y[2 * i], ptx::low_bf16(operand[i])), w = fmaf(-gamma.y, y[2 * i + 1], ptx::high_bf16(operand[i]));
      lost[2 * i] = __fmul_rn(beta.x, x);
      lost[2 * i + 1] = __fmul_rn(beta.y, w);
      operand[i] = ptx::pack_bf16(lost[2 * i], lost[2 * i + 1]);
    }
    ptx::wgmma_keep(operand);
    ptx::wgmma_keep(y);
    ptx::wgmma_fence();
    operand_times_square<false>(y, operand, ptx::shared_address(stage.inverse));
    ptx::wgmma_commit();
    const float decay = scalars[kGamma][kChunk - 1];
    if (decay != 1.f) scale_state(state, decay);  // a block of its own, which ptxas does not spread over the products
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      lost[2 * i] = __fsub_rn(lost[2 * i], ptx::low_bf16(operand[i]));
      lost[2 * i + 1] = __fsub_rn(lost[2 * i + 1], ptx::high_bf16(operand[i]));
    }
    ptx::wgmma_keep(lost);  // before the wait, and not in place of the operand
    ptx::wgmma_wait<0>();
    ptx::wgmma_keep(y);
    ptx::wgmma_keep(operand);
#pragma unroll
    for (int i = 0; i < 32; ++i) y[i] = __fadd_rn(y[i], lost[i]);

#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const float2 end = pair_of(scalars[kEnd], i, c);
      operand[i] = ptx::pack_bf16(__fmul_rn(end.x, y[2 * i]), __fmul_rn(end.y, y[2 * i + 1]));
    }
    ptx::wgmma_keep(operand);
    ptx::wgmma_keep(state);
    ptx::wgmma_fence();
    add_operand_times_rows(state, operand, k_tile);
    ptx::wgmma_commit();

    if (stores) {
      uint32_t updates[16];
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const float2 beta = pair_of(scalars[kBeta], i, c);
        updates[i] = ptx::pack_bf16(__fmul_rn(by_write_strength(beta.x), y[2 * i]), __fmul_rn(by_write_strength(beta.y), y[2 * i + 1]));
      }
      __syncwarp();  // the warp has read its columns of V, which carry U out
      stage_tokens(values, updates, block, offsets);
      ptx::fence_async_shared();
    }
    ptx::wgmma_wait<0>();
    ptx::wgmma_keep(state);
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(&smem.stores.tokens_full[group][turn.stage]);
    turn.advance();
  }
}

template <int kGroups>
__device__ __forceinline__ void run_chunk_states(const ChainParams& p) {
  auto& smem = *reinterpret_cast<StatesSmem<kGroups>*>(smem_bytes);
  const int warp = warp_index(), lane = threadIdx.x & 31;
  const ChainPlace work = chain_place<kGroups>(p.tables, p.heads, p.part);
  if (work.half.chunks == 0) return;
  if (threadIdx.x == 0) {
    smem.barriers.init(kFeedingWarps, kGroups);
    smem.stores.init();
    ptx::mbarrier_init_fence();
  }
  __syncthreads();
  if (warp < 4 * kGroups) {
    ptx::take_registers<232>();
    run_states<kGroups>(smem, p, work, warp >> 2, warp & 3, lane);
  } else {
    ptx::give_registers<40>();
    const int helper = warp - 4 * kGroups, group = helper - kFeedingWarps;
    if (helper < kFeedingWarps) {
      feed_states<kGroups>(smem, p, work, 32 * helper + lane);
    } else if (group < kGroups) {
      if (lane == 0) store_states<kGroups>(smem, p, work, group);
      __syncwarp();  // lanes that waited for the predecessor would keep this one from its work
    }
  }
}

}  // namespace cake::gdn::sm90

extern "C" __global__ void __launch_bounds__(384, 1)
    chunk_states_sm90(const __grid_constant__ cake::gdn::ChainParams p) {
  using namespace cake::gdn::sm90;
  p.warps == 8 ? run_chunk_states<2>(p) : run_chunk_states<1>(p);
  cake::ptx::wait_for_predecessor();  // so that the next stage has waited for value_gradients too
}
