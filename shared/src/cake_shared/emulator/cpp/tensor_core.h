// Sums of products as the tensor cores of an H200 form them: BF16, FP16, TF32 and FP8 operands, FP32 accumulators.
//
// Measured, and the same bits on everything that was tried of mma.sync and wgmma: the exact products of an instruction and
// the accumulator are aligned to the largest exponent among them (a product's is the sum of its operands', a subnormal's is
// the smallest of its format), each is cut off 25 bits below it, the sum of what is left is exact and is cut off to FP32.
// wgmma with FP8 operands keeps 13 bits, of the terms and of the result. mma.sync with FP8 operands is two products of
// FP16 that start from zero; their sum is added to the accumulator in FP32.
#pragma once
#include "core.h"

namespace cake::emu {

struct Operands {
  int a_lowest, b_lowest;  // the smallest exponents of normal numbers
  bool coarse = false;     // 13 bits
};

// One instruction's B, [k][n] with k up to 32 and n a multiple of 8 up to 256. A row of sums at a time: d[n] += sum over k
// of a[k * a_step] b[k][n].
class TensorCore {
 public:
  static constexpr u32 kMostColumns = 256, kMostDepth = 32;
  TensorCore(const float* b, u32 n, u32 k, const Operands& operands);
  void multiply_add(const float* a, u32 a_step, float* d) const {
    operands_.coarse ? multiply_add_to<13>(a, a_step, d) : multiply_add_to<25>(a, a_step, d);
  }

 private:
  static constexpr u32 kBlock = 8;  // columns of B that are worked on together
  template <int kKept>
  void multiply_add_to(const float* a, u32 a_step, float* d) const;
  void with_specials(const float* a, u32 a_step, const float* before, float* d) const;
  const float* b_;
  u32 n_, k_;
  Operands operands_;
  bool special_ = false;  // an infinity or a NaN
  // Block after block, each [k][kBlock].
  i32 exponent_[kMostColumns * kMostDepth], sign_[kMostColumns * kMostDepth];
  u32 mantissa_[kMostColumns * kMostDepth];
};

}  // namespace cake::emu
