// Consumers in turns: each has whole tiles of 128 x 128, and stores one while the other multiplies the next. For contractions so
// short that the results of a tile cost as much as its products.
//
// Barriers: those of tile_gemm.cuh, a stage released by the one consumer that has read it; named barrier kTurn + c, by which a
// consumer that has issued its tile's last products passes the tensor cores, and the ring's place, to consumer c.
#pragma once

#include "cake/gemm/sm90/contract.cuh"
#include "cake/gemm/sm90/epilogue.cuh"
#include "cake/gemm/work.h"
#include "cake/ptx/cta.cuh"

namespace cake::gemm::sm90 {

inline constexpr int kTurn = 1 + kConsumers;  // after the epilogue's

// The same sums as `contract`, for the tile's upper and lower 64 rows at once; `pass` once the last products are issued.
template <class C, ptx::Major kMajorA, ptx::Major kMajorB, int kCount, class Pass>
__device__ __forceinline__ void contract_tile(float (&upper)[kCount], float (&lower)[kCount], Smem<C>& smem,
                                              pipe::RingPlace<C::kStages>& at, int blocks, int lane, Pass pass) {
  constexpr uint64_t kStepA = step_of(kMajorA), kStepB = step_of(kMajorB), kLower = ptx::wgmma_advance(64 * 128);
  pipe::RingPlace<C::kStages> before = at;
  for (int block = 0; block < blocks; ++block) {
    smem.ring.wait_full(at);
    const uint64_t a = ptx::wgmma_descriptor(ptx::shared_address(smem.a[at.stage]), kBlockK * 128);
    const uint64_t b = ptx::wgmma_descriptor(ptx::shared_address(smem.b[at.stage]), kBlockK * 128);
    ptx::wgmma_keep(upper);
    ptx::wgmma_keep(lower);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kBlockK / 16; ++step) {
      ptx::wgmma_bf16<kMajorA, kMajorB>(upper, a + step * kStepA, b + step * kStepB, true);
      ptx::wgmma_bf16<kMajorA, kMajorB>(lower, a + kLower + step * kStepA, b + step * kStepB, true);
    }
    ptx::wgmma_commit();
    if (block == blocks - 1) pass();
    ptx::wgmma_wait<1>();
    if (block > 0) release_both(smem.ring, before, lane);
    before = at;
    at.advance();
  }
  ptx::wgmma_wait<0>();
  ptx::wgmma_keep(upper);
  ptx::wgmma_keep(lower);
  if (blocks > 0) release_both(smem.ring, before, lane);
}

template <class C>
__device__ __forceinline__ void consume_in_turns(Smem<C>& smem, const NativeParams& p, uint32_t rank, int consumer,
                                                 int first_unit, int unit_step) {
  constexpr int kCount = C::kTile.n / 2;
  const int lane = threadIdx.x % 32, units = p.tiling.units;
  pipe::RingPlace<C::kStages> at;
  if (consumer == 1 && first_unit < units) at.advance_by(unit_of(p.tiling, first_unit).blocks);
  for (int index = first_unit + consumer * unit_step; index < units; index += kConsumers * unit_step) {
    const Unit unit = unit_of(p.tiling, index);
    const bool more = index + unit_step < units;
    const auto pass = [&] {
      if (more) ptx::named_barrier_arrive(kTurn + 1 - consumer, 128 * kConsumers);
    };
    float upper[kCount], lower[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) upper[i] = lower[i] = 0.f;
    if (index != first_unit) ptx::named_barrier_sync(kTurn + consumer, 128 * kConsumers);
    if (unit.blocks == 0) pass();
    if (p.a_k_major) {
      if (p.b_k_major) {
        contract_tile<C, ptx::Major::kK, ptx::Major::kK>(upper, lower, smem, at, unit.blocks, lane, pass);
      } else {
        contract_tile<C, ptx::Major::kK, ptx::Major::kMN>(upper, lower, smem, at, unit.blocks, lane, pass);
      }
    } else {
      if (p.b_k_major) {
        contract_tile<C, ptx::Major::kMN, ptx::Major::kK>(upper, lower, smem, at, unit.blocks, lane, pass);
      } else {
        contract_tile<C, ptx::Major::kMN, ptx::Major::kMN>(upper, lower, smem, at, unit.blocks, lane, pass);
      }
    }
    if (more) at.advance_by(unit_of(p.tiling, index + unit_step).blocks);
    const int row = static_cast<int>(rank) * C::kTile.m;
    store_tile(upper, smem.store[consumer], p, unit, row, 0, consumer);
    store_tile(lower, smem.store[consumer], p, unit, row + 64, 0, consumer);
  }
  finish_stores();
}

}  // namespace cake::gemm::sm90
