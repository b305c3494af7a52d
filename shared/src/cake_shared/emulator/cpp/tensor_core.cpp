#include "tensor_core.h"

#include <algorithm>
#include <cmath>

namespace cake::emu {
namespace {

constexpr int kKept = 25;
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

bool is_special(float x) { return (std::bit_cast<u32>(x) >> 23 & 255) == 255; }

// total * 2^scale, cut off.
float cut_off(i64 total, int scale) {
  const u32 sign = total < 0 ? 1u << 31 : 0;
  const u64 size = static_cast<u64>(total < 0 ? -total : total);
  if (size == 0) return 0;
  const int width = std::bit_width(size), e = width - 1 + scale;
  if (e > 127) return std::bit_cast<float>(sign | 0x7f800000u);
  const int drop = e >= -126 ? width - 24 : -149 - scale;
  const u64 kept = drop >= 64 ? 0 : drop >= 0 ? size >> drop : size << -drop;
  const u32 field = e >= -126 ? static_cast<u32>(e + 127) << 23 | (static_cast<u32>(kept) & 0x7fffff) : static_cast<u32>(kept);
  return std::bit_cast<float>(sign | field);
}

}  // namespace

TensorCore::TensorCore(const float* b, u32 n, u32 k) : b_(b), n_(n), k_(k) {
  for (u32 at = 0; at < n * k; ++at) {
    const Parts p = parts_of<10>(b[at]);
    exponent_[at] = p.exponent;
    sign_[at] = p.sign;
    mantissa_[at] = p.mantissa;
    special_ |= is_special(b[at]);
  }
}

template <u32 kColumns>
void TensorCore::multiply_add_to(const float* a, u32 a_step, float* d) const {
  const u32 n = kColumns ? kColumns : n_;
  bool special = special_;
  for (u32 k = 0; k < k_; ++k) special |= is_special(a[k * a_step]);
  for (u32 j = 0; j < n; ++j) special |= is_special(d[j]);
  if (special) return with_specials(a, a_step, d);
  i32 top[kMostColumns], sum[kMostColumns];
  for (u32 j = 0; j < n; ++j) {
    top[j] = parts_of<23>(d[j]).exponent;
    sum[j] = 0;
  }
  for (u32 k = 0; k < k_; ++k) {
    const i32 mine = parts_of<10>(a[k * a_step]).exponent;
    const i32* exponent = exponent_ + k * n;
    for (u32 j = 0; j < n; ++j) top[j] = std::max(top[j], mine + exponent[j]);
  }
  // Sixteen products of less than 2^27 fit in 32 bits.
  for (u32 k = 0; k < k_; ++k) {
    const Parts mine = parts_of<10>(a[k * a_step]);
    if (!mine.mantissa) continue;
    const i32 *exponent = exponent_ + k * n_, *sign = sign_ + k * n;
    const u32* mantissa = mantissa_ + k * n;
    for (u32 j = 0; j < n; ++j) {
      const u32 shift = static_cast<u32>(std::min(top[j] - (mine.exponent + exponent[j]), 31));
      const i32 size = static_cast<i32>((mine.mantissa * mantissa[j] << (kKept - 20)) >> shift), s = mine.sign ^ sign[j];
      sum[j] += (size ^ s) - s;
    }
  }
  for (u32 j = 0; j < n; ++j) {
    const Parts c = parts_of<23>(d[j]);
    const i64 size = static_cast<i64>(c.mantissa) << (kKept - 23) >> std::min(top[j] - c.exponent, 63);
    d[j] = cut_off(sum[j] + (c.sign ? -size : size), top[j] - kKept);
  }
}

template void TensorCore::multiply_add_to<0>(const float*, u32, float*) const;
template void TensorCore::multiply_add_to<8>(const float*, u32, float*) const;

void TensorCore::with_specials(const float* a, u32 a_step, float* d) const {
  for (u32 j = 0; j < n_; ++j) {
    double sum = d[j];
    for (u32 k = 0; k < k_; ++k) sum += static_cast<double>(a[k * a_step]) * b_[k * n_ + j];
    const float rounded = static_cast<float>(sum);
    d[j] = rounded == rounded ? rounded : std::bit_cast<float>(0x7fffffffu);
  }
}

}  // namespace cake::emu
