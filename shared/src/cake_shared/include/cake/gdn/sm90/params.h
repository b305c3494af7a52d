// What the native programs of sm_90a take beyond what the portable ones do: tensor maps of the rows. Plain C++17.
//
// A map covers [B, T, heads, 128] BF16 as axes {128, heads, T, B} in boxes of 64 columns and 64 tokens of one head, 128-byte
// swizzle.
#pragma once

#include "cake/gdn/rule_params.h"
#include "cake/host/tensor_map_value.h"

namespace cake::gdn {

using ChunkScalars = float[kScalarRows][kChunk];

struct MappedWyParams {
  WyParams wy;
  host::TensorMap k;
};

struct MappedChainParams {
  ChainParams chain;
  host::TensorMap q, k, v, o;
};

// Threads of a chain's CTA: a warpgroup for every 64 value columns, one that makes P where there is an output, one that copies.
CAKE_HOST_DEVICE constexpr int native_chain_threads(int slices, bool output) { return 128 * (slices + (output ? 2 : 1)); }

// Of wy on a multiprocessor.
inline constexpr int kNativeWyCtasPerMultiprocessor = 4;

// Dynamic shared memory; the structs live with the kernels, which assert these numbers. A chain's: three stages of K and Q, of
// T and scalars, of the slices of V; with an output two of P and of the slices of O; barriers.
inline constexpr uint32_t kNativeWySmemBytes = 38912;
CAKE_HOST_DEVICE constexpr uint32_t native_chain_smem_bytes(int slices, bool output) {
  const uint32_t slice = 3 * kSquareTileBytes + (output ? 2 * kSquareTileBytes : 0);
  return 3 * 2 * kTokenTileBytes + 3 * (kSquareTileBytes + 1024) + (output ? 2 * kSquareTileBytes : 0) + slices * slice + 1024;
}

}  // namespace cake::gdn

CAKE_DECLARE_KERNEL(wy_sm90, cake::gdn::MappedWyParams)
CAKE_DECLARE_KERNEL(segment_pairs_sm90, cake::gdn::MappedChainParams)
CAKE_DECLARE_KERNEL(chunk_output_sm90, cake::gdn::MappedChainParams)
