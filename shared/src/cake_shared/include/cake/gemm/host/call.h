// What every program of the GEMM needs of a call: checked tensors, the cut, the sum of partial results.
#pragma once

#include <tvm/ffi/function.h>

#include "cake/gemm/params.h"
#include "cake/gemm/tiles.h"
#include "cake/host/tensor.h"

namespace cake::gemm {

using host::TensorView;
using OptionalTensor = tvm::ffi::Optional<TensorView>;

// What a call's tensors are called in errors and in the emulator.
struct Names {
  const char* a = "a";
  const char* b = "b";
  const char* out = "out";
  const char* workspace = "workspace";
};

// What Python's plan decides; see CudaGemmPlan.
struct Choices {
  TileKind kind;
  bool a_k_major, b_k_major, accumulate;
  int32_t pieces, piece_blocks, group_rows, multiprocessors, whole_units;
  bool halved;
  Names names = {};
};

inline int32_t ceil_div(int64_t a, int64_t b) { return static_cast<int32_t>((a + b - 1) / b); }

struct GemmCall {
  DLDevice device;
  int64_t batches, m, n, k;
  const void* a;
  const void* b;
  Output output;
  Tiling tiling;
  float* partials;
  int64_t slots;  // [slots, unit_rows, unit_columns]
};

// a [L, M, K], b [L, K, N] BF16, out [L, M, N] BF16 or FP32 with unit stride on n (or, FP32, on m for programs that can), workspace
// FP32 of all slots of the cut units.
inline GemmCall check_gemm(const TensorView& a, const TensorView& b, const TensorView& out, const Choices& choices) {
  GemmCall call{};
  const Names& names = choices.names;
  call.device = out.device();
  if (a.ndim() != 3) TVM_FFI_THROW(ValueError) << names.a << ": expected [L, M, K], got " << host::sizes_text(a.shape());
  call.batches = a.size(0), call.m = a.size(1), call.k = a.size(2);
  call.a = host::check_input(names.a, a, {host::kBFloat16}, {host::kAny, host::kAny, host::kAny}, call.device);
  call.b = host::check_input(names.b, b, {host::kBFloat16}, {call.batches, call.k, host::kAny}, call.device);
  call.n = b.size(2);
  host::detail::check_device(names.out, out, call.device);
  host::detail::check_dtype(names.out, out, {host::kBFloat16, host::kFloat32});
  host::detail::check_shape(names.out, out, {call.batches, call.m, call.n});
  host::detail::declare(names.out, out, true, choices.accumulate);
  const bool transposed = call.n > 1 && out.stride(2) != 1;
  if (transposed && !(choices.kind == TileKind::kBroad && choices.pieces == 1 && (call.m == 1 || out.stride(1) == 1) &&
                      host::same_dtype(out.dtype(), host::kFloat32))) {
    TVM_FFI_THROW(ValueError) << names.out << ": expected unit stride on n, got strides " << host::sizes_text(out.strides());
  }
  constexpr int64_t kExtentLimit = int64_t{1} << 31;
  for (int64_t extent : {call.batches, call.m, call.n, call.k}) {
    if (extent >= kExtentLimit) TVM_FFI_THROW(ValueError) << names.a << ", " << names.b << ": expected extents below 2^31, got " << extent;
  }
  const bool is_fp32 = host::same_dtype(out.dtype(), host::kFloat32);
  const int64_t element_bytes = is_fp32 ? 4 : 2;
  const int64_t row_stride = transposed ? out.stride(2) : call.m > 1 ? out.stride(1) : (call.n + 7) / 8 * 8;
  call.output = {host::detail::first_element(out), call.batches > 1 ? out.stride(0) : row_stride,
                 row_stride,                       is_fp32,
                 choices.accumulate,               (transposed ? call.m : call.n) * element_bytes % 16 != 0,
                 transposed};
  // An L2 cache has 50 MB; contractions of one block are bound by their results.
  constexpr int64_t kPassingBytes = 64 << 20;
  call.output.passes = call.k <= kBlockK && call.batches * call.m * call.n * element_bytes >= kPassingBytes;
  if (choices.accumulate && !is_fp32) TVM_FFI_THROW(TypeError) << names.out << ": expected float32 where it accumulates";
  return call;
}

// The units of a call and which of them are cut; counts its slots, for which it checks the workspace.
inline void make_tiling(GemmCall& call, const OptionalTensor& workspace, const Choices& choices, int unit_rows,
                        int unit_columns, bool shortens = false) {
  constexpr int64_t kUnitLimit = int64_t{1} << 31;
  Tiling& tiling = call.tiling;
  tiling.batches = static_cast<int32_t>(call.batches);
  tiling.row_units = ceil_div(call.m, unit_rows);
  tiling.column_units = ceil_div(call.n, unit_columns);
  tiling.unit_rows = unit_rows;
  tiling.unit_columns = unit_columns;
  tiling.group_rows = choices.group_rows;
  // Where units at work write whole rows, units of few columns among them would leave some clusters with less work than others.
  tiling.last_apart = choices.group_rows == 1 && call.n > unit_columns && call.n % unit_columns > 0;
  tiling.blocks = ceil_div(call.k, kBlockK);
  tiling.pieces = choices.pieces;
  tiling.piece_blocks = choices.piece_blocks;
  const int64_t rest = call.m % unit_rows;
  const bool is_short = shortens && tiling.column_units > 1 && rest > 0 && 2 * rest <= unit_rows;
  const int64_t short_units = is_short ? call.batches * ((tiling.column_units + 1) / 2) : 0;
  const int64_t places = short_units + call.batches * (tiling.row_units - is_short) * tiling.column_units;
  if (choices.pieces > 1) {
    call.slots = (places - choices.whole_units) * choices.pieces;
    if (call.slots <= 0 || int64_t{choices.pieces} * choices.piece_blocks < tiling.blocks) {
      TVM_FFI_THROW(ValueError) << "whole_units, pieces, piece_blocks: expected a cut of " << tiling.blocks << " blocks of some of "
                                << places << " units, got " << choices.whole_units << ", " << choices.pieces << ", "
                                << choices.piece_blocks;
    }
    if (!workspace.has_value()) TVM_FFI_THROW(ValueError) << choices.names.workspace << ": expected bytes for the partial sums, got none";
    constexpr DLDataType kUInt8{kDLUInt, 8, 1};
    call.partials = static_cast<float*>(host::check_output(choices.names.workspace, workspace.value(), kUInt8,
                                                           {call.slots * unit_rows * unit_columns * 4}, call.device));
  }
  const int64_t whole_units = choices.pieces > 1 || choices.halved ? choices.whole_units : places;
  const int64_t parts = choices.halved ? 2 * (places - whole_units) : call.slots;
  if (places >= kUnitLimit || whole_units > places || whole_units + parts >= kUnitLimit || (choices.halved && call.slots > 0)) {
    TVM_FFI_THROW(ValueError) << "whole_units, halved: expected at most all of " << places << " units, fewer than 2^31, got "
                              << choices.whole_units << ", " << choices.halved;
  }
  tiling.short_units = static_cast<int32_t>(short_units);
  tiling.whole_units = static_cast<int32_t>(whole_units);
  tiling.halved = choices.halved;
  tiling.units = static_cast<int32_t>(whole_units + parts);
}

struct SumLaunch {
  host::LaunchConfig config;
  SumParams params;
};

inline SumLaunch make_sum(const GemmCall& call, const Choices& choices) {
  constexpr int kThreads = 256, kCtasPerMultiprocessor = 8;
  SumLaunch sum{};
  sum.params = {call.partials, call.tiling, call.output, static_cast<int32_t>(call.m), static_cast<int32_t>(call.n)};
  const int64_t quads = call.slots / choices.pieces * call.tiling.unit_rows * call.tiling.unit_columns / 4;
  constexpr int64_t kQuadLimit = int64_t{1} << 31;
  if (quads >= kQuadLimit) {
    TVM_FFI_THROW(ValueError) << "whole_units: expected fewer than 2^33 elements in cut units, got " << 4 * quads;
  }
  const int64_t wanted = (quads + kThreads - 1) / kThreads, most = int64_t{choices.multiprocessors} * kCtasPerMultiprocessor;
  sum.config.grid = {static_cast<uint32_t>(wanted < most ? wanted : most)};
  sum.config.block = {kThreads};
  sum.config.programmatic = true;
  return sum;
}

// One kernel, and where the contraction is cut the one that adds its pieces: launched on a stream, any number of times.
template <class Params>
struct GemmLaunch {
  DLDevice device;
  host::KernelRef<Params> kernel;
  host::LaunchConfig config;
  Params params;
  bool sums;
  SumLaunch sum;

