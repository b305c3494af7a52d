// D = P Q^T to FP32 accuracy on Hopper: a cluster of two CTAs has a tile of 2 x 128 rows and 256 or 64 columns, a consumer
// warpgroup 64 rows.
//
// P comes as it is, by cp.async, and is split into its terms on the way to the registers that wgmma reads; Q comes as planes of
// terms, by bulk copies of half of them by each CTA to both. For each step of 16 along the depth and each group of columns, the
// kept products of terms, smallest first, go to a fresh accumulator, which is then added to FP32 totals: tensor cores truncate,
// ordinary additions round. While one warpgroup adds, the other's products run. Order of accumulation: products in a step, steps
// ascending, segments ascending (router_work.h).
//
//   full[stage]   128 producer threads, when their copies of P have landed; 1 for Q's bytes, from both CTAs
//   empty[stage]  8 consumer warps of each CTA
#pragma once

#include "any/router_store.cuh"
#include "cake/pipe/ring.cuh"
#include "cake/ptx/bulk_copy.cuh"
#include "cake/ptx/cta.cuh"
#include "cake/ptx/grid_dependency.cuh"
#include "cake/ptx/wgmma.cuh"
#include "sm90/router_turn.cuh"

namespace dense_projection_det_gemm {

template <class Element, bool kRowsAdjacent, int kBlocks>
struct RouterNative {
  static constexpr int kColumns = kBlocks == 1 ? 64 : 128;  // of an instruction
  static constexpr int kGroups = kBlocks * kRouterBlock / kColumns, kSums = kColumns / 2;
  static constexpr bool kSplitP = kTermsOf<Element> > 1;
  static constexpr int kPBytes = kRouterRows * kRouterStep * static_cast<int>(sizeof(Element));
  static constexpr int kQBytes = kBlocks * kRouterBlockBytes;
  static constexpr int kStages = 7;
  using Turn = RouterTurn<(kSplitP && kBlocks > 1)>;  // elsewhere products are too few to wait for
  static constexpr int kUnit = 16 / static_cast<int>(sizeof(Element));  // elements of 16 bytes
  using Ring = cake::pipe::Ring<kStages>;
  using Place = cake::pipe::RingPlace<kStages>;

  struct Smem {
    alignas(1024) char q[kStages][kQBytes];
    alignas(128) char p[kStages][kPBytes];
    Ring ring;
  };
  static_assert(sizeof(Smem) <= (kBlocks == 1 ? kRouterNarrowSmemBytes : kSplitP ? kRouterWideSmemBytes : kRouterBf16SmemBytes));

  // 16-byte units of a tile of P: rows along the depth [128][16], or along the rows [16][128], units of a row permuted so that
  // the fragments' lanes meet all banks.
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
    // Whole tiles, in half of the instructions; the narrow program has no registers for it.
    constexpr int kRows = 128 / kUnitsARow;
    if (kBlocks > 1 && major0 + kUnit * kUnitsARow <= major_extent && minor0 + kRows * kCopies <= minor_extent) {
      const int unit = thread % kUnitsARow, row = thread / kUnitsARow;
      const Element* source = static_cast<const Element*>(p.p.data) + (minor0 + row) * pitch + major0 + kUnit * unit;
#pragma unroll
      for (int i = 0; i < kCopies; ++i) {
        asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(stage + unit_offset(row + kRows * i, unit)),
                     "l"(source)
                     : "memory");
        source += kRows * pitch;
      }
      return;
    }
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

