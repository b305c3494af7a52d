// mbarriers in all their forms, clusters, distributed shared memory, register reallocation, dependent launches.
#include "common.cuh"

__device__ __forceinline__ void wait(uint32_t barrier, uint32_t parity) {
  asm volatile(
      "{ .reg .pred p;\nagain: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@!p bra again; }" ::"r"(barrier), "r"(parity)
      : "memory");
}
__device__ __forceinline__ uint32_t test(uint32_t barrier, uint64_t state) {
  uint32_t done;
  asm volatile("{ .reg .pred p; mbarrier.test_wait.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
               : "=r"(done) : "r"(barrier), "l"(state) : "memory");
  return done;
}
__device__ __forceinline__ uint32_t cluster_rank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
__device__ __forceinline__ uint32_t mapa(uint32_t address, uint32_t rank) {
  uint32_t mapped;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(mapped) : "r"(address), "r"(rank));
  return mapped;
}
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// One thread walks a barrier through its phases and writes down every observable answer.
extern "C" __global__ void mbarrier_states(uint32_t* out) {
  __shared__ uint64_t storage[2];
  uint32_t b = shared_address(storage), n = 0;
  if (threadIdx.x == 0) {
    uint64_t state, old;
    uint32_t pending;
    asm volatile("mbarrier.init.shared.b64 [%0], 3;" ::"r"(b) : "memory");
    asm volatile("mbarrier.arrive.shared.b64 %0, [%1];" : "=l"(old) : "r"(b) : "memory");
    asm volatile("mbarrier.pending_count.b64 %0, %1;" : "=r"(pending) : "l"(old));
    out[n++] = pending;
    out[n++] = test(b, old);
    asm volatile("mbarrier.arrive.shared.b64 %0, [%1], 2;" : "=l"(state) : "r"(b) : "memory");
    asm volatile("mbarrier.pending_count.b64 %0, %1;" : "=r"(pending) : "l"(state));
    out[n++] = pending;
    out[n++] = test(b, old);
    // Second phase: transaction bytes hold it open after all arrivals.
    asm volatile("mbarrier.expect_tx.relaxed.cta.shared.b64 [%0], 48;" ::"r"(b) : "memory");
    asm volatile("mbarrier.arrive.noComplete.shared.b64 %0, [%1], 1;" : "=l"(old) : "r"(b) : "memory");
    asm volatile("mbarrier.arrive.shared.b64 %0, [%1], 2;" : "=l"(state) : "r"(b) : "memory");
    out[n++] = test(b, state);
    asm volatile("mbarrier.complete_tx.relaxed.cta.shared.b64 [%0], 16;" ::"r"(b) : "memory");
    out[n++] = test(b, state);
    asm volatile("mbarrier.complete_tx.relaxed.cta.shared.b64 [%0], 32;" ::"r"(b) : "memory");
    out[n++] = test(b, state);
    // Third phase: a participant drops out; the fourth then needs only two arrivals.
    asm volatile("mbarrier.arrive_drop.shared.b64 %0, [%1];" : "=l"(state) : "r"(b) : "memory");
    asm volatile("mbarrier.arrive.shared.b64 %0, [%1], 2;" : "=l"(old) : "r"(b) : "memory");
    out[n++] = test(b, state);
    asm volatile("mbarrier.arrive.shared.b64 %0, [%1];" : "=l"(state) : "r"(b) : "memory");
    asm volatile("mbarrier.pending_count.b64 %0, %1;" : "=r"(pending) : "l"(state));
    out[n++] = pending;
    out[n++] = test(b, state);
    asm volatile("mbarrier.arrive.shared.b64 %0, [%1];" : "=l"(old) : "r"(b) : "memory");
    out[n++] = test(b, state);
    asm volatile("mbarrier.inval.shared.b64 [%0];" ::"r"(b) : "memory");
    storage[0] = 5;  // plain memory again
    out[n++] = static_cast<uint32_t>(storage[0]);
  }
}

// A two-stage pipeline: warp 0 produces, the others consume, full and empty barriers with both parities.
extern "C" __global__ void mbarrier_pipeline(const uint32_t* in, uint32_t* out, int rounds) {
  __shared__ uint32_t stage[2][32];
  __shared__ uint64_t full[2], empty[2];
  int warp = threadIdx.x / 32, lane = threadIdx.x & 31;
  if (threadIdx.x == 0)
    for (int s = 0; s < 2; s++) {
      asm volatile("mbarrier.init.shared.b64 [%0], 32;" ::"r"(shared_address(full + s)) : "memory");
      asm volatile("mbarrier.init.shared.b64 [%0], 96;" ::"r"(shared_address(empty + s)) : "memory");
    }
  __syncthreads();
  if (warp == 0) {
    for (int k = 0; k < rounds; k++) {
      int s = k & 1, phase = k >> 1 & 1;
      wait(shared_address(empty + s), phase ^ 1);
      stage[s][lane] = in[k * 32 + lane];
      asm volatile("mbarrier.arrive.release.cta.shared.b64 _, [%0];" ::"r"(shared_address(full + s)) : "memory");
    }
  } else {
    uint32_t r = warp;
    for (int k = 0; k < rounds; k++) {
      int s = k & 1, phase = k >> 1 & 1;
      wait(shared_address(full + s), phase);
      r = r * 31 + stage[s][(lane + warp) & 31];
      asm volatile("mbarrier.arrive.release.cta.shared.b64 _, [%0];" ::"r"(shared_address(empty + s)) : "memory");
    }
    out[threadIdx.x - 32] = r;
  }
}

