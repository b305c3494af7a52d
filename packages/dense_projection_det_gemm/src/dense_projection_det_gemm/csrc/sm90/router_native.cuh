// D = P Q^T to FP32 accuracy on Hopper: a cluster of two CTAs has a tile of 2 x 128 rows and 256 or 64 columns, a consumer
// warpgroup 64 rows.
//
// P comes as it is, by cp.async, and is split into its terms on the way to the registers that wgmma reads; Q comes as planes of
// terms, by bulk copies of half of them by each CTA to both. For each step of 16 along the depth and each group of columns, the
// kept products of terms, smallest first, go to a fresh accumulator, which is then added to FP32 totals: tensor cores truncate,
// ordinary additions round. While one warpgroup adds, the other's products run. Order of accumulation: products in a step, steps
// ascending, segments ascending (router_work.h). Segments of several units are joined by whoever comes last (router_join.cuh); what no
// split serves a CTA computes anew before it ends (any/router_redo.cuh).
//
//   full[stage]   128 producer threads, when their copies of P have landed; 1 for Q's bytes, from both CTAs
//   empty[stage]  8 consumer warps of each CTA
#pragma once

#include "any/router_redo.cuh"
#include "any/router_store.cuh"
#include "cake/pipe/ring.cuh"
#include "cake/ptx/bulk_copy.cuh"
#include "cake/ptx/cta.cuh"
#include "cake/ptx/grid_dependency.cuh"
#include "cake/ptx/wgmma.cuh"
#include "sm90/router_join.cuh"
#include "sm90/router_tile.cuh"
#include "sm90/router_turn.cuh"

namespace dense_projection_det_gemm {

// What becomes of a segment's sums: added up in the output by a unit that has all of a tile; joined with other units' by the last of
// them; or left in slots for router_special, which is faster where units cross tiles and end far apart.
enum class RouterEnd { kAlone, kJoined, kSlots };

template <class Element, bool kRowsAdjacent, int kBlocks, RouterEnd kEnd>
struct RouterNative {
  static constexpr bool kShared = kEnd != RouterEnd::kAlone;  // units share tiles
  static constexpr int kColumns = kBlocks == 1 ? 64 : 128;  // of an instruction
  static constexpr int kGroups = kBlocks * kRouterBlock / kColumns, kSums = kColumns / 2;
  static constexpr bool kSplitP = kTermsOf<Element> > 1;
  using Tile = RouterTile<Element, kRowsAdjacent, (kBlocks > 1)>;
  static constexpr int kPBytes = Tile::kPBytes;
  static constexpr int kQBytes = kBlocks * kRouterBlockBytes;
  static constexpr int kStages = 7;
  static constexpr int kEndBarrier = kRedoBarrier + 1;  // named barriers 1 and 2 are those of turns
  using Turn = RouterTurn<(kSplitP && kBlocks > 1)>;  // elsewhere products are too few to wait for
  using Ring = cake::pipe::Ring<kStages>;
  using Place = cake::pipe::RingPlace<kStages>;

  struct Smem {
    alignas(1024) char q[kStages][kQBytes];
    alignas(128) char p[kStages][kPBytes];
    Ring ring;
    uint32_t special;  // whether there may be elements to compute anew
  };
  static_assert(sizeof(Smem::q) >= sizeof(RedoSmem));
  static_assert(sizeof(Smem) <= (kBlocks == 1 ? kRouterNarrowSmemBytes : kSplitP ? kRouterWideSmemBytes : kRouterBf16SmemBytes));

  __device__ static __forceinline__ void produce(const RouterOutParams& p, Smem& smem, int thread, int rank) {
    constexpr int kShare = kQBytes / kRouterCtas;  // of a stage's planes, which each CTA copies to all of the cluster
    constexpr uint16_t kEverybody = (1 << kRouterCtas) - 1;
    Place at;
    for (int unit = blockIdx.x / kRouterCtas; unit < p.work.units; unit += gridDim.x / kRouterCtas) {
      const RouterUnit range = router_unit(p.work, unit);
      int tile = static_cast<int>(router_quotient(range.first, p.work.by_steps));
      int step = static_cast<int>(range.first - int64_t{tile} * p.work.steps);
      int row_tile = router_row_tile(p.work, tile);
      const char* planes = static_cast<const char*>(p.terms.planes) +
                           (int64_t{tile - row_tile * p.work.column_tiles} * p.work.steps + step) * kQBytes;
#pragma unroll 1
      for (int64_t left = range.end - range.first; left > 0; --left) {
        smem.ring.wait_empty(at);
        Tile::copy(p, ptx::shared_address(smem.p[at.stage]), (row_tile * kRouterCtas + rank) * kRouterRows, step * kRouterStep,
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
          row_tile = router_row_tile(p.work, ++tile);
          planes =
              static_cast<const char*>(p.terms.planes) + int64_t{tile - row_tile * p.work.column_tiles} * p.work.steps * kQBytes;
        }
      }
    }
  }

