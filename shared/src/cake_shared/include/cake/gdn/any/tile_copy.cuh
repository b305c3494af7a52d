// Copies between global memory and the swizzled shared tiles, by all threads of a CTA or of a warp.
#pragma once

#include "cake/gdn/any/places.cuh"
#include "cake/tile/swizzle128.cuh"

namespace cake::gdn {

namespace ptx = cake::ptx;
namespace tile = cake::tile;

extern __shared__ __align__(1024) char smem_bytes[];  // every kernel's dynamic shared memory, which it reads as its Smem

// Starts the copy of kUnits 16-byte units a row of one head's rows of a chunk; rows past the chunk's tokens become zero.
template <int kThreads, int kUnits>
__device__ __forceinline__ void load_rows_async(uint32_t shared_tile, const TokenRows& rows, TokenPlace at, int tokens, int head,
                                                int first_unit, int thread) {
  static_assert(kThreads % kUnits == 0 && kChunk * kUnits % kThreads == 0);
  constexpr int kRowStep = kThreads / kUnits;
  const int unit = thread % kUnits, first_row = thread / kUnits;
  const char* source = row_pointer(rows, at, head) + 16 * (first_unit + unit);
  const int64_t row_bytes = 2 * rows.token_stride;
#pragma unroll
  for (int i = 0; i < kChunk / kRowStep; ++i) {
    const int row = first_row + i * kRowStep;
    const bool valid = row < tokens;
    ptx::cp_async_16(shared_tile + tile::unit_offset<kChunk>(row, unit), source + (valid ? row * row_bytes : 0), valid);
  }
}

template <int kThreads, int kBytes>
__device__ __forceinline__ void load_linear_async(uint32_t shared, const void* global, int thread) {
  constexpr int kUnits = kBytes / 16;
  const char* source = static_cast<const char*>(global);
#pragma unroll
  for (int i = 0; i < (kUnits + kThreads - 1) / kThreads; ++i) {
    const int unit = thread + i * kThreads;
    if (kUnits % kThreads == 0 || unit < kUnits) ptx::cp_async_16(shared + 16 * unit, source + 16 * unit);
  }
}

template <int kThreads, int kBytes>
__device__ __forceinline__ void store_linear(void* global, const void* shared, int thread) {
  constexpr int kUnits = kBytes / 16;
#pragma unroll
  for (int i = 0; i < (kUnits + kThreads - 1) / kThreads; ++i) {
    const int unit = thread + i * kThreads;
    if (kUnits % kThreads == 0 || unit < kUnits) {
      static_cast<uint4*>(global)[unit] = static_cast<const uint4*>(shared)[unit];
    }
  }
}

}  // namespace cake::gdn
