// ldmatrix, stmatrix, movmatrix; cp.async with groups, zero fill and mbarriers; bulk copies and bulk reductions.
#include "common.cuh"

extern "C" __global__ void matrix_loads(const uint32_t* in, uint32_t* out) {
  __shared__ __align__(128) uint32_t tile[512];
  uint32_t lane = threadIdx.x;
  for (int k = lane; k < 512; k += 32) tile[k] = in[k];
  __syncwarp();
  uint32_t row = shared_address(tile) + (lane * 5 % 32) * 16 + 512;  // rows in a scattered order
  uint32_t r[14];
#define LOAD(shape) "ldmatrix.sync.aligned.m8n8." shape ".shared.b16 "
  asm volatile(LOAD("x1") "{%0}, [%1];" : "=r"(r[0]) : "r"(row));
  asm volatile(LOAD("x2") "{%0, %1}, [%2];" : "=r"(r[1]), "=r"(r[2]) : "r"(row));
  asm volatile(LOAD("x4") "{%0, %1, %2, %3}, [%4];" : "=r"(r[3]), "=r"(r[4]), "=r"(r[5]), "=r"(r[6]) : "r"(row));
  asm volatile(LOAD("x1.trans") "{%0}, [%1];" : "=r"(r[7]) : "r"(row));
  asm volatile(LOAD("x2.trans") "{%0, %1}, [%2];" : "=r"(r[8]), "=r"(r[9]) : "r"(row));
  asm volatile(LOAD("x4.trans") "{%0, %1, %2, %3}, [%4];" : "=r"(r[10]), "=r"(r[11]), "=r"(r[12]), "=r"(r[13]) : "r"(row));
#undef LOAD
  for (int k = 0; k < 14; k++) out[k * 32 + lane] = r[k];
  uint32_t moved;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(moved) : "r"(in[lane]));
  out[14 * 32 + lane] = moved;
}

extern "C" __global__ void matrix_stores(const uint32_t* in, uint32_t* out) {
  __shared__ __align__(128) uint32_t tile[6 * 128];
  uint32_t lane = threadIdx.x;
  for (int k = lane; k < 6 * 128; k += 32) tile[k] = 0xdeadbeef;
  __syncwarp();
  uint32_t row = shared_address(tile) + (lane * 7 % 32) * 16;
  uint32_t a = in[lane], b = in[32 + lane], c = in[64 + lane], d = in[96 + lane];
#define STORE(shape) "stmatrix.sync.aligned.m8n8." shape ".shared.b16 "
  asm volatile(STORE("x1") "[%0], {%1};" ::"r"(row), "r"(a) : "memory");
  asm volatile(STORE("x2") "[%0], {%1, %2};" ::"r"(row + 512), "r"(a), "r"(b) : "memory");
  asm volatile(STORE("x4") "[%0], {%1, %2, %3, %4};" ::"r"(row + 1024), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
  asm volatile(STORE("x1.trans") "[%0], {%1};" ::"r"(row + 1536), "r"(a) : "memory");
  asm volatile(STORE("x2.trans") "[%0], {%1, %2};" ::"r"(row + 2048), "r"(a), "r"(b) : "memory");
  asm volatile(STORE("x4.trans") "[%0], {%1, %2, %3, %4};" ::"r"(row + 2560), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
#undef STORE
  __syncwarp();
  for (int k = lane; k < 6 * 128; k += 32) out[k] = tile[k];
}

extern "C" __global__ void async_copies(const uint8_t* in, uint32_t* out) {
  __shared__ __align__(16) uint8_t tile[3][128 * 16];
  int i = threadIdx.x;
  uint32_t a = shared_address(tile[0] + 16 * i), b = shared_address(tile[1] + 16 * i), c = shared_address(tile[2] + 16 * i);
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(a), "l"(in + 16 * i) : "memory");
  asm volatile("cp.async.commit_group;" ::: "memory");
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(b), "l"(in + 2048 + 16 * i) : "memory");
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(b + 8), "l"(in + 2048 + 16 * i + 4) : "memory");
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(b + 12), "l"(in + 16 * i), "r"(i & 3) : "memory");
  asm volatile("cp.async.commit_group;" ::: "memory");
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(c), "l"(in + 16 * i), "r"(i % 17) : "memory");
  asm volatile("cp.async.commit_group;" ::: "memory");
  asm volatile("cp.async.wait_group 2;" ::: "memory");
  uint32_t r = reinterpret_cast<uint32_t*>(tile[0])[4 * i + 1];
  asm volatile("cp.async.wait_group 1;" ::: "memory");
  r = r * 3 + reinterpret_cast<uint32_t*>(tile[1])[4 * i] + reinterpret_cast<uint32_t*>(tile[1])[4 * i + 2];
  asm volatile("cp.async.wait_all;" ::: "memory");
  __syncthreads();
  out[i] = r;
  for (int k = 0; k < 3; k++)
    for (int word = 0; word < 4; word++) out[128 + (k * 4 + word) * 128 + i] = reinterpret_cast<uint32_t*>(tile[k])[word * 128 + i];
}

