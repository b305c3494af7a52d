// The portable GEMM: out[l, m, n] (+)= sum_k a[l, m, k] b[l, k, n], or FP32 partial sums of a piece of the contraction.
//
// Reads A and B by cp.async where they lie, any major axis, ragged edges as zeros; writes the result from registers.
// Order of accumulation: k ascending in steps of 16, in one FP32 accumulator an element.
// Tiles of 128 x 128, eight warps of 64 x 32, kStages stages of 64 elements of the contraction; CTAs walk the units.
#pragma once

#include "cake/gemm/work.h"
#include "cake/ptx/grid_dependency.cuh"
#include "cake/tile/swizzle128.cuh"

namespace cake::gemm::any {

inline constexpr int kThreads = 256;
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 1070
inline constexpr int kCtasPerMultiprocessor = 1;  // held to two, nvcc 13.5 spills here
#else
inline constexpr int kCtasPerMultiprocessor = 2;
#endif
inline constexpr int kStages = 3;
inline constexpr int kTile = 128;  // rows and columns
inline constexpr int kTileBytes = kTile * kBlockK * 2;
inline constexpr int kWarpRows = 64, kWarpColumns = 32;

struct Smem {
  alignas(1024) char a[kStages][kTileBytes];
  char b[kStages][kTileBytes];
};

// `kTile` rows of an operand by kBlockK elements of k, stored [row][k] or, in two blocks of 64 rows, [k][row].
__device__ __forceinline__ void load_operand(char* stage, const OperandRows& x, int64_t batch, int row, int k, int rows,
                                             int depth) {
  const uint16_t* base = static_cast<const uint16_t*>(x.data) + batch * x.batch_stride;
  const uint32_t to = ptx::shared_address(stage);
  constexpr int kUnits = kTile * kBlockK / 8;
#pragma unroll
  for (int i = 0; i < kUnits / kThreads; ++i) {
    const int place = i * kThreads + static_cast<int>(threadIdx.x);
    const int units = x.k_major ? kBlockK / 8 : kTile / 8;
    const int outer = place / units, unit = place % units;
    const int outer_at = (x.k_major ? row : k) + outer, inner_at = (x.k_major ? k : row) + unit * 8;
    const int outer_end = x.k_major ? rows : depth, inner_end = x.k_major ? depth : rows;
    const int left = inner_end - inner_at;
    const int count = outer_at < outer_end && left > 0 ? (left < 8 ? left : 8) : 0;
    const uint16_t* from = count > 0 ? base + outer_at * x.pitch + inner_at : base;
    const uint32_t offset = x.k_major ? tile::unit_offset<kTile>(outer, unit) : tile::unit_offset<kBlockK>(outer, unit);
    ptx::cp_async_16_partly(to + offset, from, count * 2);
  }
}

template <bool kAKMajor, bool kBKMajor>
__device__ __forceinline__ void multiply_stage(float (&acc)[4][4][4], uint32_t a, uint32_t b, const tile::LaneOffsets& lane,
                                               int row, int column) {
#pragma unroll
  for (int step = 0; step < kBlockK / 16; ++step) {
    uint32_t left[4][4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if constexpr (kAKMajor) {
        tile::load_a<kTile>(left[i], a, lane, row + 16 * i, 2 * step);
      } else {
        tile::load_a_trans<kBlockK>(left[i], a, lane, 16 * step, (row + 16 * i) / 8);
      }
    }
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      uint32_t right[4];
      if constexpr (kBKMajor) {
        tile::load_b<kTile>(right, b, lane, column + 16 * j, 2 * step);
      } else {
        tile::load_b_trans<kBlockK>(right, b, lane, 16 * step, (column + 16 * j) / 8);
      }
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        ptx::mma_bf16(acc[i][2 * j], left[i], right[0], right[1]);
        ptx::mma_bf16(acc[i][2 * j + 1], left[i], right[2], right[3]);
      }
    }
  }
}