  using Loaded = typename RouterLoaded<Element>::Type;
  using Fragments = RouterFragments<Element>;

  __device__ static __forceinline__ void take_fragments(Fragments& a, RouterRowState& rows, uint32_t tile, bool first,
                                                        int warp_row, int lane) {
    Loaded loaded;
    Tile::load(loaded, tile, warp_row, lane);
    make_fragments(a, loaded, rows, first);
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

  // Where a unit is a tile nothing has to be divided.
  __device__ static __forceinline__ int64_t first_of(const RouterWork& work, int unit) {
    return kShared ? router_unit(work, unit).first : int64_t{unit} * work.steps;
  }
  __device__ static __forceinline__ int64_t end_of(const RouterWork& work, int unit) {
    return kShared ? router_unit(work, unit).end : int64_t{unit + 1} * work.steps;
  }
  __device__ static __forceinline__ RouterSegment segment_at(const RouterWork& work, int unit, int64_t next, int rank) {
    if (kShared) {
      RouterSegment segment = router_segment(work, unit, router_unit(work, unit), next, rank);
      if (kEnd == RouterEnd::kJoined && segment.slot < 0) segment.slot = 2 * unit + 1;  // a tile of its own: nobody comes later
      return segment;
    }
    const int first_step = static_cast<int>(next - first_of(work, unit));
    return {unit, first_step, min(first_step + work.part_steps, work.steps), -1, rank};
  }

  // A consumer warp: its place in the ring and the sums of its 16 rows.
  struct Consumer {
    const RouterOutParams& p;
    Smem& smem;
    int lane, warp_row;
    Place at;
    uint32_t planes;  // the descriptor of the stage's where there are several groups, known before its step begins
    float totals[kGroups][kSums];

    __device__ __forceinline__ Consumer(const RouterOutParams& params, Smem& shared, int thread)
        : p(params), smem(shared), lane(thread & 31), warp_row(16 * __shfl_sync(0xffffffffu, thread >> 5, 0)),
          planes(plane_descriptor(ptx::shared_address(shared.q[0]))) {}

    __device__ __forceinline__ void take(Fragments& a, RouterRowState& rows, const Place& from, bool first) {
      smem.ring.wait_full(from);
      take_fragments(a, rows, ptx::shared_address(smem.p[from.stage]), first, warp_row, lane);
    }

    __device__ static __forceinline__ void clear(Fragments& a) {
#pragma unroll
      for (int t = 0; t < kTermsOf<Element>; ++t) {
#pragma unroll
        for (int r = 0; r < 4; ++r) a[t][r] = 0;
      }
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
        if (group + 1 == kGroups) {
          if (more) {
            take(ahead, rows, next, false);
          } else {
            clear(ahead);  // else these registers would be in use from the kernel's start to its end
          }
        }
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

    // `first`: of its unit.
    __device__ __forceinline__ void sum_segment(const RouterSegment& segment, bool first, RouterRowState& rows) {
      const bool begins = segment.first_step == 0, fresh = kShared || begins || first;  // later segments begin tiles
      if (fresh) rows = RouterRowState();
      if constexpr (kSplitP) {
        if (fresh && !begins) {
          const int thread = ptx::thread_index();
          RouterRaw raw;
          Tile::load_first(raw, p, router_first_row(p.work, segment.tile, segment.rank) + 16 * (thread >> 5), thread & 31);
          rows.take_hint(raw);
        }
      }
      Fragments a;
      take(a, rows, at, begins);
      fetch_factors(p, segment, kBlocks);
#pragma unroll
      for (int group = 0; group < kGroups; ++group) {
#pragma unroll
        for (int i = 0; i < kSums; ++i) totals[group][i] = 0.f;
      }
#pragma unroll 1
      for (int left = segment.end_step - segment.first_step; left > 0; --left) step(a, rows, left > 1);
    }

    __device__ __forceinline__ float (&sums_of(int block))[32] {
      return *reinterpret_cast<float (*)[32]>(&totals[block * 32 / kSums][block * 32 % kSums]);
    }

    // Blocks of whole tiles in code so short that the instruction caches keep it. Returns a bit for each block that it leaves,
    // whose sums are complete.
    __device__ __forceinline__ uint32_t store_whole(const RouterTarget& target, const RouterSegment& segment, bool ordinary_rows,
                                                    int row, int lane) {
      uint32_t left = 0;
      RouterFactors factors = {};  // the next block's are on their way while a block is stored
      if (target.final) load_factors(factors, p, segment, 0, lane);
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        float (&sums)[32] = sums_of(block);
        const auto place = RouterPlace<kRowsAdjacent>(target, row, kRouterBlock * block, lane & 3).known_wide();
        if (target.add) place.template add_wide<true>(sums);
        if (target.final) {
          const bool done = finish_ordinary(sums, ordinary_rows, factors);
          if (block + 1 < kBlocks) load_factors(factors, p, segment, kRouterBlock * (block + 1), lane);
          if (!done) {
            left |= 1u << block;
            continue;
          }
        }
        place.template store_wide<true>(sums);
      }
      return left;
    }

    __device__ __forceinline__ void store(const RouterSegment& segment, const RouterRowState& rows) {
      // Asked for again, so that nothing that follows from it is kept in registers during the main loop.
      const int thread = ptx::thread_index();
      // Which warp it is comes from a shuffle: after branches that lanes might take apart the main loop would have its descriptors in
      // ordinary registers, 32 instructions a step more.
      const int lane = thread & 31, warp = __shfl_sync(0xffffffffu, thread >> 5, 0);
      const int row = 16 * warp + (lane >> 2) * (kRowsAdjacent ? 2 : 1);
      if constexpr (kEnd == RouterEnd::kJoined) {
        store_shared(segment, rows, warp, lane, row);
        return;
      }
      if constexpr (kEnd == RouterEnd::kSlots) store_rows<kRowsAdjacent>(p, segment, 16 * warp, RouterRows(rows), lane);
      const bool ordinary_rows = rows.ordinary();  // the lane's elements of them
      RouterTarget target = router_target(p, segment);
      uint32_t left = (1u << kBlocks) - 1;
      const bool whole = target.rows_left >= kRouterRows && target.columns_left >= kBlocks * kRouterBlock;
      if (whole && RouterPlace<kRowsAdjacent>(target, row, 0, lane & 3).wide) {
        left = store_whole(target, segment, ordinary_rows, row, lane);
        target.add = false;
      }
      if (left == 0) return;
      const RouterRows found(rows);
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        if ((left >> block & 1) != 0) store_block(target, segment, found, sums_of(block), block, row, lane);
      }
    }

    __device__ __forceinline__ void store_block(const RouterTarget& target, const RouterSegment& segment, const RouterRows& found,
                                                float (&sums)[32], int block, int row, int lane) {
      if (kRouterBlock * block >= target.columns_left) return;
      const RouterPlace<kRowsAdjacent> place(target, row, kRouterBlock * block, lane & 3);
      if (target.add) place.add(sums);
      if (target.final) {
        RouterFactors factors;
        load_factors(factors, p, segment, kRouterBlock * block, lane);
        finish_block<kRowsAdjacent>(p, segment, sums, kRouterBlock * block, found, factors, lane, smem.special);
      }
      place.store(sums);
    }

    // Of a whole tile with ordinary rows, its other units' sums and this one's. Returns a bit for each block that it leaves, whose sums it has stored in
    // place of this unit's.
    __device__ __forceinline__ uint32_t store_last(const RouterTarget& target, const RouterSegment& segment,
                                                   const RouterJoin<kBlocks>& join, int row, int lane) {
      uint32_t left = 0;
#pragma unroll
      for (int block = 0; block < kBlocks; ++block) {
        float (&sums)[32] = sums_of(block);
        join.add_others(sums, block);
        RouterFactors factors;
        load_factors(factors, p, segment, kRouterBlock * block, lane);
        if (finish_ordinary(sums, true, factors)) {
          RouterPlace<kRowsAdjacent>(target, row, kRouterBlock * block, lane & 3).known_wide().template store_wide<true>(sums);
        } else {
          join.store(sums, block);
          left |= 1u << block;
        }
      }
      return left;
    }

    // Where other units have segments of the tile too.
    __device__ __forceinline__ void store_shared(const RouterSegment& segment, const RouterRowState& state, int warp, int lane, int row) {
      constexpr int kNextRow = RouterPlace<kRowsAdjacent>::kNextRow;
      RouterSegment whole = segment;
      whole.slot = -1, whole.first_step = 0, whole.end_step = p.work.steps;
      const RouterTarget target = router_target(p, whole);
      const RouterJoin<kBlocks> join(p, segment, (target.columns_left + kRouterBlock - 1) / kRouterBlock, warp, lane);
      uint8_t* joined_blocks = p.joined + join.rows_of(segment.slot);
      if (target.rows_left <= 16 * warp) {
        if (lane == 0) *joined_blocks = 0;
        return;
      }
      const bool whole_tile = target.rows_left >= kRouterRows && target.columns_left >= kBlocks * kRouterBlock &&
                              RouterPlace<kRowsAdjacent>(target, row, 0, lane & 3).wide;
      const bool ordinary_rows = __all_sync(0xffffffffu, state.ordinary());
      if (whole_tile && ordinary_rows && join.comes_last()) {
        const uint32_t left = store_last(target, whole, join, row, lane);
        if (lane == 0) *joined_blocks = (1u << kBlocks) - 1;
        if (left == 0) return;
        const RouterRows rows(state);
#pragma unroll 1
        for (int block = 0; block < kBlocks; ++block) {
          if ((left >> block & 1) == 0) continue;
          float sums[32];
          join.take_back(sums, block);
          store_block(target, whole, rows, sums, block, row, lane);
        }
        return;
      }
      RouterRows rows(state);
      const auto tiny_rows = [&](int32_t of) { return p.slot_tiny + router_place(p.work, of, segment.rank) * kRouterRows + row; };
      if ((lane & 3) == 0) {
        uint8_t* flags = tiny_rows(segment.slot);
        flags[0] = rows.tiny[0], flags[kNextRow] = rows.tiny[1];
      }
      bool tiny = rows.tiny[0] || rows.tiny[1];
      const uint32_t joined = join.store_all([&](int block) -> float (&)[32] { return sums_of(block); }, tiny);
      if (lane == 0) *joined_blocks = joined;
      if (tiny) {
        for (int u = 0; u < join.units.count; ++u) {
          const uint8_t* flags = tiny_rows(router_slot(p.work, join.units, u));
          rows.tiny[0] |= __ldcg(flags) != 0, rows.tiny[1] |= __ldcg(flags + kNextRow) != 0;
        }
      }
#pragma unroll 1
      for (uint32_t left = joined; left != 0; left &= left - 1) {
        const int block = __ffs(left) - 1;
        float sums[32];
        join.add_all(sums, block);
        RouterFactors factors;
        load_factors(factors, p, whole, kRouterBlock * block, lane);
        if (whole_tile && finish_ordinary(sums, ordinary_rows && !tiny, factors)) {
          RouterPlace<kRowsAdjacent>(target, row, kRouterBlock * block, lane & 3).known_wide().template store_wide<true>(sums);
        } else {
          store_block(target, whole, rows, sums, block, row, lane);
        }
      }
    }
  };

