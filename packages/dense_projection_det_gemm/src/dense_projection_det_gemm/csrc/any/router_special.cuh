// The end of a router GEMM: adds the segments of tiles that several units share, in ascending order, and computes anew, in FP64 and in the
// order of the depth, the elements that split products do not serve. Which those are depends on an element's own row and column alone.
//
// Reads slots, flags, P and Q; writes the output. A CTA has a tile and, where there are slots, 32 of its columns; without slots most CTAs
// find no flag and are done.
#pragma once

#include "any/router_terms.cuh"

namespace dense_projection_det_gemm {

inline constexpr int kSpecialColumns = 32;

struct SpecialSmem {
  double p[32][33], q[32][33];      // [row][depth]
  uint32_t redo[kRouterRows];       // a bit for each of the 32 columns
  uint8_t column_flags[kSpecialColumns];
};

__device__ __forceinline__ float* output_element(const RouterOutParams& p, int64_t row, int64_t column) {
  return p.out + row * p.out_row_stride + column * p.out_column_stride;
}

// Elements of the output, or their sums: sets bits of smem.redo.
__device__ __forceinline__ void sum_slots(const RouterOutParams& p, SpecialSmem& smem, int tile, int row0, int column0, int group) {
  const RouterSpan units = router_units_of_tile(p.work, tile);
  const bool transposed = router_slots_transposed(p);
  const int width = p.work.blocks * kRouterBlock, tile_column = group * kSpecialColumns;
  const int64_t slot_elements = int64_t{kRouterRows} * width;
  for (int i = threadIdx.x; i < kRouterRows * kSpecialColumns; i += kRouterSpecialThreads) {
    const int row = transposed ? i % kRouterRows : i / kSpecialColumns, column = transposed ? i / kRouterRows : i % kSpecialColumns;
    if (row0 + row >= p.work.rows || column0 + column >= p.work.columns) continue;
    const int64_t offset = transposed ? int64_t{tile_column + column} * kRouterRows + row : int64_t{row} * width + tile_column + column;
    float total = 0.f;
    bool tiny = smem.column_flags[column] != 0;
    for (int u = 0; u < units.count; ++u) {
      const int64_t slot = router_slot(p.work, units, u);
      const float part = p.slots[slot * slot_elements + offset];
      total = u == 0 ? part : __fadd_rn(total, part);
      tiny |= p.slot_tiny[slot * kRouterRows + row] != 0;
    }
    if (must_redo(total, tiny) || (smem.column_flags[column] & kRouterWide)) {
      atomicOr(&smem.redo[row], 1u << column);
    } else {
      *output_element(p, row0 + row, column0 + column) = scale_by(total, -p.row_exponents[row0 + row] - p.terms.exponents[column0 + column]);
    }
  }
}

// Elements that the main program has finished.
__device__ __forceinline__ void find_special(const RouterOutParams& p, SpecialSmem& smem, int tile, int row0, int column0, int group) {
  const uint8_t* row_redo = p.redo + (int64_t{tile} * p.work.blocks + group * kSpecialColumns / kRouterBlock) * kRouterRows;
  for (int i = threadIdx.x; i < kRouterRows * kSpecialColumns; i += kRouterSpecialThreads) {
    const int row = i / kSpecialColumns, column = i % kSpecialColumns;
    const int flags = smem.column_flags[column];
    if (row0 + row >= p.work.rows || column0 + column >= p.work.columns || (flags == 0 && row_redo[row] == 0)) continue;
    const float result = *output_element(p, row0 + row, column0 + column);
    const bool small = flags != 0 && fabs(scalbn(static_cast<double>(result), p.row_exponents[row0 + row] + p.terms.exponents[column0 + column])) < 1.0;
    if (!(fabsf(result) < __uint_as_float(kInfinityBits)) || small || (flags & kRouterWide)) atomicOr(&smem.redo[row], 1u << column);
  }
}

// 32 rows and 32 columns; a thread has four columns of a row.
__device__ __forceinline__ void compute_special(const RouterSpecialParams& p, SpecialSmem& smem, int first_row, int row0, int column0) {
  const RouterWork& work = p.main.work;
  const int row = threadIdx.x / 8, column = threadIdx.x % 8 * 4;
  double sum[4] = {0., 0., 0., 0.};
  for (int k0 = 0; k0 < work.depth; k0 += 32) {
    __syncthreads();
    for (int i = threadIdx.x; i < 32 * 32; i += kRouterSpecialThreads) {
      const int major = i / 32, minor = i % 32;
      {
        const int r = p.main.p.depth_stride == 1 ? major : minor, k = p.main.p.depth_stride == 1 ? minor : major;
        const bool inside = row0 + first_row + r < work.rows && k0 + k < work.depth;
        const int64_t at = (row0 + first_row + r) * p.main.p.stride + (k0 + k) * p.main.p.depth_stride;
        smem.p[r][k] = inside ? operand_element(p.main.p, at) : 0.f;
      }
      {
        const int c = p.q.depth_stride == 1 ? major : minor, k = p.q.depth_stride == 1 ? minor : major;
        const bool inside = column0 + c < work.columns && k0 + k < work.depth;
        smem.q[c][k] = inside ? operand_element(p.q, (column0 + c) * p.q.stride + (k0 + k) * p.q.depth_stride) : 0.f;
      }
    }
    __syncthreads();
    const int depth = min(32, work.depth - k0);
    for (int k = 0; k < depth; ++k) {
      const double x = smem.p[row][k];
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[i] = fma(x, smem.q[column + i][k], sum[i]);
    }
  }
  const uint32_t redo = smem.redo[first_row + row];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (redo >> (column + i) & 1) *output_element(p.main, row0 + first_row + row, column0 + column + i) = static_cast<float>(sum[i]);
  }
}

}  // namespace dense_projection_det_gemm

