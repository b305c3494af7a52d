// Elements that split products do not serve: which they are, and the same in FP64, in the order of the depth. Which those are depends
// on an element's own row and column alone.
//
// By kRouterSpecialThreads threads of a CTA, 32 columns of a tile's 128 rows at a time.
#pragma once

#include "any/router_split.cuh"
#include "cake/ptx/cta.cuh"

namespace dense_projection_det_gemm {

struct RedoSmem {
  double p[32][33], q[32][33];  // [row][depth]
  uint32_t redo[kRouterRows];   // a bit for each of the 32 columns
  int row_exponents[kRouterRows], column_exponents[kRouterSpecialColumns];
  alignas(16) float factors[kRouterSpecialColumns];  // what undoes the columns' scales
  uint32_t column_flags[kRouterSpecialColumns];
  uint32_t row_tiny[kRouterRows];  // of any segment
};

inline constexpr int kRedoBarrier = 3;  // all of those threads

__device__ __forceinline__ void redo_sync() { ptx::named_barrier_sync(kRedoBarrier, kRouterSpecialThreads); }
__device__ __forceinline__ bool redo_any(bool mine) {
  return ptx::named_barrier_or(kRedoBarrier, kRouterSpecialThreads, mine);
}

__device__ __forceinline__ float* output_element(const RouterOutParams& p, int64_t row, int64_t column) {
  return p.out + row * p.out_row_stride + column * p.out_column_stride;
}

// What is known of the rows of a tile and of 32 of its columns, a thread's share: asked for before the sums, so that both come
// in one latency.
struct RedoFacts {
  uint32_t flags = 0, tiny = 0;
  int column_exponent = 0, row_exponent = 0;
  float factor = 1.f;

  __device__ __forceinline__ RedoFacts(const RouterOutParams& p, int column0) {
    constexpr int kLanes = kRouterSpecialThreads / kRouterSpecialColumns, kAtOnce = 8;
    const int64_t padded = int64_t{p.work.column_tiles} * p.work.blocks * kRouterBlock;
    const int flag_rows = (p.work.steps + kRouterTermsSteps - 1) / kRouterTermsSteps, thread = threadIdx.x;
    const uint8_t* source = p.terms.flags + column0 + thread % kRouterSpecialColumns;
    for (int first = thread / kRouterSpecialColumns; first < flag_rows; first += kAtOnce * kLanes) {
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        if (first + i * kLanes < flag_rows) flags |= source[(first + i * kLanes) * padded];
      }
    }
    if (thread < kRouterSpecialColumns) {
      column_exponent = p.terms.exponents[column0 + thread];
      factor = p.terms.factors[column0 + thread];
    }
  }

  // To all threads. Returns whether all of it is ordinary: a factor for each column is then all that results need.
  __device__ __forceinline__ bool share(RedoSmem& smem) const {
    const int thread = threadIdx.x;
    if (thread < kRouterSpecialColumns) {
      smem.column_flags[thread] = 0;
      smem.column_exponents[thread] = column_exponent;
      smem.factors[thread] = factor;
    }
    if (thread < kRouterRows) {
      smem.row_tiny[thread] = tiny;
      smem.redo[thread] = 0;
      smem.row_exponents[thread] = row_exponent;
    }
    const bool ordinary = !redo_any(flags != 0 || tiny != 0 || row_exponent != 0 || !(factor > 0.f));
    if (ordinary) return true;
    if (flags) atomicOr(&smem.column_flags[thread % kRouterSpecialColumns], flags);
    redo_sync();
    return false;
  }
};

// Elements that the main program has finished; of those the blocks that `joined` has a bit for, of each 16 rows, where it is given.
__device__ __forceinline__ void find_special(const RouterOutParams& p, RedoSmem& smem, int64_t row0,
                                             int column0, int group, const uint8_t* joined) {
  const int block = group * kRouterSpecialColumns / kRouterBlock;
  for (int i = threadIdx.x; i < kRouterRows * kRouterSpecialColumns; i += kRouterSpecialThreads) {
    const int row = i / kRouterSpecialColumns, column = i % kRouterSpecialColumns;
    const int flags = smem.column_flags[column];
    if (joined != nullptr && (joined[row / 16] >> block & 1) == 0) continue;
    if (row0 + row >= p.work.rows || column0 + column >= p.work.columns) continue;
    const float result = *output_element(p, row0 + row, column0 + column);
    const bool small =
        flags != 0 && fabs(scalbn(static_cast<double>(result), smem.row_exponents[row] + smem.column_exponents[column])) < 1.0;
    if (!(fabsf(result) < __uint_as_float(kInfinityBits)) || small || (flags & kRouterWide))
      atomicOr(&smem.redo[row], 1u << column);
  }
}

