// The chains of stages of the rule, forward and backward. Host side: workspace, launches in order.
#pragma once

#include "cake/gdn/host/backward_stages.h"

namespace cake::gdn {

inline ResultRows result_rows(const TensorView& x, const Pack& pack) {
  return {host::detail::first_element(x), pack.tokens == 0 ? 0 : x.numel() / pack.tokens * (x.dtype().bits / 8)};
}

inline Uncovered uncovered(std::initializer_list<ResultRows> results, const States& from, const States& to) {
  Uncovered found{};
  for (const ResultRows& result : results) found.results[found.result_count++] = result;
  found.states_from = from.data;
  found.states_to = to.data;
  return found;
}

// Makes the groundwork, or takes the one that there is, and writes what no chunk writes; q and k are the normalised ones from
// here on.
inline void launch_up_to_wy(RuleCall& call, const Uncovered& results) {
  const Pack& pack = call.pack;
  PrologueParams p{};
  p.gate = call.gate;
  p.sums = call.sums;
  p.uncovered = results;
  if (call.has(kNormaliseRows)) {
    p.key_heads = call.heads.key_heads;
    TokenRows* const given[2] = {&call.q, &call.k};
    for (int i = 0; i < 2; ++i) {
      p.rows[i] = {*given[i], call.normalised[i], call.reciprocals[i]};
      const int64_t token_stride = int64_t{call.heads.key_heads} * kHeadDim;
      *given[i] = {call.normalised[i], pack.tokens_per_row * token_stride, token_stride, kHeadDim};
    }
  }
  launch_prologue(pack, p, call.has(kGroundworkMade), call.stream);
  if (call.has(kGroundworkMade)) return;
  launch_wy(call);
}

inline void launch_segment_states(const RuleCall& call, host::KernelRef<SegmentStatesParams> kernel, const float* factors,
                                  float* states) {
  const int64_t stretches = call.pack.rows * segment_stretches_of(call.heads.tokens_per_row);
  const int64_t items = stretches * call.pack.heads * (kHeadDim / kSegmentStatesColumns);
  // Where no sequence is long there is nothing to do, and the CTAs that find so are the time it takes.
  launch_stage(kernel, std::min(items, 2 * call.multiprocessors), kSegmentStatesThreads, kSegmentStatesSmemBytes, call.stream,
               SegmentStatesParams{call.heads, call.pack.tables(), factors, states, call.native() ? call.scalars : nullptr,
                                   call.slots_per_row, static_cast<int32_t>(items)});
}

// o [B, T, HV, 128] and, where given, the final states; `entries` FP32 [slots, HV, 128, 128] receives the entry states of
// segments.
// Returns 0, or the bits of RowsOf whose rows must be copied first; nothing was launched then.
inline int64_t rule_forward(TensorView q, TensorView k, TensorView v, TensorView g, TensorView beta, OptionalTensor initial_state,
                            OptionalTensor a_log, OptionalTensor dt_bias, OptionalTensor cu_seqlens, TensorView o,
                            OptionalTensor final_state, OptionalTensor entries, TensorView groundwork,
                            OptionalTensor workspace_bytes, TensorView error_word, int64_t options, double scale,
                            int64_t warps, int64_t stream, int64_t multiprocessors) {
  RuleCall call = check_rule(q, k, g, beta, a_log, dt_bias, cu_seqlens, error_word, options, scale, stream, multiprocessors);
  const bool v_first = call.has(kStateVFirst);
  const TokenRows values = check_rows("v", v, call.pack, call.pack.heads, call.device, kRowsOfV, call.misaligned);
  const TokenRows out = check_rows_out("o", o, call.pack, call.pack.heads, call.device);
  const States initial = check_states("initial_state", initial_state, call.pack, v_first, false, call.device);
  const States final = check_states("final_state", final_state, call.pack, v_first, true, call.device);
  take_groundwork(call, groundwork);
  Regions workspace("workspace", workspace_bytes, false, call.device);
  float* factors = workspace.take<float>(call.slots() * call.pack.heads * kStateElements * 4);
  float* entry_states = nullptr;
  if (entries.has_value()) {
    entry_states = static_cast<float*>(host::check_output("entries", entries.value(), host::kFloat32,
                                                          {call.slots() * call.pack.heads * kStateElements}, call.device, 4));
  } else {
    entry_states = workspace.take<float>(call.slots() * call.pack.heads * kStateElements * 4);
  }
  workspace.finish();
  check_warps(warps);
  if (call.misaligned != 0) return call.misaligned;

  const host::DeviceGuard guard(call.device);
  launch_up_to_wy(call, uncovered({result_rows(o, call.pack)}, initial, final));
  ChainParams p = chain_params(call, values, initial, entry_states, factors);
  if (call.slots_per_row > 0) {
    launch_segment_pairs(call, p, 2 * kHeadDim, warps);
    launch_segment_states(call, CAKE_KERNEL_REF(segment_entries_any), factors, entry_states);
  }
  p.o = out;
  p.final = final;
  p.keeps_entries = entries.has_value() ? 1 : 0;
  launch_chunk_output(call, p, warps);
  return 0;
}

// Gradients of everything; of v and initial_state alone where grad_q is none, and then v is not read. Returns as rule_forward.
inline int64_t rule_backward(TensorView q, TensorView k, OptionalTensor v, OptionalTensor grad_o, OptionalTensor grad_final_state,
                             TensorView g, TensorView beta, OptionalTensor initial_state, OptionalTensor a_log,
                             OptionalTensor dt_bias, OptionalTensor cu_seqlens, OptionalTensor entries, TensorView grad_v,
                             OptionalTensor grad_initial_state, OptionalTensor grad_q, OptionalTensor grad_k,
                             OptionalTensor grad_g, OptionalTensor grad_beta, OptionalTensor grad_a_log,
                             OptionalTensor grad_dt_bias, OptionalTensor zeros, TensorView groundwork,
                             OptionalTensor workspace_bytes, TensorView error_word, int64_t options, double scale, int64_t warps,
                             int64_t stream, int64_t multiprocessors, int64_t wave_key_heads, int64_t wave_halves,
                             int64_t wave_warps) {
  RuleCall call = check_rule(q, k, g, beta, a_log, dt_bias, cu_seqlens, error_word, options, scale, stream, multiprocessors);
  const Pack& pack = call.pack;
  if (wave_key_heads < 1 || wave_key_heads > call.heads.key_heads || (!call.native() && wave_key_heads != call.heads.key_heads)) {
    TVM_FFI_THROW(ValueError) << "wave_key_heads: expected " << (call.native() ? "1 to " : "all ") << call.heads.key_heads << ", got "
                              << wave_key_heads;
  }
  if (wave_halves < 1 || wave_halves > (call.native() ? 2 : 1)) {
    TVM_FFI_THROW(ValueError) << "wave_halves: expected 1" << (call.native() ? " or 2" : "") << ", got " << wave_halves;
  }
  const int64_t wave_heads = wave_key_heads * call.heads.group;
  // The earlier colours come first, so no half has more.
  const Half largest = wave_halves == 2 ? Half::kEarlier : Half::kBoth;
  const int64_t wave_records = half_chunks(largest, static_cast<int32_t>(pack.chunks)) * wave_heads;
  const bool v_first = call.has(kStateVFirst), tokens_too = grad_q.has_value();
  TokenRows d_o;
  if (grad_o.has_value()) {
    d_o = check_rows("d_o", grad_o.value(), pack, pack.heads, call.device, kRowsOfGradO, call.misaligned);
  } else {
    // A row of zeros stands for all rows.
    if (!zeros.has_value()) TVM_FFI_THROW(ValueError) << "zeros: expected a row of 128 zeros where d_o is none";
    const void* row = host::check_input("zeros", zeros.value(), {host::kBFloat16}, {int64_t{kHeadDim}}, call.device);
    d_o = {const_cast<void*>(row), 0, 0, 0};
  }
  const States d_final = check_states("d_final_state", grad_final_state, pack, v_first, false, call.device);
  const States d_initial = check_states("d_initial_state", grad_initial_state, pack, v_first, true, call.device);
  const TokenRows dv = check_rows_out("dv", grad_v, pack, pack.heads, call.device);
  take_groundwork(call, groundwork);
  Regions workspace("workspace", workspace_bytes, false, call.device);
  const int64_t long_bytes = call.slots() * pack.heads * kStateElements * 4;
  float* exits = workspace.take<float>(long_bytes);
  // The factors have been read when value_gradients begins.
  char* exit_gradients = workspace.take(std::max(wave_records * kStateTileBytes, long_bytes));
  float* factors = reinterpret_cast<float*>(exit_gradients);
  char* residual_gradients = call.native() ? nullptr : workspace.take(wave_records * kTokenTileBytes);
  float* cut_gradients =
      wave_halves == 2 ? workspace.take<float>(cut_slots(pack.chunks) * wave_heads * kStateElements * 4) : nullptr;

  const HeadScalars d_a_log = check_head_scalars_out("dA_log", grad_a_log, a_log, pack, call.device);
  const HeadScalars d_dt_bias = check_head_scalars_out("ddt_bias", grad_dt_bias, dt_bias, pack, call.device);

  ReverseParams r{};
  r.heads = call.heads;
  r.tables = pack.tables();
  r.k = call.k;
  r.grad_o = d_o;
  r.grad_v = dv;
  r.inverse = call.inverse;
  r.attention = call.attention;
  r.scalars = call.scalars;
  r.exit_gradients = exit_gradients;
  r.residual_gradients = residual_gradients;
  r.cut_gradients = cut_gradients;
  r.grad_final = d_final;
  r.grad_initial = d_initial;
  r.segment_exits = exits;
  r.slots_per_row = call.slots_per_row;
  r.warps = static_cast<int32_t>(check_warps(warps));
  r.deferred_below = tokens_too ? kDeferredBelow : 0.f;
  r.scale = call.scale;

  Uncovered results = uncovered({result_rows(grad_v, pack)}, d_final, d_initial);
  ChainParams p{};
  TokenGradientsParams t{};
  if (tokens_too) {
    if (!v.has_value()) TVM_FFI_THROW(ValueError) << "v: expected a tensor for these gradients";
    const TokenRows values = check_rows("v", v.value(), pack, pack.heads, call.device, kRowsOfV, call.misaligned);
    const States initial = check_states("initial_state", initial_state, pack, v_first, false, call.device);
    float* entry_states = nullptr;
    if (call.slots_per_row > 0 && pack.tokens > 0) {
      if (!entries.has_value()) TVM_FFI_THROW(ValueError) << "entries: expected the forward's, because T is beyond one segment";
      const void* given = host::check_input("entries", entries.value(), {host::kFloat32},
                                            {call.slots() * pack.heads * kStateElements}, call.device);
      if (!entries.value().IsContiguous()) TVM_FFI_THROW(ValueError) << "entries: expected a contiguous tensor";
      entry_states = static_cast<float*>(const_cast<void*>(given));
    }
    p = chain_params(call, values, initial, entry_states, factors);
    p.entry_states = workspace.take(wave_records * kStateTileBytes);
    if (!call.native()) p.residuals = workspace.take(wave_records * kTokenTileBytes);
    p.writes = workspace.take(wave_records * kTokenTileBytes);
    t.heads = call.heads;
    t.tables = pack.tables();
    t.v = values;
    t.grad_o = d_o;
    t.grad_v = dv;
    t.grad_q = check_rows_out("dq", grad_q.value(), pack, call.heads.key_heads, call.device);
    t.grad_k = check_rows_out("dk", grad_k.value(), pack, call.heads.key_heads, call.device);
    t.grad_gate = check_scalars_out("dg", grad_g.value(), g, pack, call.device);
    t.grad_beta = check_scalars_out("dbeta", grad_beta.value(), beta, pack, call.device);
    t.q_reciprocal = call.reciprocals[0];
    t.k_reciprocal = call.reciprocals[1];
    if (call.has(kMakeGate)) t.gate = call.gate;
    t.beta_top = call.beta.top;
    t.gate_partials = call.has(kMakeGate) ? workspace.take<double>(call.records() * 16) : nullptr;
    t.scalars = call.scalars;
    t.entry_states = p.entry_states;
    t.exit_gradients = exit_gradients;
    t.residuals = p.residuals;
    t.writes = p.writes;
    t.residual_gradients = residual_gradients;
    t.scale = call.scale;
    results = uncovered({result_rows(grad_v, pack), result_rows(grad_q.value(), pack), result_rows(grad_k.value(), pack),
                         result_rows(grad_g.value(), pack), result_rows(grad_beta.value(), pack)},
                        d_final, d_initial);
  } else {
    p = chain_params(call, {}, {}, nullptr, factors);
  }
  workspace.finish();
  if (call.misaligned != 0) return call.misaligned;

  const host::DeviceGuard guard(call.device);
  // What no chunk writes token_gradients writes too, which saves a launch that would do nothing else.
  const bool by_stage = call.has(kGroundworkMade) && tokens_too && pack.chunks > 0;
  launch_up_to_wy(call, by_stage ? Uncovered{} : results);
  const Uncovered left = by_stage && pack.may_leave_rows() ? results : Uncovered{};
  p.q = r.q = t.q = call.q;
  p.k = r.k = t.k = call.k;
  const BackwardMaps maps = map_backward(call, r);
  if (call.slots_per_row > 0) {
    launch_segment_pairs(call, p, kHeadDim, warps);
    r.part = whole_call(call);
    launch_segment_gradients(call, r, maps);
    launch_segment_states(call, CAKE_KERNEL_REF(segment_exits_any), factors, exits);
  }
  // One workspace serves the waves in turn.
  r.warps = static_cast<int32_t>(check_warps(wave_warps));
  auto run_wave = [&](int64_t first_key_head, Half half) {
    p.part = r.part = t.part = part_of_wave(call, first_key_head, wave_key_heads, half);
    launch_value_gradients(call, r, maps);
    if (!tokens_too) return;
    launch_chunk_states(call, p, wave_warps);
    // The later half of a short pack may have no chunk, and then no launch; the earlier one has.
    t.uncovered = first_key_head == 0 && half != Half::kLater ? left : Uncovered{};
    launch_token_gradients(call, t, multiprocessors);
  };
  for (int64_t first = 0; first < call.heads.key_heads; first += wave_key_heads) {
    if (wave_halves == 1) {
      run_wave(first, Half::kBoth);
    } else {
      run_wave(first, Half::kLater);
      run_wave(first, Half::kEarlier);
    }
  }
  if (tokens_too && call.has(kMakeGate)) {
    launch_stage(CAKE_KERNEL_REF(gate_parameters_any), pack.heads, kGateParametersThreads, kGateParametersSmemBytes, call.stream,
                 GateParametersParams{pack.tables(), t.gate_partials, d_a_log, d_dt_bias, call.heads.value_heads});
  }
  return 0;
}

}  // namespace cake::gdn
