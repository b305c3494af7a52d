// Floating-point atomics on values at the edges of their types: a thread adds its own pair, so that no order matters.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include "common.cuh"

// `global` and `pairs` start as copies of `a`; so does what lies in shared memory.
extern "C" __global__ void atomic_floats(const float* a, const float* b, float* global, float* returned, float* shared,
                                         float* generic, float* reduced, float* pairs) {
  __shared__ float mine[64];
  uint32_t t = threadIdx.x, i = blockIdx.x * blockDim.x + t;
  returned[i] = atomicAdd(global + i, b[i]);
  mine[t] = a[i];
  asm volatile("red.shared.add.f32 [%0], %1;" ::"r"(shared_address(mine + t)), "f"(b[i]) : "memory");
  shared[i] = mine[t];
  mine[t] = a[i];
  float before;
  asm volatile("atom.add.f32 %0, [%1], %2;" : "=f"(before) : "l"(mine + t), "f"(b[i]) : "memory");
  generic[i] = mine[t];
  asm volatile("red.global.add.f32 [%0], %1;" ::"l"(reduced + i), "f"(b[i]) : "memory");
  asm volatile("red.global.add.v2.f32 [%0], {%1, %2};" ::"l"(pairs + 2 * i), "f"(b[i]), "f"(a[i]) : "memory");
}

extern "C" __global__ void atomic_doubles(const double* a, const double* b, double* global, double* shared) {
  __shared__ double mine[64];
  uint32_t t = threadIdx.x, i = blockIdx.x * blockDim.x + t;
  atomicAdd(global + i, b[i]);
  mine[t] = a[i];
  atomicAdd(mine + t, b[i]);
  shared[i] = mine[t];
}

// Two halves a thread.
template <class Pair>
__device__ void halves(const uint32_t* a, const uint32_t* b, uint32_t* global, uint32_t* shared) {
  __shared__ uint32_t mine[64];
  uint32_t t = threadIdx.x, i = blockIdx.x * blockDim.x + t;
  Pair operand = *reinterpret_cast<const Pair*>(b + i);
  atomicAdd(reinterpret_cast<Pair*>(global + i), operand);
  mine[t] = a[i];
  atomicAdd(reinterpret_cast<Pair*>(mine + t), operand);
  shared[i] = mine[t];
}
extern "C" __global__ void atomic_halves(const uint32_t* a, const uint32_t* b, uint32_t* global, uint32_t* shared) {
  halves<__half2>(a, b, global, shared);
}
extern "C" __global__ void atomic_bfloats(const uint32_t* a, const uint32_t* b, uint32_t* global, uint32_t* shared) {
  halves<__nv_bfloat162>(a, b, global, shared);
}
