// The numerics that every program of the router shares: the scale of a row, the three BF16 terms of an element, promotion, what
// cannot be split, and how a result gets its scale back.
//
// A lane holds 8 elements of P in a step of 16: raw[0] row g, raw[1] row g + 8, raw[2] and raw[3] the same rows, further along
// the depth (g = lane >> 2, c = lane & 3). Where P's rows run along the depth a lane reads four neighbours, 4c .. 4c + 3, as
// raw[0] and raw[2], and Q's planes are interleaved to match: which elements of a step an instruction pairs with which does not
// matter.
//
// Exactness. P is multiplied by 1 where the largest of a row's first 16 elements is of an ordinary binade, else by the power of
// two that brings it to binade 0; Q by the power of two that brings it to binade 44. Splitting an element is exact above 2^-103.
// A product's last bit lies 30 binades below its operands' sum; what is lost below 2^-126 is invisible below the results' own
// 2^-149 where the scales' exponents add up to 40, and nothing is lost where the operands' binades add up to -119. So elements
// below row_lowest() or column_lowest() are tiny, and a result below 1 (before it gets its scale back) in a row or column with tiny elements is
// computed anew.
#pragma once

#include "cake/ptx/warp.cuh"
#include "router_params.h"

namespace dense_projection_det_gemm {

namespace ptx = cake::ptx;

using RouterRaw = float[4][2];

// What a lane feeds to the tensor cores in a step: the terms of P, largest first. BF16 is its own only term.
template <class Element>
inline constexpr int kTermsOf = sizeof(Element) == 4 ? kRouterTerms : 1;
template <class Element>
using RouterFragments = uint32_t[kTermsOf<Element>][4];

inline constexpr int kRouterOrdinaryLow = -40, kRouterOrdinaryHigh = 20;  // binades of P that need no scale
inline constexpr int kRouterColumnBinade = 44;
inline constexpr int kRouterColumnHighest = 70;
inline constexpr uint32_t kInfinityBits = 0x7f800000u, kMagnitudeBits = 0x7fffffffu;

__device__ __forceinline__ float operand_element(const RouterOperand& operand, int64_t offset) {
  return operand.is_bf16 ? __bfloat162float(static_cast<const __nv_bfloat16*>(operand.data)[offset])
                         : static_cast<const float*>(operand.data)[offset];
}

// Binade of an FP32 magnitude: -149 .. 127, 128 for inf and NaN; -149 for zero.
__device__ __forceinline__ int binade(uint32_t magnitude) {
  const int field = static_cast<int>(magnitude >> 23);
  return field != 0 ? field - 127 : magnitude != 0 ? -118 - __clz(magnitude) : -149;
}

__device__ __forceinline__ float power_of_two(int exponent) {  // of a normal number
  return __int_as_float((exponent + 127) << 23);
}

// Exponent of a row of P's scale from the largest magnitude of its first elements.
__device__ __forceinline__ int row_exponent(uint32_t largest) {
  const int b = binade(largest);
  if (largest == 0 || b == 128 || (b >= kRouterOrdinaryLow && b <= kRouterOrdinaryHigh)) return 0;
  return max(-126, min(126, -b));
}

__device__ __forceinline__ int column_exponent(uint32_t largest) {
  const int b = binade(largest);
  return largest == 0 || b == 128 ? kRouterColumnBinade : kRouterColumnBinade - b;
}

// Binade, of the unscaled element, below which it is tiny.
__device__ __forceinline__ constexpr int row_lowest(int exponent) { return (exponent < 0 ? -59 : -100) - exponent; }
__device__ __forceinline__ int column_lowest(int exponent) { return (exponent < 40 ? -19 : -60) - exponent; }

// Magnitudes minus one, doubled: sorts like the magnitudes, with zero on top, so that the least one ignores zeros.
__device__ __forceinline__ uint32_t nonzero_key(float x) { return 2u * __float_as_uint(x) - 1u; }
__device__ __forceinline__ bool is_tiny(uint32_t least_key, int lowest) {
  return least_key != 0xffffffffu && binade(least_key / 2u + (least_key & 1u)) < lowest;
}

// x 2^exponent, rounded once, also where the factor is no FP32 number.
__device__ __forceinline__ float scale_by(float x, int exponent) {
  const int first = exponent < -126 ? -100 : min(127, exponent);
  x = __fmul_rn(x, power_of_two(first));
  exponent -= first;
  const int second = max(-100, exponent);
  return __fmul_rn(__fmul_rn(x, power_of_two(second)), power_of_two(max(-126, exponent - second)));
}

// a[t][r]: term t of raw[r], largest first; the three add up to the element exactly, if it is not tiny.
__device__ __forceinline__ void split(RouterFragments<float>& a, const RouterRaw& raw) {
#pragma unroll
  for (int r = 0; r < 4; ++r) {
    float x = raw[r][0], y = raw[r][1];
#pragma unroll
    for (int t = 0; t < kRouterTerms; ++t) {
      a[t][r] = ptx::pack_bf16(x, y);
      if (t + 1 < kRouterTerms) {
        x = __fsub_rn(x, ptx::low_bf16(a[t][r]));
        y = __fsub_rn(y, ptx::high_bf16(a[t][r]));
      }
    }
  }
}

// The rows that a lane holds.
struct RouterRowState {
  float factor[2] = {1.f, 1.f};  // 2^exponent
  uint32_t least_key[2] = {0xffffffffu, 0xffffffffu};

