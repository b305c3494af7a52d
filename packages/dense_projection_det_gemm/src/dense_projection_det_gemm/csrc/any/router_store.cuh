// Where a block of 16 rows of a warp and 64 columns goes: the output, sums of segments in it, or a slot of partial sums. A lane
// holds totals[4 j + i]: row g + 8 (i >> 1), or 2 g + (i >> 1) where rows are adjacent in memory, and column 16 (j >> 1) + 4 c +
// 2 (j & 1) + (i & 1): Q's planes are ordered so that two neighbouring fragments give a lane four columns next to each other (g =
// lane >> 2, c = lane & 3).
#pragma once

#include "any/router_split.cuh"
#include "cake/ptx/cta.cuh"

namespace dense_projection_det_gemm {

struct RouterTarget {
  float* data;  // of the tile's first element
  int64_t row_stride, column_stride;
  int32_t rows_left, columns_left;  // of the output, from the tile's first
  bool add, final;
};

__device__ __forceinline__ RouterTarget router_target(const RouterOutParams& p, const RouterSegment& segment) {
  const int row_tile = router_row_tile(p.work, segment.tile);
  const int64_t row = router_first_row(p.work, segment.tile, segment.rank), width = int64_t{p.work.blocks} * kRouterBlock;
  const int64_t column = (segment.tile - row_tile * p.work.column_tiles) * width;
  RouterTarget target;
  target.rows_left = static_cast<int32_t>(p.work.rows - row);
  target.columns_left = static_cast<int32_t>(p.work.columns - column);
  target.add = segment.slot < 0 && segment.first_step > 0;
  target.final = segment.slot < 0 && segment.end_step == p.work.steps;
  if (segment.slot < 0) {
    target.row_stride = p.out_row_stride;
    target.column_stride = p.out_column_stride;
    target.data = p.out + row * p.out_row_stride + column * p.out_column_stride;
  } else {
    // Whole quads, so that router_special reads nothing that nobody wrote.
    target.rows_left = kRouterRows;
    target.columns_left = min(static_cast<int32_t>(width), (target.columns_left + 3) / 4 * 4);
    const bool transposed = router_slots_transposed(p);
    target.row_stride = transposed ? 1 : width;
    target.column_stride = transposed ? kRouterRows : 1;
    target.data = p.slots + router_place(p.work, segment.slot, segment.rank) * (kRouterRows * width);
  }
  return target;
}

// The lane's part of a block in memory: eight fours of elements next to each other along columns, or 16 pairs along rows, or
// where strides or an odd extent forbid that 32 elements.
template <bool kPairedRows>
struct RouterPlace {
  static constexpr int kNextRow = kPairedRows ? 1 : 8;
  float* data;  // of the lane's first row and column
  int64_t row_stride, column_stride;
  int rows_left, columns_left;  // from there
  bool wide;

  __device__ __forceinline__ RouterPlace(const RouterTarget& target, int row, int first_column, int c)
      : data(target.data + row * target.row_stride + (first_column + 4 * c) * target.column_stride),
        row_stride(target.row_stride),
        column_stride(target.column_stride),
        rows_left(target.rows_left - row),
        columns_left(target.columns_left - first_column - 4 * c),
        wide(kPairedRows ? row_stride == 1 && target.rows_left % 2 == 0 : column_stride == 1 && target.columns_left % 4 == 0) {}

  // Row and column of element e from the lane's first.
  __device__ static constexpr int row_of(int e) { return (e >> 1 & 1) * kNextRow; }
  __device__ static constexpr int column_of(int e) { return 16 * (e >> 3) + 2 * (e >> 2 & 1) + (e & 1); }
  // First element of a four (two rows, four groups of columns) or of a pair (16 columns); the others are 1, 4, 5 or 2 further.
  __device__ static constexpr int four(int n) { return 8 * (n >> 1) + 2 * (n & 1); }
  __device__ static constexpr int pair(int n) { return 4 * (n >> 1) + (n & 1); }

  // Of the unit stride of wide accesses the compiler should know.
  __device__ __forceinline__ RouterPlace known_wide() const {
    RouterPlace known = *this;
    (kPairedRows ? known.row_stride : known.column_stride) = 1;
    return known;
  }

  __device__ __forceinline__ bool inside(int e) const { return row_of(e) < rows_left && column_of(e) < columns_left; }
  __device__ __forceinline__ float* at(int e) const { return data + row_of(e) * row_stride + column_of(e) * column_stride; }

