// Dynamic shared memory of the rule's kernels, in bytes. The structs live with the kernels, which assert these numbers.
#pragma once

#include <cstdint>

#include "cake/gdn/rule_params.h"

namespace cake::gdn {

inline constexpr int kScalarsSmemBytes = 1024;  // the scalars of a chunk, in a block of their own

inline constexpr uint32_t kWySmemBytes = 39936;
inline constexpr uint32_t kSegmentStatesSmemBytes = 2 * kHeadDim * kSegmentStatesColumns * 4 + kHeadDim * 33 * 4 + 64 * 4 + 16 * 4;
inline constexpr uint32_t kTokenGradientsSmemBytes = 200704;
inline constexpr uint32_t kGateParametersSmemBytes = 2 * 8 * kGateParametersThreads;

// Two stages of a chain: K, T, scalars and the slice of V or dO; with Q and P where they are read; 4 KB a warp of staging where
// states are written.
CAKE_HOST_DEVICE constexpr uint32_t chain_smem_bytes(int warps, bool reads_queries, bool writes_states) {
  const uint32_t slice = warps <= 4 ? kSquareTileBytes : kTokenTileBytes;
  const uint32_t stage = kTokenTileBytes + kSquareTileBytes + slice + kScalarsSmemBytes +
                         (reads_queries ? kTokenTileBytes + kSquareTileBytes : 0);
  return 2 * stage + (writes_states ? 4096u * warps : 0u);
}

}  // namespace cake::gdn