  __device__ static __forceinline__ void produce(const RouterOutParams& p, Smem& smem, int thread, int rank) {
    constexpr int kShare = kQBytes / kRouterCtas;  // of a stage's planes, which each CTA copies to all of the cluster
    constexpr uint16_t kEverybody = (1 << kRouterCtas) - 1;
    Place at;
    for (int unit = blockIdx.x / kRouterCtas; unit < p.work.units; unit += gridDim.x / kRouterCtas) {
      const RouterUnit range = router_unit(p.work, unit);
      int tile = router_quotient(range.first, p.work.steps);
      int step = static_cast<int>(range.first - int64_t{tile} * p.work.steps);
      int row_tile = tile / p.work.column_tiles;
      const char* planes = static_cast<const char*>(p.terms.planes) +
                           (int64_t{tile - row_tile * p.work.column_tiles} * p.work.steps + step) * kQBytes;
#pragma unroll 1
      for (int64_t left = range.end - range.first; left > 0; --left) {
        smem.ring.wait_empty(at);
        copy_p(p, ptx::shared_address(smem.p[at.stage]), (row_tile * kRouterCtas + rank) * kRouterRows, step * kRouterStep,
               thread);
        asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(ptx::shared_address(smem.ring.full(at))) : "memory");
        if (thread == 0) {
          smem.ring.expect(at, kQBytes);
          cuda::ptx::cp_async_bulk(cuda::ptx::space_cluster, cuda::ptx::space_global, smem.q[at.stage] + rank * kShare,
                                   planes + rank * kShare, kShare, smem.ring.full(at), kEverybody);
        }
        at.advance();
        planes += kQBytes;
        if (++step == p.work.steps) {
          step = 0;
          row_tile = ++tile / p.work.column_tiles;
          planes =
              static_cast<const char*>(p.terms.planes) + int64_t{tile - row_tile * p.work.column_tiles} * p.work.steps * kQBytes;
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
        asm volatile("ld.shared.v2.f32 {%0,%1}, [%2];"
                     : "=f"(x), "=f"(y)
                     : "r"(tile + unit_offset(k, row / kUnit) + 4 * (row % kUnit))
                     : "memory");
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
        asm volatile("ld.shared.b32 %0, [%1];"
                     : "=r"(rows[r])
                     : "r"(tile + unit_offset(k, row / kUnit) + 2 * (row % kUnit))
                     : "memory");
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

  __device__ static __forceinline__ void take_fragments(Fragments& a, RouterRowState& rows, uint32_t tile, bool first,
                                                        int warp_row, int lane) {
    Loaded loaded;
    load_elements(loaded, tile, warp_row, lane);
    make_fragments(a, loaded, rows, first);
  }

  __device__ static __forceinline__ void load_first(RouterRaw& raw, const RouterOutParams& p, int64_t row0, int lane) {
    const int g = lane >> 2, c = lane & 3;
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      const int64_t row = row0 + (kRowsAdjacent ? 2 * g + (r & 1) : g + 8 * (r & 1));
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int k = 4 * c + 2 * (r >> 1) + i;  // any place: the hint takes the largest
        raw[r][i] = row < p.work.rows && k < p.work.depth
                        ? static_cast<const float*>(p.p.data)[row * p.p.stride + k * p.p.depth_stride]
                        : 0.f;
      }
    }
  }

  // The kept products of a step and a group of columns, smallest first.
  __device__ static __forceinline__ void multiply(float (&acc)[kSums], Fragments& a, uint64_t q, const Turn& turn) {
    constexpr uint64_t kTerm = ptx::wgmma_advance(kColumns * 32);
    const auto add = [&](int i, int j, bool accumulate) {
      ptx::wgmma_bf16<ptx::Major::kK>(acc, a[i][0], a[i][1], a[i][2], a[i][3], q + j * kTerm, accumulate);
    };
#pragma unroll
    for (int t = 0; t < kTermsOf<Element>; ++t) ptx::wgmma_keep(a[t]);
    ptx::wgmma_keep(acc);
    ptx::wgmma_fence();
    turn.wait();
    if constexpr (kSplitP) {
      add(2, 0, false), add(1, 1, true), add(0, 2, true), add(1, 0, true), add(0, 1, true), add(0, 0, true);
    } else {
      add(0, 2, false), add(0, 1, true), add(0, 0, true);
    }
    ptx::wgmma_commit();
    turn.pass();
  }

  // Blocks of kColumns rows and 16 elements of the depth without a swizzle: units of 8 rows and 16 bytes.
  // Its upper half is the same for all of them.
  static constexpr uint64_t kEightRows = uint64_t{128 >> 4} << 32;
  __device__ static __forceinline__ uint32_t plane_descriptor(uint32_t shared) {
    constexpr uint32_t kHalves = kColumns * 16;
    return (kHalves >> 4) << 16 | (shared & 0x3ffff) >> 4;
  }

  // A consumer warp: its place in the ring and the sums of its 16 rows.
  struct Consumer {
    const RouterOutParams& p;
    Smem& smem;
    int lane, warp_row;
    Place at;
    uint32_t planes;  // the descriptor of the stage's where there are several groups, known before its step begins
    float totals[kGroups][kSums];

    __device__ __forceinline__ void take(Fragments& a, RouterRowState& rows, const Place& from, bool first) {
      smem.ring.wait_full(from);
      take_fragments(a, rows, ptx::shared_address(smem.p[from.stage]), first, warp_row, lane);
    }

    // One step with the fragments in a; leaves the next step's there.
    __device__ __forceinline__ void step(Fragments& a, RouterRowState& rows, bool more) {
      const uint64_t q = kEightRows | (kGroups > 1 ? planes : plane_descriptor(ptx::shared_address(smem.q[at.stage])));
      Place next = at;
      next.advance();
      Fragments ahead;
      float acc[kSums];
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
        multiply(acc, a, q + group * ptx::wgmma_advance(kRouterTerms * kColumns * 32), Turn{warp_row / 64});
        if (group + 1 == kGroups) planes = next.stage == 0 ? planes - (kStages - 1) * (kQBytes >> 4) : planes + (kQBytes >> 4);
        if (group + 1 == kGroups && more) take(ahead, rows, next, false);
        ptx::wgmma_wait<0>();
        ptx::wgmma_keep(acc);
        if (group + 1 == kGroups) {
          __syncwarp();  // two lanes speak for the reads of all
          if (lane < kRouterCtas) ptx::mbarrier_arrive_remote(smem.ring.empty(at), lane);
        }
#pragma unroll
        for (int i = 0; i < kSums; ++i) totals[group][i] = __fadd_rn(totals[group][i], acc[i]);
      }
#pragma unroll
      for (int t = 0; t < kTermsOf<Element>; ++t) {
        ptx::wgmma_keep(a[t]);
#pragma unroll
        for (int r = 0; r < 4; ++r) a[t][r] = ahead[t][r];
      }
      at = next;
    }

    __device__ __forceinline__ void sum_segment(const RouterSegment& segment, RouterRowState& rows) {
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
#pragma unroll
        for (int i = 0; i < kSums; ++i) totals[group][i] = 0.f;
      }
      Fragments a;
      take(a, rows, at, segment.first_step == 0);
      fetch_factors(p, segment, kBlocks, lane);
#pragma unroll 1
      for (int step_index = segment.first_step; step_index < segment.end_step; ++step_index) {
        step(a, rows, step_index + 1 < segment.end_step);
      }
    }

