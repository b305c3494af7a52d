// segment_pairs on Hopper: the pairs (M, N) of the segments of long sequences but the last, exit = M entry + N. `warps` as
// chunk_output. A CTA takes every so many-th row of the segment table, value head and slice of columns. Where no sequence is
// long, it leaves at once: starting and ending is all the time it takes.
//
// Where the gates of a segment's last chunks multiply to less than 2^-100 (kForgottenLog2), a state before them counts as gone:
// then M is zero and N begins, with a zero state, at those chunks. Else N is the chain from a zero state (of a first segment
// the true one) and M the chain from the identity without values, as in cake/gdn/any/chain.cuh.
// reads   k, v, T, scalars, initial states
// writes  M, transposed, into the factor's slot of every segment that has one before and one behind it, unless it is zero; N (of a
//         first segment its exit state) into the entry slot of the next segment, unless chunk_output makes it or pair_columns
//         asks for M alone
// barriers  as chain.cuh. Of all threads: which items there are is found | done; where columns of the identity begin, the values before
//           are read | zeros are in their place
#pragma once

#include "cake/gdn/sm90/forgotten.cuh"
#include "cake/gdn/sm90/state_chain.cuh"

namespace cake::gdn {

// Registers of a thread in each role; they sum to what the kernel starts with, 168 a thread of two or three warpgroups.
inline constexpr int kPairRegisters = 232, kPairLoadRegisters = 40;

// A row of the segment table, a value head and a slice of columns of M or N.
struct PairItem {
  SegmentPlace segment;
  int head, column;
  bool factor;

  // The slices of N, which are more work, come first.
  __device__ __forceinline__ PairItem(const ChainParams& chain, uint32_t item, int columns) {
    const uint32_t heads = chain.heads.value_heads, works = chain.tables.segment_capacity * heads, part = item / works;
    const uint32_t work = item - part * works, segment_row = work / heads;
    head = static_cast<int>(work - segment_row * heads);
    segment = segment_place(chain.tables, segment_row);
    column = chain.pair_columns - static_cast<int>(part + 1) * columns;
    factor = column < kHeadDim;
    if (!factor) column -= kHeadDim;
  }

