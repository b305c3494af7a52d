// A ring of kStages buffers between a producer and its consumers: a full and an empty mbarrier each, waited for in turn.
//
//   producer: ring.wait_empty(at); ring.expect(at, bytes); copies that signal ring.full(at); at.advance()
//   consumer: ring.wait_full(at); reads; ring.release(at); at.advance()
//
// Producer and consumers hold a RingPlace each and advance it once a buffer.
#pragma once

#include "cake/ptx/mbarrier.cuh"

namespace cake::pipe {

template <int kStages>
struct RingPlace {
  int stage = 0;
  uint32_t phase = 0;  // parity of the phase in which the stage is filled

  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }

  // `count` times, for stages that somebody else consumes.
  __device__ __forceinline__ void advance_by(int count) {
    const int rounds = (stage + count) / kStages;
    stage += count - rounds * kStages;
    phase ^= rounds & 1;
  }
};

// Lives in shared memory.
template <int kStages>
struct Ring {
  using Place = RingPlace<kStages>;

  uint64_t full_barriers[kStages];
  uint64_t empty_barriers[kStages];

  // By one thread; ptx::mbarrier_init_fence and a barrier of the CTA (or cluster) must follow. `fills` counts the arrivals
  // of a fill (1 for a producer thread that calls expect), `releases` those of the consumers.
  __device__ __forceinline__ void init(uint32_t fills, uint32_t releases) {
    for (int stage = 0; stage < kStages; ++stage) {
      ptx::mbarrier_init(&full_barriers[stage], fills);
      ptx::mbarrier_init(&empty_barriers[stage], releases);
    }
  }

  __device__ __forceinline__ uint64_t* full(const Place& at) { return &full_barriers[at.stage]; }
  __device__ __forceinline__ uint64_t* empty(const Place& at) { return &empty_barriers[at.stage]; }

  // Returns at once in the first round, when nobody has released anything yet.
  __device__ __forceinline__ void wait_empty(const Place& at) { ptx::mbarrier_wait(empty(at), at.phase ^ 1); }
  __device__ __forceinline__ void expect(const Place& at, uint32_t bytes) {
    ptx::mbarrier_arrive_expect_bytes(full(at), bytes);
  }

  __device__ __forceinline__ void wait_full(const Place& at) { ptx::mbarrier_wait(full(at), at.phase); }
  __device__ __forceinline__ bool is_empty(const Place& at) { return ptx::mbarrier_test_wait(empty(at), at.phase ^ 1); }
  __device__ __forceinline__ bool is_full(const Place& at) { return ptx::mbarrier_test_wait(full(at), at.phase); }
  __device__ __forceinline__ void release(const Place& at) { ptx::mbarrier_arrive(empty(at)); }
};

}  // namespace cake::pipe
