// The sum of a tile's segments that several units hold, in ascending order, by whoever comes last.
//
// A warp whose unit comes last to its 16 rows adds the other units' sums to its own, which it has in registers. Else it stores its own,
// a block of columns after the other, and counts itself in; where that makes it the last after all, it adds up what is stored.
// Nobody waits for anybody.
//
// slots [slot][CTA of a tile][warp][block][eight fours][lane][4]: as a lane holds them.
#pragma once

#include "any/router_split.cuh"
#include "cake/ptx/counter.cuh"

namespace dense_projection_det_gemm {

template <int kBlocks>
struct RouterJoin {
  static constexpr int kFours = 8;  // of a lane's 32 sums of a block
  static constexpr uint32_t kTinyRows = 1u << 16;  // counted beside arrivals, of which there are fewer

  const RouterOutParams& p;
  const RouterSegment& segment;
  int warp, lane, blocks;  // blocks of the output's columns
  RouterSpan units;        // that hold the tile's segments
  int place;               // of this one among them

  __device__ __forceinline__ RouterJoin(const RouterOutParams& params, const RouterSegment& of, int blocks_left, int my_warp, int my_lane)
      : p(params),
        segment(of),
        warp(my_warp),
        lane(my_lane),
        blocks(min(kBlocks, blocks_left)),
        units(router_units_of_tile(params.work, of.tile)),
        place((params.work.units_per_tile > 1 ? of.slot : of.slot >> 1) - units.first) {
    units.count = max(1, units.count);
  }

  __device__ __forceinline__ int64_t rows_of(int32_t tile_or_slot) const {
    return router_place(p.work, tile_or_slot, segment.rank) * kRouterWarps + warp;
  }
  __device__ __forceinline__ float4* fours(int32_t slot, int block) const {
    return reinterpret_cast<float4*>(p.slots) + (rows_of(slot) * kBlocks + block) * (kFours * 32) + lane;
  }
  __device__ __forceinline__ uint32_t* arrivals(int block) const {
    return p.terms.arrivals + rows_of(segment.tile) * kBlocks + block;
  }
  __device__ __forceinline__ bool is_last(uint32_t arrived) const { return (arrived & (kTinyRows - 1)) + 1 == units.count; }

  __device__ __forceinline__ void store(const float (&sums)[32], int block) const {
    float4* destination = fours(segment.slot, block);
#pragma unroll
    for (int n = 0; n < kFours; ++n) {
      __stcg(destination + 32 * n, make_float4(sums[4 * n], sums[4 * n + 1], sums[4 * n + 2], sums[4 * n + 3]));
    }
  }

  // Whether this unit is the last at all blocks, and no segment that is stored has tiny elements in the warp's rows.
  __device__ __forceinline__ bool comes_last() const {
    const uint32_t arrived = lane < blocks ? ptx::read_count(arrivals(lane)) : 0;
    const bool last = __all_sync(0xffffffffu, lane >= blocks || arrived + 1 == units.count);
    __syncwarp();
    return last;
  }

  // Stores the segment's sums. Returns a bit for each block to which this unit came last; `tiny`: whether the segment has tiny
  // elements in the warp's rows, then whether any of the blocks' segments has.
  template <class SumsOf>
  __device__ __forceinline__ uint32_t store_all(const SumsOf& sums_of, bool& tiny) const {
    const uint32_t one = 1 + (__any_sync(0xffffffffu, tiny) ? kTinyRows : 0);
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      if (block < blocks) store(sums_of(block), block);
    }
    __syncwarp();
    const uint32_t arrived = lane < blocks ? ptx::count_in(arrivals(lane), one) : 0;
    __syncwarp();
    const bool last = lane < blocks && is_last(arrived);
    tiny = __any_sync(0xffffffffu, last && arrived + one >= kTinyRows);
    return __ballot_sync(0xffffffffu, last);
  }

  // Past L1, and where it is asked for: else the compiler loads a segment once it has added the one before.
  __device__ static __forceinline__ void load(float4& x, const float4* source) {
    asm volatile("ld.global.cg.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w) : "l"(source) : "memory");
  }
  __device__ static __forceinline__ void add_four(float* sums, const float4& x) {
    sums[0] = __fadd_rn(sums[0], x.x);
    sums[1] = __fadd_rn(sums[1], x.y);
    sums[2] = __fadd_rn(sums[2], x.z);
    sums[3] = __fadd_rn(sums[3], x.w);
  }

  // All segments' sums of a block, in place of this one's. The first segment's, of which none is -0, keep their bits when they are
  // added to zeros.
  __device__ __forceinline__ void add_others(float (&sums)[32], int block) const {
    constexpr int kAtOnce = 3, kHalf = kFours / 2;
    const int others = units.count - 1;
#pragma unroll
    for (int half = 0; half < kFours; half += kHalf) {
      float totals[4 * kHalf] = {};
      const auto add_own = [&] {
#pragma unroll
        for (int i = 0; i < 4 * kHalf; ++i) totals[i] = __fadd_rn(totals[i], sums[4 * half + i]);
      };
#pragma unroll 1
      for (int first = 0; first < others; first += kAtOnce) {
        float4 parts[kAtOnce][kHalf];  // all loads before the first addition: one latency
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const int other = min(first + i, others - 1);
          const float4* source = fours(router_slot(p.work, units, other + (other >= place)), block) + 32 * half;
#pragma unroll
          for (int n = 0; n < kHalf; ++n) load(parts[i][n], source + 32 * n);
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          if (first + i >= others) break;
          if (first + i == place) add_own();
#pragma unroll
          for (int n = 0; n < kHalf; ++n) add_four(&totals[4 * n], parts[i][n]);
        }
      }
      if (place == others) add_own();
#pragma unroll
      for (int i = 0; i < 4 * kHalf; ++i) sums[4 * half + i] = totals[i];
    }
  }

  // The same from slots alone.
  __device__ __forceinline__ void add_all(float (&sums)[32], int block) const {
    constexpr int kAtOnce = 4;
#pragma unroll
    for (int i = 0; i < 32; ++i) sums[i] = 0.f;
#pragma unroll 1
    for (int first = 0; first < units.count; first += kAtOnce) {
      float4 parts[kAtOnce][kFours];
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
        const float4* source = fours(router_slot(p.work, units, min(first + u, units.count - 1)), block);
#pragma unroll
        for (int n = 0; n < kFours; ++n) load(parts[u][n], source + 32 * n);
      }
#pragma unroll
      for (int u = 0; u < kAtOnce; ++u) {
        if (first + u >= units.count) break;
#pragma unroll
        for (int n = 0; n < kFours; ++n) add_four(&sums[4 * n], parts[u][n]);
      }
    }
  }

  // What `store` has put there.
  __device__ __forceinline__ void take_back(float (&sums)[32], int block) const {
#pragma unroll
    for (int n = 0; n < kFours; ++n) {
      float4 x;
      load(x, fours(segment.slot, block) + 32 * n);
      sums[4 * n] = x.x, sums[4 * n + 1] = x.y, sums[4 * n + 2] = x.z, sums[4 * n + 3] = x.w;
    }
  }
};

}  // namespace dense_projection_det_gemm
