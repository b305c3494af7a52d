// Launches of the stages of the forward: portable programs, or native ones where the architecture has them. Host side.
#pragma once

#include <algorithm>

#include "cake/gdn/host/rule_call.h"

#if CAKE_HAS_SM90
#include "cake/gdn/sm90/params.h"
#include "cake/host/tensor_map.h"
#endif

// Whether a branch for portable programs exists where native ones do: in the emulator's host module, which serves all
// architectures.
#define CAKE_GDN_HAS_PORTABLE (!CAKE_HAS_SM90 || defined(CAKE_EMULATOR))

namespace cake::gdn {

inline ChainParams chain_params(const RuleCall& call, const TokenRows& v, const States& initial, float* entries, float* factors) {
  ChainParams p{};
  p.heads = call.heads;
  p.tables = call.pack.tables();
  p.q = call.q;
  p.k = call.k;
  p.v = v;
  p.inverse = call.inverse;
  p.attention = call.attention;
  p.scalars = call.scalars;
  p.initial = initial;
  p.segment_entries = entries;
  p.segment_factors = factors;
  p.slots_per_row = call.slots_per_row;
  p.scale = call.scale;
  return p;
}

inline constexpr int kNarrowChainWarps = 4;

inline int64_t check_warps(int64_t warps) {
  if (warps != 4 && warps != 8) TVM_FFI_THROW(ValueError) << "warps: expected 4 or 8, got " << warps;
  return warps;
}

// CTAs of a chain over all segments and these value heads that runs that many columns of each, 16 a warp.
inline int64_t chain_ctas(const RuleCall& call, int64_t value_heads, int64_t columns, int64_t warps) {
  return call.pack.segments * value_heads * (columns / (16 * warps));
}

inline int64_t chain_ctas(const RuleCall& call, int64_t columns, int64_t warps) {
  return chain_ctas(call, call.pack.heads, columns, warps);
}

#if CAKE_HAS_SM90

// Boxes of 64 columns and 64 tokens of one head. Rows that no program reads have no map.
inline host::TensorMap map_rows(const char* name, const TokenRows& rows, const Pack& pack, int64_t heads) {
  if (rows.data == nullptr) return {};
  constexpr int64_t kRowBytes = 2 * kHeadDim;
  auto stride = [](int64_t extent, int64_t elements) { return static_cast<uint64_t>(extent == 1 ? kRowBytes : 2 * elements); };
  const host::TensorBox<4> box{rows.data,
                               {kHeadDim, static_cast<uint64_t>(heads), static_cast<uint64_t>(pack.tokens_per_row),
                                static_cast<uint64_t>(pack.rows)},
                               {stride(heads, rows.head_stride), stride(pack.tokens_per_row, rows.token_stride),
                                stride(pack.rows, rows.row_stride)},
                               {64, 1, kChunk, 1}};
  return host::encode_tensor_map(name, box);
}

inline MappedChainParams mapped(const RuleCall& call, const ChainParams& p) {
  return {p, map_rows("q", p.q, call.pack, call.heads.key_heads), map_rows("k", p.k, call.pack, call.heads.key_heads),
          map_rows("v", p.v, call.pack, call.heads.value_heads), map_rows("o", p.o, call.pack, call.heads.value_heads)};
}

// Without tokens there is nothing to map, and nothing to do.
inline void launch_native_chain(const RuleCall& call, host::KernelRef<MappedChainParams> kernel, const ChainParams& p, int64_t ctas,
                                bool output) {
  if (call.pack.tokens == 0) return;
  const int slices = p.warps / kNarrowChainWarps;
  launch_stage(kernel, ctas, native_chain_threads(slices, output), native_chain_smem_bytes(slices, output), call.stream,
               mapped(call, p));
}

#endif

// T and the scalars, and P where `call.attention` has a place for it; q and k as the rule sees them.
inline void launch_wy(const RuleCall& call) {
  const WyParams p{call.heads, call.pack.tables(), call.q,         call.k,       call.beta,
                   call.sums,  call.inverse,       call.attention, call.scalars, call.scale};
  const int64_t ctas = call.pack.chunks * call.heads.key_heads;
#if CAKE_HAS_SM90
  if (call.native()) {
    if (call.pack.tokens == 0) return;
    return launch_stage(CAKE_KERNEL_REF(wy_sm90), std::min(ctas, kNativeWyCtasPerMultiprocessor * call.multiprocessors), kWyThreads,
                        kNativeWySmemBytes, call.stream,
                        MappedWyParams{p, map_rows("k", p.k, call.pack, call.heads.key_heads)});
  }
#endif
#if CAKE_GDN_HAS_PORTABLE
  launch_stage(CAKE_KERNEL_REF(wy_any), ctas, kWyThreads, kWySmemBytes, call.stream, p);
#endif
}

// Columns of M, and behind them those of N where 256 are asked for.
inline void launch_segment_pairs(const RuleCall& call, ChainParams p, int columns, int64_t warps) {
  p.pair_columns = columns;
#if CAKE_HAS_SM90
  if (call.native()) {
    p.warps = static_cast<int32_t>(warps);
    const int64_t ctas = std::min(chain_ctas(call, columns, warps), call.multiprocessors);
    return launch_native_chain(call, CAKE_KERNEL_REF(segment_pairs_sm90), p, ctas, false);
  }
#endif
#if CAKE_GDN_HAS_PORTABLE
  p.warps = kNarrowChainWarps;
  launch_stage(CAKE_KERNEL_REF(segment_pairs_any), chain_ctas(call, columns, p.warps), 32 * p.warps,
               chain_smem_bytes(p.warps, false, false), call.stream, p);
#endif
}

inline void launch_chunk_output(const RuleCall& call, ChainParams p, int64_t warps) {
  p.warps = static_cast<int32_t>(warps);
#if CAKE_HAS_SM90
  if (call.native()) {
    return launch_native_chain(call, CAKE_KERNEL_REF(chunk_output_sm90), p, chain_ctas(call, kHeadDim, warps), true);
  }
#endif
#if CAKE_GDN_HAS_PORTABLE
  launch_stage(CAKE_KERNEL_REF(chunk_output_any), chain_ctas(call, kHeadDim, warps), 32 * p.warps,
               chain_smem_bytes(p.warps, true, false), call.stream, p);
#endif
}

}  // namespace cake::gdn