  // `kAll`: where all elements are inside.
  template <bool kAll>
  __device__ __forceinline__ void add_wide(float (&totals)[32]) const {
    if constexpr (kPairedRows) {
#pragma unroll
      for (int half = 0; half < 16; half += 8) {
        float2 sums[8];
#pragma unroll
        for (int n = 0; n < 8; ++n) {
          const int e = pair(half + n);
          sums[n] = kAll || inside(e) ? *reinterpret_cast<const float2*>(at(e)) : make_float2(0.f, 0.f);
        }
#pragma unroll
        for (int n = 0; n < 8; ++n) {
          const int e = pair(half + n);
          totals[e] = __fadd_rn(sums[n].x, totals[e]);
          totals[e + 2] = __fadd_rn(sums[n].y, totals[e + 2]);
        }
      }
    } else {
      float4 sums[8];  // all loads before the first addition: one latency
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        sums[n] = kAll || inside(four(n)) ? *reinterpret_cast<const float4*>(at(four(n))) : make_float4(0.f, 0.f, 0.f, 0.f);
      }
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const int e = four(n);
        totals[e] = __fadd_rn(sums[n].x, totals[e]);
        totals[e + 1] = __fadd_rn(sums[n].y, totals[e + 1]);
        totals[e + 4] = __fadd_rn(sums[n].z, totals[e + 4]);
        totals[e + 5] = __fadd_rn(sums[n].w, totals[e + 5]);
      }
    }
  }

  // The same place, of which nothing is known: else the addresses of elements and which are inside, once found out, would be kept in
  // registers from the first use to the last.
  __device__ __forceinline__ RouterPlace anew() const {
    RouterPlace place = *this;
    place.rows_left = ptx::opaque(rows_left);
    place.columns_left = ptx::opaque(columns_left);
    place.data = ptx::opaque(data);
    return place;
  }

  __device__ __forceinline__ void add(float (&totals)[32]) const {
    const RouterPlace here = anew();
    if (wide) {
      here.template add_wide<false>(totals);
      return;
    }
#pragma unroll
    for (int e = 0; e < 32; ++e) {
      if (here.inside(e)) totals[e] = __fadd_rn(*here.at(e), totals[e]);
    }
  }

  template <bool kAll>
  __device__ __forceinline__ void store_wide(const float (&totals)[32]) const {
    if constexpr (kPairedRows) {
#pragma unroll
      for (int n = 0; n < 16; ++n) {
        const int e = pair(n);
        if (kAll || inside(e)) *reinterpret_cast<float2*>(at(e)) = make_float2(totals[e], totals[e + 2]);
      }
    } else {
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const int e = four(n);
        if (kAll || inside(e)) *reinterpret_cast<float4*>(at(e)) = make_float4(totals[e], totals[e + 1], totals[e + 4], totals[e + 5]);
      }
    }
  }

  __device__ __forceinline__ void store(const float (&totals)[32]) const {
    const RouterPlace here = anew();
    if (wide) {
      here.template store_wide<false>(totals);
      return;
    }
#pragma unroll
    for (int e = 0; e < 32; ++e) {
      if (here.inside(e)) *here.at(e) = totals[e];
    }
  }
};

// What a lane knows of its two rows when their sums are complete.
struct RouterRows {
  int exponent[2];
  bool tiny[2];
  __device__ __forceinline__ explicit RouterRows(const RouterRowState& rows)
      : exponent{rows.exponent(0), rows.exponent(1)}, tiny{rows.tiny(0), rows.tiny(1)} {}
};

// What undoes the scales of a lane's 16 columns of a block.
using RouterFactors = float4[4];

// The first of them, counted over all tiles of a row of tiles.
__device__ __forceinline__ int64_t router_column(const RouterOutParams& p, const RouterSegment& segment, int first_column, int lane) {
  return int64_t{router_column_tile(p.work, segment.tile)} * p.work.blocks * kRouterBlock + first_column + 4 * (lane & 3);
}

// Volatile, so that the loads stay where they are asked for.
__device__ __forceinline__ void load_factors(RouterFactors& factors, const RouterOutParams& p, const RouterSegment& segment,
                                             int first_column, int lane) {
  const float* source = p.terms.factors + router_column(p, segment, first_column, lane);
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    asm volatile("ld.global.v4.f32 {%0,%1,%2,%3}, [%4];"
                 : "=f"(factors[n].x), "=f"(factors[n].y), "=f"(factors[n].z), "=f"(factors[n].w)
                 : "l"(source + 16 * n));
  }
}

