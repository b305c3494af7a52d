// wgmma of sm_90a: D (64 x N, FP32 registers of a warpgroup) = or += A (64 x 16, BF16) B (16 x N, BF16).
//
// D is float[N / 2], element 4 j + i of a lane as fragment j, element i of mma.sync's 16 x 8 accumulators: row 16 (warp & 3)
// + g + 8 (i >> 1), column 8 j + 2 c + (i & 1), g = lane >> 2, c = lane & 3. A from registers is that of mma.sync too, so an
// accumulator packed to BF16 is the left operand of the next product. The array's size picks N.
//
//   wgmma_keep(d, a...); wgmma_fence();       registers written by ordinary code are in place
//   wgmma_bf16<...>(d, a, b, accumulate) ...  several, which run in order
//   wgmma_commit();  ...  wgmma_wait<n>(); wgmma_keep(d, a...);   and only then are d read and a written
//
// ptxas serialises what it cannot follow: wait before every read of an accumulator, leave nothing in flight over a loop's
// back edge, and do not mix shapes of N on one accumulator in flight. Shared operands written by ordinary stores need
// fence.proxy.async and a barrier.
#pragma once

#include <stdint.h>

namespace cake::ptx {

enum class Major : int {
  kK = 0,   // rows are M or N, the contraction runs along the 128-byte rows
  kMN = 1,  // rows are the contraction, M or N runs along the 128-byte rows
};

// Descriptor of a tile as cake/tile/swizzle128.cuh lays it out, at a multiple of 1024 bytes of shared memory. `block_bytes`
// is the distance of its blocks of 64 columns, read only where M or N spans several of them (MN-major).
__device__ __forceinline__ uint64_t wgmma_descriptor(uint32_t shared, uint32_t block_bytes = 16) {
  constexpr uint64_t kSwizzle128 = uint64_t{1} << 62, kEightRows = uint64_t{1024 >> 4} << 32;
  return kSwizzle128 | kEightRows | uint64_t{block_bytes >> 4} << 16 | (shared & 0x3ffff) >> 4;
}

// What to add to a descriptor for an operand that starts so many bytes further on: steps of 16 along the contraction are 32 bytes
// (K-major, within a block of 64 columns) or 2048 bytes (MN-major).
__host__ __device__ constexpr uint64_t wgmma_advance(uint32_t bytes) { return bytes >> 4; }

__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most kPending groups of this warp are in flight.
template <int kPending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// No instruction: the compiler may not move reads or writes of these registers across it, nor keep copies of them.
template <int kCount>
__device__ __forceinline__ void wgmma_keep(float (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}

template <int kCount>
__device__ __forceinline__ void wgmma_keep(uint32_t (&registers)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(registers[i])::"memory");
}

#define CAKE_WGMMA_D4 "%0,%1,%2,%3"
#define CAKE_WGMMA_D8 CAKE_WGMMA_D4 ",%4,%5,%6,%7"
#define CAKE_WGMMA_D16 CAKE_WGMMA_D8 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define CAKE_WGMMA_D32 CAKE_WGMMA_D16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define CAKE_WGMMA_D48 CAKE_WGMMA_D32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define CAKE_WGMMA_D64 CAKE_WGMMA_D48 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"
#define CAKE_WGMMA_D80 CAKE_WGMMA_D64 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define CAKE_WGMMA_D96 CAKE_WGMMA_D80 ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define CAKE_WGMMA_D112 CAKE_WGMMA_D96 ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111"
#define CAKE_WGMMA_D128 CAKE_WGMMA_D112 ",%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define CAKE_WGMMA_OUT4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define CAKE_WGMMA_OUT8(i) CAKE_WGMMA_OUT4(i), CAKE_WGMMA_OUT4(i + 4)
#define CAKE_WGMMA_OUT16(i) CAKE_WGMMA_OUT8(i), CAKE_WGMMA_OUT8(i + 8)
#define CAKE_WGMMA_OUT32(i) CAKE_WGMMA_OUT16(i), CAKE_WGMMA_OUT16(i + 16)
#define CAKE_WGMMA_OUT48(i) CAKE_WGMMA_OUT32(i), CAKE_WGMMA_OUT16(i + 32)
#define CAKE_WGMMA_OUT64(i) CAKE_WGMMA_OUT32(i), CAKE_WGMMA_OUT32(i + 32)
#define CAKE_WGMMA_OUT96(i) CAKE_WGMMA_OUT64(i), CAKE_WGMMA_OUT32(i + 64)
#define CAKE_WGMMA_OUT128(i) CAKE_WGMMA_OUT64(i), CAKE_WGMMA_OUT64(i + 64)

// R = N / 2 accumulators are operands 0 .. R - 1; r0 .. r6 are R .. R + 6.
#define CAKE_WGMMA(N, R, r0, r1, r2, r3, r4, r5, r6)                                                                        \
  template <Major kA, Major kB>                                                                                             \
  __device__ __forceinline__ void wgmma_bf16(float (&d)[R], uint64_t a, uint64_t b, bool accumulate) {                      \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #r2 ", 0;\n"                                                          \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" CAKE_WGMMA_D##R "}, %" #r0 ", %" #r1          \
                 ", p, 1, 1, %" #r3 ", %" #r4 ";\n}"                                                                        \
                 : CAKE_WGMMA_OUT##R(0)                                                                                     \
                 : "l"(a), "l"(b), "r"(int{accumulate}), "n"(int(kA)), "n"(int(kB)));                                       \
  }                                                                                                                         \
  template <Major kB>                                                                                                       \
  __device__ __forceinline__ void wgmma_bf16(float (&d)[R], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint64_t b, \
                                             bool accumulate) {                                                             \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #r5 ", 0;\n"                                                          \
                 "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" CAKE_WGMMA_D##R "}, {%" #r0 ",%" #r1 ",%" #r2 \
                 ",%" #r3 "}, %" #r4 ", p, 1, 1, %" #r6 ";\n}"                                                              \
                 : CAKE_WGMMA_OUT##R(0)                                                                                     \
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b), "r"(int{accumulate}), "n"(int(kB)));                         \
  }

CAKE_WGMMA(8, 4, 4, 5, 6, 7, 8, 9, 10)
CAKE_WGMMA(16, 8, 8, 9, 10, 11, 12, 13, 14)
CAKE_WGMMA(32, 16, 16, 17, 18, 19, 20, 21, 22)
CAKE_WGMMA(64, 32, 32, 33, 34, 35, 36, 37, 38)
CAKE_WGMMA(96, 48, 48, 49, 50, 51, 52, 53, 54)
CAKE_WGMMA(128, 64, 64, 65, 66, 67, 68, 69, 70)
CAKE_WGMMA(192, 96, 96, 97, 98, 99, 100, 101, 102)
CAKE_WGMMA(256, 128, 128, 129, 130, 131, 132, 133, 134)

#undef CAKE_WGMMA

}  // namespace cake::ptx
