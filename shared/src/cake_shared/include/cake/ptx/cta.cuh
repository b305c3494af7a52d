// What the warps of a CTA and the CTAs of a cluster share: named barriers, the cluster's barrier and ranks, registers.
#pragma once

#include <stdint.h>

namespace cake::ptx {

// Barrier `id` (1 to 15; 0 is __syncthreads) of `threads` threads of the CTA, whole warps.
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
  asm volatile("barrier.cta.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Arrives at it without waiting; the others of the `threads` wait, or arrive.
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
  asm volatile("barrier.cta.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Waits like named_barrier_sync; whether any of the threads says so.
__device__ __forceinline__ bool named_barrier_or(int id, int threads, bool mine) {
  uint32_t any;
  asm volatile(
      "{\n.reg .pred mine, any;\nsetp.ne.u32 mine, %1, 0;\n"
      "barrier.cta.red.or.pred any, %2, %3, mine;\nselp.u32 %0, 1, 0, any;\n}"
      : "=r"(any)
      : "r"(static_cast<uint32_t>(mine)), "r"(id), "r"(threads)
      : "memory");
  return any != 0;
}

__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Without ordering memory: where barriers were initialised (and fenced) before it, or nothing is passed on.
__device__ __forceinline__ void cluster_sync_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

// threadIdx.x, read where it is asked for.
__device__ __forceinline__ int thread_index() {
  int index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  return index;
}

// The same value, of which the compiler knows nothing: what follows from it is computed where it is needed.
__device__ __forceinline__ int opaque(int x) {
  asm volatile("" : "+r"(x));
  return x;
}
template <class T>
__device__ __forceinline__ T* opaque(T* x) {
  asm volatile("" : "+l"(x));
  return x;
}

__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// By all warps of a warpgroup: hand registers back, or take what others handed back. kCount is a multiple of 8.
template <int kCount>
__device__ __forceinline__ void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}

template <int kCount>
__device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}

}  // namespace cake::ptx