// Brings the factors of a tile's columns near, long before load_factors asks for them.
__device__ __forceinline__ void fetch_factors(const RouterOutParams& p, const RouterSegment& segment, int blocks) {
  constexpr int kLine = 32;  // floats
  const int lane = ptx::thread_index() & 31;
  if (lane * kLine >= blocks * kRouterBlock) return;
  const int64_t column = int64_t{router_column_tile(p.work, segment.tile)} * p.work.blocks * kRouterBlock + lane * kLine;
  asm volatile("prefetch.global.L1 [%0];" ::"l"(p.terms.factors + column));
}

// Undoes the scales of a finished block where all of it and the lanes' rows are ordinary, for the whole warp, and says whether it has.
__device__ __forceinline__ bool finish_ordinary(float (&x)[32], bool ordinary_rows, const RouterFactors& factors) {
  // Four chains each, so that a warp does not wait for one long one. inf and NaN times zero are NaN.
  float least[4], zero[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
  for (int n = 0; n < 4; ++n) least[n] = fminf(fminf(factors[n].x, factors[n].y), fminf(factors[n].z, factors[n].w));
#pragma unroll
  for (int e = 0; e < 32; ++e) zero[e & 3] = __fmaf_rn(x[e], 0.f, zero[e & 3]);
  const bool finite = (zero[0] + zero[1]) + (zero[2] + zero[3]) == 0.f;
  const float least_factor = fminf(fminf(least[0], least[1]), fminf(least[2], least[3]));
  if (!__all_sync(0xffffffffu, ordinary_rows && least_factor > 0.f && finite)) return false;
#pragma unroll
  for (int e = 0; e < 32; ++e) {
    const float4& by = factors[e >> 3];
    x[e] = __fmul_rn(x[e], e & 4 ? (e & 1 ? by.w : by.z) : (e & 1 ? by.y : by.x));
  }
  return true;
}

// Undoes the scales of a finished block and marks what has to be computed anew; `any` says that there is something.
template <bool kPairedRows>
__device__ __forceinline__ void finish_block(const RouterOutParams& p, const RouterSegment& segment, float (&x)[32],
                                             int first_column, const RouterRows& rows, const RouterFactors& factors, int lane,
                                             uint32_t& any) {
  bool redo = false;
  float least_factor = 1.f, zero = 0.f;  // inf and NaN times zero are NaN
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    least_factor = fminf(least_factor, fminf(fminf(factors[n].x, factors[n].y), fminf(factors[n].z, factors[n].w)));
  }
#pragma unroll
  for (int e = 0; e < 32; ++e) zero = __fmaf_rn(x[e], 0.f, zero);
  const bool plain = (rows.exponent[0] | rows.exponent[1]) == 0 && !rows.tiny[0] && !rows.tiny[1];
  if (plain && least_factor > 0.f && zero == 0.f) {
#pragma unroll
    for (int e = 0; e < 32; ++e) {
      const float4& by = factors[e >> 3];
      x[e] = __fmul_rn(x[e], e & 4 ? (e & 1 ? by.w : by.z) : (e & 1 ? by.y : by.x));
    }
  } else {
    const int64_t column = router_column(p, segment, first_column, lane);
#pragma unroll
    for (int e = 0; e < 32; ++e) {
      const int exponent = rows.exponent[e >> 1 & 1] + p.terms.exponents[column + RouterPlace<kPairedRows>::column_of(e)];
      const bool again = must_redo(x[e], rows.tiny[e >> 1 & 1]);
      redo |= again;
      x[e] = marked(scale_by(x[e], -exponent), again);
    }
  }
  if (redo) any = 1;
}

// What is known of a warp's rows at the end of a segment, for whoever adds the segments up or computes elements anew.
template <bool kPairedRows>
__device__ __forceinline__ void store_rows(const RouterOutParams& p, const RouterSegment& segment, int first_row,
                                           const RouterRows& rows, int lane) {
  if ((lane & 3) != 0) return;
  const int g = lane >> 2;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = first_row + (kPairedRows ? 2 * g + i : g + 8 * i);
    p.row_exponents[router_first_row(p.work, segment.tile, segment.rank) + row] = rows.exponent[i];
    if (segment.slot >= 0) p.slot_tiny[router_place(p.work, segment.slot, segment.rank) * kRouterRows + row] = rows.tiny[i];
  }
}

}  // namespace dense_projection_det_gemm
