// What the kernels of the BF16 GEMM take. Plain C++17: host, device and emulator read it.
#pragma once

#include <cstdint>

#include "cake/host/kernel_ref.h"
#include "cake/host/tensor_map_value.h"

namespace cake::gemm {

// Work of a launch. Units are tiles, or the tiles of a cluster's two CTAs, of all batches; those up to `whole_units` contract
// everything in one go. Each of the others is cut into `pieces` of `piece_blocks` blocks of 64 elements or, where `halved`,
// into its left and its right columns, which moves no bit.
struct Tiling {
  int32_t batches;
  int32_t row_units, column_units;  // of one batch
  int32_t unit_rows, unit_columns;  // elements
  int32_t group_rows;               // row units that are visited before the column advances
  int32_t short_units;              // come first: the last rows of a batch, of one CTA, and two units' columns
  int32_t last_apart;               // 1: the last column unit of a batch, which is not filled, comes after all others
  int32_t blocks;                   // of the whole contraction
  int32_t whole_units;
  int32_t pieces, piece_blocks;
  int32_t halved;
  int32_t units;                    // of work: whole_units and all parts of the others
};

struct Output {
  void* data;             // first element of the result, for direct accesses
  int64_t batch_stride;   // elements
  int64_t row_stride;     // where transposed: of a column, whose rows lie next to each other
  int32_t is_fp32;
  int32_t accumulate;     // add what the result holds
  int32_t direct;         // rows are no multiple of 16 bytes: stored by threads
  int32_t transposed;     // unit stride on m: stored by threads, by programs that can
  int32_t passes;         // larger than L2 and all that takes time: its lines push out one another
};

struct NativeParams {
  host::TensorMap a, b, out, partials;
  int32_t m, n;
  int32_t a_k_major, b_k_major;
  int32_t a_batch_step, b_batch_step;  // 0: one matrix serves all batches
  int32_t half_block;                  // the contraction has no more terms than half of a block
  int32_t beside;                      // starts beside the launch before it, which it waits for at its end alone
  Tiling tiling;
  Output output;
};

// One of the two strides is 1.
struct OperandRows {
  const void* data;
  int64_t batch_stride;  // elements
  int64_t pitch;         // of the axis that has no unit stride
  int32_t k_major;
};

struct PortableParams {
  OperandRows a, b;
  int32_t m, n, k;
  Tiling tiling;
  Output output;
  float* partials;  // [slots, unit_rows, unit_columns]
};

struct SumParams {
  const float* partials;
  Tiling tiling;
  Output output;
  int32_t m, n;
};

CAKE_DECLARE_KERNEL(gemm_wide_sm90, NativeParams)
CAKE_DECLARE_KERNEL(gemm_middle_sm90, NativeParams)
CAKE_DECLARE_KERNEL(gemm_narrow_sm90, NativeParams)
CAKE_DECLARE_KERNEL(gemm_slim_sm90, NativeParams)
CAKE_DECLARE_KERNEL(gemm_broad_sm90, NativeParams)
CAKE_DECLARE_KERNEL(gemm_turns_sm90, NativeParams)
CAKE_DECLARE_KERNEL(gemm_kept_sm90, NativeParams)
CAKE_DECLARE_KERNEL(gemm_square_sm90, NativeParams)
CAKE_DECLARE_KERNEL(gemm_out_any, PortableParams)
CAKE_DECLARE_KERNEL(gemm_sum_any, SumParams)

}  // namespace cake::gemm
