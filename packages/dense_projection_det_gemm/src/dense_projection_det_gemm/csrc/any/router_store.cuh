// Where a block of 16 rows of a warp and 64 columns goes: the output, sums of segments in it, or a slot of partial sums. A lane holds
// totals[4 j + i]: row g + 8 (i >> 1) (or 2 g + (i >> 1), where rows lie next to each other), column 8 j + 2 c + (i & 1).
#pragma once

#include "any/router_split.cuh"

namespace dense_projection_det_gemm {

struct RouterTarget {
  float* data;  // of the tile's first element
  int64_t row_stride, column_stride;
  int32_t rows_left, columns_left;  // of the output, from the tile's first
  bool add, final;
};

__device__ __forceinline__ RouterTarget router_target(const RouterOutParams& p, const RouterSegment& segment) {
  const int row_tile = segment.tile / p.work.column_tiles;
  const int64_t row = int64_t{row_tile} * kRouterRows, width = int64_t{p.work.blocks} * kRouterBlock;
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
    const bool transposed = router_slots_transposed(p);
    target.row_stride = transposed ? 1 : width;
    target.column_stride = transposed ? kRouterRows : 1;
    target.data = p.slots + segment.slot * (kRouterRows * width);
  }
  return target;
}

// Two elements a row apart or a column apart, each where it is wanted.
template <bool kPairedRows>
__device__ __forceinline__ void store_four(const RouterTarget& target, int row, int column, const float (&x)[4]) {
  constexpr int kNextRow = kPairedRows ? 1 : 8;
  float* at = target.data + row * target.row_stride + column * target.column_stride;
  if (kPairedRows && target.row_stride == 1 && row + 1 < target.rows_left) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (column + i < target.columns_left) *reinterpret_cast<float2*>(at + i * target.column_stride) = make_float2(x[i], x[2 + i]);
    }
    return;
  }
  if (!kPairedRows && target.column_stride == 1 && column + 1 < target.columns_left) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (row + 8 * i < target.rows_left) *reinterpret_cast<float2*>(at + 8 * i * target.row_stride) = make_float2(x[2 * i], x[2 * i + 1]);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (row + kNextRow * (i >> 1) < target.rows_left && column + (i & 1) < target.columns_left) {
      at[kNextRow * (i >> 1) * target.row_stride + (i & 1) * target.column_stride] = x[i];
    }
  }
}

template <bool kPairedRows>
__device__ __forceinline__ void load_four(const RouterTarget& target, int row, int column, float (&x)[4]) {
  constexpr int kNextRow = kPairedRows ? 1 : 8;
  const float* at = target.data + row * target.row_stride + column * target.column_stride;
  if (kPairedRows && target.row_stride == 1 && row + 1 < target.rows_left && column + 1 < target.columns_left) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float2 two = *reinterpret_cast<const float2*>(at + i * target.column_stride);
      x[i] = two.x, x[2 + i] = two.y;
    }
    return;
  }
  if (!kPairedRows && target.column_stride == 1 && column + 1 < target.columns_left && row + 8 < target.rows_left) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const float2 two = *reinterpret_cast<const float2*>(at + 8 * i * target.row_stride);
      x[2 * i] = two.x, x[2 * i + 1] = two.y;
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const bool inside = row + kNextRow * (i >> 1) < target.rows_left && column + (i & 1) < target.columns_left;
    x[i] = inside ? at[kNextRow * (i >> 1) * target.row_stride + (i & 1) * target.column_stride] : 0.f;
  }
}

// first_row and first_column in the tile: of the warp's 16 rows, of the block. `tiny`: of the lane's two rows.
template <bool kPairedRows>
__device__ __forceinline__ void store_block(const RouterOutParams& p, const RouterSegment& segment, const RouterTarget& target,
                                            const float (&totals)[32], int first_row, int first_column, const RouterRowState& rows,
                                            const bool (&tiny)[2], int lane) {
  const int g = lane >> 2, c = lane & 3;
  const int row = first_row + (kPairedRows ? 2 * g : g);
  const int64_t padded_column =
      int64_t{segment.tile % p.work.column_tiles} * p.work.blocks * kRouterBlock + first_column;
  const bool plain = __all_sync(0xffffffffu, (rows.exponent[0] | rows.exponent[1]) == 0);
  bool redo[2] = {false, false};
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    const int column = 8 * j + 2 * c;
    float x[4] = {totals[4 * j], totals[4 * j + 1], totals[4 * j + 2], totals[4 * j + 3]};
    if (target.add) {
      float sum[4];
      load_four<kPairedRows>(target, row, first_column + column, sum);
#pragma unroll
      for (int i = 0; i < 4; ++i) x[i] = __fadd_rn(sum[i], x[i]);
    }
    if (target.final) {
      const float2 factor = *reinterpret_cast<const float2*>(p.terms.factors + padded_column + column);
      const bool simple = plain && factor.x != 0.f && factor.y != 0.f;
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const bool again = must_redo(x[i], tiny[i >> 1]);
        redo[i >> 1] |= again;
        const float result = simple ? __fmul_rn(x[i], i & 1 ? factor.y : factor.x)
                                    : scale_by(x[i], -rows.exponent[i >> 1] - p.terms.exponents[padded_column + column + (i & 1)]);
        x[i] = marked(result, again);
      }
    }
    store_four<kPairedRows>(target, row, first_column + column, x);
  }
  if (!target.final) return;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const unsigned votes = __ballot_sync(0xffffffffu, redo[i]);
    if (c == 0) {
      uint8_t* flags = p.redo + (int64_t{segment.tile} * p.work.blocks + first_column / kRouterBlock) * kRouterRows;
      flags[row + (kPairedRows ? i : 8 * i)] = (votes >> (4 * g) & 15) != 0;
    }
  }
}

// What is known of a warp's rows at the end of a segment, for whoever adds the segments up or computes elements anew.
template <bool kPairedRows>
__device__ __forceinline__ void store_rows(const RouterOutParams& p, const RouterSegment& segment, int first_row,
                                           const RouterRowState& rows, const bool (&tiny)[2], int lane) {
  if ((lane & 3) != 0) return;
  const int g = lane >> 2;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const int row = first_row + (kPairedRows ? 2 * g + i : g + 8 * i);
    p.row_exponents[segment.tile / p.work.column_tiles * kRouterRows + row] = rows.exponent[i];
    if (segment.slot >= 0) p.slot_tiny[int64_t{segment.slot} * kRouterRows + row] = tiny[i];
  }
}

}  // namespace dense_projection_det_gemm
