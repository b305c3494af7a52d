// How the router GEMM D [rows, columns] = P [rows, depth] Q [columns, depth]^T is cut: tiles, steps, units of work. Host and
// device.
//
// The contraction of a tile is cut into segments; a segment is summed from zero in FP32, and segments are added in ascending
// order.
//   parts   every tile is cut at multiples of part_steps: a function of the depth alone, so rows do not see how many others there
//   are.
//           A unit is a tile (its CTA adds the segments up in the output) or, with few tiles, a part: the same sums, the same
//           bits.
//   ranges  all steps of all tiles, tile after tile, are dealt out in `ranges` ranges of equal length: a function of the shape
//   alone.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define CAKE_ROUTER_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define CAKE_ROUTER_HOST_DEVICE inline
#endif

namespace dense_projection_det_gemm {

inline constexpr int kRouterRows = 128;  // of a CTA's part of a tile
inline constexpr int kRouterBlock = 64;  // columns of a block; a tile has `blocks` of them
inline constexpr int kRouterStep = 16;   // of the contraction: after each, partial sums go to FP32 registers
inline constexpr int kRouterHint = 16;   // elements of a row that its scale is taken from
inline constexpr int kRouterTerms = 3;
inline constexpr int kRouterBlockBytes = kRouterTerms * kRouterBlock * kRouterStep * 2;  // of a step, in the planes
inline constexpr int kRouterCtas = 2;                                                    // of a native program's cluster
inline constexpr int kRouterWarps = 8;  // of a CTA that add up products, 16 rows each

// Quotients of tiles, in two instructions instead of a division's forty.
struct RouterDivisor {
  uint32_t multiplier, shift;
};

// For dividends below 2^31.
inline RouterDivisor make_router_divisor(int32_t by) {
  uint32_t shift = 0;
  while (uint64_t{1} << shift < static_cast<uint64_t>(by)) ++shift;
  return {static_cast<uint32_t>((((uint64_t{1} << shift) - by) << 32) / by + 1), shift};
}

CAKE_ROUTER_HOST_DEVICE int32_t router_quotient(int32_t tile, const RouterDivisor& by) {
  const uint32_t high = static_cast<uint32_t>(uint64_t{static_cast<uint32_t>(tile)} * by.multiplier >> 32);
  return static_cast<int32_t>((high + static_cast<uint32_t>(tile)) >> by.shift);
}

// Quotients of steps: a division of 64 bits is a function of its own, whose callers the compiler gives few registers.
struct RouterLongDivisor {
  uint64_t multiplier;
  int64_t by;
};

inline RouterLongDivisor make_router_long_divisor(int64_t by) { return {~uint64_t{0} / static_cast<uint64_t>(by), by}; }

// Of a count from 0 on.
CAKE_ROUTER_HOST_DEVICE int64_t router_quotient(int64_t count, const RouterLongDivisor& by) {
#ifdef __CUDA_ARCH__
  const uint64_t high = __umul64hi(static_cast<uint64_t>(count), by.multiplier);
#else
  const uint64_t high = static_cast<uint64_t>(static_cast<unsigned __int128>(count) * by.multiplier >> 64);
#endif
  const int64_t quotient = static_cast<int64_t>(high);  // or one less than it
  return count - quotient * by.by >= by.by ? quotient + 1 : quotient;
}

struct RouterWork {
  int32_t rows, columns, depth;
  int32_t steps;   // of the depth
  int32_t blocks;  // of a tile
  int32_t ctas;    // that share a tile, and what they read of Q: each has 128 of its rows
  int32_t row_tiles, column_tiles;
  int32_t part_steps;  // steps of a segment at most; `steps` for ranges
  int32_t units;
  int32_t units_per_tile;  // 0: ranges
  RouterDivisor by_column_tiles;
  RouterLongDivisor by_steps, by_units, by_all_steps;  // all tiles'
};

// Q's planes: for a step and a group of columns (as many as an instruction takes) its terms, of each the two halves of the step,
// of each the columns, of each 16 bytes.
struct RouterPlanes {
  int32_t columns;  // of a group: 128, or 64 where a tile has no more
  CAKE_ROUTER_HOST_DEVICE explicit RouterPlanes(const RouterWork& work) : columns(work.blocks == 1 ? 64 : 128) {}
  CAKE_ROUTER_HOST_DEVICE int32_t half_bytes() const { return columns * 16; }
  CAKE_ROUTER_HOST_DEVICE int32_t term_bytes() const { return columns * 32; }
  // Of a tile's column in a step's planes.
  CAKE_ROUTER_HOST_DEVICE int32_t offset(int32_t column) const {
    const int32_t group = column / columns;
    return group * kRouterTerms * term_bytes() + (column - group * columns) * 16;
  }
};

// Steps first .. first + count - 1 of all tiles' steps, tile after tile.
struct RouterUnit {
  int64_t first, end;
};

struct RouterSegment {
  int32_t tile, first_step, end_step;
  int32_t slot;  // where partial sums go; -1: the output
  int32_t rank;  // of the CTA among those that share the tile
};

CAKE_ROUTER_HOST_DEVICE int64_t router_range_begin(const RouterWork& work, int32_t range) {
  return router_quotient(range * work.by_all_steps.by, work.by_units);
}

CAKE_ROUTER_HOST_DEVICE RouterUnit router_unit(const RouterWork& work, int32_t unit) {
  if (work.units_per_tile == 0) return {router_range_begin(work, unit), router_range_begin(work, unit + 1)};
  const int32_t tile = unit / work.units_per_tile, part = unit - tile * work.units_per_tile;
  const int64_t tile_end = int64_t{tile + 1} * work.steps;
  const int64_t first = int64_t{tile} * work.steps + part * work.part_steps;
  return {first, work.units_per_tile == 1 || tile_end < first + work.part_steps ? tile_end : first + work.part_steps};
}

// The segment that begins at step `at` of a unit.
CAKE_ROUTER_HOST_DEVICE RouterSegment router_segment(const RouterWork& work, int32_t unit, const RouterUnit& range, int64_t at,
                                                     int32_t rank) {
  RouterSegment segment;
  segment.rank = rank;
  segment.tile = static_cast<int32_t>(router_quotient(at, work.by_steps));
  const int64_t tile_first = int64_t{segment.tile} * work.steps;
  segment.first_step = static_cast<int32_t>(at - tile_first);
  int32_t end = segment.first_step / work.part_steps * work.part_steps + work.part_steps;
  if (end > work.steps) end = work.steps;
  if (tile_first + end > range.end) end = static_cast<int32_t>(range.end - tile_first);
  segment.end_step = end;
  const bool whole = range.first <= tile_first && range.end >= tile_first + work.steps;
  segment.slot = whole ? -1 : work.units_per_tile > 1 ? unit : 2 * unit + (segment.first_step == 0);
  return segment;
}

// What a CTA keeps of a tile, or of a slot, is stored one after the other.
CAKE_ROUTER_HOST_DEVICE int64_t router_place(const RouterWork& work, int32_t tile_or_slot, int32_t rank) {
  return int64_t{tile_or_slot} * work.ctas + rank;
}

// A tile's places in a column and a row of tiles.
CAKE_ROUTER_HOST_DEVICE int32_t router_row_tile(const RouterWork& work, int32_t tile) {
  return router_quotient(tile, work.by_column_tiles);
}
CAKE_ROUTER_HOST_DEVICE int32_t router_column_tile(const RouterWork& work, int32_t tile) {
  return tile - router_row_tile(work, tile) * work.column_tiles;
}

CAKE_ROUTER_HOST_DEVICE int64_t router_first_row(const RouterWork& work, int32_t tile, int32_t rank) {
  return router_place(work, router_row_tile(work, tile), rank) * kRouterRows;
}

// The units that hold the partial sums of a tile, first to last; none where one unit holds all of it.
struct RouterSpan {
  int32_t first, count;
};

CAKE_ROUTER_HOST_DEVICE RouterSpan router_units_of_tile(const RouterWork& work, int32_t tile) {
  if (work.units_per_tile > 1) return {tile * work.units_per_tile, work.units_per_tile};
  if (work.units_per_tile == 1) return {tile, 0};
  const int64_t begin = int64_t{tile} * work.steps, last = begin + work.steps - 1;
  const int32_t first = static_cast<int32_t>(router_quotient((begin + 1) * work.by_units.by - 1, work.by_all_steps));
  const int32_t end = static_cast<int32_t>(router_quotient((last + 1) * work.by_units.by - 1, work.by_all_steps));
  return {first, first == end ? 0 : end - first + 1};
}

// Where the unit at `place` of a tile's span put its partial sums.
CAKE_ROUTER_HOST_DEVICE int32_t router_slot(const RouterWork& work, const RouterSpan& span, int32_t place) {
  const int32_t unit = span.first + place;
  return work.units_per_tile > 1 ? unit : 2 * unit + (place == 0);  // the first of a tile's ranges began before it, or with it
}

CAKE_ROUTER_HOST_DEVICE int32_t router_slots(const RouterWork& work) {
  return work.units_per_tile == 1 ? 0 : work.units_per_tile > 1 ? work.units : 2 * work.units;
}

// Counters of the parts of a tile that units have stored, for each of its CTAs, warps and blocks.
CAKE_ROUTER_HOST_DEVICE int64_t router_arrivals(const RouterWork& work) {
  return work.units_per_tile < 2 ? 0 : int64_t{work.row_tiles} * work.column_tiles * work.ctas * kRouterWarps * work.blocks;
}

}  // namespace dense_projection_det_gemm
