// Helpers of the conformance kernels.
#pragma once
#include <cstdint>

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// A fixed scrambling of 32 bits (Murmur3's finaliser): inputs that every thread can make for itself.
__device__ __forceinline__ uint32_t scramble(uint32_t x) {
  x ^= x >> 16;
  x *= 0x85ebca6bu;
  x ^= x >> 13;
  x *= 0xc2b2ae35u;
  return x ^ (x >> 16);
}
