// The split GEMM from tensors to its launches: maps and parameters are made once, launches repeat them.
//
// zeros where partial sums go (not where they are added to a result) -> the GEMM -> sums rounded to BF16 (BF16 results).
#pragma once

#include <tvm/ffi/function.h>

#include "cake/gemm/host/native.h"
#include "params.h"

namespace dense_projection_gemm {

namespace gemm = cake::gemm;
namespace host = cake::host;
using cake::host::TensorView;

inline constexpr int kRowsThreads = 256;
inline constexpr int kRowsCtasPerMultiprocessor = 4;

struct SplitChoices {
  gemm::TileKind kind;
  bool a_k_major, b_k_major, accumulate;
  int32_t whole_units, clusters, pieces, group_rows, multiprocessors;
};

inline host::KernelRef<SplitParams> split_kernel(gemm::TileKind kind) {
  return kind == gemm::TileKind::kSlim ? CAKE_KERNEL_REF(gemm_split_slim_sm90) : CAKE_KERNEL_REF(gemm_split_wide_sm90);
}

struct SplitLaunches {
  host::LaunchConfig gemm, rows;
  SplitParams gemm_params;
  SplitRowsParams rows_params;
  bool zeroes, rounds;
};

// sums: FP32 [split tiles, 2, tile rows, tile columns] where out is BF16, else none.
inline SplitLaunches make_split(const TensorView& a, const TensorView& b, const TensorView& out,
                                const gemm::OptionalTensor& sums, const SplitChoices& choices) {
  const gemm::TileShape tile = gemm::tile_shape(choices.kind);
  const gemm::Choices shared{choices.kind,     choices.a_k_major,  choices.b_k_major, choices.accumulate, 1, 0,
                             choices.group_rows, choices.multiprocessors};
  gemm::GemmCall call = gemm::check_gemm(a, b, out, shared);
  if (call.output.direct) TVM_FFI_THROW(ValueError) << "out: expected rows of whole 16 bytes, got N = " << call.n;
  if (call.k == 0) TVM_FFI_THROW(ValueError) << "a: expected a contraction of at least one element, got none";
  SplitLaunches made{};
  SplitParams& p = made.gemm_params;
  const gemm::Operand left = gemm::make_operand("a", a, 1, 2, choices.a_k_major, gemm::a_boxes(tile), call.a);
  const gemm::Operand right = gemm::make_operand("b", b, 2, 1, choices.b_k_major, gemm::b_boxes(tile), call.b);
  p.a = left.map, p.b = right.map;
  p.a_batch_step = left.batch_step, p.b_batch_step = right.batch_step;
  p.m = static_cast<int32_t>(call.m), p.n = static_cast<int32_t>(call.n);
  p.a_k_major = choices.a_k_major, p.b_k_major = choices.b_k_major;
  p.is_fp32 = call.output.is_fp32;
  p.adds_whole = choices.accumulate;
  p.sums_in_out = call.output.is_fp32;
  gemm::make_tiling(call, {}, shared, tile.m * (tile.pair_along_m ? gemm::kCtasPerCluster : 1),
                    tile.n * (tile.pair_along_m ? 1 : gemm::kCtasPerCluster));
  p.tiling.tiles = call.tiling;
  p.tiling.tiles.piece_blocks = p.tiling.tiles.blocks;
  p.tiling.clusters = choices.clusters;
  p.tiling.whole_units = choices.whole_units;
  const int32_t units = p.tiling.tiles.units, splits = units - choices.whole_units;
  if (choices.clusters < 1 || choices.whole_units < 0 || splits < 0) {
    TVM_FFI_THROW(ValueError) << "whole_units, clusters: expected 0 to " << units << " and at least 1, got "
                              << choices.whole_units << ", " << choices.clusters;
  }
  const int64_t row_blocks = int64_t{splits} * p.tiling.tiles.blocks;
  if (row_blocks >= int64_t{1} << 31) TVM_FFI_THROW(ValueError) << "whole_units: expected fewer blocks left than 2^31";
  if (choices.pieces < 1 || choices.pieces > choices.clusters) {
    TVM_FFI_THROW(ValueError) << "pieces: expected 1 to " << choices.clusters << ", got " << choices.pieces;
  }
  p.tiling.pieces = choices.pieces;
  p.tiling.piece_blocks = static_cast<int32_t>(row_blocks / choices.pieces);
  p.tiling.longer_pieces = static_cast<int32_t>(row_blocks % choices.pieces);
  const int64_t element_bytes = p.is_fp32 ? 4 : 2;
  p.out = gemm::make_output_map(call.output.data, p.is_fp32, call.batches, call.m, call.n,
                                static_cast<uint64_t>(call.output.row_stride * element_bytes),
                                static_cast<uint64_t>(call.output.batch_stride * element_bytes));
  p.sums = p.out;
  float* own = nullptr;
  if (!p.is_fp32 && splits > 0) {
    if (!sums.has_value()) TVM_FFI_THROW(ValueError) << "sums: expected FP32 for the split tiles, got none";
    const int64_t planes = int64_t{splits} * gemm::kCtasPerCluster;
    own = static_cast<float*>(host::check_output("sums", sums.value(), host::kFloat32, {planes * tile.m * tile.n}, call.device));
    p.sums = gemm::make_output_map(own, true, planes, tile.m, tile.n, static_cast<uint64_t>(tile.n) * 4,
                                   static_cast<uint64_t>(tile.n) * tile.m * 4);
  }
  made.rows_params = {own,    call.output.data, call.output.batch_stride, call.output.row_stride, p.m, p.n,
                      tile.m, tile.n,           tile.pair_along_m,        p.tiling};
  made.zeroes = splits > 0 && !choices.accumulate;
  made.rounds = splits > 0 && !p.is_fp32;
  made.gemm.grid = {static_cast<uint32_t>(choices.clusters * gemm::kCtasPerCluster)};
  made.gemm.block = {gemm::native_threads(tile)};
  made.gemm.cluster = {gemm::kCtasPerCluster};
  made.gemm.smem_bytes = gemm::native_smem_bytes(tile);
  // It reads operands before it waits: only a launch that has waited itself may stand before it.
  made.gemm.programmatic = made.zeroes;
  const int64_t row_ctas = (int64_t{splits} * gemm::kCtasPerCluster * tile.m * 32 + kRowsThreads - 1) / kRowsThreads;
  const int64_t most = int64_t{choices.multiprocessors} * kRowsCtasPerMultiprocessor;
  made.rows.grid = {static_cast<uint32_t>(row_ctas < most ? row_ctas : most)};
  made.rows.block = {kRowsThreads};
  made.rows.programmatic = true;
  return made;
}

// a [L, M, K], b [L, K, N] BF16, out [L, M, N] BF16 or FP32 with unit stride on n: a function that launches on a stream.
inline tvm::ffi::Function prepare_split(TensorView a, TensorView b, TensorView out, gemm::OptionalTensor sums, bool slim,
                                        bool a_k_major, bool b_k_major, bool accumulate, int64_t whole_units, int64_t clusters,
                                        int64_t pieces, int64_t group_rows, int64_t multiprocessors) {
  const SplitChoices choices{slim ? gemm::TileKind::kSlim : gemm::TileKind::kWide,
                             a_k_major,
                             b_k_major,
                             accumulate,
                             static_cast<int32_t>(whole_units),
                             static_cast<int32_t>(clusters),
                             static_cast<int32_t>(pieces),
                             static_cast<int32_t>(group_rows),
                             static_cast<int32_t>(multiprocessors)};
  const host::DeviceGuard guard(out.device());
  const SplitLaunches made = make_split(a, b, out, sums, choices);
  const host::KernelRef<SplitParams> kernel = split_kernel(choices.kind);
  const DLDevice device = out.device();
  return tvm::ffi::Function::FromTyped([=](int64_t stream) {
    const host::DeviceGuard current(device);
    host::LaunchConfig gemm_on = made.gemm, rows_on = made.rows;
    gemm_on.stream = rows_on.stream = stream;
    if (made.zeroes) host::launch(CAKE_KERNEL_REF(gemm_split_zero_any), rows_on, made.rows_params);
    host::launch(kernel, gemm_on, made.gemm_params);
    if (made.rounds) host::launch(CAKE_KERNEL_REF(gemm_split_round_any), rows_on, made.rows_params);
  });
}

}  // namespace dense_projection_gemm
