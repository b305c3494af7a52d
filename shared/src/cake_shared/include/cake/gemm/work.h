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
};

// Row units advance fastest inside a group, so that CTAs at work together share rows of A and columns of B in L2.
CAKE_GEMM_HOST_DEVICE inline Unit place_of(const Tiling& tiling, int32_t unit) {
  const int32_t tiles = tiling.row_units * tiling.column_units;
  const int32_t batch = unit / tiles, inner = unit - batch * tiles;
  const int32_t group_tiles = tiling.group_rows * tiling.column_units;
  const int32_t group = inner / group_tiles, place = inner - group * group_tiles;
  const int32_t first = group * tiling.group_rows;
  const int32_t left = tiling.row_units - first;
  const int32_t rows = left < tiling.group_rows ? left : tiling.group_rows;
  const int32_t column = place / rows;
  return {batch, first + place - column * rows, column, 0, tiling.blocks, kWhole, kWhole};
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

}  // namespace cake::gemm
