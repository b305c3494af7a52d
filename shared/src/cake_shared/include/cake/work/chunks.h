// How a sequence is cut: a function of its length alone, the same arithmetic as cake_shared.plan. Host and device.
#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define CAKE_HOST_DEVICE __host__ __device__
#else
#define CAKE_HOST_DEVICE
#endif

namespace cake::work {

inline constexpr int32_t kChunkTokens = 64;
inline constexpr int32_t kSegmentTokens = 4096;
inline constexpr int32_t kSegmentedAboveTokens = 8192;  // a sequence up to this length is one segment
inline constexpr int32_t kSegmentChunks = kSegmentTokens / kChunkTokens;

CAKE_HOST_DEVICE constexpr int32_t chunks_of(int32_t tokens) { return (tokens + kChunkTokens - 1) / kChunkTokens; }

CAKE_HOST_DEVICE constexpr int32_t segments_of(int32_t tokens) {
  if (tokens == 0) return 0;
  return tokens <= kSegmentedAboveTokens ? 1 : (tokens + kSegmentTokens - 1) / kSegmentTokens;
}

// The chunks of every segment of the sequence but its last, which may have fewer.
CAKE_HOST_DEVICE constexpr int32_t segment_chunks_of(int32_t tokens) {
  return tokens <= kSegmentedAboveTokens ? chunks_of(tokens) : kSegmentChunks;
}

// offsets[count + 1] never decreases; the i with offsets[i] <= item < offsets[i + 1], which is unique: empty ranges have none.
CAKE_HOST_DEVICE inline int32_t range_of(const int32_t* offsets, int32_t count, int32_t item) {
  int32_t low = 0, high = count;
  while (high - low > 1) {
    const int32_t middle = low + (high - low) / 2;
    if (offsets[middle] <= item) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

}  // namespace cake::work
