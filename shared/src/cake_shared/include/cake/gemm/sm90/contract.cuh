// A CTA of the native GEMM: its configuration, its shared memory, and the products of a consumer's part of a tile.
#pragma once

#include "cake/gemm/sm90/epilogue.cuh"
#include "cake/gemm/tiles.h"
#include "cake/pipe/ring.cuh"
#include "cake/ptx/wgmma.cuh"

namespace cake::gemm::sm90 {

inline constexpr int kCtasPerCluster = 2;
inline constexpr int kConsumers = 2;  // warpgroups, of most tiles
inline constexpr int kThreads = 128 * (1 + kConsumers);

template <TileKind kKind>
struct Config {
  static constexpr TileShape kTile = tile_shape(kKind);
  static constexpr OperandBoxes kA = a_boxes(kTile), kB = b_boxes(kTile);
  static constexpr bool kHalves = halves(kTile);  // units that are halved may come
  static constexpr int kConsumers = consumers_of(kTile);
  static constexpr int kThreads = 128 * (1 + kConsumers);
  static constexpr int kProducerRegisters = kConsumers == 2 ? 40 : 56, kConsumerRegisters = kConsumers == 2 ? 232 : 152;
  static constexpr bool kSplitsRows = kTile.m >= 128;  // a consumer has 64 rows of the tile; else half of its columns
  static constexpr int kConsumerColumns = kSplitsRows ? kTile.n : kTile.n / kConsumers;
  static constexpr bool kTurns = kKind == TileKind::kTurns;  // a consumer has all of every other tile: see in_turns.cuh
  static constexpr int kReaders = kTurns ? 1 : kConsumers;   // of a stage
  static constexpr bool kStreams = kKind == TileKind::kNarrow;    // A alone is large, and read once
  static constexpr bool kStrides = kKind == TileKind::kBroad || kKind == TileKind::kSquare;  // units may be small, see UnitWalk
  static constexpr bool kTransposes = kKind == TileKind::kBroad;  // results with unit stride on the rows may come
  static constexpr int kStages = kTile.stages;
  static constexpr uint32_t kABytes = kTile.m * kBlockK * 2, kBBytes = kTile.n * kBlockK * 2;
};

template <class C>
struct alignas(1024) Smem {
  char a[C::kStages][C::kABytes];
  char b[C::kStages][C::kBBytes];
  StoreRing<C::kTile.store_buffers> store[C::kConsumers];
  pipe::Ring<C::kStages> ring;
};

// One arrival at the stage's empty barrier of both CTAs, by one lane each.
template <int kStages>
__device__ __forceinline__ void release_both(pipe::Ring<kStages>& ring, const pipe::RingPlace<kStages>& at, int lane) {
  if (lane < kCtasPerCluster) ptx::mbarrier_arrive_remote(ring.empty(at), lane);
}

// What a step of 16 along the contraction adds to a descriptor.
__device__ constexpr uint64_t step_of(ptx::Major major) { return ptx::wgmma_advance(major == ptx::Major::kK ? 32 : 16 * 128); }

// acc = sum over `blocks` stages of the consumer's part of the tile, of the first steps of each.
template <class C, ptx::Major kMajorA, ptx::Major kMajorB, int kSteps = kBlockK / 16, int kCount>
__device__ __forceinline__ void contract(float (&acc)[kCount], Smem<C>& smem, pipe::RingPlace<C::kStages>& at, int blocks,
                                         int consumer, int lane) {
  // Rows of 64 and blocks of 64 columns both lie 64 * 128 bytes apart.
  const uint32_t a_part = C::kSplitsRows ? consumer * (64 * 128) : 0;
  const uint32_t b_part = C::kSplitsRows ? 0 : consumer * (C::kConsumerColumns * 128);
  constexpr uint64_t kStepA = step_of(kMajorA), kStepB = step_of(kMajorB);
  pipe::RingPlace<C::kStages> before = at;
  for (int block = 0; block < blocks; ++block) {
    smem.ring.wait_full(at);
    const uint64_t a = ptx::wgmma_descriptor(ptx::shared_address(smem.a[at.stage]) + a_part, kBlockK * 128);
    const uint64_t b = ptx::wgmma_descriptor(ptx::shared_address(smem.b[at.stage]) + b_part, kBlockK * 128);
    ptx::wgmma_keep(acc);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      ptx::wgmma_bf16<kMajorA, kMajorB>(acc, a + step * kStepA, b + step * kStepB, true);
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<1>();
    if (block > 0) release_both(smem.ring, before, lane);
    before = at;
    at.advance();
  }
  ptx::wgmma_wait<0>();
  ptx::wgmma_keep(acc);
  if (blocks > 0) release_both(smem.ring, before, lane);
}

}  // namespace cake::gemm::sm90
