// What the host hands to the router's kernels: plain C++17, read by nvcc, by a C++ compiler and by the emulator.
#pragma once

#include <cstdint>

#include "cake/host/kernel_ref.h"
#include "router_work.h"

namespace dense_projection_det_gemm {

inline constexpr int kRouterTermsThreads = 256;
inline constexpr int kRouterTermsSteps = 4;  // of the contraction, a CTA
inline constexpr int kRouterOutThreads = 256;
inline constexpr int kRouterNativeThreads = 384;
inline constexpr int kRouterSpecialThreads = 256;
inline constexpr int kRouterSpecialColumns = 32;  // of a CTA where segments are added

// Dynamic shared memory of the native programs, which assert these numbers.
inline constexpr uint32_t kRouterWideSmemBytes = 230400, kRouterBf16SmemBytes = 201728, kRouterNarrowSmemBytes = 101376;

// [count, depth] of either operand. Strides are in elements, one of them is 1.
struct RouterOperand {
  const void* data;
  int64_t stride, depth_stride;
  int32_t is_bf16;
};

// What an element of Q can be guilty of.
enum RouterFlag : int32_t {
  kRouterTiny = 1,  // too far below the row's scale to be split exactly
  kRouterWide = 2,  // too far above it
};

// Q as the tensor cores read it: [column tile][step][group of columns][term][half of the step][place of the column][8] BF16, with
// what was done to its rows.
struct RouterTerms {
  void* planes;
  int32_t* exponents;   // [columns padded to tiles]: row c was multiplied by 2^exponents[c]
  float* factors;       // 2^-exponents[c], or 0 where that is no normal FP32 number
  uint8_t* flags;       // [CTAs along the depth, columns padded to tiles]: RouterFlag
  uint32_t* any_redo;   // [1]: whether the product has marked anything; zeroed with the terms
  uint32_t* arrivals;   // [tiles][CTAs of a tile][warps][blocks]: units that have stored their sums; zeroed with the terms
  int32_t interleaved;  // the order of a step's elements: see any/router_split.cuh
};

struct RouterTermsParams {
  RouterOperand p, q;
  int32_t fetched_units;  // that begin at once: the first of their P is brought into L2
  RouterWork work;
  RouterTerms terms;
};

struct RouterOutParams {
  RouterOperand p, q;
  RouterWork work;
  RouterTerms terms;
  int32_t* row_exponents;  // [rows padded to tiles]
  float* out;
  int64_t out_row_stride, out_column_stride;
  float* slots;        // [slots][CTAs of a tile][128 x width]: in the output's orientation, or as sm90/router_join.cuh has them
  uint8_t* slot_tiny;  // [slots][CTAs of a tile][128]: whether the segment's rows have tiny elements
  uint8_t* joined;  // [slots][CTAs of a tile][warps]: a bit for each block whose segments the unit has added up
};

CAKE_ROUTER_HOST_DEVICE bool router_slots_transposed(const RouterOutParams& p) { return p.out_column_stride != 1; }

}  // namespace dense_projection_det_gemm

CAKE_DECLARE_KERNEL(router_terms_any, dense_projection_det_gemm::RouterTermsParams)
CAKE_DECLARE_KERNEL(router_out_any, dense_projection_det_gemm::RouterOutParams)
CAKE_DECLARE_KERNEL(router_out_sm90, dense_projection_det_gemm::RouterOutParams)
CAKE_DECLARE_KERNEL(router_bf16_out_sm90, dense_projection_det_gemm::RouterOutParams)
CAKE_DECLARE_KERNEL(router_narrow_out_sm90, dense_projection_det_gemm::RouterOutParams)
CAKE_DECLARE_KERNEL(router_special_any, dense_projection_det_gemm::RouterOutParams)
