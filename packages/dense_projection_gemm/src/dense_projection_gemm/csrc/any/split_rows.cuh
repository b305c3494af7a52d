// Where the rows of split tiles lie: what gemm_split_zero_any and gemm_split_round_any walk over.
#pragma once

#include "params.h"

namespace dense_projection_gemm {

inline constexpr int kThreads = 256;

struct SplitRow {
  int64_t sum;          // element of SplitRowsParams::sums
  int64_t out;          // element of the result
  int32_t columns;      // of the row that lie in the result; 0 where the row is outside
};

// Row `index` of [split units, 2 CTAs, tile rows].
CAKE_GEMM_HOST_DEVICE inline SplitRow split_row(const SplitRowsParams& p, int64_t index) {
  const int64_t tile = index / p.tile_m;
  const int32_t row = static_cast<int32_t>(index - tile * p.tile_m);
  const int32_t split = static_cast<int32_t>(tile / 2), rank = static_cast<int32_t>(tile % 2);
  const cake::gemm::Unit unit = cake::gemm::unit_of(p.tiling.tiles, p.tiling.whole_units + split);
  const int32_t m = (p.pair_along_m ? unit.row_unit * 2 + rank : unit.row_unit) * p.tile_m + row;
  const int32_t n = (p.pair_along_m ? unit.column_unit : unit.column_unit * 2 + rank) * p.tile_n;
  const int32_t left = m < p.m && n < p.n ? p.n - n : 0;
  return {index * p.tile_n, unit.batch * p.batch_stride + m * p.row_stride + n, left < p.tile_n ? left : p.tile_n};
}

CAKE_GEMM_HOST_DEVICE inline int64_t split_rows(const SplitRowsParams& p) {
  return int64_t{p.tiling.tiles.units - p.tiling.whole_units} * 2 * p.tile_m;
}

}  // namespace dense_projection_gemm
