// The pack of a call as the host knows it, and the stages that every call begins with. Host side.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include <tvm/ffi/error.h>
#include <tvm/ffi/optional.h>

#include "cake/host/launch.h"
#include "cake/host/tensor.h"
#include "cake/work/chunks.h"
#include "cake/gdn/rule_params.h"

namespace cake::gdn {

namespace host = cake::host;
using cake::work::kChunkTokens;
using cake::work::kSegmentTokens;
using host::TensorView;

// Rows of tables are addressed with 32 bits, and an item count must not wrap while a chunk's tokens are added to it.
inline constexpr int64_t kMaxItems = std::numeric_limits<int32_t>::max() - kChunkTokens;

// The one buffer of all tables, laid out as cake_shared.gdn.cuda.tables.TablePlan states: status (4 words), chunks, segments,
// then token, chunk and segment offsets.
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
  int64_t table_words() const { return 4 + 4 * (chunks + segments) + 3 * (sequences + 1); }
  void put_tables(int32_t* words) { offsets.tables = tables_in(words, sequences, chunks, segments); }
  // Whether rows past the last sequence, or empty sequences, are possible.
  bool may_leave_rows() const { return offsets.cu_seqlens != nullptr || tokens_per_row == 0; }
};

// g [B, T, HV] gives the shape; cu_seqlens [N + 1] int32 or int64 with B = 1, or none: then N = B. The capacities are
// chunks = B T / 64 + N and segments = B T / 4096 + N; the tables are still to be put somewhere.
inline Pack check_pack(const TensorView& g, const tvm::ffi::Optional<TensorView>& cu_seqlens, const TensorView& error_word) {
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
      pack.chunks * pack.heads / kPrologueThreads > kMaxItems) {
    TVM_FFI_THROW(ValueError) << "g: expected at most " << kMaxItems << " tokens, chunks and segments, got shape "
                              << host::sizes_text(g.shape()) << " with " << pack.sequences << " sequences";
  }
  pack.offsets.cu_seqlens = offsets;
  pack.offsets.cu_seqlens_is_int64 = wide ? 1 : 0;
  pack.offsets.tokens_per_row = static_cast<int32_t>(pack.tokens_per_row);
  pack.offsets.rows = static_cast<int32_t>(pack.rows);
  pack.offsets.error_word = check_error_word(error_word);
  return pack;
}

// `early` lets the CTAs become resident while the stage before still runs, where they wait for its end (see begin_stage). It is
// measured to pay for a few stages only: CTAs of a chain that come early share multiprocessors while others stay idle.
template <class Params>
void launch_stage(host::KernelRef<Params> kernel, int64_t ctas, int threads, uint32_t smem_bytes, int64_t stream,
                  const Params& params, bool early = false) {
  if (ctas == 0) return;
  if (ctas > std::numeric_limits<int32_t>::max()) {
    TVM_FFI_THROW(ValueError) << "g: expected chunks and heads that make at most 2^31 - 1 CTAs, got " << ctas;
  }
  host::LaunchConfig config;
  config.stream = stream;
  config.grid.x = static_cast<uint32_t>(ctas);
  config.block.x = static_cast<uint32_t>(threads);
  config.smem_bytes = smem_bytes;
  config.programmatic = early;
  host::launch(kernel, config, params);
}

// The first launches of a call. Of `p` the caller fills the gates, the sums, the results and, with key heads, the rows to
// normalise. Where tables, sums and rows are made, only what no chunk writes is left.
inline void launch_prologue(const Pack& pack, PrologueParams p, bool made, int64_t stream) {
  p.pack = pack.offsets;
  p.value_heads = static_cast<int32_t>(pack.heads);
  p.scans_offsets = !made && pack.sequences <= kScannedSequences ? 1 : 0;
  if (!made && !p.scans_offsets) {
    launch_stage(CAKE_KERNEL_REF(pack_offsets_any), 1, kPackOffsetsThreads, 0, stream, pack.offsets);
  }
  const int64_t entries = std::max({pack.chunks * std::max(pack.heads, int64_t{1}), pack.segments, int64_t{1}});
  const int64_t rows_per_cta = kPrologueThreads / 32 * kPrologueRowsPerWarp;
  const int64_t gate_ctas = made ? 0 : (entries + kPrologueThreads - 1) / kPrologueThreads;
  const int64_t row_ctas = made ? 0 : (pack.tokens * p.key_heads + rows_per_cta - 1) / rows_per_cta;
  p.uncovered_ctas = p.uncovered.result_count > 0 && pack.may_leave_rows() ? kUncoveredCtas : 0;
  const int64_t ctas = gate_ctas + p.uncovered_ctas + 2 * row_ctas;
  p.gate_ctas = static_cast<int32_t>(gate_ctas);
  p.row_ctas = static_cast<int32_t>(row_ctas);
  launch_stage(CAKE_KERNEL_REF(prologue_any), ctas, kPrologueThreads, 0, stream, p);
}

}  // namespace cake::gdn
