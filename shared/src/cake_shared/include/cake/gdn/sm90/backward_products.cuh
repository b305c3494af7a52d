// What the native programs of the backward pass share: copies of rows, and the products of a chunk whose operands lie as they are stored.
#pragma once

#include "cake/gdn/any/tile_copy.cuh"
#include "cake/gdn/sm90/backward_params.h"
#include "cake/ptx/bulk_copy.cuh"
#include "cake/ptx/cta.cuh"
#include "cake/ptx/grid_dependency.cuh"
#include "cake/ptx/mbarrier.cuh"
#include "cake/ptx/wgmma.cuh"

namespace cake::gdn::sm90 {

inline constexpr int kWarpgroupThreads = 128;
inline constexpr uint32_t kBlockBytes = kChunk * 128;          // a block of 64 columns of a token tile
inline constexpr uint32_t kStateBlockBytes = kHeadDim * 128;   // of a state tile

// Starts the copy of kUnits 16-byte units a row of one head's rows of a chunk into a token tile; rows past the chunk's tokens become
// zero. For warps with few registers; of a whole chunk in as few instructions as can be, because one warp may copy for a whole CTA.
template <int kThreads, int kUnits>
__device__ __forceinline__ void copy_rows(char* shared_tile, const TokenRows& rows, TokenPlace at, int tokens, int head,
                                          int first_unit, int thread) {
  constexpr int kRowStep = kThreads / kUnits, kSteps = kChunk / kRowStep;
  const int unit = thread % kUnits;
  int row = thread / kUnits;
  const char* const first = row_pointer(rows, at, head) + 16 * (first_unit + unit);
  const char* source = first + row * 2 * rows.token_stride;
  const int64_t step = 2 * kRowStep * rows.token_stride;
  const uint32_t shared = ptx::shared_address(shared_tile);
  if (tokens == kChunk) {
    constexpr int kPeriod = kRowStep < 8 ? 8 / kRowStep : 1;  // steps after which the permutation of units is the same
    uint32_t to[kPeriod];
#pragma unroll
    for (int i = 0; i < kPeriod; ++i) to[i] = shared + tile::unit_offset<kChunk>(row + i * kRowStep, unit);
#pragma unroll
    for (int i = 0; i < kSteps; ++i, source += step) {
      ptx::cp_async_16(to[i % kPeriod] + i / kPeriod * kPeriod * kRowStep * 128, source);
    }
    return;
  }
#pragma unroll 1
  for (int i = 0; i < kSteps; ++i, row += kRowStep, source += step) {
    const bool valid = row < tokens;
    ptx::cp_async_16(shared + tile::unit_offset<kChunk>(row, unit), valid ? source : first, valid);
  }
}

// The same by one warp with hardly any registers, where it is rare: returns when the rows are there for the tensor cores, too.
template <int kUnits>
__device__ __forceinline__ void copy_rows_slowly(char* shared_tile, const TokenRows& rows, TokenPlace at, int tokens, int head,
                                                 int first_unit, int lane) {
#pragma unroll 1
  for (int i = lane; i < kChunk * kUnits; i += 32) {
    const int row = i / kUnits, unit = i % kUnits;
    const bool valid = row < tokens;
    const char* const from = row_pointer(rows, {at.row, at.token + (valid ? row : 0)}, head) + 16 * (first_unit + unit);
    ptx::cp_async_16(ptx::shared_address(shared_tile) + tile::unit_offset<kChunk>(row, unit), from, valid);
  }
  ptx::cp_async_commit();
  ptx::cp_async_wait<0>();
  ptx::fence_async_shared();
  __syncwarp();
}

// The warp's index as a value that the compiler knows to be uniform.
__device__ __forceinline__ int warp_index() { return __shfl_sync(~0u, threadIdx.x >> 5, 0); }

// Tokens whose beta is too small to divide by, see kDeferredBelow.
__device__ __forceinline__ bool is_deferred(float beta) { return fabsf(beta) < kDeferredBelow; }
// Whether a row of U is V' / beta, and not V' itself.
__device__ __forceinline__ bool is_divided(float beta) { return beta >= kDividedFrom; }

using Fragment = float[32];  // 64 x 64 of a warpgroup

// Steps of 16 along the contraction of an operand whose rows hold it: columns of a token tile, in two blocks.
__device__ __forceinline__ uint64_t along_columns(int step) {
  return ptx::wgmma_advance((step >> 2) * kBlockBytes + (step & 3) * 32);
}
// Of an operand whose rows are the contraction.
__device__ __forceinline__ uint64_t along_rows(int step) { return ptx::wgmma_advance(step * 2048); }

// d = a b^T, both token tiles (64 x 128).
__device__ __forceinline__ void rows_times_rows(Fragment& d, uint32_t a, uint32_t b) {
  using ptx::Major;
  const uint64_t left = ptx::wgmma_descriptor(a), right = ptx::wgmma_descriptor(b);
#pragma unroll
  for (int s = 0; s < 8; ++s) {
    ptx::wgmma_bf16<Major::kK, Major::kK>(d, left + along_columns(s), right + along_columns(s), s > 0);
  }
}

// d = a (64 tokens x 128 value columns) times a block of 64 key columns of a transposed state tile.
__device__ __forceinline__ void rows_times_state(Fragment& d, uint32_t a, uint32_t state_block) {
  using ptx::Major;
  const uint64_t left = ptx::wgmma_descriptor(a), right = ptx::wgmma_descriptor(state_block);
#pragma unroll
  for (int s = 0; s < 8; ++s) {
    ptx::wgmma_bf16<Major::kK, Major::kMN>(d, left + along_columns(s), right + along_rows(s), s > 0);
  }
}

// d += a square tile, or its transpose, times a block of 64 columns of a token tile.
template <bool kTransposed>
__device__ __forceinline__ void add_square_times_rows(Fragment& d, uint32_t square, uint32_t rows_block) {
  using ptx::Major;
  const uint64_t left = ptx::wgmma_descriptor(square), right = ptx::wgmma_descriptor(rows_block);
#pragma unroll
  for (int s = 0; s < 4; ++s) {
    if constexpr (kTransposed) {
      ptx::wgmma_bf16<Major::kMN, Major::kMN>(d, left + along_rows(s), right + along_rows(s), true);
    } else {
      ptx::wgmma_bf16<Major::kK, Major::kMN>(d, left + along_columns(s), right + along_rows(s), true);
    }
  }
}

using State = float[64];  // 64 value columns x 128 key columns of a warpgroup, transposed

// An accumulator rounded is the left operand of the next product, as packed words in the same order.
template <int kCount>
__device__ __forceinline__ void pack_operand(uint32_t (&a)[kCount], const float (&acc)[2 * kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) a[i] = ptx::pack_bf16(acc[2 * i], acc[2 * i + 1]);
}

// What accumulators lost where they were rounded to an operand, as an operand.
template <int kCount>
__device__ __forceinline__ void pack_lost(uint32_t (&a)[kCount], const float (&acc)[2 * kCount], const uint32_t (&rounded)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    a[i] = ptx::pack_bf16(__fsub_rn(acc[2 * i], ptx::low_bf16(rounded[i])), __fsub_rn(acc[2 * i + 1], ptx::high_bf16(rounded[i])));
  }
}

