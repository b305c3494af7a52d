// The gate made from a raw gate, g = -exp(A_log) softplus(raw + dt_bias), and its slopes.
#pragma once

#include "cake/gdn/any/places.cuh"

namespace cake::gdn {

struct GateSlopes {
  float value;   // the gate, which is also its slope in A_log
  float of_raw;  // its slope in raw, and in dt_bias
};

// Beyond them every decay has long been zero. All stays finite, so that a gradient of zero stays zero beside it.
inline constexpr float kLargestALog = 600.f;
inline constexpr float kLargestRate = 88.f;  // its exponential is finite in FP32
inline constexpr float kLargestGate = 3.402823466e38f;

// NaN passes through.
__device__ __forceinline__ float at_most(float x, float largest) { return x > largest ? largest : x; }

__device__ __forceinline__ GateSlopes gate_slopes(const GateOption& gate, TokenPlace at, int head) {
  float x = load_scalar(gate.raw, at, head);
  if (gate.dt_bias.data) x = __fadd_rn(x, load_scalar(gate.dt_bias, head));
  x = at_most(x, kLargestGate);
  float a_log = load_scalar(gate.a_log, head);
  const float small = expf(-fabsf(x));  // in (0, 1]: neither softplus nor sigmoid overflows
  float softplus = __fadd_rn(fmaxf(x, 0.f), log1pf(small));
  float sigmoid = __fdiv_rn(x >= 0.f ? 1.f : small, __fadd_rn(1.f, small));
  if (a_log > kLargestRate) {
    // exp(A_log) alone may overflow, small alone underflow: exp(A_log + x) has their product.
    a_log = at_most(a_log, kLargestALog);
    if (x < 0.f) {
      a_log = __fadd_rn(a_log, x);
      softplus = small > 0.f ? __fdiv_rn(softplus, small) : 1.f;
      sigmoid = __fdiv_rn(1.f, __fadd_rn(1.f, small));
    }
    a_log = at_most(a_log, kLargestRate);
  }
  const float rate = expf(a_log);
  return {-at_most(__fmul_rn(rate, softplus), kLargestGate), -__fmul_rn(rate, sigmoid)};
}

}  // namespace cake::gdn