  __device__ static __forceinline__ void consume(const RouterOutParams& p, Smem& smem, int thread) {
    Consumer my(p, smem, thread);
    RouterRowState rows;
    const Turn turn{my.warp_row / 64};
    if (turn.warpgroup == 1) turn.pass();  // the other warpgroup begins
#pragma unroll 1
    for (int unit = blockIdx.x / kRouterCtas; unit < p.work.units; unit += gridDim.x / kRouterCtas) {
      // A segment is found out anew, so that the main loop keeps nothing of it in registers.
      const auto segment_after = [&](uint32_t done) {
        const int now = ptx::opaque(unit);
        return segment_at(p.work, now, first_of(p.work, now) + done, static_cast<int>(ptx::cluster_rank()));
      };
      bool more = true;
#pragma unroll 1
      for (uint32_t done = 0; more;) {
        my.sum_segment(segment_after(done), done == 0, rows);
        const RouterSegment segment = segment_after(done);
        done += segment.end_step - segment.first_step;
        my.store(segment, rows);
        const int now = ptx::opaque(unit);
        more = first_of(p.work, now) + done < end_of(p.work, now);
      }
    }
    if (turn.warpgroup == 0) turn.wait();  // the last turn that was passed
  }

  // Elements that no split serves, of what this CTA has finished, by its consumers.
  __device__ static __forceinline__ void redo(const RouterOutParams& p, RedoSmem& smem) {
    const int rank = static_cast<int>(ptx::cluster_rank());
    for (int unit = ptx::opaque(blockIdx.x) / kRouterCtas; unit < p.work.units; unit += gridDim.x / kRouterCtas) {
      const RouterUnit range = router_unit(p.work, unit);
      for (int64_t next = range.first; next < range.end;) {
        const RouterSegment segment = router_segment(p.work, unit, range, next, rank);
        next += segment.end_step - segment.first_step;
        if (kShared && segment.slot >= 0) {
          redo_tile<false>(p, smem, segment.tile, rank, p.joined + router_place(p.work, segment.slot, rank) * kRouterWarps);
        } else if (segment.end_step == p.work.steps) {
          redo_tile<false>(p, smem, segment.tile, rank, nullptr);
        }
      }
    }
  }

