#include "tensor_core.h"

#include <algorithm>
#include <cmath>

namespace cake::emu {
namespace {

constexpr i32 kZero = -100000;  // the exponent of a zero: never the largest

struct Parts {
  i32 exponent, sign;  // sign: 0 or -1
  u32 mantissa;        // with `fraction` bits below one
};

template <int kFraction>
Parts parts_of(float x) {
  const u32 bits = std::bit_cast<u32>(x), e = bits >> 23 & 255;
  const u32 m = (bits & 0x7fffff) >> (23 - kFraction) | (e ? 1u << kFraction : 0);
  return {m ? static_cast<i32>(e ? e : 1) - 127 : kZero, static_cast<i32>(bits) >> 31, m};
}

// An operand; what is subnormal in its format has that format's lowest exponent.
Parts operand(float x, int lowest) {
  Parts p = parts_of<10>(x);
  const i32 below = p.mantissa ? std::max(lowest - p.exponent, 0) : 0;
  p.exponent += below;
  p.mantissa >>= below;
  return p;
}

bool is_special(float x) { return (std::bit_cast<u32>(x) >> 23 & 255) == 255; }

// 2^exponent; for the exponents of sums, which doubles hold with room to spare.
double power(i32 exponent) { return std::bit_cast<double>(static_cast<u64>(exponent + 1023) << 52); }

// Toward zero. What FP32 cannot hold becomes infinite.
float cut_off(double x) {
  const float nearest = static_cast<float>(x);
  const u32 past = std::abs(static_cast<double>(nearest)) > std::abs(x) && std::abs(x) < 0x1p128 ? 1 : 0;
  const u32 bits = std::bit_cast<u32>(nearest) - past;
  return std::bit_cast<float>(bits << 1 ? bits : 0);  // a zero has no sign
}

}  // namespace

TensorCore::TensorCore(const float* b, u32 n, u32 k, const Operands& operands) : b_(b), n_(n), k_(k), operands_(operands) {
  u32 to = 0;
  for (u32 block = 0; block < n; block += kBlock) {
    for (u32 row = 0; row < k; ++row) {
      for (u32 j = 0; j < kBlock; ++j, ++to) {
        const float x = b[row * n + block + j];
        const Parts p = operand(x, operands.b_lowest);
        exponent_[to] = p.exponent;
        sign_[to] = p.sign;
        mantissa_[to] = p.mantissa;
        special_ |= is_special(x);
      }
    }
  }
}

template <int kKept>
void TensorCore::multiply_add_to(const float* a, u32 a_step, float* d) const {
  i32 a_exponent[kMostDepth], a_sign[kMostDepth];
  u32 a_mantissa[kMostDepth];
  u32 special = special_;
  for (u32 k = 0; k < k_; ++k) {
    const Parts p = operand(a[k * a_step], operands_.a_lowest);
    a_exponent[k] = p.exponent;
    a_sign[k] = p.sign;
    a_mantissa[k] = p.mantissa;
    special |= is_special(a[k * a_step]);
  }
  for (u32 j = 0; j < n_; ++j) special |= is_special(d[j]);
  float before[kMostColumns];
  if (special) std::copy_n(d, n_, before);
  // Products have 20 bits below the one. Sixteen of less than 2^27 fit in 32 bits; where more are added, 13 are kept.
  constexpr int kProductUp = std::max(kKept - 20, 0), kProductDown = std::max(20 - kKept, 0);
  constexpr int kOwnUp = std::max(kKept - 23, 0), kOwnDown = std::max(23 - kKept, 0);
  for (u32 block = 0; block < n_; block += kBlock) {
    const i32 *exponent = exponent_ + block * k_, *sign = sign_ + block * k_;
    const u32* mantissa = mantissa_ + block * k_;
    float* const sums = d + block;
    i32 top[kBlock], sum[kBlock] = {};
    for (u32 j = 0; j < kBlock; ++j) top[j] = parts_of<23>(sums[j]).exponent;
    for (u32 k = 0; k < k_; ++k) {
      for (u32 j = 0; j < kBlock; ++j) top[j] = std::max(top[j], a_exponent[k] + exponent[k * kBlock + j]);
    }
    for (u32 k = 0; k < k_; ++k) {
      for (u32 j = 0; j < kBlock; ++j) {
        const u32 at = k * kBlock + j, shift = static_cast<u32>(std::min(top[j] - (a_exponent[k] + exponent[at]), 31));
        const u32 product = a_mantissa[k] * mantissa[at] << kProductUp >> kProductDown;
        const i32 size = static_cast<i32>(product >> shift), s = a_sign[k] ^ sign[at];
        sum[j] += (size ^ s) - s;
      }
    }
    for (u32 j = 0; j < kBlock; ++j) {
      const Parts c = parts_of<23>(sums[j]);
      const u32 shift = static_cast<u32>(std::min(top[j] - c.exponent, 31));
      const i32 size = static_cast<i32>(c.mantissa << kOwnUp >> kOwnDown >> shift), own = (size ^ c.sign) - c.sign;
      const double total = static_cast<double>(sum[j]) + static_cast<double>(own);
      const float all = cut_off(total * power(std::max(top[j], -300) - kKept));
      sums[j] = kKept < 23 ? std::bit_cast<float>(std::bit_cast<u32>(all) & ~0u << kOwnDown) : all;
    }
  }
  if (special) with_specials(a, a_step, before, d);
}

template void TensorCore::multiply_add_to<13>(const float*, u32, float*) const;
template void TensorCore::multiply_add_to<25>(const float*, u32, float*) const;

// The columns whose sum has an infinity or a NaN among its terms: infinite, or the one NaN of tensor cores.
void TensorCore::with_specials(const float* a, u32 a_step, const float* before, float* d) const {
  bool row = false;
  for (u32 k = 0; k < k_; ++k) row |= is_special(a[k * a_step]);
  for (u32 j = 0; j < n_; ++j) {
    bool column = row || is_special(before[j]);
    for (u32 k = 0; k < k_; ++k) column |= is_special(b_[k * n_ + j]);
    if (!column) continue;
    double sum = before[j];
    for (u32 k = 0; k < k_; ++k) sum += static_cast<double>(a[k * a_step]) * b_[k * n_ + j];
    const float rounded = static_cast<float>(sum);
    d[j] = rounded == rounded ? rounded : std::bit_cast<float>(0x7fffffffu);
  }
}

}  // namespace cake::emu
