#pragma once

#include "cake/gdn/any/tile_copy.cuh"
#include "cake/gdn/smem_sizes.h"

// gate_parameters_any: the gradients of A_log and dt_bias, one CTA a value head.
// reads   the partial sums of every chunk, FP64
// writes  grad_a_log, grad_dt_bias; NaN for a malformed pack
// order   a thread's chunks ascending, then the threads by halves, FP64
namespace cake::gdn {

struct GateParametersSmem {
  double sums[2][kGateParametersThreads];
};
static_assert(sizeof(GateParametersSmem) == kGateParametersSmemBytes);

}  // namespace cake::gdn

extern "C" __global__ void __launch_bounds__(cake::gdn::kGateParametersThreads)
    gate_parameters_any(const __grid_constant__ cake::gdn::GateParametersParams p) {
  using namespace cake::gdn;
  begin_stage();
  auto& smem = *reinterpret_cast<GateParametersSmem*>(smem_bytes);
  const int thread = threadIdx.x, head = blockIdx.x;
  double a_log = 0., dt_bias = 0.;
  const int32_t chunks = p.tables.chunk_offsets[p.tables.sequences];
  for (int32_t chunk = thread; chunk < chunks; chunk += kGateParametersThreads) {
    const double* partial = p.gate_partials + 2 * (int64_t{chunk} * p.heads + head);
    a_log += partial[0];
    dt_bias += partial[1];
  }
  smem.sums[0][thread] = a_log;
  smem.sums[1][thread] = dt_bias;
  for (int half = kGateParametersThreads / 2; half > 0; half /= 2) {
    __syncthreads();
    if (thread < half) {
      smem.sums[0][thread] += smem.sums[0][thread + half];
      smem.sums[1][thread] += smem.sums[1][thread + half];
    }
  }
  if (thread == 0) {
    const bool sound = p.tables.status[kFaults] == 0;
    const float nan = __int_as_float(0x7fffffff);
    const HeadScalars& a = p.grad_a_log;
    const HeadScalars& b = p.grad_dt_bias;
    if (a.data) store_number(a.data, head * a.stride, a.is_bf16, sound ? static_cast<float>(smem.sums[0][0]) : nan);
    if (b.data) store_number(b.data, head * b.stride, b.is_bf16, sound ? static_cast<float>(smem.sums[1][0]) : nan);
  }
}
