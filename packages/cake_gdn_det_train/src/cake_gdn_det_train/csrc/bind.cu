// The functions that Python calls: each checks what it is given and launches its chain of stages on one stream.
#include <cstdint>
#include <limits>

#include <tvm/ffi/error.h>
#include <tvm/ffi/function.h>
#include <tvm/ffi/optional.h>

#include "cake/host/launch.h"
#include "cake/host/tensor.h"
#include "cake/work/chunks.h"
#include "params.h"

namespace cake_gdn_det_train {
namespace {

namespace host = cake::host;
using cake::work::kChunkTokens;
using cake::work::kSegmentTokens;
using host::TensorView;

// Rows of tables are addressed with 32 bits, and an item count must not wrap while a chunk's tokens are added to it.
constexpr int64_t kMaxItems = std::numeric_limits<int32_t>::max() - kChunkTokens;

uint32_t ctas_for(int64_t items, int threads) { return static_cast<uint32_t>((items + threads - 1) / threads); }

// The one buffer of all tables, laid out as cake_gdn_det_train.tables.TablePlan states: status (4 words), chunks, segments, then
// token, chunk and segment offsets.
PackTables tables_in(int32_t* words, int64_t sequences, int64_t chunks, int64_t segments) {
  constexpr int64_t kStatusWords = 4, kEntryWords = 4;
  PackTables tables{};
  tables.status = words;
  words += kStatusWords;
  tables.chunks = reinterpret_cast<ChunkEntry*>(words);
  words += chunks * kEntryWords;
  tables.segments = reinterpret_cast<SegmentEntry*>(words);
  words += segments * kEntryWords;
  tables.token_offsets = words;
  tables.chunk_offsets = words + (sequences + 1);
  tables.segment_offsets = words + 2 * (sequences + 1);
  tables.sequences = static_cast<int32_t>(sequences);
  tables.chunk_capacity = static_cast<int32_t>(chunks);
  tables.segment_capacity = static_cast<int32_t>(segments);
  return tables;
}

// Memory of the host that kernels write too: page-locked under CUDA, which DLPack does not tell; the caller answers for it.
int32_t* check_error_word(const TensorView& word) {
  const int type = word.device().device_type;
  if ((type != kDLCPU && type != kDLCUDAHost) || !host::same_dtype(word.dtype(), host::kInt32) || word.numel() != 1) {
    TVM_FFI_THROW(ValueError) << "error_word: expected one int32 in page-locked host memory, got "
                              << host::dtype_text(word.dtype()) << " of shape " << host::sizes_text(word.shape())
                              << " on device type " << type;
  }
  host::detail::declare("error_word", word, true);
  return reinterpret_cast<int32_t*>(host::detail::first_element(word));
}

// g [B, T, HV] FP32 or BF16, any strides; cu_seqlens [N + 1] int32 or int64 with B = 1, or none: then N = B.
// tables int32 [4 + 4 chunks + 4 segments + 3 (N + 1)], sums FP32 [chunks, HV, 64] with chunks = T_all / 64 + N and
// segments = T_all / 4096 + N for T_all = B * T.
void gate_sums(TensorView g, tvm::ffi::Optional<TensorView> cu_seqlens, TensorView tables_words, TensorView sums,
               TensorView error_word, int64_t stream) {
  const DLDevice device = g.device();
  const void* gates = host::check_input("g", g, {host::kFloat32, host::kBFloat16}, {host::kAny, host::kAny, host::kAny},
                                        device);
  const int64_t rows = g.size(0), tokens_per_row = g.size(1), heads = g.size(2);
  const void* offsets = nullptr;
  bool wide = false;
  int64_t sequences = rows;
  if (cu_seqlens.has_value()) {
    const TensorView& cu = cu_seqlens.value();
    offsets = host::check_input("cu_seqlens", cu, {host::kInt32, host::kInt64}, {host::kAny}, device);
    if (rows != 1 || cu.size(0) < 1 || !cu.IsContiguous()) {
      TVM_FFI_THROW(ValueError) << "cu_seqlens: expected contiguous offsets [N + 1] of a batch of one row, got shape "
                                << host::sizes_text(cu.shape()) << ", strides " << host::sizes_text(cu.strides())
                                << " and " << rows << " rows";
    }
    wide = host::same_dtype(cu.dtype(), host::kInt64);
    sequences = cu.size(0) - 1;
  }
  const int64_t tokens = rows * tokens_per_row;
  const int64_t chunks = tokens / kChunkTokens + sequences;
  const int64_t segments = tokens / kSegmentTokens + sequences;
  if (tokens > kMaxItems || chunks + segments > kMaxItems || chunks * heads / kGateSumsThreads > kMaxItems) {
    TVM_FFI_THROW(ValueError) << "g: expected at most " << kMaxItems << " tokens, chunks and segments, got shape "
                              << host::sizes_text(g.shape()) << " with " << sequences << " sequences";
  }
  const int64_t words = 4 + 4 * (chunks + segments) + 3 * (sequences + 1);
  int32_t* table = static_cast<int32_t*>(host::check_output("tables", tables_words, host::kInt32, {words}, device));
  float* out = static_cast<float*>(
      host::check_output("sums", sums, host::kFloat32, {chunks, heads, int64_t{kChunkTokens}}, device));
  const PackTables tables = tables_in(table, sequences, chunks, segments);

  const host::DeviceGuard guard(device);
  host::LaunchConfig config;
  config.stream = stream;
  config.grid.x = 1;
  config.block.x = kPackOffsetsThreads;
  host::launch(CAKE_KERNEL_REF(pack_offsets_any), config,
               PackOffsetsParams{offsets, wide ? 1 : 0, static_cast<int32_t>(tokens_per_row),
                                 static_cast<int32_t>(rows), tables, check_error_word(error_word)});
  if (chunks + segments > 0) {
    config.grid.x = ctas_for(chunks + segments, kPackTablesThreads);
    config.block.x = kPackTablesThreads;
    host::launch(CAKE_KERNEL_REF(pack_tables_any), config, PackTablesParams{tables});
  }
  if (chunks * heads > 0) {
    config.grid.x = ctas_for(chunks * heads, kGateSumsThreads);
    config.block.x = kGateSumsThreads;
    host::launch(CAKE_KERNEL_REF(gate_sums_any), config,
                 GateSumsParams{tables, gates, g.stride(0), g.stride(1), g.stride(2),
                                host::same_dtype(g.dtype(), host::kBFloat16) ? 1 : 0,
                                static_cast<int32_t>(tokens_per_row), static_cast<int32_t>(heads), out});
  }
}

}  // namespace
}  // namespace cake_gdn_det_train

TVM_FFI_DLL_EXPORT_TYPED_FUNC(gate_sums, cake_gdn_det_train::gate_sums);
