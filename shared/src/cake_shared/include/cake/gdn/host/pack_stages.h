// The stages that every call begins with: offsets and tables of the pack, cumulative gates. Host side.
#pragma once

#include <cstdint>
#include <limits>

#include <tvm/ffi/error.h>
#include <tvm/ffi/optional.h>

#include "cake/host/launch.h"
#include "cake/host/tensor.h"
#include "cake/work/chunks.h"
#include "cake/gdn/params.h"

namespace cake::gdn {

namespace host = cake::host;
using cake::work::kChunkTokens;
using cake::work::kSegmentTokens;
using host::TensorView;

// Rows of tables are addressed with 32 bits, and an item count must not wrap while a chunk's tokens are added to it.
inline constexpr int64_t kMaxItems = std::numeric_limits<int32_t>::max() - kChunkTokens;

inline uint32_t ctas_for(int64_t items, int threads) { return static_cast<uint32_t>((items + threads - 1) / threads); }

// The one buffer of all tables, laid out as cake_shared.gdn.cuda.tables.TablePlan states: status (4 words), chunks, segments, then
// token, chunk and segment offsets.
inline PackTables tables_in(int32_t* words, int64_t sequences, int64_t chunks, int64_t segments) {
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
inline int32_t* check_error_word(const TensorView& word) {
  const int type = word.device().device_type;
  if ((type != kDLCPU && type != kDLCUDAHost) || !host::same_dtype(word.dtype(), host::kInt32) || word.numel() != 1) {
    TVM_FFI_THROW(ValueError) << "error_word: expected one int32 in page-locked host memory, got "
                              << host::dtype_text(word.dtype()) << " of shape " << host::sizes_text(word.shape())
                              << " on device type " << type;
  }
  host::detail::declare("error_word", word, true);
  return reinterpret_cast<int32_t*>(host::detail::first_element(word));
}

// A pack as the host knows it: shapes and capacities, and where its tables go.
struct Pack {
  int64_t rows, tokens_per_row, tokens, heads, sequences, chunks, segments;
  PackOffsetsParams offsets;  // holds the tables

  const PackTables& tables() const { return offsets.tables; }
};

// g [B, T, HV] gives the shape; cu_seqlens [N + 1] int32 or int64 with B = 1, or none: then N = B. tables int32
// [4 + 4 chunks + 4 segments + 3 (N + 1)] with chunks = B T / 64 + N and segments = B T / 4096 + N.
inline Pack check_pack(const TensorView& g, const tvm::ffi::Optional<TensorView>& cu_seqlens, const TensorView& tables_words,
                       const TensorView& error_word) {
  const DLDevice device = g.device();
  Pack pack{};
  pack.rows = g.size(0);
  pack.tokens_per_row = g.size(1);
  pack.heads = g.size(2);
  pack.sequences = pack.rows;
  const void* offsets = nullptr;
  bool wide = false;
  if (cu_seqlens.has_value()) {
    const TensorView& cu = cu_seqlens.value();
    offsets = host::check_input("cu_seqlens", cu, {host::kInt32, host::kInt64}, {host::kAny}, device);
    if (pack.rows != 1 || cu.size(0) < 1 || !cu.IsContiguous()) {
      TVM_FFI_THROW(ValueError) << "cu_seqlens: expected contiguous offsets [N + 1] of a batch of one row, got shape "
                                << host::sizes_text(cu.shape()) << ", strides " << host::sizes_text(cu.strides())
                                << " and " << pack.rows << " rows";
    }
    wide = host::same_dtype(cu.dtype(), host::kInt64);
    pack.sequences = cu.size(0) - 1;
  }
  pack.tokens = pack.rows * pack.tokens_per_row;
  pack.chunks = pack.tokens / kChunkTokens + pack.sequences;
  pack.segments = pack.tokens / kSegmentTokens + pack.sequences;
  if (pack.tokens > kMaxItems || pack.chunks + pack.segments > kMaxItems ||
      pack.chunks * pack.heads / kGateSumsThreads > kMaxItems) {
    TVM_FFI_THROW(ValueError) << "g: expected at most " << kMaxItems << " tokens, chunks and segments, got shape "
                              << host::sizes_text(g.shape()) << " with " << pack.sequences << " sequences";
  }
  const int64_t words = 4 + 4 * (pack.chunks + pack.segments) + 3 * (pack.sequences + 1);
  int32_t* table = static_cast<int32_t*>(host::check_output("tables", tables_words, host::kInt32, {words}, device));
  pack.offsets = {offsets, wide ? 1 : 0, static_cast<int32_t>(pack.tokens_per_row), static_cast<int32_t>(pack.rows),
                  tables_in(table, pack.sequences, pack.chunks, pack.segments), check_error_word(error_word)};
  return pack;
}

inline void launch_pack_tables(const Pack& pack, int64_t stream) {
  host::LaunchConfig config;
  config.stream = stream;
  config.grid.x = 1;
  config.block.x = kPackOffsetsThreads;
  host::launch(CAKE_KERNEL_REF(pack_offsets_any), config, pack.offsets);
  if (pack.chunks + pack.segments > 0) {
    config.grid.x = ctas_for(pack.chunks + pack.segments, kPackTablesThreads);
    config.block.x = kPackTablesThreads;
    host::launch(CAKE_KERNEL_REF(pack_tables_any), config, PackTablesParams{pack.tables()});
  }
}

// Strides of g [B, T, HV] in elements.
struct GateStrides {
  int64_t row, token, head;
};

inline void launch_gate_sums(const Pack& pack, const void* g, GateStrides strides, bool is_bf16, float* sums, int64_t stream) {
  if (pack.chunks * pack.heads == 0) return;
  host::LaunchConfig config;
  config.stream = stream;
  config.grid.x = ctas_for(pack.chunks * pack.heads, kGateSumsThreads);
  config.block.x = kGateSumsThreads;
  host::launch(CAKE_KERNEL_REF(gate_sums_any), config,
               GateSumsParams{pack.tables(), g, strides.row, strides.token, strides.head, is_bf16 ? 1 : 0,
                              static_cast<int32_t>(pack.tokens_per_row), static_cast<int32_t>(pack.heads), sums});
}

}  // namespace cake::gdn
