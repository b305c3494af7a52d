#pragma once

#include "cake/work/chunks.h"
#include "cake/gdn/params.h"

// pack_tables_any: one entry for every chunk and every segment of the pack, in pack order; unused entries name sequence -1.
// reads   token_offsets, chunk_offsets, segment_offsets
// writes  chunks [chunk_capacity], segments [segment_capacity], every entry
// order   one thread an entry, which finds its sequence by bisection; no sums
// barriers  none
namespace cake::gdn {

using cake::work::kChunkTokens;
using cake::work::range_of;
using cake::work::segment_chunks_of;

__device__ inline ChunkEntry chunk_entry(const PackTables& tables, int32_t chunk) {
  if (chunk >= tables.chunk_offsets[tables.sequences]) return {-1, 0, 0, 0};
  const int32_t sequence = range_of(tables.chunk_offsets, tables.sequences, chunk);
  const int32_t begin = tables.token_offsets[sequence], end = tables.token_offsets[sequence + 1];
  const int32_t chunk_in_sequence = chunk - tables.chunk_offsets[sequence];
  const int32_t segment = tables.segment_offsets[sequence] + chunk_in_sequence / segment_chunks_of(end - begin);
  const int32_t first_token = begin + chunk_in_sequence * kChunkTokens;
  return {sequence, segment, first_token, min(kChunkTokens, end - first_token)};
}

__device__ inline SegmentEntry segment_entry(const PackTables& tables, int32_t segment) {
  if (segment >= tables.segment_offsets[tables.sequences]) return {-1, 0, 0, 0};
  const int32_t sequence = range_of(tables.segment_offsets, tables.sequences, segment);
  const int32_t begin = tables.token_offsets[sequence], end = tables.token_offsets[sequence + 1];
  const int32_t segment_chunks = segment_chunks_of(end - begin);
  const int32_t chunk_in_sequence = (segment - tables.segment_offsets[sequence]) * segment_chunks;
  const int32_t first_token = begin + chunk_in_sequence * kChunkTokens;
  const int32_t tokens = min(segment_chunks * kChunkTokens, end - first_token);
  return {sequence, first_token, tokens, tables.chunk_offsets[sequence] + chunk_in_sequence};
}

}  // namespace cake::gdn

extern "C" __global__ void __launch_bounds__(cake::gdn::kPackTablesThreads)
    pack_tables_any(const __grid_constant__ cake::gdn::PackTablesParams p) {
  using namespace cake::gdn;
  const PackTables& tables = p.tables;
  const int64_t entry = int64_t{blockIdx.x} * kPackTablesThreads + threadIdx.x;
  if (entry < tables.chunk_capacity) {
    tables.chunks[entry] = chunk_entry(tables, static_cast<int32_t>(entry));
  } else if (entry - tables.chunk_capacity < tables.segment_capacity) {
    const int32_t segment = static_cast<int32_t>(entry - tables.chunk_capacity);
    tables.segments[segment] = segment_entry(tables, segment);
  }
}
