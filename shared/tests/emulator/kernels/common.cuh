// One-instruction helpers of the mutant kernels.
#pragma once
#include <cuda.h>
#include <cstdint>

__device__ __forceinline__ uint32_t address(const void* p) { return static_cast<uint32_t>(__cvta_generic_to_shared(p)); }
__device__ __forceinline__ void barrier_init(void* b, uint32_t count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(address(b)), "r"(count) : "memory");
}
__device__ __forceinline__ void barrier_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void expect(void* b, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(address(b)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void arrive(void* b) {
  asm volatile("mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(address(b)) : "memory");
}
__device__ __forceinline__ void wait(void* b, uint32_t parity) {
  asm volatile(
      "{ .reg .pred p;\nagain: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@!p bra again; }" ::"r"(address(b)),
      "r"(parity)
      : "memory");
}
__device__ __forceinline__ void proxy_fence() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void load_2d(void* to, const CUtensorMap* map, int x, int y, void* b) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
          address(to)),
      "l"(map), "r"(x), "r"(y), "r"(address(b))
      : "memory");
}
__device__ __forceinline__ bool elect() {
  uint32_t chosen;
  asm volatile("{ .reg .pred p; elect.sync _|p, 0xffffffff; selp.b32 %0, 1, 0, p; }" : "=r"(chosen));
  return chosen;
}
// A kernel f<true> that is right and its twin f<false> that is not; in, out.
#define PAIR(f) \
  extern "C" __global__ void f##_right(const uint32_t*, uint32_t* out) { f<true>(out); } \
  extern "C" __global__ void f##_wrong(const uint32_t*, uint32_t* out) { f<false>(out); }
#define PAIR_IN(f) \
  extern "C" __global__ void f##_right(const uint32_t* in, uint32_t* out) { f<true>(in, out); } \
  extern "C" __global__ void f##_wrong(const uint32_t* in, uint32_t* out) { f<false>(in, out); }
#define EMIT(what) asm volatile(what ::: "memory")
__device__ __forceinline__ void meet(bool all) { if (all) __syncthreads(); else __syncwarp(); }
__device__ __forceinline__ void two_warps() { EMIT("bar.sync 1, 64;"); }
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
  EMIT("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;");
}
__device__ __forceinline__ void copy_in(void* to, const void* from, uint32_t bytes, void* b) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(address(to)), "l"(from),
               "r"(bytes), "r"(address(b)) : "memory");
}
