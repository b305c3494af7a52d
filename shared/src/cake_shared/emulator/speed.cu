// What the emulator's speed is measured on.
#include <cstdint>

// Arithmetic that is uniform over a warp; 256 threads.
extern "C" __global__ void __launch_bounds__(256) arithmetic(float* out, int rounds) {
  float a = threadIdx.x, b = 1.5f, c = 0.25f, d = 2.0f;
  uint32_t h = threadIdx.x * 2654435761u;
  for (int k = 0; k < rounds; k++) {
#pragma unroll
    for (int j = 0; j < 8; j++) {
      a = fmaf(a, b, c);
      c = fmaf(c, d, a);
      h = (h ^ h >> 13) * 0x9e3779b1u + j;
      b = a * 0.5f + c;
      d = fminf(d, b) + 1.0f;
    }
  }
  out[blockIdx.x * 256 + threadIdx.x] = a + b + c + d + h;
}

// A tile in shared memory, written and read by all warps between barriers; 256 threads.
extern "C" __global__ void __launch_bounds__(256) shared_tile(const float* in, float* out, int rounds) {
  __shared__ float tile[256];
  float a = in[blockIdx.x * 256 + threadIdx.x];
  for (int k = 0; k < rounds; k++) {
    tile[threadIdx.x] = a;
    __syncthreads();
    for (int j = 0; j < 8; j++) a = fmaf(tile[threadIdx.x + 32 * j & 255], 0.5f, a * 0.25f);
    __syncthreads();
  }
  out[blockIdx.x * 256 + threadIdx.x] = a;
}
