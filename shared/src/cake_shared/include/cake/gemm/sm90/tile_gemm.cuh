// One kernel body of the native GEMM, for a tile kind; the .cuh files beside this one make a kernel of each.
//
//   out[l, m, n] (+)= sum_k a[l, m, k] b[l, k, n], or the partial sums of one piece of the contraction
//
// Reads A and B by tensor copies, any major axis; writes the result, or FP32 partial sums, by tensor copies.
// Order of accumulation: k ascending in steps of 16, in one FP32 accumulator an element, whatever the tile.
// Barriers: full (the producer's expectation and the bytes of both CTAs' copies), empty (one arrival of each warp of both CTAs
// that reads the stage, because a copy writes into both). A persistent cluster of two walks the units.
#pragma once

#include "cake/gemm/sm90/in_turns.cuh"
#include "cake/gemm/work.h"
#include "cake/ptx/bulk_copy.cuh"
#include "cake/ptx/cta.cuh"
#include "cake/ptx/grid_dependency.cuh"

namespace cake::gemm::sm90 {

// Copies this CTA's share of an operand of kRows rows, first row `row`, into the stage.
template <int kRows, bool kShared>
__device__ __forceinline__ void load_operand(char* stage, const host::TensorMap& map, bool k_major, int row, int k, int batch,
                                             uint32_t rank, uint64_t* barrier, uint64_t l2_policy = ptx::kEvictNormal) {
  constexpr OperandBoxes kBoxes{kRows, kShared};
  constexpr uint16_t kBoth = 3;
  const auto copy = [&](char* to, int32_t inner, int32_t outer) {
    const int32_t at[3] = {inner, outer, batch};
    if constexpr (kShared) {
      ptx::tensor_load_multicast(to, &map, at, barrier, kBoth);
    } else {
      ptx::tensor_load(to, &map, at, barrier, l2_policy);
    }
  };
  const int share = kShared ? static_cast<int>(rank) : 0;
  if (k_major) {
    const int first = share * kBoxes.box_rows();
    copy(stage + first * 128, k, row + first);
  } else if constexpr (kBoxes.box_depth() == kBlockK) {
    constexpr int kBlocks = kBoxes.blocks() / (kShared ? kCtasPerCluster : 1);
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
      const int at = share * kBlocks + block;
      copy(stage + at * (kBlockK * 128), row + at * 64, k);
    }
  } else {
    const int depth = share * kBoxes.box_depth();
#pragma unroll
    for (int block = 0; block < kBoxes.blocks(); ++block) {
      copy(stage + block * (kBlockK * 128) + depth * 128, row + block * 64, k + depth);
    }
  }
}

// Of what a CTA has of a unit that may be halved, from the first column of the unit on.
template <class C>
__device__ __forceinline__ int first_column(const Unit& unit, int own) {
  constexpr int kColumns = C::kTile.n;
  if (!unit.beside) return unit.half == kWhole ? 0 : unit.half * (kColumns / 2);
  return unit.half == kWhole ? own * kColumns : unit.half * kColumns + own * (kColumns / 2);
}

// Whether all terms lie in the half of B's only block that the first CTA copies: of an odd number of blocks of 64 columns, see
// OperandBoxes. The other half is neither copied, as zeros, nor multiplied.
template <class C>
__device__ __forceinline__ bool has_half_block(const NativeParams& p) {
  return C::kStrides && C::kB.box_depth() == kBlockK / 2 && p.half_block && !p.b_k_major;
}

template <class C>
__device__ __forceinline__ void produce(Smem<C>& smem, const NativeParams& p, uint32_t rank, int first_unit, int unit_step) {
  constexpr TileShape kTile = C::kTile;
  // What is read once does not displace what others left in L2. L2 fetches 256 bytes of a row, two stages: where the first evicts what
  // the second has not read yet, memory is read twice, unless both are asked for at once.
  const uint64_t a_policy = C::kStreams && p.tiling.column_units == 1 ? ptx::kEvictFirst : ptx::kEvictNormal;
  const uint64_t b_policy = p.tiling.row_units == 1 ? ptx::kEvictFirst : ptx::kEvictNormal;
  const bool half_block = has_half_block<C>(p);
  typename pipe::Ring<C::kStages>::Place at;
  for (UnitWalk<C::kStrides> walk(p.tiling, first_unit, unit_step); walk.more(); walk.advance()) {
    const Unit& unit = walk.unit;
    const int own = static_cast<int>(rank);
    const bool beside = C::kHalves && unit.beside, whole = unit.half == kWhole;
    const int row = kTile.m * (kTile.pair_along_m ? unit.row_unit * kCtasPerCluster + (beside ? 0 : own) : unit.row_unit);
    int column = kTile.n * (kTile.pair_along_m ? unit.column_unit : unit.column_unit * kCtasPerCluster + own);
    if constexpr (C::kHalves) column += first_column<C>(unit, own);
    int k = unit.first_block * kBlockK;
    for (int block = 0; block < unit.blocks; ++block, k += kBlockK) {
      smem.ring.wait_empty(at);
      if constexpr (C::kStreams) {
        if (p.a_k_major && block % 2 == 0 && block + 1 < unit.blocks) {
          auto next = at;
          next.advance();
          smem.ring.wait_empty(next);
        }
      }
      uint64_t* const full = smem.ring.full(at);
      if constexpr (C::kHalves) {
        // A box of B is half of a tile's columns: CTAs of a half unit copy one each, CTAs side by side those of their own.
        if (beside || !whole) {
          smem.ring.expect(at, C::kABytes + (whole ? C::kBBytes : C::kBBytes / 2));
          load_operand<kTile.m, false>(smem.a[at.stage], p.a, p.a_k_major, row, k, unit.batch * p.a_batch_step, rank, full, a_policy);
          for (int box = 0; box < (whole ? 2 : 1); ++box) {
            load_operand<kTile.n / 2, false>(smem.b[at.stage] + box * (C::kBBytes / 2), p.b, p.b_k_major, column + box * (kTile.n / 2),
                                             k, unit.batch * p.b_batch_step, rank, full, b_policy);
          }
          at.advance();
          continue;
        }
      }
      smem.ring.expect(at, C::kABytes + (half_block ? C::kBBytes / 2 : C::kBBytes));
      load_operand<kTile.m, C::kA.shared>(smem.a[at.stage], p.a, p.a_k_major, row, k,
                                          unit.batch * p.a_batch_step, rank, full, a_policy);
      if (half_block && rank != 0) {
        at.advance();
        continue;
      }
      load_operand<kTile.n, C::kB.shared>(smem.b[at.stage], p.b, p.b_k_major, column, k,
                                          unit.batch * p.b_batch_step, rank, full, b_policy);
      at.advance();
    }
  }
}

