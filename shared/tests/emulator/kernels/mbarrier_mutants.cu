// Pairs of kernels: f_right orders what f_wrong leaves to luck, of mbarriers and of clusters. out[64]; 128 threads, 32 in clusters.
#include "common.cuh"

// ---- mbarriers: initialisation

template <bool R> __device__ void init_arrive(uint32_t* out) {
  __shared__ uint64_t b;
  if (threadIdx.x == 0) { barrier_init(&b, 128); barrier_fence(); }
  meet(R);
  arrive(&b);
  wait(&b, 0);
  out[threadIdx.x & 63] = 1;
}
template <bool R> __device__ void init_wait(uint32_t* out) {  // the others only wait
  __shared__ uint64_t b;
  if (threadIdx.x == 0) { barrier_init(&b, 1); barrier_fence(); }
  meet(R);
  if (threadIdx.x == 0) arrive(&b);
  wait(&b, 0);
  out[threadIdx.x & 63] = 1;
}
template <bool R> __device__ void init_test_wait(uint32_t* out) {  // once, whatever it says
  __shared__ uint64_t b;
  if (threadIdx.x == 0) { barrier_init(&b, 1); barrier_fence(); }
  meet(R);
  if (threadIdx.x == 96) out[0] = passed(&b, 0);
}
template <bool R> __device__ void init_expect(const uint32_t* in, uint32_t* out) {
  __shared__ __align__(16) uint32_t tile[4];
  __shared__ uint64_t b;
  if (threadIdx.x == 0) { barrier_init(&b, 1); barrier_fence(); }
  meet(R);
  if (threadIdx.x == 64) { expect(&b, 16); copy_in(tile, in, 16, &b); }
  if (threadIdx.x >= 64) { wait(&b, 0); out[threadIdx.x & 63] = tile[0]; }
}
template <bool R> __device__ void init_copy(const uint32_t* in, uint32_t* out) {  // what a warp issues signals it
  __shared__ __align__(16) uint32_t tile[4];
  __shared__ uint64_t b;
  if (threadIdx.x == 0) { barrier_init(&b, 1); barrier_fence(); expect(&b, 16); }
  meet(R);
  if (threadIdx.x == 64) copy_in(tile, in, 16, &b);
  __syncthreads();
  wait(&b, 0);
  out[threadIdx.x & 63] = tile[0];
}
template <bool R> __device__ void init_cp_async(const uint32_t* in, uint32_t* out) {
  __shared__ __align__(16) uint32_t tile[32];
  __shared__ uint64_t b;
  if (threadIdx.x == 0) { barrier_init(&b, 32); barrier_fence(); }
  meet(R);
  if (threadIdx.x >= 64 && threadIdx.x < 96) {
    uint32_t l = threadIdx.x & 31;
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(address(tile + l)), "l"(in + l) : "memory");
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(address(&b)) : "memory");
    wait(&b, 0);
    out[l] = tile[31 - l];
  }
}
template <bool R> __device__ void fill_then_init(uint32_t* out) {  // others may still clear the bytes
  __shared__ uint64_t b[64];
  for (uint32_t k = threadIdx.x; k < 64; k += 128) b[k] = 0;
  if (R) __syncthreads();
  if (threadIdx.x == 96) { barrier_init(&b[3], 1); barrier_init(&b[40], 1); barrier_fence(); }
  __syncthreads();
  if (threadIdx.x == 0) { arrive(&b[3]); arrive(&b[40]); }
  wait(&b[3], 0);
  out[threadIdx.x & 63] = 1;
}

// ---- mbarriers: the end