// Every CTA reads and writes the shared memory of its neighbours.
extern "C" __global__ void distributed_shared(const uint32_t* in, uint32_t* out) {
  __shared__ uint32_t mine[64], inbox[64], counter;
  __shared__ uint64_t barrier;
  uint32_t i = threadIdx.x, rank = cluster_rank(), size;
  asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(size));
  mine[i] = in[blockIdx.x * 64 + i];
  inbox[i] = 0;
  if (i == 0) {
    counter = 0;
    asm volatile("mbarrier.init.shared.b64 [%0], 64;" ::"r"(shared_address(&barrier)) : "memory");
  }
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  cluster_sync();
  uint32_t next = (rank + 1) % size, r;
  asm volatile("ld.shared::cluster.u32 %0, [%1];" : "=r"(r) : "r"(mapa(shared_address(mine + (i ^ 3)), next)));
  asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(mapa(shared_address(inbox + i), next)), "r"(mine[i] * 7) : "memory");
  asm volatile("{ .reg .b32 old; atom.add.shared::cluster.u32 old, [%0], %1; }" ::"r"(mapa(shared_address(&counter), next)), "r"(i) : "memory");
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(mapa(shared_address(&barrier), next)) : "memory");
  asm volatile("{ .reg .pred p;\nagain: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%0], 0;\n@!p bra again; }" ::"r"(
                   shared_address(&barrier))
               : "memory");
  r = r * 3 + inbox[i] + counter;
  uint64_t generic, remote;
  asm volatile("cvta.shared.u64 %0, %1;" : "=l"(generic) : "l"(static_cast<uint64_t>(shared_address(mine + i))));
  asm volatile("mapa.u64 %0, %1, %2;" : "=l"(remote) : "l"(generic), "r"((rank + size - 1) % size));
  r += *reinterpret_cast<uint32_t*>(remote) * 5;
  uint32_t owner;
  asm volatile("getctarank.shared::cluster.u32 %0, %1;" : "=r"(owner) : "r"(mapa(shared_address(mine), next)));
  out[blockIdx.x * 64 + i] = r + owner * 1000;
  cluster_sync();
}

// st.async and a bulk copy from one CTA's shared memory into another's, both counted by the other's mbarrier.
extern "C" __global__ void remote_copies(const uint32_t* in, uint32_t* out) {
  __shared__ __align__(128) uint32_t source[64], target[64], async_words[64];
  __shared__ uint64_t barrier;
  uint32_t i = threadIdx.x, rank = cluster_rank(), peer = rank ^ 1, b = shared_address(&barrier);
  source[i] = in[blockIdx.x * 64 + i];
  if (i == 0) {
    asm volatile("mbarrier.init.shared.b64 [%0], 1;" ::"r"(b) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(b), "r"(512) : "memory");
  }
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  cluster_sync();
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(
                   mapa(shared_address(async_words + i), peer)),
               "r"(source[i] + 1), "r"(mapa(b, peer))
               : "memory");
  if (i == 0)
    asm volatile("cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     mapa(shared_address(target), peer)),
                 "r"(shared_address(source)), "r"(256), "r"(mapa(b, peer))
                 : "memory");
  wait(b, 0);
  out[blockIdx.x * 64 + i] = target[i] * 3 + async_words[63 - i];
  cluster_sync();
}

extern "C" __global__ void __launch_bounds__(384, 1) register_reallocation(const uint32_t* in, uint32_t* out) {
  uint32_t i = threadIdx.x, r = 0;
  if (i < 128) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    for (int k = 0; k < 8; k++) r = r * 3 + in[(i + k) % 384];
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    uint32_t v[24];
    for (int k = 0; k < 24; k++) v[k] = scramble(in[i] + k);
    for (int k = 0; k < 24; k++) r = r * 5 + v[23 - k];
  }
  out[i] = r;
}

extern "C" __global__ void dependent_producer(const uint32_t* in, uint32_t* data) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  data[i] = scramble(in[i]);
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
  data[i] += 7;
}

extern "C" __global__ void dependent_consumer(const uint32_t* data, uint32_t* out, int n) {
  __shared__ uint32_t table[64];
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  table[threadIdx.x & 63] = 1 + (threadIdx.x & 63);  // the preamble runs beside the producer
  __syncthreads();
  asm volatile("griddepcontrol.wait;" ::: "memory");
  out[i] = data[n - 1 - i] * table[i & 63];
}
