// Pairs of kernels: f_right orders what f_wrong leaves to luck. out[64]; 128 threads unless the test says otherwise.
#include "common.cuh"

#define FOR_ALL(what) asm volatile(what ::: "memory")
__device__ __forceinline__ void meet(bool all) { if (all) __syncthreads(); else __syncwarp(); }
__device__ __forceinline__ void two_warps() { FOR_ALL("bar.sync 1, 64;"); }
__device__ __forceinline__ bool passed(void* b, uint32_t parity) {
  uint32_t done;
  asm volatile("{ .reg .pred p;\nmbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.b32 %0, 1, 0, p; }"
               : "=r"(done) : "r"(address(b)), "r"(parity) : "memory");
  return done;
}
__device__ __forceinline__ void invalidate(void* b) { asm volatile("mbarrier.inval.shared.b64 [%0];" ::"r"(address(b)) : "memory"); }
__device__ __forceinline__ uint32_t peer(void* p, uint32_t rank) {
  uint32_t a;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(a) : "r"(address(p)), "r"(rank));
  return a;
}
__device__ __forceinline__ uint32_t cta_rank() {
  uint32_t r;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
}
__device__ __forceinline__ void cluster_barrier() {
  FOR_ALL("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;");
}
__device__ __forceinline__ void copy_in(void* to, const void* from, uint32_t bytes, void* b) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(address(to)), "l"(from),
               "r"(bytes), "r"(address(b)) : "memory");
}

// ---- ordinary writes that a strong access of the same warp follows

template <bool R> __device__ void counter(uint32_t* out) {
  __shared__ uint32_t c;
  if (threadIdx.x == 0) c = 0;
  meet(R);
  atomicAdd(&c, 1);
  __syncthreads();
  out[threadIdx.x & 63] = c;
}
template <bool R> __device__ void counter_again(uint32_t* out) {  // the second round's reset
  __shared__ uint32_t c;
  if (threadIdx.x == 0) c = 0;
  __syncthreads();
  atomicAdd(&c, 1);
  __syncthreads();
  uint32_t first = c;
  if (R) __syncthreads();
  if (threadIdx.x == 64) { c = 0; atomicAdd(&c, 0); }
  if (R) __syncthreads();
  if (threadIdx.x >= 96) atomicAdd(&c, 1);
  __syncthreads();
  out[threadIdx.x & 63] = first + c;
}
template <bool R> __device__ void masked_counter(uint32_t* out) {  // only some lanes of some warps count
  __shared__ uint32_t c;
  if (threadIdx.x == 33) { c = 0; atomicAdd(&c, 1); }
  if (R) __syncthreads();
  if (threadIdx.x == 70 || threadIdx.x == 5) atomicAdd(&c, 1);
  __syncthreads();
  out[threadIdx.x & 63] = c;
}
template <bool R> __device__ void volatile_after_store(uint32_t* out) {
  __shared__ uint32_t s[32];
  volatile uint32_t* v = s;
  if (threadIdx.x < 32) { s[threadIdx.x] = 1; FOR_ALL(""); v[threadIdx.x] = 2; }
  meet(R);
  out[threadIdx.x & 63] = v[31 - (threadIdx.x & 31)];
}
template <bool R> __device__ void byte_of_a_word(uint32_t* out) {
  __shared__ uint32_t word;
  if (threadIdx.x < 32) {
    if (threadIdx.x < 4) reinterpret_cast<uint8_t*>(&word)[threadIdx.x] = 0;
    __syncwarp();
    atomicOr(&word, 1);
  }
  if (R) __syncthreads();
  if (threadIdx.x >= 64) atomicOr(&word, 2);
  __syncthreads();
  out[threadIdx.x & 63] = word;
}
template <bool R> __device__ void vector_clear(uint32_t* out) {
  __shared__ __align__(16) uint32_t bins[64];
  if (threadIdx.x < 16) { reinterpret_cast<uint4*>(bins)[threadIdx.x] = make_uint4(0, 0, 0, 0); atomicAdd(bins + 4 * threadIdx.x + 3, 1); }
  meet(R);
  if (threadIdx.x >= 32) atomicAdd(bins + (threadIdx.x & 15) * 4 + 3, 1);
  __syncthreads();
  out[threadIdx.x & 63] = bins[threadIdx.x & 63];
}
template <bool R> __device__ void spin_lock(uint32_t* out) {  // the lock is set up without a barrier
  __shared__ uint32_t lock, sum;
  if (threadIdx.x == 0) { lock = 0; sum = 0; }
  if (R) __syncthreads();
  if (threadIdx.x % 32 == 0) {
    while (atomicCAS(&lock, 0, 1) != 0) {}
    __threadfence_block();
    sum += threadIdx.x;
    __threadfence_block();
    atomicExch(&lock, 0);
  }
  __syncthreads();
  out[threadIdx.x & 63] = sum;
}
template <bool R> __device__ void strong_hides_release(uint32_t* out) {
  __shared__ uint32_t s;
  if (threadIdx.x == 0) { s = 3; asm volatile("st.release.cta.shared.u32 [%0], 4;" ::"r"(address(&s)) : "memory"); }
  if (R) __syncthreads();
  uint32_t v;
  asm volatile("ld.relaxed.cta.shared.u32 %0, [%1];" : "=r"(v) : "r"(address(&s)) : "memory");
  __syncthreads();
  out[threadIdx.x & 63] = v;
}
template <bool R> __device__ void copied_then_counted(const uint32_t* in, uint32_t* out) {  // a copy's write, hidden by an atomic
  __shared__ __align__(16) uint32_t tile[4];
  __shared__ uint64_t b;
  if (threadIdx.x == 0) { barrier_init(&b, 1); barrier_fence(); }
  __syncthreads();
  if (threadIdx.x < 32) {
    if (threadIdx.x == 0) { expect(&b, 16); copy_in(tile, in, 16, &b); }
    wait(&b, 0);
    atomicAdd(tile, 1);
  }
  if (R) wait(&b, 0);
  if (threadIdx.x >= 32) atomicAdd(tile, 1);
  __syncthreads();
  out[threadIdx.x & 63] = tile[0];
}

