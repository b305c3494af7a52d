// `prepare_router` of the module: terms of Q, the product, its end, as one function of the stream.
#pragma once

#include <tvm/ffi/function.h>

#include "cake/host/architecture.h"
#include "cake/host/recorded.h"
#include "cake/host/tensor.h"
#include "router_params.h"

// A module links what its architecture's records name: the native programs replace the portable one.
#if defined(CAKE_EMULATOR) || !CAKE_HAS_SM90
#define CAKE_HAS_PORTABLE_ROUTER 1
#else
#define CAKE_HAS_PORTABLE_ROUTER 0
#endif

namespace dense_projection_det_gemm {

namespace host = cake::host;
using host::TensorView;

// As `PROGRAMS` of cuda_router_plan.py counts them.
enum class RouterProgram : int64_t { kPortable = 0, kWide = 1, kBf16 = 2, kNarrow = 3 };

// Parts of the workspace, each at a multiple of 256 bytes.
class RouterWorkspace {
 public:
  explicit RouterWorkspace(char* data) : data_(data) {}
  template <class T>
  T* take(int64_t count) {
    T* at = reinterpret_cast<T*>(data_ + used_);
    used_ += (count * static_cast<int64_t>(sizeof(T)) + 255) / 256 * 256;
    return at;
  }
  int64_t used() const { return used_; }

