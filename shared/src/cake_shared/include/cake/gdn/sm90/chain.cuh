// The forward chain on Hopper: one segment, value head and 64 or 128 value columns a CTA, as cake/gdn/any/chain.cuh.
//
//   X  = V - gamma (K S0)      V' = T (beta X)      O = scale gamma (Q S0) + P V'      S1 = gamma_C S0 + (e K)^T V'
//
// Consumers are warpgroups of 64 value columns, see chain_products.cuh. Three rings feed them: K and Q; V; T, P and scalars, which are
// loaded from wy's results by a warp of the CTA or made a chunk ahead by other warpgroups of it (makers), with the same bits. O leaves
// through a tile a warpgroup by tensor stores. Order of accumulation: keys and tokens ascending in steps of 16, chunks ascending.
// barriers  rings: keys and values full by bytes, squares full by bytes or by a maker's warps; all released by every consumer warp. A
//           warpgroup's named barrier before and after O is staged. All consumers' named barrier after the rows that a last chunk does not
//           have are zero
#pragma once

#include "cake/gdn/any/state_io.cuh"
#include "cake/gdn/sm90/chain_products.cuh"
#include "cake/gdn/sm90/chunk_matrices.cuh"
#include "cake/gdn/sm90/params.h"
#include "cake/pipe/ring.cuh"
#include "cake/ptx/grid_dependency.cuh"

namespace cake::gdn {

inline constexpr int kKeyStages = 3, kValueStages = 2, kSquareStages = 2;

struct KeyStage {
  alignas(1024) char k[kTokenTileBytes];
  char q[kTokenTileBytes];
};

struct SquareStage {
  alignas(1024) char inverse[kSquareTileBytes];
  char attention[kSquareTileBytes];
};

// What a maker keeps to itself.
struct MakerSmem {
  BlockInverseSmem inverse;
  alignas(1024) ChunkScalars scalars;
};

template <int kSlices, int kMakers>
struct NativeChainSmem {
  KeyStage keys[kKeyStages];
  SquareStage squares[kSquareStages];
  alignas(1024) char values[kValueStages][kSlices][kSquareTileBytes];
  char out[kSlices][kSquareTileBytes];
  MakerSmem makers[kMakers];
  alignas(1024) ChunkScalars scalars[kSquareStages];
  pipe::Ring<kKeyStages> key_ring;
  pipe::Ring<kValueStages> value_ring;
  pipe::Ring<kSquareStages> square_ring;

