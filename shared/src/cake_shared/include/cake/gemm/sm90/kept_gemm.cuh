// The native GEMM where B is small and A is long: a cluster keeps all of B for its columns in shared memory, each CTA its own
// half of them, and A's rows stream by, each read once by the cluster.
//
//   out[l, m, n] (+)= sum_k a[l, m, k] b[l, k, n]
//
// Order of accumulation: that of tile_gemm.cuh. A cluster walks neighbouring units, rows before columns before batches, so that
// B rarely changes.
// Barriers: those of tile_gemm.cuh for A's ring; kept_full[block] (the producer's expectation and the bytes of B), kept_free (one
// arrival of each consumer warp after its last products with B). A tile's results cost as much as its products, so consumers multiply
// in turns: named barrier kTurn + c passes the tensor cores to consumer c.
#pragma once

#include "cake/gemm/sm90/tile_gemm.cuh"

namespace cake::gemm::sm90 {

template <class C>
struct alignas(1024) KeptSmem {
  static constexpr int kBlocks = C::kTile.kept_bytes / kept_block_bytes(C::kTile);
  static_assert(kBlocks <= C::kStages, "a consumer waits for its turn with a tile's stages in the ring");
  char a[C::kStages][C::kABytes];
  char b[C::kTile.kept_bytes];
  StoreRing<C::kTile.store_buffers> store[kConsumers];
  pipe::Ring<C::kStages> ring;
  uint64_t kept_full[kBlocks];
  uint64_t kept_free;

  __device__ __forceinline__ char* kept(int block) { return b + block * kept_block_bytes(C::kTile); }
};

// The units of a cluster: neighbours, as many as any other has or one more. All rows come before the B that they share changes.
struct KeptWalk {
  int left;  // with this one
  Unit unit;
  bool fresh = true;  // this unit's B is not there yet

  __device__ __forceinline__ explicit KeptWalk(const Tiling& tiling) {
    const int cluster = static_cast<int>(blockIdx.x) / kCtasPerCluster, clusters = static_cast<int>(gridDim.x) / kCtasPerCluster;
    const int first = static_cast<int>(int64_t{cluster} * tiling.units / clusters);
    left = static_cast<int>((int64_t{cluster} + 1) * tiling.units / clusters) - first;
    unit = unit_of(tiling, first);
  }
  __device__ __forceinline__ bool keeps_b(const Tiling& tiling) const { return unit.row_unit + 1 < tiling.row_units; }
  // Without a division, which would take longer than some of the products.
  __device__ __forceinline__ void advance(const Tiling& tiling) {
    --left;
    fresh = !keeps_b(tiling);
    ++unit.row_unit;
    if (!fresh) return;
    unit.row_unit = 0;
    if (++unit.column_unit < tiling.column_units) return;
    unit.column_unit = 0;
    ++unit.batch;
  }
};

template <class C>
__device__ __forceinline__ void load_kept(KeptSmem<C>& smem, const NativeParams& p, int block, int column, int batch) {
  uint64_t* const full = &smem.kept_full[block];
  char* const to = smem.kept(block);
  ptx::mbarrier_arrive_expect_bytes(full, kept_block_bytes(C::kTile));
  const int k = block * kBlockK;
  if (p.b_k_major) {
    const int32_t at[3] = {k, column, batch};
    ptx::tensor_load(to, &p.b, at, full, ptx::kEvictNormal);
  } else {
    constexpr int kBoxes = kept_block_bytes(C::kTile) / (64 * 128);
#pragma unroll
    for (int box = 0; box < kBoxes; ++box) {
      const int32_t at[3] = {column + 64 * box, k, batch};
      ptx::tensor_load(to + box * (64 * 128), &p.b, at, full, ptx::kEvictNormal);
    }
  }
}

template <class C>
__device__ __forceinline__ void produce_kept(KeptSmem<C>& smem, const NativeParams& p, uint32_t rank) {
  constexpr TileShape kTile = C::kTile;
  pipe::RingPlace<C::kStages> at;
  uint32_t free_phase = 1;
  for (KeptWalk walk(p.tiling); walk.left > 0; walk.advance(p.tiling)) {
    const Unit& unit = walk.unit;
    if (walk.fresh) {
      ptx::mbarrier_wait(&smem.kept_free, free_phase);
      free_phase ^= 1;
    }
    const int row = unit.row_unit * kTile.m, column = (unit.column_unit * kCtasPerCluster + static_cast<int>(rank)) * kTile.n;
    for (int block = 0; block < unit.blocks; ++block) {
      if (walk.fresh) load_kept<C>(smem, p, block, column, unit.batch * p.b_batch_step);
      smem.ring.wait_empty(at);
      smem.ring.expect(at, C::kABytes);
      load_operand<kTile.m, true>(smem.a[at.stage], p.a, p.a_k_major, row, block * kBlockK, unit.batch * p.a_batch_step, rank,
                                  smem.ring.full(at));
      at.advance();
    }
  }
}

// As `contract`, with B's blocks where they are kept; `pass` once the last products are issued.
template <class C, ptx::Major kMajorA, ptx::Major kMajorB, int kCount, class Pass>
__device__ __forceinline__ void contract_kept(float (&acc)[kCount], KeptSmem<C>& smem, pipe::RingPlace<C::kStages>& at, int blocks,
                                              bool fresh, uint32_t full_phase, int consumer, int lane, Pass pass) {
  constexpr uint64_t kStepA = step_of(kMajorA), kStepB = step_of(kMajorB);
  pipe::RingPlace<C::kStages> before = at;
  for (int block = 0; block < blocks; ++block) {
    if (fresh) ptx::mbarrier_wait(&smem.kept_full[block], full_phase);
    smem.ring.wait_full(at);
    const uint64_t a =
        ptx::wgmma_descriptor(ptx::shared_address(smem.a[at.stage]) + consumer * (64 * 128), kBlockK * 128);
    const uint64_t b = ptx::wgmma_descriptor(ptx::shared_address(smem.kept(block)), kBlockK * 128);
    ptx::wgmma_keep(acc);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kBlockK / 16; ++step) {
      ptx::wgmma_bf16<kMajorA, kMajorB>(acc, a + step * kStepA, b + step * kStepB, true);
    }
    ptx::wgmma_commit();
    if (block == blocks - 1) pass();
    ptx::wgmma_wait<1>();
    if (block > 0) release_both(smem.ring, before, lane);
    before = at;
    at.advance();
  }
  ptx::wgmma_wait<0>();
  ptx::wgmma_keep(acc);
  if (blocks > 0) release_both(smem.ring, before, lane);
}

