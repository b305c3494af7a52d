// What no chunk writes: rows past the last sequence are zero, an empty sequence hands its state on; NaN all of it for a malformed
// pack. No sums; kThreads threads of each of some CTAs stride over the rows and the states.
#pragma once

#include "cake/gdn/any/places.cuh"

namespace cake::gdn {

template <int kThreads>
__device__ __forceinline__ void fill_rows(const ResultRows& result, int64_t first_row, int64_t rows, uint16_t fill,
                                          int own_thread, int cta, int ctas) {
  const int64_t begin = first_row * result.row_bytes, end = rows * result.row_bytes;
  const int64_t thread = int64_t{cta} * kThreads + own_thread;
  const int64_t threads = int64_t{ctas} * kThreads;
  char* data = static_cast<char*>(result.data);
  if (result.row_bytes % 16 == 0) {
    const uint32_t word = fill | uint32_t{fill} << 16;
    for (int64_t at = begin + 16 * thread; at < end; at += 16 * threads) {
      *reinterpret_cast<uint4*>(data + at) = make_uint4(word, word, word, word);
    }
  } else {
    for (int64_t at = begin + 2 * thread; at < end; at += 2 * threads) *reinterpret_cast<uint16_t*>(data + at) = fill;
  }
}

template <int kThreads>
__device__ __forceinline__ void fill_uncovered(const Uncovered& p, const PackTables& tables, int64_t tokens, int value_heads,
                                               bool sound, int thread, int cta, int ctas) {
  const uint16_t fill = sound ? 0 : 0x7fff;  // NaN as BF16, and twice as FP32
  for (int i = 0; i < p.result_count; ++i) {
    fill_rows<kThreads>(p.results[i], tables.token_offsets[tables.sequences], tokens, fill, thread, cta, ctas);
  }
  if (p.states_to == nullptr) return;
  const float nan = __int_as_float(0x7fff7fff);
  for (int64_t item = cta; item < int64_t{tables.sequences} * value_heads; item += ctas) {
    const int64_t sequence = item / value_heads;
    if (tables.token_offsets[sequence + 1] > tables.token_offsets[sequence]) continue;
    for (int i = thread; i < kStateElements; i += kThreads) {
      const int64_t at = item * kStateElements + i;
      p.states_to[at] = !sound ? nan : p.states_from == nullptr ? 0.f : p.states_from[at];
    }
  }
}

// A stage's CTAs with what the call leaves to it: that of a pack, whose tokens are all in one row.
template <int kThreads>
__device__ __forceinline__ void fill_uncovered_by_stage(const Uncovered& p, const PackTables& tables, const Heads& heads, int thread) {
  const int ctas = min(static_cast<int>(gridDim.x), kUncoveredCtas), cta = static_cast<int>(blockIdx.x);
  if (p.result_count == 0 || cta >= ctas) return;
  fill_uncovered<kThreads>(p, tables, heads.tokens_per_row, heads.value_heads, *tables.status == 0, thread, cta, ctas);
}

}  // namespace cake::gdn
