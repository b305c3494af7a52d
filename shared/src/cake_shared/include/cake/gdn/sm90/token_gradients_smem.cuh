// Shared memory, rings and work list of token_gradients_sm90.
#pragma once

#include "cake/gdn/sm90/backward_chain.cuh"

namespace cake::gdn::sm90 {

inline constexpr int kThreads = 384;
inline constexpr int kConsumerWarps = 8;

// A value head brings these tiles through the ring of slots, in the order in which they are first needed.
enum Tile : int { kGradO, kResidualGrad, kWrites, kEntryState, kExitGrad = kEntryState + 2, kTiles = kExitGrad + 2 };
inline constexpr int kSlots = 8;
inline constexpr uint32_t kSlotBytes = kTokenTileBytes;
static_assert(2 * kSlotBytes == kStateTileBytes, "a state tile takes two slots, one a block of key columns");
inline constexpr int kScalarStages = 4;

// What the eight warps leave for the one that finishes a head; [2]: the halves of the columns.
struct Sums {
  float crossing[kConsumerWarps][kChunk];  // of a warp's rows, for the gates up to them
  float entering[2][kChunk];
  float leaving[2][kChunk];
  float key_residual[2][kChunk];  // gamma k . (dR S0^T)
  float beta_matrix[kChunk];
  float beta_value[2][kChunk];    // dR . V
  float state_dot[kConsumerWarps];
  int4 item;                      // as Smem::rows, for the finishing warp; then the value head instead of the key head
};

struct Smem {
  alignas(1024) char k[2][kTokenTileBytes];
  char q[2][kTokenTileBytes];
  char attention_grad[kSquareTileBytes];    // dP
  char interaction_grad[kSquareTileBytes];  // M
  char slot[kSlots][kSlotBytes];
  alignas(128) float scalars[kScalarStages][kScalarRows][kChunk];
  Sums sums[2];
  float normal_dots[2][2][kChunk];  // of q and k, where they were normalised
  int4 rows[2];                     // of k and q: first token, tokens, chunk and key head; no tokens: there are no more
  uint64_t slot_full[kSlots], slot_free[kSlots];
  uint64_t scalars_full[kScalarStages], scalars_free[kScalarStages];
  uint64_t rows_full[2], rows_free[2];
  uint64_t matrices_free;
  uint64_t sums_full[2], sums_free[2];
};

// Where the tile of a head lies in the ring, heads counted over all items of the CTA.
struct Slot {
  int index;
  uint32_t parity;
};
__device__ __forceinline__ Slot slot_of(uint32_t head, int tile) {
  const uint32_t place = head * kTiles + tile;
  return {static_cast<int>(place % kSlots), place / kSlots & 1};
}

// An item: a chunk and key head.
struct Item {
  uint32_t chunk_index;
  int32_t key_head;
  int32_t first_token, tokens;  // of the chunk
};

// A CTA's items: of every segment of its team, last chunk first, every token_ctas-th chunk.
struct Items {
  TeamWork segments;
  const SegmentEntry* table;
  int first, step;
  int chunk = -1;
  int key_head;
  SegmentEntry segment;

  __device__ __forceinline__ bool take(const Heads& heads, Item& item) {
    while (chunk < 0) {
      uint32_t row;
      if (!segments.take(heads, row, key_head)) return false;
      segment = table[row];
      chunk = cake::work::chunks_of(segment.tokens) - 1 - first;
    }
    const int token = chunk * kChunk;
    item = {static_cast<uint32_t>(segment.first_chunk + chunk), key_head, segment.first_token + token, min(kChunk, segment.tokens - token)};
    chunk -= step;
    return true;
  }
};

// By one thread, before the barrier that starts the roles.
__device__ __forceinline__ void init_barriers(Smem& smem) {
  for (int i = 0; i < kSlots; ++i) {
    ptx::mbarrier_init(&smem.slot_full[i], 1);
    ptx::mbarrier_init(&smem.slot_free[i], kConsumerWarps);
  }
  for (int i = 0; i < kScalarStages; ++i) {
    ptx::mbarrier_init(&smem.scalars_full[i], 1);
    ptx::mbarrier_init(&smem.scalars_free[i], kConsumerWarps + 1);
  }
  for (int i = 0; i < 2; ++i) {
    ptx::mbarrier_init(&smem.rows_full[i], 1);
    ptx::mbarrier_init(&smem.rows_free[i], kConsumerWarps);
    ptx::mbarrier_init(&smem.sums_full[i], kConsumerWarps);
    ptx::mbarrier_init(&smem.sums_free[i], 1);
  }
  ptx::mbarrier_init(&smem.matrices_free, kConsumerWarps);
  ptx::mbarrier_init_fence();
}

}  // namespace cake::gdn::sm90
