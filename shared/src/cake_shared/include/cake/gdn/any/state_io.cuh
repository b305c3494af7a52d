// A warp's 16 columns of a state between registers (transposed, FP32 accumulators) and global memory.
#pragma once

#include "cake/gdn/any/chain_products.cuh"

namespace cake::gdn {

// Visits (k, v) of every element that this lane holds: fragment j, element i.
template <class Visit>
__device__ __forceinline__ void for_state_elements(int first_column, int lane, Visit visit) {
  const int g = lane >> 2, c = lane & 3;
#pragma unroll
  for (int j = 0; j < 16; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) visit(j, i, 8 * j + 2 * c + (i & 1), first_column + g + 8 * (i >> 1));
  }
}

__device__ __forceinline__ void load_state(StateAcc& state, const float* matrix, int64_t k_stride, int64_t v_stride,
                                           int first_column, int lane) {
  for_state_elements(first_column, lane,
                     [&](int j, int i, int k, int v) { state[j][i] = matrix[k * k_stride + v * v_stride]; });
}

__device__ __forceinline__ void store_state(const StateAcc& state, float* matrix, int64_t k_stride, int64_t v_stride,
                                            int first_column, int lane) {
  for_state_elements(first_column, lane,
                     [&](int j, int i, int k, int v) { matrix[k * k_stride + v * v_stride] = state[j][i]; });
}

// Writes the packed state of a warp (16 rows of a transposed 128 x 128 tile) through its 4 KB of staging.
__device__ __forceinline__ void store_state_tile(char* global_tile, const StateOperand& state, char* staging,
                                                 int first_column, const LaneOffsets& offsets, int lane) {
  const uint32_t shared = ptx::shared_address(staging);
  __syncwarp();
#pragma unroll
  for (int s = 0; s < 8; ++s) {
    ptx::stmatrix_x4(tile::fragment_address<16>(shared, offsets.row_major, 0, 2 * s), state[s][0], state[s][1],
                     state[s][2], state[s][3]);
  }
  __syncwarp();
#pragma unroll
  for (int block = 0; block < 2; ++block) {
    store_linear<32, 2048>(global_tile + block * (kHeadDim * 128) + first_column * 128, staging + block * 2048, lane);
  }
}

// Puts a packed 16 x 64 operand (value columns x tokens) into the warp's columns of a [token][value] shared tile.
__device__ __forceinline__ void stage_token_columns(uint32_t shared_tile, const TokenOperand& a, int first_unit,
                                                    const LaneOffsets& offsets) {
  __syncwarp();
#pragma unroll
  for (int s = 0; s < 4; ++s) {
    ptx::stmatrix_x4_trans(tile::fragment_address<kChunk>(shared_tile, offsets.col_major, 16 * s, first_unit), a[s][0], a[s][1],
                           a[s][2], a[s][3]);
  }
  __syncwarp();
}

// Copies the warp's two 16-byte units of every row: destination(row, unit) gives the address, or null to leave it.
template <class Destination>
__device__ __forceinline__ void copy_token_columns(const char* shared_tile, int first_unit, int lane, Destination destination) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const int row = 16 * i + (lane >> 1), unit = lane & 1;
    const uint4 value = *reinterpret_cast<const uint4*>(shared_tile + tile::unit_offset<kChunk>(row, first_unit + unit));
    if (void* to = destination(row, unit)) *static_cast<uint4*>(to) = value;
  }
}

// Writes a warp's columns of a 64 x 128 workspace tile, staged in the warp's columns of a shared tile.
__device__ __forceinline__ void store_token_tile(char* global_tile, const TokenOperand& a, char* staging, int staging_unit,
                                                 int global_unit, const LaneOffsets& offsets, int lane) {
  stage_token_columns(ptx::shared_address(staging), a, staging_unit, offsets);
  copy_token_columns(staging, staging_unit, lane, [&](int row, int unit) -> void* {
    return global_tile + tile::unit_offset<kChunk>(row, global_unit + unit);
  });
}

// Writes a warp's columns of one head's rows of a chunk.
__device__ __forceinline__ void store_token_rows(const TokenRows& rows, const ChunkEntry& chunk, const Heads& heads, int head,
                                                 const TokenOperand& a, char* staging, int staging_unit, int first_column,
                                                 const LaneOffsets& offsets, int lane) {
  stage_token_columns(ptx::shared_address(staging), a, staging_unit, offsets);
  char* first = row_pointer(rows, place_of(chunk.first_token, heads.tokens_per_row), head) + 2 * first_column;
  copy_token_columns(staging, staging_unit, lane, [&](int row, int unit) -> void* {
    return row < chunk.tokens ? first + row * 2 * rows.token_stride + 16 * unit : nullptr;
  });
}

}  // namespace cake::gdn
