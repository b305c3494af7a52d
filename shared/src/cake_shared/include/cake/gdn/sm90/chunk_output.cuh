#pragma once

#include "cake/gdn/sm90/chunk_maker.cuh"

// chunk_output on Hopper: o and the final states, see chain.cuh.
//   chunk_output_narrow_sm90, chunk_output_sm90   T, P and scalars from wy; 64 value columns of a head a CTA, or all 128
//   rule_output_narrow_sm90, rule_output_sm90     makes them itself
// Same bits, all four.
// reads   q, k, v, T, P, scalars or gates and beta, initial states, entry states of segments
// writes  o of every token of a sequence, the final states of sequences that have tokens
namespace cake::gdn {

template <int kRegisters>
__device__ __forceinline__ void raise_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void lower_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// Of a thread of a consumer and of the other warpgroups; the pool is 168 a thread of 384, or 255 of 256.
template <int kSlices, int kMakers>
struct ChainRegisters {
  static constexpr bool kMoves = kSlices + kMakers > 1;
  static constexpr int kConsumer = kMakers == 0 ? 240 : kMakers == 1 ? 208 : 232;
  static constexpr int kOther = kMakers == 0 ? 24 : kMakers == 1 ? 88 : 136;
};

template <int kSlices, int kMakers, class MakePart>
__device__ __forceinline__ void run_chunk_output(const MappedChainParams& p, MakePart make_part) {
  using Smem = NativeChainSmem<kSlices, kMakers>;
  using Registers = ChainRegisters<kSlices, kMakers>;
  constexpr int kCtasPerHead = 2 / kSlices;
  auto& smem = *reinterpret_cast<Smem*>(smem_bytes);
  const int warp = __shfl_sync(~0u, threadIdx.x >> 5, 0), lane = threadIdx.x & 31;
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
  const ChainLoader<kSlices, kMakers> loader{smem, p, work};
  const int thread = threadIdx.x & 127;

  if (warp >= 4 * kSlices) {
    if constexpr (Registers::kMoves) lower_registers<Registers::kOther>();
    make_part(smem, work, loader, (warp >> 2) - kSlices, thread, warp & 3, lane);
    return;
  }
  if constexpr (Registers::kMoves) raise_registers<Registers::kConsumer>();
  const ChainConsumer<kSlices, kMakers> consumer{smem, p, work, tile::LaneOffsets(lane), warp >> 2, thread, warp & 3, lane};
  const int first_column = consumer.group_column() + 16 * consumer.warp;
  float state[64];
  auto& fragments = reinterpret_cast<StateAcc&>(state);
  clear(fragments);
  if (!segment.first()) {
    load_state(fragments, chain.segment_entries + slot_offset(segment, chain.heads, chain.slots_per_row, work.head), 1, kHeadDim,
               first_column, lane);
  } else if (chain.initial.data) {
    load_state(fragments, state_of(chain.initial, segment.sequence, chain.heads, work.head), chain.initial.k_stride, chain.initial.v_stride,
               first_column, lane);
  }
  consumer.run(state);
  if (chain.final.data && segment.last()) {
    store_state(fragments, state_of(chain.final, segment.sequence, chain.heads, work.head), chain.final.k_stride, chain.final.v_stride,
                first_column, lane);
  }
}

template <int kSlices>
__device__ __forceinline__ void run_loaded_output(const MappedChainParams& p) {
  run_chunk_output<kSlices, 0>(p, [](auto&, const ChainWork& work, const auto& loader, int, int thread, int, int) {
    if (thread != 0) return;
#pragma unroll 1
    for (int chunk = 0; chunk < work.segment.chunks; ++chunk) {
      loader.template load_keys<true>(chunk);
      loader.load_values(chunk);
      loader.load_squares(chunk);
    }
  });
}

template <int kSlices, int kMakers>
__device__ __forceinline__ void run_made_output(const MappedRuleParams& p) {
  run_chunk_output<kSlices, kMakers>(
      p.mapped, [&p](auto& smem, const ChainWork& work, const auto& loader, int maker, int thread, int warp, int lane) {
        const ChunkMaker<kSlices, kMakers, true> chunks{smem, p, work, loader, tile::LaneOffsets(lane), true, maker, thread, warp, lane};
        chunks.run();
      });
}

}  // namespace cake::gdn

extern "C" __global__ void __launch_bounds__(cake::gdn::native_chain_threads(1, 0), 1)
    chunk_output_narrow_sm90(const __grid_constant__ cake::gdn::MappedChainParams p) {
  cake::gdn::run_loaded_output<1>(p);
}

extern "C" __global__ void __launch_bounds__(cake::gdn::native_chain_threads(2, 0), 1)
    chunk_output_sm90(const __grid_constant__ cake::gdn::MappedChainParams p) {
  cake::gdn::run_loaded_output<2>(p);
}

extern "C" __global__ void __launch_bounds__(cake::gdn::native_chain_threads(1, 2), 1)
    rule_output_narrow_sm90(const __grid_constant__ cake::gdn::MappedRuleParams p) {
  cake::gdn::run_made_output<1, 2>(p);
}

extern "C" __global__ void __launch_bounds__(cake::gdn::native_chain_threads(2, 1), 1)
    rule_output_sm90(const __grid_constant__ cake::gdn::MappedRuleParams p) {
  cake::gdn::run_made_output<2, 1>(p);
}
