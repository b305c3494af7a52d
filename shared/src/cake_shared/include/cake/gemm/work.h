// From a work index to a batch, a piece of the contraction and a tile. Host and device; no bit of a result depends on it.
#pragma once

#include "cake/gemm/params.h"
#include "cake/gemm/tiles.h"

namespace cake::gemm {

inline constexpr int32_t kWhole = -1;

struct Unit {
  int32_t batch, row_unit, column_unit;
  int32_t first_block, blocks;  // of the contraction
  int32_t slot;                 // of the partial sums: cut unit * pieces + piece; kWhole: none, this is the result
  int32_t half;                 // 0 or 1: these columns of it alone; kWhole: all
  bool beside;                  // the first CTA's rows alone, and the next column unit's columns too
};

// Row units advance fastest inside a group, so that CTAs at work together share rows of A and columns of B in L2.
CAKE_GEMM_HOST_DEVICE inline Unit place_of(const Tiling& tiling, int32_t unit) {
  int32_t row_units = tiling.row_units;
  if (tiling.short_units > 0) {
    const int32_t pairs = (tiling.column_units + 1) / 2;
    --row_units;
    if (unit < tiling.short_units) return {unit / pairs, row_units, unit % pairs * 2, 0, tiling.blocks, kWhole, kWhole, true};
    unit -= tiling.short_units;
  }
  const int32_t tiles = row_units * tiling.column_units;
  const int32_t batch = unit / tiles, inner = unit - batch * tiles;
  const int32_t columns = tiling.column_units - tiling.last_apart, filled = row_units * columns;
  if (inner >= filled) return {batch, inner - filled, columns, 0, tiling.blocks, kWhole, kWhole, false};
  const int32_t group_tiles = tiling.group_rows * columns;
  const int32_t group = inner / group_tiles, place = inner - group * group_tiles;
  const int32_t first = group * tiling.group_rows;
  const int32_t left = row_units - first;
  const int32_t rows = left < tiling.group_rows ? left : tiling.group_rows;
  const int32_t column = place / rows;
  return {batch, first + place - column * rows, column, 0, tiling.blocks, kWhole, kWhole, false};
}

// The pieces of one range of the contraction come together, for the same reason.
CAKE_GEMM_HOST_DEVICE inline Unit unit_of(const Tiling& tiling, int32_t index) {
  if (index < tiling.whole_units) return place_of(tiling, index);
  if (tiling.halved) {
    const int32_t part = index - tiling.whole_units;
    Unit unit = place_of(tiling, tiling.whole_units + part / 2);
    unit.half = part % 2;
    return unit;
  }
  const int32_t cut_units = tiling.batches * tiling.row_units * tiling.column_units - tiling.whole_units;
  const int32_t piece = (index - tiling.whole_units) / cut_units;
  const int32_t cut = index - tiling.whole_units - piece * cut_units;
  Unit unit = place_of(tiling, tiling.whole_units + cut);
  unit.first_block = piece * tiling.piece_blocks;
  const int32_t left = tiling.blocks - unit.first_block;
  unit.blocks = left < tiling.piece_blocks ? left : tiling.piece_blocks;
  unit.slot = cut * tiling.pieces + piece;
  return unit;
}

// Every `step`-th unit from `first` on. With kStrides those of one column unit, and those that write whole rows of one batch, are found
// without divisions, which take as long as some of their products.
template <bool kStrides>
struct UnitWalk {
  const Tiling& tiling;
  int32_t index, step;
  Unit unit;
  bool strides, one_column;
  // What advances fastest: rows of a batch or, of units that write whole rows, the columns that they fill.
  int32_t places = 1, step_places = 0, step_rounds = 0, filled = 0;

  CAKE_GEMM_HOST_DEVICE UnitWalk(const Tiling& all, int32_t first, int32_t every)
      : tiling(all), index(first), step(every), unit(unit_of(all, first)), strides(kStrides && can_stride(all)),
        one_column(all.column_units == 1) {
    if (!strides) return;
    places = one_column ? all.row_units : all.column_units - all.last_apart;
    filled = all.row_units * places;
    step_rounds = step / places;
    step_places = step - step_rounds * places;
  }
  CAKE_GEMM_HOST_DEVICE static bool can_stride(const Tiling& all) {
    const bool whole_rows = all.group_rows == 1 && all.batches == 1;
    return (all.column_units == 1 || whole_rows) && all.short_units == 0 && all.whole_units == all.units;
  }
  CAKE_GEMM_HOST_DEVICE bool more() const { return index < tiling.units; }
  CAKE_GEMM_HOST_DEVICE void advance() {
    index += step;
    if (!strides) {
      if (more()) unit = unit_of(tiling, index);
    } else if (one_column) {
      step_over(unit.row_unit, unit.batch);
    } else if (index < filled) {
      step_over(unit.column_unit, unit.row_unit);
    } else {
      unit.row_unit = index - filled;
      unit.column_unit = places;
    }
  }
  CAKE_GEMM_HOST_DEVICE void step_over(int32_t& place, int32_t& round) const {
    place += step_places;
    round += step_rounds;
    if (place < places) return;
    place -= places;
    ++round;
  }
};

}  // namespace cake::gemm
