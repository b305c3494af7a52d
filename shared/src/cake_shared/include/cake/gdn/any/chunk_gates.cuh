// Cumulative gates of a chunk and value head: sums[i] = max(g_0, -128) + ... + max(g_i, -128), rounded once to FP32. One thread,
// tokens ascending; the running sum is two words by exact two-sums, so its error does not grow.
#pragma once

#include "cake/gdn/any/gate_option.cuh"
#include "cake/ptx/warp.cuh"

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

// The gates of as many chunks and value heads as a CTA has threads, and then their sums: a thread a column. Padded, so that
// neither rows nor columns lie in one bank.
struct GateColumns {
  float of[kChunk][kPrologueThreads + 1];
};

// gate(i) is that of the chunk's token i; kInFlight of them are asked for together.
template <int kInFlight, class Gate>
__device__ __forceinline__ void load_gates(GateColumns& columns, int column, int32_t tokens, const Gate& gate) {
#pragma unroll 1
  for (int batch = 0; batch < kChunk; batch += kInFlight) {
    float of[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) of[i] = batch + i < tokens ? gate(batch + i) : 0.0f;
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) columns.of[batch + i][column] = of[i];
  }
}

// Rows past the last token are zero.
__device__ __forceinline__ void load_gates(GateColumns& columns, int column, const GateOption& gate, TokenPlace at, int32_t tokens,
                                           int head) {
  const TokenScalars& g = gate.raw;
  const int64_t first = element_of(g, at, head), stride = g.token_stride;
  if (gate.a_log.data) {
    load_gates<4>(columns, column, tokens, [&](int i) { return gate_slopes(gate, {at.row, at.token + i}, head).value; });
  } else if (g.is_bf16) {
    const auto* gates = static_cast<const __nv_bfloat16*>(g.data) + first;
    load_gates<16>(columns, column, tokens, [&](int i) { return __bfloat162float(gates[i * stride]); });
  } else {  // all of them in flight together
    const auto* gates = static_cast<const float*>(g.data) + first;
#pragma unroll 8
    for (int i = 0; i < kChunk; ++i) {
      const bool valid = i < tokens;
      cake::ptx::cp_async_4(cake::ptx::shared_address(&columns.of[i][column]), gates + (valid ? i * stride : 0), valid);
    }
    cake::ptx::cp_async_commit();
    cake::ptx::cp_async_wait<0>();
  }
}

// A column's gates become their sums. A 0 past the last token moves neither word: rows past it repeat its sum.
__device__ __forceinline__ void add_gates(GateColumns& columns, int column) {
  TwoWordSum running;
#pragma unroll 4
  for (int i = 0; i < kChunk; ++i) {
    float& x = columns.of[i][column];
    running.add(x < kGateFloor ? kGateFloor : x);
    x = running.rounded();
  }
}

// By all threads: the sums of `count` columns, [column][token].
__device__ __forceinline__ void store_sums(float* to, const GateColumns& columns, int count) {
  constexpr int kUnits = kChunk / 4;
  for (int unit = threadIdx.x; unit < count * kUnits; unit += kPrologueThreads) {
    const int column = unit / kUnits, row = unit % kUnits * 4;
    reinterpret_cast<float4*>(to)[unit] =
        make_float4(columns.of[row][column], columns.of[row + 1][column], columns.of[row + 2][column], columns.of[row + 3][column]);
  }
}

}  // namespace cake::gdn
