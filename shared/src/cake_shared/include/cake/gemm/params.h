// What the kernels of the BF16 GEMM take. Plain C++17: host, device and emulator read it.
#pragma once

#include <cstdint>

#include "cake/host/kernel_ref.h"
#include "cake/host/tensor_map_value.h"

namespace cake::gemm {

// Work of a launch: every tile of every batch, its contraction cut into `pieces` of `piece_blocks` blocks of 64 elements.
struct Tiling {
  int32_t batches;
  int32_t pieces;
  int32_t piece_blocks;
  int32_t blocks;         // of the whole contraction
  int32_t row_units;      // tiles, or pairs of tiles, along m
  int32_t column_units;   // along n
  int32_t group_rows;     // row units that are visited before the column advances
  int32_t units;          // batches * pieces * row_units * column_units
};

struct Output {
  void* data;             // first element of the result, for direct accesses
  int64_t batch_stride;   // elements
  int64_t row_stride;
  int32_t is_fp32;
  int32_t accumulate;     // add what the result holds
  int32_t direct;         // rows are no multiple of 16 bytes: stored by threads
};

struct NativeParams {
  host::TensorMap a, b, out;
  int32_t m, n;
  int32_t a_k_major, b_k_major;
  int32_t a_batch_step, b_batch_step;  // 0: one matrix serves all batches
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
  int32_t b_columns;  // n, or fewer where partial sums have padded rows
  Tiling tiling;
  Output output;
};

struct SumParams {
  const float* partials;  // [batches, pieces, m, pitch]
  Output output;
  int32_t batches, pieces, m, n;
  int32_t pitch;          // elements, a multiple of four
};

CAKE_DECLARE_KERNEL(gemm_wide_sm90, NativeParams)
CAKE_DECLARE_KERNEL(gemm_middle_sm90, NativeParams)
CAKE_DECLARE_KERNEL(gemm_narrow_sm90, NativeParams)
CAKE_DECLARE_KERNEL(gemm_flat_sm90, NativeParams)
CAKE_DECLARE_KERNEL(gemm_out_any, PortableParams)
CAKE_DECLARE_KERNEL(gemm_sum_any, SumParams)

}  // namespace cake::gemm
