// The functions that Python calls: each checks what it is given and launches its chain of stages on one stream.
#include <tvm/ffi/function.h>

#include "pack_stages.h"
#include "rule_stages.h"

namespace cake_gdn_det_train {
namespace {

// The gate stage alone: g [B, T, HV] FP32 or BF16, any strides; sums FP32 [chunks, HV, 64].
void gate_sums(TensorView g, tvm::ffi::Optional<TensorView> cu_seqlens, TensorView tables_words, TensorView sums,
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

}  // namespace
}  // namespace cake_gdn_det_train

TVM_FFI_DLL_EXPORT_TYPED_FUNC(gate_sums, cake_gdn_det_train::gate_sums);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(rule_forward, cake_gdn_det_train::rule_forward);
TVM_FFI_DLL_EXPORT_TYPED_FUNC(rule_backward, cake_gdn_det_train::rule_backward);
