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
    // Whole quads, so that router_special reads nothing that nobody wrote.
    target.rows_left = kRouterRows;
    target.columns_left = min(static_cast<int32_t>(width), (target.columns_left + 3) / 4 * 4);
    const bool transposed = router_slots_transposed(p);
    target.row_stride = transposed ? 1 : width;
    target.column_stride = transposed ? kRouterRows : 1;
    target.data = p.slots + segment.slot * (kRouterRows * width);
  }
  return target;
}

// The lane's part of a block in memory: 16 pairs of elements next to each other or, where strides or an odd extent forbid that, 32 elements.
template <bool kPairedRows>
struct RouterPlace {
  static constexpr int kNextRow = kPairedRows ? 1 : 8;
  float* data;
  int64_t row_stride, column_stride;
  int rows_left, columns_left;  // from the lane's first row and the block's column 2 c
  bool paired;

  __device__ __forceinline__ RouterPlace(const RouterTarget& target, int row, int first_column, int c)
      : data(target.data + row * target.row_stride + (first_column + 2 * c) * target.column_stride),
        row_stride(target.row_stride),
        column_stride(target.column_stride),
        rows_left(target.rows_left - row),
        columns_left(target.columns_left - first_column - 2 * c),
        paired(kPairedRows ? row_stride == 1 && target.rows_left % 2 == 0 : column_stride == 1 && target.columns_left % 2 == 0) {}

  __device__ __forceinline__ bool has_pair(int j, int i) const {
    return kPairedRows ? rows_left > 0 && columns_left > 8 * j + i : rows_left > 8 * i && columns_left > 8 * j;
  }
  __device__ __forceinline__ float2* pair(int j, int i) const {
    return reinterpret_cast<float2*>(data + (kPairedRows ? (8 * j + i) * column_stride : 8 * j + 8 * i * row_stride));
  }
  // Which of the four elements of fragment j a pair has.
  __device__ static constexpr int left(int j, int i) { return 4 * j + (kPairedRows ? i : 2 * i); }
  __device__ static constexpr int right(int j, int i) { return 4 * j + (kPairedRows ? 2 + i : 2 * i + 1); }

  template <class Function>
  __device__ __forceinline__ void each_element(const Function& function) const {
#pragma unroll 1
    for (int e = 0; e < 32; ++e) {
      const int row = (e >> 1 & 1) * kNextRow, column = (e >> 2) * 8 + (e & 1);
      if (row < rows_left && column < columns_left) function(e, data + row * row_stride + column * column_stride);
    }
  }

  __device__ __forceinline__ void add(float (&totals)[32]) const {
    if (!paired) {
#pragma unroll
      for (int e = 0; e < 32; ++e) {
        const int row = (e >> 1 & 1) * kNextRow, column = (e >> 2) * 8 + (e & 1);
        if (row < rows_left && column < columns_left) totals[e] = __fadd_rn(data[row * row_stride + column * column_stride], totals[e]);
      }
      return;
    }
#pragma unroll
    for (int half = 0; half < 8; half += 4) {
      float2 sums[4][2];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int i = 0; i < 2; ++i) sums[j][i] = has_pair(half + j, i) ? *pair(half + j, i) : make_float2(0.f, 0.f);
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& x = totals[left(half + j, i)];
          float& y = totals[right(half + j, i)];
          x = __fadd_rn(sums[j][i].x, x);
          y = __fadd_rn(sums[j][i].y, y);
        }
      }
    }
  }

  __device__ __forceinline__ void store(const float (&totals)[32]) const {
    if (!paired) {
      float results[32];
#pragma unroll
      for (int e = 0; e < 32; ++e) results[e] = totals[e];
      each_element([&](int e, float* at) { *at = results[e]; });
      return;
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) {
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (has_pair(j, i)) *pair(j, i) = make_float2(totals[left(j, i)], totals[right(j, i)]);
      }
    }
  }
};

// What a lane knows of its two rows when their sums are complete.
struct RouterRows {
  int exponent[2];
  bool tiny[2];
  __device__ __forceinline__ explicit RouterRows(const RouterRowState& rows)
      : exponent{rows.exponent[0], rows.exponent[1]}, tiny{rows.tiny(0), rows.tiny(1)} {}
};

// Undoes the scales of a finished block and marks what has to be computed anew.
template <bool kPairedRows>
__device__ __forceinline__ void finish_block(const RouterOutParams& p, const RouterSegment& segment, float (&x)[32], int row,
                                             int first_column, const RouterRows& rows, int lane) {
  const int g = lane >> 2, c = lane & 3;
  const int64_t column = int64_t{segment.tile % p.work.column_tiles} * p.work.blocks * kRouterBlock + first_column + 2 * c;
  const bool plain = __all_sync(0xffffffffu, (rows.exponent[0] | rows.exponent[1]) == 0);
  bool redo[2] = {false, false};
#pragma unroll
  for (int quarter = 0; quarter < 4; ++quarter) {
    float* y = x + 8 * quarter;
    bool simple = plain, again[2] = {false, false};
    float2 factors[2];
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      factors[j] = __ldg(reinterpret_cast<const float2*>(p.terms.factors + column + 16 * quarter + 8 * j));
      simple = simple && factors[j].x != 0.f && factors[j].y != 0.f;
    }
#pragma unroll
    for (int e = 0; e < 8; ++e) again[e >> 1 & 1] |= must_redo(y[e], rows.tiny[e >> 1 & 1]);
    redo[0] |= again[0], redo[1] |= again[1];
    if (simple && !again[0] && !again[1]) {
#pragma unroll
      for (int e = 0; e < 8; ++e) y[e] = __fmul_rn(y[e], e & 1 ? factors[e >> 2].y : factors[e >> 2].x);
    } else {
#pragma unroll
      for (int e = 0; e < 8; ++e) {
        const int exponent = rows.exponent[e >> 1 & 1] + p.terms.exponents[column + 16 * quarter + 8 * (e >> 2) + (e & 1)];
        y[e] = marked(scale_by(y[e], -exponent), must_redo(y[e], rows.tiny[e >> 1 & 1]));
      }
    }
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const unsigned votes = __ballot_sync(0xffffffffu, redo[i]);
    if (c == 0) {
      uint8_t* flags = p.redo + (int64_t{segment.tile} * p.work.blocks + first_column / kRouterBlock) * kRouterRows;
      flags[row + RouterPlace<kPairedRows>::kNextRow * i] = (votes >> (4 * g) & 15) != 0;
    }
  }
}

// first_row and first_column in the tile: of the warp's 16 rows, of the block.  Changes the totals.
template <bool kPairedRows>
__device__ __forceinline__ void store_block(const RouterOutParams& p, const RouterSegment& segment, const RouterTarget& target,
                                            float (&totals)[32], int first_row, int first_column, const RouterRows& rows,
                                            int lane) {
  const int row = first_row + (lane >> 2) * (kPairedRows ? 2 : 1);
  const RouterPlace<kPairedRows> place(target, row, first_column, lane & 3);
  if (target.add) place.add(totals);
  if (target.final) finish_block<kPairedRows>(p, segment, totals, row, first_column, rows, lane);
  place.store(totals);
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
    p.row_exponents[segment.tile / p.work.column_tiles * kRouterRows + row] = rows.exponent[i];
    if (segment.slot >= 0) p.slot_tiny[int64_t{segment.slot} * kRouterRows + row] = rows.tiny[i];
  }
}

}  // namespace dense_projection_det_gemm
