// The functions of the rule that Python calls; a package's bind.cu includes this once. Each checks what it is given and
// launches its chain of stages on one stream.
#pragma once

#include <tvm/ffi/function.h>

#include "cake/gdn/host/pack_stages.h"
#include "cake/gdn/host/rule_stages.h"

namespace cake::gdn {

// The gate stage alone: g [B, T, HV] FP32 or BF16, any strides; sums FP32 [chunks, HV, 64].
inline void gate_sums(TensorView g, tvm::ffi::Optional<TensorView> cu_seqlens, TensorView tables_words, TensorView sums,
                      TensorView error_word, int64_t stream) {
  const DLDevice device = g.device();
  const void* gates = host::check_input("g", g, {host::kFloat32, host::kBFloat16}, {host::kAny, host::kAny, host::kAny},
                                        device);
  const Pack pack = check_pack(g, cu_seqlens, tables_words, error_word);
  float* out = static_cast<float*>(
      host::check_output("sums", sums, host::kFloat32, {pack.chunks, pack.heads, int64_t{kChunkTokens}}, device));
  const host::DeviceGuard guard(device);
  launch_pack_tables(pack, stream);
  launch_gate_sums(pack, gates, {g.stride(0), g.stride(1), g.stride(2)}, host::same_dtype(g.dtype(), host::kBFloat16), out,
                   stream);
}

}  // namespace cake::gdn

TVM_FFI_DLL_EXPORT_TYPED_FUNC(gate_sums, cake::gdn::gate_sums);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(rule_forward, cake::gdn::rule_forward);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(rule_backward, cake::gdn::rule_backward);
