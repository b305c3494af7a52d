// How much of the end of a segment its exit state depends on.
#pragma once

#include "cake/gdn/any/forgets.cuh"
#include "cake/gdn/any/places.cuh"

namespace cake::gdn {

// The sum of the gates of one chunk of a value head.
__device__ __forceinline__ float chunk_decay(const float* scalars, int64_t chunk, int heads, int head) {
  return scalars[(chunk * heads + head) * kScalarFloats + kLog2Decay * kChunk + kChunk - 1];
}

// How many of a segment's last chunks forget any earlier state, by one warp; 0 if all of them together do not. decay(back) is that of
// the chunk `back` before the last one, 0 where there is none.
template <class Decay>
__device__ __forceinline__ int forgetting_chunks(int chunks, const Decay& decay) {
  const int lane = threadIdx.x & 31;
  float before = 0.f;
  for (int done = 0; done < chunks; done += 32) {
    float sum = decay(done + lane);
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const float other = __shfl_up_sync(~0u, sum, step);
      if (lane >= step) sum = __fadd_rn(sum, other);
    }
    sum = __fadd_rn(sum, before);
    const unsigned reached = __ballot_sync(~0u, done + lane < chunks && sum <= kForgottenLog2);
    if (reached != 0) return done + __ffs(static_cast<int>(reached));
    before = __shfl_sync(~0u, sum, 31);
  }
  return 0;
}

__device__ __forceinline__ int forgetting_chunks(const float* scalars, const Heads& heads, const SegmentPlace& segment, int head) {
  const int last = segment.first_chunk + segment.chunks - 1;
  return forgetting_chunks(segment.chunks, [&](int back) {
    return back < segment.chunks ? chunk_decay(scalars, last - back, heads.value_heads, head) : 0.f;
  });
}

// As many of a whole segment's where nothing that it is entered with is left; else 0. By one warp.
__device__ __forceinline__ int forgotten_tail(const float* scalars, const Heads& heads, int first_chunk, int head) {
  static_assert(cake::work::kSegmentChunks == 64);
  const int lane = threadIdx.x & 31;
  const float early = chunk_decay(scalars, first_chunk + lane, heads.value_heads, head);
  const float late = chunk_decay(scalars, first_chunk + 32 + lane, heads.value_heads, head);
  if (!forgets(__fadd_rn(__fadd_rn(0.f, early), late))) return 0;
  return forgetting_chunks(64, [&](int back) { return __shfl_sync(~0u, back < 32 ? late : early, 31 - lane); });
}

}  // namespace cake::gdn