// ---- strong writes of several warps, one of which is ordered

template <bool R> __device__ void two_volatile_writers(uint32_t* out) {
  __shared__ uint32_t s;
  volatile uint32_t* v = &s;
  if (threadIdx.x == 0) *v = 1;
  if (R) __syncthreads();
  if (threadIdx.x >= 32 && threadIdx.x < 64) { if (threadIdx.x == 32) *v = 2; two_warps(); }
  if (threadIdx.x >= 64 && threadIdx.x < 96) { two_warps(); out[threadIdx.x & 63] = s; }
}
template <bool R> __device__ void read_after_own_atomic(uint32_t* out) {
  __shared__ uint32_t c;
  if (threadIdx.x == 0) c = 0;
  __syncthreads();
  atomicMax(&c, threadIdx.x);
  if (R) __syncthreads();
  out[threadIdx.x & 63] = c;
}
template <bool R> __device__ void reset_after_counting(uint32_t* out) {
  __shared__ uint32_t c;
  if (threadIdx.x == 0) c = 0;
  __syncthreads();
  if (threadIdx.x >= 32) atomicAdd(&c, 1);
  if (R) __syncthreads();
  if (threadIdx.x == 1) c = 0;
  __syncthreads();
  out[threadIdx.x & 63] = c;
}
template <bool R> __device__ void reset_to_the_same(uint32_t* out) {  // leaves the bytes as an atomic left them
  __shared__ uint32_t c;
  if (threadIdx.x == 0) c = 0;
  __syncthreads();
  if (threadIdx.x >= 32) atomicOr(&c, 0);
  if (R) __syncthreads();
  if (threadIdx.x == 1) c = 0;
  __syncthreads();
  out[threadIdx.x & 63] = c;
}
template <bool R> __device__ void same_value_then_another(uint32_t* out) {  // 1 and 1 by two warps, 2 by a third that knows of one
  __shared__ uint32_t s;
  if (threadIdx.x < 64 && threadIdx.x % 32 == 0) s = 1;
  if (R) __syncthreads();
  if (threadIdx.x >= 32 && threadIdx.x < 96) two_warps();
  if (threadIdx.x == 64) s = 2;
  __syncthreads();
  out[threadIdx.x & 63] = s;
}
template <bool R> __device__ void and_back_again(uint32_t* out) {  // another value in between, by one store in a loop
  __shared__ uint32_t s;
  volatile uint32_t rounds = 2;
  if (threadIdx.x == 0) s = 0;
  if (R) __syncthreads();
  if (threadIdx.x == 32) {
#pragma unroll 1
    for (uint32_t k = rounds; k > 0; k--) { s = k - 1; FOR_ALL(""); }
  }
  __syncthreads();
  out[threadIdx.x & 63] = s;
}

// ---- fences are no barriers

template <bool R> __device__ void fence_for_barrier(uint32_t* out) {
  __shared__ uint32_t s[32];
  if (threadIdx.x < 32) s[threadIdx.x] = threadIdx.x;
  __threadfence_block();
  if (R) __syncthreads();
  if (threadIdx.x >= 64) out[threadIdx.x & 63] = s[threadIdx.x & 31];
}

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

// ---- named barriers

