// The forward chain on Hopper: one segment, value head and 64 or 128 value columns a CTA, as cake/gdn/any/chain.cuh.
//
//   X = V - gamma (K S0)      V' = T (beta X)      S1 = gamma_C S0 + (e K)^T V'
//
// and, where there is an output,  O = scale gamma (Q S0) + P V'
//
// A warpgroup owns 64 value columns and keeps S^T (64 x 128) in registers as a wgmma accumulator; packed to BF16 it is the
// left operand of K and Q, R^T that of T and V'^T that of K again and of P: no state passes through shared memory. The
// outputs' products are issued behind those that the chain waits for, and run while it makes its next operand. P is another
// warpgroup's work, O is stored by warps of its own (output.cuh). One warp loads. Order of accumulation: keys and tokens
// ascending in steps of 16, chunks ascending, the same instructions for every slice: how columns are spread over CTAs
// changes nothing.
// barriers  rings of K, Q, V, T and scalars: full by bytes, released by every warp that computes. Of P: full by every warp that
//           makes it, released by every warp of the chain. Of O, one a slice: full by the slice's warps, released by the one
//           that stores. rows_cleared: by every warp that makes P, when the rows that a last chunk does not have are zero
#pragma once

#include <type_traits>

#include "cake/gdn/any/state_io.cuh"
#include "cake/gdn/sm90/chain_products.cuh"
#include "cake/gdn/sm90/params.h"
#include "cake/pipe/ring.cuh"
#include "cake/ptx/bulk_copy.cuh"
#include "cake/ptx/grid_dependency.cuh"

namespace cake::gdn {

inline constexpr int kInputStages = 3;  // of K and Q, V, T and scalars
inline constexpr int kOutputStages = 2;  // of P, of O

using InputPlace = pipe::RingPlace<kInputStages>;

// Where P and O of a chunk are.
__device__ __forceinline__ pipe::RingPlace<kOutputStages> output_place(int chunk) {
  return {chunk & 1, static_cast<uint32_t>(chunk) >> 1 & 1};
}

struct KeyStage {
  alignas(1024) char k[kTokenTileBytes];
  char q[kTokenTileBytes];
};

struct SquareStage {
  alignas(1024) char inverse[kSquareTileBytes];
  ChunkScalars scalars;
};

template <int kSlices>
struct OutputTiles {
  alignas(1024) char attention[kOutputStages][kSquareTileBytes];  // P
  char out[kSlices][kOutputStages][kSquareTileBytes];             // O as [token][value]
};
struct NoTiles {};

template <int kSlices, bool kOutput>
struct NativeChainSmem {
  static constexpr int kWarps = 4 * (kSlices + (kOutput ? 1 : 0));  // that compute

  KeyStage keys[kInputStages];
  SquareStage squares[kInputStages];
  alignas(1024) char values[kInputStages][kSlices][kSquareTileBytes];
  alignas(1024) std::conditional_t<kOutput, OutputTiles<kSlices>, NoTiles> outputs;
  alignas(128) float scaled_gamma[kOutput ? kOutputStages : 0][kChunk];  // scale gamma of the chunks of P
  pipe::Ring<kInputStages> input_ring;
  pipe::Ring<kOutputStages> attention_ring;
  pipe::Ring<kOutputStages> out_rings[kSlices];
  uint64_t rows_cleared;  // of a last chunk that is short
  bool found[kOutput ? 1 : native_chain_threads(kSlices, false) / 32];  // by segment_pairs

  __device__ __forceinline__ void init_rings() {
    input_ring.init(1, kWarps);
    attention_ring.init(4, 4 * kSlices);
    for (int slice = 0; slice < kSlices; ++slice) out_rings[slice].init(4, 1);
    ptx::mbarrier_init(&rows_cleared, 4);
    ptx::mbarrier_init_fence();
  }
};

__device__ __forceinline__ void named_barrier(int id, int threads) {
  asm volatile("barrier.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

template <int kRegisters>
__device__ __forceinline__ void raise_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

template <int kRegisters>
__device__ __forceinline__ void lower_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kRegisters));
}

// One CTA's work.
struct ChainWork {
  SegmentPlace segment;
  int head, first_slice;
  int last_tokens;  // of the last chunk
  int before = 0;   // chunks of the segment before whose chain makes the entry state: numbers below 0

  __device__ __forceinline__ int tokens(int chunk) const { return chunk + 1 == segment.chunks ? last_tokens : kChunk; }
  __device__ __forceinline__ TokenPlace at(int chunk, const Heads& heads) const {
    return place_of(segment.first_token + chunk * kChunk, heads.tokens_per_row);
  }
  __device__ __forceinline__ int64_t record(int chunk, const Heads& heads) const {
    return int64_t{segment.first_chunk + chunk} * heads.value_heads + head;
  }
};

