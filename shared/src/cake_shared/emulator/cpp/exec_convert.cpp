// cvt: between integers, floats and packed floats, with every rounding mode.
#include <cmath>
#include <limits>

#include "decode.h"
#include "machine.h"

namespace cake::emu {
namespace {

enum class Round : u8 { Nearest, Zero, Down, Up, NearestAway };

// Formats as (precision, smallest normal exponent, largest finite value).
struct Format {
  int precision, min_exponent;
  double largest;
  bool has_infinity;
};
constexpr Format kF32{24, -126, 0x1.fffffep127, true}, kF16{11, -14, 65504, true}, kBF16{8, -126, 0x1.fep127, true},
    kTF32{11, -126, 0x1.ffcp127, true}, kE4M3{4, -6, 448, false}, kE5M2{3, -14, 57344, true};

long double round_integer(long double q, Round mode) {
  switch (mode) {
    case Round::Nearest: return nearbyintl(q);
    case Round::Zero: return truncl(q);
    case Round::Down: return floorl(q);
    case Round::Up: return ceill(q);
    case Round::NearestAway: return roundl(q);
  }
  return q;
}

// The value of the format nearest to x in the given direction; `finite` clamps overflow to the largest value.
double round_to(long double x, const Format& f, Round mode, bool finite) {
  if (x == 0 || x != x) return static_cast<double>(x);
  if (std::isinf(x)) return finite ? std::copysign(f.largest, static_cast<double>(x)) : static_cast<double>(x);
  const int exponent = std::max(std::ilogb(x), f.min_exponent) - (f.precision - 1);
  const long double r = ldexpl(round_integer(ldexpl(x, -exponent), mode), exponent);
  if (fabsl(r) <= f.largest) return static_cast<double>(r == 0 ? copysignl(0, x) : r);
  const bool toward = mode == Round::Zero || (mode == Round::Down && x > 0) || (mode == Round::Up && x < 0);
  if (finite || toward) return std::copysign(f.largest, static_cast<double>(x));
  return std::copysign(std::numeric_limits<double>::infinity(), static_cast<double>(x));
}

u8 encode_fp8(double v, bool e4m3) {
  const u8 sign = std::signbit(v) ? 0x80 : 0;
  const double a = std::fabs(v);
  if (v != v) return 0x7f;
  const int mantissa = e4m3 ? 3 : 2, bias = e4m3 ? 7 : 15;
  if (std::isinf(a)) return sign | (e4m3 ? 0x7f : 0x7c);
  if (a == 0) return sign;
  const int e = std::max(std::ilogb(a), 1 - bias);
  const int q = static_cast<int>(std::ldexp(a, mantissa - e));  // exact: a has been rounded to the format
  return sign | static_cast<u8>(((e + bias - 1) << mantissa) + q);
}
struct Conversion {
  Type to, from;
  Round round;
  bool integer_round, ftz, sat, satfinite, relu;
};
// Conversions that are not on a fast path carry their description in Ins::flags.
u32 pack(const Conversion& c) {
  return u32(c.to) | u32(c.from) << 6 | u32(c.round) << 12 | u32(c.integer_round) << 15 | u32(c.ftz) << 16 | u32(c.sat) << 17 |
         u32(c.satfinite) << 18 | u32(c.relu) << 19;
}
Conversion unpack(u32 f) {
  return {Type(f & 63), Type(f >> 6 & 63), Round(f >> 12 & 7), bool(f >> 15 & 1), bool(f >> 16 & 1), bool(f >> 17 & 1),
          bool(f >> 18 & 1), bool(f >> 19 & 1)};
}

const Format& format_of(Type t) {
  switch (t) {
    case Type::F16: case Type::F16x2: return kF16;
    case Type::BF16: case Type::BF16x2: return kBF16;
    case Type::TF32: return kTF32;
    case Type::E4M3x2: return kE4M3;
    case Type::E5M2x2: return kE5M2;
    default: return kF32;
  }
}

long double load(Type t, u64 bits) {
  switch (t) {
    case Type::U8: return u8(bits);
    case Type::U16: return u16(bits);
    case Type::U32: return u32(bits);
    case Type::U64: return bits;
    case Type::S8: return i8(bits);
    case Type::S16: return i16(bits);
    case Type::S32: return i32(bits);
    case Type::S64: return i64(bits);
    case Type::F16: return to_float(Half{u16(bits)});
    case Type::BF16: return to_float(BFloat{u16(bits)});
    case Type::F32: return std::bit_cast<float>(u32(bits));
    default: return std::bit_cast<double>(bits);
  }
}

// One element of a narrow float format, as bits.
u32 narrow(long double x, const Conversion& c) {
  const Format& f = format_of(c.to);
  if (x != x) {
    if (c.sat) return 0;
    if (c.to == Type::TF32 || c.to == Type::F32) return 0x7fffffffu;
    return c.to == Type::E4M3x2 || c.to == Type::E5M2x2 ? 0x7f : 0x7fff;
  }
  double r = round_to(x, f, c.round, c.satfinite || !f.has_infinity || c.to == Type::E5M2x2);
  if (c.relu && r < 0) r = 0;
  if (c.relu && r == 0) r = 0.0;
  if (c.sat) r = r > 0 ? std::min(r, 1.0) : 0.0;
  switch (c.to) {
    case Type::F16: case Type::F16x2: return to_half(static_cast<float>(r)).bits;
    case Type::BF16: case Type::BF16x2: return to_bfloat(static_cast<float>(r)).bits;
    case Type::E4M3x2: return encode_fp8(r, true);
    case Type::E5M2x2: return encode_fp8(r, false);
    default: {
      const float out = static_cast<float>(r);
      return std::bit_cast<u32>(c.ftz ? flush(out) : out);
    }
  }
}

template <class T>
u64 to_integer(long double x, bool nan, bool wide) {
  if (nan) return wide ? u64(T(1)) << (sizeof(T) * 8 - 1) : 0;
  if (x <= static_cast<long double>(std::numeric_limits<T>::min())) return static_cast<u64>(static_cast<i64>(std::numeric_limits<T>::min()));
  if (x >= static_cast<long double>(std::numeric_limits<T>::max())) return static_cast<u64>(std::numeric_limits<T>::max());
  return std::is_signed_v<T> ? static_cast<u64>(static_cast<i64>(x)) : static_cast<u64>(x);
}

u64 convert(u64 bits, const Conversion& c) {
  long double x = load(c.from, bits);
  if (c.ftz && c.from == Type::F32) x = flush(std::bit_cast<float>(u32(bits)));
  if (!is_float(c.to)) {
    // To an integer: floats round and saturate, integers wrap unless .sat.
    if (!is_float(c.from) && !c.sat) return bits;
    const bool nan = x != x;
    const bool wide = c.from == Type::F64 || bytes_of(c.to) == 8;
    if (is_float(c.from) && !nan) x = round_integer(x, c.round);
    switch (c.to) {
      case Type::U8: return to_integer<u8>(x, nan, wide);
      case Type::U16: return to_integer<u16>(x, nan, wide);
      case Type::U32: return to_integer<u32>(x, nan, wide);
      case Type::U64: return to_integer<u64>(x, nan, wide);
      case Type::S8: return to_integer<i8>(x, nan, wide);
      case Type::S16: return to_integer<i16>(x, nan, wide);
      case Type::S32: return to_integer<i32>(x, nan, wide);
      default: return to_integer<i64>(x, nan, wide);
    }
  }
  if (c.integer_round && x == x && !std::isinf(x)) x = copysignl(round_integer(x, c.round), x);
  if (c.to != Type::F64) return narrow(x, c);
  double r = static_cast<double>(x);
  if (x == x && std::isfinite(r) && !is_float(c.from) && c.round != Round::Nearest) {
    r = static_cast<double>(round_to(x, Format{53, -1022, std::numeric_limits<double>::max(), true}, c.round, false));
  }
  if (c.sat) r = r > 0 ? std::min(r, 1.0) : 0.0;
  return std::bit_cast<u64>(r);
}

void h_generic(Warp& w, const Ins& i) {
  const Conversion c = unpack(i.flags);
  const bool wide_in = bytes_of(c.from) == 8, wide_out = bytes_of(c.to) == 8;
  each_lane(w.mask, [&](int l) {
    const u64 r = convert(wide_in ? w.lane64(i.a, l) : w.lane32(i.a, l), c);
    if (wide_out) w.set64(i.d, l, r); else w.set32(i.d, l, static_cast<u32>(r));
  });
}

// d = {a, b} with a in the upper half
void h_pair(Warp& w, const Ins& i) {
  const Conversion c = unpack(i.flags);
  const int bits = static_cast<int>(bytes_of(c.to)) * 4;
  each_lane(w.mask, [&](int l) {
    auto value = [&](u32 slot) -> long double {
      const float f = std::bit_cast<float>(w.lane32(slot, l));
      return c.ftz ? flush(f) : f;
    };
    w.set32(i.d, l, narrow(value(i.a), c) << bits | narrow(value(i.b), c));
  });
}
void h_pair_bf16(Warp& w, const Ins& i) {
  auto *d = w.slot<u32>(i.d), *a = w.slot<u32>(i.a), *b = w.slot<u32>(i.b);
  for_lanes(w.mask, [&](int l) {
    auto round = [](u32 u) { return (u & 0x7fffffffu) > 0x7f800000u ? 0x7fff0000u : u + 0x7fff + (u >> 16 & 1); };
    d[l] = (round(a[l]) & 0xffff0000u) | round(b[l]) >> 16;
  });
}
// Packed eight-bit floats: from and to pairs of FP16.
void h_fp8_from_half2(Warp& w, const Ins& i) {
  const Conversion c = unpack(i.flags);
  each_lane(w.mask, [&](int l) {
    const u32 v = w.lane32(i.a, l);
    w.set32(i.d, l, narrow(to_float(Half{u16(v >> 16)}), c) << 8 | narrow(to_float(Half{u16(v)}), c));
  });
}
void h_half2_from_fp8(Warp& w, const Ins& i) {
  const Conversion c = unpack(i.flags);
  const bool e4m3 = c.from == Type::E4M3x2;
  each_lane(w.mask, [&](int l) {
    const u32 v = w.lane32(i.a, l);
    auto half = [&](u8 b) { float f = decode_fp8(b, e4m3); return u32(to_half(c.relu && f <= 0 ? 0.f : f).bits); };
    w.set32(i.d, l, half(u8(v >> 8)) << 16 | half(u8(v)));
  });
}

template <class D, class S>
void h_integer(Warp& w, const Ins& i) {
  // A narrow signed result fills its register with the sign.
  using Store = std::conditional_t<(sizeof(D) < 4), std::conditional_t<std::is_signed_v<D>, i32, u32>, D>;
  map1<Store, S>(w, i, [](S a) { return static_cast<Store>(static_cast<D>(a)); });
}
template <class S>
Handler integer_to(Type t) {
  switch (t) {
    case Type::U8: return h_integer<u8, S>;
    case Type::U16: return h_integer<u16, S>;
    case Type::U32: return h_integer<u32, S>;
    case Type::U64: return h_integer<u64, S>;
    case Type::S8: return h_integer<i8, S>;
    case Type::S16: return h_integer<i16, S>;
    case Type::S32: return h_integer<i32, S>;
    case Type::S64: return h_integer<i64, S>;
    default: return nullptr;
  }
}
Handler integer_handler(Type to, Type from) {
  switch (from) {
    case Type::U8: return integer_to<u8>(to);
    case Type::U16: return integer_to<u16>(to);
    case Type::U32: return integer_to<u32>(to);
    case Type::U64: return integer_to<u64>(to);
    case Type::S8: return integer_to<i8>(to);
    case Type::S16: return integer_to<i16>(to);
    case Type::S32: return integer_to<i32>(to);
    case Type::S64: return integer_to<i64>(to);
    default: return nullptr;
  }
}

template <class D, class S> void h_plain(Warp& w, const Ins& i) { map1<D, S>(w, i, [](S a) { return static_cast<D>(a); }); }
template <class H> void h_half_to_float(Warp& w, const Ins& i) { map1<float, H>(w, i, [](H a) { return to_float(a); }); }
void h_float_to_half(Warp& w, const Ins& i) { map1<Half, float>(w, i, [](float a) { return to_half(a); }); }
void h_float_to_bfloat(Warp& w, const Ins& i) { map1<BFloat, float>(w, i, [](float a) { return to_bfloat(a); }); }

Handler fast_path(const Conversion& c) {
  if (c.ftz || c.sat || c.satfinite || c.relu || c.integer_round) return nullptr;
  if (!is_float(c.to) && !is_float(c.from)) return integer_handler(c.to, c.from);
  if (c.to == Type::F32 && c.from == Type::F16) return h_half_to_float<Half>;
  if (c.to == Type::F32 && c.from == Type::BF16) return h_half_to_float<BFloat>;
  if (c.to == Type::F64 && c.from == Type::F32) return h_plain<double, float>;
  if (c.round != Round::Nearest) return nullptr;
  if (c.to == Type::F16 && c.from == Type::F32) return h_float_to_half;
  if (c.to == Type::BF16 && c.from == Type::F32) return h_float_to_bfloat;
  if (c.to == Type::F32 && c.from == Type::F64) return h_plain<float, double>;
  if (c.to == Type::F32 && c.from == Type::S32) return h_plain<float, i32>;
  if (c.to == Type::F32 && c.from == Type::U32) return h_plain<float, u32>;
  if (c.to == Type::F64 && c.from == Type::S32) return h_plain<double, i32>;
  if (c.to == Type::F64 && c.from == Type::U32) return h_plain<double, u32>;
  return nullptr;
}

void decode_pack(Decoder& d, Ins& i);

void decode_cvt(Decoder& d, Ins& i) {
  Modifiers& m = d.mods();
  if (m.take("pack")) return decode_pack(d, i);
  Conversion c{};
  const int rounding = m.take_one({"rn", "rz", "rm", "rp", "rna", "rni", "rzi", "rmi", "rpi"});
  c.ftz = m.take("ftz");
  c.sat = m.take("sat");
  c.relu = m.take("relu");
  c.satfinite = m.take("satfinite");
  const auto to = m.take_type(), from = m.take_type();
  if (!to || !from) d.unsupported("types");
  c.to = *to, c.from = *from;
  c.integer_round = rounding >= 5;
  constexpr Round kModes[] = {Round::Nearest, Round::Zero, Round::Down, Round::Up, Round::NearestAway,
                              Round::Nearest, Round::Zero, Round::Down, Round::Up};
  c.round = rounding < 0 ? Round::Nearest : kModes[rounding];
  if (c.to == Type::B8 || c.from == Type::B8 || is_bits(c.to) || is_bits(c.from)) d.unsupported("bit types");
  if (is_float(c.from) && !is_float(c.to) && rounding < 0) d.unsupported("no rounding mode");
  const bool packed_to = c.to == Type::F16x2 || c.to == Type::BF16x2 || c.to == Type::E4M3x2 || c.to == Type::E5M2x2;
  if (packed_to && c.from == Type::F32) {
    i.d = d.dest(0, bytes_of(c.to));
    i.a = d.source(1, Type::F32);
    i.b = d.source(2, Type::F32);
    i.flags = pack(c);
    const bool plain = c.to == Type::BF16x2 && c.round == Round::Nearest && !c.relu && !c.satfinite;
    i.fn = plain ? h_pair_bf16 : h_pair;
    return;
  }
  i.d = d.dest(0, bytes_of(c.to), is_signed(c.to));
  i.a = d.source(1, c.from);
  i.flags = pack(c);
  if ((c.to == Type::E4M3x2 || c.to == Type::E5M2x2) && c.from == Type::F16x2) {
    i.fn = h_fp8_from_half2;
  } else if (c.to == Type::F16x2 && (c.from == Type::E4M3x2 || c.from == Type::E5M2x2)) {
    i.fn = h_half2_from_fp8;
  } else if (packed_to || c.from == Type::F16x2 || c.from == Type::BF16x2 || c.from == Type::TF32) {
    d.unsupported("these types");
  } else {
    i.fn = fast_path(c);
    if (!i.fn) i.fn = h_generic;
  }
}

// cvt.pack.sat.convertType.abType d, a, b [, c]: saturated a and b side by side below the older content of c.
void h_pack_saturated(Warp& w, const Ins& i) {
  const u32 bits = i.width;
  const bool to_signed = i.flags & 1, from_signed = i.flags & 2, shifts = i.flags & 4;
  each_lane(w.mask, [&](int l) {
    auto part = [&](u32 slot) {
      const u32 raw = w.lane32(slot, l);
      const i64 v = from_signed ? i64(i32(raw)) : i64(raw);
      const i64 low = to_signed ? -(1ll << (bits - 1)) : 0, high = to_signed ? (1ll << (bits - 1)) - 1 : (1ll << bits) - 1;
      return u32(std::min(std::max(v, low), high)) & u32((1ull << bits) - 1);
    };
    u32 r = part(i.a) << bits | part(i.b);
    if (shifts) r |= w.lane32(i.c, l) << 2 * bits;
    w.set32(i.d, l, r);
  });
}

void decode_pack(Decoder& d, Ins& i) {
  Modifiers& m = d.mods();
  if (!m.take("sat")) d.unsupported("needs .sat");
  const int to = m.take_one({"u16", "s16", "u8", "s8", "u4", "s4", "u2", "s2"});
  const int from = m.take_one({"s32", "u32"});
  if (m.take("b32")) i.flags |= 4;
  if (to < 0 || from < 0) d.unsupported("these types");
  constexpr u8 kBits[] = {16, 16, 8, 8, 4, 4, 2, 2};
  i.width = kBits[to];
  i.flags |= (to & 1) | (from == 0 ? 2 : 0);
  i.d = d.dest(0, 4);
  i.a = d.source(1, 4u);
  i.b = d.source(2, 4u);
  if (i.flags & 4) i.c = d.source(3, 4u);
  i.fn = h_pack_saturated;
}

}  // namespace

void register_convert(DecoderTable& table) { table.add("cvt", decode_cvt); }

}  // namespace cake::emu
