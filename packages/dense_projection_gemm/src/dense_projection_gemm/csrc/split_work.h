// Stream-K: which tiles, and which blocks of their contraction, a cluster works on. Host and device.
//
// The first `whole_units` tiles are computed whole, one after the other by each cluster. The blocks of all other tiles form
// one row that is cut into equal pieces, at most one a cluster, so that all end together; what a piece has of a tile is
// added to the tile's sum in memory, in any order.
#pragma once

#include "cake/gemm/work.h"

namespace dense_projection_gemm {

struct SplitTiling {
  cake::gemm::Tiling tiles;  // pieces is 1
  int32_t clusters;
  int32_t whole_units;
  int32_t pieces;         // of the row, for the first clusters
  int32_t piece_blocks;   // of a piece; the first `longer_pieces` have one more
  int32_t longer_pieces;
};

struct SplitItem {
  cake::gemm::Unit unit;
  int32_t first_block, blocks;
  int32_t split;  // place among the split tiles; below 0: a whole tile
};

class SplitWalk {
 public:
  CAKE_GEMM_HOST_DEVICE SplitWalk(const SplitTiling& tiling, int32_t cluster)
      : tiling_(tiling),
        whole_(cluster),
        begin_(cluster * tiling.piece_blocks + (cluster < tiling.longer_pieces ? cluster : tiling.longer_pieces)),
        left_(cluster < tiling.pieces ? tiling.piece_blocks + (cluster < tiling.longer_pieces ? 1 : 0) : 0) {}

  // Whether there is another item, which is then in `item`.
  CAKE_GEMM_HOST_DEVICE bool next(SplitItem& item) {
    const int32_t blocks = tiling_.tiles.blocks;
    if (whole_ < tiling_.whole_units) {
      item = {cake::gemm::unit_of(tiling_.tiles, whole_), 0, blocks, -1};
      whole_ += tiling_.clusters;
      return true;
    }
    if (left_ == 0) return false;
    const int32_t split = begin_ / blocks, first = begin_ - split * blocks;
    const int32_t count = left_ < blocks - first ? left_ : blocks - first;
    item = {cake::gemm::unit_of(tiling_.tiles, tiling_.whole_units + split), first, count, split};
    begin_ += count;
    left_ -= count;
    return true;
  }

 private:
  const SplitTiling& tiling_;
  int32_t whole_;
  int32_t begin_, left_;  // of the piece, in blocks
};

}  // namespace dense_projection_gemm