// d[v][t] = sum_k state[v][k] rows[t][k], or what is added to d.
__device__ __forceinline__ void state_times_rows(Fragment& d, const uint32_t (&state)[32], uint32_t rows, bool add = false) {
  const uint64_t right = ptx::wgmma_descriptor(rows);
#pragma unroll
  for (int s = 0; s < 8; ++s) {
    ptx::wgmma_bf16<ptx::Major::kK>(d, state[4 * s], state[4 * s + 1], state[4 * s + 2], state[4 * s + 3],
                                    right + along_columns(s), s > 0 || add);
  }
}

// d[v][t] = sum_s a[v][s] square[t][s], or, along rows, sum_s a[v][s] square[s][t]; or what is added to d.
template <bool kAlongRows, bool kAdd = false>
__device__ __forceinline__ void operand_times_square(Fragment& d, const uint32_t (&a)[16], uint32_t square) {
  using ptx::Major;
  const uint64_t right = ptx::wgmma_descriptor(square);
#pragma unroll
  for (int s = 0; s < 4; ++s) {
    ptx::wgmma_bf16<kAlongRows ? Major::kMN : Major::kK>(d, a[4 * s], a[4 * s + 1], a[4 * s + 2], a[4 * s + 3],
                                                         right + (kAlongRows ? along_rows(s) : along_columns(s)), kAdd || s > 0);
  }
}

// state[v][k] += sum_t a[v][t] rows[t][k]
__device__ __forceinline__ void add_operand_times_rows(State& state, const uint32_t (&a)[16], uint32_t rows) {
  const uint64_t right = ptx::wgmma_descriptor(rows, kBlockBytes);
#pragma unroll
  for (int s = 0; s < 4; ++s) {
    ptx::wgmma_bf16<ptx::Major::kMN>(state, a[4 * s], a[4 * s + 1], a[4 * s + 2], a[4 * s + 3], right + along_rows(s), true);
  }
}

}  // namespace cake::gdn::sm90
