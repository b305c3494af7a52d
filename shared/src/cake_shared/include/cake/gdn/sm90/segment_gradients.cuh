#pragma once

#include "cake/gdn/sm90/reverse_chain.cuh"

// segment_gradients_sm90: Y of the segments of long sequences but the first, see reverse_chain.cuh; the gradient of a segment's
// entry state is M^T that of its exit state plus Y. A sequence's last segment runs from its true exit gradient. Where the gates
// of a segment's first chunks multiply to less than 2^-100 (kForgottenLog2), a gradient behind them counts as gone: Y is theirs alone.
// reads   q, k, dO, T, scalars, gradients of the final states
// writes  Y into the segment's slot
extern "C" __global__ void __launch_bounds__(512, 1)
    segment_gradients_sm90(const __grid_constant__ cake::gdn::MappedReverseParams p) {
  using namespace cake::gdn::sm90;
  cake::gdn::begin_stage();
  p.reverse.warps == 8 ? run_reverse_chain<Reverse::kPairs, 2>(p) : run_reverse_chain<Reverse::kPairs, 1>(p);
}
