// segment_pairs on Hopper: the pairs (M, N) of the segments of long sequences but the last, exit = M entry + N. `warps` as
// chunk_output. A CTA takes every so many-th row of the segment table, value head and slice of columns. Where no sequence is
// long, it leaves at once: starting and ending is all the time it takes.
//
// Where the gates of a segment's last chunks multiply to less than 2^-100 (kForgottenLog2), a state before them counts as gone:
// then M is zero and N begins, with a zero state, at those chunks. Else N is the chain from a zero state (of a first segment
// the true one) and M the chain from the identity without values, as in cake/gdn/any/chain.cuh.
// reads   k, v, T, scalars, initial states
// writes  M, transposed, into the factor's slot of every segment that has one before and one behind it; N (of a first segment
//         its exit state) into the entry slot of the next segment, unless pair_columns asks for M alone
// barriers  as chain.cuh. Of all threads, where columns of the identity begin: the values before are read | zeros are in their place
#pragma once

#include "cake/gdn/any/forgets.cuh"
#include "cake/gdn/sm90/chain.cuh"

namespace cake::gdn {

// Registers of a thread in each role; they sum to what the kernel starts with, 168 a thread of two or three warpgroups.
inline constexpr int kPairRegisters = 232, kPairLoadRegisters = 40;

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

// A slice's chain of at least one chunk without outputs, in which no chunk is short. The keys' halves of the state are
// accumulators of their own: one is rounded, and K S0 of the next chunk begun with it, while the other is updated.
template <int kSlices>
struct PairChain {
  NativeChainSmem<kSlices, false>& smem;
  const ChainWork& work;
  uint32_t columns_lane;
  int slice, lane;

  __device__ __forceinline__ uint64_t keys(const InputPlace& at) const {
    return ptx::wgmma_descriptor(ptx::shared_address(smem.keys[at.stage].k));
  }

  __device__ __forceinline__ void load_values(uint32_t (&values)[16], const InputPlace& at) const {
    load_value_columns(values, ptx::shared_address(smem.values[at.stage][slice]), columns_lane);
  }

