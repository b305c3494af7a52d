// What the native programs of the backward pass on sm_90a take, their threads and dynamic shared memory. Plain C++17.
#pragma once

#include "cake/gdn/rule_params.h"

namespace cake::gdn {

struct ChunkStatesParams {
  ChainParams chain;
  uint32_t* arrivals;  // GradientsParams::arrivals, which this stage zeroes
};

// Teams of CTAs: of each, the first run the reverse chains of a key head's value heads, the others its chunks as they come.
struct GradientsParams {
  ReverseParams chain;
  TokenGradientsParams tokens;
  uint32_t* arrivals;  // [chunks, value_heads]: how many halves of the value columns of a chunk have their dS1 and dR where all may read them
  int32_t teams;
  int32_t chain_ctas;  // of a team: one a value head of the group, or two that own 64 value columns each
  int32_t token_ctas;  // of a team
};

// The chains: one or two warpgroups of 64 value columns and one that feeds them. The structs live with the kernels, which assert these.
CAKE_HOST_DEVICE constexpr int backward_chain_sm90_threads(int groups) { return 128 * (groups + 1); }
CAKE_HOST_DEVICE constexpr uint32_t reverse_chain_sm90_smem_bytes(int groups) { return groups == 2 ? 232448u : 191488u; }
CAKE_HOST_DEVICE constexpr uint32_t chunk_states_sm90_smem_bytes(int groups) { return groups == 2 ? 200704u : 151552u; }

inline constexpr int kTokenGradientsSm90Threads = 384;
inline constexpr uint32_t kTokenGradientsSm90SmemBytes = 232448;

}  // namespace cake::gdn

CAKE_DECLARE_KERNEL(chunk_states_sm90, cake::gdn::ChunkStatesParams)
CAKE_DECLARE_KERNEL(segment_gradients_sm90, cake::gdn::ReverseParams)
CAKE_DECLARE_KERNEL(value_gradients_sm90, cake::gdn::ReverseParams)
CAKE_DECLARE_KERNEL(token_gradients_sm90, cake::gdn::GradientsParams)
