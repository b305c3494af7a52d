#pragma once

#include "cake/gdn/any/chain.cuh"

// chunk_states_any: what the backward needs of the forward chain, see chain.cuh.
// reads   k, v, T, scalars, initial states, entry states of segments
// writes  S0, X and V' of every chunk as BF16 tiles
extern "C" __global__ void __launch_bounds__(cake::gdn::kChainThreads, 1)
    chunk_states_any(const __grid_constant__ cake::gdn::ChainParams p) {
  using namespace cake::gdn;
  begin_stage();
  p.warps == 8 ? run_chain<Chain::kStates, 8>(p) : run_chain<Chain::kStates, 4>(p);
}
