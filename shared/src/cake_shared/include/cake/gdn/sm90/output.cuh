// The outputs of a chain's chunks, by a warpgroup that follows it: O = scale gamma (Q S0) + P V'.
//
//   P_ij = scale Gamma_ij (q_i . k_j),   Gamma_ij = 2^(b_i - b_j) for i >= j, b in units of log 2
//
// Q K^T, scaled and packed, is the left operand of V' without leaving the registers. A warp owns 16 tokens and all value
// columns of the CTA. Order of accumulation: keys, then tokens, ascending in steps of 16.
// barriers  of chain.cuh, and a named barrier of the warpgroup before and after O is staged for the tensor store
#pragma once

#include "cake/gdn/sm90/chain.cuh"
#include "cake/gdn/sm90/chunk_matrices.cuh"

namespace cake::gdn {

template <int kSlices>
struct OutputWarpgroup {
  static constexpr int kColumns = 64 * kSlices;

  NativeChainSmem<kSlices, true>& smem;
  const MappedChainParams& p;
  const ChainWork& work;
  const tile::LaneOffsets offsets;
  int thread, warp, lane;

  __device__ __forceinline__ void barrier() const { named_barrier(2, 128); }

  // P of this warp's rows as a left operand.
  __device__ __forceinline__ void make_attention(uint32_t (&packed)[16], const float (&qk)[32],
                                                 const ChunkScalars& scalars) const {
    const RowPair rows(scalars, warp, lane);
#pragma unroll
    for (int block = 0; block < 4; ++block) {
      uint32_t(&to)[4] = *reinterpret_cast<uint32_t(*)[4]>(&packed[4 * block]);
      if (block < warp) {
        rows.attention<false>(to, scalars, qk + 8 * block, p.chain.scale, block);
      } else if (block == warp) {
        rows.attention<true>(to, scalars, qk + 8 * block, p.chain.scale, block);
      } else {
#pragma unroll
        for (int i = 0; i < 4; ++i) to[i] = 0;
      }
    }
  }

  __device__ __forceinline__ void store(const float (&o)[32 * kSlices], int chunk) const {
    if (thread == 0) ptx::bulk_wait_read<0>();
    barrier();
#pragma unroll
    for (int s = 0; s < 4 * kSlices; ++s) {
      const float* from = o + 8 * s;
      ptx::stmatrix_x4(tile::fragment_address<kChunk>(ptx::shared_address(smem.exports.out[s / 4]), offsets.row_major,
                                                      16 * warp, 2 * (s & 3)),
                       ptx::pack_bf16(from[0], from[1]), ptx::pack_bf16(from[2], from[3]), ptx::pack_bf16(from[4], from[5]),
                       ptx::pack_bf16(from[6], from[7]));
    }
    ptx::fence_async_shared();
    barrier();
    const TokenPlace at = work.at(chunk, p.chain.heads);
    const int tokens = work.tokens(chunk);
    if (tokens == kChunk) {
      if (thread == 0) {
#pragma unroll
        for (int slice = 0; slice < kSlices; ++slice) {
          ptx::tensor_store(&p.o, {64 * (work.first_slice + slice), work.head, at.token, at.row}, smem.exports.out[slice]);
        }
        ptx::bulk_commit();
      }
      return;
    }
    char* first = row_pointer(p.chain.o, at, work.head) + 128 * work.first_slice;
    for (int unit = thread; unit < 8 * kSlices * tokens; unit += 128) {
      const int row = unit / (8 * kSlices), column = unit % (8 * kSlices);
      *reinterpret_cast<uint4*>(first + row * 2 * p.chain.o.token_stride + 16 * column) =
          *reinterpret_cast<const uint4*>(smem.exports.out[column / 8] + tile::unit_offset<kChunk>(row, column & 7));
    }
  }

  __device__ __forceinline__ void run() const {
    float o[32 * kSlices], qk[32];
    uint32_t attention[16];
    pipe::RingPlace<kKeyStages> key_place;
    pipe::RingPlace<kValueStages> value_place;
    pipe::RingPlace<kSquareStages> square_place;
    pipe::RingPlace<1> export_place;
    const uint64_t state_at = ptx::wgmma_descriptor(ptx::shared_address(smem.exports.state));
    const uint64_t writes_at = ptx::wgmma_descriptor(ptx::shared_address(smem.exports.writes));
#pragma unroll 1
    for (int chunk = 0; chunk < work.segment.chunks; ++chunk) {
      const uint64_t k_at = ptx::wgmma_descriptor(ptx::shared_address(smem.keys[key_place.stage].k));
      const uint64_t q_at = k_at + ptx::wgmma_advance(kTokenTileBytes);
      const ChunkScalars& scalars = smem.squares[square_place.stage].scalars;
      smem.key_ring.wait_full(key_place);
      if (work.tokens(chunk) < kChunk) zero_missing_rows(smem, key_place, value_place, work.last_tokens, 128 * kSlices + thread);
      multiply_rows_keys(qk, q_at, k_at);
      smem.state_ring.wait_full(export_place);
      ptx::wgmma_keep(o);
      ptx::wgmma_fence();
#pragma unroll
      for (int s = 0; s < 8; ++s) {
        const uint64_t q_step = ptx::wgmma_advance((s >> 2) * kSquareTileBytes + (s & 3) * 32);
        const uint64_t state_step = ptx::wgmma_advance((s >> 2) * 128 * kColumns + (s & 3) * 32);
        ptx::wgmma_bf16<ptx::Major::kK, ptx::Major::kK>(o, q_at + q_step, state_at + state_step, s > 0);
      }
      ptx::wgmma_commit();
      smem.square_ring.wait_full(square_place);
      ptx::wgmma_wait<1>();
      ptx::wgmma_keep(qk);
      make_attention(attention, qk, scalars);
      ptx::wgmma_wait<0>();
      ptx::wgmma_keep(o);
      __syncwarp();
      if (lane == 0) {
        smem.state_ring.release(export_place);
        smem.key_ring.release(key_place);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float factor = __fmul_rn(p.chain.scale, scalars[kGamma][16 * warp + (lane >> 2) + 8 * half]);
#pragma unroll
        for (int j = 0; j < 8 * kSlices; ++j) {
#pragma unroll
          for (int i = 0; i < 2; ++i) o[4 * j + 2 * half + i] = __fmul_rn(factor, o[4 * j + 2 * half + i]);
        }
      }
      smem.write_ring.wait_full(export_place);
      ptx::wgmma_keep(attention);
      ptx::wgmma_keep(o);
      ptx::wgmma_fence();
#pragma unroll
      for (int s = 0; s < 4; ++s) {
        ptx::wgmma_bf16<ptx::Major::kK>(o, attention[4 * s], attention[4 * s + 1], attention[4 * s + 2], attention[4 * s + 3],
                                        writes_at + ptx::wgmma_advance(32 * s), true);
      }
      ptx::wgmma_commit();
      ptx::wgmma_wait<0>();
      ptx::wgmma_keep(o);
      ptx::wgmma_keep(attention);
      __syncwarp();
      if (lane == 0) {
        smem.write_ring.release(export_place);
        smem.square_ring.release(square_place);
      }
      store(o, chunk);
      key_place.advance();
      value_place.advance();
      square_place.advance();
      export_place.advance();
    }
    if (thread == 0) ptx::bulk_wait_read<0>();
  }
};

}  // namespace cake::gdn
