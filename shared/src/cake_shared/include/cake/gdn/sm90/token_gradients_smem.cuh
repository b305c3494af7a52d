// Shared memory, rings and work list of token_gradients_sm90.
#pragma once

#include "cake/gdn/sm90/backward_products.cuh"

namespace cake::gdn::sm90 {

inline constexpr int kThreads = 512;
inline constexpr int kProductWarps = 8;  // warps 0 to 7: two warpgroups that accumulate dQ and dK
inline constexpr int kMatrixWarps = 4;   // warps 8 to 11: one that makes dP and M
enum HelperWarp : int { kTileWarp = kProductWarps + kMatrixWarps, kRowWarp, kValueRowWarp, kFinishWarp };

// A value head brings these tiles, in the order in which they are first needed; an item brings K and Q before them.
enum Tile : int { kGradO, kGradV, kWrites, kEntryState, kExitGrad = kEntryState + 2, kTiles = kExitGrad + 2 };
inline constexpr int kSlots = 12;
inline constexpr uint32_t kSlotBytes = kTokenTileBytes;
static_assert(2 * kSlotBytes == kStateTileBytes, "a state tile takes two slots, one a block of key columns");
inline constexpr int kScalarStages = 4;
inline constexpr int kRowStages = 4;

// Which slots hold what. Slots are filled in the order in which they were released, and tiles are always released in one order, so both
// warps that fill them know the slot of each tile; they tell the others.
struct Tiles {
  uint32_t slots, parities;  // four bits, one bit a tile; of a head the slots of K and Q, too, above its parities

  __device__ __forceinline__ int k_slot() const { return parities >> 8 & 15; }
  __device__ __forceinline__ int q_slot() const { return parities >> 12; }
  __device__ __forceinline__ int slot(int tile) const { return slots >> 4 * tile & 15; }
  __device__ __forceinline__ uint32_t parity(int tile) const { return parities >> tile & 1; }
};

struct SlotOrder {
  uint64_t free = 0xba9876543210;  // four bits a slot, the next to be filled first
  uint32_t fills = 0;              // a bit a slot: whether its next fill is an odd one
  uint32_t rows = 0;               // the slots of K and Q

  template <int kCount>
  __device__ __forceinline__ Tiles fill() {
    Tiles tiles{};
    tiles.slots = static_cast<uint32_t>(free) & (1u << 4 * kCount) - 1;
    uint32_t filled = 0;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      tiles.parities |= (fills >> tiles.slot(i) & 1) << i;
      filled |= 1u << tiles.slot(i);
    }
    fills ^= filled;
    free >>= 4 * kCount;
    return tiles;
  }

  // K and Q of an item; those of the item before are released at its end.
  __device__ __forceinline__ Tiles next_rows(bool first) {
    if (!first) free |= uint64_t{rows} << 4 * (kSlots - 2);
    const Tiles tiles = fill<2>();
    rows = tiles.slots;
    return tiles;
  }

  // Tiles are released in the order in which they are needed.
  __device__ __forceinline__ Tiles next_head() {
    Tiles tiles = fill<kTiles>();
    free |= uint64_t{tiles.slots} << 4 * (kSlots - 2 - kTiles);
    tiles.parities |= rows << 8;
    return tiles;
  }
};

// What the twelve warps leave for the one that finishes a head; [2]: the halves of the columns.
struct Sums {
  float crossing[kMatrixWarps][kChunk];  // of a warp's rows, for the gates up to them
  float entering[2][kChunk];
  float leaving[2][kChunk];
  float key_residual[2][kChunk];  // gamma k . (dV S0^T)
  float beta[kChunk];             // dV . U; of rows whose U is V': dV . V - sum_j (dV V'^T)_ij Gamma_ij (K K^T)_ij
  float state_dot[kProductWarps];
};

