// Divergence, loops, switches, calls and thread-local arrays.
#include "common.cuh"

// Steps of the Collatz sequence, with a break and a continue that lanes take at different times.
extern "C" __global__ void divergent_loops(const uint32_t* in, uint32_t* out, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  uint32_t v = in[i], steps = 0, odd = 0;
  while (v != 1) {
    if (++steps > 400) break;
    if ((v & 1) == 0) {
      v >>= 1;
      continue;
    }
    v = 3 * v + 1;
    for (uint32_t k = 0; k < (v & 3); k++) odd += k ^ steps;
  }
  __syncwarp();
  out[i] = steps * 65536 + (odd & 65535);
}

extern "C" __global__ void switches(const uint32_t* in, uint32_t* out, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  uint32_t v = in[i], r = 0;
  for (int round = 0; round < 4; round++) {
    switch (v % 11) {
      case 0: r += 7; break;
      case 1: r ^= v; break;
      case 2: r = r * 3 + 1;  // falls through
      case 3: r -= 5; break;
      case 4: r = ~r; break;
      case 5: r += v >> 3; break;
      case 6: if (r & 1) r <<= 1; else r ^= 0x55; break;
      case 7: r += __popc(v); break;
      case 8: r = __brev(r); break;
      case 9: return;  // the lane leaves without writing
      default: r += 1000; break;
    }
    v = scramble(v);
  }
  out[i] = r;
}

// Groups of lanes of different sizes meet again after each nesting level.
extern "C" __global__ void nested_reconvergence(uint32_t* out) {
  uint32_t lane = threadIdx.x & 31, r = 0;
  if (lane < 20) {
    r |= __ballot_sync(__activemask(), lane & 1) & 0;
    if (lane & 1) {
      for (uint32_t k = 0; k < lane; k++) r += k;
      if (lane > 10) r += 1000; else r += 2000;
    } else {
      r = 7 * lane;
    }
  } else {
    r = lane * lane;
  }
  __syncwarp();
  r += __shfl_sync(0xffffffffu, r, (lane + 1) & 31);
  out[threadIdx.x] = r;
}

struct Pair {
  uint32_t low, high;
  double weight;
};

__device__ __noinline__ Pair twist(Pair p, uint32_t k) {
  Pair q;
  q.low = p.high ^ k;
  q.high = p.low + k;
  q.weight = p.weight * 0.5 + k;
  return q;
}

__device__ __noinline__ uint32_t many(uint32_t a, uint64_t b, uint8_t c, float d, int16_t e) {
  return a + static_cast<uint32_t>(b >> 7) + c * 3u + static_cast<uint32_t>(d) + static_cast<uint32_t>(e);
}

__device__ __noinline__ uint32_t gcd(uint32_t a, uint32_t b) {
  while (b != 0) {
    uint32_t t = a % b;
    a = b;
    b = t;
  }
  return a;
}

__device__ __noinline__ uint32_t outer(uint32_t v) { return gcd(v & 0xff, v >> 8 & 0xff) * 2 + gcd(v >> 16 & 0xff, 30); }

extern "C" __global__ void calls(const uint32_t* in, uint32_t* out, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  uint32_t v = in[i];
  Pair p{v, ~v, 1.0};
  for (uint32_t k = 0; k < (v & 7); k++) p = twist(p, k);
  uint32_t r = p.low * 31 + p.high + static_cast<uint32_t>(p.weight * 16);
  if (v & 8) r += many(v, 0x123456789abcull * v, v & 0xff, (v & 0xffff) * 0.25f, static_cast<int16_t>(v));
  r += gcd(v & 0xfff, (v >> 12) & 0xfff) + outer(v);
  out[i] = r;
}

__device__ __noinline__ void bubble(uint32_t* values, int count) {
  for (int i = 0; i < count; i++)
    for (int k = 0; k + 1 < count - i; k++)
      if (values[k] > values[k + 1]) {
        uint32_t t = values[k];
        values[k] = values[k + 1];
        values[k + 1] = t;
      }
}

extern "C" __global__ void local_arrays(const uint32_t* in, uint32_t* out, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  uint32_t values[12];
  uint8_t bytes[16];
  double wide[4];
  for (int k = 0; k < 12; k++) values[k] = scramble(in[i] + k) & 0xffff;
  for (int k = 0; k < 16; k++) bytes[(k * 5) & 15] = static_cast<uint8_t>(values[k % 12] >> 3);
  for (int k = 0; k < 4; k++) wide[(in[i] + k) & 3] = k * 1.5;
  bubble(values, 3 + in[i] % 10);
  uint32_t r = 0;
  for (int k = 0; k < 12; k++) r = r * 33 + values[(k + in[i]) % 12];
  for (int k = 0; k < 16; k++) r = r * 31 + bytes[(in[i] >> 2) + k & 15];
  out[i] = r + static_cast<uint32_t>(wide[in[i] >> 5 & 3] * 4);
}
