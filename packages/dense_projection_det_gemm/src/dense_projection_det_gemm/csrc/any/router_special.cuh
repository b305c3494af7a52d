// The end of a router GEMM: adds the segments of tiles that several units share, in ascending order, and computes anew, in FP64
// and in the order of the depth, the elements that split products do not serve. Which those are depends on an element's own row
// and column alone.
//
// Reads slots, flags, P and Q; writes the output. Where there are slots a CTA has 32 columns of a tile's 128 rows; else there is
// usually nothing to do, and a look at the flags of Q's rows and at any_redo tells.
#pragma once

#include "any/router_split.cuh"
#include "cake/ptx/grid_dependency.cuh"

namespace dense_projection_det_gemm {

struct SpecialSmem {
  double p[32][33], q[32][33];  // [row][depth]
  uint32_t redo[kRouterRows];   // a bit for each of the 32 columns
  int row_exponents[kRouterRows], column_exponents[kRouterSpecialColumns];
  alignas(16) float factors[kRouterSpecialColumns];  // what undoes the columns' scales
  uint32_t column_flags[kRouterSpecialColumns];
  uint32_t row_tiny[kRouterRows];  // of any segment
};

__device__ __forceinline__ float* output_element(const RouterOutParams& p, int64_t row, int64_t column) {
  return p.out + row * p.out_row_stride + column * p.out_column_stride;
}

// What is known of the rows of a tile and of 32 of its columns, a thread's share: asked for before the sums, so that both come
// in one latency.
struct SpecialFacts {
  uint32_t flags = 0, tiny = 0;
  int column_exponent = 0, row_exponent = 0;
  float factor = 1.f;

  __device__ __forceinline__ SpecialFacts(const RouterOutParams& p, int tile, int rank, int64_t row0, int column0, bool slots) {
    constexpr int kLanes = kRouterSpecialThreads / kRouterSpecialColumns, kAtOnce = 8;
    const int64_t padded = int64_t{p.work.column_tiles} * p.work.blocks * kRouterBlock;
    const int flag_rows = (p.work.steps + kRouterTermsSteps - 1) / kRouterTermsSteps, thread = threadIdx.x;
    const uint8_t* source = p.terms.flags + column0 + thread % kRouterSpecialColumns;
    for (int first = thread / kRouterSpecialColumns; first < flag_rows; first += kAtOnce * kLanes) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (first + i * kLanes < flag_rows) flags |= source[(first + i * kLanes) * padded];
      }
    }
    if (thread < kRouterSpecialColumns) {
      column_exponent = p.terms.exponents[column0 + thread];
      factor = p.terms.factors[column0 + thread];
    }
    if (thread >= kRouterRows) return;
    row_exponent = p.row_exponents[row0 + thread];
    if (!slots) return;
    const RouterSpan units = router_units_of_tile(p.work, tile);
#pragma unroll 4
    for (int u = 0; u < units.count; ++u)
      tiny |= p.slot_tiny[router_place(p.work, router_slot(p.work, units, u), rank) * kRouterRows + thread];
  }

  // To all threads. Returns whether all of it is ordinary: a factor for each column is then all that results need.
  __device__ __forceinline__ bool share(SpecialSmem& smem) const {
    const int thread = threadIdx.x;
    if (thread < kRouterSpecialColumns) {
      smem.column_flags[thread] = 0;
      smem.column_exponents[thread] = column_exponent;
      smem.factors[thread] = factor;
    }
    if (thread < kRouterRows) {
      smem.row_tiny[thread] = tiny;
      smem.redo[thread] = 0;
      smem.row_exponents[thread] = row_exponent;
    }
    const bool ordinary = __syncthreads_and(flags == 0 && tiny == 0 && row_exponent == 0 && factor > 0.f);
    if (ordinary) return true;
    if (flags) atomicOr(&smem.column_flags[thread % kRouterSpecialColumns], flags);
    __syncthreads();
    return false;
  }
};

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
  __device__ __forceinline__ void store(const RouterOutParams& p, SpecialSmem& smem, int64_t row0, int column0,
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

// Elements that the main program has finished.
__device__ __forceinline__ void find_special(const RouterOutParams& p, SpecialSmem& smem, int tile, int rank, int64_t row0,
                                             int column0, int group) {
  const uint8_t* row_redo =
      p.redo + (router_place(p.work, tile, rank) * p.work.blocks + group * kRouterSpecialColumns / kRouterBlock) * kRouterRows;
  for (int i = threadIdx.x; i < kRouterRows * kRouterSpecialColumns; i += kRouterSpecialThreads) {
    const int row = i / kRouterSpecialColumns, column = i % kRouterSpecialColumns;
    const int flags = smem.column_flags[column];
    if (row0 + row >= p.work.rows || column0 + column >= p.work.columns || (flags == 0 && row_redo[row] == 0)) continue;
    const float result = *output_element(p, row0 + row, column0 + column);
    const bool small =
        flags != 0 && fabs(scalbn(static_cast<double>(result), smem.row_exponents[row] + smem.column_exponents[column])) < 1.0;
    if (!(fabsf(result) < __uint_as_float(kInfinityBits)) || small || (flags & kRouterWide))
      atomicOr(&smem.redo[row], 1u << column);
  }
}

// 32 rows and 32 columns; a thread has four columns of a row. A function of its own, so that its registers are none of the others'.
__device__ __noinline__ void compute_special(const RouterSpecialParams& p, SpecialSmem& smem, int first_row, int64_t row0,
                                                int column0) {
  const RouterWork& work = p.main.work;
  const int row = threadIdx.x / 8, column = threadIdx.x % 8 * 4;
  double sum[4] = {0., 0., 0., 0.};
  for (int k0 = 0; k0 < work.depth; k0 += 32) {
    __syncthreads();
    for (int i = threadIdx.x; i < 32 * 32; i += kRouterSpecialThreads) {
      const int major = i / 32, minor = i % 32;
      {
        const int r = p.main.p.depth_stride == 1 ? major : minor, k = p.main.p.depth_stride == 1 ? minor : major;
        const bool inside = row0 + first_row + r < work.rows && k0 + k < work.depth;
        const int64_t at = (row0 + first_row + r) * p.main.p.stride + (k0 + k) * p.main.p.depth_stride;
        smem.p[r][k] = inside ? operand_element(p.main.p, at) : 0.f;
      }
      {
        const int c = p.q.depth_stride == 1 ? major : minor, k = p.q.depth_stride == 1 ? minor : major;
        const bool inside = column0 + c < work.columns && k0 + k < work.depth;
        smem.q[c][k] = inside ? operand_element(p.q, (column0 + c) * p.q.stride + (k0 + k) * p.q.depth_stride) : 0.f;
      }
    }
    __syncthreads();
    const int depth = min(32, work.depth - k0);
#pragma unroll 4
    for (int k = 0; k < depth; ++k) {
      const double x = smem.p[row][k];
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[i] = fma(x, smem.q[column + i][k], sum[i]);
    }
  }
  const uint32_t redo = smem.redo[first_row + row];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (redo >> (column + i) & 1)
      *output_element(p.main, row0 + first_row + row, column0 + column + i) = static_cast<float>(sum[i]);
  }
}

