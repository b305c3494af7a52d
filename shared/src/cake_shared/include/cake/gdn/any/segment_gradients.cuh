#pragma once

#include "cake/gdn/any/reverse_chain.cuh"

// segment_gradients_any: Y of the segments of long sequences but the first, see reverse_chain.cuh; the gradient of a segment's
// entry state is M^T that of its exit state plus Y. A sequence's last segment runs from its true exit gradient.
// reads   q, k, dO, T, P, scalars, gradients of the final states
// writes  Y into the segment's slot
extern "C" __global__ void __launch_bounds__(cake::gdn::kChainThreads, 1)
    segment_gradients_any(const __grid_constant__ cake::gdn::ReverseParams p) {
  using namespace cake::gdn;
  begin_stage();
  p.warps == 8 ? run_reverse_chain<Reverse::kPairs, 8>(p) : run_reverse_chain<Reverse::kPairs, 4>(p);
}
