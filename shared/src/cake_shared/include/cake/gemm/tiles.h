// The tiles of the native GEMM programs and how they are copied: the same numbers on the host, which makes the tensor maps,
// and in the kernels. Two CTAs of a cluster share the operand that both need: each copies half of it to both.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define CAKE_GEMM_HOST_DEVICE __host__ __device__
#else
#define CAKE_GEMM_HOST_DEVICE
#endif

namespace cake::gemm {

inline constexpr int kBlockK = 64;        // elements of the contraction in a stage: rows of 128 bytes
inline constexpr int kStoreRows = 64;     // rows of a block of the epilogue
inline constexpr int kStoreRowBytes = 128;

enum class TileKind : int32_t {
  kWide = 0,    // 128 x 256
  kMiddle = 1,  // 128 x 128
  kNarrow = 2,  // 128 x 64
  kFlat = 3,    // 64 x 256
  kSlim = 4,    // 64 x 128
  kBroad = 5,   // 128 x 192
  kTurns = 6,   // 128 x 128, of one consumer
  kKept = 8,    // 128 x 256 whose B stays in shared memory; 7 is the portable program
  kSquare = 9,  // 192 x 192, of three consumers
};

struct TileShape {
  int m, n;
  int stages;
  int store_buffers;  // blocks of a warpgroup's results in shared memory
  bool pair_along_m;  // the cluster's CTAs have neighbouring rows and share B; else neighbouring columns, and share A
  int kept_bytes;     // of B in shared memory, all of the contraction; 0: B comes with each stage
};

CAKE_GEMM_HOST_DEVICE constexpr TileShape tile_shape(TileKind kind) {
  switch (kind) {
    case TileKind::kWide: return {128, 256, 4, 2, true, 0};
    case TileKind::kMiddle: return {128, 128, 6, 2, true, 0};
    case TileKind::kNarrow: return {128, 64, 8, 2, true, 0};
    case TileKind::kFlat: return {64, 256, 4, 2, false, 0};
    case TileKind::kTurns: return {128, 128, 6, 2, true, 0};
    case TileKind::kSlim: return {64, 128, 8, 2, false, 0};
    case TileKind::kKept: return {128, 256, 6, 2, false, 96 * 1024};
    case TileKind::kSquare: return {192, 192, 4, 1, true, 0};
    default: return {128, 192, 4, 4, true, 0};
  }
}

// Warpgroups that multiply: each has 64 rows of the tile or, where it has no more rows than that, half of its columns.
CAKE_GEMM_HOST_DEVICE constexpr int consumers_of(TileShape tile) { return tile.m > 128 ? tile.m / 64 : 2; }

// Whether a unit may come as its left and its right columns, or as one CTA's rows of two units.
CAKE_GEMM_HOST_DEVICE constexpr bool halves(TileShape tile) { return tile.pair_along_m && tile.n == 256; }

// An operand of `rows` rows (of m or n) by kBlockK comes in boxes. Unit stride on k: one box of {kBlockK, box_rows}; unit
// stride on the rows: boxes of {64, box_depth}, one for each 64 rows.
struct OperandBoxes {
  int rows;        // of the tile
  bool shared;     // each CTA of the cluster copies half of it
  CAKE_GEMM_HOST_DEVICE constexpr int box_rows() const { return shared ? rows / 2 : rows; }
  CAKE_GEMM_HOST_DEVICE constexpr int blocks() const { return rows / 64; }
  // An odd number of blocks is shared by halves of each.
  CAKE_GEMM_HOST_DEVICE constexpr int box_depth() const { return shared && blocks() % 2 == 1 ? kBlockK / 2 : kBlockK; }
};

CAKE_GEMM_HOST_DEVICE constexpr OperandBoxes a_boxes(TileShape tile) { return {tile.m, !tile.pair_along_m}; }
CAKE_GEMM_HOST_DEVICE constexpr OperandBoxes b_boxes(TileShape tile) { return {tile.n, tile.pair_along_m}; }

// What a block of a kept B takes: of 64 elements of the contraction, all columns of a CTA.
CAKE_GEMM_HOST_DEVICE constexpr int kept_block_bytes(TileShape tile) { return tile.n * kBlockK * 2; }

}  // namespace cake::gemm
