// FP32 and FP64 arithmetic, and the opcodes that integers and floats share.
#include <cmath>
#include <limits>

#include "decode.h"
#include "machine.h"
#include "rounding.h"
#include "shared_opcodes.h"

namespace cake::emu {
namespace {

// The hardware's FP32 instructions give this NaN, whatever went in.
constexpr u32 kNan = 0x7fffffffu;
inline float canonical(float f) { return f == f ? f : std::bit_cast<float>(kNan); }
inline double canonical(double f) { return f; }
inline float clamp01(float f) { return f > 0.f ? (f < 1.f ? f : 1.f) : 0.f; }
inline double clamp01(double f) { return f > 0. ? (f < 1. ? f : 1.) : 0.; }
inline double flush(double f) { return f; }
using cake::emu::flush;

template <bool kFtz, class T>
inline T in(T f) {
  return kFtz ? flush(f) : f;
}
template <bool kFtz, bool kSat, class T>
inline T out(T f) {
  f = canonical(f);
  if (kFtz) f = flush(f);
  return kSat ? clamp01(f) : f;
}

struct AddOp { template <class T> static T apply(T a, T b) { return a + b; } };
struct SubOp { template <class T> static T apply(T a, T b) { return a - b; } };
struct MulOp { template <class T> static T apply(T a, T b) { return a * b; } };
struct DivOp { template <class T> static T apply(T a, T b) { return a / b; } };

template <class T, class Op, bool kFtz, bool kSat>
void h_binary(Warp& w, const Ins& i) {
  map2<T, T, T>(w, i, [](T a, T b) { return out<kFtz, kSat>(Op::apply(in<kFtz>(a), in<kFtz>(b))); });
}
template <class T, bool kFtz, bool kSat>
void h_fma(Warp& w, const Ins& i) {
  map3<T, T, T, T>(w, i, [](T a, T b, T c) { return out<kFtz, kSat>(std::fma(in<kFtz>(a), in<kFtz>(b), in<kFtz>(c))); });
}

template <class T, class Op, Round kMode, bool kFtz, bool kSat>
void h_directed(Warp& w, const Ins& i) {
  auto *d = w.slot<T>(i.d), *a = w.slot<T>(i.a), *b = w.slot<T>(i.b);
  const RoundingScope scope(kMode);
  each_lane(w.mask, [&](int l) {
    volatile T x = in<kFtz>(get<T>(a, l)), y = in<kFtz>(get<T>(b, l));
    volatile T r = Op::template apply<T>(x, y);
    put<T>(d, l, out<kFtz, kSat>(static_cast<T>(r)));
  });
}
template <class T, Round kMode, bool kFtz, bool kSat>
void h_directed_fma(Warp& w, const Ins& i) {
  auto *d = w.slot<T>(i.d), *a = w.slot<T>(i.a), *b = w.slot<T>(i.b), *c = w.slot<T>(i.c);
  const RoundingScope scope(kMode);
  each_lane(w.mask, [&](int l) {
    volatile T x = in<kFtz>(get<T>(a, l)), y = in<kFtz>(get<T>(b, l)), z = in<kFtz>(get<T>(c, l));
    volatile T r = std::fma(static_cast<T>(x), static_cast<T>(y), static_cast<T>(z));
    put<T>(d, l, out<kFtz, kSat>(static_cast<T>(r)));
  });
}

template <class T, bool kMax, bool kNanWins, bool kFtz>
T min_max(T a, T b) {
  a = in<kFtz>(a), b = in<kFtz>(b);
  if (a != a || b != b) {
    if (kNanWins || (a != a && b != b)) return canonical(std::numeric_limits<T>::quiet_NaN());
    return a != a ? b : a;
  }
  if (a == b) return std::signbit(a) == kMax ? b : a;  // -0 is below +0
  return (a < b) == kMax ? b : a;
}
template <class T, bool kMax, bool kNanWins, bool kFtz>
void h_min_max(Warp& w, const Ins& i) {
  map2<T, T, T>(w, i, [](T a, T b) { return min_max<T, kMax, kNanWins, kFtz>(a, b); });
}
template <class T, bool kMax, bool kNanWins, bool kFtz>
void h_min_max3(Warp& w, const Ins& i) {
  map3<T, T, T, T>(w, i, [](T a, T b, T c) {
    return min_max<T, kMax, kNanWins, kFtz>(min_max<T, kMax, kNanWins, kFtz>(a, b), c);
  });
}
template <bool kMax, bool kNanWins, bool kFtz>
void h_min_max_xorsign(Warp& w, const Ins& i) {
  map2<float, float, float>(w, i, [](float a, float b) {
    const float m = min_max<float, kMax, kNanWins, kFtz>(std::fabs(a), std::fabs(b));
    if (m != m) return m;
    const u32 sign = (std::bit_cast<u32>(a) ^ std::bit_cast<u32>(b)) & 0x80000000u;
    return std::bit_cast<float>((std::bit_cast<u32>(m) & 0x7fffffffu) | sign);
  });
}

template <class T, bool kFtz> void h_abs(Warp& w, const Ins& i) { map1<T, T>(w, i, [](T a) { return std::fabs(in<kFtz>(a)); }); }
template <class T, bool kFtz> void h_neg(Warp& w, const Ins& i) { map1<T, T>(w, i, [](T a) { return -in<kFtz>(a); }); }

void h_copysign_f32(Warp& w, const Ins& i) {
  map2<u32, u32, u32>(w, i, [](u32 a, u32 b) { return (a & 0x80000000u) | (b & 0x7fffffffu); });
}
void h_copysign_f64(Warp& w, const Ins& i) {
  map2<u64, u64, u64>(w, i, [](u64 a, u64 b) { return (a & 1ull << 63) | (b & ~(1ull << 63)); });
}
// testp: number, notanumber, finite, infinite, normal, subnormal
template <class T>
void h_testp(Warp& w, const Ins& i) {
  auto* a = w.slot<T>(i.a);
  u32 r = 0;
  each_lane(w.mask, [&](int l) {
    const int c = std::fpclassify(get<T>(a, l));
    const bool t = i.flags == 0 ? c != FP_NAN : i.flags == 1 ? c == FP_NAN : i.flags == 2 ? c != FP_NAN && c != FP_INFINITE
                   : i.flags == 3 ? c == FP_INFINITE : i.flags == 4 ? c == FP_NORMAL || c == FP_ZERO : c == FP_SUBNORMAL;
    r |= u32(t) << l;
  });
  w.set_predicate(i.d, r);
}

void operands(Decoder& d, Ins& i, Type t) {
  i.d = d.dest(0, bytes_of(t));
  i.a = d.source(1, t);
  if (d.count() > 2) i.b = d.source(2, t);
  if (d.count() > 3) i.c = d.source(3, t);
}

struct FloatMods {
  int round;  // -1 none, else Round
  bool ftz, sat;
};
FloatMods float_mods(Decoder& d) {
  FloatMods m;
  m.round = d.mods().take_one({"rn", "rz", "rm", "rp"});
  m.ftz = d.mods().take("ftz");
  m.sat = d.mods().take("sat");
  return m;
}

// Calls `choose` with the flags as compile-time constants.
template <class F>
Handler with_flags(bool ftz, bool sat, F choose) {
  if (ftz) return sat ? choose.template operator()<true, true>() : choose.template operator()<true, false>();
  return sat ? choose.template operator()<false, true>() : choose.template operator()<false, false>();
}

template <class T, class Op, bool kFtz, bool kSat>
Handler binary_of(int round) {
  switch (round) {
    case 1: return h_directed<T, Op, Round::Zero, kFtz, kSat>;
    case 2: return h_directed<T, Op, Round::Down, kFtz, kSat>;
    case 3: return h_directed<T, Op, Round::Up, kFtz, kSat>;
    default: return h_binary<T, Op, kFtz, kSat>;
  }
}
template <class Op>
Handler binary(Type t, const FloatMods& m) {
  if (t == Type::F64) return binary_of<double, Op, false, false>(m.round);
  if (t != Type::F32) return nullptr;
  return with_flags(m.ftz, m.sat, [&]<bool kFtz, bool kSat>() -> Handler { return binary_of<float, Op, kFtz, kSat>(m.round); });
}

template <class T, bool kFtz, bool kSat>
Handler fma_of(int round) {
  switch (round) {
    case 1: return h_directed_fma<T, Round::Zero, kFtz, kSat>;
    case 2: return h_directed_fma<T, Round::Down, kFtz, kSat>;
    case 3: return h_directed_fma<T, Round::Up, kFtz, kSat>;
    default: return h_fma<T, kFtz, kSat>;
  }
}
Handler fma_handler(Type t, const FloatMods& m) {
  if (t == Type::F64) return fma_of<double, false, false>(m.round);
  if (t != Type::F32) return nullptr;
  return with_flags(m.ftz, m.sat, [&]<bool kFtz, bool kSat>() -> Handler { return fma_of<float, kFtz, kSat>(m.round); });
}

bool is_half(Type t) { return t == Type::F16 || t == Type::F16x2 || t == Type::BF16 || t == Type::BF16x2; }

Type require_type(Decoder& d) {
  auto t = d.mods().take_type();
  if (!t) d.unsupported("no type");
  return *t;
}

template <class Op>
void decode_add_sub(Decoder& d, Ins& i, bool subtract) {
  if (!subtract && decode_packed16(d, i, 0)) return;
  const Type t = require_type(d);
  if (d.mods().take("cc")) {
    d.mods().give_back_type(t);
    decode_carry_start(d, i, subtract);
  } else if (is_half(t)) {
    decode_half_binary(d, i, t, subtract ? HalfOp::Sub : HalfOp::Add);
  } else if (t == Type::F32x2) {
    decode_f32x2(d, i, subtract ? HalfOp::Sub : HalfOp::Add);
  } else if (is_float(t)) {
    const FloatMods m = float_mods(d);
    operands(d, i, t);
    i.fn = binary<Op>(t, m);
  } else {
    decode_integer_add(d, i, subtract, t);
  }
}

template <bool kMax>
void decode_min_max(Decoder& d, Ins& i) {
  if (decode_packed16(d, i, kMax ? 2 : 1)) return;
  const Type t = require_type(d);
  if (!is_float(t)) return decode_integer_min_max(d, i, kMax, t);
  if (is_half(t)) return decode_half_binary(d, i, t, kMax ? HalfOp::Max : HalfOp::Min);
  const bool ftz = d.mods().take("ftz"), nan = d.mods().take("NaN");
  operands(d, i, t);
  if (d.mods().starts({"xorsign", "abs"})) {
    if (t != Type::F32 || d.count() == 4) d.unsupported("this form of .xorsign.abs");
    i.fn = with_flags(ftz, nan, [&]<bool kFtz, bool kNan>() -> Handler { return h_min_max_xorsign<kMax, kNan, kFtz>; });
    return;
  }
  const bool three = d.count() == 4;
  if (t == Type::F64) {
    i.fn = h_min_max<double, kMax, false, false>;
    return;
  }
  i.fn = with_flags(ftz, nan, [&]<bool kFtz, bool kNan>() -> Handler {
    return three ? h_min_max3<float, kMax, kNan, kFtz> : h_min_max<float, kMax, kNan, kFtz>;
  });
}

template <bool kNegate>
void decode_abs_neg(Decoder& d, Ins& i) {
  const Type t = require_type(d);
  if (!is_float(t)) return decode_integer_unary(d, i, kNegate, t);
  if (is_half(t)) return decode_half_binary(d, i, t, kNegate ? HalfOp::Neg : HalfOp::Abs);
  const bool ftz = d.mods().take("ftz");
  operands(d, i, t);
  if (t == Type::F64) {
    i.fn = kNegate ? h_neg<double, false> : h_abs<double, false>;
  } else if (kNegate) {
    i.fn = ftz ? h_neg<float, true> : h_neg<float, false>;
  } else {
    i.fn = ftz ? h_abs<float, true> : h_abs<float, false>;
  }
}

}  // namespace

void register_float(DecoderTable& table) {
  table.add("add", [](Decoder& d, Ins& i) { decode_add_sub<AddOp>(d, i, false); });
  table.add("sub", [](Decoder& d, Ins& i) { decode_add_sub<SubOp>(d, i, true); });
  table.add("mul", [](Decoder& d, Ins& i) {
    const Type t = require_type(d);
    if (is_half(t)) return decode_half_binary(d, i, t, HalfOp::Mul);
    if (t == Type::F32x2) return decode_f32x2(d, i, HalfOp::Mul);
    if (!is_float(t)) return decode_integer_mul(d, i, t);
    const FloatMods m = float_mods(d);
    operands(d, i, t);
    i.fn = binary<MulOp>(t, m);
  });
  auto fma = [](Decoder& d, Ins& i) {
    const Type t = require_type(d);
    if (is_half(t)) return decode_half_fma(d, i, t);
    if (t == Type::F32x2) return decode_f32x2(d, i, HalfOp::Fma);
    if (!is_float(t)) return decode_integer_mad(d, i, false, t);
    const FloatMods m = float_mods(d);
    operands(d, i, t);
    i.fn = fma_handler(t, m);
  };
  table.add("fma", fma);
  table.add("mad", fma);
  table.add("div", [](Decoder& d, Ins& i) {
    const Type t = require_type(d);
    if (!is_float(t)) return decode_integer_div(d, i, t);
    if (d.mods().has("approx") || d.mods().has("full")) return decode_approx_div(d, i, t);
    const FloatMods m = float_mods(d);
    operands(d, i, t);
    i.fn = binary<DivOp>(t, m);
  });
  table.add("min", decode_min_max<false>);
  table.add("max", decode_min_max<true>);
  table.add("abs", decode_abs_neg<false>);
  table.add("neg", decode_abs_neg<true>);
  table.add("copysign", [](Decoder& d, Ins& i) {
    const Type t = require_type(d);
    operands(d, i, t);
    i.fn = t == Type::F32 ? h_copysign_f32 : t == Type::F64 ? h_copysign_f64 : nullptr;
  });
  table.add("testp", [](Decoder& d, Ins& i) {
    const int kind = d.mods().take_one({"number", "notanumber", "finite", "infinite", "normal", "subnormal"});
    const Type t = require_type(d);
    i.flags = static_cast<u32>(kind);
    i.d = d.predicate_dest(d.op(0));
    i.a = d.source(1, t);
    i.fn = kind < 0 ? nullptr : t == Type::F32 ? h_testp<float> : t == Type::F64 ? h_testp<double> : nullptr;
  });
}

}  // namespace cake::emu
