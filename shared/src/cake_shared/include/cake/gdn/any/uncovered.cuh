#pragma once

#include "cake/gdn/any/places.cuh"

// uncovered_any: what no chunk writes: rows past the last sequence are zero, an empty sequence hands its state on.
// reads   token_offsets, status, states_from
// writes  the rows past token_offsets[sequences] of the results, states_to of empty sequences; NaN all of it for a malformed pack
// order   no sums; CTAs stride over the rows and the states
namespace cake::gdn {

__device__ __forceinline__ void fill_rows(const ResultRows& result, int64_t first_row, int64_t rows, uint16_t fill) {
  const int64_t begin = first_row * result.row_bytes, end = rows * result.row_bytes;
  const int64_t thread = int64_t{blockIdx.x} * kUncoveredThreads + threadIdx.x;
  const int64_t threads = int64_t{gridDim.x} * kUncoveredThreads;
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

}  // namespace cake::gdn

extern "C" __global__ void __launch_bounds__(cake::gdn::kUncoveredThreads)
    uncovered_any(const __grid_constant__ cake::gdn::UncoveredParams p) {
  using namespace cake::gdn;
  const bool sound = *p.tables.status == 0;
  const uint16_t fill = sound ? 0 : 0x7fff;  // NaN as BF16, and twice as FP32
  for (int i = 0; i < p.result_count; ++i) fill_rows(p.results[i], p.tables.token_offsets[p.tables.sequences], p.tokens, fill);
  if (p.states_to == nullptr) return;
  const float nan = __int_as_float(0x7fff7fff);
  for (int64_t item = blockIdx.x; item < int64_t{p.tables.sequences} * p.value_heads; item += gridDim.x) {
    const int64_t sequence = item / p.value_heads;
    if (p.tables.token_offsets[sequence + 1] > p.tables.token_offsets[sequence]) continue;
    for (int i = threadIdx.x; i < kStateElements; i += kUncoveredThreads) {
      const int64_t at = item * kStateElements + i;
      p.states_to[at] = !sound ? nan : p.states_from == nullptr ? 0.f : p.states_from[at];
    }
  }
}