struct Smem {
  alignas(1024) char attention_grad[kSquareTileBytes];  // dP
  char interaction_grad[kSquareTileBytes];  // M + M^T
  char slot[kSlots][kSlotBytes];
  alignas(128) float scalars[kScalarStages][kScalarRows][kChunk];
  uint4 key_key[kMatrixWarps * (kMatrixWarps + 1) / 2][32];  // K K^T, of each warp's rows the blocks of 16 columns up to the diagonal
  float columns[2][kChunk];  // b - log2 beta, and b where U is V'
  Sums sums[2];
  float normal_dots[2][2][kChunk];  // of q and k, where they were normalised
  int4 rows[kRowStages];            // of K and Q: first token, tokens, key head, slots and their parities
  Tiles tiles[kScalarStages];       // of the heads whose scalars are there
  uint32_t items;                   // of all CTAs
  uint64_t slot_full[kSlots], slot_free[kSlots];
  uint64_t rows_full[kRowStages];
  uint64_t scalars_full[kScalarStages], scalars_free[kScalarStages];
  uint64_t matrices_full, matrices_free;
  uint64_t products_done[2];
  uint64_t sums_full[2], sums_free[2];
};

// An item: a chunk and key head. A CTA has every gridDim.x-th of them, in the order of the chunk table, whose used rows come first.
struct Item {
  uint32_t tile_record;  // of the chunk, among the part's
  uint32_t chunk_index;
  int32_t key_head;
  int32_t first_token, tokens;  // of the chunk

  __device__ __forceinline__ int64_t record(const Heads& heads, int head) const {
    return int64_t{chunk_index} * heads.value_heads + head;
  }
};

__device__ __forceinline__ uint32_t used_chunks(const TokenGradientsParams& p) {
  return half_chunks(p.part.half, p.tables.chunk_offsets[p.tables.sequences]);
}

// The CTA's nth item; false where it has no more.
__device__ __forceinline__ bool item_of(const TokenGradientsParams& p, uint32_t chunks, uint32_t nth, Item& item) {
  const uint32_t index = blockIdx.x + nth * gridDim.x, key_heads = p.part.key_heads;
  item.tile_record = index / key_heads;
  if (item.tile_record >= chunks) return false;
  item.key_head = p.part.first_key_head + static_cast<int>(index - item.tile_record * key_heads);
  const ChunkEntry coloured = p.tables.chunks[coloured_chunk(p.part.half, item.tile_record)];
  const SegmentEntry segment = p.tables.segments[coloured.segment];
  const HalfChunks half = half_of(p.part.half, segment.first_chunk, cake::work::chunks_of(segment.tokens));
  item.chunk_index = half.first + item.tile_record - half.first_record;
  const int before = (item.chunk_index - segment.first_chunk) * kChunk;  // tokens of the segment
  item.first_token = segment.first_token + before;
  item.tokens = min(kChunk, segment.tokens - before);
  return true;
}

// By warps that fill slots, before those of a head. A free slot says that the warps of products are past what was released before it, but not
// that the warps that make dP and M are: were they more than a head behind, a slot could be two phases behind the one that is waited for,
// and parities cannot tell.
__device__ __forceinline__ void wait_products_before(Smem& smem, uint32_t head) {
  if (head >= 2) ptx::mbarrier_wait(&smem.products_done[head & 1], (head - 2) >> 1 & 1);
}

// By one thread, before the barrier that starts the roles.
__device__ __forceinline__ void init_barriers(Smem& smem) {
  for (int i = 0; i < kSlots; ++i) {
    ptx::mbarrier_init(&smem.slot_full[i], 1);
    ptx::mbarrier_init(&smem.slot_free[i], kProductWarps + kMatrixWarps);
  }
  for (int i = 0; i < kRowStages; ++i) ptx::mbarrier_init(&smem.rows_full[i], 1);
  for (int i = 0; i < kScalarStages; ++i) {
    ptx::mbarrier_init(&smem.scalars_full[i], 1);
    ptx::mbarrier_init(&smem.scalars_free[i], kProductWarps + 1);
  }
  for (int i = 0; i < 2; ++i) {
    ptx::mbarrier_init(&smem.sums_full[i], kProductWarps + kMatrixWarps);
    ptx::mbarrier_init(&smem.sums_free[i], 1);
    ptx::mbarrier_init(&smem.products_done[i], kMatrixWarps);
  }
  ptx::mbarrier_init(&smem.matrices_full, kMatrixWarps);
  ptx::mbarrier_init(&smem.matrices_free, kProductWarps);
  ptx::mbarrier_init_fence();
}

}  // namespace cake::gdn::sm90
