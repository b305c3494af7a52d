// The functions of the rule that Python calls; a package's bind.cu includes this once. Each checks what it is given and
// launches its chain of stages on one stream.
#pragma once

#include <tvm/ffi/function.h>

#include "cake/gdn/host/pack_stages.h"
#include "cake/gdn/host/rule_stages.h"

namespace cake::gdn {

// The tables and cumulative gates alone: g [B, T, HV] FP32 or BF16, any strides; sums FP32 [chunks, HV, 64]; tables int32
// [4 + 4 chunks + 4 segments + 3 (N + 1)].
inline void gate_sums(TensorView g, OptionalTensor cu_seqlens, TensorView tables_words, TensorView sums, TensorView error_word,
                      int64_t stream) {
  const DLDevice device = g.device();
  host::detail::check_shape("g", g, {host::kAny, host::kAny, host::kAny});
  Pack pack = check_pack(g, cu_seqlens, error_word);
  pack.put_tables(static_cast<int32_t*>(host::check_output("tables", tables_words, host::kInt32, {pack.table_words()}, device)));
  PrologueParams p{};
  p.gate.raw = check_scalars("g", g, pack, device);
  p.sums = static_cast<float*>(
      host::check_output("sums", sums, host::kFloat32, {pack.chunks, pack.heads, int64_t{kChunkTokens}}, device));
  const host::DeviceGuard guard(device);
  launch_prologue(pack, p, false, stream);
}

}  // namespace cake::gdn

TVM_FFI_DLL_EXPORT_TYPED_FUNC(gate_sums, cake::gdn::gate_sums);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(rule_forward, cake::gdn::rule_forward);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(rule_backward, cake::gdn::rule_backward);
