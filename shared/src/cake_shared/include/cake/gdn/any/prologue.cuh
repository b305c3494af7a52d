#pragma once

#include "cake/gdn/any/chunk_gates.cuh"
#include "cake/gdn/any/normalised_rows.cuh"
#include "cake/gdn/any/offset_scan.cuh"
#include "cake/gdn/any/pack_entries.cuh"
#include "cake/gdn/any/uncovered.cuh"

// prologue_any: what a call needs before its first product, in one launch. The CTAs are of three kinds, in this order:
//   gate_ctas       the chunk and segment tables and the cumulative gates, a thread a (chunk, value head)
//   uncovered_ctas  rows and states that no chunk writes
//   row_ctas each   rows of q, then of k, of unit norm
// reads   cu_seqlens, or the offsets that pack_offsets made; gates, A_log, dt_bias; q, k; states of empty sequences
// writes  tables and status, sums (0 for unused chunks, NaN for a malformed pack), normalised rows, uncovered rows and states
// order   see chunk_gates.cuh and normalised_rows.cuh; the CTAs of the first two kinds each scan the offsets of short packs
// barriers  those of scan_offsets | offsets written; each is a __syncthreads of all threads
namespace cake::gdn {

struct PrologueSmem {
  OffsetScanSmem<kPrologueThreads> scan;
  int32_t tokens[kScannedSequences + 1];
  int32_t chunks[kScannedSequences + 1];
  int32_t segments[kScannedSequences + 1];
};

// Leaves the offsets where `tables` then points; returns the pack's faults.
__device__ __forceinline__ int32_t find_offsets(const PrologueParams& p, PackTables& tables, PrologueSmem& smem) {
  if (!p.scans_offsets) return tables.status[kFaults];
  const int32_t faults = scan_offsets(p.pack, {smem.tokens, smem.chunks, smem.segments}, smem.scan);
  __syncthreads();
  if (blockIdx.x == 0) {
    for (int32_t i = threadIdx.x; i <= tables.sequences; i += kPrologueThreads) {
      tables.token_offsets[i] = smem.tokens[i];
      tables.chunk_offsets[i] = smem.chunks[i];
      tables.segment_offsets[i] = smem.segments[i];
    }
    if (threadIdx.x == 0) report_scan(p.pack, faults, smem.scan);
  }
  tables.token_offsets = smem.tokens;
  tables.chunk_offsets = smem.chunks;
  tables.segment_offsets = smem.segments;
  return faults;
}

__device__ __forceinline__ void fill_tables_and_gates(const PrologueParams& p, const PackTables& tables, bool sound) {
  const int64_t item = int64_t{blockIdx.x} * kPrologueThreads + threadIdx.x;
  if (item < tables.segment_capacity) tables.segments[item] = segment_entry(tables, static_cast<int32_t>(item));
  const int32_t heads = max(p.value_heads, 1);  // without heads there are tables still
  const int64_t chunk = item / heads;
  if (chunk >= tables.chunk_capacity) return;
  const int32_t head = static_cast<int32_t>(item - chunk * heads);
  const ChunkEntry entry = chunk_entry(tables, static_cast<int32_t>(chunk));
  if (head == 0) tables.chunks[chunk] = entry;
  if (p.value_heads == 0) return;
  float* sums = p.sums + item * kChunk;
  if (entry.sequence < 0) {
    const float fill = sound ? 0.0f : __int_as_float(0x7fffffff);
    for (int i = 0; i < kChunk / 4; ++i) reinterpret_cast<float4*>(sums)[i] = make_float4(fill, fill, fill, fill);
    return;
  }
  add_chunk_gates(p.gate, place_of(entry.first_token, p.pack.tokens_per_row), entry.tokens, head, sums);
}

}  // namespace cake::gdn

extern "C" __global__ void __launch_bounds__(cake::gdn::kPrologueThreads, 8)
    prologue_any(const __grid_constant__ cake::gdn::PrologueParams p) {
  using namespace cake::gdn;
  __shared__ PrologueSmem smem;
  begin_stage();
  const int cta = static_cast<int>(blockIdx.x);
  const int64_t tokens = int64_t{p.pack.rows} * p.pack.tokens_per_row;
  const int first_row_cta = p.gate_ctas + p.uncovered_ctas;
  if (cta >= first_row_cta) {
    constexpr int kWarps = kPrologueThreads / 32;
    const int part = (cta - first_row_cta) % p.row_ctas;
    const int64_t first = (int64_t{part} * kWarps + threadIdx.x / 32) * kPrologueRowsPerWarp;
    normalise_rows<kPrologueRowsPerWarp>(p.rows[(cta - first_row_cta) / p.row_ctas], first, tokens * p.key_heads, p.key_heads,
                                         p.pack.tokens_per_row, threadIdx.x % 32);
    return;
  }
  PackTables tables = p.pack.tables;
  const bool sound = find_offsets(p, tables, smem) == 0;
  if (cta < p.gate_ctas) {
    fill_tables_and_gates(p, tables, sound);
  } else {
    fill_uncovered<kPrologueThreads>(p.uncovered, tables, tokens, p.value_heads, sound, threadIdx.x, cta - p.gate_ctas,
                                     p.uncovered_ctas);
  }
}
