// The forward chain on Hopper: one segment, value head and 64 or 128 value columns a CTA, as cake/gdn/any/chain.cuh.
//
//   X = V - gamma (K S0)      V' = T (beta X)      S1 = gamma_C S0 + (e K)^T V'
//
// A warpgroup owns 64 value columns and keeps S^T (64 x 128) in registers as a wgmma accumulator; packed to BF16 it is the
// left operand of K, R^T that of T and V'^T that of K again, so the chain never waits for shared memory. The outputs are
// another warpgroup's work (output.cuh): S0 and V' go to it through shared tiles. One warp loads. Order of accumulation: keys
// and tokens ascending in steps of 16, chunks ascending, the same instructions for every slice: how columns are spread over
// CTAs changes nothing.
// barriers  rings of K and Q; of V; of T and scalars: full by bytes, released by every warp that reads them. S0 and V'
//           tiles: full by every warp of the chain, released by every warp of the output. All warps that compute share a
//           named barrier after the rows that a last chunk does not have are zero
#pragma once

#include <type_traits>

#include "cake/gdn/any/state_io.cuh"
#include "cake/gdn/sm90/chain_products.cuh"
#include "cake/gdn/sm90/params.h"
#include "cake/pipe/ring.cuh"
#include "cake/ptx/bulk_copy.cuh"
#include "cake/ptx/grid_dependency.cuh"

namespace cake::gdn {

inline constexpr int kKeyStages = 3, kValueStages = 2, kSquareStages = 2;

struct KeyStage {
  alignas(1024) char k[kTokenTileBytes];
  char q[kTokenTileBytes];
};

struct SquareStage {
  alignas(1024) char inverse[kSquareTileBytes];
  ChunkScalars scalars;
};

// What the chain hands to the output: S0 as [value][key] in two blocks of 64 keys, V' as [value][token].
template <int kSlices>
struct ExportTiles {
  alignas(1024) char state[2 * kSlices * kSquareTileBytes];
  char writes[kSlices * kSquareTileBytes];
  char out[kSlices][kSquareTileBytes];  // O as [token][value]
};
struct NoTiles {};

template <int kSlices, bool kOutput>
struct NativeChainSmem {
  static constexpr int kWarps = 4 * (kSlices + (kOutput ? 1 : 0));  // that compute

  KeyStage keys[kKeyStages];
  SquareStage squares[kSquareStages];
  alignas(1024) char values[kValueStages][kSlices][kSquareTileBytes];
  alignas(1024) std::conditional_t<kOutput, ExportTiles<kSlices>, NoTiles> exports;
  alignas(128) pipe::Ring<kKeyStages> key_ring;
  pipe::Ring<kValueStages> value_ring;
  pipe::Ring<kSquareStages> square_ring;
  pipe::Ring<1> state_ring, write_ring;

