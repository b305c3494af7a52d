// The forward chain on Hopper without outputs, by a warpgroup for 64 value columns; see chain.cuh.
#pragma once

#include "cake/gdn/sm90/chain.cuh"

namespace cake::gdn {

// A slice's chain of at least one chunk without outputs, in which no chunk is short. The keys' halves of the state are
// accumulators of their own: one is rounded, and K S0 of the next chunk begun with it, while the other is updated.
template <int kSlices, bool kOutput>
struct StateChain {
  NativeChainSmem<kSlices, kOutput>& smem;
  int chunks;
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
    for (int chunk = 0; chunk < chunks; ++chunk) {
      const uint64_t k_at = keys(place);
      const SquareStage& square = smem.squares[place.stage];
      const ChunkScalars& scalars = square.scalars;
      // Behind the last chunk come its own keys once more, for nothing: a way out of the loop would serialise the products.
      InputPlace next = place;
      const bool last = chunk + 1 == chunks;
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

}  // namespace cake::gdn
