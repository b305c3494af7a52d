// A warpgroup that makes T, P and the scalars of a chain's chunks a chunk ahead of its consumers, and loads K, Q and V.
//
// With kMakers of them, one has every kMakers-th chunk. The same arithmetic as wy.cuh, so the same bits as tiles loaded from its results.
// barriers  a named barrier of the warpgroup: scalars written, row blocks of the chunk before done, its copies under way | A and diagonal
//           inverses written; another in a last chunk, after the rows that it does not have are zero
#pragma once

#include "cake/gdn/sm90/chain.cuh"

namespace cake::gdn {

// Without kOutput, for chains that have none, Q is not loaded and P not made.
template <int kSlices, int kMakers, bool kOutput>
struct ChunkMaker {
  NativeChainSmem<kSlices, kMakers>& smem;
  const MappedRuleParams& p;
  const ChainWork& work;
  const ChainLoader<kSlices, kMakers>& loader;
  const tile::LaneOffsets offsets;
  bool values;             // whether the chain reads V
  int maker;               // of the CTA
  int thread, warp, lane;  // of the warpgroup

  __device__ __forceinline__ void barrier() const { named_barrier(2 + kSlices + maker, 128); }

  __device__ __forceinline__ HeadGates gates_of(int chunk) const {
    if (chunk >= work.segment.chunks) return {};
    return load_head_gates(p.sums, p.beta, work.at(chunk, p.mapped.chain.heads), work.tokens(chunk), work.record(chunk, p.mapped.chain.heads),
                           work.head, thread);
  }

  __device__ __forceinline__ bool loads() const { return warp == 0 && lane == 0; }

  __device__ __forceinline__ void run() const {
    MakerSmem& own = smem.makers[maker];
    const int chunks = work.segment.chunks;
    if (maker == 0 && loads()) {
      loader.template load_keys<kOutput>(0);
      if (values) loader.load_values(0);
      if (chunks > 1) loader.template load_keys<kOutput>(1);
    }
    HeadGates gates = gates_of(maker);
#pragma unroll 1
    for (int chunk = maker; chunk < chunks; chunk += kMakers) {
      const auto key_place = ring_place<kKeyStages>(chunk);
      const auto square_place = ring_place<kSquareStages>(chunk);
      KeyStage& keys = smem.keys[key_place.stage];
      SquareStage& squares = smem.squares[square_place.stage];
      const int tokens = work.tokens(chunk);
      store_scalars(own.scalars, gates, p.beta.top, tokens, thread);
      gates = gates_of(chunk + kMakers);
      barrier();  // also: the keys' copies are under way, so that their stage cannot be taken for full one round early
      smem.key_ring.wait_full(key_place);
      if (tokens < kChunk) {
#pragma unroll
        for (int block = 0; block < (kOutput ? 4 : 2); ++block) zero_rows<128>(keys.k + block * kSquareTileBytes, tokens, thread);
        ptx::fence_async_shared();
        barrier();
      }

      float products[32];
      const uint64_t k_at = ptx::wgmma_descriptor(ptx::shared_address(keys.k));
      const uint64_t q_at = k_at + ptx::wgmma_advance(kTokenTileBytes);
      multiply_rows_keys(products, k_at, k_at);
      ptx::wgmma_wait<0>();
      ptx::wgmma_keep(products);
      store_coefficient_rows(own.inverse, own.scalars, products, warp, offsets, lane);
      if constexpr (kOutput) multiply_rows_keys(products, q_at, k_at);
      __syncwarp();
      invert_diagonal(own.inverse, warp, lane);
      smem.square_ring.wait_empty(square_place);
      if (thread < kChunk) {
#pragma unroll
        for (int row = 0; row < kScalarRows; ++row) smem.scalars[square_place.stage][row][thread] = own.scalars[row][thread];
      }
      if constexpr (kOutput) {
        ptx::wgmma_wait<0>();
        ptx::wgmma_keep(products);
        store_attention_rows(squares.attention, own.scalars, products, p.mapped.chain.scale, warp, offsets, lane);
      }
      barrier();
      store_inverse_rows(own.inverse, squares.inverse, warp, offsets);
      ptx::fence_async_shared();
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(smem.square_ring.full(square_place));
      if (loads()) {
        if (values && chunk + 1 < chunks) loader.load_values(chunk + 1);
        if (chunk + 2 < chunks) loader.template load_keys<kOutput>(chunk + 2);
      }
      __syncwarp();
    }
  }
};

}  // namespace cake::gdn
