// Small kernels, each right as variant 0 and wrong in one way in every other variant.
#include <cassert>
#include "common.cuh"

// in[128] const, out[128]; 128 threads.
template <int Mutant>
__device__ void global_body(const uint32_t* in, uint32_t* out) {
  uint32_t i = threadIdx.x;
  uint32_t from = i, to = i;
  if (Mutant == 1) from = i + 1;             // reads one element past the end
  if (Mutant == 2) to = i - 1;               // writes one element before the start
  uint32_t v = in[from];
  if (Mutant == 3) v = *reinterpret_cast<const uint32_t*>(reinterpret_cast<const char*>(in) + 2);  // misaligned
  if (Mutant == 4 && i == 5) const_cast<uint32_t*>(in)[i] = v;  // writes its const input
  if (Mutant == 5) v += out[i];              // reads what nothing wrote
  if (Mutant == 6 && v > 100) __trap();
  if (Mutant == 7) assert(v < 100);
  if (Mutant == 8) while (*static_cast<const volatile uint32_t*>(in) != 77) {}  // waits for what never comes
  if (Mutant == 9) {                         // goes round for ever, changing what is its own
    volatile uint32_t own = 1;
    while (own) own = own * 3;
  }
  out[to] = v * 2 + 1;
}

// in[128], out[128]; reverses through shared memory; 128 threads.
template <int Mutant>
__device__ void shared_body(const uint32_t* in, uint32_t* out) {
  extern __shared__ uint32_t dynamic[];
  __shared__ uint32_t tile[128];
  uint32_t i = threadIdx.x;
  if (!(Mutant == 1 && i == 9)) tile[i] = in[i];      // one element is never written
  if (Mutant == 2 && i == 127) dynamic[64] = 1;       // past the dynamic shared memory
  if (Mutant == 3 && i == 0) *reinterpret_cast<uint32_t*>(reinterpret_cast<char*>(tile) + 6) = 1;  // misaligned
  if (Mutant != 4) __syncthreads();                   // written and read without a barrier between
  uint32_t v = tile[127 - i];
  if (Mutant == 5) tile[(i + 40) & 127] = v;          // overwritten while others may still read
  __syncthreads();
  if (Mutant == 6 && i < 64) __syncthreads();         // half of the threads wait at a barrier that nobody joins
  if (Mutant == 7 && (i == 3 || i == 99)) tile[0] = v;  // two warps write one place
  dynamic[i & 31] = 7;
  __syncthreads();
  out[i] = v + dynamic[0];
}

// Producers and consumers over named barriers; in[64], out[64]; 128 threads.
template <int Mutant>
__device__ void named_body(const uint32_t* in, uint32_t* out) {
  __shared__ uint32_t slots[64];
  uint32_t i = threadIdx.x & 63;
  if (threadIdx.x < 64) {
    slots[i] = in[i];
    if (Mutant != 1) asm volatile("bar.arrive 1, 128;" ::: "memory");   // the producers never arrive
    if (Mutant == 2) asm volatile("bar.arrive 1, 128;" ::: "memory");   // they arrive twice
  } else {
    if (Mutant == 3) asm volatile("bar.sync 1, 64;" ::: "memory");      // a count that disagrees with the arrivals
    else if (Mutant == 4) asm volatile("bar.sync 2, 128;" ::: "memory");  // another barrier
    else asm volatile("bar.sync 1, 128;" ::: "memory");
    out[i] = slots[63 - i] + 1;
  }
}

// cp.async with groups; in[512], out[128]; 128 threads.
template <int Mutant>
__device__ void copy_body(const uint32_t* in, uint32_t* out) {
  __shared__ __align__(16) uint32_t tile[2][512];
  uint32_t i = threadIdx.x;
  for (int k = 0; k < 2; k++) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address(tile[k] + 4 * i)), "l"(in + 4 * i) : "memory");
    if (!(Mutant == 3 && k == 1)) asm volatile("cp.async.commit_group;" ::: "memory");  // the second is in no group
  }
  if (Mutant == 0) asm volatile("cp.async.wait_group 0;" ::: "memory");
  if (Mutant == 1) asm volatile("cp.async.wait_group 1;" ::: "memory");  // waits for the first only
  if (Mutant == 3) asm volatile("cp.async.wait_group 0;" ::: "memory");
  if (Mutant == 4) asm volatile("cp.async.wait_group 0;" ::: "memory");
  if (Mutant != 4) __syncthreads();                                     // own copies done, the neighbours' perhaps not
  out[i] = tile[0][i] + tile[1][511 - i];
}