extern "C" __global__ void __launch_bounds__(dense_projection_det_gemm::kRouterSpecialThreads)
    router_special_any(const __grid_constant__ dense_projection_det_gemm::RouterSpecialParams p) {
  using namespace dense_projection_det_gemm;
  __shared__ SpecialSmem smem;
  const RouterWork& work = p.main.work;
  const int tile = blockIdx.x, row_tile = tile / work.column_tiles, width = work.blocks * kRouterBlock;
  const int row0 = row_tile * kRouterRows, tile_column = (tile - row_tile * work.column_tiles) * width;
  const int64_t padded = int64_t{work.column_tiles} * width;
  const int flag_rows = (work.steps + kRouterTermsSteps - 1) / kRouterTermsSteps;
  cake::ptx::launch_dependents();
  cake::ptx::wait_for_predecessor();

  const bool slots = router_units_of_tile(work, tile).count > 0;
  int groups = width / kSpecialColumns, group = 0;
  if (gridDim.y > 1) {
    group = blockIdx.y;
    groups = group + 1;
  }
  if (!slots) {
    uint32_t found = 0;
    const int columns = min(width, work.columns - tile_column), words = (columns + 3) / 4;
    for (int i = threadIdx.x; i < flag_rows * words; i += kRouterSpecialThreads) {
      const int flag_row = i / words;
      found |= reinterpret_cast<const uint32_t*>(p.main.terms.flags + flag_row * padded + tile_column)[i - flag_row * words];
    }
    const int blocks = (columns + kRouterBlock - 1) / kRouterBlock;
    const uint32_t* redo = reinterpret_cast<const uint32_t*>(p.main.redo + int64_t{tile} * work.blocks * kRouterRows);
    for (int i = threadIdx.x; i < blocks * kRouterRows / 4; i += kRouterSpecialThreads) found |= redo[i];
    if (!__syncthreads_or(found != 0)) return;
  }
  for (; group < groups; ++group) {
    const int column0 = tile_column + group * kSpecialColumns;
    if (column0 >= work.columns) return;
    __syncthreads();
    if (threadIdx.x < kRouterRows) smem.redo[threadIdx.x] = 0;
    if (threadIdx.x < kSpecialColumns) {
      uint32_t flags = 0;
      for (int i = 0; i < flag_rows; ++i) flags |= p.main.terms.flags[i * padded + column0 + threadIdx.x];
      smem.column_flags[threadIdx.x] = static_cast<uint8_t>(flags);
    }
    __syncthreads();
    slots ? sum_slots(p.main, smem, tile, row0, column0, group) : find_special(p.main, smem, tile, row0, column0, group);
    __syncthreads();
    for (int first_row = 0; first_row < kRouterRows; first_row += 32) {
      const uint32_t redo = threadIdx.x < 32 ? smem.redo[first_row + threadIdx.x] : 0;
      if (__syncthreads_or(redo != 0)) compute_special(p, smem, first_row, row0, column0);
    }
  }
}
