// segment_pairs on Hopper: the pairs (M, N) of the segments of long sequences but the last, exit = M entry + N.
//
//   segment_pairs_narrow_sm90, segment_pairs_sm90   64 or 128 of the pair_columns a CTA: columns of M, then those of N. Same bits
//
// Where the gates of a segment's last chunks sum below -104, 2^-150 of a state before them is left, which is nothing in FP32: then M is zero
// and N begins, with a zero state, at those chunks. Else N is the chain from a zero state (of a first segment the true one) and M the chain
// from the identity without values, as in cake/gdn/any/chain.cuh. T and the scalars are made by warpgroups of the CTA.
// reads   k, v, gates, beta, initial states
// writes  M, transposed, into the factor's slot of every segment that has one before and one behind it; N (of a first segment its exit
//         state) into the entry slot of the next segment, unless pair_columns asks for M alone
// barriers  as chain.cuh
#pragma once

#include "cake/gdn/sm90/chunk_maker.cuh"
#include "cake/gdn/sm90/chunk_output.cuh"

namespace cake::gdn {

// How many of the last chunks forget any earlier state, by one warp; 0 if all of them together do not.
__device__ __forceinline__ int forgetting_chunks(const float* sums, const Heads& heads, const SegmentPlace& segment, int head, int lane) {
  constexpr float kForgotten = -104.f;
  float before = 0.f;
  for (int done = 0; done < segment.chunks; done += 32) {
    const int back = done + lane;
    const bool valid = back < segment.chunks;
    const int64_t record = int64_t{segment.first_chunk + segment.chunks - 1 - (valid ? back : 0)} * heads.value_heads + head;
    float sum = valid ? sums[record * kChunk + kChunk - 1] : 0.f;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const float other = __shfl_up_sync(~0u, sum, step);
      if (lane >= step) sum = __fadd_rn(sum, other);
    }
    sum = __fadd_rn(sum, before);
    const unsigned reached = __ballot_sync(~0u, valid && sum <= kForgotten);
    if (reached != 0) return done + __ffs(static_cast<int>(reached));
    before = __shfl_sync(~0u, sum, 31);
  }
  return 0;
}

template <int kSlices, int kMakers>
struct PairConsumer {
  NativeChainSmem<kSlices, kMakers>& smem;
  const ChainWork& work;
  const tile::LaneOffsets offsets;
  bool values;
  int slice, warp, lane;

  __device__ __forceinline__ void run(float (&state)[64]) const {
    const int c = lane & 3;
    float y[32];
    uint32_t packed_state[32], operand[16];
    pipe::RingPlace<kKeyStages> key_place;
    pipe::RingPlace<kValueStages> value_place;
    pipe::RingPlace<kSquareStages> square_place;
    pack_accumulator(packed_state, state);
#pragma unroll 1
    for (int chunk = 0; chunk < work.segment.chunks; ++chunk) {
      const uint64_t k_at = ptx::wgmma_descriptor(ptx::shared_address(smem.keys[key_place.stage].k));
      const uint64_t k_by_token = ptx::wgmma_descriptor(ptx::shared_address(smem.keys[key_place.stage].k), kSquareTileBytes);
      const uint64_t t_at = ptx::wgmma_descriptor(ptx::shared_address(smem.squares[square_place.stage].inverse));
      const ChunkScalars& scalars = smem.scalars[square_place.stage];
      smem.key_ring.wait_full(key_place);
      ptx::wgmma_keep(packed_state);
      ptx::wgmma_keep(y);
      ptx::wgmma_fence();
      multiply_state_rows<0, 8>(y, packed_state, k_at);
      ptx::wgmma_commit();
      if (values) smem.value_ring.wait_full(value_place);
      smem.square_ring.wait_full(square_place);
      ptx::wgmma_wait<0>();
      ptx::wgmma_keep(y);
      make_residuals(operand, y, ptx::shared_address(smem.values[value_place.stage][slice]), scalars[kGamma], scalars[kBeta], offsets, warp,
                     c);
      ptx::wgmma_keep(operand);
      ptx::wgmma_keep(y);
      ptx::wgmma_fence();
      multiply_square<false>(y, operand, t_at);
      ptx::wgmma_commit();
      __syncwarp();
      if (values && lane == 0) smem.value_ring.release(value_place);
      const float decay = scalars[kGamma][kChunk - 1];
#pragma unroll
      for (int n = 0; n < 64; ++n) state[n] = __fmul_rn(decay, state[n]);
      ptx::wgmma_wait<0>();
      ptx::wgmma_keep(y);
      scale_by_token(y, scalars[kEnd], 1.f, c);
      pack_accumulator(operand, y);
      ptx::wgmma_keep(operand);
      ptx::wgmma_keep(state);
      ptx::wgmma_fence();
      add_token_rows(state, operand, k_by_token);
      ptx::wgmma_commit();
      ptx::wgmma_wait<0>();
      ptx::wgmma_keep(state);
      ptx::wgmma_keep(operand);
      pack_accumulator(packed_state, state);
      __syncwarp();
      if (lane == 0) {
        smem.key_ring.release(key_place);
        smem.square_ring.release(square_place);
      }
      key_place.advance();
      value_place.advance();
      square_place.advance();
    }
  }
};

