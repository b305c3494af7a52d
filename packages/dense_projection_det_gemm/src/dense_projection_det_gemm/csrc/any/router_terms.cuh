// Q as scaled BF16 terms (RouterPlanes), exponents, factors and flags of its rows.
//
// Reads Q [columns, depth], writes all of the planes (zeros past the edges). A thread holds 32 elements of a column; a
// CTA has a block of 64 columns and kRouterTermsSteps steps. The scale of a row of Q comes from its first kRouterHint elements,
// so that CTAs need nothing of one another.
#pragma once

#include "any/router_split.cuh"
#include "cake/ptx/grid_dependency.cuh"

namespace dense_projection_det_gemm {

// Where in a block's planes a column stands: so that two neighbouring fragments of an accumulator give a lane four columns next
// to each other, the inverse of router_store.cuh's column_of.
__device__ __forceinline__ int place_in_block(int column) {
  return (column & 48) | (column & 2) << 2 | (column & 12) >> 1 | (column & 1);
}
__device__ __forceinline__ int column_at(int place) {
  return (place & 48) | (place & 8) >> 2 | (place & 6) << 1 | (place & 1);
}

// Element i of 16 for a lane that takes them in order, as the order of a step's planes is: halves of 8, interleaved or not.
__device__ __forceinline__ constexpr int place_in_step(int i, bool interleaved) {
  return interleaved ? 8 * ((i >> 1) & 1) + 2 * (i >> 2) + (i & 1) : i;
}

// Asks L2 for what the product's CTAs read first of P, a line at a time: they cannot become resident while this kernel runs.
__device__ __forceinline__ void fetch_first(const RouterTermsParams& p) {
  constexpr int kLine = 128, kDepth = 8 * kRouterStep;  // more than fills a ring
  const RouterWork& work = p.work;
  const int size = p.p.is_bf16 ? 2 : 4, rows = work.ctas * kRouterRows;
  const bool adjacent = p.p.depth_stride != 1;
  const int lines = (adjacent ? rows : kDepth) * size / kLine, pieces = adjacent ? kDepth : rows;
  const int thread = (blockIdx.y * gridDim.x + blockIdx.x) * kRouterTermsThreads + threadIdx.x;
  for (int i = thread; i < p.fetched_units * pieces * lines; i += gridDim.x * gridDim.y * kRouterTermsThreads) {
    const int piece = i / lines, along = (i - piece * lines) * (kLine / size), unit = piece / pieces, across = piece - unit * pieces;
    const int64_t first = router_unit(work, unit).first;
    const int tile = static_cast<int>(router_quotient(first, work.by_steps));
    const int64_t row = int64_t{router_row_tile(work, tile)} * rows + (adjacent ? along : across);
    const int64_t k = (first - int64_t{tile} * work.steps) * kRouterStep + (adjacent ? across : along);
    if (row >= work.rows || k >= work.depth) continue;
    const char* line = static_cast<const char*>(p.p.data) + (row * p.p.stride + k * p.p.depth_stride) * size;
    asm volatile("prefetch.global.L2 [%0];" ::"l"(line));
  }
}

// A thread's part of a block: kCount neighbouring elements, from `first` on, of each of kSteps steps of a column.
template <int kLanes>
struct TermsShare {
  static constexpr int kCount = kRouterStep / kLanes, kSteps = kRouterTermsSteps * kRouterBlock * kLanes / kRouterTermsThreads;
  const RouterTermsParams& p;
  int row, first, step0;  // row: the column, in its block
  bool valid;

  // Lanes that share a step, where it lies in one piece, read all of it, and write eight columns next to each other.
  __device__ __forceinline__ explicit TermsShare(const RouterTermsParams& params) : p(params) {
    const int place = threadIdx.x / kLanes % kRouterBlock;
    row = kLanes > 1 ? column_at(place) : place;
    first = threadIdx.x % kLanes * kCount;
    step0 = blockIdx.x * kRouterTermsSteps + threadIdx.x / (kRouterBlock * kLanes) * kSteps;
    valid = column() < p.work.columns;
  }

  __device__ __forceinline__ int column() const { return blockIdx.y * kRouterBlock + row; }

  __device__ __forceinline__ void load(float (&x)[kCount], int step) const {
    const int k = step * kRouterStep + first;
    const int64_t offset = column() * p.q.stride + k * p.q.depth_stride;
    if (kLanes > 1 && valid && !p.q.is_bf16 && k + kCount <= p.work.depth) {
      const float4* source = reinterpret_cast<const float4*>(static_cast<const float*>(p.q.data) + offset);
#pragma unroll
      for (int i = 0; i < kCount / 4; ++i) {
        const float4 four = source[i];
        x[4 * i] = four.x, x[4 * i + 1] = four.y, x[4 * i + 2] = four.z, x[4 * i + 3] = four.w;
      }
      return;
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      x[i] = valid && k + i < p.work.depth ? operand_element(p.q, offset + i * p.q.depth_stride) : 0.f;
    }
  }