  // From the lane's elements of the row's first step.
  __device__ __forceinline__ void take_hint(const RouterRaw& raw) {
#pragma unroll
    for (int row = 0; row < 2; ++row) {
      uint32_t largest = 0;
#pragma unroll
      for (int r = row; r < 4; r += 2) {
        largest = max(largest, max(__float_as_uint(raw[r][0]) & kMagnitudeBits, __float_as_uint(raw[r][1]) & kMagnitudeBits));
      }
      largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
      largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
      factor[row] = power_of_two(row_exponent(largest));
    }
  }

  __device__ __forceinline__ int exponent(int row) const { return (__float_as_int(factor[row]) >> 23) - 127; }

  __device__ __forceinline__ void watch(const RouterRaw& raw) {
#pragma unroll
    for (int r = 0; r < 4; ++r) {
#pragma unroll
      for (int i = 0; i < 2; ++i) least_key[r & 1] = min(least_key[r & 1], nonzero_key(raw[r][i]));
    }
  }

  __device__ __forceinline__ void watch(const uint32_t (&pairs)[4]) {
#pragma unroll
    for (int r = 0; r < 4; ++r) {
      least_key[r & 1] = min(least_key[r & 1], min(nonzero_key(ptx::low_bf16(pairs[r])), nonzero_key(ptx::high_bf16(pairs[r]))));
    }
  }

  __device__ __forceinline__ void scale(RouterRaw& raw) const {
#pragma unroll
    for (int r = 0; r < 4; ++r) {
#pragma unroll
      for (int i = 0; i < 2; ++i) raw[r][i] = __fmul_rn(raw[r][i], factor[r & 1]);
    }
  }

  // Whether neither row has a scale and none of the lane's elements of them is tiny.
  __device__ __forceinline__ bool ordinary() const {
    constexpr uint32_t kLowest = 2u * ((127 + row_lowest(0)) << 23) - 1u;  // nonzero_key of what is not tiny
    return factor[0] == 1.f && factor[1] == 1.f && min(least_key[0], least_key[1]) >= kLowest;
  }

  // Over the four lanes of a row.
  __device__ __forceinline__ bool tiny(int row) const {
    uint32_t least = least_key[row];
    least = min(least, __shfl_xor_sync(0xffffffffu, least, 1));
    least = min(least, __shfl_xor_sync(0xffffffffu, least, 2));
    return is_tiny(least, row_lowest(exponent(row)));
  }
};

// Fragments from the elements of a step; of the rows' first step where `first`.
__device__ __forceinline__ void make_fragments(RouterFragments<float>& a, RouterRaw& raw, RouterRowState& rows, bool first) {
  if (first) rows.take_hint(raw);
  rows.watch(raw);
  rows.scale(raw);
  split(a, raw);
}

__device__ __forceinline__ void make_fragments(RouterFragments<__nv_bfloat16>& a, uint32_t (&pairs)[4], RouterRowState& rows,
                                               bool) {
  rows.watch(pairs);
#pragma unroll
  for (int r = 0; r < 4; ++r) a[0][r] = pairs[r];
}

template <class Element>
struct RouterLoaded;
template <>
struct RouterLoaded<float> {
  using Type = RouterRaw;
};
template <>
struct RouterLoaded<__nv_bfloat16> {
  using Type = uint32_t[4];
};

__device__ __forceinline__ bool must_redo(float total, bool tiny) {
  const float magnitude = fabsf(total);
  return !(magnitude < __uint_as_float(kInfinityBits)) || (tiny && magnitude < 1.f);
}

// NaN marks what router_special computes anew.
__device__ __forceinline__ float marked(float result, bool redo) { return redo ? __uint_as_float(0x7fffffffu) : result; }

}  // namespace dense_projection_det_gemm
