// Threads and dynamic shared memory of the native programs of the backward pass on sm_90a. Plain C++17.
#pragma once

#include "cake/gdn/rule_params.h"
#include "cake/host/tensor_map_value.h"

namespace cake::gdn {

// The chains: one or two warpgroups of 64 value columns, and one that loads and stores for them; the reverse one has another that makes P.
// The structs live with the kernels, which assert these.
CAKE_HOST_DEVICE constexpr int reverse_chain_sm90_threads(int groups) { return 128 * (groups + 2); }
CAKE_HOST_DEVICE constexpr int chunk_states_sm90_threads(int groups) { return 128 * (groups + 1); }
CAKE_HOST_DEVICE constexpr uint32_t reverse_chain_sm90_smem_bytes(int groups) { return groups == 2 ? 232448u : 191488u; }
CAKE_HOST_DEVICE constexpr uint32_t chunk_states_sm90_smem_bytes(int groups) { return groups == 2 ? 200704u : 151552u; }

// Tokens of a smaller beta have dR in their row of dv between value_gradients and token_gradients: dR cannot be had from beta dR there.
inline constexpr float kDeferredBelow = 0x1p-40f;

// From this beta on chunk_states stores V' / beta, and the gradient of beta is made of that. Below it T's row, whose elements beside the
// diagonal are of beta's size, may not have the digits for it.
inline constexpr float kDividedFrom = 0x1p-10f;

// Persistent: as many CTAs as there are multiprocessors, which moves no bit.
inline constexpr int kTokenGradientsSm90Threads = 512;
inline constexpr uint32_t kTokenGradientsSm90SmemBytes = 230400;

// The maps are those of MappedChainParams. Rows that stand for several have none.
CAKE_HOST_DEVICE constexpr bool mappable(const TokenRows& rows) {
  return rows.row_stride != 0 && rows.token_stride != 0 && rows.head_stride != 0;
}

struct MappedReverseParams {
  ReverseParams reverse;
  host::TensorMap q, k, grad_o;
};

}  // namespace cake::gdn

CAKE_DECLARE_KERNEL(chunk_states_sm90, cake::gdn::ChainParams)
CAKE_DECLARE_KERNEL(segment_gradients_sm90, cake::gdn::MappedReverseParams)
CAKE_DECLARE_KERNEL(value_gradients_sm90, cake::gdn::MappedReverseParams)
CAKE_DECLARE_KERNEL(token_gradients_sm90, cake::gdn::TokenGradientsParams)
