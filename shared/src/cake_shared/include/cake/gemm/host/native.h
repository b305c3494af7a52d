// The native GEMM: its tensor maps and its launch.
#pragma once

#include "cake/gemm/host/call.h"
#include "cake/host/architecture.h"
#include "cake/host/tensor_map.h"

#if CAKE_HAS_SM90

namespace cake::gemm {

inline constexpr int kCtasPerCluster = 2;

constexpr uint32_t native_threads(TileShape tile) { return 128 * (1 + static_cast<uint32_t>(consumers_of(tile))); }

constexpr uint32_t native_smem_bytes(TileShape tile) {
  const uint32_t stages = static_cast<uint32_t>(tile.stages), kept = static_cast<uint32_t>(tile.kept_bytes);
  const uint32_t stage = static_cast<uint32_t>(tile.m + (kept > 0 ? 0 : tile.n)) * kBlockK * 2;
  const uint32_t store = static_cast<uint32_t>(consumers_of(tile) * tile.store_buffers) * kStoreRows * kStoreRowBytes;
  const uint32_t barriers = 16 * stages + (kept > 0 ? 8 * (1 + kept / kept_block_bytes(tile)) : 0);
  return (stage * stages + kept + store + barriers + 1023) / 1024 * 1024;
}

// A legal pitch where an axis of extent 1 has a stride that means nothing.
inline uint64_t pitch_bytes(int64_t extent, int64_t stride, int64_t inner_extent, int64_t element_bytes) {
  return static_cast<uint64_t>(extent > 1 ? stride * element_bytes : (inner_extent * element_bytes + 15) / 16 * 16);
}

struct Operand {
  host::TensorMap map;
  int32_t batch_step;
};

// x [L, ., .]: `rows` is the axis of m or n, `depth` that of k.
inline Operand make_operand(const char* name, const TensorView& x, int rows, int depth, bool k_major, OperandBoxes boxes,
                            const void* data) {
  const int inner = k_major ? depth : rows, outer = k_major ? rows : depth;
  const bool batched = x.size(0) > 1 && x.stride(0) != 0;
  host::TensorBox<3> what{};
  what.address = data;
  what.extents[0] = static_cast<uint64_t>(x.size(inner));
  what.extents[1] = static_cast<uint64_t>(x.size(outer));
  what.extents[2] = batched ? static_cast<uint64_t>(x.size(0)) : 1;
  what.strides_bytes[0] = pitch_bytes(x.size(outer), x.stride(outer), x.size(inner), 2);
  what.strides_bytes[1] = batched ? static_cast<uint64_t>(x.stride(0)) * 2 : what.strides_bytes[0];
  what.box[0] = 64;
  what.box[1] = static_cast<uint32_t>(k_major ? boxes.box_rows() : boxes.box_depth());
  what.box[2] = 1;
  // Rows of k are read on in the next stage; of neighbouring columns another box of the same stage asks for its own.
  what.l2 = k_major ? host::MapL2::k256Bytes : host::MapL2::k128Bytes;
  return {host::encode_tensor_map(name, what), batched ? 1 : 0};
}

inline host::TensorMap make_output_map(const void* data, bool is_fp32, int64_t batches, int64_t m, int64_t n, uint64_t row_bytes,
                                       uint64_t batch_bytes) {
  host::TensorBox<3> what{};
  what.address = data;
  what.extents[0] = static_cast<uint64_t>(n);
  what.extents[1] = static_cast<uint64_t>(m);
  what.extents[2] = static_cast<uint64_t>(batches);
  what.strides_bytes[0] = row_bytes;
  what.strides_bytes[1] = batch_bytes;
  what.box[0] = kStoreRowBytes / (is_fp32 ? 4 : 2);
  what.box[1] = kStoreRows;
  what.box[2] = 1;
  what.type = is_fp32 ? host::MapType::kFloat32 : host::MapType::kBFloat16;
  return host::encode_tensor_map("out", what);
}

inline host::KernelRef<NativeParams> native_kernel(TileKind kind) {
  switch (kind) {
    case TileKind::kWide: return CAKE_KERNEL_REF(gemm_wide_sm90);
    case TileKind::kMiddle: return CAKE_KERNEL_REF(gemm_middle_sm90);
    case TileKind::kNarrow: return CAKE_KERNEL_REF(gemm_narrow_sm90);
    case TileKind::kSlim: return CAKE_KERNEL_REF(gemm_slim_sm90);
    case TileKind::kBroad: return CAKE_KERNEL_REF(gemm_broad_sm90);
    case TileKind::kTurns: return CAKE_KERNEL_REF(gemm_turns_sm90);
    case TileKind::kSquare: return CAKE_KERNEL_REF(gemm_square_sm90);
    case TileKind::kKept: return CAKE_KERNEL_REF(gemm_kept_sm90);
    default: break;
  }
  TVM_FFI_THROW(ValueError) << "program: expected one of this package, got " << static_cast<int32_t>(kind);
  return {};
}

// What the programs that keep B in shared memory take.
inline void check_kept(const GemmCall& call, TileShape tile, const Choices& choices) {
  const int64_t most = int64_t{tile.kept_bytes} / kept_block_bytes(tile) * kBlockK;
  if (call.k > most) TVM_FFI_THROW(ValueError) << "b: expected at most " << most << " rows in this program, got " << call.k;
  if (choices.pieces > 1) TVM_FFI_THROW(ValueError) << "pieces: expected 1 in this program, got " << choices.pieces;
  if (choices.group_rows < ceil_div(call.m, tile.m)) {
    TVM_FFI_THROW(ValueError) << "group_rows: expected all " << ceil_div(call.m, tile.m) << " units of rows in this program, got "
                              << choices.group_rows;
  }
}

inline GemmLaunch<NativeParams> make_native(const TensorView& a, const TensorView& b, const TensorView& out,
                                         const OptionalTensor& workspace, const Choices& choices) {
  const TileShape tile = tile_shape(choices.kind);
  if (choices.halved && !halves(tile)) {
    TVM_FFI_THROW(ValueError) << "halved: expected false for tiles of " << tile.m << " x " << tile.n << ", got true";
  }
  GemmCall call = check_gemm(a, b, out, choices);
  if (tile.kept_bytes > 0) check_kept(call, tile, choices);
  // As the planner counts them: short units where the contraction may not be cut.
  const bool may_cut = choices.pieces > 1 || (!choices.a_k_major && !choices.b_k_major);
  make_tiling(call, workspace, choices, tile.m * (tile.pair_along_m ? kCtasPerCluster : 1),
              tile.n * (tile.pair_along_m ? 1 : kCtasPerCluster), halves(tile) && !may_cut);
  const host::DeviceGuard guard(call.device);
  NativeParams params{};
  if (call.k > 0) {
    const Operand left = make_operand("a", a, 1, 2, choices.a_k_major, a_boxes(tile), call.a);
    const Operand right = make_operand("b", b, 2, 1, choices.b_k_major, b_boxes(tile), call.b);
    params.a = left.map, params.b = right.map;
    params.a_batch_step = left.batch_step, params.b_batch_step = right.batch_step;
  }
  params.m = static_cast<int32_t>(call.m);
  params.n = static_cast<int32_t>(call.n);
  params.a_k_major = choices.a_k_major;
  params.b_k_major = choices.b_k_major;
  params.half_block = call.k <= kBlockK / 2;
  params.output = call.output;
  params.tiling = call.tiling;
  if (!call.output.direct) {
    const uint64_t element_bytes = call.output.is_fp32 ? 4 : 2;
    const bool transposed = call.output.transposed != 0;
    params.out = make_output_map(call.output.data, call.output.is_fp32, call.batches, transposed ? call.n : call.m,
                                 transposed ? call.m : call.n,
                                 static_cast<uint64_t>(call.output.row_stride) * element_bytes,
                                 static_cast<uint64_t>(call.output.batch_stride) * element_bytes);
  }
  if (call.slots > 0) {
    const uint64_t row_bytes = static_cast<uint64_t>(call.tiling.unit_columns) * 4;
    params.partials = make_output_map(call.partials, true, call.slots, call.tiling.unit_rows, call.tiling.unit_columns, row_bytes,
                                      row_bytes * static_cast<uint64_t>(call.tiling.unit_rows));
  }
  host::LaunchConfig config{};
  const int32_t clusters = choices.multiprocessors / kCtasPerCluster;
  int32_t wanted = params.tiling.units < clusters ? params.tiling.units : (clusters > 0 ? clusters : 1);
  // As many clusters to each B, if hardly any are left over: they then read and write the same rows at the same time.
  const int64_t groups = int64_t{params.tiling.batches} * params.tiling.column_units;
  if (tile.kept_bytes > 0 && groups <= wanted && wanted % groups * 8 <= wanted) wanted -= static_cast<int32_t>(wanted % groups);
  config.grid = {static_cast<uint32_t>(wanted * kCtasPerCluster)};
  config.block = {native_threads(tile)};
  config.cluster = {kCtasPerCluster};
  config.smem_bytes = native_smem_bytes(tile);
  config.programmatic = true;
  return launch_of(native_kernel(choices.kind), config, params, call, choices);
}

inline PairLaunch<NativeParams> pair_native(const GemmLaunch<NativeParams>& first, GemmLaunch<NativeParams> second, bool beside) {
  second.params.beside = beside;
  return {first, second, beside};
}

}  // namespace cake::gemm

#endif
