// The end of a router GEMM where the product does not end itself (native products do where no unit crosses tiles): adds the segments
// of tiles that several units share, in ascending order, and computes anew the elements that split products do not serve.
//
// Reads slots, flags, P and Q; writes the output. Where there are slots a CTA has 32 columns of a tile's 128 rows; else there is
// usually nothing to do, and a look at the flags of Q's rows and at any_redo tells.
#pragma once

#include "any/router_redo.cuh"
#include "cake/ptx/grid_dependency.cuh"

namespace dense_projection_det_gemm {

// Four elements next to each other in a slot and, usually, in the output.
struct SpecialQuad {
  int row, column;  // of the first, in the group
  bool transposed;
  __device__ __forceinline__ SpecialQuad(int index, bool along_rows)
      : row(along_rows ? index % (kRouterRows / 4) * 4 : index / (kRouterSpecialColumns / 4)),
        column(along_rows ? index / (kRouterRows / 4) : index % (kRouterSpecialColumns / 4) * 4),
        transposed(along_rows) {}
  __device__ __forceinline__ int row_of(int i) const { return transposed ? row + i : row; }
  __device__ __forceinline__ int column_of(int i) const { return transposed ? column : column + i; }
};

// A thread's share of 128 rows and 32 columns of a tile's slots, added up.
struct SlotSums {
  static constexpr int kQuads = kRouterRows * kRouterSpecialColumns / 4 / kRouterSpecialThreads;
  float4 totals[kQuads];

  __device__ __forceinline__ static SpecialQuad quad(int n, bool transposed) {
    return SpecialQuad(threadIdx.x + n * kRouterSpecialThreads, transposed);
  }
  __device__ __forceinline__ static bool any(const RouterOutParams& p, const SpecialQuad& quad, int64_t row0, int column0) {
    return row0 + quad.row < p.work.rows && column0 + quad.column < p.work.columns;
  }

  __device__ __forceinline__ SlotSums(const RouterOutParams& p, int tile, int rank, int64_t row0, int column0, int group) {
    const RouterSpan units = router_units_of_tile(p.work, tile);
    const bool transposed = router_slots_transposed(p);
    const int width = p.work.blocks * kRouterBlock, tile_column = group * kRouterSpecialColumns;
#pragma unroll
    for (int n = 0; n < kQuads; ++n) totals[n] = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 2
    for (int u = 0; u < units.count; ++u) {
      const float* slot = p.slots + router_place(p.work, router_slot(p.work, units, u), rank) * (kRouterRows * width);
#pragma unroll
      for (int n = 0; n < kQuads; ++n) {
        const SpecialQuad at = quad(n, transposed);
        if (!any(p, at, row0, column0)) continue;
        const int offset = transposed ? (tile_column + at.column) * kRouterRows + at.row : at.row * width + tile_column + at.column;
        const float4 part = *reinterpret_cast<const float4*>(slot + offset);
        totals[n].x = __fadd_rn(totals[n].x, part.x);
        totals[n].y = __fadd_rn(totals[n].y, part.y);
        totals[n].z = __fadd_rn(totals[n].z, part.z);
        totals[n].w = __fadd_rn(totals[n].w, part.w);
      }
    }
  }

