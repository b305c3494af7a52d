// mbarriers in shared memory: initialisation, arrivals, expected bytes, waits. On top of CCCL's <cuda/ptx>.
//
// A phase completes when all its arrivals and all the bytes that it expects are there. Waiting takes the parity of the
// phase that is waited for: 0 for the first, 1 for the second, and so on; a wait for parity 1 on a fresh barrier returns
// at once.
#pragma once

#include <cuda/ptx>
#include <stdint.h>

#include "cake/ptx/warp.cuh"

namespace cake::ptx {

__device__ __forceinline__ void mbarrier_init(uint64_t* barrier, uint32_t arrivals) {
  cuda::ptx::mbarrier_init(barrier, arrivals);
}

// After the initialisation of barriers and before anybody else, copy engine and other CTAs of the cluster included, uses
// them; a barrier of the CTA or the cluster must follow.
__device__ __forceinline__ void mbarrier_init_fence() {
  cuda::ptx::fence_mbarrier_init(cuda::ptx::sem_release, cuda::ptx::scope_cluster);
}

__device__ __forceinline__ void mbarrier_arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// Arrives at the same barrier of another CTA of the cluster. It orders what the asynchronous proxy has read, and says nothing
// of ordinary writes: an arrival that releases them to the cluster is a fence of the whole device, a microsecond each time.
__device__ __forceinline__ void mbarrier_arrive_remote(uint64_t* barrier, uint32_t cta_rank) {
  asm volatile(
      "{\n.reg .b32 remote;\n"
      "mapa.shared::cluster.u32 remote, %0, %1;\n"
      "mbarrier.arrive.shared::cluster.b64 _, [remote];\n}"
      ::"r"(shared_address(barrier)), "r"(cta_rank)
      : "memory");
}

// One arrival that also says how many bytes of asynchronous copies the phase waits for.
__device__ __forceinline__ void mbarrier_arrive_expect_bytes(uint64_t* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ void mbarrier_expect_bytes(uint64_t* barrier, uint32_t bytes) {
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
}

__device__ __forceinline__ bool mbarrier_try_wait(uint64_t* barrier, uint32_t parity) {
  return cuda::ptx::mbarrier_try_wait_parity(barrier, parity);
}

// Whether the phase of that parity is complete, without waiting: asked early, its answer is there when it is needed.
__device__ __forceinline__ bool mbarrier_test_wait(uint64_t* barrier, uint32_t parity) {
  return cuda::ptx::mbarrier_test_wait_parity(barrier, parity);
}

__device__ __forceinline__ void mbarrier_wait(uint64_t* barrier, uint32_t parity) {
  while (!mbarrier_try_wait(barrier, parity)) {
  }
}

// As mbarrier_wait, and what other CTAs of the cluster wrote before they arrived is visible.
__device__ __forceinline__ void mbarrier_wait_cluster(uint64_t* barrier, uint32_t parity) {
  while (!cuda::ptx::mbarrier_try_wait_parity(cuda::ptx::sem_acquire, cuda::ptx::scope_cluster, barrier, parity)) {
  }
}

}  // namespace cake::ptx