  // The next term of a pair of elements, which keep what it leaves of them.
  __device__ static __forceinline__ uint32_t take_term(float (&x)[kCount], int i) {
    const uint32_t pair = ptx::pack_bf16(x[i], x[i + 1]);
    x[i] = __fsub_rn(x[i], ptx::low_bf16(pair));
    x[i + 1] = __fsub_rn(x[i + 1], ptx::high_bf16(pair));
    return pair;
  }

  template <bool kInterleaved>
  __device__ __forceinline__ void store(char* planes, const RouterPlanes& layout, float (&x)[kCount]) const {
#pragma unroll
    for (int t = 0; t < kRouterTerms; ++t) {
      char* term = planes + t * layout.term_bytes();
      if constexpr (kLanes == 1) {
        uint32_t halves[2][4];
#pragma unroll
        for (int i = 0; i < kRouterStep; i += 2) {
          const int place = place_in_step(i, kInterleaved);
          halves[place >> 3][(place & 7) >> 1] = take_term(x, i);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          uint4* destination = reinterpret_cast<uint4*>(term + half * layout.half_bytes());
          *destination = make_uint4(halves[half][0], halves[half][1], halves[half][2], halves[half][3]);
        }
      } else {
#pragma unroll
        for (int i = 0; i < kCount; i += 2) {
          const int place = place_in_step(first + i, kInterleaved);
          *reinterpret_cast<uint32_t*>(term + (place >> 3) * layout.half_bytes() + 2 * (place & 7)) = take_term(x, i);
        }
      }
    }
  }

  __device__ __forceinline__ void run(uint32_t* flags) const {
    float x[kSteps][kCount], hint[kCount];
#pragma unroll
    for (int i = 0; i < kSteps; ++i) load(x[i], step0 + i);
    load(hint, 0);
    fetch_first(p);
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < kCount; ++i) largest = max(largest, __float_as_uint(hint[i]) & kMagnitudeBits);
#pragma unroll
    for (int lanes = 1; lanes < kLanes; lanes *= 2) largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, lanes));
    const int exponent = column_exponent(largest);
    const float up = power_of_two(exponent >> 1), up_again = power_of_two(exponent - (exponent >> 1));
    if (step0 == 0 && first == 0) {
      p.terms.exponents[column()] = exponent;
      p.terms.factors[column()] = exponent <= 126 ? power_of_two(-exponent) : 0.f;
    }

    const int column_tile = blockIdx.y / p.work.blocks, block = blockIdx.y - column_tile * p.work.blocks;
    const RouterPlanes layout(p.work);
    char* planes = static_cast<char*>(p.terms.planes) + layout.offset(block * kRouterBlock + place_in_block(row)) +
                   (int64_t{column_tile} * p.work.steps + step0) * p.work.blocks * kRouterBlockBytes;
    uint32_t least_key = 0xffffffffu;
    largest = 0;
#pragma unroll
    for (int i = 0; i < kSteps; ++i) {
      if (step0 + i >= p.work.steps) break;
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        least_key = min(least_key, nonzero_key(x[i][j]));
        largest = max(largest, __float_as_uint(x[i][j]) & kMagnitudeBits);
        x[i][j] = __fmul_rn(__fmul_rn(x[i][j], up), up_again);
      }
      char* destination = planes + int64_t{i} * p.work.blocks * kRouterBlockBytes;
      p.terms.interleaved ? store<true>(destination, layout, x[i]) : store<false>(destination, layout, x[i]);
    }
    const int found = (is_tiny(least_key, column_lowest(exponent)) ? kRouterTiny : 0) |
                      (largest != 0 && binade(largest) + exponent > kRouterColumnHighest ? kRouterWide : 0);
    if (found) atomicOr(&flags[row], static_cast<uint32_t>(found));
  }
};

}  // namespace dense_projection_det_gemm

extern "C" __global__ void __launch_bounds__(dense_projection_det_gemm::kRouterTermsThreads)
    router_terms_any(const __grid_constant__ dense_projection_det_gemm::RouterTermsParams p) {
  using namespace dense_projection_det_gemm;
  __shared__ uint32_t flags[kRouterBlock];
  if (threadIdx.x < kRouterBlock) flags[threadIdx.x] = 0;
  __syncthreads();
  cake::ptx::launch_dependents();
  cake::ptx::wait_for_predecessor();
  if (blockIdx.x == 0 && blockIdx.y == 0 && threadIdx.x == 0) *p.terms.any_redo = 0;
  const int64_t arrivals = router_arrivals(p.work), cta = blockIdx.y * gridDim.x + blockIdx.x;
  for (int64_t i = cta * kRouterTermsThreads + threadIdx.x; i < arrivals; i += int64_t{gridDim.x} * gridDim.y * kRouterTermsThreads) {
    p.terms.arrivals[i] = 0;
  }
  p.q.depth_stride == 1 ? TermsShare<4>(p).run(flags) : TermsShare<1>(p).run(flags);
  __syncthreads();
  if (threadIdx.x < kRouterBlock) {
    const int64_t padded = int64_t{p.work.column_tiles} * p.work.blocks * kRouterBlock;
    p.terms.flags[blockIdx.x * padded + blockIdx.y * kRouterBlock + threadIdx.x] = static_cast<uint8_t>(flags[threadIdx.x]);
  }
}