template <bool R> __device__ void inval_wait(uint32_t* out) {  // the first warp is through, others may still poll
  __shared__ uint64_t b;
  if (threadIdx.x == 0) { barrier_init(&b, 1); barrier_fence(); }
  __syncthreads();
  if (threadIdx.x == 0) arrive(&b);
  wait(&b, 0);
  if (R) __syncthreads();
  if (threadIdx.x == 0) invalidate(&b);
  out[threadIdx.x & 63] = 1;
}
template <bool R> __device__ void inval_arrive(uint32_t* out) {  // a phase that needs no wait; another warp still arrives
  __shared__ uint64_t b;
  if (threadIdx.x == 0) { barrier_init(&b, 5); barrier_fence(); }
  __syncthreads();
  if (threadIdx.x % 32 == 0) arrive(&b);
  if (R) __syncthreads();
  if (threadIdx.x == 0) invalidate(&b);
  out[threadIdx.x & 63] = 1;
}
template <bool R> __device__ void inval_by_phase(uint32_t* out) {  // its arrivals are known by the wait, the polls of others are not
  __shared__ uint64_t b;
  if (threadIdx.x == 0) { barrier_init(&b, 96); barrier_fence(); }
  __syncthreads();
  if (threadIdx.x >= 32) arrive(&b);
  else wait(&b, 0);
  if (!R && threadIdx.x == 64) passed(&b, 0);
  if (threadIdx.x == 0) { invalidate(&b); reinterpret_cast<uint32_t*>(&b)[0] = 7; reinterpret_cast<uint32_t*>(&b)[1] = 7; }
  __syncthreads();
  out[threadIdx.x & 63] = reinterpret_cast<uint32_t*>(&b)[threadIdx.x & 1];
}
template <bool R> __device__ void inval_copy(const uint32_t* in, uint32_t* out) {  // a copy that nobody has waited for
  __shared__ __align__(16) uint32_t tile[4];
  __shared__ uint64_t b;
  if (threadIdx.x == 0) {
    barrier_init(&b, 1);
    barrier_fence();
    expect(&b, 16);
    copy_in(tile, in, 16, &b);
    if (R) wait(&b, 0);
    invalidate(&b);
  }
  out[threadIdx.x & 63] = 1;
}
template <bool R> __device__ void inval_known_to_another(const uint32_t* in, uint32_t* out) {  // waited for by a warp that tells nobody
  __shared__ __align__(16) uint32_t tile[4];
  __shared__ uint64_t b;
  if (threadIdx.x == 0) { barrier_init(&b, 1); barrier_fence(); }
  __syncthreads();
  if (threadIdx.x == 0) { expect(&b, 16); copy_in(tile, in, 16, &b); }
  if (threadIdx.x >= 64) wait(&b, 0);
  if (R) __syncthreads();
  if (threadIdx.x == 32) invalidate(&b);
  out[threadIdx.x & 63] = 1;
}
template <bool R> __device__ void twice_initialised(uint32_t* out) {  // the second initialisation may meet arrivals for the first
  __shared__ uint64_t b;
  if (threadIdx.x == 0) { barrier_init(&b, 128); barrier_fence(); }
  __syncthreads();
  arrive(&b);
  wait(&b, 0);
  __syncthreads();
  if (threadIdx.x == 0) { invalidate(&b); barrier_init(&b, 96); barrier_fence(); }
  if (R) __syncthreads();
  if (threadIdx.x >= 32) { arrive(&b); wait(&b, 0); }
  out[threadIdx.x & 63] = 1;
}

// ---- mbarriers are not memory

template <bool R> __device__ void store_over(uint32_t* out) {
  __shared__ uint64_t b;
  if (threadIdx.x == 0) { barrier_init(&b, 1); barrier_fence(); }
  __syncthreads();
  if (threadIdx.x == 0) arrive(&b);
  wait(&b, 0);
  __syncthreads();
  if (R && threadIdx.x == 64) invalidate(&b);
  if (threadIdx.x == 64) b = 5;
  __syncthreads();
  out[threadIdx.x & 63] = static_cast<uint32_t>(b);
}
template <bool R> __device__ void atomic_over(uint32_t* out) {
  __shared__ uint64_t b[2];
  if (threadIdx.x == 0) { b[1] = 0; barrier_init(&b[0], 1); barrier_fence(); }
  __syncthreads();
  if (threadIdx.x == 64) atomicAdd(reinterpret_cast<uint32_t*>(b) + (R ? 3 : 1), 1);
  __syncthreads();
  out[threadIdx.x & 63] = 1;
}
template <bool R> __device__ void read_of(uint32_t* out) {
  __shared__ __align__(16) uint64_t b[2];
  if (threadIdx.x == 0) { b[0] = 3; barrier_init(&b[1], 1); barrier_fence(); }
  __syncthreads();
  uint64_t first, second = 0;
  if (R) asm volatile("ld.shared.u64 %0, [%1];" : "=l"(first) : "r"(address(b)));
  else asm volatile("ld.shared.v2.u64 {%0, %1}, [%2];" : "=l"(first), "=l"(second) : "r"(address(b)));
  out[threadIdx.x & 63] = static_cast<uint32_t>(first + second);
}
template <bool R> __device__ void copy_over(const uint32_t* in, uint32_t* out) {  // a copy's box that reaches the next barrier
  __shared__ __align__(16) struct { uint32_t tile[4]; uint64_t first, second; } s;
  if (threadIdx.x == 0) {
    barrier_init(&s.first, 1);
    if (!R) barrier_init(&s.second, 1);
    barrier_fence();
    expect(&s.first, R ? 16 : 32);
    copy_in(s.tile, in, R ? 16 : 32, &s.first);
    wait(&s.first, 0);
  }
  out[threadIdx.x & 63] = 1;
}

