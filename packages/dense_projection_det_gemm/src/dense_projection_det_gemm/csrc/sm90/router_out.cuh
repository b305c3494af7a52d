// D = P Q^T to FP32 accuracy on Hopper: tiles of 128 rows and up to four blocks of 64 columns, two consumer warpgroups of 64 rows each.
//
// P comes as it is, by cp.async, and is split into its terms on the way to the registers that wgmma reads; Q comes as planes of terms, by
// bulk copy. For each step of 16 along the depth and each block of columns, the kept products of terms, smallest first, go to a fresh
// accumulator, which is then added to FP32 totals: tensor cores truncate, ordinary additions round. While a block is added, the next
// one's products run. Order of accumulation: products in a step, steps ascending, segments ascending (router_work.h).
//
//   full[stage]   128 producer threads, when their copies of P have landed; 1 for Q's bytes
//   empty[stage]  8 consumer warps
#pragma once

#include "any/router_store.cuh"
#include "cake/pipe/ring.cuh"
#include "cake/ptx/bulk_copy.cuh"
#include "cake/ptx/cta.cuh"
#include "cake/ptx/grid_dependency.cuh"
#include "cake/ptx/wgmma.cuh"

namespace dense_projection_det_gemm {

template <class Element, bool kRowsAdjacent, int kBlocks>
struct RouterNative {
  static constexpr bool kSplitP = sizeof(Element) == 4;
  static constexpr int kPBytes = kRouterRows * kRouterStep * static_cast<int>(sizeof(Element));
  static constexpr int kQBytes = kBlocks * kRouterBlockBytes;
  static constexpr int kStages = 7;
  static constexpr int kUnit = 16 / static_cast<int>(sizeof(Element));  // elements of 16 bytes
  using Ring = cake::pipe::Ring<kStages>;
  using Place = cake::pipe::RingPlace<kStages>;

  struct Smem {
    alignas(1024) char q[kStages][kQBytes];
    alignas(128) char p[kStages][kPBytes];
    Ring ring;
  };
  static_assert(sizeof(Smem) <= 232448);

  // 16-byte units of a tile of P: rows along the depth [128][16], or along the rows [16][128], units of a row permuted so that the
  // fragments' lanes meet all banks.
  __device__ static __forceinline__ uint32_t unit_offset(int row, int unit) {
    if constexpr (kRowsAdjacent) {
      return row * (kPBytes / kRouterStep) + 16 * (unit ^ (row >> 1 & 3) << 1);
    } else {
      return row * (kPBytes / kRouterRows) + 16 * unit;
    }
  }

