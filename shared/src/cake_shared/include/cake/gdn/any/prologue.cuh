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
// barriers  those of scan_offsets | offsets written | offsets read, gates take their place | sums made; each is a __syncthreads of
//           all threads
namespace cake::gdn {

struct ScannedOffsets {
  int32_t tokens[kScannedSequences + 1];
  int32_t chunks[kScannedSequences + 1];
  int32_t segments[kScannedSequences + 1];
};

struct PrologueSmem {
  OffsetScanSmem<kPrologueThreads> scan;
  union {
    ScannedOffsets offsets;
    GateColumns gates;  // when the offsets have been read
  };
};

// Leaves the offsets where `tables` then points; returns the pack's faults.
__device__ __forceinline__ int32_t find_offsets(const PrologueParams& p, PackTables& tables, PrologueSmem& smem) {
  if (!p.scans_offsets) return tables.status[kFaults];
  ScannedOffsets& found = smem.offsets;
  const OffsetArrays to{found.tokens, found.chunks, found.segments};
  const int32_t faults =
      tables.sequences < 32 ? scan_few_offsets(p.pack, to, smem.scan) : scan_offsets(p.pack, to, smem.scan);
  __syncthreads();
  if (blockIdx.x == 0) {
    for (int32_t i = threadIdx.x; i <= tables.sequences; i += kPrologueThreads) {
      tables.token_offsets[i] = found.tokens[i];
      tables.chunk_offsets[i] = found.chunks[i];
      tables.segment_offsets[i] = found.segments[i];
    }
    if (threadIdx.x == 0) report_scan(p.pack, faults, smem.scan);
  }
  tables.token_offsets = found.tokens;
  tables.chunk_offsets = found.chunks;
  tables.segment_offsets = found.segments;
  return faults;
}

// By hand for items that fit in 32 bits, as nearly all do: the other division is a long way.
__device__ __forceinline__ int64_t quotient(int64_t item, int32_t divisor) {
  return item >> 32 == 0 ? static_cast<int64_t>(static_cast<uint32_t>(item) / static_cast<uint32_t>(divisor)) : item / divisor;
}

__device__ __forceinline__ void fill_tables_and_gates(const PrologueParams& p, const PackTables& tables, bool sound, GateColumns& gates) {
  const int column = static_cast<int>(threadIdx.x);
  const int64_t first_item = int64_t{blockIdx.x} * kPrologueThreads, item = first_item + column;
  if (item < tables.segment_capacity) tables.segments[item] = segment_entry(tables, static_cast<int32_t>(item));
  const int32_t heads = max(p.value_heads, 1);  // without heads there are tables still
  const int64_t chunk = quotient(item, heads), left = int64_t{tables.chunk_capacity} * heads - first_item;
  const int32_t head = static_cast<int32_t>(item - chunk * heads);
  ChunkEntry entry{-1, 0, 0, 0};
  if (column < left) {
    entry = chunk_entry(tables, static_cast<int32_t>(chunk));
    if (head == 0) tables.chunks[chunk] = entry;
  }
  if (p.value_heads == 0 || left <= 0) return;
  __syncthreads();
  if (entry.sequence < 0) {
    const float fill = sound ? 0.0f : __int_as_float(0x7fffffff);
    for (int i = 0; i < kChunk; ++i) gates.of[i][column] = fill;
  } else {
    load_gates(gates, column, p.gate, place_of(entry.first_token, p.pack.tokens_per_row), entry.tokens, head);
    add_gates(gates, column);
  }
  __syncthreads();
  store_sums(p.sums + first_item * kChunk, gates, static_cast<int>(left < kPrologueThreads ? left : kPrologueThreads));
}

}  // namespace cake::gdn

extern "C" __global__ void __launch_bounds__(cake::gdn::kPrologueThreads, 6)
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
    fill_tables_and_gates(p, tables, sound, smem.gates);
  } else {
    fill_uncovered<kPrologueThreads>(p.uncovered, tables, tokens, p.value_heads, sound, threadIdx.x, cta - p.gate_ctas,
                                     p.uncovered_ctas);
  }
}