// By one thread: everything that the other warps read, chunk by chunk. Columns of the identity have no V: what is in its place stays.
template <int kSlices, bool kOutput>
__device__ __forceinline__ void load_chain(NativeChainSmem<kSlices, kOutput>& smem, const MappedChainParams& p,
                                           const ChainWork& work, bool values, InputPlace& place) {
  const Heads& heads = p.chain.heads;
  const int key_head = work.head / heads.group;
#pragma unroll 1
  for (int chunk = -work.before; chunk < work.segment.chunks; ++chunk) {
    const bool queries = kOutput && chunk >= 0;
    const TokenPlace at = work.at(chunk, heads);
    const int64_t record = work.record(chunk, heads);
    KeyStage& keys = smem.keys[place.stage];
    SquareStage& squares = smem.squares[place.stage];
    uint64_t* full = smem.input_ring.full(place);
    smem.input_ring.wait_empty(place);
    smem.input_ring.expect(place, (queries ? 2 : 1) * kTokenTileBytes + (values ? kSlices : 0) * kSquareTileBytes +
                                      kSquareTileBytes + sizeof(ChunkScalars));
#pragma unroll
    for (int block = 0; block < 2; ++block) {
      const int32_t from[4] = {64 * block, key_head, at.token, at.row};
      ptx::tensor_load(keys.k + block * kSquareTileBytes, &p.k, from, full);
      if (queries) ptx::tensor_load(keys.q + block * kSquareTileBytes, &p.q, from, full);
    }
    if (values) {
#pragma unroll
      for (int slice = 0; slice < kSlices; ++slice) {
        const int column = 64 * (work.first_slice + slice);
        ptx::tensor_load(smem.values[place.stage][slice], &p.v, {column, work.head, at.token, at.row}, full);
      }
    }
    ptx::bulk_load(squares.scalars, p.chain.scalars + record * kScalarFloats, sizeof(ChunkScalars), full);
    ptx::bulk_load(squares.inverse, p.chain.inverse + record * kSquareTileBytes, kSquareTileBytes, full);
    place.advance();
  }
}

// Puts zeros into the rows that a last chunk does not have: the copies may have brought those of the next sequence, whatever they hold.
// By the warpgroup that makes P; the chain waits for it.
template <int kSlices>
__device__ __forceinline__ void zero_missing_rows(NativeChainSmem<kSlices, true>& smem, const InputPlace& place, int tokens, int thread,
                                                  int lane) {
  auto zero = [&](char* block) {
    for (int unit = 8 * tokens + thread; unit < 8 * kChunk; unit += 128) {
      reinterpret_cast<uint4*>(block)[unit] = make_uint4(0, 0, 0, 0);
    }
  };
#pragma unroll
  for (int block = 0; block < 4; ++block) zero(smem.keys[place.stage].k + block * kSquareTileBytes);
#pragma unroll
  for (int slice = 0; slice < kSlices; ++slice) zero(smem.values[place.stage][slice]);
  ptx::fence_async_shared();
  named_barrier(1, 128);  // the products of a warp read the rows of all
  if (lane == 0) ptx::mbarrier_arrive(&smem.rows_cleared);
}

// A slice's chain with its outputs. The keys' halves of the state are accumulators of their own: one is rounded, and K S0 of the next
// chunk begun with it, while the other is updated.
template <int kSlices>
struct OutputChain {
  NativeChainSmem<kSlices, true>& smem;
  const ChainWork& work;
  uint32_t columns_lane;
  int slice, lane;

  __device__ __forceinline__ uint32_t keys(const InputPlace& at) const { return ptx::shared_address(smem.keys[at.stage].k); }

  __device__ __forceinline__ void wait_inputs(const InputPlace& place, int chunk) const {
    smem.input_ring.wait_full(place);
    if (work.tokens(chunk) < kChunk) ptx::mbarrier_wait(&smem.rows_cleared, 0);
  }

  __device__ __forceinline__ void load_values(uint32_t (&values)[16], const InputPlace& at) const {
    load_value_columns(values, ptx::shared_address(smem.values[at.stage][slice]), columns_lane);
  }

  // Hands this warp's 16 columns of O to the warp that stores, which also orders them before its copy: a fence here would hold
  // the chain.
  __device__ __forceinline__ void hand_out(const float (&o)[32], int chunk, bool there) const {
    const pipe::RingPlace<kOutputStages> at = output_place(chunk);
    if (!there) smem.out_rings[slice].wait_empty(at);
    uint32_t packed[16];
    pack_accumulator(packed, o);
    store_value_columns(ptx::shared_address(smem.outputs.out[slice][at.stage]), packed, columns_lane);
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(smem.out_rings[slice].full(at));
  }

