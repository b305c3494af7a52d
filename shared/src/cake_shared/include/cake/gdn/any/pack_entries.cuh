// One entry of the chunk or segment table, found from the offsets by bisection; unused entries name sequence -1.
#pragma once

#include "cake/gdn/params.h"
#include "cake/work/chunks.h"

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
