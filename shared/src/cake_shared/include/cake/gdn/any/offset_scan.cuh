// Token, chunk and segment offsets of a pack's sequences, made by one CTA from cu_seqlens.
#pragma once

#include "cake/gdn/params.h"
#include "cake/work/chunks.h"

namespace cake::gdn {

struct OffsetArrays {  // [sequences + 1] each
  int32_t* tokens;
  int32_t* chunks;
  int32_t* segments;
};

inline constexpr uint32_t kHasSegmentsBit = 1u << 31;

template <int kThreads>
struct OffsetScanSmem {
  int32_t faults;
  int32_t warp_chunks[kThreads / 32];
  uint32_t warp_segments[kThreads / 32];  // the top bit: whether a sequence of the warp's has several
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

// Writes the arrays and returns the pack's faults; those of a malformed pack are the arrays of as many empty sequences. A
// thread owns the sequences [t * share, (t + 1) * share), whose sums a scan of the CTA joins. All threads call it; what they
// wrote is theirs until the next barrier.
template <int kThreads>
__device__ inline int32_t scan_offsets(const PackOffsetsParams& p, const OffsetArrays& to, OffsetScanSmem<kThreads>& smem) {
  const int32_t sequences = p.tables.sequences;
  const int64_t buffer_tokens = int64_t{p.rows} * p.tokens_per_row;
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const int32_t share = (sequences + kThreads - 1) / kThreads;
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
  bool has_segments = false;
  if (faults == 0) {
    for (int32_t i = begin; i < end; ++i) {
      const int32_t tokens = static_cast<int32_t>(offset_of(p, i + 1) - offset_of(p, i));
      chunks += cake::work::chunks_of(tokens);
      segments += cake::work::segments_of(tokens);
      has_segments |= cake::work::segments_of(tokens) > 1;
    }
  }
  const int32_t chunks_to_here = inclusive_warp_sum(chunks, lane);
  const int32_t segments_to_here = inclusive_warp_sum(segments, lane);
  has_segments = __any_sync(0xffffffffu, has_segments);
  if (lane == 31) {
    smem.warp_chunks[warp] = chunks_to_here;
    smem.warp_segments[warp] = static_cast<uint32_t>(segments_to_here) | (has_segments ? kHasSegmentsBit : 0);
  }
  __syncthreads();
  int32_t first_chunk = chunks_to_here - chunks, first_segment = segments_to_here - segments;
  for (int w = 0; w < warp; ++w) {
    first_chunk += smem.warp_chunks[w];
    first_segment += static_cast<int32_t>(smem.warp_segments[w] & ~kHasSegmentsBit);
  }

  for (int32_t i = begin; i < end; ++i) {
    const int32_t first = faults == 0 ? static_cast<int32_t>(offset_of(p, i)) : 0;
    const int32_t next = faults == 0 ? static_cast<int32_t>(offset_of(p, i + 1)) : 0;
    to.tokens[i] = first;
    to.chunks[i] = first_chunk;
    to.segments[i] = first_segment;
    first_chunk += cake::work::chunks_of(next - first);
    first_segment += cake::work::segments_of(next - first);
  }
  if (thread == kThreads - 1) {  // after its share, empty or not, this thread holds the totals
    to.tokens[sequences] = faults == 0 ? static_cast<int32_t>(offset_of(p, sequences)) : 0;
    to.chunks[sequences] = first_chunk;
    to.segments[sequences] = first_segment;
  }
  return faults;
}

// As scan_offsets for fewer than 32 sequences: each warp finds all of them alone, the first one writes.
template <int kThreads>
__device__ inline int32_t scan_few_offsets(const PackOffsetsParams& p, const OffsetArrays& to, OffsetScanSmem<kThreads>& smem) {
  const int thread = static_cast<int>(threadIdx.x), lane = thread % 32, warp = thread / 32;
  const int32_t sequences = p.tables.sequences;
  const int64_t first = offset_of(p, min(lane, sequences)), next = __shfl_down_sync(~0u, first, 1);
  int32_t faults = 0;
  if (__any_sync(~0u, lane == 0 && first != 0)) faults |= kFirstOffsetNotZero;
  if (__any_sync(~0u, lane == sequences && first > int64_t{p.rows} * p.tokens_per_row)) faults |= kLastOffsetBeyondTokens;
  if (__any_sync(~0u, next < first)) faults |= kOffsetsDecrease;
  const int32_t tokens = faults == 0 ? static_cast<int32_t>(next - first) : 0;
  const int32_t chunks = cake::work::chunks_of(tokens), segments = cake::work::segments_of(tokens);
  const int32_t chunks_to_here = inclusive_warp_sum(chunks, lane), segments_to_here = inclusive_warp_sum(segments, lane);
  const bool has_segments = __any_sync(~0u, segments > 1);
  if (warp == 0 && lane <= sequences) {
    to.tokens[lane] = faults == 0 ? static_cast<int32_t>(first) : 0;
    to.chunks[lane] = chunks_to_here - chunks;
    to.segments[lane] = segments_to_here - segments;
  }
  if (lane == 0) smem.warp_segments[warp] = has_segments ? kHasSegmentsBit : 0;
  return faults;
}

// One thread tells the kernels that follow what the scan found, and the host what the pack is guilty of.
template <int kThreads>
__device__ inline void report_scan(const PackOffsetsParams& p, int32_t faults, const OffsetScanSmem<kThreads>& smem) {
  p.tables.status[kFaults] = faults;
  uint32_t found = 0;
  for (const uint32_t segments : smem.warp_segments) found |= segments;
  p.tables.status[kHasSegments] = (found & kHasSegmentsBit) != 0;
  if (faults != 0) *p.error_word = faults;
}

}  // namespace cake::gdn
