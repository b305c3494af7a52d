// A pack as its kernels see it: plain C++17, read by nvcc, by a C++ compiler and by the emulator.
#pragma once

#include <cstdint>

#include "cake/host/kernel_ref.h"

namespace cake::gdn {

// Threads of a CTA, which the launch and the kernel must agree on.
inline constexpr int kPackOffsetsThreads = 1024;

// Words of PackTables::status.
enum StatusWord : int { kFaults = 0, kHasSegments = 1 };  // kHasSegments: a sequence has several segments

// What a pack's offsets can be guilty of; a malformed pack's status is the sum of its faults.
enum PackFault : int32_t {
  kFirstOffsetNotZero = 1,
  kOffsetsDecrease = 2,
  kLastOffsetBeyondTokens = 4,
};

// Rows of the tables, as cake_shared.plan.Chunk and Segment; sequence -1 marks a row that the pack does not use.
struct alignas(16) ChunkEntry {
  int32_t sequence;
  int32_t segment;  // row of the segment table
  int32_t first_token;  // row of the token buffer [B * T]
  int32_t tokens;
};

struct alignas(16) SegmentEntry {
  int32_t sequence;
  int32_t first_token;
  int32_t tokens;
  int32_t first_chunk;  // row of the chunk table
};

// The tables of one pack; the capacities come from N and T, the contents from the offsets.
struct PackTables {
  int32_t* status;  // [2]: 0, or the faults of a malformed pack, which is then treated as N empty sequences; is any sequence long
  ChunkEntry* chunks;  // [chunk_capacity]
  SegmentEntry* segments;  // [segment_capacity]
  int32_t* token_offsets;  // [sequences + 1]
  int32_t* chunk_offsets;  // [sequences + 1]
  int32_t* segment_offsets;  // [sequences + 1]
  int32_t sequences;
  int32_t chunk_capacity;
  int32_t segment_capacity;
};

struct PackOffsetsParams {
  const void* cu_seqlens;  // [sequences + 1]; null: every sequence has tokens_per_row tokens
  int32_t cu_seqlens_is_int64;
  int32_t tokens_per_row;
  int32_t rows;
  PackTables tables;
  int32_t* error_word;  // memory of the host: the faults of the last malformed pack, left alone by well-formed ones
};

}  // namespace cake::gdn

CAKE_DECLARE_KERNEL(pack_offsets_any, cake::gdn::PackOffsetsParams)
