// From accumulators to memory: a consumer's 64 rows in blocks of 128 bytes of columns, a few of them in shared memory at a
// time, stored by tensor copies. The masks are the copies' own; rows that are no multiple of 16 bytes are stored by threads,
// because a copy writes whole 16 bytes.
#pragma once

#include "cake/gemm/params.h"
#include "cake/gemm/tiles.h"
#include "cake/gemm/work.h"
#include "cake/ptx/bulk_copy.cuh"
#include "cake/ptx/cta.cuh"
#include "cake/ptx/warp.cuh"

namespace cake::gemm::sm90 {

inline constexpr int kStoreBuffers = 2;

template <int kBuffers>
struct StoreRing {
  alignas(1024) char buffer[kBuffers][kStoreRows * kStoreRowBytes];
};
using StoreBlocks = StoreRing<kStoreBuffers>;

__device__ __forceinline__ void finish_stores() {
  if (threadIdx.x % 128 == 0) ptx::bulk_wait<0>();
}

// Block `kBlock` of the accumulators, 32 columns FP32 or 64 columns BF16, into its swizzled rows.
template <int kBlock, int kCount>
__device__ __forceinline__ void write_block(const float (&acc)[kCount], char* buffer, bool is_fp32) {
  const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
  if (is_fp32) {
    const int row = warp * 16 + lane / 4;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const int unit = 2 * j + (lane % 4) / 2;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int at = (row + 8 * half) * kStoreRowBytes + ((unit ^ (row & 7)) << 4) + (lane & 1) * 8;
        const float* from = acc + 4 * (4 * kBlock + j) + 2 * half;
        *reinterpret_cast<float2*>(buffer + at) = make_float2(from[0], from[1]);
      }
    }
  } else {
    const int row = lane % 16;
    const uint32_t address = ptx::shared_address(buffer) + (warp * 16 + row) * kStoreRowBytes;
#pragma unroll
    for (int j = 0; j < 8; j += 2) {
      const int unit = j + lane / 16;
      const float* from = acc + 4 * (8 * kBlock + j);
      ptx::stmatrix_x4(address + ((unit ^ (row & 7)) << 4), ptx::pack_bf16(from[0], from[1]), ptx::pack_bf16(from[2], from[3]),
                       ptx::pack_bf16(from[4], from[5]), ptx::pack_bf16(from[6], from[7]));
    }
  }
}

// A block by the threads of the consumer, element by element.
__device__ __forceinline__ void copy_block(const char* buffer, const NativeParams& p, int row, int column, int batch) {
  const int columns = p.output.is_fp32 ? 32 : 64;
  for (int i = threadIdx.x % 128; i < kStoreRows * columns; i += 128) {
    const int r = i / columns, c = i % columns;
    if (row + r >= p.m || column + c >= p.n) continue;
    const int64_t to = batch * p.output.batch_stride + (row + r) * p.output.row_stride + column + c;
    const int byte = c * kStoreRowBytes / columns;
    const char* from = buffer + r * kStoreRowBytes + ((byte >> 4 ^ (r & 7)) << 4) + (byte & 15);
    if (p.output.is_fp32) {
      static_cast<float*>(p.output.data)[to] = *reinterpret_cast<const float*>(from);
    } else {
      static_cast<uint16_t*>(p.output.data)[to] = *reinterpret_cast<const uint16_t*>(from);
    }
  }
}

// acc += what the FP32 result holds, read from L2: what starts beside another launch has not waited itself, and nothing says
// that its L1 holds no older lines.
template <int kCount>
__device__ __forceinline__ void add_previous(float (&acc)[kCount], const NativeParams& p, int row, int column, int batch) {
  const int lane = threadIdx.x % 32;
  const int first = row + threadIdx.x % 128 / 32 * 16 + lane / 4, left = column + lane % 4 * 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int r = first + 8 * half;
    if (r >= p.m) continue;
    const float* from = static_cast<const float*>(p.output.data) + batch * p.output.batch_stride + r * p.output.row_stride;
#pragma unroll
    for (int j = 0; j < kCount / 4; ++j) {
      const int c = left + 8 * j;
      float2 held = {};
      if (c + 1 < p.n) {
        held = __ldcg(reinterpret_cast<const float2*>(from + c));
      } else if (c < p.n) {
        held.x = __ldcg(from + c);
      }
      if (c < p.n) acc[4 * j + 2 * half] = __fadd_rn(held.x, acc[4 * j + 2 * half]);
      if (c + 1 < p.n) acc[4 * j + 2 * half + 1] = __fadd_rn(held.y, acc[4 * j + 2 * half + 1]);
    }
  }
}

