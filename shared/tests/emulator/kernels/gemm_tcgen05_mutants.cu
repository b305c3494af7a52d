// D[128 x 64] = A[128 x K] B[64 x K]^T in BF16 through tensor memory, right as variant 0.
#include "common.cuh"

constexpr int kStages = 3, kN = 64;
constexpr uint32_t kBytesA = 128 * 64 * 2, kBytesB = kN * 64 * 2;
// FP32 accumulator, BF16 operands, both K-major.
constexpr uint32_t kInstruction = 1u << 4 | 1u << 7 | 1u << 10 | (kN >> 3) << 17 | (128 >> 4) << 24;
struct alignas(1024) Smem {
  uint8_t a[kStages][kBytesA], b[kStages][kBytesB];
  uint64_t full[kStages], empty[kStages], done;
  uint32_t tmem;
};

__device__ __forceinline__ void commit(void* b) {
  asm volatile("tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];" ::"r"(address(b)) : "memory");
}
__device__ __forceinline__ void mma(uint32_t d, uint64_t a, uint64_t b, uint32_t accumulate) {
  asm volatile("{ .reg .pred p; setp.ne.b32 p, %4, 0; tcgen05.mma.cta_group::1.kind::f16 [%0], %1, %2, %3, p; }" ::"r"(d), "l"(a),
               "l"(b), "r"(kInstruction), "r"(accumulate)
               : "memory");
}
__device__ __forceinline__ void load_columns(uint32_t (&r)[8], uint32_t from) {
  asm volatile("tcgen05.ld.sync.aligned.32x32b.x8.b32 {%0, %1, %2, %3, %4, %5, %6, %7}, [%8];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]), "=r"(r[4]), "=r"(r[5]), "=r"(r[6]), "=r"(r[7])
               : "r"(from)
               : "memory");
}

template <int Mutant>
__device__ void gemm(const CUtensorMap* map_a, const CUtensorMap* map_b, float* d, int steps) {
  extern __shared__ __align__(1024) uint8_t raw[];
  Smem& s = *reinterpret_cast<Smem*>(raw);
  int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
  if (threadIdx.x == 0) {
    for (int k = 0; k < kStages; k++) {
      barrier_init(&s.full[k], 1);
      barrier_init(&s.empty[k], 1);
    }
    barrier_init(&s.done, Mutant == 1 ? 2 : 1);  // 1: an arrival that never comes
    barrier_fence();
  }
  if (warp == 0) {
    asm volatile("tcgen05.alloc.cta_group::1.sync.aligned.shared::cta.b32 [%0], %1;" ::"r"(address(&s.tmem)),
                 "r"(Mutant == 2 ? 48 : 64)      // 2: not a power of two
                 : "memory");
    asm volatile("tcgen05.relinquish_alloc_permit.cta_group::1.sync.aligned;" ::: "memory");
  }
  asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
  __syncthreads();
  asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
  const uint32_t tmem = s.tmem;
  if (warp == 4) {
    if (elect())
      for (int k = 0; k < steps; k++) {
        int stage = k % kStages;
        if (Mutant != 3) wait(&s.empty[stage], k / kStages & 1 ^ 1);  // 3: overwrites tiles in use
        expect(&s.full[stage], Mutant == 4 ? kBytesA + kBytesB + 16 : kBytesA + kBytesB);  // 4: wrong transaction bytes
        load_2d(s.a[stage], map_a, k * 64, 0, &s.full[stage]);
        load_2d(s.b[stage], map_b, k * 64, 0, &s.full[stage]);
      }
  } else if (warp == 5) {
    const uint64_t layout = Mutant == 5 ? 4ull << 61 : 2ull << 61;  // 5: the wrong swizzle
    const uint64_t high = layout | 1ull << 46 | 64ull << 32 | 1ull << 16;
    if (elect()) {
      for (int k = 0; k < steps; k++) {
        int stage = k % kStages;
        if (Mutant != 6) wait(&s.full[stage], k / kStages & 1);       // 6: multiplies before the tiles are there
        for (int q = 0; q < 4; q++)
          mma(tmem, high | (address(s.a[stage]) + 32 * q) >> 4 & 0x3fff, high | (address(s.b[stage]) + 32 * q) >> 4 & 0x3fff,
              Mutant == 7 ? 1 : (k | q) != 0);                        // 7: adds to what nothing wrote
        if (!(Mutant == 8 && k == 1)) commit(&s.empty[stage]);        // 8: a stage is never given back
        if (Mutant == 15 && k == 2) reinterpret_cast<volatile uint8_t*>(s.a[stage])[64] = 0;  // 15: changes an operand in use
      }
      commit(&s.done);
    }
    if (Mutant == 16) asm volatile("bar.sync 1, 64;" ::: "memory");
  }
  if (Mutant == 16 && warp == 0) {                                    // 16: another warp does, behind a barrier
    asm volatile("bar.sync 1, 64;" ::: "memory");
    if (lane == 3) reinterpret_cast<volatile uint8_t*>(s.b[0])[64] = 0;
  }
  __syncwarp();
  if (warp < 4) {
    if (Mutant != 9) wait(&s.done, 0);                                // 9: reads before the product is done
    asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
    for (int c = 0; c < kN; c += 8) {
      uint32_t r[8];
      uint32_t quarter = Mutant == 10 ? (warp + 1) % 4 : warp;        // 10: a quarter that the warp cannot reach
      load_columns(r, tmem + (quarter * 32 << 16) + (Mutant == 11 ? c + 8 : c));  // 11: past the allocation
      if (Mutant != 12) asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory");  // 12: uses registers in flight
      for (int i = 0; i < 8; i++) d[(warp * 32 + lane) * kN + c + i] = __uint_as_float(r[i]);
    }
  }
  asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
  __syncthreads();
  if (warp == 0 && Mutant != 13)                                      // 13: tensor memory is never given back
    asm volatile("tcgen05.dealloc.cta_group::1.sync.aligned.b32 %0, %1;" ::"r"(tmem), "r"(Mutant == 14 ? 32 : 64));  // 14: half
}

#define KERNEL(k)                                                                                                             \
  extern "C" __global__ void __launch_bounds__(192, 1) gemm_##k(const __grid_constant__ CUtensorMap a,                         \
                                                                const __grid_constant__ CUtensorMap b, float* d, int steps) { \
    gemm<k>(&a, &b, d, steps);                                                                                                \
  }
KERNEL(0) KERNEL(1) KERNEL(2) KERNEL(3) KERNEL(4) KERNEL(5) KERNEL(6) KERNEL(7) KERNEL(8) KERNEL(9) KERNEL(10) KERNEL(11)
KERNEL(12) KERNEL(13) KERNEL(14) KERNEL(15) KERNEL(16)