template <int kSlices, int kMakers>
__device__ __forceinline__ void run_segment_pairs(const MappedRuleParams& p) {
  using Smem = NativeChainSmem<kSlices, kMakers>;
  using Registers = ChainRegisters<kSlices, kMakers>;
  constexpr int kColumns = 64 * kSlices;
  auto& smem = *reinterpret_cast<Smem*>(smem_bytes);
  const int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), lane = threadIdx.x & 31, thread = threadIdx.x & 127;
  ptx::launch_dependents();
  if (threadIdx.x == 0) smem.init_rings();
  ptx::wait_for_predecessor();
  const ChainParams& chain = p.mapped.chain;
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

  const int forgetting = forgetting_chunks(p.sums, chain.heads, segment, head, lane);
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

  if (warp >= 4 * kSlices) {
    lower_registers<Registers::kOther>();
    const ChainLoader<kSlices, kMakers> loader{smem, p.mapped, work};
    const ChunkMaker<kSlices, kMakers, false> maker{smem,  p,      work, loader,   tile::LaneOffsets(lane),
                                                    !factor, (warp >> 2) - kSlices, thread, warp & 3, lane};
    if (work.segment.chunks > 0) maker.run();
    return;
  }
  raise_registers<Registers::kConsumer>();
  const PairConsumer<kSlices, kMakers> consumer{smem, work, tile::LaneOffsets(lane), !factor, warp >> 2, warp & 3, lane};
  const int first_column = column + 64 * consumer.slice + 16 * consumer.warp;
  float state[64];
  auto& fragments = reinterpret_cast<StateAcc&>(state);
  clear(fragments);
  if (forgetting == 0) {
    if (factor) {
      for_state_elements(first_column, lane, [&](int j, int i, int k, int v) { fragments[j][i] = k == v ? 1.f : 0.f; });
    } else if (segment.first() && chain.initial.data) {
      load_state(fragments, state_of(chain.initial, segment.sequence, chain.heads, head), chain.initial.k_stride, chain.initial.v_stride,
                 first_column, lane);
    }
  }
  consumer.run(state);
  float* to = factor ? chain.segment_factors + slot_offset(segment, chain.heads, chain.slots_per_row, head)
                     : chain.segment_entries + slot_offset(segment, chain.heads, chain.slots_per_row, head, 1);
  store_state(fragments, to, 1, kHeadDim, first_column, lane);
}

}  // namespace cake::gdn

extern "C" __global__ void __launch_bounds__(cake::gdn::native_chain_threads(1, 2), 1)
    segment_pairs_narrow_sm90(const __grid_constant__ cake::gdn::MappedRuleParams p) {
  cake::gdn::run_segment_pairs<1, 2>(p);
}

extern "C" __global__ void __launch_bounds__(cake::gdn::native_chain_threads(2, 1), 1)
    segment_pairs_sm90(const __grid_constant__ cake::gdn::MappedRuleParams p) {
  cake::gdn::run_segment_pairs<2, 1>(p);
}
