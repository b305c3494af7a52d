// The portable GEMM's launch.
#pragma once

#include "cake/gemm/host/call.h"

namespace cake::gemm {

inline GemmLaunch<PortableParams> make_portable(const TensorView& a, const TensorView& b, const TensorView& out,
                                           const OptionalTensor& workspace, const Choices& choices) {
  constexpr int kThreads = 256, kTile = 128, kStages = 3, kCtasPerMultiprocessor = 2;
  if (choices.halved) TVM_FFI_THROW(ValueError) << "halved: expected false for the portable program, got true";
  GemmCall call = check_gemm(a, b, out, choices);
  make_tiling(call, workspace, choices, kTile, kTile);
  const auto rows = [](const TensorView& x, const void* data, int outer, bool k_major) {
    return OperandRows{data, x.size(0) > 1 ? x.stride(0) : 0, x.size(outer) > 1 ? x.stride(outer) : 0, k_major};
  };
  PortableParams params{};
  params.a = rows(a, call.a, choices.a_k_major ? 1 : 2, choices.a_k_major);
  params.b = rows(b, call.b, choices.b_k_major ? 2 : 1, choices.b_k_major);
  params.m = static_cast<int32_t>(call.m);
  params.n = static_cast<int32_t>(call.n);
  params.k = static_cast<int32_t>(call.k);
  params.output = call.output;
  params.tiling = call.tiling;
  params.partials = call.partials;
  const int32_t most = choices.multiprocessors * kCtasPerMultiprocessor;
  host::LaunchConfig config{};
  config.grid = {static_cast<uint32_t>(params.tiling.units < most ? params.tiling.units : most)};
  config.block = {kThreads};
  config.smem_bytes = kStages * 2 * kTile * kBlockK * 2;
  config.programmatic = true;
  return launch_of(CAKE_KERNEL_REF(gemm_out_any), config, params, call, choices);
}

}  // namespace cake::gemm
