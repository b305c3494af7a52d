// What the native chains share: how a CTA finds its work, how stages are fed, and how a warpgroup's state and tiles travel.
//
// A warpgroup owns 64 value columns and keeps S^T (64 x 128) in registers as the accumulator of its products; a CTA has one or two such
// warpgroups, and others that load, a stage a chunk, and store for them. Columns never mix, so one or two per CTA give the same bits.
#pragma once

#include "cake/gdn/any/chain_products.cuh"
#include "cake/gdn/sm90/backward_products.cuh"

namespace cake::gdn::sm90 {

inline constexpr int kStageScalars = 3;  // gamma, e, beta

// The segment and head of a CTA, and its share of the value columns.
struct ChainPlace {
  SegmentPlace segment;
  HalfChunks half;  // that it runs
  int last_tokens;  // of the segment's last chunk
  int head;
  int first_column;
  bool forgets = false;  // its chunks leave nothing of a gradient behind them

  __device__ __forceinline__ int last_chunk() const { return half.first + half.chunks - 1; }
  __device__ __forceinline__ bool begins_segment() const { return half.first == segment.first_chunk; }
  __device__ __forceinline__ bool ends_segment() const {
    return half.first + half.chunks == segment.first_chunk + segment.chunks;
  }
  __device__ __forceinline__ int tokens_of(int chunk) const {
    return chunk == segment.first_chunk + segment.chunks - 1 ? last_tokens : kChunk;
  }
  __device__ __forceinline__ int64_t tile(const WavePart& part, const Heads& heads, int chunk) const {
    return part.tile(heads.group, half.first_record + chunk - half.first, head);
  }
  __device__ __forceinline__ TokenPlace place_of_chunk(int chunk, const Heads& heads) const {
    return place_of(segment.first_token + (chunk - segment.first_chunk) * kChunk, heads.tokens_per_row);
  }
};

template <int kGroups>
__device__ __forceinline__ ChainPlace chain_place(const PackTables& tables, const Heads& heads, const WavePart& part) {
  constexpr int kSlices = 2 / kGroups;
  const uint32_t work = blockIdx.x / kSlices, value_heads = part.value_heads(heads.group), row = work / value_heads;
  const SegmentPlace segment = segment_place(tables, row);
  return {segment, half_of(part.half, segment.first_chunk, segment.chunks), tables.segments[row].tokens - (segment.chunks - 1) * kChunk,
          part.first_value_head(heads.group) + static_cast<int>(work - row * value_heads),
          static_cast<int>(blockIdx.x % kSlices) * 64};
}

// Offset of the matrix at a segment's cut, in an array [cut slots, value heads of the part, 128, 128].
__device__ __forceinline__ int64_t cut_offset(const ChainPlace& work, const WavePart& part, const Heads& heads) {
  return part.tile(heads.group, cut_slot(work.segment.first_chunk), work.head) * kStateElements;
}

// How many of a segment's first chunks forget any gradient behind them, by one warp; 0 if all of them together do not.
__device__ __forceinline__ int forgetting_first_chunks(const float* scalars, const Heads& heads, const SegmentPlace& segment, int head,
                                                       int lane) {
  float before = 0.f;
  for (int done = 0; done < segment.chunks; done += 32) {
    const bool valid = done + lane < segment.chunks;
    const int64_t record = int64_t{segment.first_chunk + (valid ? done + lane : 0)} * heads.value_heads + head;
    float sum = valid ? scalars[record * kScalarFloats + kLog2Decay * kChunk + kChunk - 1] : 0.f;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const float other = __shfl_up_sync(~0u, sum, step);
      if (lane >= step) sum = __fadd_rn(sum, other);
    }
    sum = __fadd_rn(sum, before);
    const unsigned reached = __ballot_sync(~0u, valid && sum <= kForgottenLog2);
    if (reached != 0) return done + __ffs(static_cast<int>(reached));
    before = __shfl_sync(~0u, sum, 31);
  }
  return 0;
}

// A stage in turn: index and parity of the phase in which it is filled.
template <int kStages>
struct Turn {
  int stage = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

template <int kStages>
struct StageBarriers {
  uint64_t full[kStages];  // every feeding warp's rows, and the bytes of the tiles
  uint64_t free[kStages];  // its readers are done

  __device__ __forceinline__ void init(int feeding_warps, int readers) {
    for (int i = 0; i < kStages; ++i) {
      ptx::mbarrier_init(&full[i], feeding_warps + 1);
      ptx::mbarrier_init(&free[i], readers);
    }
  }
};

// What a warpgroup's columns of a chunk leave by, one warp for each warpgroup: the chain does not wait for its stores. Those who stage
// fence.
template <int kGroups, int kStages>
struct StoreBarriers {
  uint64_t state_full[kGroups], state_free[kGroups];  // the staging of a state
  uint64_t tokens_full[kGroups][kStages];             // rows in their stage, which the storing warp frees