__device__ __forceinline__ void store_pair(const Output& to, int64_t at, bool both, float low, float high) {
  if (to.is_fp32) {
    float* out = static_cast<float*>(to.data) + at;
    if (to.accumulate) {
      low = __fadd_rn(out[0], low);
      if (both) high = __fadd_rn(out[1], high);
    }
    if (both) {
      *reinterpret_cast<float2*>(out) = make_float2(low, high);
    } else {
      out[0] = low;
    }
  } else {
    uint16_t* out = static_cast<uint16_t*>(to.data) + at;
    const uint32_t packed = ptx::pack_bf16(low, high);
    if (both) {
      *reinterpret_cast<uint32_t*>(out) = packed;
    } else {
      out[0] = static_cast<uint16_t>(packed);
    }
  }
}

__device__ __forceinline__ void run_unit(Smem& smem, const PortableParams& p, const Unit& unit) {
  const int warp = threadIdx.x / 32, lane_index = threadIdx.x % 32;
  const tile::LaneOffsets lane(lane_index);
  const int tile_row = unit.row_unit * kTile, tile_column = unit.column_unit * kTile;
  const int warp_row = warp % 2 * kWarpRows, warp_column = warp / 2 * kWarpColumns;
  const int blocks = unit.blocks, first_k = unit.first_block * kBlockK;
  const auto load = [&](int block) {
    if (block < blocks) {
      const int k = first_k + block * kBlockK;
      load_operand(smem.a[block % kStages], p.a, unit.batch, tile_row, k, p.m, p.k);
      load_operand(smem.b[block % kStages], p.b, unit.batch, tile_column, k, p.n, p.k);
    }
    ptx::cp_async_commit();
  };
  float acc[4][4][4] = {};
  for (int block = 0; block < kStages - 1; ++block) load(block);
  for (int block = 0; block < blocks; ++block) {
    ptx::cp_async_wait<kStages - 2>();
    __syncthreads();
    load(block + kStages - 1);  // into the stage that all warps have left
    const uint32_t a = ptx::shared_address(smem.a[block % kStages]), b = ptx::shared_address(smem.b[block % kStages]);
    if (p.a.k_major) {
      if (p.b.k_major) {
        multiply_stage<true, true>(acc, a, b, lane, warp_row, warp_column);
      } else {
        multiply_stage<true, false>(acc, a, b, lane, warp_row, warp_column);
      }
    } else {
      if (p.b.k_major) {
        multiply_stage<false, true>(acc, a, b, lane, warp_row, warp_column);
      } else {
        multiply_stage<false, false>(acc, a, b, lane, warp_row, warp_column);
      }
    }
  }
  ptx::cp_async_wait<0>();
  __syncthreads();
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = warp_row + 16 * i + 8 * half + lane_index / 4;
      if (tile_row + row >= p.m) continue;
      const int64_t start = unit.batch * p.output.batch_stride + (tile_row + row) * p.output.row_stride + tile_column;
      float* const slot = p.partials + (int64_t{unit.slot} * kTile + row) * kTile;
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int column = warp_column + 8 * j + 2 * (lane_index % 4);
        const float low = acc[i][j][2 * half], high = acc[i][j][2 * half + 1];
        if (unit.slot != kWhole) {
          *reinterpret_cast<float2*>(slot + column) = make_float2(low, high);
        } else if (tile_column + column < p.n) {
          store_pair(p.output, start + column, tile_column + column + 1 < p.n, low, high);
        }
      }
    }
  }
}

}  // namespace cake::gemm::any

namespace cake::gemm {

extern "C" __global__ void __launch_bounds__(any::kThreads, any::kCtasPerMultiprocessor) gemm_out_any(const __grid_constant__ PortableParams p) {
  extern __shared__ __align__(1024) char shared_bytes[];
  auto& smem = *reinterpret_cast<any::Smem*>(shared_bytes);
  ptx::launch_dependents();
  ptx::wait_for_predecessor();
  for (int index = blockIdx.x; index < p.tiling.units; index += gridDim.x) any::run_unit(smem, p, unit_of(p.tiling, index));
}

}  // namespace cake::gemm
