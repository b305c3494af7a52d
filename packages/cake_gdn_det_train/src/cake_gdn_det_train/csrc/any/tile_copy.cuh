// Copies between global memory and the swizzled shared tiles, by all threads of a CTA or of a warp.
#pragma once

#include "cake/tile/swizzle128.cuh"
#include "params.h"

namespace cake::gdn {

extern __shared__ __align__(1024) char smem_bytes[];  // every kernel's dynamic shared memory, which it reads as its Smem

__device__ __forceinline__ char* row_pointer(const TokenMatrix& m, int64_t token, int head) {
  return static_cast<char*>(m.data) + 2 * (token * m.token_stride + head * m.head_stride);
}

// Starts the copy of kUnits 16-byte units a row of one head's rows of a chunk; rows past the chunk's tokens become zero.
template <int kThreads, int kUnits>
__device__ __forceinline__ void load_rows_async(uint32_t shared_tile, const TokenMatrix& m, const Chunk& chunk, int head,
                                                int first_unit, int thread) {
  static_assert(kThreads % kUnits == 0 && kChunk * kUnits % kThreads == 0);
  constexpr int kRowStep = kThreads / kUnits;
  const int unit = thread % kUnits, first_row = thread / kUnits;
  const char* source = row_pointer(m, chunk.first_token, head) + 16 * (first_unit + unit);
  const int64_t row_bytes = 2 * m.token_stride;
#pragma unroll
  for (int i = 0; i < kChunk / kRowStep; ++i) {
    const int row = first_row + i * kRowStep;
    const bool valid = row < chunk.tokens;
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

__device__ __forceinline__ float load_scalar(const TokenScalars& s, int64_t token, int head) {
  const int64_t i = token * s.token_stride + head * s.head_stride;
  return s.is_bf16 ? __bfloat162float(static_cast<const __nv_bfloat16*>(s.data)[i]) : static_cast<const float*>(s.data)[i];
}

__device__ __forceinline__ void store_scalar(const TokenScalars& s, int64_t token, int head, float value) {
  const int64_t i = token * s.token_stride + head * s.head_stride;
  if (s.is_bf16) {
    static_cast<__nv_bfloat16*>(s.data)[i] = __float2bfloat16_rn(value);
  } else {
    static_cast<float*>(s.data)[i] = value;
  }
}

}  // namespace cake::gdn