// A bulk copy in and out; in[256], out[256]; 128 threads.
template <int Mutant>
__device__ void bulk_body(const uint32_t* in, uint32_t* out) {
  __shared__ __align__(128) uint32_t tile[256], result[256];
  __shared__ uint64_t barrier;
  uint32_t i = threadIdx.x;
  if (i == 0) {
    if (Mutant != 1) barrier_init(&barrier, Mutant == 2 ? 2 : 1);  // 1: never initialised; 2: an arrival that never comes
    barrier_fence();
  }
  __syncthreads();
  if (i == 0) {
    uint32_t bytes = Mutant == 3 ? 1024 + 16 : Mutant == 4 ? 1024 - 16 : 1024;
    expect(&barrier, bytes);
    uint32_t count = Mutant == 5 ? 1000 : 1024;                    // not a multiple of 16
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(address(tile)),
                 "l"(in), "r"(count), "r"(address(&barrier))
                 : "memory");
    if (Mutant == 6) arrive(&barrier);                             // one arrival too many
    if (Mutant == 13) expect(&barrier, 0);
  }
  if (Mutant != 7) wait(&barrier, Mutant == 8 ? 1 : 0);            // 7: no wait; 8: the wrong parity passes at once
  if (Mutant == 9) wait(&barrier, 1);                              // a phase that nobody completes
  for (uint32_t k = i; k < 256; k += 128) result[k] = tile[255 - k] + 5;
  if (Mutant != 10) proxy_fence();                                 // generic writes not made visible to the copy
  if (Mutant != 11) __syncthreads();                               // other threads may not have written yet
  if (i == 0) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(out), "r"(address(result)), "r"(1024) : "memory");
    if (Mutant != 14) asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    if (Mutant == 15) result[3] = 9;                               // the source changes under the copy
    if (Mutant != 12 && Mutant != 14) asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");  // leaves while copying
  }
}

// mbarrier hand-over of 4 rounds between two warps; in[128], out[32]; 64 threads.
template <int Mutant>
__device__ void handover_body(const uint32_t* in, uint32_t* out) {
  __shared__ uint32_t slot[32];
  __shared__ uint64_t full, empty;
  uint32_t lane = threadIdx.x & 31;
  if (threadIdx.x == 0) {
    barrier_init(&full, 32);
    barrier_init(&empty, Mutant == 1 ? 16 : Mutant == 2 ? 33 : 32);  // 1: two phases a round; 2: an arrival too few
    barrier_fence();
  }
  __syncthreads();
  if (threadIdx.x < 32) {
    for (int k = 0; k < 4; k++) {
      if (Mutant != 3) wait(&empty, k & 1 ^ 1);                      // overwrites before the reader is done
      slot[lane] = in[k * 32 + lane];
      if (Mutant == 6 && k == 2 && lane == 0) barrier_init(&full, 32);  // re-initialised in use
      if (!(Mutant == 4 && k == 2 && lane == 7)) arrive(&full);      // one lane forgets once
    }
  } else {
    uint32_t sum = 0;
    for (int k = 0; k < 4; k++) {
      if (Mutant != 5) wait(&full, k & 1);                           // reads before it is full
      sum = sum * 3 + slot[31 - lane];
      arrive(&empty);
    }
    out[lane] = sum;
  }
}

// Neighbour exchange in a cluster of 2; in[128], out[128]; 64 threads a CTA.
template <int Mutant>
__device__ void cluster_body(const uint32_t* in, uint32_t* out) {
  __shared__ uint32_t mine[64];
  uint32_t i = threadIdx.x, rank, remote, v;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  mine[i] = in[blockIdx.x * 64 + i];
  if (Mutant != 1) asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
  uint32_t target = Mutant == 2 ? 2 : rank ^ 1;                      // a CTA that the cluster does not have
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(address(mine + i)), "r"(target));
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(v) : "r"(remote) : "memory");
  out[blockIdx.x * 64 + i] = v;
  // 3: a CTA may leave while its neighbour still reads its shared memory
  if (Mutant != 3) asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

#define KERNEL(body, k) extern "C" __global__ void body##_##k(const uint32_t* in, uint32_t* out) { body##_body<k>(in, out); }
KERNEL(global, 0) KERNEL(global, 1) KERNEL(global, 2) KERNEL(global, 3) KERNEL(global, 4) KERNEL(global, 5)
KERNEL(global, 6) KERNEL(global, 7) KERNEL(global, 8) KERNEL(global, 9)
KERNEL(shared, 0) KERNEL(shared, 1) KERNEL(shared, 2) KERNEL(shared, 3) KERNEL(shared, 4) KERNEL(shared, 5)
KERNEL(shared, 6) KERNEL(shared, 7)
KERNEL(named, 0) KERNEL(named, 1) KERNEL(named, 2) KERNEL(named, 3) KERNEL(named, 4)
KERNEL(copy, 0) KERNEL(copy, 1) KERNEL(copy, 2) KERNEL(copy, 3) KERNEL(copy, 4)
KERNEL(bulk, 0) KERNEL(bulk, 1) KERNEL(bulk, 2) KERNEL(bulk, 3) KERNEL(bulk, 4) KERNEL(bulk, 5) KERNEL(bulk, 6)
KERNEL(bulk, 7) KERNEL(bulk, 8) KERNEL(bulk, 9) KERNEL(bulk, 10) KERNEL(bulk, 11) KERNEL(bulk, 12) KERNEL(bulk, 13)
KERNEL(bulk, 14) KERNEL(bulk, 15)
KERNEL(handover, 0) KERNEL(handover, 1) KERNEL(handover, 2) KERNEL(handover, 3) KERNEL(handover, 4) KERNEL(handover, 5)
KERNEL(handover, 6)
KERNEL(cluster, 0) KERNEL(cluster, 1) KERNEL(cluster, 2) KERNEL(cluster, 3)