// ---- what an asynchronous arrival tells

template <bool R> __device__ void store_after_signal(const uint32_t* in, uint32_t* out) {
  __shared__ uint32_t tile[32], more[32];
  __shared__ uint64_t b;
  uint32_t l = threadIdx.x & 31;
  if (threadIdx.x == 0) { barrier_init(&b, 32); barrier_fence(); }
  __syncthreads();
  if (threadIdx.x < 32) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(address(tile + l)), "l"(in + l) : "memory");
    if (R) more[l] = l;
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(address(&b)) : "memory");
    if (!R) more[l] = l;
  } else if (threadIdx.x < 64) {
    wait(&b, 0);
    out[l] = tile[l] + more[l];
  }
}

// ---- clusters of two, 32 threads a CTA

template <bool R> __device__ void remote_arrive(uint32_t* out) {
  __shared__ uint64_t b;
  if (threadIdx.x == 0) { barrier_init(&b, 1); barrier_fence(); }
  if (R) cluster_barrier();
  if (threadIdx.x == 0) asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(peer(&b, cta_rank() ^ 1)) : "memory");
  wait(&b, 0);
  out[threadIdx.x] = 1;
  cluster_barrier();
}
template <bool R> __device__ void init_fence(uint32_t* out) {  // a relaxed arrival tells of initialisations before their fence
  __shared__ uint64_t b;
  if (threadIdx.x == 0) { barrier_init(&b, 1); if (R) barrier_fence(); }
  __syncwarp();
  EMIT("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.acquire.aligned;");
  if (threadIdx.x == 0) asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(peer(&b, cta_rank() ^ 1)) : "memory");
  wait(&b, 0);
  out[threadIdx.x] = 1;
  cluster_barrier();
}
template <bool R> __device__ void init_fence_is_of_initialisations(uint32_t* out) {
  __shared__ uint64_t b;
  __shared__ uint32_t s;
  if (threadIdx.x == 0) { s = cta_rank(); barrier_init(&b, 1); barrier_fence(); }
  __syncwarp();
  if (R) cluster_barrier();
  else EMIT("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.acquire.aligned;");
  uint32_t v;
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(v) : "r"(peer(&s, cta_rank() ^ 1)) : "memory");
  out[threadIdx.x] = v;
  cluster_barrier();
}
template <bool R> __device__ void multicast(const uint32_t* in, uint32_t* out) {  // signals the barriers of both CTAs
  __shared__ __align__(16) uint32_t tile[4];
  __shared__ uint64_t b;
  if (threadIdx.x == 0) { barrier_init(&b, 1); barrier_fence(); expect(&b, 16); }
  if (R) cluster_barrier();
  if (cta_rank() == 1 && threadIdx.x == 0)
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], 16, [%2], %3;" ::"r"(
        address(tile)), "l"(in), "r"(address(&b)), "h"(static_cast<uint16_t>(3)) : "memory");
  wait(&b, 0);
  out[threadIdx.x] = tile[0];
  cluster_barrier();
}
template <bool R> __device__ void remote_store(uint32_t* out) {  // st.async counts on the barrier beside its value
  __shared__ __align__(16) uint32_t s[4];
  __shared__ uint64_t b;
  if (threadIdx.x == 0) { barrier_init(&b, 1); barrier_fence(); expect(&b, 4); }
  if (R) cluster_barrier();
  if (threadIdx.x == 0) {
    uint32_t other = cta_rank() ^ 1;
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(peer(s, other)), "r"(7), "r"(peer(&b, other))
                 : "memory");
  }
  wait(&b, 0);
  out[threadIdx.x] = s[0];
  cluster_barrier();
}
template <bool R> __device__ void remote_add(uint32_t* out) {  // red.async of all lanes of both CTAs
  __shared__ __align__(16) uint32_t s[4];
  __shared__ uint64_t b;
  if (threadIdx.x == 0) { s[0] = 0; barrier_init(&b, 1); barrier_fence(); if (cta_rank() == 0) expect(&b, 4 * 64); }
  cluster_barrier();
  asm volatile("red.async.relaxed.cluster.shared::cluster.mbarrier::complete_tx::bytes.add.u32 [%0], %1, [%2];" ::"r"(peer(s, 0)), "r"(1),
               "r"(peer(&b, 0)) : "memory");
  if (R && cta_rank() == 0) wait(&b, 0);
  if (cta_rank() == 0) out[threadIdx.x] = s[0];
  if (!R && cta_rank() == 0) wait(&b, 0);
  cluster_barrier();
}
template <bool R> __device__ void remote_sums(uint32_t* out) {  // cp.reduce.async.bulk of both CTAs to one place
  __shared__ __align__(16) uint32_t s[4], mine[4];
  __shared__ uint64_t b;
  if (threadIdx.x < 4) { s[threadIdx.x] = 0; mine[threadIdx.x] = threadIdx.x; proxy_fence(); }
  if (threadIdx.x == 0) { barrier_init(&b, 1); barrier_fence(); if (cta_rank() == 0) expect(&b, 32); }
  if (R) cluster_barrier(); else EMIT("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.acquire.aligned;");
  if (threadIdx.x == 0)
    asm volatile("cp.reduce.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes.add.u32 [%0], [%1], 16, [%2];" ::"r"(peer(s, 0)),
                 "r"(address(mine)), "r"(peer(&b, 0)) : "memory");
  if (cta_rank() == 0) { wait(&b, 0); out[threadIdx.x] = s[threadIdx.x & 3]; }
  cluster_barrier();
}
template <bool R> __device__ void exit_arrive(uint32_t* out) {  // its last arrival may find the other CTA gone
  __shared__ uint64_t b;
  if (threadIdx.x == 0) { barrier_init(&b, 1); barrier_fence(); }
  cluster_barrier();
  if (cta_rank() == 1 && threadIdx.x == 0)
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(peer(&b, 0)) : "memory");
  if (R && cta_rank() == 0) wait(&b, 0);
  out[threadIdx.x] = 1;
}
template <bool R> __device__ void exit_read(uint32_t* out) {  // a relaxed meeting is enough to know that the reads are over
  __shared__ uint32_t s;
  if (threadIdx.x == 0) s = 1;
  cluster_barrier();
  uint32_t v;
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(v) : "r"(peer(&s, cta_rank() ^ 1)) : "memory");
  out[threadIdx.x] = v;
  if (R) EMIT("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;");
}

