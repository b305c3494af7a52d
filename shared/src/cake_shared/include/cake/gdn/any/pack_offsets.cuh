#pragma once

#include "cake/work/chunks.h"
#include "cake/gdn/params.h"

// pack_offsets_any: token_offsets = cu_seqlens if it starts at 0, never decreases and ends within the buffer, else all 0;
// chunk_offsets, segment_offsets: prefix sums of chunks_of and segments_of over the sequences.
// reads   cu_seqlens (int32 or int64), each element up to three times
// writes  the three offset arrays and status; error_word of a malformed pack
// order   one CTA; thread t owns the sequences [t * share, (t + 1) * share), whose sums a block-wide scan joins. Integers: any order gives the same
// barriers  faults zeroed | faults collected | warp sums written; each is a __syncthreads of all threads
namespace cake::gdn {

struct PackOffsetsConfig {
  static constexpr int kThreads = kPackOffsetsThreads;
  static constexpr int kWarps = kThreads / 32;
};

struct PackOffsetsSmem {
  int32_t faults;
  int32_t warp_chunks[PackOffsetsConfig::kWarps];
  int32_t warp_segments[PackOffsetsConfig::kWarps];
};

__device__ inline int64_t offset_of(const PackOffsetsParams& p, int32_t index) {
  if (p.cu_seqlens == nullptr) return int64_t{index} * p.tokens_per_row;
  return p.cu_seqlens_is_int64 ? static_cast<const int64_t*>(p.cu_seqlens)[index]
                               : int64_t{static_cast<const int32_t*>(p.cu_seqlens)[index]};
}

__device__ inline int32_t inclusive_warp_sum(int32_t value, int lane) {
  for (int distance = 1; distance < 32; distance *= 2) {
    const int32_t below = __shfl_up_sync(0xffffffffu, value, distance);
    if (lane >= distance) value += below;
  }
  return value;
}

}  // namespace cake::gdn

extern "C" __global__ void __launch_bounds__(cake::gdn::kPackOffsetsThreads, 1)
    pack_offsets_any(const __grid_constant__ cake::gdn::PackOffsetsParams p) {
  using namespace cake::gdn;
  using Config = PackOffsetsConfig;
  __shared__ PackOffsetsSmem smem;
  const PackTables& tables = p.tables;
  const int32_t sequences = tables.sequences;
  const int64_t buffer_tokens = int64_t{p.rows} * p.tokens_per_row;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const int32_t share = (sequences + Config::kThreads - 1) / Config::kThreads;
  const int32_t begin = min(thread * share, sequences);
  const int32_t end = min(begin + share, sequences);

  if (thread == 0) smem.faults = 0;
  __syncthreads();
  int32_t faults = 0;
  if (thread == 0) {
    if (offset_of(p, 0) != 0) faults |= kFirstOffsetNotZero;
    if (offset_of(p, sequences) > buffer_tokens) faults |= kLastOffsetBeyondTokens;
  }
  for (int32_t i = begin; i < end; ++i) {
    if (offset_of(p, i + 1) < offset_of(p, i)) faults |= kOffsetsDecrease;
  }
  if (faults != 0) atomicOr(&smem.faults, faults);
  __syncthreads();
  faults = smem.faults;

  // Offsets that rise from 0 to at most buffer_tokens fit in 32 bits: the host has checked buffer_tokens.
  int32_t chunks = 0, segments = 0;
  if (faults == 0) {
    for (int32_t i = begin; i < end; ++i) {
      const int32_t tokens = static_cast<int32_t>(offset_of(p, i + 1) - offset_of(p, i));
      chunks += cake::work::chunks_of(tokens);
      segments += cake::work::segments_of(tokens);
    }
  }
  const int32_t chunks_to_here = inclusive_warp_sum(chunks, lane);
  const int32_t segments_to_here = inclusive_warp_sum(segments, lane);
  if (lane == 31) {
    smem.warp_chunks[warp] = chunks_to_here;
    smem.warp_segments[warp] = segments_to_here;
  }
  __syncthreads();
  int32_t first_chunk = chunks_to_here - chunks, first_segment = segments_to_here - segments;
  for (int w = 0; w < warp; ++w) {
    first_chunk += smem.warp_chunks[w];
    first_segment += smem.warp_segments[w];
  }

  for (int32_t i = begin; i < end; ++i) {
    const int32_t first = faults == 0 ? static_cast<int32_t>(offset_of(p, i)) : 0;
    const int32_t next = faults == 0 ? static_cast<int32_t>(offset_of(p, i + 1)) : 0;
    tables.token_offsets[i] = first;
    tables.chunk_offsets[i] = first_chunk;
    tables.segment_offsets[i] = first_segment;
    first_chunk += cake::work::chunks_of(next - first);
    first_segment += cake::work::segments_of(next - first);
  }
  if (thread == Config::kThreads - 1) {  // after its share, empty or not, this thread holds the totals
    tables.token_offsets[sequences] = faults == 0 ? static_cast<int32_t>(offset_of(p, sequences)) : 0;
    tables.chunk_offsets[sequences] = first_chunk;
    tables.segment_offsets[sequences] = first_segment;
    *tables.status = faults;
    if (faults != 0) *p.error_word = faults;
  }
}
