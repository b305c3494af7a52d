// What the kernels of the split GEMM take. Plain C++17: host, device and emulator read it.
#pragma once

#include <cstdint>

#include "cake/gemm/params.h"
#include "split_work.h"

namespace dense_projection_gemm {

struct SplitParams {
  cake::host::TensorMap a, b, out, sums;  // sums: FP32, what partial sums are added to; out's own map where out is FP32
  int32_t m, n;
  int32_t a_k_major, b_k_major;
  int32_t a_batch_step, b_batch_step;  // 0: one matrix serves all batches
  int32_t is_fp32;
  int32_t adds_whole;   // whole tiles are added to the result too: an accumulating output
  int32_t sums_in_out;  // partial sums go to their place in the result; else to a row of tiles of their own
  SplitTiling tiling;
};

// Rows of the split tiles: to be filled with zeros, or rounded from their sums into a BF16 result.
struct SplitRowsParams {
  float* sums;          // the split tiles' own rows [split units, 2, tile rows, tile columns]; null: rows of the result
  void* out;            // first element of the result
  int64_t batch_stride, row_stride;  // of the result, elements
  int32_t m, n;
  int32_t tile_m, tile_n, pair_along_m;
  SplitTiling tiling;
};

CAKE_DECLARE_KERNEL(gemm_split_wide_sm90, SplitParams)
CAKE_DECLARE_KERNEL(gemm_split_slim_sm90, SplitParams)
CAKE_DECLARE_KERNEL(gemm_split_zero_any, SplitRowsParams)
CAKE_DECLARE_KERNEL(gemm_split_round_any, SplitRowsParams)

}  // namespace dense_projection_gemm
