// Pairs of kernels: f_right orders what f_wrong leaves to luck. out[64]; 128 threads.
#include "common.cuh"

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
  if (threadIdx.x < 32) { s[threadIdx.x] = 1; EMIT(""); v[threadIdx.x] = 2; }
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
template <bool R> __device__ void last_warp_reads(uint32_t* out) {  // whose own atomic comes last where warps run in order
  __shared__ uint32_t c;
  if (threadIdx.x == 0) c = 0;
  __syncthreads();
  atomicAdd(&c, 1);
  if (R) __syncthreads();
  if (threadIdx.x >= 96) out[threadIdx.x & 63] = c;
}
template <bool R> __device__ void last_of_all(uint32_t* out) {  // in order where its own atomic is the last of all
  __shared__ uint32_t c;
  if (threadIdx.x == 0) c = 0;
  __syncthreads();
  uint32_t before = atomicAdd(&c, 1);
  if (R) __syncthreads();
  if (threadIdx.x / 32 == 2) out[threadIdx.x & 63] = before + c;
}
template <bool R> __device__ void last_arrival_resets(uint32_t* out) {  // it knows by the count that it is the last
  __shared__ uint32_t c;
  if (threadIdx.x == 0) c = 0;
  __syncthreads();
  if (R ? atomicAdd(&c, 1) == 127 : (atomicAdd(&c, 1), threadIdx.x == 127)) c = 0;
  __syncthreads();
  out[threadIdx.x & 63] = c;
}
template <bool R> __device__ void counted_in_the_dark(uint32_t* out) {  // a fence after an atomic that tells its warp nothing
  __shared__ uint32_t c, data;
  if (threadIdx.x == 0) { c = 0; data = 0; }
  __syncthreads();
  if (threadIdx.x == 0) { data = 7; __threadfence_block(); atomicAdd(&c, 1); }
  if (threadIdx.x == 96) {
    if (R) { while (atomicAdd(&c, 0) == 0) {} }
    else atomicAdd(&c, 1);
    __threadfence_block();
    out[0] = data;
  }
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
    for (uint32_t k = rounds; k > 0; k--) { s = k - 1; EMIT(""); }
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

// ---- named barriers

template <bool R> __device__ void arrives_ahead(uint32_t* out) {  // a producer that nobody holds back
  __shared__ uint32_t s[2][32];
  uint32_t l = threadIdx.x & 31, sum = 0;
  for (uint32_t k = 0; k < 4; k++) {
    if (threadIdx.x < 32) {
      if (R && k >= 2) { if (k & 1) EMIT("bar.sync 4, 64;"); else EMIT("bar.sync 3, 64;"); }
      s[k & 1][l] = k;
      if (k & 1) EMIT("bar.arrive 2, 64;"); else EMIT("bar.arrive 1, 64;");
    } else if (threadIdx.x < 64) {
      if (k & 1) EMIT("bar.sync 2, 64;"); else EMIT("bar.sync 1, 64;");
      sum += s[k & 1][31 - l];
      if (R && k < 2) { if (k & 1) EMIT("bar.arrive 4, 64;"); else EMIT("bar.arrive 3, 64;"); }
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

// ---- fences of the proxies: of what lies before them, of the memory that they name

__device__ __forceinline__ void copy_out(uint32_t* to, const void* from) {
  EMIT("");
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], 256;" ::"l"(to), "r"(address(from)) : "memory");
  EMIT("cp.async.bulk.commit_group;\ncp.async.bulk.wait_group 0;");
}
template <bool R> __device__ void fence_before_store(uint32_t* out) {
  __shared__ __align__(128) uint32_t s[64];
  if (!R) proxy_fence();
  if (threadIdx.x < 64) s[threadIdx.x] = threadIdx.x;
  if (R) proxy_fence();
  __syncthreads();
  if (threadIdx.x == 0) copy_out(out, s);
}
template <bool R> __device__ void fence_between_stores(uint32_t* out) {  // the first half of the bytes lies before it
  __shared__ __align__(128) uint32_t s[64];
  if (threadIdx.x < 32) {
    s[threadIdx.x] = 1;
    proxy_fence();
    s[32 + threadIdx.x] = 2;
    if (R) proxy_fence();
  }
  __syncthreads();
  if (threadIdx.x == 0) copy_out(out, s);
}
template <bool R> __device__ void fence_of_global(uint32_t* out) {
  __shared__ __align__(128) uint32_t s[64];
  if (threadIdx.x < 64) s[threadIdx.x] = threadIdx.x;
  if (R) EMIT("fence.proxy.async;"); else EMIT("fence.proxy.async.global;");
  __syncthreads();
  if (threadIdx.x == 0) copy_out(out, s);
}
template <bool R> __device__ void last_adds_up(uint32_t* out) {  // who comes last must fence behind its ticket, too
  __shared__ uint32_t part[4], n;
  if (threadIdx.x == 0) n = 0;
  __syncthreads();
  if (threadIdx.x % 32 == 0) {
    part[threadIdx.x / 32] = threadIdx.x;
    __threadfence_block();
    if (atomicAdd(&n, 1) == 3) {
      if (R) __threadfence_block();
      out[0] = part[0] + part[1] + part[2] + part[3];
    }
  }
}

PAIR(fence_before_store) PAIR(fence_between_stores) PAIR(fence_of_global) PAIR(last_adds_up)
PAIR(counter) PAIR(counter_again) PAIR(masked_counter) PAIR(volatile_after_store) PAIR(byte_of_a_word)
PAIR(vector_clear) PAIR(spin_lock) PAIR(strong_hides_release) PAIR_IN(copied_then_counted)
PAIR(two_volatile_writers) PAIR(read_after_own_atomic) PAIR(last_warp_reads) PAIR(last_of_all) PAIR(last_arrival_resets)
PAIR(counted_in_the_dark) PAIR(reset_after_counting) PAIR(reset_to_the_same)
PAIR(same_value_then_another) PAIR(and_back_again) PAIR(fence_for_barrier) PAIR(arrives_ahead) PAIR(runs_ahead)
PAIR(counts_ahead)