  __device__ __forceinline__ void run(float (&left)[32], float (&right)[32], InputPlace& place) const {
    const int c = lane & 3;
    float y[32];
    uint32_t packed_left[16], packed_right[16], operand[16];
    pack_accumulator(packed_left, left);
    pack_accumulator(packed_right, right);
    smem.input_ring.wait_full(place);
    load_values(operand, place);
    ptx::wgmma_keep(packed_left);
    ptx::wgmma_keep(packed_right);
    ptx::wgmma_keep(y);
    ptx::wgmma_fence();
    multiply_state_rows<0, 4>(y, packed_left, keys(place));
    ptx::wgmma_commit();
    multiply_state_rows<4, 8, 0>(y, packed_right, keys(place));
    ptx::wgmma_commit();
#pragma unroll 1
    for (int chunk = 0; chunk < work.segment.chunks; ++chunk) {
      const uint64_t k_at = keys(place);
      const SquareStage& square = smem.squares[place.stage];
      const ChunkScalars& scalars = square.scalars;
      // Behind the last chunk come its own keys once more, for nothing: a way out of the loop would serialise the products.
      InputPlace next = place;
      const bool last = chunk + 1 == work.segment.chunks;
      if (!last) next.advance();
      const bool next_full = smem.input_ring.is_full(next);
      ptx::wgmma_wait<0>();
      ptx::wgmma_keep(y);
      ptx::wgmma_keep(packed_left);
      ptx::wgmma_keep(packed_right);

      make_residuals(operand, y, scalars[kGamma], scalars[kBeta], c);
      ptx::wgmma_keep(operand);
      ptx::wgmma_keep(y);
      ptx::wgmma_fence();
      multiply_square<false>(y, operand, ptx::wgmma_descriptor(ptx::shared_address(square.inverse)));
      ptx::wgmma_commit();
      const float decay = scalars[kGamma][kChunk - 1];
      ptx::wgmma_wait<1>();
      float ends[16];
      load_per_token(ends, scalars[kEnd], c);
      decay_halves(left, right, decay);
      if (!next_full) smem.input_ring.wait_full(next);  // a branch, so that the products above stay above
      ptx::wgmma_wait<0>();
      ptx::wgmma_keep(y);
      ptx::wgmma_keep(operand);

      pack_scaled_by_token(operand, y, ends);
      ptx::wgmma_keep(operand);
      ptx::wgmma_keep(left);
      ptx::wgmma_keep(right);
      ptx::wgmma_fence();
      add_token_rows(left, operand, k_at);
      ptx::wgmma_commit();
      add_token_rows(right, operand, k_at + ptx::wgmma_advance(kSquareTileBytes));
      ptx::wgmma_commit();
      ptx::wgmma_wait<1>();
      ptx::wgmma_keep(left);
      pack_accumulator(packed_left, left);
      ptx::wgmma_keep(packed_left);
      ptx::wgmma_keep(y);
      ptx::wgmma_fence();
      multiply_state_rows<0, 4>(y, packed_left, keys(next));
      ptx::wgmma_commit();
      ptx::wgmma_wait<1>();
      ptx::wgmma_keep(right);
      ptx::wgmma_keep(operand);
      load_values(operand, next);
      __syncwarp();
      if (lane == 0 && !last) smem.input_ring.release(place);
      pack_accumulator(packed_right, right);
      ptx::wgmma_keep(packed_right);
      ptx::wgmma_fence();
      multiply_state_rows<4, 8, 0>(y, packed_right, keys(next));
      ptx::wgmma_commit();
      place = next;
    }
    ptx::wgmma_wait<0>();
    ptx::wgmma_keep(y);
    ptx::wgmma_keep(left);
    ptx::wgmma_keep(right);
    __syncwarp();
    if (lane == 0) smem.input_ring.release(place);
    place.advance();
  }
};

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

  // Nothing is entered from a last segment, and the entry state of a first one is known: its exit state says it all. An M that is zero
  // nobody reads. By a warp.
  __device__ __forceinline__ bool exists(const ChainParams& chain) const {
    if (segment.sequence < 0 || segment.last()) return false;
    return !factor || !(segment.first() || forgets(chain.scalars, segment.first_chunk, chain.heads.value_heads, head));
  }
};

// Calls `visit` with the items of this CTA that there are, in order.
template <class Visit>
__device__ __forceinline__ void for_pair_items(const ChainParams& chain, int columns, const Visit& visit) {
  const uint32_t items =
      static_cast<uint32_t>(chain.tables.segment_capacity) * chain.heads.value_heads * (chain.pair_columns / columns);
#pragma unroll 1
  for (uint32_t at = blockIdx.x; at < items; at += gridDim.x) {
    const PairItem item(chain, at, columns);
    if (item.exists(chain)) visit(item);
  }
}

// What the chain of an item has to run; by all threads, which also put zeros where a factor has its values.
template <int kSlices>
__device__ __forceinline__ ChainWork begin_pair(NativeChainSmem<kSlices, false>& smem, const ChainParams& chain, const PairItem& item,
                                                int lane, bool& forgets) {
  const int forgetting = forgetting_chunks(chain.scalars, chain.heads, item.segment, item.head, lane);
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
  constexpr int kColumns = 64 * kSlices;
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
    for_pair_items(chain, kColumns, [&](const PairItem& item) {
      const ChainWork work = begin_pair(smem, chain, item, lane, forgets);
      if (thread == 0) load_chain(smem, p, work, !item.factor, place);
      __syncwarp();
    });
    return;
  }
  raise_registers<kPairRegisters>();
  for_pair_items(chain, kColumns, [&](const PairItem& item) {
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
    const PairChain<kSlices> consumer{smem, work, value_columns_lane(warp, lane), group, lane};
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