template <class C, int kColumns>
__device__ __forceinline__ void consume_unit(Smem<C>& smem, const NativeParams& p, const Unit& unit,
                                             pipe::RingPlace<C::kStages>& at, uint32_t rank, int consumer) {
  constexpr TileShape kTile = C::kTile;
  const int lane = threadIdx.x % 32;
  float acc[kColumns / 2];
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i) acc[i] = 0.f;
  if (C::kStrides && has_half_block<C>(p)) {
    constexpr int kSteps = kBlockK / 32;
    if (p.a_k_major) {
      contract<C, ptx::Major::kK, ptx::Major::kMN, kSteps>(acc, smem, at, unit.blocks, consumer, lane);
    } else {
      contract<C, ptx::Major::kMN, ptx::Major::kMN, kSteps>(acc, smem, at, unit.blocks, consumer, lane);
    }
  } else if (p.a_k_major) {
    if (p.b_k_major) {
      contract<C, ptx::Major::kK, ptx::Major::kK>(acc, smem, at, unit.blocks, consumer, lane);
    } else {
      contract<C, ptx::Major::kK, ptx::Major::kMN>(acc, smem, at, unit.blocks, consumer, lane);
    }
  } else {
    if (p.b_k_major) {
      contract<C, ptx::Major::kMN, ptx::Major::kK>(acc, smem, at, unit.blocks, consumer, lane);
    } else {
      contract<C, ptx::Major::kMN, ptx::Major::kMN>(acc, smem, at, unit.blocks, consumer, lane);
    }
  }
  const int own = static_cast<int>(rank);
  const bool beside = !kTile.pair_along_m || (C::kHalves && unit.beside);
  const int row = (beside ? 0 : own * kTile.m) + (C::kSplitsRows ? consumer * 64 : 0);
  int column = (kTile.pair_along_m ? 0 : own * kTile.n) + (C::kSplitsRows ? 0 : consumer * kColumns);
  if constexpr (C::kHalves) column += first_column<C>(unit, own);
  store_tile<C::kTransposes>(acc, smem.store[consumer], p, unit, row, column, consumer);
}

template <class C>
__device__ __forceinline__ void consume(Smem<C>& smem, const NativeParams& p, uint32_t rank, int consumer, int first_unit,
                                        int unit_step) {
  if constexpr (C::kTurns) {
    consume_in_turns<C>(smem, p, rank, consumer, first_unit, unit_step);
    return;
  }
  pipe::RingPlace<C::kStages> at;
  for (UnitWalk<C::kStrides> walk(p.tiling, first_unit, unit_step); walk.more(); walk.advance()) {
    const Unit& unit = walk.unit;
    if constexpr (C::kHalves) {
      if (unit.half != kWhole) {
        consume_unit<C, C::kConsumerColumns / 2>(smem, p, unit, at, rank, consumer);
        continue;
      }
    }
    consume_unit<C, C::kConsumerColumns>(smem, p, unit, at, rank, consumer);
  }
  finish_stores();
}

template <TileKind kKind>
__device__ __forceinline__ void tile_gemm(const NativeParams& p) {
  using C = Config<kKind>;
  extern __shared__ __align__(1024) char shared_bytes[];
  auto& smem = *reinterpret_cast<Smem<C>*>(shared_bytes);
  // Through a shuffle the compiler knows that the warps of a warpgroup agree.
  const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
  const uint32_t rank = ptx::cluster_rank();
  if (threadIdx.x == 0) {
    ptx::prefetch_tensor_map(&p.a);
    ptx::prefetch_tensor_map(&p.b);
    if (!p.output.direct) ptx::prefetch_tensor_map(&p.out);
    smem.ring.init(1, kCtasPerCluster * C::kReaders * 4);
    ptx::mbarrier_init_fence();
  }
  ptx::cluster_sync_relaxed();
  // In this order: what starts beside this reads operands at once, which launches before this one may have written.
  if (!p.beside) ptx::wait_for_predecessor();
  ptx::launch_dependents();
  const int first_unit = blockIdx.x / kCtasPerCluster, unit_step = gridDim.x / kCtasPerCluster;
  if (warpgroup == 0) {
    ptx::give_registers<C::kProducerRegisters>();
    if (threadIdx.x == 0) produce<C>(smem, p, rank, first_unit, unit_step);
  } else {
    ptx::take_registers<C::kConsumerRegisters>();
    consume<C>(smem, p, rank, warpgroup - 1, first_unit, unit_step);
  }
  // A CTA's shared memory and barriers must outlive what its partner still sends there.
  ptx::cluster_sync_relaxed();
  if (p.beside) ptx::wait_for_predecessor();
}

}  // namespace cake::gemm::sm90