template <bool R> __device__ void arrives_ahead(uint32_t* out) {  // a producer that nobody holds back
  __shared__ uint32_t s[2][32];
  uint32_t l = threadIdx.x & 31, sum = 0;
  for (uint32_t k = 0; k < 4; k++) {
    if (threadIdx.x < 32) {
      if (R && k >= 2) { if (k & 1) FOR_ALL("bar.sync 4, 64;"); else FOR_ALL("bar.sync 3, 64;"); }
      s[k & 1][l] = k;
      if (k & 1) FOR_ALL("bar.arrive 2, 64;"); else FOR_ALL("bar.arrive 1, 64;");
    } else if (threadIdx.x < 64) {
      if (k & 1) FOR_ALL("bar.sync 2, 64;"); else FOR_ALL("bar.sync 1, 64;");
      sum += s[k & 1][31 - l];
      if (R && k < 2) { if (k & 1) FOR_ALL("bar.arrive 4, 64;"); else FOR_ALL("bar.arrive 3, 64;"); }
    }
  }
  if (threadIdx.x >= 32 && threadIdx.x < 64) out[l] = sum;
}

// ---- found where the schedule shows it

template <bool R> __device__ void runs_ahead(uint32_t* out) {  // a producer that nobody holds back, by a flag
  __shared__ uint32_t slot[32];
  __shared__ volatile uint32_t made, used;
  uint32_t l = threadIdx.x & 31, sum = 0;
  if (threadIdx.x == 0) { made = 0; used = 0; }
  __syncthreads();
#pragma unroll 1
  for (uint32_t k = 1; k <= 8; k++) {
    if (threadIdx.x < 32) {
      while (R && used + 1 < k) {}
      __threadfence_block();
      slot[l] = k;
      __threadfence_block();
      __syncwarp();
      if (l == 0) made = k;
    } else if (threadIdx.x < 64) {
      while (made < k) {}
      __threadfence_block();
      sum += slot[31 - l];
      __threadfence_block();
      __syncwarp();
      if (l == 0) used = k;
    }
  }
  if (threadIdx.x >= 32 && threadIdx.x < 64) out[l] = sum;
}
template <bool R> __device__ void counts_ahead(uint32_t* out) {  // by a counter of arrivals
  __shared__ uint32_t slot[32], made, used;
  uint32_t l = threadIdx.x & 31, sum = 0;
  if (threadIdx.x == 0) { made = 0; used = 0; }
  __syncthreads();
#pragma unroll 1
  for (uint32_t k = 1; k <= 8; k++) {
    if (threadIdx.x < 32) {
      while (R && atomicAdd(&used, 0) < 32 * (k - 1)) {}
      __threadfence_block();
      slot[l] = k;
      __threadfence_block();
      atomicAdd(&made, 1);
    } else if (threadIdx.x < 64) {
      while (atomicAdd(&made, 0) < 32 * k) {}
      __threadfence_block();
      sum += slot[31 - l];
      __threadfence_block();
      atomicAdd(&used, 1);
    }
  }
  if (threadIdx.x >= 32 && threadIdx.x < 64) out[l] = sum;
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
  FOR_ALL("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.acquire.aligned;");
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
  else FOR_ALL("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.acquire.aligned;");
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

#define PAIR(f) \
  extern "C" __global__ void f##_right(const uint32_t*, uint32_t* out) { f<true>(out); } \
  extern "C" __global__ void f##_wrong(const uint32_t*, uint32_t* out) { f<false>(out); }
#define PAIR_IN(f) \
  extern "C" __global__ void f##_right(const uint32_t* in, uint32_t* out) { f<true>(in, out); } \
  extern "C" __global__ void f##_wrong(const uint32_t* in, uint32_t* out) { f<false>(in, out); }
PAIR(counter) PAIR(counter_again) PAIR(masked_counter) PAIR(volatile_after_store) PAIR(byte_of_a_word) PAIR(vector_clear) PAIR(spin_lock)
PAIR(strong_hides_release) PAIR_IN(copied_then_counted) PAIR(two_volatile_writers)
PAIR(read_after_own_atomic) PAIR(reset_after_counting) PAIR(reset_to_the_same) PAIR(same_value_then_another) PAIR(and_back_again)
PAIR(fence_for_barrier)
PAIR(init_arrive) PAIR(init_wait) PAIR(init_test_wait) PAIR_IN(init_expect) PAIR_IN(init_copy) PAIR_IN(init_cp_async) PAIR(fill_then_init)
PAIR(inval_wait) PAIR(inval_arrive) PAIR(inval_by_phase) PAIR_IN(inval_copy) PAIR_IN(inval_known_to_another) PAIR(twice_initialised)
PAIR(store_over) PAIR(atomic_over) PAIR(read_of) PAIR_IN(copy_over) PAIR_IN(store_after_signal) PAIR(arrives_ahead)
PAIR(runs_ahead) PAIR(counts_ahead)
PAIR(remote_arrive) PAIR(init_fence) PAIR(init_fence_is_of_initialisations) PAIR_IN(multicast) PAIR(remote_store)
