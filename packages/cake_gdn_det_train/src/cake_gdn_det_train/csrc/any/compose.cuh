// compose: the entry states of the segments of long sequences (forward), or the gradients of their exit states (backward).
//
//   forward   E_1 = N_0 (segment 0 ran from its true entry),   E_{s+1} = M_s E_s + N_s
//   backward  D_{n-2} = Y_{n-1},                               D_{s-1} = M_s^T D_s + Y_s
//
// All matrices are transposed (V x K) or, for M, stored [column][row]; arithmetic is FP32, keys ascending, segments in
// sequence order. One CTA per first segment of a long sequence, value head and 16 value columns; a thread owns one key row
// and four of the columns.
#pragma once

#include "any/state_io.cuh"
#include "any/tile_copy.cuh"

namespace cake::gdn {

inline constexpr int kComposeColumns = 16;
inline constexpr int kComposeThreads = 512;

struct ComposeSmem {
  alignas(16) float state[2][kHeadDim][kComposeColumns];  // [key][value column]
};

template <bool kReverse>
__device__ __forceinline__ void compose_body(const ComposeParams& p) {
  auto& state = reinterpret_cast<ComposeSmem*>(smem_bytes)->state;
  constexpr int kSlices = kHeadDim / kComposeColumns;
  const int slice = blockIdx.x % kSlices;
  const int64_t work = blockIdx.x / kSlices;
  const int head = work % p.heads.value_heads;
  const int64_t at = work / p.heads.value_heads;
  const Segment first = p.segments[at];
  if (first.sequence < 0 || first.segments == 1 || first.index != 0) return;

  const int key = threadIdx.x % kHeadDim, column = threadIdx.x / kHeadDim * 4;
  const int n = first.segments;
  const int64_t matrix_step = static_cast<int64_t>(p.heads.value_heads) * kStateElements;
  const int64_t base = long_matrix(first, p.heads, head);
  const int64_t lane_base = base + static_cast<int64_t>(slice * kComposeColumns + column) * kHeadDim + key;
  // Step i hands the state over to segment `to`, having passed through segment `through`.
#pragma unroll 1
  for (int i = 0; i + 1 < n; ++i) {
    const int through = kReverse ? n - 1 - i : i;
    const int to = kReverse ? through - 1 : through + 1;
    const float* offset = p.offset + lane_base + through * matrix_step;
    float next[4];
#pragma unroll
    for (int v = 0; v < 4; ++v) next[v] = offset[v * kHeadDim];
    if (i > 0) {
      const float* factor = p.factor + base + through * matrix_step;
      const float(&from)[kHeadDim][kComposeColumns] = state[i & 1];
#pragma unroll 8
      for (int k = 0; k < kHeadDim; ++k) {
        const float m = factor[kReverse ? key * kHeadDim + k : k * kHeadDim + key];
        const float4 s = *reinterpret_cast<const float4*>(&from[k][column]);
        next[0] = fmaf(m, s.x, next[0]);
        next[1] = fmaf(m, s.y, next[1]);
        next[2] = fmaf(m, s.z, next[2]);
        next[3] = fmaf(m, s.w, next[3]);
      }
    }
    float* result = p.result + lane_base + to * matrix_step;
#pragma unroll
    for (int v = 0; v < 4; ++v) {
      result[v * kHeadDim] = next[v];
    }
    *reinterpret_cast<float4*>(&state[(i + 1) & 1][key][column]) = make_float4(next[0], next[1], next[2], next[3]);
    __syncthreads();
  }
}

extern "C" __global__ void __launch_bounds__(kComposeThreads) gdn_compose(const __grid_constant__ ComposeParams p) {
  compose_body<false>(p);
}
extern "C" __global__ void __launch_bounds__(kComposeThreads) gdn_compose_reverse(const __grid_constant__ ComposeParams p) {
  compose_body<true>(p);
}

}  // namespace cake::gdn
