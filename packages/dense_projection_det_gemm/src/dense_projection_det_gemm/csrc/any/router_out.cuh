// D = P Q^T to FP32 accuracy with mma.sync: a CTA has 128 rows and one block of 64 columns of a tile, a warp 16 of the rows.
//
// Order of accumulation, for each step of 16 along the depth: the kept products of terms, smallest first, in a fresh accumulator,
// which is added to FP32 totals; steps ascending, segments ascending (router_work.h). Q's planes come by cp.async, four steps in
// flight; a warp's rows of P are its own and come straight to registers, a step ahead.
#pragma once

#include "any/router_store.cuh"
#include "cake/ptx/grid_dependency.cuh"

namespace dense_projection_det_gemm {

template <class Element, bool kRowsAdjacent>
struct RouterPortable {
  static constexpr int kStages = 4, kHalfBytes = kRouterBlock * 16;
  using Loaded = typename RouterLoaded<Element>::Type;
  using Fragments = RouterFragments<Element>;

  struct Smem {
    alignas(128) char q[kStages][kRouterBlockBytes];
  };

  __device__ static __forceinline__ float element(const RouterOutParams& p, int64_t row, int k) {
    return row < p.work.rows && k < p.work.depth
               ? static_cast<float>(static_cast<const Element*>(p.p.data)[row * p.p.stride + k * p.p.depth_stride])
               : 0.f;
  }

  // Element i of raw[r], in the order of router_split.cuh.
  __device__ static __forceinline__ float loaded_element(const RouterOutParams& p, int64_t row0, int k0, int r, int i, int lane) {
    const int g = lane >> 2, c = lane & 3;
    return kRowsAdjacent ? element(p, row0 + 2 * g + (r & 1), k0 + 2 * c + 8 * (r >> 1) + i)
                         : element(p, row0 + g + 8 * (r & 1), k0 + 4 * c + 2 * (r >> 1) + i);
  }

  __device__ static __forceinline__ void load(RouterRaw& raw, const RouterOutParams& p, int64_t row0, int k0, int lane) {
    const int g = lane >> 2, c = lane & 3;
    const float* data = static_cast<const float*>(p.p.data);
    if (row0 + 16 <= p.work.rows && k0 + kRouterStep <= p.work.depth) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if constexpr (kRowsAdjacent) {
#pragma unroll
          for (int i = 0; i < 2; ++i) {
            const float2 two =
                *reinterpret_cast<const float2*>(data + row0 + 2 * g + (k0 + 2 * c + 8 * half + i) * p.p.depth_stride);
            raw[2 * half][i] = two.x, raw[2 * half + 1][i] = two.y;
          }
        } else {
          const float4 four = *reinterpret_cast<const float4*>(data + (row0 + g + 8 * half) * p.p.stride + k0 + 4 * c);
          raw[half][0] = four.x, raw[half][1] = four.y, raw[2 + half][0] = four.z, raw[2 + half][1] = four.w;
        }
      }
      return;
    }
#pragma unroll
    for (int r = 0; r < 4; ++r) {
#pragma unroll
      for (int i = 0; i < 2; ++i) raw[r][i] = loaded_element(p, row0, k0, r, i, lane);
    }
  }

  __device__ static __forceinline__ void load(uint32_t (&pairs)[4], const RouterOutParams& p, int64_t row0, int k0, int lane) {
    const int g = lane >> 2, c = lane & 3;
    if (!kRowsAdjacent && row0 + 16 <= p.work.rows && k0 + kRouterStep <= p.work.depth) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint2 two = *reinterpret_cast<const uint2*>(static_cast<const __nv_bfloat16*>(p.p.data) +
                                                          (row0 + g + 8 * half) * p.p.stride + k0 + 4 * c);
        pairs[half] = two.x, pairs[2 + half] = two.y;
      }
      return;
    }
