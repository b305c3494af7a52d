// Copies out of shared memory whose source is used again, right as variant 0 and wrong in one way in every other variant.
#include "common.cuh"

// out[256]; 128 threads. Copies a tile out in two halves, then reuses it.
template <int Mutant, class Copy>
__device__ void drain_body(Copy copy, uint32_t* out) {
  __shared__ __align__(128) uint32_t tile[256];
  uint32_t i = threadIdx.x;
  for (uint32_t k = i; k < 256; k += 128) tile[k] = k + 5;
  proxy_fence();
  __syncthreads();
  if (i == 0) {
    for (uint32_t half = 0; half < 2; half++) {
      copy(half, tile + 128 * half);
      asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    }
    if (Mutant == 1) tile[7] = 1;                                                                  // the issuer does not wait
    if (Mutant == 2) asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");                // waits for the first half only
    if (Mutant == 2) tile[200] = 1;
    if (Mutant == 0 || Mutant == 5) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
  }
  if (Mutant == 3 && i == 32) asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");       // waits for its own copies, it has none
  if (Mutant == 5) {
    if (i == 40) tile[40] = 1;                                                                     // nothing tells it of the wait
  } else {
    __syncthreads();
    if (Mutant == 0 || Mutant == 3 || Mutant == 4) tile[i] = 1;                                    // 4: ordered by barriers, not by the wait
    __syncthreads();
  }
  if (i == 0) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}

struct BulkCopy {
  uint32_t* out;
  __device__ void operator()(uint32_t half, const uint32_t* from) const {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(out + 128 * half), "r"(address(from)), "r"(512)
                 : "memory");
  }
};
struct BulkReduction {
  uint32_t* out;
  __device__ void operator()(uint32_t half, const uint32_t* from) const {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%0], [%1], %2;" ::"l"(out + 128 * half),
                 "r"(address(from)), "r"(512)
                 : "memory");
  }
};
struct TensorStore {
  const CUtensorMap* map;
  __device__ void operator()(uint32_t half, const uint32_t* from) const {
    asm volatile("cp.async.bulk.tensor.1d.global.shared::cta.tile.bulk_group [%0, {%1}], [%2];" ::"l"(map), "r"(128 * half),
                 "r"(address(from))
                 : "memory");
  }
};

// out[128]; clusters of 2 CTAs of 64 threads. Each CTA copies its tile into its neighbour's shared memory, then reuses it.
template <int Mutant>
__device__ void exchange_body(uint32_t* out) {
  __shared__ __align__(128) uint32_t mine[64], theirs[64];
  __shared__ uint64_t barrier;
  uint32_t i = threadIdx.x, rank, to, signal;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  mine[i] = blockIdx.x * 64 + i;
  if (i == 0) {
    barrier_init(&barrier, 1);
    barrier_fence();
    expect(&barrier, 256);
  }
  proxy_fence();
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(to) : "r"(address(theirs)), "r"(rank ^ 1));
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(signal) : "r"(address(&barrier)), "r"(rank ^ 1));
  if (i == 0)
    asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
                 "r"(address(mine)), "r"(256), "r"(signal)
                 : "memory");
  if (Mutant == 1) __syncthreads();
  if (Mutant == 1) mine[i] = 0;        // the neighbour may not have it yet
  wait(&barrier, 0);
  if (Mutant == 2) mine[i] = 0;        // what has arrived here says nothing about what leaves
  out[blockIdx.x * 64 + i] = theirs[i];
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
  if (Mutant == 0) mine[i] = 0;
}

// out[128]; 128 threads. Stores to global memory and copies it back in bulk.
template <int Mutant>
__device__ void refetch_body(uint32_t* out) {
  __shared__ __align__(128) uint32_t tile[128];
  __shared__ uint64_t barrier;
  uint32_t i = threadIdx.x;
  out[i] = i + 1;                                                                            // STORED
  if (Mutant == 0) asm volatile("fence.proxy.async.global;" ::: "memory");                   // 1: no fence
  if (Mutant == 2) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");              // one for other memory
  if (i == 0) {
    barrier_init(&barrier, 1);
    barrier_fence();
  }
  __syncthreads();
  if (i == 0) {
    expect(&barrier, 512);
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(address(tile)),
                 "l"(out), "r"(512), "r"(address(&barrier))
                 : "memory");
  }
  wait(&barrier, 0);
  out[i] = tile[127 - i];
}

#define DRAIN(k)                                                                                                 \
  extern "C" __global__ void copy_##k(uint32_t* out) { drain_body<k>(BulkCopy{out}, out); }                      \
  extern "C" __global__ void reduction_##k(uint32_t* out) { drain_body<k>(BulkReduction{out}, out); }            \
  extern "C" __global__ void tensor_##k(const __grid_constant__ CUtensorMap map, uint32_t* out) {                \
    drain_body<k>(TensorStore{&map}, out);                                                                       \
  }
#define EXCHANGE(k) extern "C" __global__ void exchange_##k(uint32_t* out) { exchange_body<k>(out); }
DRAIN(0) DRAIN(1) DRAIN(2) DRAIN(3) DRAIN(4) DRAIN(5)
EXCHANGE(0) EXCHANGE(1) EXCHANGE(2)
#define REFETCH(k) extern "C" __global__ void refetch_##k(uint32_t* out) { refetch_body<k>(out); }
REFETCH(0) REFETCH(1) REFETCH(2)
