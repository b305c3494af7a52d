// The gate made from a raw gate, g = -exp(A_log) softplus(raw + dt_bias), and its slopes.
#pragma once

#include "cake/gdn/any/places.cuh"

namespace cake::gdn {

struct GateSlopes {
  float value;   // the gate, which is also its slope in A_log
  float of_raw;  // its slope in raw, and in dt_bias
};

__device__ __forceinline__ GateSlopes gate_slopes(const GateOption& gate, TokenPlace at, int head) {
  float x = load_scalar(gate.raw, at, head);
  if (gate.dt_bias.data) x = __fadd_rn(x, load_scalar(gate.dt_bias, head));
  const float rate = -expf(load_scalar(gate.a_log, head));
  const float small = expf(-fabsf(x));  // in (0, 1]: neither softplus nor sigmoid overflows
  const float softplus = __fadd_rn(fmaxf(x, 0.f), log1pf(small));
  const float sigmoid = __fdiv_rn(x >= 0.f ? 1.f : small, __fadd_rn(1.f, small));
  return {__fmul_rn(rate, softplus), __fmul_rn(rate, sigmoid)};
}

}  // namespace cake::gdn
