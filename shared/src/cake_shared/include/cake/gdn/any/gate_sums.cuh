#pragma once

#include "cake/work/chunks.h"
#include "cake/gdn/params.h"

// gate_sums_any: sums[chunk, head, i] = max(g_0, -128) + ... + max(g_i, -128) over the tokens of the chunk, rounded once to FP32.
// reads   the chunk table, status, g (FP32 or BF16, any strides)
// writes  sums, every element: rows past a chunk's last token repeat its last sum, unused chunks are 0, all of a malformed pack is NaN
// order   one thread a (chunk, head), tokens ascending; the running sum is two words by exact two-sums, so its error does not grow
// barriers  none
namespace cake::gdn {

struct GateSumsConfig {
  static constexpr int kTokensInFlight = 16;  // loads that wait for memory together
  // exp(-128) is 0 in FP32, so nothing of the past survives such a gate, however strong: the clamp keeps |sum| <= 8192 and
  // with it the error of every difference of two sums below 2^-11. NaN passes through.
  static constexpr float kGateFloor = -128.0f;
};

struct TwoWordSum {
  float high = 0.0f, low = 0.0f;

  __device__ void add(float term) {
    const float sum = __fadd_rn(high, term);
    const float taken = __fsub_rn(sum, high);
    const float lost = __fadd_rn(__fsub_rn(high, __fsub_rn(sum, taken)), __fsub_rn(term, taken));
    high = sum;
    low = __fadd_rn(low, lost);
  }
  __device__ float rounded() const { return __fadd_rn(high, low); }
};

__device__ inline float to_float(float gate) { return gate; }
__device__ inline float to_float(uint16_t bf16) { return __uint_as_float(uint32_t{bf16} << 16); }

template <class Element>
__device__ inline void add_chunk(const Element* gates, int64_t stride, int32_t tokens, float4* sums) {
  using Config = GateSumsConfig;
  TwoWordSum running;
#pragma unroll 1
  for (int batch = 0; batch < cake::work::kChunkTokens; batch += Config::kTokensInFlight) {
    float out[Config::kTokensInFlight];
#pragma unroll
    for (int i = 0; i < Config::kTokensInFlight; ++i) {
      out[i] = batch + i < tokens ? to_float(gates[(batch + i) * stride]) : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < Config::kTokensInFlight; ++i) {
      running.add(out[i] < Config::kGateFloor ? Config::kGateFloor : out[i]);  // a 0 past the last token moves neither word
      out[i] = running.rounded();
    }
#pragma unroll
    for (int i = 0; i < Config::kTokensInFlight; i += 4) {
      *sums++ = make_float4(out[i], out[i + 1], out[i + 2], out[i + 3]);
    }
  }
}

}  // namespace cake::gdn

extern "C" __global__ void __launch_bounds__(cake::gdn::kGateSumsThreads)
    gate_sums_any(const __grid_constant__ cake::gdn::GateSumsParams p) {
  using namespace cake::gdn;
  constexpr int kChunkTokens = cake::work::kChunkTokens;
  const int64_t item = int64_t{blockIdx.x} * kGateSumsThreads + threadIdx.x;
  if (item >= int64_t{p.tables.chunk_capacity} * p.heads) return;
  const int32_t chunk = static_cast<int32_t>(item / p.heads);
  const int32_t head = static_cast<int32_t>(item - int64_t{chunk} * p.heads);
  const ChunkEntry entry = p.tables.chunks[chunk];
  float4* sums = reinterpret_cast<float4*>(p.sums + item * kChunkTokens);

  if (entry.sequence < 0) {
    const float fill = *p.tables.status == 0 ? 0.0f : __int_as_float(0x7fffffff);
    for (int store = 0; store < kChunkTokens / 4; ++store) sums[store] = make_float4(fill, fill, fill, fill);
    return;
  }
  const int32_t row = entry.first_token / p.tokens_per_row;
  const int64_t first = row * p.row_stride + (entry.first_token - row * p.tokens_per_row) * p.token_stride +
                        head * p.head_stride;
  if (p.g_is_bf16) {
    add_chunk(static_cast<const uint16_t*>(p.g) + first, p.token_stride, entry.tokens, sums);
  } else {
    add_chunk(static_cast<const float*>(p.g) + first, p.token_stride, entry.tokens, sums);
  }
}
