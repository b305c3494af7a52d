// wy on Hopper: T = (I + A)^-1 and the scalars of every chunk and value head, as cake/gdn/any/wy.cuh. No P: who needs it makes
// it where Q and K are.
//
// A CTA of a warpgroup takes every so many-th chunk and key head: K K^T once, by wgmma, then the value heads of the group, two at a
// time, whose dependent steps are long: each has half of the lanes where diagonal blocks are inverted, and half of the warps
// where products follow. K of the next chunk arrives meanwhile. A warp owns 16 rows of A; which ones moves from chunk to chunk,
// since the lower ones are more work. Results leave by bulk copies. Rows past the end of the sequence are zero in A, T is the
// identity there.
// reads   k, summed gates, beta
// writes  T, scalars: 9 KB a value head
// barriers  K arrived: an mbarrier | scalars written, copies of the heads before have read, K read | A, diagonal inverses written
//           | A read | T written: all threads. A diagonal block is read by the warp that wrote it: __syncwarp
#pragma once

#include "cake/gdn/sm90/chunk_matrices.cuh"
#include "cake/gdn/smem_sizes.h"
#include "cake/ptx/cta.cuh"
#include "cake/ptx/grid_dependency.cuh"
#include "cake/ptx/mbarrier.cuh"

namespace cake::gdn {

// Two value heads at a time. Scalars leave while those of the next two are made.
struct NativeWySmem {
  alignas(1024) char k[kTokenTileBytes];
  BlockInverseSmem scratch[2];  // in the end T where first words were: its own, or with one head the other's
  DiagonalBlocks diagonal[2];
  alignas(16) ChunkScalars scalars[2][2];
  uint64_t k_full;
};
static_assert(sizeof(NativeWySmem) == kNativeWySmemBytes);

// One turn of a CTA.
struct WyItem {
  int chunk, key_head;
  int tokens;  // 0 where there is none
  TokenPlace at;

  // Rows of the table that the pack does not use are its last.
  __device__ __forceinline__ bool exists() const { return tokens > 0; }
  __device__ __forceinline__ int first_head(const Heads& heads) const { return key_head * heads.group; }
  __device__ __forceinline__ int64_t first_record(const Heads& heads) const {
    return int64_t{chunk} * heads.value_heads + first_head(heads);
  }

  // Of the heads `member` and, for the upper half of the threads, the one behind it.
  __device__ __forceinline__ HeadGates gates(const WyParams& p, int member, int thread) const {
    member += thread >> 6;
    if (!exists() || member >= p.heads.group) return {};
    return load_head_gates(p.sums, p.beta, at, tokens, first_record(p.heads) + member, first_head(p.heads) + member,
                           thread & 63);
  }

  __device__ __forceinline__ void load_keys(NativeWySmem& smem, const void* map) const {
    ptx::mbarrier_arrive_expect_bytes(&smem.k_full, kTokenTileBytes);
#pragma unroll
    for (int block = 0; block < 2; ++block) {
      ptx::tensor_load(smem.k + block * kSquareTileBytes, map, {64 * block, key_head, at.token, at.row}, &smem.k_full);
    }
  }
};

// A row of the chunk table and a key head, of which a CTA takes every so many-th: its steps make no division.
struct WyPlace {
  int chunk, key_head;

  __device__ __forceinline__ void advance(const WyPlace& step, int key_heads) {
    chunk += step.chunk;
    key_head += step.key_head;
    if (key_head >= key_heads) {
      key_head -= key_heads;
      ++chunk;
    }
  }