// acc to an FP32 result with unit stride on the rows, or added to what that holds: a warp's lanes have eight rows next to each other,
// whole sectors of 32 bytes.
template <int kCount>
__device__ __forceinline__ void store_transposed(const float (&acc)[kCount], const NativeParams& p, int row, int column, int batch) {
  const int lane = threadIdx.x % 32;
  const int first = row + threadIdx.x % 128 / 32 * 16 + lane / 4, left = column + lane % 4 * 2;
  float* const out = static_cast<float*>(p.output.data) + batch * p.output.batch_stride;
#pragma unroll
  for (int j = 0; j < kCount / 4; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int r = first + i / 2 * 8, c = left + 8 * j + i % 2;
      if (r >= p.m || c >= p.n) continue;
      float* const to = out + c * p.output.row_stride + r;
      *to = p.output.accumulate ? __fadd_rn(__ldcg(to), acc[4 * j + i]) : acc[4 * j + i];
    }
  }
}

// 64 columns of the accumulators from 64 * kBlock on, transposed: the caller's half (32 rows) as [column][row] FP32, swizzled.
template <int kBlock, int kCount>
__device__ __forceinline__ void write_transposed(const float (&acc)[kCount], char* buffer) {
  const int lane = threadIdx.x % 32, row = threadIdx.x % 64 / 32 * 16 + lane / 4;
#pragma unroll
  for (int j = 0; j < 8; ++j) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int r = row + i / 2 * 8, c = 8 * j + lane % 4 * 2 + i % 2;
      *reinterpret_cast<float*>(buffer + c * kStoreRowBytes + ((r / 4 ^ (c & 7)) << 4) + r % 4 * 4) = acc[4 * (8 * kBlock + j) + i];
    }
  }
}

// Where a consumer's 64 rows go: the result, or a slot of the partial sums.
struct Place {
  const host::TensorMap* map;
  int row, column, matrix;  // in the map
  int columns;              // of the map from `column` on that are to be stored
  bool direct;
};

// Blocks kFirst to kEnd - 1 of the accumulators, as many as there are buffers.
template <int kFirst, int kEnd, int kBuffers, int kCount>
__device__ __forceinline__ void write_blocks(const float (&acc)[kCount], StoreRing<kBuffers>& blocks, bool is_fp32) {
  if constexpr (kFirst < kEnd) {
    write_block<kFirst>(acc, blocks.buffer[kFirst % kBuffers], is_fp32);
    write_blocks<kFirst + 1, kEnd>(acc, blocks, is_fp32);
  }
}

// In rounds of as many blocks as there are buffers: two barriers a round.
template <int kFirst, int kBlocks, int kBuffers, int kCount>
__device__ __forceinline__ void store_blocks(const float (&acc)[kCount], StoreRing<kBuffers>& blocks, const NativeParams& p,
                                             const Place& to, bool is_fp32, int consumer) {
  if constexpr (kFirst < kBlocks) {
    constexpr int kEnd = kFirst + kBuffers < kBlocks ? kFirst + kBuffers : kBlocks;
    const int block_columns = is_fp32 ? 32 : 64;
    if (kFirst * block_columns >= to.columns) return;
    const bool elected = threadIdx.x % 128 == 0;
    if (elected) ptx::bulk_wait_read<0>();
    ptx::named_barrier_sync(1 + consumer, 128);
    write_blocks<kFirst, kEnd>(acc, blocks, is_fp32);
    ptx::fence_async_shared();
    ptx::named_barrier_sync(1 + consumer, 128);
    if (to.direct || elected) {
#pragma unroll
      for (int block = kFirst; block < kEnd; ++block) {
        const int column = block * block_columns;
        if (column >= to.columns) break;
        const char* const buffer = blocks.buffer[block % kBuffers];
        if (to.direct) {
          copy_block(buffer, p, to.row, to.column + column, to.matrix);
        } else {
          const int32_t coordinates[3] = {to.column + column, to.row, to.matrix};
          if (p.output.passes) {
            ptx::tensor_store(to.map, coordinates, buffer, ptx::kEvictFirst);
          } else {
            ptx::tensor_store(to.map, coordinates, buffer);
          }
        }
      }
      if (!to.direct) ptx::bulk_commit();
    }
    store_blocks<kEnd, kBlocks>(acc, blocks, p, to, is_fp32, consumer);
  }
}