template <class C>
__device__ __forceinline__ void consume_kept(KeptSmem<C>& smem, const NativeParams& p, uint32_t rank, int consumer) {
  constexpr TileShape kTile = C::kTile;
  using ptx::Major;
  const int lane = threadIdx.x % 32;
  pipe::RingPlace<C::kStages> at;
  uint32_t full_phase = 1;
  bool first = true;
  for (KeptWalk walk(p.tiling); walk.left > 0; walk.advance(p.tiling), first = false) {
    const Unit& unit = walk.unit;
    if (walk.fresh) full_phase ^= 1;
    const bool last = walk.left == 1;
    float acc[kTile.n / 2];
#pragma unroll
    for (int i = 0; i < kTile.n / 2; ++i) acc[i] = 0.f;
    const auto pass = [&] {
      if (consumer == 0 || !last) ptx::named_barrier_arrive(kTurn + 1 - consumer, 128 * kConsumers);
    };
    if (consumer == 1 || !first) ptx::named_barrier_sync(kTurn + consumer, 128 * kConsumers);
    if (unit.blocks == 0) pass();
    if (p.a_k_major) {
      if (p.b_k_major) {
        contract_kept<C, Major::kK, Major::kK>(acc, smem, at, unit.blocks, walk.fresh, full_phase, consumer, lane, pass);
      } else {
        contract_kept<C, Major::kK, Major::kMN>(acc, smem, at, unit.blocks, walk.fresh, full_phase, consumer, lane, pass);
      }
    } else {
      if (p.b_k_major) {
        contract_kept<C, Major::kMN, Major::kK>(acc, smem, at, unit.blocks, walk.fresh, full_phase, consumer, lane, pass);
      } else {
        contract_kept<C, Major::kMN, Major::kMN>(acc, smem, at, unit.blocks, walk.fresh, full_phase, consumer, lane, pass);
      }
    }
    if (lane == 0 && !last && !walk.keeps_b(p.tiling)) ptx::mbarrier_arrive(&smem.kept_free);
    store_tile(acc, smem.store[consumer], p, unit, consumer * 64, static_cast<int>(rank) * kTile.n, consumer);
  }
  finish_stores();
}

template <TileKind kKind>
__device__ __forceinline__ void kept_gemm(const NativeParams& p) {
  using C = Config<kKind>;
  extern __shared__ __align__(1024) char shared_bytes[];
  auto& smem = *reinterpret_cast<KeptSmem<C>*>(shared_bytes);
  const int warpgroup = __shfl_sync(0xffffffff, threadIdx.x / 128, 0);
  const uint32_t rank = ptx::cluster_rank();
  if (threadIdx.x == 0) {
    ptx::prefetch_tensor_map(&p.a);
    ptx::prefetch_tensor_map(&p.b);
    if (!p.output.direct) ptx::prefetch_tensor_map(&p.out);
    smem.ring.init(1, kCtasPerCluster * kConsumers * 4);
    for (uint64_t& full : smem.kept_full) ptx::mbarrier_init(&full, 1);
    ptx::mbarrier_init(&smem.kept_free, kConsumers * 4);
    ptx::mbarrier_init_fence();
  }
  ptx::cluster_sync_relaxed();
  // In this order: what starts beside this reads operands at once, which launches before this one may have written.
  if (!p.beside) ptx::wait_for_predecessor();
  ptx::launch_dependents();
  if (warpgroup == 0) {
    ptx::give_registers<C::kProducerRegisters>();
    if (threadIdx.x == 0) produce_kept<C>(smem, p, rank);
  } else {
    ptx::take_registers<C::kConsumerRegisters>();
    consume_kept<C>(smem, p, rank, warpgroup - 1);
  }
  // A CTA's shared memory and barriers must outlive what its partner still sends there.
  ptx::cluster_sync_relaxed();
  if (p.beside) ptx::wait_for_predecessor();
}

}  // namespace cake::gemm::sm90