  __device__ static __forceinline__ void copy_p(const RouterOutParams& p, uint32_t stage, int row0, int k0, int thread) {
    constexpr int kUnitsARow = (kRowsAdjacent ? kRouterRows : kRouterStep) / kUnit;
    constexpr int kCopies = kPBytes / 16 / 128;
    const int major0 = kRowsAdjacent ? row0 : k0, minor0 = kRowsAdjacent ? k0 : row0;
    const int major_extent = kRowsAdjacent ? p.work.rows : p.work.depth;
    const int minor_extent = kRowsAdjacent ? p.work.depth : p.work.rows;
    const int64_t pitch = kRowsAdjacent ? p.p.depth_stride : p.p.stride;
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      const int index = thread + 128 * i, unit = index % kUnitsARow, row = index / kUnitsARow;
      const int major = major0 + kUnit * unit;
      const int left = minor0 + row < minor_extent ? max(0, min(kUnit, major_extent - major)) : 0;
      const Element* source = static_cast<const Element*>(p.p.data) + (left > 0 ? (minor0 + row) * pitch + major : 0);
      asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(stage + unit_offset(row, unit)), "l"(source),
                   "r"(left * static_cast<int>(sizeof(Element)))
                   : "memory");
    }
  }

  __device__ static __forceinline__ void produce(const RouterOutParams& p, Smem& smem, int thread) {
    Place at;
    for (int unit = blockIdx.x; unit < p.work.units; unit += gridDim.x) {
      const RouterUnit range = router_unit(p.work, unit);
      int tile = static_cast<int>(range.first / p.work.steps);
      int step = static_cast<int>(range.first - int64_t{tile} * p.work.steps);
      int row_tile = tile / p.work.column_tiles;
      const char* planes = static_cast<const char*>(p.terms.planes) + (int64_t{tile - row_tile * p.work.column_tiles} * p.work.steps + step) * kQBytes;
#pragma unroll 1
      for (int64_t left = range.end - range.first; left > 0; --left) {
        smem.ring.wait_empty(at);
        copy_p(p, ptx::shared_address(smem.p[at.stage]), row_tile * kRouterRows, step * kRouterStep, thread);
        asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(ptx::shared_address(smem.ring.full(at))) : "memory");
        if (thread == 0) {
          smem.ring.expect(at, kQBytes);
          ptx::bulk_load(smem.q[at.stage], planes, kQBytes, smem.ring.full(at));
        }
        at.advance();
        planes += kQBytes;
        if (++step == p.work.steps) {
          step = 0;
          row_tile = ++tile / p.work.column_tiles;
          planes = static_cast<const char*>(p.terms.planes) + int64_t{tile - row_tile * p.work.column_tiles} * p.work.steps * kQBytes;
        }
      }
    }
  }

  // From a stage, or (kShared false) from global memory: the elements of a row's first step.
  __device__ static __forceinline__ void load_fp32(RouterRaw& raw, uint32_t tile, int warp_row, int lane) {
    const int g = lane >> 2, c = lane & 3;
    if constexpr (kRowsAdjacent) {
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const int k = 2 * c + (r & 1) + 8 * (r >> 1), column = warp_row + 2 * g;
        float x, y;
        asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];" : "=f"(x), "=f"(y) : "r"(tile + unit_offset(k, column >> 2) + 8 * (g & 1)) : "memory");
        raw[r & 2][r & 1] = x;
        raw[(r & 2) + 1][r & 1] = y;
      }
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float x, y, z, w;
        asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];"
                     : "=f"(x), "=f"(y), "=f"(z), "=f"(w)
                     : "r"(tile + unit_offset(warp_row + g + 8 * half, c))
                     : "memory");
        raw[half][0] = x, raw[half][1] = y, raw[2 + half][0] = z, raw[2 + half][1] = w;
      }
    }
  }

  __device__ static __forceinline__ void load_first(RouterRaw& raw, const RouterOutParams& p, int row0, int lane) {
    const int g = lane >> 2, c = lane & 3;
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int row = row0 + (kRowsAdjacent ? 2 * g + (r & 1) : g + 8 * (r & 1));
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int k = 4 * c + 2 * (r >> 1) + i;  // any place: the hint takes the largest
        raw[r][i] = row < p.work.rows && k < p.work.depth
                        ? static_cast<const float*>(p.p.data)[row * p.p.stride + k * p.p.depth_stride] : 0.f;
      }
    }
  }

  __device__ static __forceinline__ void multiply(float (&acc)[32], const RouterFragments& a, uint64_t q) {
    constexpr uint64_t kTerm = ptx::wgmma_advance(kRouterPlaneBytes);
    using ptx::Major;
    if constexpr (kSplitP) {
      ptx::wgmma_bf16<Major::kK>(acc, a[2][0], a[2][1], a[2][2], a[2][3], q, false);
      ptx::wgmma_bf16<Major::kK>(acc, a[1][0], a[1][1], a[1][2], a[1][3], q + kTerm, true);
      ptx::wgmma_bf16<Major::kK>(acc, a[0][0], a[0][1], a[0][2], a[0][3], q + 2 * kTerm, true);
      ptx::wgmma_bf16<Major::kK>(acc, a[1][0], a[1][1], a[1][2], a[1][3], q, true);
      ptx::wgmma_bf16<Major::kK>(acc, a[0][0], a[0][1], a[0][2], a[0][3], q + kTerm, true);
      ptx::wgmma_bf16<Major::kK>(acc, a[0][0], a[0][1], a[0][2], a[0][3], q, true);
    } else {
      ptx::wgmma_bf16<Major::kK>(acc, a[0][0], a[0][1], a[0][2], a[0][3], q + 2 * kTerm, false);
      ptx::wgmma_bf16<Major::kK>(acc, a[0][0], a[0][1], a[0][2], a[0][3], q + kTerm, true);
      ptx::wgmma_bf16<Major::kK>(acc, a[0][0], a[0][1], a[0][2], a[0][3], q, true);
    }
    ptx::wgmma_commit();
  }

  __device__ static __forceinline__ void promote(float (&totals)[32], float (&acc)[32]) {
    ptx::wgmma_keep(acc);
#pragma unroll
    for (int i = 0; i < 32; ++i) totals[i] = __fadd_rn(totals[i], acc[i]);
  }

  // Blocks of 64 rows and 16 elements of the depth without a swizzle: units of 8 rows and 16 bytes, the halves of the depth 1024 bytes apart.
  __device__ static __forceinline__ uint64_t plane_descriptor(uint32_t shared) {
    constexpr uint64_t kLeading = kRouterPlaneBytes / 2, kStride = 128;
    return (kLeading >> 4) << 16 | (kStride >> 4) << 32 | (shared & 0x3ffff) >> 4;
  }

  __device__ static __forceinline__ void consume(const RouterOutParams& p, Smem& smem, int thread) {
    const int lane = thread & 31, warp_row = 16 * __shfl_sync(0xffffffffu, thread >> 5, 0);
    float totals[kBlocks][32], acc[2][32];
    Place at;
#pragma unroll 1
    for (int unit = blockIdx.x; unit < p.work.units; unit += gridDim.x) {
      const RouterUnit range = router_unit(p.work, unit);
      RouterRowState rows;
#pragma unroll 1
      for (int64_t next = range.first; next < range.end;) {
        const RouterSegment segment = router_segment(p.work, unit, range, next);
        next += segment.end_step - segment.first_step;
        const bool begins = segment.first_step == 0;
        if (begins || next - range.first == segment.end_step - segment.first_step) {
          rows = RouterRowState();
          if (kSplitP && !begins) {
            RouterRaw raw;
            load_first(raw, p, segment.tile / p.work.column_tiles * kRouterRows + warp_row, lane);
            rows.take_hint(raw);
          }
        }
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
          for (int i = 0; i < 32; ++i) totals[b][i] = 0.f;
        }
#pragma unroll 1
        for (int step = segment.first_step; step < segment.end_step; ++step) {
          smem.ring.wait_full(at);
          RouterRaw raw;
          RouterFragments a;
          load_fp32(raw, ptx::shared_address(smem.p[at.stage]), warp_row, lane);
          if (step == 0) rows.take_hint(raw);
          rows.watch(raw);
          rows.scale(raw);
          split(a, raw);
          const uint64_t q = plane_descriptor(ptx::shared_address(smem.q[at.stage]));
          constexpr uint64_t kBlock = ptx::wgmma_advance(kRouterBlockBytes);
#pragma unroll
          for (int t = 0; t < kRouterTerms; ++t) ptx::wgmma_keep(a[t]);
          ptx::wgmma_keep(acc[0]);
          ptx::wgmma_fence();
          multiply(acc[0], a, q);
#pragma unroll
          for (int b = 1; b < kBlocks; ++b) {
            ptx::wgmma_keep(acc[b & 1]);
            ptx::wgmma_fence();
            multiply(acc[b & 1], a, q + b * kBlock);
            ptx::wgmma_wait<1>();
            promote(totals[b - 1], acc[(b - 1) & 1]);
          }
          ptx::wgmma_wait<0>();
#pragma unroll
          for (int t = 0; t < kRouterTerms; ++t) ptx::wgmma_keep(a[t]);
          if (lane == 0) smem.ring.release(at);
          at.advance();
          promote(totals[kBlocks - 1], acc[(kBlocks - 1) & 1]);
        }
        const RouterTarget target = router_target(p, segment);
        const bool tiny[2] = {rows.tiny(0), rows.tiny(1)};
        store_rows<kRowsAdjacent>(p, segment, warp_row, rows, tiny, lane);
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
          if (kRouterBlock * b < target.columns_left) {
            store_block<kRowsAdjacent>(p, segment, target, totals[b], warp_row, kRouterBlock * b, rows, tiny, lane);
          }
        }
      }
    }
  }

  __device__ static __forceinline__ void run(const RouterOutParams& p, char* bytes) {
    Smem& smem = *reinterpret_cast<Smem*>(bytes);
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0);
    if (threadIdx.x == 0) {
      smem.ring.init(129, 8);
      ptx::mbarrier_init_fence();
    }
    __syncthreads();
    ptx::launch_dependents();
    ptx::wait_for_predecessor();
    if (warp >= 8) {
      ptx::give_registers<24>();
      produce(p, smem, threadIdx.x - 256);
    } else {
      ptx::take_registers<240>();
      consume(p, smem, threadIdx.x);
    }
  }
};

}  // namespace dense_projection_det_gemm

CAKE_DECLARE_KERNEL(router_out_sm90, dense_projection_det_gemm::RouterOutParams)

extern "C" __global__ void __launch_bounds__(dense_projection_det_gemm::kRouterNativeThreads, 1)
    router_out_sm90(const __grid_constant__ dense_projection_det_gemm::RouterOutParams p) {
  using namespace dense_projection_det_gemm;
  extern __shared__ __align__(1024) char router_smem[];
  if (p.p.depth_stride == 1) {
    RouterNative<float, false, 4>::run(p, router_smem);
  } else {
    RouterNative<float, true, 4>::run(p, router_smem);
  }
}