#pragma unroll
    for (int r = 0; r < 4; ++r) {  // packing BF16 numbers rounds nothing
      pairs[r] = ptx::pack_bf16(loaded_element(p, row0, k0, r, 0, lane), loaded_element(p, row0, k0, r, 1, lane));
    }
  }

  // The block's part of the planes, [term][half][64][8] in shared memory.
  __device__ static __forceinline__ void copy_q(uint32_t stage, const char* planes, const RouterPlanes& layout) {
    constexpr int kUnits = kRouterBlockBytes / 16;
    for (int unit = threadIdx.x; unit < kUnits; unit += kRouterOutThreads) {
      const int half = unit / kRouterBlock, column = unit % kRouterBlock;
      ptx::cp_async_16(stage + 16 * unit, planes + half * layout.half_bytes() + 16 * column);
    }
  }

  // Two neighbouring fragments of 16 x 8 of each term.
  __device__ static __forceinline__ void multiply(float (&totals)[32], const Fragments& a, uint32_t stage, int lane) {
#pragma unroll
    for (int pair = 0; pair < 4; ++pair) {
      uint32_t b[kRouterTerms][4];
      const int matrix = lane >> 3;
      const uint32_t address = stage + (matrix & 1) * kHalfBytes + (2 * pair + (matrix >> 1)) * 128 + (lane & 7) * 16;
#pragma unroll
      for (int t = 0; t < kRouterTerms; ++t) ptx::ldmatrix_x4(b[t], address + t * 2 * kHalfBytes);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        float sum[4] = {0.f, 0.f, 0.f, 0.f};
        const auto add = [&](int i, int j) { ptx::mma_bf16(sum, a[i], b[j][2 * n], b[j][2 * n + 1]); };
        if constexpr (kTermsOf<Element> > 1) {
          add(2, 0), add(1, 1), add(0, 2), add(1, 0), add(0, 1), add(0, 0);
        } else {
          add(0, 2), add(0, 1), add(0, 0);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) totals[8 * pair + 4 * n + i] = __fadd_rn(totals[8 * pair + 4 * n + i], sum[i]);
      }
    }
  }

  __device__ static __forceinline__ void run_segment(const RouterOutParams& p, Smem& smem, const RouterSegment& segment,
                                                     bool fresh, RouterRowState& rows) {
    const int lane = threadIdx.x & 31, warp_row = 16 * (threadIdx.x >> 5), block = blockIdx.y;
    const int row_tile = router_row_tile(p.work, segment.tile), column_tile = segment.tile - row_tile * p.work.column_tiles;
    const int64_t row0 = int64_t{row_tile} * kRouterRows + warp_row;
    const RouterTarget target = router_target(p, segment);
    if (kRouterBlock * block >= target.columns_left) return;
    const int64_t pitch = int64_t{p.work.blocks} * kRouterBlockBytes;
    const RouterPlanes layout(p.work);
    const char* planes = static_cast<const char*>(p.terms.planes) + int64_t{column_tile} * p.work.steps * pitch +
                         layout.offset(block * kRouterBlock);
    const auto fetch = [&](int step) {
      if (step < segment.end_step) copy_q(ptx::shared_address(smem.q[step % kStages]), planes + step * pitch, layout);
      ptx::cp_async_commit();
    };
    __syncthreads();  // the last segment's stages have been read
    for (int step = segment.first_step; step < segment.first_step + kStages - 1; ++step) fetch(step);
    Loaded loaded;
    if (fresh) {
      rows = RouterRowState();
      if constexpr (kTermsOf<Element> > 1) {
        load(loaded, p, row0, 0, lane);
        rows.take_hint(loaded);
      }
    }
    load(loaded, p, row0, segment.first_step * kRouterStep, lane);
    float totals[32];
#pragma unroll
    for (int i = 0; i < 32; ++i) totals[i] = 0.f;
#pragma unroll 1
    for (int step = segment.first_step; step < segment.end_step; ++step) {
      Fragments a;
      make_fragments(a, loaded, rows, false);
      if (step + 1 < segment.end_step) load(loaded, p, row0, (step + 1) * kRouterStep, lane);
      ptx::cp_async_wait<kStages - 2>();
      __syncthreads();
      fetch(step + kStages - 1);
      multiply(totals, a, ptx::shared_address(smem.q[step % kStages]), lane);
    }
    const RouterRows found(rows);
    store_rows<kRowsAdjacent>(p, segment, warp_row, found, lane);
    const int row = warp_row + (lane >> 2) * (kRowsAdjacent ? 2 : 1);
    const RouterPlace<kRowsAdjacent> place(target, row, kRouterBlock * block, lane & 3);
    if (target.add) place.add(totals);
    if (target.final) {
      RouterFactors factors;
      load_factors(factors, p, segment, kRouterBlock * block, lane);
      finish_block<kRowsAdjacent>(p, segment, totals, kRouterBlock * block, found, factors, lane, *p.terms.any_redo);
    }
    place.store(totals);
  }

  __device__ static __forceinline__ void run(const RouterOutParams& p, char* bytes) {
    for (int unit = blockIdx.x; unit < p.work.units; unit += gridDim.x) {
      const RouterUnit range = router_unit(p.work, unit);
      RouterRowState rows;
      for (int64_t next = range.first; next < range.end;) {
        const RouterSegment segment = router_segment(p.work, unit, range, next, 0);
        run_segment(p, *reinterpret_cast<Smem*>(bytes), segment, next == range.first || segment.first_step == 0, rows);
        next += segment.end_step - segment.first_step;
      }
    }
    ptx::cp_async_wait<0>();
  }
};

}  // namespace dense_projection_det_gemm

extern "C" __global__ void __launch_bounds__(dense_projection_det_gemm::kRouterOutThreads, 1)
    router_out_any(const __grid_constant__ dense_projection_det_gemm::RouterOutParams p) {
  using namespace dense_projection_det_gemm;
  __shared__ __align__(128) char smem[sizeof(RouterPortable<float, false>::Smem)];
  cake::ptx::launch_dependents();
  cake::ptx::wait_for_predecessor();
  const bool adjacent = p.p.depth_stride != 1;
  if (p.p.is_bf16) {
    adjacent ? RouterPortable<__nv_bfloat16, true>::run(p, smem) : RouterPortable<__nv_bfloat16, false>::run(p, smem);
  } else {
    adjacent ? RouterPortable<float, true>::run(p, smem) : RouterPortable<float, false>::run(p, smem);
  }
}
