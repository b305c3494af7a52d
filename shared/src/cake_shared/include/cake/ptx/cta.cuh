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

__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Without ordering memory: where barriers were initialised (and fenced) before it, or nothing is passed on.
__device__ __forceinline__ void cluster_sync_relaxed() {
  asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
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
