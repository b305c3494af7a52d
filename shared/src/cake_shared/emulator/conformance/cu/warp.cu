// Votes, shuffles, match, redux, elect and barriers of warps and named barriers of CTAs.
#include "common.cuh"

extern "C" __global__ void votes(const uint32_t* in, uint32_t* out) {
  uint32_t lane = threadIdx.x & 31, v = in[threadIdx.x];
  uint32_t* p = out + threadIdx.x * 8;
  p[0] = __ballot_sync(~0u, v & 1);
  p[1] = __any_sync(~0u, v == 7) | __all_sync(~0u, v != 7) << 1;
  int uniform;
  asm volatile("{ .reg .pred p, q; setp.gt.u32 p, %1, 15; vote.sync.uni.pred q, p, 0xffffffff; selp.s32 %0, 1, 0, q; }"
               : "=r"(uniform) : "r"(v));
  p[2] = uniform;
  p[3] = p[4] = p[5] = 0;
  if (lane < 13) {
    p[3] = __ballot_sync(0x1fff, v & 2);
    p[4] = __activemask();
  } else {
    p[5] = __popc(__ballot_sync(0xffffe000u, v & 4)) + 100;
  }
  __syncwarp();
  uint32_t leader, is_leader;
  asm volatile("{ .reg .pred p; elect.sync %0|p, 0xffffffff; selp.u32 %1, 1, 0, p; }" : "=r"(leader), "=r"(is_leader));
  p[6] = __popc(__ballot_sync(~0u, is_leader));  // which lane is elected is the machine's choice
  p[7] = is_leader == (leader == lane);
}

template <int Mode>
__device__ uint32_t shuffle(uint32_t v, uint32_t b, uint32_t c) {
  uint32_t d, ok;
#define SHUFFLE(mode) asm volatile("{ .reg .pred p; shfl.sync." mode ".b32 %0|p, %2, %3, %4, 0xffffffff; selp.u32 %1, 1, 0, p; }" \
                                   : "=r"(d), "=r"(ok) : "r"(v), "r"(b), "r"(c));
  if (Mode == 0) SHUFFLE("up")
  if (Mode == 1) SHUFFLE("down")
  if (Mode == 2) SHUFFLE("bfly")
  if (Mode == 3) SHUFFLE("idx")
#undef SHUFFLE
  return d * 2 + ok;
}

extern "C" __global__ void shuffles(const uint32_t* in, uint32_t* out) {
  uint32_t lane = threadIdx.x & 31, v = in[threadIdx.x] & 0xffff;
  uint32_t* p = out + threadIdx.x * 16;
  const uint32_t segments[4] = {0, 16 << 8, 24 << 8, 30 << 8};  // whole warp, halves, eights, pairs
  for (int k = 0; k < 4; k++) {
    uint32_t mask = segments[k];
    p[4 * k + 0] = shuffle<0>(v, 1 + k, mask);
    p[4 * k + 1] = shuffle<1>(v, 3 - k, mask | 31);
    p[4 * k + 2] = shuffle<2>(v, 5 * k + 1, mask | 31);
    p[4 * k + 3] = shuffle<3>(v, v >> 3, mask | 31);
  }
  if (lane >= 8 && lane < 24) p[0] += __shfl_sync(0x00ffff00u, v, 8 + (lane * 7 & 15));
}

extern "C" __global__ void matches(const uint32_t* in, uint32_t* out) {
  uint32_t v = in[threadIdx.x] & 7;
  uint32_t* p = out + threadIdx.x * 6;
  int same;
  p[0] = __match_any_sync(~0u, v);
  p[1] = __match_any_sync(~0u, static_cast<unsigned long long>(v & 1) << 40);
  p[2] = __match_all_sync(~0u, v, &same) + same;
  p[3] = __match_all_sync(~0u, threadIdx.x / 32, &same) + same;
  p[4] = p[5] = 0;
  if (v & 1) p[4] = __match_any_sync(__activemask(), v) & 1;
  else p[5] = 3;
}

extern "C" __global__ void reductions(const uint32_t* in, uint32_t* out) {
  uint32_t lane = threadIdx.x & 31, v = in[threadIdx.x];
  int s = static_cast<int>(v);
  uint32_t* p = out + threadIdx.x * 9;
  p[0] = __reduce_add_sync(~0u, v);
  p[1] = __reduce_min_sync(~0u, v);
  p[2] = __reduce_max_sync(~0u, v);
  p[3] = static_cast<uint32_t>(__reduce_add_sync(~0u, s));
  p[4] = static_cast<uint32_t>(__reduce_min_sync(~0u, s));
  p[5] = static_cast<uint32_t>(__reduce_max_sync(~0u, s));
  p[6] = __reduce_and_sync(~0u, v | 0xff00ff00u);
  p[7] = __reduce_or_sync(~0u, v & 0x0f0f0f0fu);
  if (lane & 1) p[8] = __reduce_xor_sync(0xaaaaaaaau, v);
  else p[8] = __reduce_add_sync(0x55555555u, v);
}

// Two producer warps and two consumer warps hand 8 rounds of data over through two named barriers.
extern "C" __global__ void named_barriers(const uint32_t* in, uint32_t* out) {
  __shared__ uint32_t slots[64];
  int warp = threadIdx.x / 32, t = threadIdx.x & 63;
  if (warp < 2) {
    for (int round = 0; round < 8; round++) {
      if (round) asm volatile("bar.sync 2, 128;" ::: "memory");
      slots[t] = in[t] * (round + 1);
      asm volatile("bar.arrive 1, 128;" ::: "memory");
    }
  } else {
    uint32_t r = 0;
    for (int round = 0; round < 8; round++) {
      asm volatile("bar.sync 1, 128;" ::: "memory");
      r = r * 7 + slots[t ^ 5];
      if (round < 7) asm volatile("bar.arrive 2, 128;" ::: "memory");
    }
    out[t] = r;
  }
}

extern "C" __global__ void reducing_barriers(const uint32_t* in, uint32_t* out) {
  uint32_t v = in[threadIdx.x];
  uint32_t* p = out + threadIdx.x * 4;
  p[0] = __syncthreads_count(v & 1);
  p[1] = __syncthreads_and(v != 12345);
  p[2] = __syncthreads_or(v == 3);
  uint32_t count = 0;
  if (threadIdx.x < 64)
    asm volatile("{ .reg .pred p; setp.gt.u32 p, %1, 9; barrier.cta.red.popc.aligned.u32 %0, 3, 64, p; }" : "=r"(count) : "r"(v));
  p[3] = count;
}

// Barriers reached by the two halves of a warp at different places of the code.
extern "C" __global__ void diverged_barrier(uint32_t* out) {
  __shared__ uint32_t slots[64];
  uint32_t i = threadIdx.x, r;
  if (i & 1) {
    slots[i] = i * 3;
    asm volatile("barrier.cta.sync 0;" ::: "memory");
    r = slots[i - 1] + 1;
  } else {
    slots[i] = i * 5;
    asm volatile("barrier.cta.sync 0;" ::: "memory");
    r = slots[i + 1] + 2;
  }
  out[i] = r;
}
