// What both directions of the rule share: the call's checks and its groundwork. Host side.
#pragma once

#include "cake/gdn/host/rule_checks.h"
#include "cake/gdn/smem_sizes.h"
#include "cake/host/architecture.h"

namespace cake::gdn {

// Bits of the `options` argument.
enum RuleOption : int64_t {
  kNormaliseRows = 1,
  kMakeGate = 2,
  kBetaLogits = 4,
  kBetaUpToTwo = 8,
  kStateVFirst = 16,
  kNativePrograms = 32,  // the architecture's records name native programs; a module of that architecture has no others
  kGroundworkMade = 64,  // by the forward pass: the backward reads it
};

// What both directions share: the pack, the options, and the groundwork, which is what the stages up to wy make.
struct RuleCall {
  DLDevice device;
  int64_t stream;
  Pack pack;
  Heads heads;
  int64_t options;
  float scale;
  int slots_per_row;
  int64_t multiprocessors;  // moves no bit
  int64_t misaligned;  // bits of RowsOf
  TokenRows q, k;  // as given; after the prologue as the rule sees them
  GateOption gate;  // without A_log and dt_bias unless the call makes its gates
  BetaOption beta;

  float* sums;
  uint16_t* normalised[2] = {};
  float* reciprocals[2] = {};
  char* inverse;
  char* attention;  // P, of portable programs
  float* scalars;

  bool has(RuleOption option) const { return (options & option) != 0; }
#ifdef CAKE_EMULATOR
  bool native() const { return has(kNativePrograms); }
#else
  static constexpr bool native() { return CAKE_HAS_SM90; }
#endif
  int64_t records() const { return pack.chunks * pack.heads; }
  int64_t slots() const { return pack.rows * slots_per_row; }
};

inline RuleCall check_rule(const TensorView& q, const TensorView& k, const TensorView& g, const TensorView& beta,
                           const OptionalTensor& a_log, const OptionalTensor& dt_bias, const OptionalTensor& cu_seqlens,
                           const TensorView& error_word, int64_t options, double scale, int64_t stream,
                           int64_t multiprocessors) {
  if (multiprocessors < 1) TVM_FFI_THROW(ValueError) << "multiprocessors: expected at least 1, got " << multiprocessors;
  RuleCall call{};
  call.multiprocessors = multiprocessors;
  call.device = g.device();
  call.stream = stream;
  host::detail::check_shape("g", g, {host::kAny, host::kAny, host::kAny});
  call.pack = check_pack(g, cu_seqlens, error_word);
  host::detail::check_shape("k", k, {host::kAny, host::kAny, host::kAny, host::kAny});
  const int64_t key_heads = k.size(2);
  if (key_heads < 1 || call.pack.heads % key_heads != 0) {
    TVM_FFI_THROW(ValueError) << "g: expected a multiple of the " << key_heads << " key heads, got " << call.pack.heads;
  }
  call.heads = {static_cast<int32_t>(key_heads), static_cast<int32_t>(call.pack.heads),
                static_cast<int32_t>(call.pack.heads / key_heads), static_cast<int32_t>(call.pack.tokens_per_row)};
  call.options = options;
  call.scale = static_cast<float>(scale);
  call.slots_per_row = call.pack.tokens_per_row > cake::work::kSegmentedAboveTokens
                           ? static_cast<int>(call.pack.tokens_per_row / kSegmentTokens)
                           : 0;
  call.q = check_rows("q", q, call.pack, key_heads, call.device, kRowsOfQ, call.misaligned);
  call.k = check_rows("k", k, call.pack, key_heads, call.device, kRowsOfK, call.misaligned);
  call.gate.raw = check_scalars("g", g, call.pack, call.device);
  if (call.has(kMakeGate)) {
    call.gate.a_log = check_head_scalars("A_log", a_log, call.pack, call.device);
    call.gate.dt_bias = check_head_scalars("dt_bias", dt_bias, call.pack, call.device);
    if (call.gate.a_log.data == nullptr && call.pack.heads > 0) TVM_FFI_THROW(ValueError) << "A_log: expected a tensor [HV]";
  }
  call.beta = {check_scalars("beta", beta, call.pack, call.device),
               !call.has(kBetaLogits) ? 0.f : call.has(kBetaUpToTwo) ? 2.f : 1.f};
  return call;
}

// The groundwork: made by the first pass that has it, handed on by a forward pass that keeps it. In the order of plan.py.
inline void take_groundwork(RuleCall& call, const TensorView& bytes) {
  Regions workspace("groundwork", bytes, call.has(kGroundworkMade), call.device);
  const int64_t rows = call.pack.tokens * call.heads.key_heads;
  call.pack.put_tables(workspace.take<int32_t>(4 * call.pack.table_words()));
  if (call.has(kNormaliseRows)) {
    for (int i = 0; i < 2; ++i) {
      call.normalised[i] = workspace.take<uint16_t>(rows * kHeadDim * 2);
      call.reciprocals[i] = workspace.take<float>(rows * 4);
    }
  }
  call.sums = workspace.take<float>(call.records() * kChunk * 4);
  call.inverse = workspace.take(call.records() * kSquareTileBytes);
  if (!call.native()) call.attention = workspace.take(call.records() * kSquareTileBytes);
  call.scalars = workspace.take<float>(call.records() * kScalarFloats * 4);
  workspace.finish();
}

}  // namespace cake::gdn