  __device__ static __forceinline__ void run(const RouterOutParams& p, char* bytes) {
    // Keeps the beginnings of a kernel's variants apart: what the compiler finds in all of them it computes before it chooses, and
    // keeps in registers.
    asm volatile("// variant %0" ::"n"(2 * static_cast<int>(kEnd) + kRowsAdjacent));
    Smem& smem = *reinterpret_cast<Smem*>(bytes);
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x >> 5, 0);
    if (threadIdx.x == 0) {
      smem.ring.init(129, 8 * kRouterCtas);
      smem.special = 0;
      ptx::mbarrier_init_fence();
    }
    __syncthreads();
    ptx::cluster_sync_relaxed();
    const int rank = static_cast<int>(ptx::cluster_rank());
    ptx::launch_dependents();
    ptx::wait_for_predecessor();
    // Producers and consumers meet at their ends, in two places of the program: a barrier with a name and a count.
    const auto meet = [] { ptx::named_barrier_sync(kEndBarrier, kRouterNativeThreads); };
    if (warp >= 8) {
      ptx::give_registers<24>();
      produce(p, smem, threadIdx.x - 256, rank);
      if (kEnd != RouterEnd::kSlots && flags_of_columns(p, threadIdx.x - 256, 128) != 0) smem.special = 1;
      meet();
      ptx::cluster_sync_relaxed();  // nobody leaves while others copy or arrive here
    } else {
      ptx::take_registers<240>();
      consume(p, smem, threadIdx.x);
      meet();
      ptx::cluster_sync_relaxed();
      if constexpr (kEnd == RouterEnd::kSlots) {
        if (smem.special && threadIdx.x == 0) *p.terms.any_redo = 1;
      } else {
        if (smem.special) redo(p, *reinterpret_cast<RedoSmem*>(smem.q));
      }
    }
  }
};

template <class Element, int kBlocks>
__device__ __forceinline__ void run_router(const RouterOutParams& p, char* smem_bytes) {
  const bool adjacent = p.p.depth_stride != 1;
  if (p.work.units_per_tile == 0) {
    RouterNative<Element, true, kBlocks, RouterEnd::kSlots>::run(p, smem_bytes);
  } else if (p.work.units_per_tile == 1) {
    adjacent ? RouterNative<Element, true, kBlocks, RouterEnd::kAlone>::run(p, smem_bytes)
             : RouterNative<Element, false, kBlocks, RouterEnd::kAlone>::run(p, smem_bytes);
  } else {
    adjacent ? RouterNative<Element, true, kBlocks, RouterEnd::kJoined>::run(p, smem_bytes)
             : RouterNative<Element, false, kBlocks, RouterEnd::kJoined>::run(p, smem_bytes);
  }
}

}  // namespace dense_projection_det_gemm
