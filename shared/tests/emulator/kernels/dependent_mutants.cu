// Programmatic dependent launches: a producer, a kernel between, and consumers that are right or wrong as their tests say.
#include "common.cuh"

__device__ __forceinline__ void grid_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
__device__ __forceinline__ void start_dependents() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }

// in[256] to x[256]; 2 CTAs of 128 threads.
extern "C" __global__ void produce(const uint32_t* in, uint32_t* x) {
  start_dependents();
  grid_wait();
  uint32_t i = blockIdx.x * 128 + threadIdx.x;
  x[i] = in[i] * 2;  // PRODUCER
}

// Touches nothing of the others. Whether it waits decides what its end says.
template <bool Waits, bool StartsLate>
__device__ void between(uint32_t* z) {
  if (!StartsLate) start_dependents();
  if (Waits) grid_wait();
  if (StartsLate) start_dependents();
  z[blockIdx.x * 128 + threadIdx.x] = 1;
}
extern "C" __global__ void between_waits(uint32_t* z) { between<true, false>(z); }
extern "C" __global__ void between_never_waits(uint32_t* z) { between<false, false>(z); }
extern "C" __global__ void between_starts_late(uint32_t* z) { between<true, true>(z); }

template <class Body>
__device__ void copy_in_bulk(const uint32_t* from, Body body) {
  __shared__ __align__(128) uint32_t tile[128];
  __shared__ uint64_t barrier;
  if (threadIdx.x == 0) {
    barrier_init(&barrier, 1);
    barrier_fence();
    expect(&barrier, 512);
    body();
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(address(tile)),
                 "l"(from), "r"(512), "r"(address(&barrier))
                 : "memory");
  }
  __syncthreads();
  wait(&barrier, 0);
}

// x[256] and table[256] to y[256], and in[256], which the producer reads, may be overwritten; 2 CTAs of 128 threads.
template <int Variant>
__device__ void consume_body(uint32_t* in, const uint32_t* x, const uint32_t* table, uint32_t* y) {
  __shared__ __align__(128) uint32_t tile[128];
  const uint32_t t = threadIdx.x, first = blockIdx.x * 128, i = first + t;
  uint32_t v = table[i];                                  // nobody on the stream writes it
  if (Variant == 2) v += x[i];                            // reads too early
  if (Variant == 0 && t == 0)                             // what a prefetch fetches is nobody's
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(x + first), "r"(512) : "memory");
  if (Variant == 5) in[i] = 3;                            // the producer may still read it
  if (Variant == 6) const_cast<uint32_t*>(x)[i] = 3;      // the producer may write it later
  if (Variant == 7) copy_in_bulk(x + first, [] {});       // a bulk copy that is issued too early
  if (Variant == 8) {                                     // right: one thread waits and copies, the rest learn of it
    copy_in_bulk(x + first, [] { grid_wait(); });
    y[i] = v + x[i];
    return;
  }
  if (Variant == 9) {                                     // a bulk copy out that is issued too early
    tile[t] = i;
    proxy_fence();
    __syncthreads();
    if (t == 0) {
      asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(x + first), "r"(address(tile)), "r"(512)
                   : "memory");
      grid_wait();
      asm volatile("cp.async.bulk.commit_group;" ::: "memory");
      asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
    }
  }
  if (Variant == 3) {                                     // right: one thread waits for its CTA
    if (t == 0) grid_wait();
    __syncthreads();
  } else if (Variant == 4) {                              // one warp waits, the others do not ask it
    if (t < 32) grid_wait();
  } else if (Variant == 10) {                             // without shared memory of its own use: a barrier passes it on
    if (t == 127) grid_wait();
    asm volatile("barrier.cta.sync.aligned 1, 128;" ::: "memory");
  } else if (Variant != 1) {                              // 1: never waits
    grid_wait();
  }
  y[i] = v + x[i];                                        // CONSUMER
}

#define CONSUME(k)                                                                                            \
  extern "C" __global__ void consume_##k(uint32_t* in, const uint32_t* x, const uint32_t* table, uint32_t* y) { \
    consume_body<k>(in, x, table, y);                                                                         \
  }
CONSUME(0) CONSUME(1) CONSUME(2) CONSUME(3) CONSUME(4) CONSUME(5) CONSUME(6) CONSUME(7) CONSUME(8) CONSUME(9) CONSUME(10)

// Halves of words: two launches write neighbours.
extern "C" __global__ void write_halves(uint16_t* x, uint32_t odd) {
  start_dependents();
  x[2 * threadIdx.x + odd] = 7;
}
