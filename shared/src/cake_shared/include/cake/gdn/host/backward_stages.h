// Launches of the stages that only the backward pass has, by native programs where the architecture's records name them.
#pragma once

#include "cake/gdn/host/forward_stages.h"
#include "cake/gdn/sm90/backward_params.h"

namespace cake::gdn {

// All that a call has, and the key heads from `first` on that a wave has.
inline WavePart whole_call(const RuleCall& call) { return {0, call.heads.key_heads, Half::kBoth}; }
inline WavePart part_of_wave(const RuleCall& call, int64_t first, int64_t wave_key_heads, Half half) {
  return {static_cast<int32_t>(first), static_cast<int32_t>(std::min(wave_key_heads, call.heads.key_heads - first)), half};
}

// Maps of what native chains read whole chunks of, made once a call.
struct BackwardMaps {
  host::TensorMap q, k, grad_o;
};

#if CAKE_HAS_SM90

inline BackwardMaps map_backward(const RuleCall& call, const ReverseParams& r) {
  if (!call.native() || call.pack.tokens == 0) return {};
  auto map = [&](const char* name, const TokenRows& rows, int64_t heads) {
    return mappable(rows) ? map_rows(name, rows, call.pack, heads) : host::TensorMap{};
  };
  return {map("q", r.q, call.heads.key_heads), map("k", r.k, call.heads.key_heads), map("d_o", r.grad_o, call.heads.value_heads)};
}

// Without tokens there is nothing to map, and nothing to do.
inline void launch_reverse_chain(const RuleCall& call, host::KernelRef<MappedReverseParams> kernel, const ReverseParams& r,
                                 const BackwardMaps& maps, int64_t ctas) {
  if (call.pack.tokens == 0) return;
  const int groups = r.warps / kNarrowChainWarps;
  launch_stage(kernel, ctas, reverse_chain_sm90_threads(groups), reverse_chain_sm90_smem_bytes(groups), call.stream,
               MappedReverseParams{r, maps.q, maps.k, maps.grad_o});
}

#else

inline BackwardMaps map_backward(const RuleCall&, const ReverseParams&) { return {}; }

#endif

// Y of the segments of long sequences.
inline void launch_segment_gradients(const RuleCall& call, const ReverseParams& r, [[maybe_unused]] const BackwardMaps& maps) {
  const int64_t ctas = chain_ctas(call, kHeadDim, r.warps);
#if CAKE_HAS_SM90
  if (call.native()) return launch_reverse_chain(call, CAKE_KERNEL_REF(segment_gradients_sm90), r, maps, ctas);
#endif
#if CAKE_GDN_HAS_PORTABLE
  launch_stage(CAKE_KERNEL_REF(segment_gradients_any), ctas, 32 * r.warps, chain_smem_bytes(r.warps, true, false), call.stream, r);
#endif
}

inline void launch_value_gradients(const RuleCall& call, const ReverseParams& r, [[maybe_unused]] const BackwardMaps& maps) {
  const int64_t ctas = chain_ctas(call, r.part.value_heads(call.heads.group), kHeadDim, r.warps);
#if CAKE_HAS_SM90
  if (call.native()) return launch_reverse_chain(call, CAKE_KERNEL_REF(value_gradients_sm90), r, maps, ctas);
#endif
#if CAKE_GDN_HAS_PORTABLE
  launch_stage(CAKE_KERNEL_REF(value_gradients_any), ctas, 32 * r.warps, chain_smem_bytes(r.warps, true, true), call.stream, r);
#endif
}

// Behind value_gradients, which it does not depend on: the native program fills the multiprocessors that value_gradients leaves idle.
inline void launch_chunk_states(const RuleCall& call, ChainParams p, int64_t warps) {
  // Without tokens no reverse chain runs before it, which it could start beside.
  if (call.pack.tokens == 0) return;
#if CAKE_HAS_SM90
  if (call.native()) {
    p.warps = static_cast<int32_t>(warps);
    const int groups = p.warps / kNarrowChainWarps;
    return launch_stage(CAKE_KERNEL_REF(chunk_states_sm90), chain_ctas(call, p.part.value_heads(call.heads.group), kHeadDim, warps),
                        chunk_states_sm90_threads(groups), chunk_states_sm90_smem_bytes(groups), call.stream, p, true);
  }
#endif
#if CAKE_GDN_HAS_PORTABLE
  p.warps = kNarrowChainWarps;
  launch_stage(CAKE_KERNEL_REF(chunk_states_any), chain_ctas(call, kHeadDim, p.warps), 32 * p.warps,
               chain_smem_bytes(p.warps, false, true), call.stream, p);
#endif
}

inline void launch_token_gradients(const RuleCall& call, const TokenGradientsParams& t, int64_t multiprocessors) {
  const int64_t items = int64_t{half_chunks(t.part.half, static_cast<int32_t>(call.pack.chunks))} * t.part.key_heads;
#if CAKE_HAS_SM90
  if (call.native()) {
    return launch_stage(CAKE_KERNEL_REF(token_gradients_sm90), std::min(items, multiprocessors), kTokenGradientsSm90Threads,
                        kTokenGradientsSm90SmemBytes, call.stream, t);
  }
#endif
#if CAKE_GDN_HAS_PORTABLE
  launch_stage(CAKE_KERNEL_REF(token_gradients_any), items, kTokenGradientsThreads, kTokenGradientsSmemBytes, call.stream, t);
#endif
}

}  // namespace cake::gdn