  // What the table says of it; read a turn before it is looked at. Rows that the pack does not use have no tokens.
  __device__ __forceinline__ ChunkEntry entry(const PackTables& tables) const {
    return chunk < tables.chunk_capacity ? tables.chunks[chunk] : ChunkEntry{-1, 0, 0, 0};
  }
};

__device__ __forceinline__ WyPlace wy_place(uint32_t index, int key_heads) {
  const int chunk = static_cast<int>(index / static_cast<uint32_t>(key_heads));
  return {chunk, static_cast<int>(index) - chunk * key_heads};
}

// The shuffles say that a warp's lanes agree: then what follows is made once a warp.
__device__ __forceinline__ WyItem item_of(const WyParams& p, const WyPlace& place, const ChunkEntry& entry) {
  const int tokens = __shfl_sync(~0u, entry.tokens, 0);
  return {place.chunk, place.key_head, tokens, place_of(__shfl_sync(~0u, entry.first_token, 0), p.heads.tokens_per_row)};
}

// The copies may have brought rows of the next sequence, whatever they hold.
__device__ __forceinline__ void zero_rows_past(NativeWySmem& smem, int tokens, int thread) {
  for (int unit = 8 * tokens + thread; unit < 8 * kChunk; unit += kWyThreads) {
#pragma unroll
    for (int block = 0; block < 2; ++block) reinterpret_cast<uint4*>(smem.k + block * kSquareTileBytes)[unit] = uint4{};
  }
  ptx::fence_async_shared();
  __syncthreads();
}

// T of two heads, each by half of the warps: one the first and the last row, one the others. T goes where A was when nobody reads A
// any more.
__device__ __forceinline__ void make_two(NativeWySmem& smem, int role, const tile::LaneOffsets& offsets, int lane) {
  const BlockInverseSmem& matrix = smem.scratch[role & 1];
  const DiagonalBlocks& diagonal = smem.diagonal[role & 1];
  char* const inverse = smem.scratch[role & 1].high;
  const auto a_is_read = [] { ptx::named_barrier_sync(1, kWyThreads); };  // from two places, as no __syncthreads may be
  if (role < 2) {
    InverseRow<3> last;
    last.make(matrix, diagonal, offsets, lane);
    last.carry(lane);
    a_is_read();
    last.store(inverse, offsets);
    InverseRow<0> first;  // made of its own rows alone, which no other warp writes
    first.make(matrix, diagonal, offsets, lane);
    first.carry(lane);
    first.store(inverse, offsets);
  } else {
    InverseRow<1> second;
    InverseRow<2> third;
    second.make(matrix, diagonal, offsets, lane);
    second.carry(lane);
    third.make(matrix, diagonal, offsets, lane);
    third.carry(lane);
    a_is_read();
    second.store(inverse, offsets);
    third.store(inverse, offsets);
  }
}

template <int kRow>
__device__ __forceinline__ void make_row(NativeWySmem& smem, const tile::LaneOffsets& offsets, int lane) {
  InverseRow<kRow> row;
  row.make(smem.scratch[0], smem.diagonal[0], offsets, lane);
  row.carry(lane);
  row.store(smem.scratch[1].high, offsets);
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
    wy_sm90(const __grid_constant__ cake::gdn::MappedWyParams mapped) {
  using namespace cake;
  using namespace cake::gdn;
  NativeWySmem& smem = *reinterpret_cast<NativeWySmem*>(smem_bytes);
  const WyParams& p = mapped.wy;
  const int thread = threadIdx.x, warp = __shfl_sync(~0u, thread >> 5, 0), lane = thread & 31;
  ptx::launch_dependents();
  if (thread == 0) {
    ptx::mbarrier_init(&smem.k_full, 1);
    ptx::mbarrier_init_fence();
  }
  __syncthreads();
  ptx::wait_for_predecessor();
  const WyPlace step = wy_place(gridDim.x, p.heads.key_heads);
  WyPlace place = wy_place(blockIdx.x, p.heads.key_heads);
  WyItem item = item_of(p, place, place.entry(p.tables));
  if (!item.exists()) return;
  if (thread == 0) item.load_keys(smem, &mapped.k);
  HeadGates gates = item.gates(p, 0, thread);
  place.advance(step, p.heads.key_heads);
  ChunkEntry next_entry = place.entry(p.tables);

  const tile::LaneOffsets offsets(lane);
  const int half = thread >> 6, token = thread & 63;  // whose scalars this thread makes
  // CTAs that share a multiprocessor are a quarter of the grid apart.
  int row_block = (warp + blockIdx.x / ((gridDim.x + 3) / 4)) & 3;
  uint32_t turns = 0;  // parities: of the scalars' places, and, one bit up, of the keys' barrier
#pragma unroll 1
  for (;;) {
    ptx::mbarrier_wait(&smem.k_full, turns >> 1);
    turns ^= 2;
    if (item.tokens < kChunk) zero_rows_past(smem, item.tokens, thread);
    float kk[32];
    multiply_keys_keys(kk, ptx::shared_address(smem.k), row_block, offsets);

    const WyItem next = item_of(p, place, next_entry);
    place.advance(step, p.heads.key_heads);
    next_entry = place.entry(p.tables);
#pragma unroll 1
    for (int member = 0; member < p.heads.group; member += 2) {
      const int64_t record = item.first_record(p.heads) + member;
      const int heads = min(2, p.heads.group - member);
      ChunkScalars(&scalars)[2] = smem.scalars[turns & 1];
      turns ^= 1;
      if (half < heads) store_scalars(scalars[half], gates, p.beta.top, item.tokens, token);
      const bool last = member + 2 >= p.heads.group;
      const WyItem wanted{last ? next.chunk : item.chunk, last ? next.key_head : item.key_head, last ? next.tokens : item.tokens,
                          last ? next.at : item.at};
      gates = wanted.gates(p, last ? 0 : member + 2, thread);
      if (thread == 0) ptx::bulk_wait_read<0>();
      __syncthreads();
      if (member == 0 && thread == 0 && next.exists()) next.load_keys(smem, &mapped.k);

#pragma unroll 1
      for (int h = 0; h < heads; ++h) {
        store_coefficient_rows(smem.scratch[h], smem.diagonal[h], scalars[h], kk, row_block, offsets, lane);
      }
      __syncwarp();
      invert_diagonals(smem.scratch, smem.diagonal, heads, row_block, lane);
      __syncthreads();
      if (heads == 2) {
        make_two(smem, row_block, offsets, lane);
      } else {
        make_one(smem, row_block, offsets, lane);
      }
      ptx::fence_async_shared();
      __syncthreads();
      if (thread == 0) {
        // Those of both heads lie behind each other.
        const int first = 2 - heads;
        ptx::bulk_store(p.inverse + record * kSquareTileBytes, smem.scratch[first].high, kSquareTileBytes);
        if (first == 0) ptx::bulk_store(p.inverse + (record + 1) * kSquareTileBytes, smem.scratch[1].high, kSquareTileBytes);
        ptx::bulk_store(p.scalars + record * kScalarFloats, scalars, heads * 4 * kScalarFloats);
        ptx::bulk_commit();
      }
    }
    if (!next.exists()) break;
    item = next;
    row_block = (row_block + 1) & 3;
  }
  if (thread == 0) ptx::bulk_wait_read<0>();
}
