// Copies by the bulk copy engine, whole ranges and boxes of tensor maps, and what orders them. On top of CCCL's
// <cuda/ptx> where it wraps the instruction. One thread issues a copy.
//
// Shared addresses are multiples of 16 bytes (128 for boxes, 1024 where a 128-byte swizzle starts over), sizes multiples
// of 16. Loads signal the bytes that they brought to an mbarrier of the CTA; stores are waited for in groups.
#pragma once

#include <cuda/ptx>
#include <stdint.h>

#include "cake/ptx/warp.cuh"

namespace cake::ptx {

// L2 policies as createpolicy.fractional makes them for a whole access.
inline constexpr uint64_t kEvictNormal = 0x1000000000000000ull;
inline constexpr uint64_t kEvictFirst = 0x12f0000000000000ull;
inline constexpr uint64_t kEvictLast = 0x14f0000000000000ull;

__device__ __forceinline__ void bulk_load(void* shared, const void* global, uint32_t bytes, uint64_t* barrier) {
  cuda::ptx::cp_async_bulk(cuda::ptx::space_cluster, cuda::ptx::space_global, shared, global, bytes, barrier);
}

__device__ __forceinline__ void bulk_store(void* global, const void* shared, uint32_t bytes) {
  cuda::ptx::cp_async_bulk(cuda::ptx::space_global, cuda::ptx::space_shared, global, shared, bytes);
}

__device__ __forceinline__ void bulk_store(void* global, const void* shared, uint32_t bytes, uint64_t l2_policy) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group.L2::cache_hint [%0], [%1], %2, %3;" ::"l"(global),
               "r"(shared_address(shared)), "r"(bytes), "l"(l2_policy)
               : "memory");
}

// The box of the map at these coordinates, innermost first; what lies outside of the tensor reads as zero and counts as
// bytes.
template <int kRank>
__device__ __forceinline__ void tensor_load(void* shared, const void* map, const int32_t (&coordinates)[kRank],
                                            uint64_t* barrier) {
  cuda::ptx::cp_async_bulk_tensor(cuda::ptx::space_cluster, cuda::ptx::space_global, shared, map, coordinates, barrier);
}

__device__ __forceinline__ void tensor_load(void* shared, const void* map, const int32_t (&coordinates)[2],
                                            uint64_t* barrier, uint64_t l2_policy) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, "
      "%3}], [%4], %5;"
      ::"r"(shared_address(shared)), "l"(map), "r"(coordinates[0]), "r"(coordinates[1]), "r"(shared_address(barrier)),
        "l"(l2_policy)
      : "memory");
}

__device__ __forceinline__ void tensor_load(void* shared, const void* map, const int32_t (&coordinates)[3],
                                            uint64_t* barrier, uint64_t l2_policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, "
      "%3, %4}], [%5], %6;"
      ::"r"(shared_address(shared)), "l"(map), "r"(coordinates[0]), "r"(coordinates[1]), "r"(coordinates[2]),
        "r"(shared_address(barrier)), "l"(l2_policy)
      : "memory");
}

// To the same place of every CTA of the cluster whose bit is set, signalling the same barrier of each.
template <int kRank>
__device__ __forceinline__ void tensor_load_multicast(void* shared, const void* map, const int32_t (&coordinates)[kRank],
                                                      uint64_t* barrier, uint16_t cta_mask) {
  cuda::ptx::cp_async_bulk_tensor(cuda::ptx::space_cluster, cuda::ptx::space_global, shared, map, coordinates, barrier,
                                  cta_mask);
}

// Writes the part of the box that lies in the tensor.
template <int kRank>
__device__ __forceinline__ void tensor_store(const void* map, const int32_t (&coordinates)[kRank], const void* shared) {
  cuda::ptx::cp_async_bulk_tensor(cuda::ptx::space_global, cuda::ptx::space_shared, map, coordinates, shared);
}

__device__ __forceinline__ void tensor_store(const void* map, const int32_t (&coordinates)[3], const void* shared,
                                             uint64_t l2_policy) {
  asm volatile(
      "cp.async.bulk.tensor.3d.global.shared::cta.tile.bulk_group.L2::cache_hint [%0, {%1, %2, %3}], [%4], %5;"
      ::"l"(map), "r"(coordinates[0]), "r"(coordinates[1]), "r"(coordinates[2]), "r"(shared_address(shared)), "l"(l2_policy)
      : "memory");
}

// Adds the part of the box that lies in the tensor to what is there, element by element, in any order beside other adds.
template <int kRank>
__device__ __forceinline__ void tensor_add(const void* map, const int32_t (&coordinates)[kRank], const void* shared) {
  cuda::ptx::cp_reduce_async_bulk_tensor(cuda::ptx::space_global, cuda::ptx::space_shared, cuda::ptx::op_add, map,
                                         coordinates, shared);
}

__device__ __forceinline__ void prefetch_tensor_map(const void* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

__device__ __forceinline__ void bulk_commit() { cuda::ptx::cp_async_bulk_commit_group(); }

// Until at most kPending of this thread's store groups are unfinished.
template <int kPending>
__device__ __forceinline__ void bulk_wait() {
  cuda::ptx::cp_async_bulk_wait_group(cuda::ptx::n32_t<kPending>());
}

// Until at most kPending of this thread's store groups still read shared memory.
template <int kPending>
__device__ __forceinline__ void bulk_wait_read() {
  cuda::ptx::cp_async_bulk_wait_group_read(cuda::ptx::n32_t<kPending>());
}

// Orders this thread's ordinary accesses to shared memory before what copy engine and tensor cores do to it after a
// barrier, and the reverse.
__device__ __forceinline__ void fence_async_shared() {
  cuda::ptx::fence_proxy_async(cuda::ptx::space_shared);
}

}  // namespace cake::ptx
