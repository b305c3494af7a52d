// segment_pairs on Hopper: the pairs (M, N) of the segments of long sequences but the last, exit = M entry + N. `warps` as
// chunk_output.
//
// Where the gates of a segment's last chunks multiply to less than 2^-100 (kForgottenLog2), a state before them counts as gone:
// then M is zero and N begins, with a zero state, at those chunks. Else N is the chain from a zero state (of a first segment
// the true one) and M the chain from the identity without values, as in cake/gdn/any/chain.cuh.
// reads   k, v, T, scalars, initial states
// writes  M, transposed, into the factor's slot of every segment that has one before and one behind it; N (of a first segment
//         its exit state) into the entry slot of the next segment, unless pair_columns asks for M alone
// barriers  as chain.cuh
#pragma once

#include "cake/gdn/sm90/chain.cuh"

namespace cake::gdn {

// How many of the last chunks forget any earlier state, by one warp; 0 if all of them together do not.
__device__ __forceinline__ int forgetting_chunks(const float* scalars, const Heads& heads, const SegmentPlace& segment,
                                                 int head, int lane) {
  float before = 0.f;
  for (int done = 0; done < segment.chunks; done += 32) {
    const int back = done + lane;
    const bool valid = back < segment.chunks;
    const int64_t record = int64_t{segment.first_chunk + segment.chunks - 1 - (valid ? back : 0)} * heads.value_heads + head;
    float sum = valid ? scalars[record * kScalarFloats + kLog2Decay * kChunk + kChunk - 1] : 0.f;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const float other = __shfl_up_sync(~0u, sum, step);
      if (lane >= step) sum = __fadd_rn(sum, other);
    }
    sum = __fadd_rn(sum, before);
    const unsigned reached = __ballot_sync(~0u, valid && sum <= kForgottenLog2);
    if (reached != 0) return done + __ffs(static_cast<int>(reached));
    before = __shfl_sync(~0u, sum, 31);
  }
  return 0;
}

template <int kSlices>
__device__ __forceinline__ void run_segment_pairs(const MappedChainParams& p) {
  using Smem = NativeChainSmem<kSlices, false>;
  static_assert(sizeof(Smem) == native_chain_smem_bytes(kSlices, false));
  constexpr int kColumns = 64 * kSlices;
  auto& smem = *reinterpret_cast<Smem*>(smem_bytes);
  const int group = __shfl_sync(~0u, threadIdx.x >> 7, 0), warp = __shfl_sync(~0u, threadIdx.x >> 5 & 3, 0);
  const int thread = threadIdx.x & 127, lane = threadIdx.x & 31;
  ptx::launch_dependents();
  if (threadIdx.x == 0) smem.init_rings();
  ptx::wait_for_predecessor();
  const ChainParams& chain = p.chain;
  const uint32_t parts = chain.pair_columns / kColumns, item = blockIdx.x / parts;
  const uint32_t segment_row = item / static_cast<uint32_t>(chain.heads.value_heads);
  const int head = static_cast<int>(item - segment_row * chain.heads.value_heads);
  const SegmentPlace segment = segment_place(chain.tables, segment_row);
  // Nothing is entered from a last segment, and the entry state of a first one is known: its exit state says it all.
  if (segment.sequence < 0 || segment.last()) return;
  int column = static_cast<int>(blockIdx.x % parts) * kColumns;
  const bool factor = column < kHeadDim;
  if (factor && segment.first()) return;
  if (!factor) column -= kHeadDim;

  const int forgetting = forgetting_chunks(chain.scalars, chain.heads, segment, head, lane);
  ChainWork work{segment, head, column / 64, kChunk};
  if (forgetting > 0) {
    const int skipped = segment.chunks - (factor ? 0 : forgetting);
    work.segment.first_token += skipped * kChunk;
    work.segment.first_chunk += skipped;
    work.segment.chunks -= skipped;
  }
  if (factor) {  // its V is zero
    uint4* values = reinterpret_cast<uint4*>(smem.values);
    for (int i = threadIdx.x; i < static_cast<int>(sizeof(smem.values) / 16); i += blockDim.x) values[i] = make_uint4(0, 0, 0, 0);
  }
  __syncthreads();

  if (group == kSlices) {
    if (thread == 0) load_chain(smem, p, work, !factor);
    return;
  }
  const ChainWarpgroup<kSlices, false> consumer{smem, work, tile::LaneOffsets(lane), !factor, group, warp, lane};
  const int first_column = column + 64 * group + 16 * warp;
  float state[64];
  auto& fragments = reinterpret_cast<StateAcc&>(state);
  clear(fragments);
  if (forgetting == 0) {
    if (factor) {
      for_state_elements(first_column, lane, [&](int j, int i, int k, int v) { fragments[j][i] = k == v ? 1.f : 0.f; });
    } else if (segment.first() && chain.initial.data) {
      load_state(fragments, state_of(chain.initial, segment.sequence, chain.heads, head), chain.initial.k_stride,
                 chain.initial.v_stride,
                 first_column, lane);
    }
  }
  consumer.run(state);
  float* to = factor ? chain.segment_factors + slot_offset(segment, chain.heads, chain.slots_per_row, head)
                     : chain.segment_entries + slot_offset(segment, chain.heads, chain.slots_per_row, head, 1);
  store_state(fragments, to, 1, kHeadDim, first_column, lane);
}

}  // namespace cake::gdn

extern "C" __global__ void __launch_bounds__(cake::gdn::native_chain_threads(2, false), 1)
    segment_pairs_sm90(const __grid_constant__ cake::gdn::MappedChainParams p) {
  p.chain.warps == 8 ? cake::gdn::run_segment_pairs<2>(p) : cake::gdn::run_segment_pairs<1>(p);
}
