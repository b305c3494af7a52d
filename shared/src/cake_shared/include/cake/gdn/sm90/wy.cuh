// wy on Hopper: T = (I + A)^-1, P = scale * Gamma * (Q K^T) and the scalars of every chunk and value head, as
// cake/gdn/any/wy.cuh; without P where `attention` is null, and then Q is not read.
//
// One CTA of a warpgroup per chunk and key head: K K^T and Q K^T once, by wgmma, then the value heads of the group. A warp
// owns 16 rows. Results leave by bulk copies. Rows past the end of the sequence are zero in A and P, T is the identity there.
// reads   q, k, summed gates, beta
// writes  T, P, scalars: 17 KB a value head
// barriers  K, Q arrived | copies of the head before have read | scalars written | A, P, diagonal inverses written | T
//           written: all threads. A diagonal block is read by the warp that wrote it: __syncwarp
#pragma once

#include "cake/gdn/sm90/chunk_matrices.cuh"
#include "cake/gdn/smem_sizes.h"
#include "cake/ptx/grid_dependency.cuh"

namespace cake::gdn {

struct NativeWySmem {
  union {
    struct {
      alignas(1024) char k[kTokenTileBytes];
      char q[kTokenTileBytes];
    } rows;
    struct {
      alignas(1024) char inverse[kSquareTileBytes];
      char attention[kSquareTileBytes];
      BlockInverseSmem scratch;
    } out;
  };
  alignas(16) ChunkScalars scalars;
};
static_assert(sizeof(NativeWySmem) == kNativeWySmemBytes);

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

  const uint32_t k_tile = ptx::shared_address(smem.rows.k), q_tile = ptx::shared_address(smem.rows.q);
  load_rows_async<kWyThreads, 16>(k_tile, p.k, at, chunk.tokens, key_head, 0, thread);
  const bool attention = p.attention != nullptr;
  if (attention) load_rows_async<kWyThreads, 16>(q_tile, p.q, at, chunk.tokens, key_head, 0, thread);
  ptx::cp_async_commit();
  HeadGates gates = load_head_gates(p.sums, p.beta, at, chunk.tokens, first_record, first_head, thread);
  ptx::cp_async_wait<0>();
  ptx::fence_async_shared();
  __syncthreads();

  float kk[32], qk[32];
  const uint64_t k_at = ptx::wgmma_descriptor(k_tile), q_at = ptx::wgmma_descriptor(q_tile);
  multiply_rows_keys(kk, k_at, k_at);
  if (attention) multiply_rows_keys(qk, q_at, k_at);
  ptx::wgmma_wait<0>();
  ptx::wgmma_keep(kk);
  ptx::wgmma_keep(qk);

  const tile::LaneOffsets offsets(lane);
#pragma unroll 1
  for (int member = 0; member < p.heads.group; ++member) {
    const int64_t record = first_record + member;
    if (member > 0) {
      if (thread == 0) ptx::bulk_wait_read<0>();
      __syncthreads();
    }
    store_scalars(smem.scalars, gates, p.beta.top, chunk.tokens, thread);
    if (member + 1 < p.heads.group) {
      gates = load_head_gates(p.sums, p.beta, at, chunk.tokens, record + 1, first_head + member + 1, thread);
    }
    __syncthreads();  // in the first round also: everyone is past the K and Q tiles

    store_coefficient_rows(smem.out.scratch, smem.scalars, kk, warp, offsets, lane);
    if (attention) store_attention_rows(smem.out.attention, smem.scalars, qk, p.scale, warp, offsets, lane);
    __syncwarp();
    invert_diagonal(smem.out.scratch, warp, lane);
    __syncthreads();
    // The longest row moves from warp to warp, so that CTAs of one SM do not load the same scheduler.
    store_inverse_rows(smem.out.scratch, smem.out.inverse, (warp + chunk_index + member) & 3, offsets);
    ptx::fence_async_shared();
    __syncthreads();
    if (thread == 0) {
      ptx::bulk_store(p.inverse + record * kSquareTileBytes, smem.out.inverse, kSquareTileBytes);
      if (attention) ptx::bulk_store(p.attention + record * kSquareTileBytes, smem.out.attention, kSquareTileBytes);
      ptx::bulk_store(p.scalars + record * kScalarFloats, smem.scalars, 4 * kScalarFloats);
      ptx::bulk_commit();
    }
  }
  if (thread == 0) ptx::bulk_wait_read<0>();
}
