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
  static constexpr bool kSplitP = kTermsOf<Element> > 1;
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
  static_assert(sizeof(Smem) <= (kBlocks == 1 ? kRouterNarrowSmemBytes : kSplitP ? kRouterWideSmemBytes : kRouterBf16SmemBytes));

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
#ifdef ROUTER_NOLOAD
        ptx::mbarrier_arrive(smem.ring.full(at));
        if (thread == 0) ptx::mbarrier_arrive(smem.ring.full(at));
#else
        copy_p(p, ptx::shared_address(smem.p[at.stage]), row_tile * kRouterRows, step * kRouterStep, thread);
        asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(ptx::shared_address(smem.ring.full(at))) : "memory");
        if (thread == 0) {
          smem.ring.expect(at, kQBytes);
          ptx::bulk_load(smem.q[at.stage], planes, kQBytes, smem.ring.full(at));
        }
#endif
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

  using Loaded = typename RouterLoaded<Element>::Type;
  using Fragments = RouterFragments<Element>;

  __device__ static __forceinline__ void load_elements(RouterRaw& raw, uint32_t tile, int warp_row, int lane) {
    const int g = lane >> 2, c = lane & 3;
    if constexpr (kRowsAdjacent) {
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const int k = 2 * c + (r & 1) + 8 * (r >> 1), row = warp_row + 2 * g;
        float x, y;
        asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];" : "=f"(x), "=f"(y) : "r"(tile + unit_offset(k, row / kUnit) + 4 * (row % kUnit)) : "memory");
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

  __device__ static __forceinline__ void load_elements(uint32_t (&pairs)[4], uint32_t tile, int warp_row, int lane) {
    const int g = lane >> 2, c = lane & 3;
    if constexpr (kRowsAdjacent) {
      uint32_t rows[4];
#pragma unroll
      for (int r = 0; r < 4; ++r) {
        const int k = 2 * c + (r & 1) + 8 * (r >> 1), row = warp_row + 2 * g;
        asm volatile("ld.shared.b32 %0, [%1];" : "=r"(rows[r]) : "r"(tile + unit_offset(k, row / kUnit) + 2 * (row % kUnit)) : "memory");
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        pairs[2 * half] = __byte_perm(rows[2 * half], rows[2 * half + 1], 0x5410);
        pairs[2 * half + 1] = __byte_perm(rows[2 * half], rows[2 * half + 1], 0x7632);
      }
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        asm volatile("ld.shared.v2.b32 {%0,%1}, [%2];"
                     : "=r"(pairs[half]), "=r"(pairs[2 + half])
                     : "r"(tile + unit_offset(warp_row + g + 8 * half, c >> 1) + 8 * (c & 1))
                     : "memory");
      }
    }
  }

  __device__ static __forceinline__ void take_fragments(Fragments& a, RouterRowState& rows, uint32_t tile, bool first, int warp_row, int lane) {
    Loaded loaded;
    load_elements(loaded, tile, warp_row, lane);
    make_fragments(a, loaded, rows, first);
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

  __device__ static __forceinline__ void multiply(float (&acc)[32], const Fragments& a, uint64_t q) {
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

  __device__ static __forceinline__ void begin_block(float (&acc)[32], Fragments& a, uint64_t q) {
#pragma unroll
    for (int t = 0; t < kTermsOf<Element>; ++t) ptx::wgmma_keep(a[t]);
    ptx::wgmma_keep(acc);
    ptx::wgmma_fence();
    multiply(acc, a, q);
  }

  // A consumer warp: its place in the ring, and sums of a segment that is complete but not stored. They are stored while the first
  // products of the next segment run.
  struct Consumer {
    const RouterOutParams& p;
    Smem& smem;
    int lane, warp_row;
    Place at;
    float totals[kBlocks][32];

    __device__ __forceinline__ uint64_t q() const { return plane_descriptor(ptx::shared_address(smem.q[at.stage])); }

    __device__ __forceinline__ void take(Fragments& a, RouterRowState& rows, const Place& from, bool first) {
      smem.ring.wait_full(from);
      take_fragments(a, rows, ptx::shared_address(smem.p[from.stage]), first, warp_row, lane);
    }

    // After the last read of the stage.
    __device__ __forceinline__ void release(Fragments& a) {
#pragma unroll
      for (int t = 0; t < kTermsOf<Element>; ++t) ptx::wgmma_keep(a[t]);
      if (lane == 0) smem.ring.release(at);
      at.advance();
    }

    __device__ __forceinline__ void store(const RouterSegment& segment, const RouterTarget& target, const RouterRows& rows, int block) {
      if (kRouterBlock * block >= target.columns_left) return;
      store_block<kRowsAdjacent>(p, segment, target, totals[block], warp_row, kRouterBlock * block, rows, lane);
    }

    __device__ __forceinline__ void store_all(const RouterSegment& segment, const RouterRows& rows) {
      const RouterTarget target = router_target(p, segment);
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) store(segment, target, rows, b);
    }

    // The first step of a segment.
#ifdef ROUTER_DEFER
    __device__ __forceinline__ void first_step(Fragments& a, bool pending, const RouterSegment& before, const RouterRows& rows_before) {
      const RouterTarget target = router_target(p, before);
#else
    __device__ __forceinline__ void first_step(Fragments& a) {
#endif
      constexpr uint64_t kBlock = ptx::wgmma_advance(kRouterBlockBytes);
      const uint64_t first = q();
      float acc[32];
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        begin_block(acc, a, first + b * kBlock);
#ifdef ROUTER_DEFER
        if (pending) store(before, target, rows_before, b);
#endif
        ptx::wgmma_wait<0>();
        ptx::wgmma_keep(acc);
#pragma unroll
        for (int i = 0; i < 32; ++i) totals[b][i] = acc[i];
      }
      release(a);
    }

    // Any other; leaves the next step's fragments in a.
    __device__ __forceinline__ void step(Fragments& a, RouterRowState& rows, bool more) {
      constexpr uint64_t kBlock = ptx::wgmma_advance(kRouterBlockBytes);
      const uint64_t first = q();
      float acc[2][32];
      begin_block(acc[0], a, first);
#pragma unroll
      for (int b = 1; b < kBlocks; ++b) {
        begin_block(acc[b & 1], a, first + b * kBlock);
        ptx::wgmma_wait<1>();
        promote(totals[b - 1], acc[(b - 1) & 1]);
      }
      Fragments ahead;
      if (more) {
        Place next = at;
        next.advance();
        take(ahead, rows, next, false);
      }
      ptx::wgmma_wait<0>();
      release(a);
      promote(totals[kBlocks - 1], acc[(kBlocks - 1) & 1]);
#pragma unroll
      for (int t = 0; t < kTermsOf<Element>; ++t) {
#pragma unroll
        for (int r = 0; r < 4; ++r) a[t][r] = ahead[t][r];
      }
    }
  };

  __device__ static __forceinline__ void consume(const RouterOutParams& p, Smem& smem, int thread) {
    Consumer my{p, smem, thread & 31, 16 * __shfl_sync(0xffffffffu, thread >> 5, 0)};
    RouterRowState rows;
#ifdef ROUTER_DEFER
    RouterRows rows_before(rows);
    RouterSegment before{};
    bool pending = false;
#endif
#ifdef ROUTER_LAG
    if (thread >= 128 && int(blockIdx.x) < p.work.units) {
      const RouterUnit range = router_unit(p.work, blockIdx.x);
      Place later;
      later.stage = ROUTER_LAG;
      if (range.end - range.first > ROUTER_LAG) smem.ring.wait_full(later);
    }
#endif
#pragma unroll 1
    for (int unit = blockIdx.x; unit < p.work.units; unit += gridDim.x) {
      const RouterUnit range = router_unit(p.work, unit);
#pragma unroll 1
      for (int64_t next = range.first; next < range.end;) {
        const RouterSegment segment = router_segment(p.work, unit, range, next);
        const bool begins = segment.first_step == 0;
        if (begins || next == range.first) rows = RouterRowState();
        if constexpr (kSplitP) {
          if (!begins && next == range.first) {
            RouterRaw raw;
            load_first(raw, p, segment.tile / p.work.column_tiles * kRouterRows + my.warp_row, my.lane);
            rows.take_hint(raw);
          }
        }
        next += segment.end_step - segment.first_step;
        Fragments a;
        my.take(a, rows, my.at, begins);
#ifdef ROUTER_DEFER
        my.first_step(a, pending, before, rows_before);
#else
        my.first_step(a);
#endif
        if (segment.first_step + 1 < segment.end_step) my.take(a, rows, my.at, false);
#pragma unroll 1
        for (int step = segment.first_step + 1; step < segment.end_step; ++step) my.step(a, rows, step + 1 < segment.end_step);
        const RouterRows found(rows);
        store_rows<kRowsAdjacent>(p, segment, my.warp_row, found, my.lane);
#ifndef ROUTER_DEFER
        my.store_all(segment, found);
#else
        before = segment, rows_before = found, pending = true;
#endif
      }
    }
#ifdef ROUTER_DEFER
    if (pending) my.store_all(before, rows_before);
#endif
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

