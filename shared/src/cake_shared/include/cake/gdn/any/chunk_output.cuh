#pragma once

#include "cake/gdn/any/chain.cuh"

// chunk_output_any: o and the final states, see chain.cuh.
// reads   q, k, v, T, P, scalars, initial states, entry states of segments
// writes  o of every token of a sequence, the final states of sequences that have tokens
extern "C" __global__ void __launch_bounds__(cake::gdn::kChainThreads, 1)
    chunk_output_any(const __grid_constant__ cake::gdn::ChainParams p) {
  using namespace cake::gdn;
  begin_stage();
  p.warps == 8 ? run_chain<Chain::kOutput, 8>(p) : run_chain<Chain::kOutput, 4>(p);
}
