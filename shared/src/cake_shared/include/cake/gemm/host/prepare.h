// `prepare_gemm` of the packages' modules: the call from Python to one of the programs.
#pragma once

#include <tvm/ffi/container/shape.h>
#include <tvm/ffi/function.h>

#include "cake/gemm/host/native.h"
#include "cake/gemm/host/portable.h"

namespace cake::gemm {

// As the planner counts them; the others are native, of that TileKind.
inline constexpr int64_t kPortableProgram = 7, kLastProgram = 9;

inline Choices check_choices(int64_t program, bool a_k_major, bool b_k_major, bool accumulate, int64_t whole_units, int64_t pieces,
                             int64_t piece_blocks, bool halved, int64_t group_rows, int64_t multiprocessors) {
  if (program < 0 || program > kLastProgram) {
    TVM_FFI_THROW(ValueError) << "program: expected 0 to " << kLastProgram << ", got " << program;
  }
  if (whole_units < 0 || pieces < 1 || piece_blocks < 0 || group_rows < 1 || multiprocessors < 1) {
    TVM_FFI_THROW(ValueError) << "whole_units, pieces, piece_blocks, group_rows, multiprocessors: expected counts, got " << whole_units
                              << ", " << pieces << ", " << piece_blocks << ", " << group_rows << ", " << multiprocessors;
  }
  return {program == kPortableProgram ? TileKind::kWide : static_cast<TileKind>(program),
          a_k_major,
          b_k_major,
          accumulate,
          static_cast<int32_t>(pieces),
          static_cast<int32_t>(piece_blocks),
          static_cast<int32_t>(group_rows),
          static_cast<int32_t>(multiprocessors),
          static_cast<int32_t>(whole_units),
          halved};
}

// Calls `use` with the launch of a program that this module has.
template <class Use>
auto with_launch(const TensorView& a, const TensorView& b, const TensorView& out, const OptionalTensor& workspace, int64_t program,
                 const Choices& choices, Use use) {
#if CAKE_HAS_SM90
  if (program != kPortableProgram) return use(make_native(a, b, out, workspace, choices));
#endif
#if !CAKE_HAS_SM90 || defined(CAKE_EMULATOR)
  if (program == kPortableProgram) return use(make_portable(a, b, out, workspace, choices));
#endif
  TVM_FFI_THROW(ValueError) << "program: expected one of this architecture, got " << program;
  TVM_FFI_UNREACHABLE();
}

// Checks, makes the tensor maps and returns what launches on a stream. out [L, M, N] with unit stride on n; see check_gemm.
inline tvm::ffi::Function prepare_gemm(TensorView a, TensorView b, TensorView out, OptionalTensor workspace, int64_t program,
                                       bool a_k_major, bool b_k_major, bool accumulate, int64_t whole_units, int64_t pieces,
                                       int64_t piece_blocks, bool halved, int64_t group_rows, int64_t multiprocessors) {
  const Choices choices = check_choices(program, a_k_major, b_k_major, accumulate, whole_units, pieces, piece_blocks, halved, group_rows,
                                        multiprocessors);
  return with_launch(a, b, out, workspace, program, choices,
                     [](const auto& launch) { return tvm::ffi::Function::FromTyped(launch); });
}

// The same, launched once.
inline void run_gemm(TensorView a, TensorView b, TensorView out, OptionalTensor workspace, int64_t program, bool a_k_major,
                     bool b_k_major, bool accumulate, int64_t whole_units, int64_t pieces, int64_t piece_blocks, bool halved,
                     int64_t group_rows, int64_t multiprocessors, int64_t stream) {
  const Choices choices = check_choices(program, a_k_major, b_k_major, accumulate, whole_units, pieces, piece_blocks, halved, group_rows,
                                        multiprocessors);
  with_launch(a, b, out, workspace, program, choices, [stream](const auto& launch) { launch(stream); });
}

// One of two products: what `prepare_gemm` takes from the program on, in that order, as one tuple.
struct Product {
  TensorView a, b, out;
  OptionalTensor workspace;
  int64_t program;
  Choices choices;

  Product(TensorView left, TensorView right, TensorView result, OptionalTensor room, const tvm::ffi::Shape& plan, Names names = {})
      : a(left), b(right), out(result), workspace(room), program(check_plan(plan)),
        choices(check_choices(program, plan[1] != 0, plan[2] != 0, plan[3] != 0, plan[4], plan[5], plan[6], plan[7] != 0, plan[8],
                              plan[9])) {
    choices.names = names;
  }

  template <class Make>
  auto make(Make launch_of) const {
    return launch_of(a, b, out, workspace, choices);
  }

 private:
  static int64_t check_plan(const tvm::ffi::Shape& plan) {
    if (plan.size() != 10) TVM_FFI_THROW(ValueError) << "plan: expected 10 numbers, got " << plan.size();
    return plan[0];
  }
};

// Calls `use` with the launch of two products; `beside`: of native programs, side by side.
template <class Use>
auto with_pair(const Product& first, const Product& second, bool beside, Use use) {
  const bool portable = first.program == kPortableProgram;
  if (portable != (second.program == kPortableProgram) || (portable && beside)) {
    TVM_FFI_THROW(ValueError) << "program, beside: expected two native programs, or two portable ones not side by side, got "
                              << first.program << ", " << second.program << ", " << beside;
  }
#if CAKE_HAS_SM90
  if (!portable) return use(pair_native(first.make(make_native), second.make(make_native), beside));
#endif
#if !CAKE_HAS_SM90 || defined(CAKE_EMULATOR)
  if (portable) return use(PairLaunch<PortableParams>{first.make(make_portable), second.make(make_portable), false});
#endif
  TVM_FFI_THROW(ValueError) << "program: expected one of this architecture, got " << first.program;
  TVM_FFI_UNREACHABLE();
}

inline constexpr Names kOtherNames{"other_a", "other_b", "other_out", "other_workspace"};

// Two products that read and write nothing of each other's, as one function of the stream.
inline tvm::ffi::Function prepare_pair(TensorView a, TensorView b, TensorView out, OptionalTensor workspace, tvm::ffi::Shape plan,
                                       TensorView other_a, TensorView other_b, TensorView other_out, OptionalTensor other_workspace,
                                       tvm::ffi::Shape other_plan, bool beside) {
  return with_pair({a, b, out, workspace, plan}, {other_a, other_b, other_out, other_workspace, other_plan, kOtherNames}, beside,
                   [](const auto& launch) { return tvm::ffi::Function::FromTyped(launch); });
}

// The same, launched once.
inline void run_pair(TensorView a, TensorView b, TensorView out, OptionalTensor workspace, tvm::ffi::Shape plan, TensorView other_a,
                     TensorView other_b, TensorView other_out, OptionalTensor other_workspace, tvm::ffi::Shape other_plan, bool beside,
                     int64_t stream) {
  with_pair({a, b, out, workspace, plan}, {other_a, other_b, other_out, other_workspace, other_plan, kOtherNames}, beside,
            [stream](const auto& launch) { launch(stream); });
}

}  // namespace cake::gemm
