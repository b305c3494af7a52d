// D[64 x 64] = A[64 x K] B[64 x K]^T in BF16 by one warpgroup and one copying warp, right as variant 0.
#include "common.cuh"

constexpr int kTile = 64, kStages = 3;
constexpr uint32_t kBytes = kTile * 64 * 2;
struct alignas(1024) Smem {
  uint8_t a[kStages][kBytes], b[kStages][kBytes];
  uint64_t full[kStages], empty[kStages];
};

__device__ __forceinline__ void mma(float (&c)[32], uint64_t a, uint64_t b) {
  asm volatile(
      "{ .reg .pred p; setp.eq.u32 p, 0, 0; wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, "
      "%14, %15, %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, %32, %33, p, 1, 1, 0, 0; }"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]), "+f"(c[8]), "+f"(c[9]),
        "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15]), "+f"(c[16]), "+f"(c[17]), "+f"(c[18]),
        "+f"(c[19]), "+f"(c[20]), "+f"(c[21]), "+f"(c[22]), "+f"(c[23]), "+f"(c[24]), "+f"(c[25]), "+f"(c[26]), "+f"(c[27]),
        "+f"(c[28]), "+f"(c[29]), "+f"(c[30]), "+f"(c[31])
      : "l"(a), "l"(b));
}

template <int Mutant>
__device__ void gemm(const CUtensorMap* map_a, const CUtensorMap* map_b, float* d, int steps) {
  extern __shared__ __align__(1024) uint8_t raw[];
  Smem& s = *reinterpret_cast<Smem*>(raw);
  int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
  if (threadIdx.x == 0) {
    for (int k = 0; k < kStages; k++) {
      barrier_init(&s.full[k], 1);
      barrier_init(&s.empty[k], Mutant == 1 ? 64 : Mutant == 15 ? 1 : 128);  // 1: two phases a round
    }
    barrier_fence();
  }
  __syncthreads();
  if (warp == 4) {
    if (elect())
      for (int k = 0; k < steps; k++) {
        int stage = k % kStages;
        if (Mutant != 2) wait(&s.empty[stage], k / kStages & 1 ^ 1);         // 2: overwrites tiles in use
        expect(&s.full[stage], Mutant == 3 ? 2 * kBytes + 16 : Mutant == 4 ? 2 * kBytes - 16 : 2 * kBytes);  // wrong transaction bytes
        load_2d(s.a[stage], map_a, k * 64, 0, &s.full[stage]);
        if (!(Mutant == 5 && k == 4)) load_2d(s.b[stage], map_b, k * 64, 0, &s.full[stage]);  // 5: a load is forgotten
      }
    return;
  }
  const uint64_t high = Mutant == 6 ? 64ull << 32 | 2ull << 62 : 64ull << 32 | 1ull << 62;  // 6: the wrong swizzle
  float c[32];
  for (int i = 0; i < 32; i++) c[i] = 0;
  for (int k = 0; k < steps; k++) {
    int stage = k % kStages;
    if (Mutant != 7) wait(&s.full[stage], k / kStages & 1);                  // 7: multiplies before the tiles are there
    if (Mutant == 9) reinterpret_cast<volatile uint16_t*>(s.a[stage])[threadIdx.x] = 0;  // generic writes, no proxy fence
    if (Mutant == 9) __syncwarp();
    if (Mutant != 10) asm volatile("wgmma.fence.sync.aligned;" ::: "memory");  // 10: registers written, then no fence
    for (int q = 0; q < 4; q++)
      mma(c, high | (address(s.a[stage]) + 32 * q) >> 4 & 0x3fff, high | (address(s.b[stage]) + 32 * q) >> 4 & 0x3fff);
    if (Mutant != 11) asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");  // 11: a group never committed
    if (Mutant == 12) arrive(&s.empty[stage]);                                // 12: freed before the product is done
    if (Mutant == 14 && k == 3) {                                              // 14: overwritten between barriers, before the wait
      asm volatile("bar.sync 1, 128;" ::: "memory");
      if (threadIdx.x == 70) reinterpret_cast<volatile uint16_t*>(s.b[stage])[5] = 0;
      asm volatile("bar.sync 1, 128;" ::: "memory");
    }
    if (Mutant != 8) asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");  // 8: results read too early
    if (Mutant == 15 && threadIdx.x != 64) continue;                           // 15 is right: one thread speaks for the warpgroup
    if (Mutant != 12 && !(Mutant == 13 && threadIdx.x == 0 && k == 1)) arrive(&s.empty[stage]);  // 13: one arrival missing
  }
  int row = warp * 16 + lane / 4, column = lane % 4 * 2;
  for (int j = 0; j < 8; j++)
    for (int h = 0; h < 2; h++) {
      d[(row + 8 * h) * 64 + 8 * j + column] = c[4 * j + 2 * h];
      d[(row + 8 * h) * 64 + 8 * j + column + 1] = c[4 * j + 2 * h + 1];
    }
}

#define KERNEL(k)                                                                                                             \
  extern "C" __global__ void __launch_bounds__(160, 1) gemm_##k(const __grid_constant__ CUtensorMap a,                         \
                                                                const __grid_constant__ CUtensorMap b, float* d, int steps) { \
    gemm<k>(&a, &b, d, steps);                                                                                                \
  }
KERNEL(0) KERNEL(1) KERNEL(2) KERNEL(3) KERNEL(4) KERNEL(5) KERNEL(6) KERNEL(7) KERNEL(8) KERNEL(9) KERNEL(10) KERNEL(11)
KERNEL(12) KERNEL(13) KERNEL(14) KERNEL(15)