  __device__ __forceinline__ void init_rings() {
    key_ring.init(1, kWarps);
    value_ring.init(1, 4 * kSlices);
    square_ring.init(1, kWarps);
    state_ring.init(4 * kSlices, 4);
    write_ring.init(4 * kSlices, 4);
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

  __device__ __forceinline__ int tokens(int chunk) const { return chunk + 1 == segment.chunks ? last_tokens : kChunk; }
  __device__ __forceinline__ TokenPlace at(int chunk, const Heads& heads) const {
    return place_of(segment.first_token + chunk * kChunk, heads.tokens_per_row);
  }
  __device__ __forceinline__ int64_t record(int chunk, const Heads& heads) const {
    return int64_t{segment.first_chunk + chunk} * heads.value_heads + head;
  }
};

// By one thread: everything that the other warps read, chunk by chunk. V is not loaded for columns of the identity.
template <int kSlices, bool kOutput>
__device__ __forceinline__ void load_chain(NativeChainSmem<kSlices, kOutput>& smem, const MappedChainParams& p,
                                           const ChainWork& work, bool values) {
  const Heads& heads = p.chain.heads;
  const int key_head = work.head / heads.group;
  pipe::RingPlace<kKeyStages> key_place;
  pipe::RingPlace<kValueStages> value_place;
  pipe::RingPlace<kSquareStages> square_place;
#pragma unroll 1
  for (int chunk = 0; chunk < work.segment.chunks; ++chunk) {
    const TokenPlace at = work.at(chunk, heads);
    const int64_t record = work.record(chunk, heads);
    KeyStage& keys = smem.keys[key_place.stage];
    uint64_t* full = smem.key_ring.full(key_place);
    smem.key_ring.wait_empty(key_place);
    smem.key_ring.expect(key_place, kOutput ? 2 * kTokenTileBytes : kTokenTileBytes);
#pragma unroll
    for (int block = 0; block < 2; ++block) {
      ptx::tensor_load(keys.k + block * kSquareTileBytes, &p.k, {64 * block, key_head, at.token, at.row}, full);
    }
    if constexpr (kOutput) {
#pragma unroll
      for (int block = 0; block < 2; ++block) {
        ptx::tensor_load(keys.q + block * kSquareTileBytes, &p.q, {64 * block, key_head, at.token, at.row}, full);
      }
    }
    if (values) {
      smem.value_ring.wait_empty(value_place);
      smem.value_ring.expect(value_place, kSlices * kSquareTileBytes);
#pragma unroll
      for (int slice = 0; slice < kSlices; ++slice) {
        const int column = 64 * (work.first_slice + slice);
        ptx::tensor_load(smem.values[value_place.stage][slice], &p.v, {column, work.head, at.token, at.row},
                         smem.value_ring.full(value_place));
      }
    }
    SquareStage& squares = smem.squares[square_place.stage];
    full = smem.square_ring.full(square_place);
    smem.square_ring.wait_empty(square_place);
    smem.square_ring.expect(square_place, kSquareTileBytes + sizeof(ChunkScalars));
    ptx::bulk_load(squares.scalars, p.chain.scalars + record * kScalarFloats, sizeof(ChunkScalars), full);
    ptx::bulk_load(squares.inverse, p.chain.inverse + record * kSquareTileBytes, kSquareTileBytes, full);
    key_place.advance();
    value_place.advance();
    square_place.advance();
  }
}

// The rows that a last chunk does not have: the copies may have brought those of the next sequence, whatever they hold. By
// all warps that compute, of which this is thread `thread`.
template <int kSlices, bool kOutput>
__device__ __forceinline__ void zero_missing_rows(NativeChainSmem<kSlices, kOutput>& smem,
                                                  const pipe::RingPlace<kKeyStages>& key_place,
                                                  const pipe::RingPlace<kValueStages>& value_place, int tokens, int thread) {
  constexpr int kThreads = 32 * NativeChainSmem<kSlices, kOutput>::kWarps;
  smem.key_ring.wait_full(key_place);
  smem.value_ring.wait_full(value_place);
  auto zero = [&](char* block) {
    for (int unit = 8 * tokens + thread; unit < 8 * kChunk; unit += kThreads) {
      reinterpret_cast<uint4*>(block)[unit] = make_uint4(0, 0, 0, 0);
    }
  };
#pragma unroll
  for (int block = 0; block < (kOutput ? 4 : 2); ++block) zero(smem.keys[key_place.stage].k + block * kSquareTileBytes);
#pragma unroll
  for (int slice = 0; slice < kSlices; ++slice) zero(smem.values[value_place.stage][slice]);
  ptx::fence_async_shared();
  named_barrier(1, kThreads);
}

template <int kSlices, bool kOutput>
struct ChainWarpgroup {
  NativeChainSmem<kSlices, kOutput>& smem;
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
    pipe::RingPlace<1> export_place;
    pack_accumulator(packed_state, state);
#pragma unroll 1
    for (int chunk = 0; chunk < work.segment.chunks; ++chunk) {
      const uint32_t k_tile = ptx::shared_address(smem.keys[key_place.stage].k);
      const uint64_t t_at = ptx::wgmma_descriptor(ptx::shared_address(smem.squares[square_place.stage].inverse));
      const ChunkScalars& scalars = smem.squares[square_place.stage].scalars;
      smem.key_ring.wait_full(key_place);
      if (work.tokens(chunk) < kChunk) {
        zero_missing_rows(smem, key_place, value_place, work.last_tokens, 128 * slice + 32 * warp + lane);
      }

      ptx::wgmma_keep(packed_state);
      ptx::wgmma_keep(y);
      ptx::wgmma_fence();
      multiply_state_rows<0, 8>(y, packed_state, ptx::wgmma_descriptor(k_tile));
      ptx::wgmma_commit();
      if constexpr (kOutput) {
        smem.state_ring.wait_empty(export_place);
        store_state_rows<64 * kSlices>(ptx::shared_address(smem.exports.state), packed_state, offsets, 64 * slice + 16 * warp);
        ptx::fence_async_shared();
        __syncwarp();
        if (lane == 0) ptx::mbarrier_arrive(smem.state_ring.full(export_place));
      }
      if (values) smem.value_ring.wait_full(value_place);
      load_value_columns(operand, ptx::shared_address(smem.values[value_place.stage][slice]), offsets, warp);
      smem.square_ring.wait_full(square_place);
      ptx::wgmma_wait<0>();
      ptx::wgmma_keep(y);
      ptx::wgmma_keep(packed_state);

      make_residuals(operand, y, scalars[kGamma], scalars[kBeta], c);
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
      ptx::wgmma_keep(state);
      ptx::wgmma_wait<0>();
      ptx::wgmma_keep(y);
      ptx::wgmma_keep(operand);

      pack_scaled_by_token(operand, y, scalars[kEnd], c);
      ptx::wgmma_keep(operand);
      ptx::wgmma_keep(state);
      ptx::wgmma_fence();
      add_token_rows(state, operand, ptx::wgmma_descriptor(k_tile, kSquareTileBytes));
      ptx::wgmma_commit();
      if constexpr (kOutput) {
        uint32_t writes[16];
        pack_accumulator(writes, y);
        smem.write_ring.wait_empty(export_place);
        store_token_rows_transposed<64 * kSlices>(ptx::shared_address(smem.exports.writes), writes, offsets,
                                                  64 * slice + 16 * warp);
        ptx::fence_async_shared();
        __syncwarp();
        if (lane == 0) ptx::mbarrier_arrive(smem.write_ring.full(export_place));
      }
      ptx::wgmma_wait<0>();
      ptx::wgmma_keep(state);
      ptx::wgmma_keep(operand);
      __syncwarp();
      if (lane == 0) {
        smem.key_ring.release(key_place);
        smem.square_ring.release(square_place);
      }
      pack_accumulator(packed_state, state);
      key_place.advance();
      value_place.advance();
      square_place.advance();
      export_place.advance();
    }
  }
};

}  // namespace cake::gdn
