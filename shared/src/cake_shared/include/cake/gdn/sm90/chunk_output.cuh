#pragma once

#include "cake/gdn/sm90/forgotten.cuh"
#include "cake/gdn/sm90/output.cuh"
#include "cake/gdn/sm90/state_chain.cuh"

// chunk_output on Hopper: o and the final states, see chain.cuh and output.cuh. `warps` tells whether a CTA has 64 value
// columns of a head (4) or all 128 (8): same bits.
// Where the gates of the segment before forget all but its last chunks, the chain begins with these instead of the entry state:
// what segment_pairs would make, with the same bits.
// reads   q, k, v, T, scalars, initial states, entry states of segments
// writes  o of every token of a sequence, the final states of sequences that have tokens; where asked for, the entry states that it
//         made itself
namespace cake::gdn {

// Registers of a thread in each role; they sum to what the kernel starts with, 128 a thread of three or four warpgroups.
inline constexpr int kChainRegisters = 208, kAttentionRegisters = 64;
template <int kSlices>
inline constexpr int kCopyRegisters = kSlices == 1 ? 112 : 32;

// How many chunks of the segment before make the state that a segment is entered with, where what is before them is forgotten.
__device__ __forceinline__ int chunks_before(const ChainParams& chain, const SegmentPlace& segment, int head) {
  return segment.first() ? 0 : forgotten_tail(chain.scalars, chain.heads, segment.first_chunk - cake::work::kSegmentChunks, head);
}

// The state that the chain starts from.
__device__ __forceinline__ void load_entry_state(StateAcc& state, const ChainParams& chain, const ChainWork& work, int first_column,
                                                 int lane) {
  const SegmentPlace& segment = work.segment;
  const int head = work.head;
  clear(state);
  if (work.before > 0) return;
  if (!segment.first()) {
    load_state(state, chain.segment_entries + slot_offset(segment, chain.heads, chain.slots_per_row, head), 1, kHeadDim,
               first_column, lane);
  } else if (chain.initial.data) {
    load_state(state, state_of(chain.initial, segment.sequence, chain.heads, head), chain.initial.k_stride,
               chain.initial.v_stride,
               first_column, lane);
  }
}

template <int kSlices>
__device__ __forceinline__ void run_chunk_output(const MappedChainParams& p) {
  using Smem = NativeChainSmem<kSlices, true>;
  static_assert(sizeof(Smem) == native_chain_smem_bytes(kSlices, true));
  constexpr int kCtasPerHead = 2 / kSlices;
  auto& smem = *reinterpret_cast<Smem*>(smem_bytes);
  const int group = __shfl_sync(~0u, threadIdx.x >> 7, 0), warp = __shfl_sync(~0u, threadIdx.x >> 5 & 3, 0);
  const int thread = threadIdx.x & 127, lane = threadIdx.x & 31;
  ptx::launch_dependents();
  if (threadIdx.x == 0) smem.init_rings();
  __syncthreads();
  ptx::wait_for_predecessor();
  const ChainParams& chain = p.chain;
  const uint32_t item = blockIdx.x / kCtasPerHead;
  const uint32_t segment_row = item / static_cast<uint32_t>(chain.heads.value_heads);
  ChainWork work{segment_place(chain.tables, segment_row), static_cast<int>(item - segment_row * chain.heads.value_heads),
                 static_cast<int>(blockIdx.x % kCtasPerHead), 0};
  const SegmentPlace& segment = work.segment;
  if (segment.sequence < 0) return;
  work.last_tokens = chain.tables.chunks[segment.first_chunk + segment.chunks - 1].tokens;
  work.before = __shfl_sync(~0u, chunks_before(chain, segment, work.head), 0);  // says that a warp's lanes agree

  if (group == kSlices + 1) {
    lower_registers<kCopyRegisters<kSlices>>();
    InputPlace place;
    if (thread == 0) load_chain(smem, p, work, true, place);
    if (warp > 0 && warp <= kSlices) store_outputs(smem, p, work, warp - 1, lane);
  } else if (group == kSlices) {
    lower_registers<kAttentionRegisters>();
    make_attention(smem, work, chain.scale, tile::LaneOffsets(lane), thread, warp, lane);
  } else {
    raise_registers<kChainRegisters>();
    const OutputChain<kSlices> consumer{smem, work, value_columns_lane(warp, lane), group, lane};
    const int first_column = 64 * (work.first_slice + group) + 16 * warp;
    float state[2][32];
    auto& fragments = reinterpret_cast<StateAcc&>(state);
    InputPlace place;
    load_entry_state(fragments, chain, work, first_column, lane);
    if (work.before > 0) {
      StateChain<kSlices, true>{smem, work.before, consumer.columns_lane, group, lane}.run(state[0], state[1], place);
      if (chain.keeps_entries) {
        float* to = chain.segment_entries + slot_offset(segment, chain.heads, chain.slots_per_row, work.head);
        store_state(fragments, to, 1, kHeadDim, first_column, lane);
      }
    }
    consumer.run(state[0], state[1], place);
    if (chain.final.data && segment.last()) {
      store_state(fragments, state_of(chain.final, segment.sequence, chain.heads, work.head), chain.final.k_stride,
                  chain.final.v_stride,
                  first_column, lane);
    }
  }
}

}  // namespace cake::gdn

extern "C" __global__ void __launch_bounds__(cake::gdn::native_chain_threads(2, true), 1)
    chunk_output_sm90(const __grid_constant__ cake::gdn::MappedChainParams p) {
  p.chain.warps == 8 ? cake::gdn::run_chunk_output<2>(p) : cake::gdn::run_chunk_output<1>(p);
}
