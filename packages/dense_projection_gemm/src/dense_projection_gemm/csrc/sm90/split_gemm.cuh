// The native GEMM with its contraction cut by the number of clusters (stream-K): see split_work.h.
//
//   out[l, m, n] (+)= sum_k a[l, m, k] b[l, k, n]
//
// Reads A and B by tensor copies, any major axis; writes whole tiles by tensor stores, adds partial sums in FP32 by tensor
// reductions in the order in which they come: bits differ from run to run. Mainloop, tiles and barriers are those of
// cake/gemm/sm90/tile_gemm.cuh. Operands are read before the grid dependency is waited for: the launch before this one
// fills the sums with zeros, writes nothing else, and has itself waited for all before it.
#pragma once

#include "cake/gemm/sm90/tile_gemm.cuh"
#include "params.h"

namespace dense_projection_gemm::sm90 {

namespace ptx = cake::ptx;
namespace native = cake::gemm::sm90;
using cake::gemm::TileKind;
using cake::gemm::TileShape;

inline constexpr int kReduceColumns = 32;  // FP32 columns of a block of the epilogue

struct TilePlace {
  int row, column;
};

template <class C>
__device__ __forceinline__ TilePlace place_of(const cake::gemm::Unit& unit, uint32_t rank) {
  constexpr TileShape kTile = C::kTile;
  const int r = static_cast<int>(rank);
  const int tile_row = kTile.pair_along_m ? unit.row_unit * native::kCtasPerCluster + r : unit.row_unit;
  const int tile_column = kTile.pair_along_m ? unit.column_unit : unit.column_unit * native::kCtasPerCluster + r;
  return {tile_row * kTile.m, tile_column * kTile.n};
}

template <class C>
__device__ __forceinline__ void produce(native::Smem<C>& smem, const SplitParams& p, uint32_t rank, int cluster) {
  constexpr TileShape kTile = C::kTile;
  typename cake::pipe::Ring<C::kStages>::Place at;
  SplitWalk walk(p.tiling, cluster);
  SplitItem item;
  // Read by no other cluster: it need not stay in L2.
  const uint64_t b_policy = p.tiling.tiles.row_units == 1 ? ptx::kEvictFirst : ptx::kEvictNormal;
  while (walk.next(item)) {
    const TilePlace own = place_of<C>(item.unit, rank);
    // Of the shared operand a CTA copies its half, whose place it counts from the first row of the whole.
    int k = item.first_block * cake::gemm::kBlockK;
    for (int block = 0; block < item.blocks; ++block, k += cake::gemm::kBlockK) {
      smem.ring.wait_empty(at);
      smem.ring.expect(at, C::kABytes + C::kBBytes);
      uint64_t* const full = smem.ring.full(at);
      native::load_operand<kTile.m, C::kA.shared>(smem.a[at.stage], p.a, p.a_k_major, own.row, k,
                                                  item.unit.batch * p.a_batch_step, rank, full);
      native::load_operand<kTile.n, C::kB.shared>(smem.b[at.stage], p.b, p.b_k_major, own.column, k,
                                                  item.unit.batch * p.b_batch_step, rank, full, b_policy);
      at.advance();
    }
  }
}

// Adds the consumer's part of a tile to FP32 sums at `column`, `row`, `plane` of the map.
template <int kBlock, int kCount>
__device__ __forceinline__ void add_blocks(const float (&acc)[kCount], native::StoreBlocks& blocks, const void* map, int row,
                                           int column, int columns, int plane, int consumer) {
  if constexpr (kBlock < kCount / 16) {
    if (kBlock * kReduceColumns >= columns) return;
    char* const buffer = blocks.buffer[kBlock % native::kStoreBuffers];
    const bool elected = threadIdx.x % 128 == 0;
    if (elected) ptx::bulk_wait_read<kBlock == 0 ? 0 : native::kStoreBuffers - 1>();
    ptx::named_barrier_sync(1 + consumer, 128);
    native::write_block<kBlock>(acc, buffer, true);
    ptx::fence_async_shared();
    ptx::named_barrier_sync(1 + consumer, 128);
    if (elected) {
      const int32_t coordinates[3] = {column + kBlock * kReduceColumns, row, plane};
      ptx::tensor_add(map, coordinates, buffer);
      ptx::bulk_commit();
    }
    add_blocks<kBlock + 1>(acc, blocks, map, row, column, columns, plane, consumer);
  }
}

template <int kBlock, int kBlocks, int kCount>
__device__ __forceinline__ void store_blocks(const float (&acc)[kCount], native::StoreBlocks& blocks, const void* map,
                                             bool is_fp32, int row, int column, int columns, int plane, int consumer) {
  if constexpr (kBlock < kBlocks) {
    const int at = kBlock * (is_fp32 ? 32 : 64);
    if (at >= columns) return;
    char* const buffer = blocks.buffer[kBlock % native::kStoreBuffers];
    const bool elected = threadIdx.x % 128 == 0;
    if (elected) ptx::bulk_wait_read<kBlock == 0 ? 0 : native::kStoreBuffers - 1>();
    ptx::named_barrier_sync(1 + consumer, 128);
    native::write_block<kBlock>(acc, buffer, is_fp32);
    ptx::fence_async_shared();
    ptx::named_barrier_sync(1 + consumer, 128);
    if (elected) {
      const int32_t coordinates[3] = {column + at, row, plane};
      ptx::tensor_store(map, coordinates, buffer);
      ptx::bulk_commit();
    }
    store_blocks<kBlock + 1, kBlocks>(acc, blocks, map, is_fp32, row, column, columns, plane, consumer);
  }
}

template <class C>
__device__ __forceinline__ void finish_item(float (&acc)[C::kConsumerColumns / 2], native::StoreBlocks& blocks,
                                            const SplitParams& p, const SplitItem& item, uint32_t rank, int consumer) {
  constexpr int kCount = C::kConsumerColumns / 2;
  const TilePlace own = place_of<C>(item.unit, rank);
  const int row_in_tile = C::kSplitsRows ? consumer * 64 : 0;
  const int column_in_tile = C::kSplitsRows ? 0 : consumer * C::kConsumerColumns;
  const int row = own.row + row_in_tile, column = own.column + column_in_tile;
  if (row >= p.m || column >= p.n) return;
  const int columns = p.n - column;
  if (item.split >= 0 && !p.sums_in_out) {
    const int plane = item.split * native::kCtasPerCluster + static_cast<int>(rank);
    add_blocks<0>(acc, blocks, &p.sums, row_in_tile, column_in_tile, columns, plane, consumer);
  } else if (item.split >= 0 || p.adds_whole) {
    add_blocks<0>(acc, blocks, &p.sums, row, column, columns, item.unit.batch, consumer);
  } else if (p.is_fp32) {
    store_blocks<0, kCount / 16>(acc, blocks, &p.out, true, row, column, columns, item.unit.batch, consumer);
  } else {
    store_blocks<0, kCount / 32>(acc, blocks, &p.out, false, row, column, columns, item.unit.batch, consumer);
  }
}

template <class C>
__device__ __forceinline__ void consume(native::Smem<C>& smem, const SplitParams& p, uint32_t rank, int consumer, int cluster) {
  using ptx::Major;
  const int lane = threadIdx.x % 32;
  cake::pipe::RingPlace<C::kStages> at;
  SplitWalk walk(p.tiling, cluster);
  SplitItem item;
  bool waited = false;
  while (walk.next(item)) {
    float acc[C::kConsumerColumns / 2];
#pragma unroll
    for (int i = 0; i < C::kConsumerColumns / 2; ++i) acc[i] = 0.f;
    if (p.a_k_major) {
      if (p.b_k_major) {
        native::contract<C, Major::kK, Major::kK>(acc, smem, at, item.blocks, consumer, lane);
      } else {
        native::contract<C, Major::kK, Major::kMN>(acc, smem, at, item.blocks, consumer, lane);
      }
    } else {
      if (p.b_k_major) {
        native::contract<C, Major::kMN, Major::kK>(acc, smem, at, item.blocks, consumer, lane);
      } else {
        native::contract<C, Major::kMN, Major::kMN>(acc, smem, at, item.blocks, consumer, lane);
      }
    }
    if (!waited) ptx::wait_for_predecessor();
    waited = true;
    finish_item<C>(acc, smem.store[consumer], p, item, rank, consumer);
  }
  if (!waited) ptx::wait_for_predecessor();
  native::finish_stores();
}

template <TileKind kKind>
__device__ __forceinline__ void split_gemm(const SplitParams& p) {
  using C = native::Config<kKind>;
  extern __shared__ __align__(1024) char shared_bytes[];
  auto& smem = *reinterpret_cast<native::Smem<C>*>(shared_bytes);
  const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
  const uint32_t rank = ptx::cluster_rank();
  if (threadIdx.x == 0) {
    ptx::prefetch_tensor_map(&p.a);
    ptx::prefetch_tensor_map(&p.b);
    smem.ring.init(1, native::kCtasPerCluster * C::kConsumers * 4);
    ptx::mbarrier_init_fence();
  }
  ptx::cluster_sync_relaxed();
  ptx::launch_dependents();
  const int cluster = blockIdx.x / native::kCtasPerCluster;
  if (warpgroup == 0) {
    ptx::give_registers<C::kProducerRegisters>();
    if (threadIdx.x == 0) produce<C>(smem, p, rank, cluster);
  } else {
    ptx::take_registers<C::kConsumerRegisters>();
    consume<C>(smem, p, rank, warpgroup - 1, cluster);
  }
  // A CTA's shared memory and barriers must outlive what its partner still sends there.
  ptx::cluster_sync_relaxed();
}

}  // namespace dense_projection_gemm::sm90