  // Nothing is entered from a last segment, and the entry state of a first one is known: its exit state says it all. An M that `forgets`
  // calls zero nobody reads, and an N that M takes nothing to, which no M takes further, chunk_output makes where it needs it. By a warp.
  __device__ __forceinline__ bool exists(const ChainParams& chain) const {
    if (segment.sequence < 0 || segment.last()) return false;
    const float* scalars = chain.scalars;
    const int heads = chain.heads.value_heads, chunk = segment.first_chunk;
    if (factor) return !segment.first() && !forgets(scalars, chunk, heads, head);
    const bool taken = segment.index + 2 < segment.segments && !forgets(scalars, chunk + segment.chunks, heads, head);
    return taken || forgotten_tail(scalars, chain.heads, chunk, head) == 0;
  }
};

// Calls `visit` with the items of this CTA that there are, in order. Each warp looks for one of as many as there are warps.
template <int kSlices, class Visit>
__device__ __forceinline__ void for_pair_items(NativeChainSmem<kSlices, false>& smem, const ChainParams& chain, const Visit& visit) {
  constexpr int kColumns = 64 * kSlices, kThreads = native_chain_threads(kSlices, false), kWarps = kThreads / 32;
  const uint32_t items =
      static_cast<uint32_t>(chain.tables.segment_capacity) * chain.heads.value_heads * (chain.pair_columns / kColumns);
#pragma unroll 1
  for (uint32_t first = blockIdx.x; first < items; first += kWarps * gridDim.x) {
    const uint32_t mine = first + threadIdx.x / 32 * gridDim.x;
    const bool exists = mine < items && PairItem(chain, mine, kColumns).exists(chain);
    if (threadIdx.x % 32 == 0) smem.found[threadIdx.x / 32] = exists;
    named_barrier(1, kThreads);
#pragma unroll 1
    for (int i = 0; i < kWarps; ++i) {
      if (smem.found[i]) visit(PairItem(chain, first + i * gridDim.x, kColumns));
    }
    named_barrier(1, kThreads);
  }
}

// What the chain of an item has to run; by all threads, which also put zeros where a factor has its values.
template <int kSlices>
__device__ __forceinline__ ChainWork begin_pair(NativeChainSmem<kSlices, false>& smem, const ChainParams& chain, const PairItem& item,
                                                int lane, bool& forgets) {
  const int forgetting = forgetting_chunks(chain.scalars, chain.heads, item.segment, item.head);
  forgets = forgetting > 0;
  ChainWork work{item.segment, item.head, item.column / 64, kChunk};
  if (forgets) {
    const int skipped = work.segment.chunks - (item.factor ? 0 : forgetting);
    work.segment.first_token += skipped * kChunk;
    work.segment.first_chunk += skipped;
    work.segment.chunks -= skipped;
  }
  if (item.factor && !forgets) {
    constexpr int kThreads = native_chain_threads(kSlices, false);
    named_barrier(1, kThreads);
    uint4* values = reinterpret_cast<uint4*>(smem.values);
    for (int i = threadIdx.x; i < static_cast<int>(sizeof(smem.values) / 16); i += kThreads) values[i] = make_uint4(0, 0, 0, 0);
    ptx::fence_async_shared();  // before the values of the next item
    named_barrier(1, kThreads);
  }
  return work;
}

template <int kSlices>
__device__ __forceinline__ void run_segment_pairs(const MappedChainParams& p) {
  using Smem = NativeChainSmem<kSlices, false>;
  static_assert(sizeof(Smem) == native_chain_smem_bytes(kSlices, false));
  auto& smem = *reinterpret_cast<Smem*>(smem_bytes);
  const int group = __shfl_sync(~0u, threadIdx.x >> 7, 0), warp = __shfl_sync(~0u, threadIdx.x >> 5 & 3, 0);
  const int thread = threadIdx.x & 127, lane = threadIdx.x & 31;
  ptx::launch_dependents();
  ptx::wait_for_predecessor();
  const ChainParams& chain = p.chain;
  const bool has_segments = chain.tables.status[kHasSegments] != 0;
  if (threadIdx.x == 0) smem.init_rings();
  __syncthreads();
  if (!has_segments) return;
  InputPlace place;
  bool forgets;

  if (group == kSlices) {
    lower_registers<kPairLoadRegisters>();
    for_pair_items(smem, chain, [&](const PairItem& item) {
      const ChainWork work = begin_pair(smem, chain, item, lane, forgets);
      if (thread == 0) load_chain(smem, p, work, !item.factor, place);
      __syncwarp();
    });
    return;
  }
  raise_registers<kPairRegisters>();
  for_pair_items(smem, chain, [&](const PairItem& item) {
    const ChainWork work = begin_pair(smem, chain, item, lane, forgets);
    const int first_column = item.column + 64 * group + 16 * warp;
    float state[2][32];
    auto& fragments = reinterpret_cast<StateAcc&>(state);
    clear(fragments);
    if (!forgets) {
      if (item.factor) {
        for_state_elements(first_column, lane, [&](int j, int i, int k, int v) { fragments[j][i] = k == v ? 1.f : 0.f; });
      } else if (item.segment.first() && chain.initial.data) {
        load_state(fragments, state_of(chain.initial, item.segment.sequence, chain.heads, item.head), chain.initial.k_stride,
                   chain.initial.v_stride, first_column, lane);
      }
    }
    const StateChain<kSlices, false> consumer{smem, work.segment.chunks, value_columns_lane(warp, lane), group, lane};
    if (work.segment.chunks > 0) consumer.run(state[0], state[1], place);
    float* to = item.factor ? chain.segment_factors + slot_offset(item.segment, chain.heads, chain.slots_per_row, item.head)
                            : chain.segment_entries + slot_offset(item.segment, chain.heads, chain.slots_per_row, item.head, 1);
    store_state(fragments, to, 1, kHeadDim, first_column, lane);
  });
}

}  // namespace cake::gdn

extern "C" __global__ void __launch_bounds__(cake::gdn::native_chain_threads(2, false), 1)
    segment_pairs_sm90(const __grid_constant__ cake::gdn::MappedChainParams p) {
  p.chain.warps == 8 ? cake::gdn::run_segment_pairs<2>(p) : cake::gdn::run_segment_pairs<1>(p);
}