  // Of at least one chunk.
  __device__ __forceinline__ void run(float (&left)[32], float (&right)[32], InputPlace place) const {
    const int c = lane & 3;
    float y[32], o[32];
    uint32_t packed_left[16], packed_right[16], operand[16], packed[16];
    pack_accumulator(packed_left, left);
    pack_accumulator(packed_right, right);
    wait_inputs(place, 0);
    load_values(operand, place);
    ptx::wgmma_keep(packed_left);
    ptx::wgmma_keep(packed_right);
    ptx::wgmma_keep(y);
    ptx::wgmma_fence();
    multiply_state_rows<0, 4>(y, packed_left, ptx::wgmma_descriptor(keys(place)));
    ptx::wgmma_commit();
    multiply_state_rows<4, 8, 0>(y, packed_right, ptx::wgmma_descriptor(keys(place)));
    ptx::wgmma_commit();
#pragma unroll 1
    for (int chunk = 0; chunk < work.segment.chunks; ++chunk) {
      const uint64_t k_at = ptx::wgmma_descriptor(keys(place)), q_at = k_at + ptx::wgmma_advance(kTokenTileBytes);
      const ChunkScalars& scalars = smem.squares[place.stage].scalars;
      const bool attention_full = smem.attention_ring.is_full(output_place(chunk));
      ptx::wgmma_wait<0>();
      ptx::wgmma_keep(y);
      ptx::wgmma_keep(packed_left);
      ptx::wgmma_keep(packed_right);

      ptx::wgmma_keep(o);
      ptx::wgmma_fence();
      multiply_state_rows<0, 4>(o, packed_left, q_at);
      ptx::wgmma_commit();
      make_residuals(operand, y, scalars[kGamma], scalars[kBeta], c);
      ptx::wgmma_keep(operand);
      ptx::wgmma_keep(y);
      ptx::wgmma_fence();
      multiply_square<false>(y, operand, ptx::wgmma_descriptor(ptx::shared_address(smem.squares[place.stage].inverse)));
      ptx::wgmma_commit();
      multiply_state_rows<4, 8, 0>(o, packed_right, q_at);
      ptx::wgmma_commit();
      const float decay = scalars[kGamma][kChunk - 1];
      ptx::wgmma_wait<2>();
      float ends[16];
      load_per_token(ends, scalars[kEnd], c);
      decay_halves(left, right, decay);
      if (!attention_full) smem.attention_ring.wait_full(output_place(chunk));  // a branch, so that the products above stay above
      ptx::wgmma_wait<1>();
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
      // Behind the last chunk come its own keys once more, for nothing: a way out of the loop would serialise the products.
      InputPlace next = place;
      const bool last = chunk + 1 == work.segment.chunks;
      if (!last) next.advance();
      const bool next_full = smem.input_ring.is_full(next);
      const bool out_empty = smem.out_rings[slice].is_empty(output_place(chunk));
      pack_accumulator(packed, y);
      ptx::wgmma_wait<2>();
      ptx::wgmma_keep(o);
      ptx::wgmma_keep(packed_left);
      ptx::wgmma_keep(packed_right);
      scale_by_token(o, smem.scaled_gamma[output_place(chunk).stage], c);
      ptx::wgmma_keep(packed);
      ptx::wgmma_keep(o);
      ptx::wgmma_fence();
      multiply_square<true>(o, packed,
                            ptx::wgmma_descriptor(ptx::shared_address(smem.outputs.attention[output_place(chunk).stage])));
      ptx::wgmma_commit();
      const bool next_short = chunk + 2 == work.segment.chunks && work.last_tokens < kChunk;
      if (!next_full || next_short) {
        smem.input_ring.wait_full(next);
        if (next_short) ptx::mbarrier_wait(&smem.rows_cleared, 0);
      }
      ptx::wgmma_wait<2>();
      ptx::wgmma_keep(left);
      pack_accumulator(packed_left, left);
      ptx::wgmma_keep(packed_left);
      ptx::wgmma_keep(y);
      ptx::wgmma_fence();
      multiply_state_rows<0, 4>(y, packed_left, ptx::wgmma_descriptor(keys(next)));
      ptx::wgmma_commit();
      ptx::wgmma_wait<1>();
      ptx::wgmma_keep(right);
      ptx::wgmma_keep(o);
      ptx::wgmma_keep(operand);
      ptx::wgmma_keep(packed);
      load_values(operand, next);
      __syncwarp();
      if (lane == 0) {
        smem.attention_ring.release(output_place(chunk));
        smem.input_ring.release(place);
      }
      pack_accumulator(packed_right, right);
      ptx::wgmma_keep(packed_right);
      ptx::wgmma_fence();
      multiply_state_rows<4, 8, 0>(y, packed_right, ptx::wgmma_descriptor(keys(next)));
      ptx::wgmma_commit();
      hand_out(o, chunk, out_empty);
      place = next;
    }
    ptx::wgmma_wait<0>();
    ptx::wgmma_keep(y);
    ptx::wgmma_keep(left);
    ptx::wgmma_keep(right);
  }
};

}  // namespace cake::gdn