  __device__ __forceinline__ void init() {
    for (int group = 0; group < kGroups; ++group) {
      ptx::mbarrier_init(&state_full[group], 4);
      ptx::mbarrier_init(&state_free[group], 1);
      for (int i = 0; i < kStages; ++i) ptx::mbarrier_init(&tokens_full[group][i], 4);
    }
  }
};

// The feeding warpgroup: chunks first, first + step, ..., `count` of them. copy_tiles(stage, chunk) is called by one thread and returns
// nothing; it says the bytes and starts their copies. copy_stage_rows(stage, chunk) is called by all threads. A stage's rows are published
// when those of the next are on their way.
template <int kStages, class CopyTiles, class CopyRows>
__device__ __forceinline__ void feed_stages(StageBarriers<kStages>& barriers, int first, int step, int count, int thread,
                                            CopyTiles copy_tiles, CopyRows copy_stage_rows) {
  Turn<kStages> turn;
  int published = 0;
  auto publish = [&] {
    ptx::fence_async_shared();
    __syncwarp();
    if ((thread & 31) == 0) ptx::mbarrier_arrive(&barriers.full[published]);
    published = published + 1 == kStages ? 0 : published + 1;
  };
#pragma unroll 1
  for (int i = 0; i < count; ++i, turn.advance()) {
    ptx::mbarrier_wait(&barriers.free[turn.stage], turn.parity ^ 1);
    if (thread == 0) copy_tiles(turn.stage, first + i * step);
    copy_stage_rows(turn.stage, first + i * step);
    ptx::cp_async_commit();
    if (i > 0) {
      ptx::cp_async_wait<1>();
      publish();
    }
  }
  ptx::cp_async_wait<0>();
  publish();
}

// Visits (k, v) of every element of a warpgroup's state that this lane holds; `first_column` is the warp's.
template <class Visit>
__device__ __forceinline__ void for_state(int first_column, int lane, Visit visit) {
  const int g = lane >> 2, c = lane & 3;
#pragma unroll
  for (int j = 0; j < 16; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) visit(4 * j + i, 8 * j + 2 * c + (i & 1), first_column + g + 8 * (i >> 1));
  }
}

__device__ __forceinline__ void load_state(State& state, const float* matrix, int64_t k_stride, int64_t v_stride, int first_column,
                                           int lane) {
  for_state(first_column, lane, [&](int i, int k, int v) { state[i] = matrix[k * k_stride + v * v_stride]; });
}

__device__ __forceinline__ void store_state(const State& state, float* matrix, int64_t k_stride, int64_t v_stride, int first_column,
                                            int lane) {
  for_state(first_column, lane, [&](int i, int k, int v) { matrix[k * k_stride + v * v_stride] = state[i]; });
}

__device__ __forceinline__ void scale_state(State& state, float by) {
#pragma unroll
  for (int i = 0; i < 64; ++i) state[i] = __fmul_rn(by, state[i]);
}

// A warpgroup's half of a state tile in its staging: two blocks of 64 value columns and 64 key columns.
inline constexpr uint32_t kHalfStateBlockBytes = 64 * 128;

__device__ __forceinline__ void stage_state(char* staging, const uint32_t (&state)[32], int block, const LaneOffsets& offsets) {
  const uint32_t shared = ptx::shared_address(staging);
#pragma unroll
  for (int s = 0; s < 8; ++s) {
    ptx::stmatrix_x4(tile::fragment_address<64>(shared, offsets.row_major, 16 * block, 2 * s), state[4 * s], state[4 * s + 1],
                     state[4 * s + 2], state[4 * s + 3]);
  }
}

// By one thread, behind a barrier of those who staged it.
__device__ __forceinline__ void store_staged_state(char* global_tile, const char* staging, int first_column) {
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    ptx::bulk_store(global_tile + i * kStateBlockBytes + first_column * 128, staging + i * kHalfStateBlockBytes,
                    kHalfStateBlockBytes);
  }
  ptx::bulk_commit();
}

// Puts the warp's 16 value columns of all tokens into a block of 64 columns of a token tile.
__device__ __forceinline__ void stage_tokens(char* block_tile, const uint32_t (&a)[16], int block, const LaneOffsets& offsets) {
  const uint32_t shared = ptx::shared_address(block_tile);
#pragma unroll
  for (int s = 0; s < 4; ++s) {
    ptx::stmatrix_x4_trans(tile::fragment_address<kChunk>(shared, offsets.col_major, 16 * s, 2 * block), a[4 * s], a[4 * s + 1],
                           a[4 * s + 2], a[4 * s + 3]);
  }
}

// The left operand (16 value columns a warp x 64 tokens) of a block of 64 columns of a token tile.
__device__ __forceinline__ void load_tokens(uint32_t (&a)[16], const char* block_tile, int block, const LaneOffsets& offsets) {
  const uint32_t shared = ptx::shared_address(block_tile);
#pragma unroll
  for (int s = 0; s < 4; ++s) {
    uint32_t part[4];
    tile::load_a_trans<kChunk>(part, shared, offsets, 16 * s, 2 * block);
#pragma unroll
    for (int i = 0; i < 4; ++i) a[4 * s + i] = part[i];
  }
}

// Words of a [value column][token] operand or accumulator: pair i has tokens token_of(i, c) and the next.
__device__ __forceinline__ constexpr int token_of(int pair, int c) { return 8 * (pair >> 1) + 2 * c; }

__device__ __forceinline__ float2 pair_of(const float* per_token, int pair, int c) {
  return *reinterpret_cast<const float2*>(per_token + token_of(pair, c));
}

}  // namespace cake::gdn::sm90
