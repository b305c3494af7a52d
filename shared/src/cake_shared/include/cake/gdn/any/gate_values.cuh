#pragma once

#include "cake/gdn/any/gate_option.cuh"

// gate_values_any: g = -exp(A_log) softplus(raw + dt_bias) in FP32, one thread a token and value head.
// reads   the raw gates (any strides), A_log, dt_bias
// writes  values, every element
extern "C" __global__ void __launch_bounds__(cake::gdn::kGateValuesThreads)
    gate_values_any(const __grid_constant__ cake::gdn::GateValuesParams p) {
  using namespace cake::gdn;
  const int64_t item = int64_t{blockIdx.x} * kGateValuesThreads + threadIdx.x;
  if (item >= p.tokens * p.heads) return;
  const int64_t token = item / p.heads;
  const int head = static_cast<int>(item - token * p.heads);
  p.values[item] = gate_slopes(p.gate, place_of(static_cast<int32_t>(token), p.tokens_per_row), head).value;
}