  __device__ __forceinline__ void init_rings() {
    key_ring.init(1, 4 * kSlices);
    value_ring.init(1, 4 * kSlices);
    square_ring.init(kMakers > 0 ? 4 : 1, 4 * kSlices);
    ptx::mbarrier_init_fence();
  }
};

template <int kStages>
__device__ __forceinline__ pipe::RingPlace<kStages> ring_place(int item) {
  return {item % kStages, static_cast<uint32_t>(item / kStages & 1)};
}

__device__ __forceinline__ void named_barrier(int id, int threads) {
  asm volatile("barrier.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// The rows that a chunk does not have in a block of 64 columns: a copy may have brought those of the next sequence, whatever they hold.
template <int kThreads>
__device__ __forceinline__ void zero_rows(char* block, int tokens, int thread) {
  for (int unit = 8 * tokens + thread; unit < 8 * kChunk; unit += kThreads) reinterpret_cast<uint4*>(block)[unit] = make_uint4(0, 0, 0, 0);
}

// One CTA's work.
struct ChainWork {
  SegmentPlace segment;
  int head, first_slice;
  int last_tokens;  // of the last chunk

  __device__ __forceinline__ int tokens(int chunk) const { return chunk + 1 == segment.chunks ? last_tokens : kChunk; }
  __device__ __forceinline__ TokenPlace at(int chunk, const Heads& heads) const {
    return place_of(segment.first_token + chunk * kChunk, heads.tokens_per_row);
  }
  __device__ __forceinline__ int64_t record(int chunk, const Heads& heads) const {
    return int64_t{segment.first_chunk + chunk} * heads.value_heads + head;
  }
};

template <int kSlices, int kMakers>
struct ChainLoader {
  NativeChainSmem<kSlices, kMakers>& smem;
  const MappedChainParams& p;
  const ChainWork& work;

  // K, and Q where the chain has an output.
  template <bool kQueries>
  __device__ __forceinline__ void load_keys(int chunk) const {
    const auto place = ring_place<kKeyStages>(chunk);
    const int key_head = work.head / p.chain.heads.group;
    const TokenPlace at = work.at(chunk, p.chain.heads);
    KeyStage& stage = smem.keys[place.stage];
    uint64_t* full = smem.key_ring.full(place);
    smem.key_ring.wait_empty(place);
    smem.key_ring.expect(place, kQueries ? 2 * kTokenTileBytes : kTokenTileBytes);
#pragma unroll
    for (int block = 0; block < 2; ++block) {
      ptx::tensor_load(stage.k + block * kSquareTileBytes, &p.k, {64 * block, key_head, at.token, at.row}, full);
      if constexpr (kQueries) {
        ptx::tensor_load(stage.q + block * kSquareTileBytes, &p.q, {64 * block, key_head, at.token, at.row}, full);
      }
    }
  }

  __device__ __forceinline__ void load_values(int chunk) const {
    const auto place = ring_place<kValueStages>(chunk);
    const TokenPlace at = work.at(chunk, p.chain.heads);
    smem.value_ring.wait_empty(place);
    smem.value_ring.expect(place, kSlices * kSquareTileBytes);
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
      ptx::tensor_load(smem.values[place.stage][slice], &p.v, {64 * (work.first_slice + slice), work.head, at.token, at.row},
                       smem.value_ring.full(place));
    }
  }

  __device__ __forceinline__ void load_squares(int chunk) const {
    const auto place = ring_place<kSquareStages>(chunk);
    const int64_t record = work.record(chunk, p.chain.heads);
    SquareStage& stage = smem.squares[place.stage];
    uint64_t* full = smem.square_ring.full(place);
    smem.square_ring.wait_empty(place);
    smem.square_ring.expect(place, sizeof(SquareStage) + sizeof(ChunkScalars));
    ptx::bulk_load(smem.scalars[place.stage], p.chain.scalars + record * kScalarFloats, sizeof(ChunkScalars), full);
    ptx::bulk_load(stage.inverse, p.chain.inverse + record * kSquareTileBytes, kSquareTileBytes, full);
    ptx::bulk_load(stage.attention, p.chain.attention + record * kSquareTileBytes, kSquareTileBytes, full);
  }
};

template <int kSlices, int kMakers>
struct ChainConsumer {
  using Smem = NativeChainSmem<kSlices, kMakers>;

  Smem& smem;
  const MappedChainParams& p;
  const ChainWork& work;
  const tile::LaneOffsets offsets;
  int slice;               // of the CTA
  int thread, warp, lane;  // of the warpgroup

  __device__ __forceinline__ int group_column() const { return 64 * (work.first_slice + slice); }

  __device__ __forceinline__ void store_output(const float (&o)[32], int chunk) const {
    char* tile = smem.out[slice];
    if (thread == 0) ptx::bulk_wait_read<0>();
    named_barrier(1 + slice, 128);
    store_token_columns(ptx::shared_address(tile), o, offsets, warp);
    ptx::fence_async_shared();
    named_barrier(1 + slice, 128);
    const TokenPlace at = work.at(chunk, p.chain.heads);
    const int tokens = work.tokens(chunk);
    if (tokens == kChunk) {
      if (thread == 0) {
        ptx::tensor_store(&p.o, {group_column(), work.head, at.token, at.row}, tile);
        ptx::bulk_commit();
      }
      return;
    }
    char* first = row_pointer(p.chain.o, at, work.head) + 2 * group_column();
    for (int unit = thread; unit < 8 * tokens; unit += 128) {
      const int row = unit >> 3;
      *reinterpret_cast<uint4*>(first + row * 2 * p.chain.o.token_stride + 16 * (unit & 7)) =
          *reinterpret_cast<const uint4*>(tile + tile::unit_offset<kChunk>(row, unit & 7));
    }
  }

  // Makers have done K and Q, and are done before the squares are full.
  __device__ __forceinline__ void zero_missing_rows(int chunk) const {
    const int all = 128 * slice + thread;
    const auto key_place = ring_place<kKeyStages>(chunk);
    const auto value_place = ring_place<kValueStages>(chunk);
    smem.value_ring.wait_full(value_place);
    if constexpr (kMakers == 0) {
      KeyStage& stage = smem.keys[key_place.stage];
#pragma unroll
      for (int block = 0; block < 4; ++block) zero_rows<128 * kSlices>(stage.k + block * kSquareTileBytes, work.last_tokens, all);
    } else {
      smem.square_ring.wait_full(ring_place<kSquareStages>(chunk));
    }
    zero_rows<128>(smem.values[value_place.stage][slice], work.last_tokens, thread);
    ptx::fence_async_shared();
    named_barrier(1 + kSlices, 128 * kSlices);
  }

  __device__ __forceinline__ void run(float (&state)[64]) const {
    const int c = lane & 3;
    float o[32], y[32];
    uint32_t packed_state[32];
    pipe::RingPlace<kKeyStages> key_place;
    pipe::RingPlace<kValueStages> value_place;
    pipe::RingPlace<kSquareStages> square_place;
#pragma unroll
    for (int n = 0; n < 32; ++n) o[n] = 0.f;
    pack_accumulator(packed_state, state);
#pragma unroll 1
    for (int chunk = 0; chunk < work.segment.chunks; ++chunk) {
      const uint64_t k_at = ptx::wgmma_descriptor(ptx::shared_address(smem.keys[key_place.stage].k));
      const uint64_t q_at = k_at + ptx::wgmma_advance(kTokenTileBytes);
      const uint64_t k_by_token = ptx::wgmma_descriptor(ptx::shared_address(smem.keys[key_place.stage].k), kSquareTileBytes);
      const uint64_t t_at = ptx::wgmma_descriptor(ptx::shared_address(smem.squares[square_place.stage].inverse));
      const uint64_t p_at = t_at + ptx::wgmma_advance(kSquareTileBytes);
      const ChunkScalars& scalars = smem.scalars[square_place.stage];
      smem.key_ring.wait_full(key_place);
      if (work.tokens(chunk) < kChunk) zero_missing_rows(chunk);

      ptx::wgmma_keep(packed_state);
      ptx::wgmma_keep(y);
      ptx::wgmma_fence();
      multiply_state_rows<0, 8>(y, packed_state, k_at);
      ptx::wgmma_commit();
      ptx::wgmma_wait<1>();  // long done, but ptxas does not see it
      ptx::wgmma_keep(o);
      if (chunk > 0) store_output(o, chunk - 1);
      ptx::wgmma_keep(o);
      ptx::wgmma_fence();
      multiply_state_rows<0, 4>(o, packed_state, q_at);
      ptx::wgmma_commit();
      smem.value_ring.wait_full(value_place);
      smem.square_ring.wait_full(square_place);
      ptx::wgmma_wait<1>();
      ptx::wgmma_keep(y);

      uint32_t operand[16];
      make_residuals(operand, y, ptx::shared_address(smem.values[value_place.stage][slice]), scalars[kGamma], scalars[kBeta], offsets, warp,
                     c);
      ptx::wgmma_keep(operand);
      ptx::wgmma_keep(y);
      ptx::wgmma_fence();
      multiply_square<false>(y, operand, t_at);
      ptx::wgmma_commit();
      multiply_state_rows<4, 8>(o, packed_state, q_at);
      ptx::wgmma_commit();
      __syncwarp();
      if (lane == 0) smem.value_ring.release(value_place);
      const float decay = scalars[kGamma][kChunk - 1];
#pragma unroll
      for (int n = 0; n < 64; ++n) state[n] = __fmul_rn(decay, state[n]);
      ptx::wgmma_wait<1>();
      ptx::wgmma_keep(y);

      uint32_t writes[16];
      pack_accumulator(writes, y);
      scale_by_token(y, scalars[kEnd], 1.f, c);
      pack_accumulator(operand, y);
      ptx::wgmma_keep(operand);
      ptx::wgmma_keep(state);
      ptx::wgmma_fence();
      add_token_rows(state, operand, k_by_token);
      ptx::wgmma_commit();
      ptx::wgmma_wait<1>();
      ptx::wgmma_keep(o);
      scale_by_token(o, scalars[kGamma], p.chain.scale, c);
      ptx::wgmma_keep(writes);
      ptx::wgmma_keep(o);
      ptx::wgmma_fence();
      multiply_square<true>(o, writes, p_at);
      ptx::wgmma_commit();
      ptx::wgmma_wait<1>();
      ptx::wgmma_keep(state);
      pack_accumulator(packed_state, state);
      ptx::wgmma_wait<0>();
      ptx::wgmma_keep(o);
      ptx::wgmma_keep(operand);
      ptx::wgmma_keep(writes);
      __syncwarp();
      if (lane == 0) {
        smem.key_ring.release(key_place);
        smem.square_ring.release(square_place);
      }
      key_place.advance();
      value_place.advance();
      square_place.advance();
    }
    store_output(o, work.segment.chunks - 1);
    if (thread == 0) ptx::bulk_wait<0>();
  }
};

}  // namespace cake::gdn
