// What the outputs of a chain need beside the chain (chain.cuh): a warpgroup that makes P, and a warp for every slice that
// stores O.
//
//   P_ij = scale Gamma_ij (q_i . k_j),   Gamma_ij = 2^(b_i - b_j) for i >= j, b in units of log 2
//
// A warp owns 16 rows of P. Order of accumulation: keys ascending in steps of 16.
// barriers  of chain.cuh
#pragma once

#include "cake/gdn/sm90/chain.cuh"
#include "cake/gdn/sm90/chunk_matrices.cuh"

namespace cake::gdn {

// By a warpgroup: P and the scaled gamma of every chunk, as far ahead of the chain as P's ring and the copies allow.
template <int kSlices>
__device__ __forceinline__ void make_attention(NativeChainSmem<kSlices, true>& smem, const ChainWork& work, float scale,
                                               const tile::LaneOffsets& offsets, int thread, int warp, int lane) {
  float qk[32];
  InputPlace place;
#pragma unroll 1
  for (int chunk = -work.before; chunk < 0; ++chunk) {  // chunks without outputs
    smem.input_ring.wait_full(place);
    if (lane == 0) smem.input_ring.release(place);
    place.advance();
  }
#pragma unroll 1
  for (int chunk = 0; chunk < work.segment.chunks; ++chunk) {
    const pipe::RingPlace<kOutputStages> attention = output_place(chunk);
    const uint64_t k_at = ptx::wgmma_descriptor(ptx::shared_address(smem.keys[place.stage].k));
    smem.input_ring.wait_full(place);
    if (work.tokens(chunk) < kChunk) zero_missing_rows(smem, place, work.last_tokens, thread, lane);
    multiply_rows_keys(qk, k_at + ptx::wgmma_advance(kTokenTileBytes), k_at);
    smem.attention_ring.wait_empty(attention);
    const ChunkScalars& scalars = smem.squares[place.stage].scalars;
    if (thread < kChunk) smem.scaled_gamma[attention.stage][thread] = __fmul_rn(scale, scalars[kGamma][thread]);
    ptx::wgmma_wait<0>();
    ptx::wgmma_keep(qk);
    store_attention_rows(smem.outputs.attention[attention.stage], scalars, qk, scale, warp, offsets, lane);
    ptx::fence_async_shared();
    __syncwarp();
    if (lane == 0) {
      ptx::mbarrier_arrive(smem.attention_ring.full(attention));
      smem.input_ring.release(place);
    }
    place.advance();
  }
}

// By a warp: O of a slice of every chunk to where it belongs.
template <int kSlices>
__device__ __forceinline__ void store_outputs(NativeChainSmem<kSlices, true>& smem, const MappedChainParams& p,
                                              const ChainWork& work, int slice, int lane) {
#pragma unroll 1
  for (int chunk = 0; chunk < work.segment.chunks; ++chunk) {
    const pipe::RingPlace<kOutputStages> place = output_place(chunk);
    const char* from = smem.outputs.out[slice][place.stage];
    const TokenPlace at = work.at(chunk, p.chain.heads);
    const int tokens = work.tokens(chunk), column = 64 * (work.first_slice + slice);
    smem.out_rings[slice].wait_full(place);
    if (tokens == kChunk) {
      if (lane == 0) {
        ptx::fence_async_shared();
        ptx::tensor_store(&p.o, {column, work.head, at.token, at.row}, from);
        ptx::bulk_commit();
        ptx::bulk_wait_read<0>();
        smem.out_rings[slice].release(place);
      }
    } else {  // the last one
      const int64_t step = 8 * p.chain.o.token_stride;
      char* to = row_pointer(p.chain.o, at, work.head) + 2 * column + (lane >> 3) * (step / 4) + 16 * (lane & 7);
#pragma unroll 1
      for (int row = lane >> 3; row < tokens; row += 4, to += step) {
        *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(from + tile::unit_offset<kChunk>(row, lane & 7));
      }
    }
  }
}

}  // namespace cake::gdn
