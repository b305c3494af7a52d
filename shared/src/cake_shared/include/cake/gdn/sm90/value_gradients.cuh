#pragma once

#include "cake/gdn/sm90/reverse_chain.cuh"

// value_gradients_sm90: dv and the gradients of the initial states, see reverse_chain.cuh.
// reads   q, k, dO, T, scalars, gradients of the final states and of the exit states of segments
// writes  dv of every token of a sequence (dR where beta is tiny), dS0 of sequences that have tokens; dS1 of every chunk as a BF16 tile
extern "C" __global__ void __launch_bounds__(512, 1)
    value_gradients_sm90(const __grid_constant__ cake::gdn::MappedReverseParams p) {
  using namespace cake::gdn::sm90;
  cake::ptx::wait_for_predecessor();
  cake::ptx::launch_dependents();  // chunk_states reads nothing of this stage
  p.reverse.warps == 8 ? run_reverse_chain<Reverse::kGradients, 2>(p) : run_reverse_chain<Reverse::kGradients, 1>(p);
}