// The consumer's 64 rows by kCount * 2 columns of an FP32 result with unit stride on the rows, 64 columns in two buffers at a time.
template <int kFirst, int kBuffers, int kCount>
__device__ __forceinline__ void store_transposed_blocks(const float (&acc)[kCount], StoreRing<kBuffers>& blocks, const NativeParams& p,
                                                        int row, int column, int batch, int consumer) {
  constexpr int kAtOnce = kBuffers / 2, kBlocks = kCount / 32;
  if constexpr (kFirst < kBlocks) {
    if (column + 64 * kFirst >= p.n) return;
    const bool elected = threadIdx.x % 128 == 0;
    const int half = threadIdx.x % 128 / 64;
    if (elected) ptx::bulk_wait_read<0>();
    ptx::named_barrier_sync(1 + consumer, 128);
    write_transposed<kFirst>(acc, blocks.buffer[half]);
    if constexpr (kAtOnce > 1 && kFirst + 1 < kBlocks) write_transposed<kFirst + 1>(acc, blocks.buffer[2 + half]);
    ptx::fence_async_shared();
    ptx::named_barrier_sync(1 + consumer, 128);
    if (elected) {
#pragma unroll
      for (int block = 0; block < kAtOnce && kFirst + block < kBlocks; ++block) {
        const int at = column + 64 * (kFirst + block);
        if (at >= p.n) break;
#pragma unroll
        for (int upper = 0; upper < 2; ++upper) {
          if (row + 32 * upper >= p.m) break;
          const int32_t coordinates[3] = {row + 32 * upper, at, batch};
          ptx::tensor_store(&p.out, coordinates, blocks.buffer[2 * block + upper]);
        }
      }
      ptx::bulk_commit();
    }
    store_transposed_blocks<kFirst + kAtOnce>(acc, blocks, p, row, column, batch, consumer);
  }
}

// The consumer's 64 rows by kCount * 2 columns, which begin at this row and column of the unit.
template <bool kTransposes = false, int kBuffers, int kCount>
__device__ __forceinline__ void store_tile(float (&acc)[kCount], StoreRing<kBuffers>& blocks, const NativeParams& p,
                                           const Unit& unit, int row_in_unit, int column_in_unit,
                                           int consumer) {
  const int row = unit.row_unit * p.tiling.unit_rows + row_in_unit;
  const int column = unit.column_unit * p.tiling.unit_columns + column_in_unit;
  if (row >= p.m || column >= p.n) return;
  if (unit.slot != kWhole) {
    const Place to{&p.partials, row_in_unit, column_in_unit, unit.slot, p.n - column, false};
    store_blocks<0, kCount / 16>(acc, blocks, p, to, true, consumer);
    return;
  }
  if constexpr (kTransposes) {
    if (p.output.transposed) {
      if (p.output.accumulate || p.output.direct) {
        store_transposed(acc, p, row, column, unit.batch);
      } else {
        store_transposed_blocks<0>(acc, blocks, p, row, column, unit.batch, consumer);
      }
      return;
    }
  }
  if (p.output.accumulate) add_previous(acc, p, row, column, unit.batch);
  const Place to{&p.out, row, column, unit.batch, p.n - column, p.output.direct != 0};
  if (p.output.is_fp32) {
    store_blocks<0, kCount / 16>(acc, blocks, p, to, true, consumer);
  } else {
    store_blocks<0, kCount / 32>(acc, blocks, p, to, false, consumer);
  }
}

}  // namespace cake::gemm::sm90
