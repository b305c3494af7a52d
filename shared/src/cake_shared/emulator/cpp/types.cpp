#include "types.h"

#include <cmath>
#include <limits>
#include <unordered_map>

namespace cake::emu {

static const std::unordered_map<std::string, Type>& type_names() {
  static const std::unordered_map<std::string, Type> names = {
      {"u8", Type::U8},         {"u16", Type::U16},   {"u32", Type::U32},     {"u64", Type::U64},
      {"s8", Type::S8},         {"s16", Type::S16},   {"s32", Type::S32},     {"s64", Type::S64},
      {"b8", Type::B8},         {"b16", Type::B16},   {"b32", Type::B32},     {"b64", Type::B64},
      {"b128", Type::B128},     {"f16", Type::F16},   {"f16x2", Type::F16x2}, {"bf16", Type::BF16},
      {"bf16x2", Type::BF16x2}, {"f32", Type::F32},   {"f64", Type::F64},     {"f32x2", Type::F32x2},
      {"tf32", Type::TF32},     {"e4m3", Type::E4M3}, {"e5m2", Type::E5M2},   {"e4m3x2", Type::E4M3x2},
      {"e5m2x2", Type::E5M2x2}, {"u16x2", Type::U16x2}, {"s16x2", Type::S16x2}, {"pred", Type::Pred}};
  return names;
}

std::optional<Type> parse_type(const std::string& name) {
  auto it = type_names().find(name);
  if (it == type_names().end()) return std::nullopt;
  return it->second;
}

const char* type_name(Type t) {
  for (const auto& [name, type] : type_names()) {
    if (type == t) return name.c_str();
  }
  return "?";
}

u32 bytes_of(Type t) {
  switch (t) {
    case Type::U8:
    case Type::S8:
    case Type::B8:
    case Type::E4M3:
    case Type::E5M2:
    case Type::Pred: return 1;
    case Type::U16:
    case Type::S16:
    case Type::B16:
    case Type::F16:
    case Type::BF16:
    case Type::E4M3x2:
    case Type::E5M2x2: return 2;
    case Type::U32:
    case Type::S32:
    case Type::B32:
    case Type::F32:
    case Type::F16x2:
    case Type::BF16x2:
    case Type::U16x2:
    case Type::S16x2:
    case Type::TF32: return 4;
    case Type::U64:
    case Type::S64:
    case Type::B64:
    case Type::F64:
    case Type::F32x2: return 8;
    case Type::B128: return 16;
  }
  return 0;
}

float to_float(Half h) {
  const u32 sign = static_cast<u32>(h.bits & 0x8000) << 16, magnitude = h.bits & 0x7fff;
  // Scaling by 2^112 renormalises subnormals exactly; infinities and NaNs are patched.
  float f = std::bit_cast<float>(magnitude << 13) * 0x1p112f;
  u32 u = std::bit_cast<u32>(f);
  if (magnitude >= 0x7c00) u = 0x7f800000u | (magnitude << 13 & 0x7fffffu);
  return std::bit_cast<float>(u | sign);
}

Half to_half(float f) {
  const u32 u = std::bit_cast<u32>(f), sign = u >> 16 & 0x8000, a = u & 0x7fffffffu;
  if (a > 0x7f800000u) return {0x7fff};
  if (a >= 0x47800000u) return {static_cast<u16>(sign | 0x7c00)};
  if (a < 0x38800000u) {  // subnormal result: adding 0.5 aligns the binary point, the FPU rounds
    const float shifted = std::bit_cast<float>(a) + 0.5f;
    return {static_cast<u16>(sign | (std::bit_cast<u32>(shifted) - 0x3f000000u))};
  }
  const u32 rounded = a + 0xfff + (a >> 13 & 1);
  return {static_cast<u16>(sign | ((rounded - 0x38000000u) >> 13))};
}

// Truncating to FP32 with the lost bits folded into the last one (round to odd) keeps the second rounding right.
static float to_odd_float(double d) {
  float f = static_cast<float>(d);
  if (std::isnan(d) || static_cast<double>(f) == d) return f;
  if (std::isinf(f)) return f;
  u32 u = std::bit_cast<u32>(f);
  if (std::fabs(static_cast<double>(f)) > std::fabs(d)) --u;  // undo rounding away from zero
  return std::bit_cast<float>(u | 1u);
}

Half to_half_from_double(double d) { return to_half(to_odd_float(d)); }
BFloat to_bfloat_from_double(double d) { return to_bfloat(to_odd_float(d)); }

double add_to_odd(double a, double b) {
  const double sum = a + b;
  if (!std::isfinite(sum)) return sum;
  const double virtual_b = sum - a;
  const double error = (a - (sum - virtual_b)) + (b - virtual_b);
  if (error == 0) return sum;
  u64 bits = std::bit_cast<u64>(sum);
  if (bits & 1) return sum;  // already odd: inexact sums stay as they are
  // The exact value lies on the side of `error`; step the truncated value to the odd neighbour on that side.
  const bool away = (error > 0) == (sum > 0);
  if (away) bits |= 1;
  else bits -= 1;
  return std::bit_cast<double>(bits);
}

float decode_fp8(u8 bits, bool e4m3) {
  const int mantissa = e4m3 ? 3 : 2, bias = e4m3 ? 7 : 15, e = (bits & 0x7f) >> mantissa,
            m = bits & ((1 << mantissa) - 1);
  const float sign = bits & 0x80 ? -1.f : 1.f;
  if (e4m3 && (bits & 0x7f) == 0x7f) return std::numeric_limits<float>::quiet_NaN();
  if (!e4m3 && e == 31)
    return m ? std::numeric_limits<float>::quiet_NaN() : sign * std::numeric_limits<float>::infinity();
  return sign * std::ldexp(static_cast<float>(e ? m + (1 << mantissa) : m), (e ? e : 1) - bias - mantissa);
}

}  // namespace cake::emu