 private:
  char* data_;
  int64_t used_ = 0;
};

inline int32_t router_ceil(int64_t a, int64_t b) { return static_cast<int32_t>((a + b - 1) / b); }

inline RouterWork make_router_work(const TensorView& p, const TensorView& q, int64_t blocks, int64_t part_steps, int64_t units,
                                   int64_t units_per_tile, int32_t ctas) {
  constexpr int64_t kLimit = (int64_t{1} << 31) - 256;
  for (int64_t extent : {p.size(0), p.size(1), q.size(0)}) {
    if (extent < 1 || extent > kLimit)
      TVM_FFI_THROW(ValueError) << "p, q: expected extents from 1 to " << kLimit << ", got " << extent;
  }
  RouterWork work{};
  work.rows = static_cast<int32_t>(p.size(0));
  work.columns = static_cast<int32_t>(q.size(0));
  work.depth = static_cast<int32_t>(p.size(1));
  work.steps = router_ceil(work.depth, kRouterStep);
  if (blocks != 1 && blocks != 4) TVM_FFI_THROW(ValueError) << "blocks: expected 1 or 4, got " << blocks;
  work.blocks = static_cast<int32_t>(blocks);
  work.ctas = ctas;
  work.row_tiles = router_ceil(work.rows, int64_t{ctas} * kRouterRows);
  work.column_tiles = router_ceil(work.columns, blocks * kRouterBlock);
  const int64_t tiles = int64_t{work.row_tiles} * work.column_tiles;
  const int64_t parts = part_steps > 0 ? (work.steps + part_steps - 1) / part_steps : 0;
  const bool ranges = units_per_tile == 0 && part_steps == work.steps && units <= tiles * work.steps;
  const bool serial = units_per_tile == 1 && units == tiles;
  const bool parallel = units_per_tile > 1 && units_per_tile == parts && units == tiles * parts;
  if (part_steps < 1 || part_steps > work.steps || units < 1 || units > kLimit / 2 || !(ranges || serial || parallel)) {
    TVM_FFI_THROW(ValueError) << "part_steps, units, units_per_tile: expected a cut of " << tiles << " tiles of " << work.steps
                              << " steps, got " << part_steps << ", " << units << ", " << units_per_tile;
  }
  work.part_steps = static_cast<int32_t>(part_steps);
  work.units = static_cast<int32_t>(units);
  work.units_per_tile = static_cast<int32_t>(units_per_tile);
  work.by_column_tiles = make_router_divisor(work.column_tiles);
  work.by_steps = make_router_long_divisor(work.steps);
  work.by_units = make_router_long_divisor(work.units);
  work.by_all_steps = make_router_long_divisor(tiles * work.steps);
  return work;
}

// [count, depth], unit stride on the axis that the caller names, the other a multiple of 8 elements.
inline RouterOperand make_router_operand(const char* name, const TensorView& x, bool depth_major, DLDevice device) {
  RouterOperand operand{};
  operand.data = host::check_input(name, x, {host::kFloat32, host::kBFloat16}, {host::kAny, host::kAny}, device);
  operand.is_bf16 = host::same_dtype(x.dtype(), host::kBFloat16);
  const int unit = depth_major ? 1 : 0, other = 1 - unit;
  const bool legal = (x.size(unit) == 1 || x.stride(unit) == 1) && (x.size(other) == 1 || x.stride(other) % 8 == 0);
  if (!legal || reinterpret_cast<uintptr_t>(operand.data) % 16 != 0) {
    TVM_FFI_THROW(ValueError) << name << ": expected unit stride on axis " << unit
                              << ", a multiple of 8 elements on the other and a start on 16 bytes, got strides "
                              << host::sizes_text(x.strides()) << " at " << operand.data;
  }
  const int64_t pitch = x.size(other) == 1 ? (x.size(unit) + 7) / 8 * 8 : x.stride(other);
  operand.stride = depth_major ? pitch : 1;
  operand.depth_stride = depth_major ? 1 : pitch;
  return operand;
}

struct RouterCall {
  DLDevice device;
  RouterTermsParams terms;
  RouterOutParams out;
};

// p [R, K] and q [C, K] FP32 or BF16, out [R, C] FP32, workspace uint8.
inline RouterCall make_router_call(const TensorView& p, const TensorView& q, const TensorView& out, const TensorView& workspace,
                                   bool p_depth_major, bool q_depth_major, const RouterWork& work) {
  RouterCall call{};
  call.device = out.device();
  const RouterOperand left = make_router_operand("p", p, p_depth_major, call.device);
  const RouterOperand right = make_router_operand("q", q, q_depth_major, call.device);
  host::detail::check_shape("q", q, {work.columns, work.depth});
  host::detail::check_device("out", out, call.device);
  host::detail::check_dtype("out", out, {host::kFloat32});
  host::detail::check_shape("out", out, {work.rows, work.columns});
  host::detail::declare("out", out, true);
  const bool unit_columns = work.columns == 1 || out.stride(1) == 1;
  const int64_t other = unit_columns ? out.stride(0) : out.stride(1);
  const bool one = unit_columns ? work.rows == 1 || work.columns == 1 : false;
  if ((!unit_columns && work.rows > 1 && out.stride(0) != 1) || (!one && other % 8 != 0) ||
      reinterpret_cast<uintptr_t>(host::detail::first_element(out)) % 16 != 0) {
    TVM_FFI_THROW(ValueError)
        << "out: expected unit stride on one axis, a multiple of 8 elements on the other and a start on 16 bytes, got strides "
        << host::sizes_text(out.strides());
  }

  const int64_t width = int64_t{work.blocks} * kRouterBlock;
  const int64_t padded = work.column_tiles * width, slots = int64_t{router_slots(work)} * work.ctas;
  char* bytes =
      static_cast<char*>(host::check_output("workspace", workspace, DLDataType{kDLUInt, 8, 1}, {host::kAny}, call.device));
  RouterWorkspace parts(bytes);
  RouterTerms terms{};
  terms.planes = parts.take<char>(padded / kRouterBlock * work.steps * kRouterBlockBytes);
  terms.exponents = parts.take<int32_t>(padded);
  terms.factors = parts.take<float>(padded);
  terms.flags = parts.take<uint8_t>(padded * router_ceil(work.steps, kRouterTermsSteps));
  terms.any_redo = parts.take<uint32_t>(1);
  terms.interleaved = p_depth_major;
  terms.arrivals = parts.take<uint32_t>(router_arrivals(work));
  RouterOutParams main{};
  main.p = left;
  main.q = right;
  main.work = work;
  main.terms = terms;
  main.row_exponents = parts.take<int32_t>(int64_t{work.row_tiles} * work.ctas * kRouterRows);
  main.out = static_cast<float*>(static_cast<void*>(host::detail::first_element(out)));
  main.out_row_stride = unit_columns ? out.stride(0) : 1;
  main.out_column_stride = unit_columns ? 1 : out.stride(1);
  main.slots = parts.take<float>(slots * kRouterRows * width);
  main.slot_tiny = parts.take<uint8_t>(slots * kRouterRows);
  main.joined = parts.take<uint8_t>(work.units_per_tile < 2 ? 0 : slots * kRouterWarps);
  if (parts.used() > workspace.numel()) {
    TVM_FFI_THROW(ValueError) << "workspace: expected at least " << parts.used() << " bytes, got " << workspace.numel();
  }
  call.terms = {left, right, 0, work, terms};
  call.out = main;
  return call;
}

struct RouterProduct {
  host::KernelRef<RouterOutParams> kernel;
  host::LaunchConfig config;
};

inline RouterProduct router_product(RouterProgram program, const RouterCall& call, int64_t multiprocessors) {
  const RouterWork& work = call.out.work;
  constexpr int kPortableCtas = 1;  // of a multiprocessor
  host::LaunchConfig config{};
  const bool portable = program == RouterProgram::kPortable;
  const int64_t fit = portable ? multiprocessors * kPortableCtas / work.blocks : multiprocessors / work.ctas,
                most = fit > 0 ? fit : 1;
  config.grid = {static_cast<uint32_t>((work.units < most ? work.units : most) * work.ctas),
                 portable ? static_cast<uint32_t>(work.blocks) : 1u};
  config.block = {static_cast<uint32_t>(portable ? kRouterOutThreads : kRouterNativeThreads)};
  config.programmatic = true;  // becomes resident while the terms are made
#if CAKE_HAS_PORTABLE_ROUTER
  if (portable) return {CAKE_KERNEL_REF(router_out_any), config};
#endif
  config.cluster = {static_cast<uint32_t>(work.ctas)};
#if CAKE_HAS_SM90
  const bool bf16 = call.out.p.is_bf16;
  if (program == RouterProgram::kWide && work.blocks == 4 && !bf16) {
    config.smem_bytes = kRouterWideSmemBytes;
    return {CAKE_KERNEL_REF(router_out_sm90), config};
  }
  if (program == RouterProgram::kBf16 && work.blocks == 4 && bf16) {
    config.smem_bytes = kRouterBf16SmemBytes;
    return {CAKE_KERNEL_REF(router_bf16_out_sm90), config};
  }
  if (program == RouterProgram::kNarrow && work.blocks == 1) {
    config.smem_bytes = kRouterNarrowSmemBytes;
    return {CAKE_KERNEL_REF(router_narrow_out_sm90), config};
  }
#endif
  TVM_FFI_THROW(ValueError) << "program: expected one for " << work.blocks << " blocks of this architecture, got "
                            << static_cast<int64_t>(program);
  return {};
}

// The launches of a product. The native programs end themselves, but where units cross tiles.
struct RouterChain {
  RouterCall call;
  RouterProduct product;
  host::LaunchConfig terms, special;
  bool ends_itself;

