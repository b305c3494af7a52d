// wy on Hopper: T = (I + A)^-1 and the scalars of every chunk and value head, as cake/gdn/any/wy.cuh. No P: who needs it makes
// it where Q and K are.
//
// One CTA of a warpgroup per chunk and key head: K K^T once, by wgmma, then the value heads of the group, two at a time, whose
// dependent steps are long: each has half of the lanes where diagonal blocks are inverted, and half of the warps where products
// follow. A warp owns 16 rows of A. Results leave by bulk copies. Rows past the end of the sequence are zero in A, T is the
// identity there.
// reads   k, summed gates, beta
// writes  T, scalars: 9 KB a value head
// barriers  K arrived | copies of the heads before have read | scalars written | A, diagonal inverses written | A read | T
//           written: all threads. A diagonal block is read by the warp that wrote it: __syncwarp
#pragma once

#include "cake/gdn/sm90/chunk_matrices.cuh"
#include "cake/gdn/smem_sizes.h"
#include "cake/ptx/cta.cuh"
#include "cake/ptx/grid_dependency.cuh"

namespace cake::gdn {

// Two value heads at a time.
struct NativeWySmem {
  union {
    alignas(1024) char k[kTokenTileBytes];
    struct {
      BlockInverseSmem scratch[2];  // in the end T where first words were: its own, or with one head the other's
      DiagonalBlocks diagonal[2];
    } out;
  };
  alignas(16) ChunkScalars scalars[2];
};
static_assert(sizeof(NativeWySmem) == kNativeWySmemBytes);

// T of two heads, each by half of the warps: one the last row, one the others. T goes where A was when nobody reads A any more.
__device__ __forceinline__ void make_two(NativeWySmem& smem, int role, const tile::LaneOffsets& offsets, int lane) {
  const BlockInverseSmem& matrix = smem.out.scratch[role & 1];
  const DiagonalBlocks& diagonal = smem.out.diagonal[role & 1];
  char* const inverse = smem.out.scratch[role & 1].high;
  const auto a_is_read = [] { ptx::named_barrier_sync(1, kWyThreads); };  // from two places, as no __syncthreads may be
  if (role < 2) {
    InverseRow<3> last;
    last.make(matrix, diagonal, offsets, lane);
    last.carry(lane);
    a_is_read();
    last.store(inverse, offsets);
  } else {
    InverseRow<0> first;
    InverseRow<1> second;
    InverseRow<2> third;
    first.make(matrix, diagonal, offsets, lane);
    second.make(matrix, diagonal, offsets, lane);
    third.make(matrix, diagonal, offsets, lane);
    first.carry(lane);
    second.carry(lane);
    third.carry(lane);
    a_is_read();
    first.store(inverse, offsets);
    second.store(inverse, offsets);
    third.store(inverse, offsets);
  }
}

template <int kRow>
__device__ __forceinline__ void make_row(NativeWySmem& smem, const tile::LaneOffsets& offsets, int lane) {
  InverseRow<kRow> row;
  row.make(smem.out.scratch[0], smem.out.diagonal[0], offsets, lane);
  row.carry(lane);
  row.store(smem.out.scratch[1].high, offsets);
}

// T of one head, a row a warp, where the other head's A would be.
__device__ __forceinline__ void make_one(NativeWySmem& smem, int role, const tile::LaneOffsets& offsets, int lane) {
  switch (role) {
    case 0: make_row<3>(smem, offsets, lane); break;
    case 1: make_row<2>(smem, offsets, lane); break;
    case 2: make_row<1>(smem, offsets, lane); break;
    default: make_row<0>(smem, offsets, lane); break;
  }
}

}  // namespace cake::gdn

extern "C" __global__ void __launch_bounds__(cake::gdn::kWyThreads, 4)
    wy_sm90(const __grid_constant__ cake::gdn::WyParams p) {
  using namespace cake;
  using namespace cake::gdn;
  NativeWySmem& smem = *reinterpret_cast<NativeWySmem*>(smem_bytes);
  const int thread = threadIdx.x, warp = __shfl_sync(~0u, thread >> 5, 0), lane = thread & 31;
  ptx::launch_dependents();
  ptx::wait_for_predecessor();
  const int64_t chunk_index = blockIdx.x / static_cast<uint32_t>(p.heads.key_heads);
  const int key_head = static_cast<int>(blockIdx.x - chunk_index * p.heads.key_heads);
  const ChunkEntry chunk = p.tables.chunks[chunk_index];
  if (chunk.sequence < 0) return;
  const TokenPlace at = place_of(chunk.first_token, p.heads.tokens_per_row);
  const int first_head = key_head * p.heads.group;
  const int64_t first_record = chunk_index * p.heads.value_heads + first_head;

  const uint32_t k_tile = ptx::shared_address(smem.k);
  load_rows_async<kWyThreads, 16>(k_tile, p.k, at, chunk.tokens, key_head, 0, thread);
  ptx::cp_async_commit();
  const int half = thread >> 6, token = thread & 63;  // whose scalars this thread makes
  HeadGates gates = load_head_gates(p.sums, p.beta, at, chunk.tokens, first_record + half, first_head + half,
                                    half < p.heads.group ? token : kChunk);
  ptx::cp_async_wait<0>();
  ptx::fence_async_shared();
  __syncthreads();

  float kk[32];
  const uint64_t k_at = ptx::wgmma_descriptor(k_tile);
  multiply_rows_keys(kk, k_at, k_at);
  ptx::wgmma_wait<0>();
  ptx::wgmma_keep(kk);

  const tile::LaneOffsets offsets(lane);
  // The longest rows move from warp to warp, so that CTAs of one SM do not load the same scheduler.
  const int role = (warp + chunk_index) & 3;
#pragma unroll 1
  for (int member = 0; member < p.heads.group; member += 2) {
    const int64_t record = first_record + member;
    const int heads = min(2, p.heads.group - member);
    if (member > 0) {
      if (thread == 0) ptx::bulk_wait_read<0>();
      __syncthreads();
    }
    if (half < heads) store_scalars(smem.scalars[half], gates, p.beta.top, chunk.tokens, token);
    if (member + 2 + half < p.heads.group) {
      gates = load_head_gates(p.sums, p.beta, at, chunk.tokens, record + 2 + half, first_head + member + 2 + half, token);
    }
    __syncthreads();  // in the first round also: everyone is past the K tile

#pragma unroll 1
    for (int h = 0; h < heads; ++h) {
      store_coefficient_rows(smem.out.scratch[h], smem.out.diagonal[h], smem.scalars[h], kk, warp, offsets, lane);
    }
    __syncwarp();
    invert_diagonals(smem.out.scratch, smem.out.diagonal, heads, warp, lane);
    __syncthreads();
    if (heads == 2) {
      make_two(smem, role, offsets, lane);
    } else {
      make_one(smem, role, offsets, lane);
    }
    ptx::fence_async_shared();
    __syncthreads();
    if (thread == 0) {
      for (int h = 0; h < heads; ++h) {
        const int from = heads == 2 ? h : 1;
        ptx::bulk_store(p.inverse + (record + h) * kSquareTileBytes, smem.out.scratch[from].high, kSquareTileBytes);
        ptx::bulk_store(p.scalars + (record + h) * kScalarFloats, smem.scalars[h], 4 * kScalarFloats);
      }
      ptx::bulk_commit();
    }
  }
  if (thread == 0) ptx::bulk_wait_read<0>();
}
