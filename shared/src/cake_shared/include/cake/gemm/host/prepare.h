// `prepare_gemm` of the packages' modules: the call from Python to one of the programs.
#pragma once

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

}  // namespace cake::gemm
