// PTX's fundamental types and the lane types that handlers compute in.
#pragma once
#include <optional>
#include <string>

#include "core.h"

namespace cake::emu {

enum class Type : u8 {
  U8,
  U16,
  U32,
  U64,
  S8,
  S16,
  S32,
  S64,
  B8,
  B16,
  B32,
  B64,
  B128,
  F16,
  F16x2,
  BF16,
  BF16x2,
  F32,
  F64,
  F32x2,
  TF32,
  E4M3,
  E5M2,
  E4M3x2,
  E5M2x2,
  U16x2,
  S16x2,
  Pred
};

std::optional<Type> parse_type(const std::string& name);
const char* type_name(Type t);
u32 bytes_of(Type t);
inline bool is_signed(Type t) { return t >= Type::S8 && t <= Type::S64; }
inline bool is_float(Type t) { return t >= Type::F16 && t <= Type::E5M2x2; }
inline bool is_integer_pair(Type t) { return t == Type::U16x2 || t == Type::S16x2; }
inline bool is_integer(Type t) { return t < Type::B8; }
inline bool is_bits(Type t) { return t >= Type::B8 && t <= Type::B128; }

// 16-bit floats as lanes hold them.
struct Half {
  u16 bits;
};
struct BFloat {
  u16 bits;
};

float to_float(Half h);
Half to_half(float f);               // round to nearest even
Half to_half_from_double(double d);  // one rounding
inline float to_float(BFloat b) { return std::bit_cast<float>(static_cast<u32>(b.bits) << 16); }
inline BFloat to_bfloat(float f) {
  const u32 u = std::bit_cast<u32>(f);
  if ((u & 0x7fffffffu) > 0x7f800000u) return {0x7fff};
  return {static_cast<u16>((u + 0x7fff + (u >> 16 & 1)) >> 16)};
}
BFloat to_bfloat_from_double(double d);

float decode_fp8(u8 bits, bool e4m3);

inline float flush(float f) {  // .ftz: subnormals become zero of the same sign
  const u32 u = std::bit_cast<u32>(f);
  return (u & 0x7f800000u) ? f : std::bit_cast<float>(u & 0x80000000u);
}

// A sum rounded to odd: rounding it again to a narrower format gives the correctly rounded sum.
double add_to_odd(double a, double b);

}  // namespace cake::emu