    __device__ __forceinline__ float (&sums_of(int block))[32] {
      return *reinterpret_cast<float (*)[32]>(&totals[block * 32 / kSums][block * 32 % kSums]);
    }

    // Blocks of whole tiles in code so short that the instruction caches keep it. Returns a bit for each block that it leaves,
    // whose sums are complete.
    __device__ __forceinline__ uint32_t store_whole(const RouterTarget& target, const RouterSegment& segment, const RouterRows& found,
                                                    RouterFactors& factors, int row) {
      uint32_t left = 0;
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        float (&sums)[32] = sums_of(block);
        const auto place = RouterPlace<kRowsAdjacent>(target, row, kRouterBlock * block, lane & 3).known_wide();
        if (target.add) place.template add_wide<true>(sums);
        if (target.final) {
          const bool done = finish_ordinary(sums, found, factors);
          if (block + 1 < kBlocks) load_factors(factors, p, segment, kRouterBlock * (block + 1), lane);
          if (!done) {
            left |= 1u << block;
            continue;
          }
          if ((lane & 3) == 0) {
            uint8_t* flags = redo_flags(p, segment, kRouterBlock * block);
            flags[row] = flags[row + RouterPlace<kRowsAdjacent>::kNextRow] = 0;
          }
        }
        place.template store_wide<true>(sums);
      }
      return left;
    }

    __device__ __forceinline__ void store(const RouterSegment& segment, const RouterRowState& rows) {
      RouterTarget target = router_target(p, segment);
      RouterFactors factors = {};  // the next block's are on their way while a block is stored
      if (target.final) load_factors(factors, p, segment, 0, lane);
      const int row = warp_row + (lane >> 2) * (kRowsAdjacent ? 2 : 1);
      const RouterRows found(rows);
      store_rows<kRowsAdjacent>(p, segment, warp_row, found, lane);
      uint32_t left = (1u << kBlocks) - 1;
      const bool whole = target.rows_left >= kRouterRows && target.columns_left >= kBlocks * kRouterBlock;
      if (whole && RouterPlace<kRowsAdjacent>(target, row, 0, lane & 3).wide) {
        left = store_whole(target, segment, found, factors, row);
        target.add = false;
      }
      if (left == 0) return;
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        if (kRouterBlock * block >= target.columns_left || (left >> block & 1) == 0) continue;
        float (&sums)[32] = sums_of(block);
        const RouterPlace<kRowsAdjacent> place(target, row, kRouterBlock * block, lane & 3);
        if (target.add) place.add(sums);
        if (target.final) {
          load_factors(factors, p, segment, kRouterBlock * block, lane);
          finish_block<kRowsAdjacent>(p, segment, sums, row, kRouterBlock * block, found, factors, lane);
        }
        place.store(sums);
      }
    }
  };

  __device__ static __forceinline__ void consume(const RouterOutParams& p, Smem& smem, int thread, int rank) {
    Consumer my{p, smem, thread & 31, 16 * __shfl_sync(0xffffffffu, thread >> 5, 0)};
    my.planes = plane_descriptor(ptx::shared_address(smem.q[0]));
    RouterRowState rows;
    const Turn turn{my.warp_row / 64};
    if (turn.warpgroup == 1) turn.pass();  // the other warpgroup begins
#pragma unroll 1
    for (int unit = blockIdx.x / kRouterCtas; unit < p.work.units; unit += gridDim.x / kRouterCtas) {
      const RouterUnit range = router_unit(p.work, unit);
#pragma unroll 1
      for (int64_t next = range.first; next < range.end;) {
        const RouterSegment segment = router_segment(p.work, unit, range, next, rank);
        const bool begins = segment.first_step == 0, fresh = begins || next == range.first;
        if (fresh) rows = RouterRowState();
        if constexpr (kSplitP) {
          if (fresh && !begins) {
            RouterRaw raw;
            load_first(raw, p, router_first_row(p.work, segment.tile, rank) + my.warp_row, my.lane);
            rows.take_hint(raw);
          }
        }
        my.sum_segment(segment, rows);
        my.store(segment, rows);
        next += segment.end_step - segment.first_step;
      }
    }
    if (turn.warpgroup == 0) turn.wait();  // the last turn that was passed
  }

  __device__ static __forceinline__ void run(const RouterOutParams& p, char* bytes) {
    Smem& smem = *reinterpret_cast<Smem*>(bytes);
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0);
    if (threadIdx.x == 0) {
      smem.ring.init(129, 8 * kRouterCtas);
      ptx::mbarrier_init_fence();
    }
    ptx::cluster_sync_relaxed();
    const int rank = static_cast<int>(ptx::cluster_rank());
    ptx::launch_dependents();
    ptx::wait_for_predecessor();
    if (warp >= 8) {
      ptx::give_registers<24>();
      produce(p, smem, threadIdx.x - 256, rank);
    } else {
      ptx::take_registers<240>();
      consume(p, smem, threadIdx.x, rank);
    }
    ptx::cluster_sync_relaxed();  // nobody leaves while others copy or arrive here
  }
};

}  // namespace dense_projection_det_gemm
