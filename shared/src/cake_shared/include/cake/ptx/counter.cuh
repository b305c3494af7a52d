// Counters in global memory by which CTAs tell one another what they have written, without waiting.
#pragma once

#include <stdint.h>

namespace cake::ptx {

// Adds to a counter and returns what it was. Who finds this addition in it sees all writes before it, of this thread and of those
// that it has synchronised with; this thread sees all writes before the additions that it finds.
__device__ __forceinline__ uint32_t count_in(uint32_t* counter, uint32_t by) {
  uint32_t before;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(by) : "memory");
  return before;
}

// What it is; the writes before the additions found are seen.
__device__ __forceinline__ uint32_t read_count(const uint32_t* counter) {
  uint32_t now;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(counter) : "memory");
  return now;
}

}  // namespace cake::ptx