// 32 rows and 32 columns; a thread has four columns of a row.
__device__ __forceinline__ void compute_special(const RouterOutParams& p, RedoSmem& smem, int first_row, int64_t row0,
                                                int column0) {
  const RouterWork& work = p.work;
  const int row = threadIdx.x / 8, column = threadIdx.x % 8 * 4;
  double sum[4] = {0., 0., 0., 0.};
  for (int k0 = 0; k0 < work.depth; k0 += 32) {
    redo_sync();
    for (int i = threadIdx.x; i < 32 * 32; i += kRouterSpecialThreads) {
      const int major = i / 32, minor = i % 32;
      {
        const int r = p.p.depth_stride == 1 ? major : minor, k = p.p.depth_stride == 1 ? minor : major;
        const bool inside = row0 + first_row + r < work.rows && k0 + k < work.depth;
        const int64_t at = (row0 + first_row + r) * p.p.stride + (k0 + k) * p.p.depth_stride;
        smem.p[r][k] = inside ? operand_element(p.p, at) : 0.f;
      }
      {
        const int c = p.q.depth_stride == 1 ? major : minor, k = p.q.depth_stride == 1 ? minor : major;
        const bool inside = column0 + c < work.columns && k0 + k < work.depth;
        smem.q[c][k] = inside ? operand_element(p.q, (column0 + c) * p.q.stride + (k0 + k) * p.q.depth_stride) : 0.f;
      }
    }
    redo_sync();
    const int depth = min(32, work.depth - k0);
#pragma unroll 4
    for (int k = 0; k < depth; ++k) {
      const double x = smem.p[row][k];
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[i] = fma(x, smem.q[column + i][k], sum[i]);
    }
  }
  const uint32_t redo = smem.redo[first_row + row];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if (redo >> (column + i) & 1)
      *output_element(p, row0 + first_row + row, column0 + column + i) = static_cast<float>(sum[i]);
  }
}

// The same as a function of its own, so that its registers are none of the others'.
inline __device__ __noinline__ void compute_special_apart(const RouterOutParams& p, RedoSmem& smem, int first_row, int64_t row0,
                                                          int column0) {
  compute_special(p, smem, first_row, row0, column0);
}

// `kApart`: by a function of its own, which a program of wgmma may not call.
template <bool kApart>
__device__ __forceinline__ void redo_marked(const RouterOutParams& p, RedoSmem& smem, int64_t row0, int column0) {
  for (int first_row = 0; first_row < kRouterRows; first_row += 32) {
    const uint32_t redo = threadIdx.x < 32 ? smem.redo[first_row + threadIdx.x] : 0;
    if (!redo_any(redo != 0)) continue;
    if constexpr (kApart) {
      compute_special_apart(p, smem, first_row, row0, column0);
    } else {
      compute_special(p, smem, first_row, row0, column0);
    }
  }
}

// A thread's share of the flags of all columns.
__device__ __forceinline__ uint32_t flags_of_columns(const RouterOutParams& p, int thread, int threads) {
  const int64_t padded = int64_t{p.work.column_tiles} * p.work.blocks * kRouterBlock;
  const int64_t quads = padded * ((p.work.steps + kRouterTermsSteps - 1) / kRouterTermsSteps) / 16;
  uint32_t found = 0;
#pragma unroll 2
  for (int64_t i = thread; i < quads; i += threads) {
    const uint4 four = reinterpret_cast<const uint4*>(p.terms.flags)[i];
    found |= four.x | four.y | four.z | four.w;
  }
  return found;
}

// Exponent of the scale of a row of P, from the elements that the products took it from.
__device__ __forceinline__ int exponent_of_row(const RouterOutParams& p, int64_t row) {
  uint32_t largest = 0;
  if (p.p.is_bf16 || row >= p.work.rows) return 0;
  for (int k = 0; k < min(kRouterHint, p.work.depth); ++k) {
    largest = max(largest, __float_as_uint(operand_element(p.p, row * p.p.stride + k * p.p.depth_stride)) & kMagnitudeBits);
  }
  return row_exponent(largest);
}

// A CTA's part of a finished tile, `group` of its columns, or what `joined` says of it.
template <bool kApart>
__device__ __forceinline__ void redo_columns(const RouterOutParams& p, RedoSmem& smem, int tile, int rank, int group,
                                             const uint8_t* joined) {
  const RouterWork& work = p.work;
  const int column0 = router_column_tile(work, tile) * work.blocks * kRouterBlock + group * kRouterSpecialColumns;
  const int64_t row0 = router_first_row(work, tile, rank);
  if (row0 >= work.rows || column0 >= work.columns) return;
  RedoFacts facts(p, column0);
  if (threadIdx.x < kRouterRows) facts.row_exponent = exponent_of_row(p, row0 + threadIdx.x);
  redo_sync();
  facts.share(smem);
  find_special(p, smem, row0, column0, group, joined);
  redo_sync();
  redo_marked<kApart>(p, smem, row0, column0);
}

template <bool kApart>
__device__ __forceinline__ void redo_tile(const RouterOutParams& p, RedoSmem& smem, int tile, int rank, const uint8_t* joined) {
  const int groups = p.work.blocks * kRouterBlock / kRouterSpecialColumns;
  for (int group = 0; group < groups; ++group) redo_columns<kApart>(p, smem, tile, rank, group, joined);
}

}  // namespace dense_projection_det_gemm
