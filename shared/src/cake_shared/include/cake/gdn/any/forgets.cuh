// Whether a segment's gates leave anything of a state before it. One function for the stage that makes M and for those that read it:
// where it says that nothing is left, M is not written.
#pragma once

#include "cake/gdn/rule_params.h"
#include "cake/work/chunks.h"

namespace cake::gdn {

// The lane's part of the sum of a whole segment's gates.
__device__ __forceinline__ float decay_part(const float* scalars, int32_t first_chunk, int heads, int head) {
  const int lane = threadIdx.x % 32;
  float sum = 0.f;
#pragma unroll
  for (int chunk = 0; chunk < cake::work::kSegmentChunks; chunk += 32) {
    const int64_t record = int64_t{first_chunk + chunk + lane} * heads + head;
    sum = __fadd_rn(sum, scalars[record * kScalarFloats + kLog2Decay * kChunk + kChunk - 1]);
  }
  return sum;
}

// Whether a state before the segment counts as gone behind its gates: its M is zero. By every warp for itself.
__device__ __forceinline__ bool forgets(float decay_part) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) decay_part = __fadd_rn(decay_part, __shfl_xor_sync(~0u, decay_part, step));
  return decay_part <= kForgottenLog2;
}

__device__ __forceinline__ bool forgets(const float* scalars, int32_t first_chunk, int heads, int head) {
  return forgets(decay_part(scalars, first_chunk, heads, head));
}

}  // namespace cake::gdn
