// The chunks and heads that one launch of a native stage of the backward pass has. Plain C++17, host and device.
//
// Halves in time: the chunks of a pack are coloured by their index in the chunk table, kHalfRun earlier ones and kHalfRun later ones in
// turn. A segment's later half has as many chunks, its last ones, as later colours fall on it. So how many chunks of a half come before a
// segment follows from its first chunk alone, the chunks of a half fill its records without a gap, and no pack has more than
// half_chunks(chunks). A segment of n chunks has at most (n + kHalfRun) / 2 in a half. It is cut only where colours change, which is at most
// once in kHalfRun chunks: a cut's slot is that of the run in which its segment begins.
#pragma once

#include <cstdint>

#include "cake/work/chunks.h"

namespace cake::gdn {

inline constexpr int32_t kHalfRun = 16;

enum class Half : int32_t { kBoth = 0, kLater = 1, kEarlier = 2 };

// How many of the first `chunks` chunks have the colour of a half.
CAKE_HOST_DEVICE constexpr int32_t half_chunks(Half half, int32_t chunks) {
  if (half == Half::kBoth) return chunks;
  const int32_t periods = chunks / (2 * kHalfRun), rest = chunks - periods * 2 * kHalfRun;
  const int32_t earlier = rest < kHalfRun ? rest : kHalfRun;
  return periods * kHalfRun + (half == Half::kEarlier ? earlier : rest - earlier);
}

// The chunk whose colour makes it the nth of a half: it lies in the segment that has the half's nth record.
CAKE_HOST_DEVICE constexpr int32_t coloured_chunk(Half half, int32_t nth) {
  if (half == Half::kBoth) return nth;
  return nth + nth / kHalfRun * kHalfRun + (half == Half::kLater ? kHalfRun : 0);
}

// Cuts that a pack of so many chunks can have.
CAKE_HOST_DEVICE constexpr int64_t cut_slots(int64_t chunks) { return chunks > 0 ? (chunks - 1) / kHalfRun : 0; }
CAKE_HOST_DEVICE constexpr int32_t cut_slot(int32_t first_chunk) { return first_chunk / kHalfRun; }

// Chunks of a segment in a half: rows of the chunk table, and the record of the first among those of the half.
struct HalfChunks {
  int32_t first, chunks, first_record;
};

CAKE_HOST_DEVICE constexpr HalfChunks half_of(Half half, int32_t first_chunk, int32_t chunks) {
  const int32_t earlier = half_chunks(Half::kEarlier, first_chunk + chunks) - half_chunks(Half::kEarlier, first_chunk);
  const int32_t record = half_chunks(half, first_chunk);
  if (half == Half::kBoth) return {first_chunk, chunks, record};
  if (half == Half::kEarlier) return {first_chunk, earlier, record};
  return {first_chunk + earlier, chunks - earlier, record};
}

// Tiles of S0, V' and dS1 are those of these chunks and of the value heads of these key heads alone, indexed by record of the half *
// value heads + head - the first of these heads.
struct WavePart {
  int32_t first_key_head, key_heads;
  Half half;

  CAKE_HOST_DEVICE constexpr int32_t first_value_head(int32_t group) const { return first_key_head * group; }
  CAKE_HOST_DEVICE constexpr int32_t value_heads(int32_t group) const { return key_heads * group; }
  CAKE_HOST_DEVICE constexpr int64_t tile(int32_t group, int32_t record, int32_t head) const {
    return int64_t{record} * value_heads(group) + head - first_value_head(group);
  }
};

}  // namespace cake::gdn