  // To the output; sets bits of smem.redo where they cannot serve.
  __device__ __forceinline__ void store(const RouterOutParams& p, RedoSmem& smem, int64_t row0, int column0,
                                        bool ordinary) const {
    const bool transposed = router_slots_transposed(p);
    const bool whole = row0 + kRouterRows <= p.work.rows && column0 + kRouterSpecialColumns <= p.work.columns;
    const bool plain = ordinary && whole && (transposed ? p.out_row_stride : p.out_column_stride) == 1;
#pragma unroll
    for (int n = 0; n < kQuads; ++n) {
      const SpecialQuad at = quad(n, transposed);
      const float4& x = totals[n];
      // inf and NaN times zero are NaN
      if (plain && __fmaf_rn(x.x, 0.f, __fmul_rn(x.y, 0.f)) + __fmaf_rn(x.z, 0.f, __fmul_rn(x.w, 0.f)) == 0.f) {
        float4 by = *reinterpret_cast<const float4*>(&smem.factors[at.column & ~3]);
        if (transposed) by.x = by.y = by.z = by.w = smem.factors[at.column];
        *reinterpret_cast<float4*>(output_element(p, row0 + at.row, column0 + at.column)) =
            make_float4(__fmul_rn(x.x, by.x), __fmul_rn(x.y, by.y), __fmul_rn(x.z, by.z), __fmul_rn(x.w, by.w));
        continue;
      }
      if (!any(p, at, row0, column0)) continue;
      float results[4] = {totals[n].x, totals[n].y, totals[n].z, totals[n].w};
      bool inside = true;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int row = at.row_of(e), column = at.column_of(e);
        if (row0 + row >= p.work.rows || column0 + column >= p.work.columns) {
          inside = false;
          continue;
        }
        const bool tiny = smem.row_tiny[row] || smem.column_flags[column] != 0;
        if (must_redo(results[e], tiny) || (smem.column_flags[column] & kRouterWide)) atomicOr(&smem.redo[row], 1u << column);
        results[e] = scale_by(results[e], -smem.row_exponents[row] - smem.column_exponents[column]);
      }
      float* out = output_element(p, row0 + at.row, column0 + at.column);
      if (inside && (transposed ? p.out_row_stride : p.out_column_stride) == 1) {
        *reinterpret_cast<float4*>(out) = make_float4(results[0], results[1], results[2], results[3]);
        continue;
      }
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        const int row = at.row_of(e), column = at.column_of(e);
        if (row0 + row < p.work.rows && column0 + column < p.work.columns) {
          *output_element(p, row0 + row, column0 + column) = results[e];
        }
      }
    }
  }
};

// A CTA's part of a tile, `group` of its columns: adds segments up.
__device__ __forceinline__ void end_slots(const RouterOutParams& p, RedoSmem& smem, int tile, int rank, int group) {
  const RouterWork& work = p.work;
  const int column0 = router_column_tile(work, tile) * work.blocks * kRouterBlock + group * kRouterSpecialColumns, thread = threadIdx.x;
  const int64_t row0 = router_first_row(work, tile, rank);
  if (row0 >= work.rows || column0 >= work.columns) return;
  RedoFacts facts(p, column0);
  if (thread < kRouterRows) {
    facts.row_exponent = p.row_exponents[row0 + thread];
    const RouterSpan units = router_units_of_tile(work, tile);
#pragma unroll 2
    for (int u = 0; u < units.count; ++u)
      facts.tiny |= p.slot_tiny[router_place(work, router_slot(work, units, u), rank) * kRouterRows + thread];
  }
  redo_sync();
  const SlotSums sums(p, tile, rank, row0, column0, group);
  const bool ordinary = facts.share(smem);
  sums.store(p, smem, row0, column0, ordinary);
  redo_sync();
  redo_marked<true>(p, smem, row0, column0);
}

}  // namespace dense_projection_det_gemm

extern "C" __global__ void __launch_bounds__(dense_projection_det_gemm::kRouterSpecialThreads, 3)
    router_special_any(const __grid_constant__ dense_projection_det_gemm::RouterOutParams p) {
  using namespace dense_projection_det_gemm;
  __shared__ RedoSmem smem;
  const RouterWork& work = p.work;
  const int places = work.row_tiles * work.column_tiles * work.ctas;
  cake::ptx::launch_dependents();
  cake::ptx::wait_for_predecessor();
  if (work.units_per_tile == 1) {
    const uint32_t found = *p.terms.any_redo | flags_of_columns(p, threadIdx.x, kRouterSpecialThreads);
    if (!redo_any(found != 0)) return;
    for (int place = blockIdx.x; place < places; place += gridDim.x) redo_tile<true>(p, smem, place / work.ctas, place % work.ctas, nullptr);
    return;
  }
  const int tile = blockIdx.x / work.ctas, rank = blockIdx.x - tile * work.ctas;
  if (router_units_of_tile(work, tile).count > 0) {
    end_slots(p, smem, tile, rank, blockIdx.y);
  } else if (redo_any((*p.terms.any_redo | flags_of_columns(p, threadIdx.x, kRouterSpecialThreads)) != 0)) {
    redo_columns<true>(p, smem, tile, rank, blockIdx.y, nullptr);
  }
}
