// Where a chunk's rows, a segment's states and a head's scalars lie.
#pragma once

#include "cake/gdn/rule_params.h"
#include "cake/ptx/grid_dependency.cuh"

#include <cuda_bf16.h>

namespace cake::gdn {

// What every stage begins with, all CTAs, before an access of global memory or a return: stages then run in order though the next
// one becomes resident early.
__device__ __forceinline__ void begin_stage() {
  cake::ptx::launch_dependents();
  cake::ptx::wait_for_predecessor();
}

struct TokenPlace {
  int32_t row;
  int32_t token;  // in the row
};

__device__ __forceinline__ TokenPlace place_of(int32_t token, int32_t tokens_per_row) {
  if (token < tokens_per_row) return {0, token};  // all of a pack: no division for them
  const int32_t row = token / tokens_per_row;
  return {row, token - row * tokens_per_row};
}

__device__ __forceinline__ char* row_pointer(const TokenRows& rows, TokenPlace at, int head) {
  return static_cast<char*>(rows.data) + 2 * (at.row * rows.row_stride + at.token * rows.token_stride + head * rows.head_stride);
}

__device__ __forceinline__ float load_number(const void* data, int64_t element, bool is_bf16) {
  return is_bf16 ? __bfloat162float(static_cast<const __nv_bfloat16*>(data)[element]) : static_cast<const float*>(data)[element];
}

__device__ __forceinline__ void store_number(void* data, int64_t element, bool is_bf16, float value) {
  if (is_bf16) {
    static_cast<__nv_bfloat16*>(data)[element] = __float2bfloat16_rn(value);
  } else {
    static_cast<float*>(data)[element] = value;
  }
}

__device__ __forceinline__ int64_t element_of(const TokenScalars& s, TokenPlace at, int head) {
  return at.row * s.row_stride + at.token * s.token_stride + head * s.head_stride;
}

__device__ __forceinline__ float load_scalar(const TokenScalars& s, TokenPlace at, int head) {
  return load_number(s.data, element_of(s, at, head), s.is_bf16);
}

__device__ __forceinline__ void store_scalar(const TokenScalars& s, TokenPlace at, int head, float value) {
  store_number(s.data, element_of(s, at, head), s.is_bf16, value);
}

__device__ __forceinline__ float load_scalar(const HeadScalars& s, int head) {
  return load_number(s.data, head * s.stride, s.is_bf16);
}

// A segment with what its sequence adds: where it stands among the sequence's segments.
struct SegmentPlace {
  int32_t sequence;  // -1: the table's row is unused
  int32_t first_token;
  int32_t first_chunk;
  int32_t chunks;
  int32_t index;
  int32_t segments;

  __device__ __forceinline__ bool first() const { return index == 0; }
  __device__ __forceinline__ bool last() const { return index + 1 == segments; }
};

__device__ __forceinline__ SegmentPlace segment_place(const PackTables& tables, uint32_t segment) {
  using cake::work::chunks_of;
  const SegmentEntry entry = tables.segments[segment];
  if (entry.sequence < 0) return {-1, 0, 0, 0, 0, 0};
  const int32_t begin = tables.token_offsets[entry.sequence];
  const int32_t segments = cake::work::segments_of(tables.token_offsets[entry.sequence + 1] - begin);
  const int32_t index = segments == 1 ? 0 : (entry.first_token - begin) / cake::work::kSegmentTokens;
  return {entry.sequence, entry.first_token, entry.first_chunk, chunks_of(entry.tokens), index, segments};
}

// Offset of the matrix of a segment after the first of its sequence, in an array [slots, value_heads, 128, 128]; `step` asks
// for a later segment of the same sequence. A slot belongs to a stretch of kSegmentTokens tokens of a row: such a segment
// starts behind the first stretch, and no two start in the same one. So slots need no table and none is wasted on short sequences.
__device__ __forceinline__ int64_t slot_offset(const SegmentPlace& segment, const Heads& heads, int32_t slots_per_row, int head,
                                               int step = 0) {
  constexpr int32_t kTokens = cake::work::kSegmentTokens;
  const TokenPlace at = place_of(segment.first_token + step * kTokens, heads.tokens_per_row);
  const int64_t slot = int64_t{at.row} * slots_per_row + at.token / kTokens - 1;
  return (slot * heads.value_heads + head) * kStateElements;
}

__device__ __forceinline__ float* state_of(const States& states, int32_t sequence, const Heads& heads, int head) {
  return states.data + (int64_t{sequence} * heads.value_heads + head) * kStateElements;
}

}  // namespace cake::gdn