  void launch(int64_t stream) const {
    const host::DeviceGuard current(call.device);
    host::LaunchConfig on_terms = terms, on_product = product.config, on_special = special;
    on_terms.stream = on_product.stream = on_special.stream = stream;
    host::launch(CAKE_KERNEL_REF(router_terms_any), on_terms, call.terms);
    host::launch(product.kernel, on_product, call.out);
    if (!ends_itself) host::launch(CAKE_KERNEL_REF(router_special_any), on_special, call.out);
  }
};

inline RouterChain make_router_chain(const TensorView& p, const TensorView& q, const TensorView& out, const TensorView& workspace,
                                     int64_t program, bool p_depth_major, bool q_depth_major, int64_t blocks, int64_t part_steps,
                                     int64_t units, int64_t units_per_tile, int64_t multiprocessors) {
  if (p.ndim() != 2 || q.ndim() != 2) {
    TVM_FFI_THROW(ValueError) << "p, q: expected matrices, got " << p.ndim() << " and " << q.ndim() << " axes";
  }
  if (multiprocessors < 1) TVM_FFI_THROW(ValueError) << "multiprocessors: expected a count, got " << multiprocessors;
  const bool portable = program == static_cast<int64_t>(RouterProgram::kPortable);
  if (!portable && units_per_tile == 0 && p_depth_major) {
    TVM_FFI_THROW(ValueError) << "p_depth_major: expected false where units are ranges of all tiles' steps, got true";
  }
  const RouterWork work = make_router_work(p, q, blocks, part_steps, units, units_per_tile, portable ? 1 : kRouterCtas);
  RouterChain chain{make_router_call(p, q, out, workspace, p_depth_major, q_depth_major, work), {}, {}, {},
                    !portable && units_per_tile != 0};
  chain.product = router_product(static_cast<RouterProgram>(program), chain.call, multiprocessors);
  if (!portable) chain.call.terms.fetched_units = static_cast<int32_t>(chain.product.config.grid.x) / work.ctas;
  chain.terms.grid = {static_cast<uint32_t>(router_ceil(work.steps, kRouterTermsSteps)),
                      static_cast<uint32_t>(work.column_tiles * work.blocks)};
  chain.terms.block = {kRouterTermsThreads};
  const int64_t places = int64_t{work.row_tiles} * work.column_tiles * work.ctas;
  const bool adds = router_slots(work) > 0;
  chain.special.grid = {static_cast<uint32_t>(adds || places < multiprocessors ? places : multiprocessors),
                        adds ? static_cast<uint32_t>(work.blocks * kRouterBlock / kRouterSpecialColumns) : 1u};
  chain.special.block = {kRouterSpecialThreads};
  return chain;
}

// To be launched many times: a function of the stream, which costs the host one launch.
inline tvm::ffi::Function prepare_router(TensorView p, TensorView q, TensorView out, TensorView workspace, int64_t program,
                                         bool p_depth_major, bool q_depth_major, int64_t blocks, int64_t part_steps,
                                         int64_t units, int64_t units_per_tile, int64_t multiprocessors) {
  const RouterChain chain = make_router_chain(p, q, out, workspace, program, p_depth_major, q_depth_major, blocks, part_steps,
                                              units, units_per_tile, multiprocessors);
  return tvm::ffi::Function::FromTyped(host::Recorded(chain.call.device, [=](int64_t stream) { chain.launch(stream); }));
}

inline void run_router(TensorView p, TensorView q, TensorView out, TensorView workspace, int64_t program, bool p_depth_major,
                       bool q_depth_major, int64_t blocks, int64_t part_steps, int64_t units, int64_t units_per_tile,
                       int64_t multiprocessors, int64_t stream) {
  make_router_chain(p, q, out, workspace, program, p_depth_major, q_depth_major, blocks, part_steps, units, units_per_tile,
                    multiprocessors)
      .launch(stream);
}

}  // namespace dense_projection_det_gemm
