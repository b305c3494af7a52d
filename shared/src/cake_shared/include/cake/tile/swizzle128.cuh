// BF16 tiles in blocks of 64 columns, rows of 128 bytes, the eight 16-byte units of a row permuted by unit ^ (row & 7).
//
// This is the layout that the bulk tensor copy writes and wgmma and tcgen05 read as "128-byte swizzle", so a tile stored
// by a portable program can be read by a native one. A tile of R rows and 128 columns is two blocks, the second R * 128
// bytes after the first. Blocks start at multiples of 1024 bytes.
#pragma once

#include "cake/ptx/warp.cuh"

namespace cake::tile {

// Byte offset of the 16-byte unit `unit` (eight columns) of `row` in a tile of kRows rows.
template <int kRows>
__host__ __device__ constexpr uint32_t unit_offset(int row, int unit) {
  return static_cast<uint32_t>((unit >> 3) * (kRows * 128) + row * 128 + (((unit & 7) ^ (row & 7)) << 4));
}

// ldmatrix and stmatrix want one row address per lane. Two lane patterns serve all operands of mma.sync; both advance by
// `^ (unit << 4)` along columns (unit even) and by `+ row * 128` along rows (row a multiple of eight).
//   row_major_lane: a fragment A stored [m][k], or B stored [k][n] read transposed
//   col_major_lane: a fragment B stored [n][k], or A stored [k][m] read transposed
struct LaneOffsets {
  uint32_t row_major;
  uint32_t col_major;
  __device__ __forceinline__ explicit LaneOffsets(int lane)
      : row_major((lane & 15) * 128 + (((lane >> 4) ^ (lane & 7)) << 4)),
        col_major((((lane >> 4) << 3) + (lane & 7)) * 128 + ((((lane >> 3) & 1) ^ (lane & 7)) << 4)) {}
};

template <int kRows>
__device__ __forceinline__ uint32_t fragment_address(uint32_t tile, uint32_t lane_offset, int row, int unit) {
  return tile + (unit >> 3) * (kRows * 128) + row * 128 + (lane_offset ^ ((unit & 7) << 4));
}

// A (16 x 16) whose first row and 16-byte unit of columns are given, stored [m][k].
template <int kRows>
__device__ __forceinline__ void load_a(uint32_t (&a)[4], uint32_t tile, const LaneOffsets& lane, int m, int k_unit) {
  ptx::ldmatrix_x4(a, fragment_address<kRows>(tile, lane.row_major, m, k_unit));
}

// A (16 x 16) stored [k][m].
template <int kRows>
__device__ __forceinline__ void load_a_trans(uint32_t (&a)[4], uint32_t tile, const LaneOffsets& lane, int k,
                                             int m_unit) {
  ptx::ldmatrix_x4_trans(a, fragment_address<kRows>(tile, lane.col_major, k, m_unit));
}

// Two neighbouring fragments B (16 x 8 each) stored [n][k]: b[0], b[1] for columns n .. n + 7, b[2], b[3] for the next.
template <int kRows>
__device__ __forceinline__ void load_b(uint32_t (&b)[4], uint32_t tile, const LaneOffsets& lane, int n, int k_unit) {
  ptx::ldmatrix_x4(b, fragment_address<kRows>(tile, lane.col_major, n, k_unit));
}

// Two neighbouring fragments B stored [k][n].
template <int kRows>
__device__ __forceinline__ void load_b_trans(uint32_t (&b)[4], uint32_t tile, const LaneOffsets& lane, int k,
                                             int n_unit) {
  ptx::ldmatrix_x4_trans(b, fragment_address<kRows>(tile, lane.row_major, k, n_unit));
}

}  // namespace cake::tile
