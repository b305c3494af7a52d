#pragma once

#include "cake/gdn/any/chain.cuh"

// segment_pairs_any: the pairs (M, N) of the segments of long sequences but the last, see chain.cuh; exit = M entry + N.
// reads   k, v, T, scalars, initial states
// writes  M, transposed, into the factor's slot of every segment that has one before and one behind it; N (of a first segment
//         its exit state) into the entry slot of the next segment, unless pair_columns asks for M alone
extern "C" __global__ void __launch_bounds__(cake::gdn::kChainThreads, 1)
    segment_pairs_any(const __grid_constant__ cake::gdn::ChainParams p) {
  using namespace cake::gdn;
  begin_stage();
  p.warps == 8 ? run_chain<Chain::kPairs, 8>(p) : run_chain<Chain::kPairs, 4>(p);
}
