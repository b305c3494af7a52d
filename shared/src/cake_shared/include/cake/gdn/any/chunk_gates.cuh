// Cumulative gates of a chunk and value head: sums[i] = max(g_0, -128) + ... + max(g_i, -128), rounded once to FP32. One thread,
// tokens ascending; the running sum is two words by exact two-sums, so its error does not grow.
#pragma once

#include "cake/gdn/any/gate_option.cuh"

namespace cake::gdn {

// exp(-128) is 0 in FP32, so nothing of the past survives such a gate, however strong: the clamp keeps |sum| <= 8192 and
// with it the error of every difference of two sums below 2^-11. NaN passes through.
inline constexpr float kGateFloor = -128.0f;

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

// gate(i) is that of the chunk's token i; kInFlight of them are asked for together. Rows past the last token repeat its sum.
template <int kInFlight, class Gate>
__device__ inline void add_chunk(Gate gate, int32_t tokens, float4* sums) {
  TwoWordSum running;
#pragma unroll 1
  for (int batch = 0; batch < kChunk; batch += kInFlight) {
    float out[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) out[i] = batch + i < tokens ? gate(batch + i) : 0.0f;
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      running.add(out[i] < kGateFloor ? kGateFloor : out[i]);  // a 0 past the last token moves neither word
      out[i] = running.rounded();
    }
#pragma unroll
    for (int i = 0; i < kInFlight; i += 4) *sums++ = make_float4(out[i], out[i + 1], out[i + 2], out[i + 3]);
  }
}

__device__ inline void add_chunk_gates(const GateOption& gate, TokenPlace at, int32_t tokens, int head, float* sums) {
  float4* to = reinterpret_cast<float4*>(sums);
  const TokenScalars& g = gate.raw;
  const int64_t first = element_of(g, at, head), stride = g.token_stride;
  if (gate.a_log.data) {
    add_chunk<4>([&](int i) { return gate_slopes(gate, {at.row, at.token + i}, head).value; }, tokens, to);
  } else if (g.is_bf16) {
    const auto* gates = static_cast<const __nv_bfloat16*>(g.data) + first;
    add_chunk<16>([&](int i) { return __bfloat162float(gates[i * stride]); }, tokens, to);
  } else {
    const auto* gates = static_cast<const float*>(g.data) + first;
    add_chunk<16>([&](int i) { return gates[i * stride]; }, tokens, to);
  }
}

}  // namespace cake::gdn
