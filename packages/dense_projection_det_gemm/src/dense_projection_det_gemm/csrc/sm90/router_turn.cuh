// Turns of two warpgroups at the tensor cores, so that one's products run while the other adds its own up and fetches the next
// operands. Without them both wait for products at the same time, and then both add.
#pragma once

#include "cake/ptx/cta.cuh"

namespace dense_projection_det_gemm {

// Warpgroup 1 passes a turn before the first, and warpgroup 0 waits for one after the last. Uses named barriers 1 and 2.
template <bool kTurns>
struct RouterTurn {
  int warpgroup;
  static constexpr int kThreads = 256;

  __device__ __forceinline__ void wait() const {
    if constexpr (kTurns) cake::ptx::named_barrier_sync(1 + warpgroup, kThreads);
  }
  // To the other warpgroup.
  __device__ __forceinline__ void pass() const {
    if constexpr (kTurns) cake::ptx::named_barrier_arrive(2 - warpgroup, kThreads);
  }
};

}  // namespace dense_projection_det_gemm
