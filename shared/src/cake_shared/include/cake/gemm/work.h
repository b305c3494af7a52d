// From a work index to a batch, a piece of the contraction and a tile. Host and device; no bit of a result depends on it.
#pragma once

#include "cake/gemm/params.h"
#include "cake/gemm/tiles.h"

namespace cake::gemm {

struct Unit {
  int32_t batch, piece, row_unit, column_unit;
};

// Row units advance fastest inside a group, so that CTAs at work together share rows of A and columns of B in L2.
CAKE_GEMM_HOST_DEVICE inline Unit unit_of(const Tiling& tiling, int32_t index) {
  const int32_t tiles = tiling.row_units * tiling.column_units;
  const int32_t outer = index / tiles, inner = index - outer * tiles;
  const int32_t group_tiles = tiling.group_rows * tiling.column_units;
  const int32_t group = inner / group_tiles, place = inner - group * group_tiles;
  const int32_t first = group * tiling.group_rows;
  const int32_t left = tiling.row_units - first;
  const int32_t rows = left < tiling.group_rows ? left : tiling.group_rows;
  const int32_t column = place / rows;
  const int32_t batch = outer / tiling.pieces;
  return {batch, outer - batch * tiling.pieces, first + place - column * rows, column};
}

CAKE_GEMM_HOST_DEVICE inline int32_t blocks_of_piece(const Tiling& tiling, int32_t piece) {
  const int32_t left = tiling.blocks - piece * tiling.piece_blocks;
  return left < tiling.piece_blocks ? left : tiling.piece_blocks;
}

}  // namespace cake::gemm