// A CTA's part of a tile, or `groups` times 32 of its columns from `group` on.
__device__ __forceinline__ void end_tile(const RouterSpecialParams& p, SpecialSmem& smem, int place, int group, int groups) {
  const RouterWork& work = p.main.work;
  const int tile = place / work.ctas, rank = place - tile * work.ctas,
            tile_column = tile % work.column_tiles * work.blocks * kRouterBlock;
  const int64_t row0 = router_first_row(work, tile, rank);
  if (row0 >= work.rows) return;
  const bool slots = router_units_of_tile(work, tile).count > 0;
  for (int end = group + groups; group < end; ++group) {
    const int column0 = tile_column + group * kRouterSpecialColumns;
    if (column0 >= work.columns) return;
    const SpecialFacts facts(p.main, tile, rank, row0, column0, slots);
    __syncthreads();
    if (slots) {
      const SlotSums sums(p.main, tile, rank, row0, column0, group);
      const bool ordinary = facts.share(smem);
      sums.store(p.main, smem, row0, column0, ordinary);
    } else {
      facts.share(smem);
      find_special(p.main, smem, tile, rank, row0, column0, group);
    }
    __syncthreads();
    for (int first_row = 0; first_row < kRouterRows; first_row += 32) {
      const uint32_t redo = threadIdx.x < 32 ? smem.redo[first_row + threadIdx.x] : 0;
      if (__syncthreads_or(redo != 0)) compute_special(p, smem, first_row, row0, column0);
    }
  }
}

// Whether any column has elements that a split does not serve, or the product has marked anything.
__device__ __forceinline__ bool is_anything_special(const RouterOutParams& p) {
  const int64_t padded = int64_t{p.work.column_tiles} * p.work.blocks * kRouterBlock;
  const int64_t quads = padded * ((p.work.steps + kRouterTermsSteps - 1) / kRouterTermsSteps) / 16;
  uint32_t found = *p.terms.any_redo;
  for (int64_t first = threadIdx.x; first < quads; first += 4 * kRouterSpecialThreads) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (first + i * kRouterSpecialThreads >= quads) continue;
      const uint4 four = reinterpret_cast<const uint4*>(p.terms.flags)[first + i * kRouterSpecialThreads];
      found |= four.x | four.y | four.z | four.w;
    }
  }
  return __syncthreads_or(found != 0);
}

}  // namespace dense_projection_det_gemm

extern "C" __global__ void __launch_bounds__(dense_projection_det_gemm::kRouterSpecialThreads, 3)
    router_special_any(const __grid_constant__ dense_projection_det_gemm::RouterSpecialParams p) {
  using namespace dense_projection_det_gemm;
  __shared__ SpecialSmem smem;
  const RouterWork& work = p.main.work;
  const int places = work.row_tiles * work.column_tiles * work.ctas, groups = work.blocks * kRouterBlock / kRouterSpecialColumns;
  cake::ptx::launch_dependents();
  cake::ptx::wait_for_predecessor();
  if (work.units_per_tile == 1) {
    if (!is_anything_special(p.main)) return;
    for (int place = blockIdx.x; place < places; place += gridDim.x) end_tile(p, smem, place, 0, groups);
  } else {
    end_tile(p, smem, blockIdx.x, blockIdx.y, 1);
  }
}
