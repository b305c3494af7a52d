// What the native programs of sm_90a take beyond what the portable ones do: tensor maps of the rows. Plain C++17.
//
// A map covers [B, T, heads, 128] BF16 as axes {128, heads, T, B} in boxes of 64 columns and 64 tokens of one head, 128-byte swizzle.
#pragma once

#include "cake/gdn/rule_params.h"
#include "cake/host/tensor_map.h"

namespace cake::gdn {

struct MappedChainParams {
  ChainParams chain;
  host::TensorMap q, k, v, o;
};

// With what makes T, P and the scalars.
struct MappedRuleParams {
  MappedChainParams mapped;
  BetaOption beta;
  const float* sums;  // [chunks, value_heads, 64]
};

// Threads of a chain's CTA: warpgroups of 64 value columns, and one that loads or some that make T and P.
CAKE_HOST_DEVICE constexpr int native_chain_threads(int slices, int makers) { return 128 * (slices + (makers > 0 ? makers : 1)); }

}  // namespace cake::gdn