PAIR(init_arrive) PAIR(init_wait) PAIR(init_test_wait) PAIR_IN(init_expect) PAIR_IN(init_copy)
PAIR_IN(init_cp_async) PAIR(fill_then_init) PAIR(inval_wait) PAIR(inval_arrive) PAIR(inval_by_phase)
PAIR_IN(inval_copy) PAIR_IN(inval_known_to_another) PAIR(twice_initialised) PAIR(store_over) PAIR(atomic_over)
PAIR(read_of) PAIR_IN(copy_over) PAIR_IN(store_after_signal) PAIR(remote_arrive) PAIR(init_fence)
PAIR(init_fence_is_of_initialisations) PAIR_IN(multicast) PAIR(remote_store) PAIR(remote_add) PAIR(remote_sums)
template <bool R> __device__ void exit_read_behind_arrival(uint32_t* out) {  // which the barrier does not wait for
  __shared__ uint32_t s;
  if (threadIdx.x == 0) s = 1;
  cluster_barrier();
  uint32_t v;
  if (!R) EMIT("barrier.cluster.arrive.relaxed.aligned;");
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(v) : "r"(peer(&s, cta_rank() ^ 1)) : "memory");
  if (R) EMIT("barrier.cluster.arrive.relaxed.aligned;");
  EMIT("barrier.cluster.wait.aligned;");
  out[threadIdx.x] = v;
}
template <bool R> __device__ void exit_copy(uint32_t* out) {  // what leaves may still be read when the CTA ends
  __shared__ __align__(16) uint32_t mine[32], theirs[32];
  __shared__ uint64_t b;
  mine[threadIdx.x] = threadIdx.x;
  if (threadIdx.x == 0) { barrier_init(&b, 1); barrier_fence(); expect(&b, 128); }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  cluster_barrier();
  if (threadIdx.x == 0)
    asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], 128, [%2];" ::"r"(
                     peer(theirs, cta_rank() ^ 1)), "r"(address(mine)), "r"(peer(&b, cta_rank() ^ 1))
                 : "memory");
  wait(&b, 0);  // for what comes: it says nothing of what leaves
  out[threadIdx.x] = theirs[threadIdx.x];
  if (R) EMIT("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;");
}
PAIR(exit_arrive) PAIR(exit_read) PAIR(exit_read_behind_arrival) PAIR(exit_copy)
