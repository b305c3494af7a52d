// Atomics and reductions in global and shared memory. Results do not depend on the order of the threads: sums of
// returned values are written where single ones would.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include "common.cuh"

extern "C" __global__ void integer_atomics(uint32_t* words, unsigned long long* longs, uint32_t* returned) {
  uint32_t i = blockIdx.x * blockDim.x + threadIdx.x, v = scramble(i), slot = i & 3;
  atomicAdd(words + slot, v);
  atomicSub(words + 4 + slot, v);
  atomicMin(words + 8 + slot, v);
  atomicMax(words + 12 + slot, v);
  atomicMin(reinterpret_cast<int*>(words) + 16 + slot, static_cast<int>(v));
  atomicMax(reinterpret_cast<int*>(words) + 20 + slot, static_cast<int>(v));
  atomicAnd(words + 24 + slot, v | 0xf0f0f0f0u);
  atomicOr(words + 28 + slot, v & 0x00ff00ffu & (1u << (v & 31)));
  atomicXor(words + 32 + slot, v);
  uint32_t order = atomicInc(words + 36 + slot, 16);
  uint32_t down = atomicDec(words + 40 + slot, 20);
  atomicAdd(longs + slot, 0x100000001ull * v);
  atomicMin(longs + 4 + slot, 0x123456789ull * v);
  atomicMax(reinterpret_cast<long long*>(longs) + 8 + slot, static_cast<long long>(0x9123456789abcdefull * v));
  atomicXor(longs + 12 + slot, 0x1000000010001ull * v);
  atomicAdd(returned, order);
  atomicAdd(returned + 1, down);
  // A ticket each: the sum of all of them is known.
  atomicAdd(returned + 2, atomicAdd(returned + 3, 1u));
  // A lock-free maximum by compare-and-swap.
  uint32_t seen = 0, wanted = v & 0xffff;
  while (seen < wanted) {
    uint32_t before = atomicCAS(words + 44, seen, wanted);
    if (before == seen) break;
    seen = before;
  }
  if (i < 2) returned[4 + i] = atomicExch(words + 45 + i, i + 99);
}

extern "C" __global__ void float_atomics(float* f, double* d, __half2* h, __nv_bfloat162* b) {
  uint32_t i = blockIdx.x * blockDim.x + threadIdx.x, slot = i & 3;
  float small = static_cast<float>(scramble(i) & 15);  // whole numbers: every order gives the same sum
  atomicAdd(f + slot, small);
  atomicAdd(d + slot, small * 0.5);
  if (i < 64) {
    atomicAdd(h + slot, __floats2half2_rn(small, -small));
    atomicAdd(b + slot, __floats2bfloat162_rn(small, 1.0f));
    atomicAdd(reinterpret_cast<__half*>(h + 4), __float2half(1.0f));
    atomicAdd(reinterpret_cast<__nv_bfloat16*>(b + 4) + 1, __float2bfloat16(2.0f));
  }
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(f + 4), "f"(small), "f"(1.0f), "f"(-small), "f"(2.0f)
               : "memory");
  asm volatile("red.global.add.v2.f32 [%0], {%1, %2};" ::"l"(f + 8), "f"(small), "f"(3.0f) : "memory");
  asm volatile("red.relaxed.gpu.global.add.f32 [%0], %1;" ::"l"(f + 10), "f"(small) : "memory");
}

extern "C" __global__ void shared_atomics(uint32_t* out) {
  __shared__ uint32_t words[40];
  __shared__ unsigned long long longs[4];
  __shared__ float floats[4];
  __shared__ uint16_t shorts[4];
  uint32_t i = threadIdx.x, v = scramble(i + 1000), slot = i & 3;
  if (i < 40) words[i] = i >= 8 && i < 12 ? 0xffffffffu : i >= 24 && i < 28 ? 0xffffffffu : 0;
  if (i < 4) longs[i] = i, floats[i] = 0, shorts[i] = 0;
  __syncthreads();
  atomicAdd(words + slot, v);
  atomicMax(words + 4 + slot, v);
  atomicMin(words + 8 + slot, v);
  atomicMin(reinterpret_cast<int*>(words) + 12 + slot, static_cast<int>(v));
  atomicOr(words + 16 + slot, 1u << (v & 31));
  atomicXor(words + 20 + slot, v);
  atomicAnd(words + 24 + slot, v | 0xff00ff00u);
  atomicInc(words + 28 + slot, 12);
  atomicDec(words + 32 + slot, 9);
  atomicAdd(longs + slot, 0x200000003ull * v);
  atomicAdd(floats + slot, static_cast<float>(v & 7));
  unsigned short seen = 0;
  while (true) {
    unsigned short before = atomicCAS(reinterpret_cast<unsigned short*>(shorts) + slot, seen, static_cast<unsigned short>(seen + 1));
    if (before == seen) break;
    seen = before;
  }
  atomicExch(words + 36 + slot, 77u);
  __syncthreads();
  if (i < 40) out[i] = words[i];
  if (i < 4) {
    out[40 + i] = static_cast<uint32_t>(longs[i]);
    out[44 + i] = static_cast<uint32_t>(longs[i] >> 32);
    out[48 + i] = __float_as_uint(floats[i]);
    out[52 + i] = shorts[i];
  }
}