  void operator()(int64_t stream) const {
    const host::DeviceGuard current(device);
    launch_product(stream);
    launch_sum(stream);
  }
  void launch_product(int64_t stream) const {
    host::LaunchConfig on = config;
    on.stream = stream;
    host::launch(kernel, on, params);
  }
  void launch_sum(int64_t stream) const {
    if (!sums) return;
    host::LaunchConfig on = sum.config;
    on.stream = stream;
    host::launch(CAKE_KERNEL_REF(gemm_sum_any), on, sum.params);
  }
};

// Two products that read and write nothing of each other's, one after the other or side by side: the second's CTAs then start
// on what multiprocessors the first does not use, or no longer, and sums come after both.
template <class Params>
struct PairLaunch {
  GemmLaunch<Params> first, second;
  bool beside;

  void operator()(int64_t stream) const {
    if (!beside) {
      first(stream);
      second(stream);
      return;
    }
    const host::DeviceGuard current(first.device);
    first.launch_product(stream);
    second.launch_product(stream);
    first.launch_sum(stream);
    second.launch_sum(stream);
  }
};

template <class Params>
GemmLaunch<Params> launch_of(host::KernelRef<Params> kernel, const host::LaunchConfig& config, const Params& params,
                             const GemmCall& call, const Choices& choices) {
  GemmLaunch<Params> launch{call.device, kernel, config, params, call.slots > 0, {}};
  if (launch.sums) launch.sum = make_sum(call, choices);
  return launch;
}

}  // namespace cake::gemm