__device__ __forceinline__ void wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{ .reg .pred p;\nagain: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@!p bra again; }" ::"r"(barrier), "r"(parity)
      : "memory");
}

extern "C" __global__ void async_copies_to_barrier(const uint8_t* in, uint32_t* out) {
  __shared__ __align__(16) uint32_t tile[2][64 * 4];
  __shared__ uint64_t barriers[2];
  int i = threadIdx.x;
  uint32_t first = shared_address(barriers), second = shared_address(barriers + 1);
  if (i == 0) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(first), "r"(64) : "memory");
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(second), "r"(64) : "memory");
  }
  __syncthreads();
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(tile[0] + 4 * i)), "l"(in + 16 * i) : "memory");
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(first) : "memory");
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(tile[1] + 4 * i)), "l"(in + 1024 + 16 * i) : "memory");
  asm volatile("cp.async.mbarrier.arrive.shared.b64 [%0];" ::"r"(second) : "memory");
  asm volatile("{ .reg .b64 s; mbarrier.arrive.shared.b64 s, [%0]; }" ::"r"(second) : "memory");
  wait(first, 0);
  uint32_t r = tile[0][(4 * i + 77) & 255];
  wait(second, 0);
  out[i] = r * 5 + tile[1][(4 * i + 130) & 255];
}

// A bulk copy in, a change by the threads, a bulk copy and bulk reductions out.
extern "C" __global__ void bulk_copies(const uint32_t* in, uint32_t* out, uint32_t* sums, float* float_sums, uint16_t* half_sums) {
  __shared__ __align__(128) uint32_t tile[256];
  __shared__ __align__(128) float floats[64];
  __shared__ __align__(128) uint16_t halves[64];
  __shared__ uint64_t barrier;
  int i = threadIdx.x;
  uint32_t b = shared_address(&barrier), t = shared_address(tile);
  if (i == 0) {
    asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(b) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (i == 0) {
    asm volatile("{ .reg .b64 s; mbarrier.arrive.expect_tx.shared.b64 s, [%0], 1024; }" ::"r"(b) : "memory");
    for (int part = 0; part < 4; part++)
      asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(t + part * 256),
                   "l"(in + part * 64), "r"(256), "r"(b)
                   : "memory");
  }
  wait(b, 0);
  for (int k = i; k < 256; k += blockDim.x) tile[k] = tile[k] * 3 + 1;
  if (i < 64) {
    floats[i] = i * 0.25f;
    halves[i] = 0x3f80;  // bf16 one
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  if (i == 0) {
    uint32_t f = shared_address(floats), h = shared_address(halves);
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(out), "r"(t), "r"(1024) : "memory");
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
#define REDUCE(op, to, from, bytes) \
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group." op " [%0], [%1], %2;" ::"l"(to), "r"(from), "r"(bytes) : "memory");
    REDUCE("add.u32", sums, t, 128) REDUCE("min.u32", sums + 32, t, 128) REDUCE("max.s32", sums + 64, t, 128)
    REDUCE("and.b32", sums + 96, t, 128) REDUCE("or.b32", sums + 128, t, 128) REDUCE("xor.b32", sums + 160, t, 128)
    REDUCE("inc.u32", sums + 192, t, 128) REDUCE("dec.u32", sums + 224, t, 128) REDUCE("add.u64", sums + 256, t, 128)
    REDUCE("add.f32", float_sums, f, 256) REDUCE("add.noftz.bf16", half_sums, h, 128)
#undef REDUCE
    asm volatile("cp.async.bulk.commit_group;" ::: "memory");
    asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory");
    asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
  }
}
