// wy on Hopper: T = (I + A)^-1 and the scalars of every chunk and value head, as cake/gdn/any/wy.cuh. No P: who needs it makes
// it where Q and K are.
//
// A CTA of a warpgroup takes every so many-th chunk and key head: K K^T once, by wgmma, then the value heads of the group, two at a
// time, whose dependent steps are long: each has half of the lanes where diagonal blocks are inverted, and half of the warps where
// products follow. K of the next chunk arrives meanwhile. Results leave by bulk copies. Rows past the end of the sequence are zero
// in A, T is the identity there.
// reads   k, summed gates, beta
// writes  T, scalars: 9 KB a value head
// barriers  K arrived: an mbarrier | scalars written, copies of the heads before have read, K read | N and D written: all threads |
//           N read | T written: those of a head. Corners of N are read by the warp that wrote them: __syncwarp
#pragma once

#include "cake/gdn/sm90/block_inverse.cuh"
#include "cake/gdn/sm90/chunk_matrices.cuh"
#include "cake/gdn/smem_sizes.h"
#include "cake/ptx/cta.cuh"
#include "cake/ptx/grid_dependency.cuh"
#include "cake/ptx/mbarrier.cuh"

namespace cake::gdn {

// Two value heads at a time. Scalars leave while those of the next two are made.
struct NativeWySmem {
  alignas(1024) char k[kTokenTileBytes];
  BlockInverseTile tile[2];  // in the end T: of its own head, or with one head the other's
  BlockInverseScalars of_tokens[2];
  alignas(16) ChunkScalars scalars[2][2];
  float powers[kChunk];  // of two, by which keys are scaled
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

// Sequences are rows, or all lie in one. The shuffles say that a warp's lanes agree: then what follows is made once a warp.
__device__ __forceinline__ WyItem item_of(const WyParams& p, const WyPlace& place, const ChunkEntry& entry) {
  const int tokens = __shfl_sync(~0u, entry.tokens, 0), first_token = __shfl_sync(~0u, entry.first_token, 0);
  const int row = first_token < p.heads.tokens_per_row ? 0 : __shfl_sync(~0u, entry.sequence, 0);
  return {place.chunk, place.key_head, tokens, {row, first_token - row * p.heads.tokens_per_row}};
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

// FP16 has room for keys of a chunk with norms between 2^-5 and 2^5: beta_i |k_i|^2 is at most 2, so N_ij is at most 2 |k_j| / |k_i|.
// Where there are others, all are brought to norms of about 1 by powers of two: keys 2^s_i k_i and beta_i 2^(-2 s_i) give
// N_ij 2^(s_j - s_i), and T_ij 2^(s_j - s_i). T's decays, 2^(b_i - b_j), take that back when s_i is added to b_i.
struct KeyNorms {
  float square[2];  // of rows g and g + 8 of the warp, where this lane has them
  bool mine;

  __device__ __forceinline__ KeyNorms(const float (&kk)[32], int warp, int lane) {
    const int g = lane >> 2;
    mine = (lane & 3) == g >> 1;
    const bool odd = g & 1;
#pragma unroll
    for (int block = 0; block < 4; ++block) {
      if (block > 0 && block != warp) continue;
      square[0] = odd ? kk[8 * block + 1] : kk[8 * block];
      square[1] = odd ? kk[8 * block + 7] : kk[8 * block + 6];
    }
  }

  __device__ __forceinline__ bool far_from_1() const {
    bool far = false;
#pragma unroll
    for (int i = 0; i < 2; ++i) far |= (square[i] > 0x1p10f || square[i] < 0x1p-10f) && square[i] != 0.f;
    return far && mine;
  }

  // What brings a row's norm to about 1.
  __device__ __forceinline__ float power_of_two(int i) const {
    const int exponent = (__float_as_int(square[i]) >> 23 & 0xff) - 127;
    return square[i] == 0.f ? 1.f : __int_as_float((127 + max(-60, min(60, -(exponent >> 1)))) << 23);
  }
};

// K K^T of keys brought to norms of about 1.
__device__ __forceinline__ void scale_keys(float (&kk)[32], NativeWySmem& smem, const KeyNorms& norms, int thread) {
  const int lane = thread & 31, row = 16 * (thread >> 5) + (lane >> 2);
  if (norms.mine) {
#pragma unroll
    for (int i = 0; i < 2; ++i) smem.powers[row + 8 * i] = norms.power_of_two(i);
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 32; ++i) {  // one load after the other: this is rare, and registers are not
    const auto power = [&](int of) { return *const_cast<const volatile float*>(smem.powers + of); };
    kk[i] = __fmul_rn(__fmul_rn(kk[i], power(row + 8 * (i >> 1 & 1))), power(8 * (i >> 2) + 2 * (lane & 3) + (i & 1)));
  }
}

// Scalars and decays of such keys. The scalars as they were go where a copy would have taken them.
__device__ __forceinline__ void scale_scalars(NativeWySmem& smem, ChunkScalars (&scalars)[2], const WyParams& p, int64_t record,
                                              int heads, int thread) {
  const int half = thread >> 6, token = thread & 63;
  if (half < heads) {
    ChunkScalars& own = scalars[half];
    float* to = p.scalars + (record + half) * kScalarFloats + token;
#pragma unroll 1
    for (int i = 0; i < kScalarRows; ++i) to[i * kChunk] = own[i][token];
    const float power = smem.powers[token], inverse = __int_as_float((254 << 23) - __float_as_int(power));
    const float b = own[kLog2Decay][token], shift = static_cast<float>((__float_as_int(power) >> 23) - 127);
    own[kBeta][token] = __fmul_rn(__fmul_rn(own[kBeta][token], inverse), inverse);
    own[kLog2Decay][token] = __fadd_rn(b, shift);
    store_decays(smem.of_tokens[half].decays, b, shift, token);
  }
  __syncthreads();
}

// N of one or two heads, one after the other: four warps run four such functions.
template <int kWarp>
__device__ __forceinline__ void make_coefficients(uint32_t (&between)[2], NativeWySmem& smem, const ChunkScalars (&scalars)[2],
                                                  int heads, const float (&kk)[32], const tile::LaneOffsets& offsets, int lane) {
#pragma unroll 1
  for (int h = 0; h < heads; ++h) {
    const uint32_t made = store_coefficients<kWarp>(smem.tile[h].bytes, smem.of_tokens[h], scalars[h], kk, offsets, lane);
    between[0] = h == 0 ? made : between[0];
    between[1] = made;
  }
}

// T of one of two heads, by half of the warps: one the first and the last row, one the others. T goes where N was when neither
// reads N any more.
__device__ __forceinline__ void make_two(NativeWySmem& smem, const ChunkScalars& scalars, int warp, const tile::LaneOffsets& offsets,
                                         int lane) {
  const int head = warp >> 1;
  char* const tile = smem.tile[head].bytes;
  const BlockInverseScalars& of_tokens = smem.of_tokens[head];
  const auto n_is_read = [=] { ptx::named_barrier_sync(1 + head, kWyThreads / 2); };
  if (warp & 1) {
    InverseRow<3> last;
    last.make(tile, of_tokens, scalars, offsets, lane);
    n_is_read();
    last.carry(of_tokens, lane);
    last.store(tile, offsets);
    InverseRow<0> first;  // made of its own rows alone, which no other warp writes
    first.make(tile, of_tokens, scalars, offsets, lane);
    first.carry(of_tokens, lane);
    first.store(tile, offsets);
  } else {
    InverseRow<1> second;
    InverseRow<2> third;
    second.make(tile, of_tokens, scalars, offsets, lane);
    third.make(tile, of_tokens, scalars, offsets, lane);
    n_is_read();
    second.carry(of_tokens, lane);
    third.carry(of_tokens, lane);
    second.store(tile, offsets);
    third.store(tile, offsets);
  }
}

template <int kRow>
__device__ __forceinline__ void make_row(NativeWySmem& smem, const ChunkScalars& scalars, const tile::LaneOffsets& offsets,
                                         int lane) {
  InverseRow<kRow> row;
  row.make(smem.tile[0].bytes, smem.of_tokens[0], scalars, offsets, lane);
  ptx::named_barrier_sync(1, kWyThreads);  // what is carried has been found
  row.carry(smem.of_tokens[0], lane);
  row.store(smem.tile[1].bytes, offsets);
}

// T of one head, a row a warp, where the other head's N would be.
__device__ __forceinline__ void make_one(NativeWySmem& smem, const ChunkScalars& scalars, int warp, const tile::LaneOffsets& offsets,
                                         int lane) {
  switch (warp) {
    case 0: make_row<0>(smem, scalars, offsets, lane); break;
    case 1: make_row<3>(smem, scalars, offsets, lane); break;
    case 2: make_row<1>(smem, scalars, offsets, lane); break;
    default: make_row<2>(smem, scalars, offsets, lane); break;
  }
}

// T is what the next stage reads first of all that this one leaves in L2.
__device__ __forceinline__ void store_head(const WyParams& p, int64_t record, const BlockInverseTile& inverse,
                                           const ChunkScalars& scalars, bool scaled) {
  ptx::bulk_store(p.inverse + record * kSquareTileBytes, inverse.bytes, kSquareTileBytes, ptx::kEvictLast);
  if (!scaled) ptx::bulk_store(p.scalars + record * kScalarFloats, scalars, 4 * kScalarFloats);
  ptx::bulk_commit();
}

}  // namespace cake::gdn

extern "C" __global__ void __launch_bounds__(cake::gdn::kWyThreads, cake::gdn::kNativeWyCtasPerMultiprocessor)
    wy_sm90(const __grid_constant__ cake::gdn::MappedWyParams mapped) {
  using namespace cake;
  using namespace cake::gdn;
  NativeWySmem& smem = *reinterpret_cast<NativeWySmem*>(smem_bytes);
  const WyParams& p = mapped.wy;
  const int thread = threadIdx.x, warp = __shfl_sync(~0u, thread >> 5, 0);
  ptx::launch_dependents();
  for (int unit = thread; unit < kSquareTileBytes / 16; unit += kWyThreads) {
#pragma unroll
    for (int h = 0; h < 2; ++h) reinterpret_cast<uint4*>(smem.tile[h].bytes)[unit] = uint4{};
  }
  ptx::fence_async_shared();
  if (thread == 0) {
    ptx::mbarrier_init(&smem.k_full, 1);
    ptx::mbarrier_init_fence();
  }
  __syncthreads();
  ptx::wait_for_predecessor();
  const int group = p.heads.group, key_heads = p.heads.key_heads;
  const WyPlace step = wy_place(gridDim.x, key_heads);
  WyPlace place = wy_place(blockIdx.x, key_heads);
  WyItem item = item_of(p, place, place.entry(p.tables));
  if (!item.exists()) return;
  if (thread == 0) item.load_keys(smem, &mapped.k);
  HeadGates gates = item.gates(p, 0, thread);
  place.advance(step, key_heads);
  WyItem next = item_of(p, place, place.entry(p.tables));
  place.advance(step, key_heads);
  ChunkEntry next_entry = place.entry(p.tables);  // of the item behind `next`

  const int half = warp >> 1, token = thread & 63;  // whose scalars this thread makes
  uint32_t turns = 0;  // parities: of the scalars' places, and, one bit up, of the keys' barrier
#pragma unroll 1
  for (;;) {
    ptx::mbarrier_wait(&smem.k_full, turns >> 1);
    turns ^= 2;
    if (item.tokens < kChunk) zero_rows_past(smem, item.tokens, thread);
    float kk[32];
    const uint64_t keys = ptx::wgmma_descriptor(ptx::shared_address(smem.k));
    multiply_rows_keys(kk, keys, keys);
    ptx::wgmma_wait<0>();
    ptx::wgmma_keep(kk);
    bool scaled = false;
#pragma unroll 1
    for (int member = 0; member < group; member += 2) {
      const int64_t record = item.first_record(p.heads) + member;
      const int heads = min(2, group - member);
      ChunkScalars(&scalars)[2] = smem.scalars[turns & 1];
      turns ^= 1;
      if (half < heads) {
        const float b = store_scalars(scalars[half], gates, p.beta, item.tokens, token);
        store_decays(smem.of_tokens[half].decays, b, 0.f, token);
      }
      const bool last = member + 2 >= group;
      const WyItem wanted{last ? next.chunk : item.chunk, last ? next.key_head : item.key_head, last ? next.tokens : item.tokens,
                          last ? next.at : item.at};
      gates = wanted.gates(p, last ? 0 : member + 2, thread);
      if (token == 0) ptx::bulk_wait_read<0>();
      const KeyNorms norms(kk, warp, thread & 31);  // scaled ones are not far from 1
      scaled = __shfl_sync(~0u, __syncthreads_or(scaled || norms.far_from_1()), 0);
      if (scaled) {
        if (member == 0) scale_keys(kk, smem, norms, thread);
        scale_scalars(smem, scalars, p, record, heads, thread);
      }
      if (member == 0 && thread == 0 && next.exists()) next.load_keys(smem, &mapped.k);

      const int lane = ptx::opaque(thread & 31);  // addresses are cheaper to make than to keep
      const tile::LaneOffsets offsets(lane);
      uint32_t between[2] = {};
      switch (warp) {
        case 0: make_coefficients<0>(between, smem, scalars, heads, kk, offsets, lane); break;
        case 1: make_coefficients<1>(between, smem, scalars, heads, kk, offsets, lane); break;
        case 2: make_coefficients<2>(between, smem, scalars, heads, kk, offsets, lane); break;
        default: make_coefficients<3>(between, smem, scalars, heads, kk, offsets, lane); break;
      }
      __syncwarp();
      invert_diagonals(smem.tile, between, heads, warp, lane);
      __syncthreads();
      if (half < heads) find_carried(smem.of_tokens[half], scalars[half], token);
      if (heads == 2) {
        make_two(smem, scalars[half], warp, offsets, lane);
        ptx::fence_async_shared();
        ptx::named_barrier_sync(1 + half, kWyThreads / 2);
        if (token == 0) store_head(p, record + half, smem.tile[half], scalars[half], scaled);
      } else {
        make_one(smem, scalars[0], warp, offsets, lane);
        ptx::fence_async_shared();
        __syncthreads();
        if (thread == 0) store_head(p, record, smem.tile[1], scalars[0], scaled);
      }
    }
    if (!next.exists()) break;
    item = next;
    next = item_of(p, place, next_entry);
    place.advance(step, key_heads);
    next_entry = place.entry(p.tables);
  }
  if (token == 0) ptx::bulk_wait_read<0>();
}
