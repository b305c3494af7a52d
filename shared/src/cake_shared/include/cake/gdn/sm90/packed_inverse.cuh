// T of a chunk as native programs keep it: its 16 x 16 blocks on and below the diagonal, 5 of 8 KB.
//
// In global memory column after column of blocks, a row of 16 numbers 32 bytes. In shared memory every column of blocks has 64 rows,
// 2 KB, and those above the diagonal are zeros that stay while tiles come and go. The two 16-byte units of a row change places in
// every other four rows: the 32-byte swizzle of wgmma, whose period of 256 bytes divides all distances here.
#pragma once

#include "cake/gdn/rule_params.h"
#include "cake/ptx/bulk_copy.cuh"
#include "cake/ptx/wgmma.cuh"

namespace cake::gdn {

inline constexpr int kBlockColumnBytes = kChunk * 32;

struct InverseTile {
  alignas(1024) char of[4][kBlockColumnBytes];  // columns of blocks
};
static_assert(sizeof(InverseTile) == kSquareTileBytes);

// Bytes above the diagonal of a column of blocks, and where it begins in global memory.
__host__ __device__ constexpr uint32_t bytes_above_diagonal(int column) { return 512 * column; }
__host__ __device__ constexpr uint32_t packed_column(int column) { return kBlockColumnBytes * column - 256 * column * (column - 1); }
static_assert(packed_column(4) == kPackedInverseBytes);

// The part of a lane's address that depends on the lane, where a warp stores a 16 x 16 block.
__device__ __forceinline__ uint32_t packed_block_lane(int lane) { return (lane & 15) * 32 + (((lane >> 4) ^ (lane >> 2 & 1)) << 4); }

// Where a block lies in global memory, from the beginning of T.
__host__ __device__ constexpr uint32_t packed_block(int row_block, int column_block) {
  return packed_column(column_block) + 512 * (row_block - column_block);
}

// Puts zeros above the diagonal; by threads whose barrier follows.
__device__ __forceinline__ void clear_above_diagonal(InverseTile& tile, int thread, int threads) {
  constexpr int kUnits = 6 * 32;
  for (int unit = thread; unit < kUnits; unit += threads) {
    const int column = unit < 32 ? 1 : unit < 96 ? 2 : 3;
    reinterpret_cast<uint4*>(tile.of[column])[unit - 16 * column * (column - 1)] = make_uint4(0, 0, 0, 0);
  }
  ptx::fence_async_shared();
}

// By one thread: kPackedInverseBytes arrive at the barrier.
__device__ __forceinline__ void load_inverse(InverseTile& tile, const char* from, uint64_t* full) {
#pragma unroll
  for (int column = 0; column < 4; ++column) {
    const uint32_t above = bytes_above_diagonal(column);
    ptx::bulk_load(tile.of[column] + above, from + packed_column(column), kBlockColumnBytes - above, full);
  }
}

// acc[v][i] (+)= sum_j a[v][j] T[i][j], or with kTransposed sum_j a[v][j] T[j][i]
template <bool kTransposed, bool kAccumulate>
__device__ __forceinline__ void multiply_inverse(float (&acc)[32], const uint32_t (&a)[16], const InverseTile& tile) {
  constexpr uint32_t kStep = kTransposed ? 16 * 32 : kBlockColumnBytes;
  const uint64_t right = ptx::wgmma_descriptor_32(ptx::shared_address(&tile), kBlockColumnBytes);
#pragma unroll
  for (int s = 0; s < 4; ++s) {
    ptx::wgmma_bf16<kTransposed ? ptx::Major::kMN : ptx::Major::kK>(acc, a[4 * s], a[4 * s + 1], a[4 * s + 2], a[4 * s + 3],
                                                                    right + ptx::wgmma_advance(kStep * s), kAccumulate || s > 0);
  }
}

}  // namespace cake::gdn
