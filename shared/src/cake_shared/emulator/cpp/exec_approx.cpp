// Approximate functions, computed more accurately than the documented bounds ask for, and the IEEE forms of their kin.
#include <cmath>

#include "decode.h"
#include "machine.h"
#include "rounding.h"
#include "shared_opcodes.h"

namespace cake::emu {
namespace {

inline float canonical(float f) { return f == f ? f : std::bit_cast<float>(0x7fffffffu); }

struct Ex2 { static float apply(float x) { return exp2f(x); } };
struct Lg2 { static float apply(float x) { return log2f(x); } };
struct Rcp { static float apply(float x) { return 1.f / x; } };
struct Sqrt { static float apply(float x) { return sqrtf(x); } };
struct Rsqrt { static float apply(float x) { return static_cast<float>(1. / std::sqrt(static_cast<double>(x))); } };
struct Sin { static float apply(float x) { return sinf(x); } };
struct Cos { static float apply(float x) { return cosf(x); } };
struct Tanh { static float apply(float x) { return tanhf(x); } };

template <class F, bool kFtz>
void h_unary(Warp& w, const Ins& i) {
  map1<float, float>(w, i, [](float a) {
    const float r = canonical(F::apply(kFtz ? flush(a) : a));
    return kFtz ? flush(r) : r;
  });
}
template <class F>
Handler unary(bool ftz) {
  return ftz ? h_unary<F, true> : h_unary<F, false>;
}

void h_rcp_f64(Warp& w, const Ins& i) { map1<double, double>(w, i, [](double a) { return 1. / a; }); }
void h_sqrt_f64(Warp& w, const Ins& i) { map1<double, double>(w, i, [](double a) { return std::sqrt(a); }); }
// The coarse FP64 forms give the high word of an approximation: 20 bits of mantissa.
template <bool kRsqrt>
void h_coarse_f64(Warp& w, const Ins& i) {
  map1<double, double>(w, i, [](double a) {
    const double r = kRsqrt ? 1. / std::sqrt(a) : 1. / a;
    return std::bit_cast<double>(std::bit_cast<u64>(r) & 0xffffffff00000000ull);
  });
}

template <class T, bool kSqrt, Round kMode, bool kFtz>
void h_directed(Warp& w, const Ins& i) {
  const RoundingScope scope(kMode);
  map1<T, T>(w, i, [](T a) {
    if constexpr (kFtz) a = flush(a);
    volatile T x = a;
    volatile T r = kSqrt ? std::sqrt(static_cast<T>(x)) : T(1) / x;
    if constexpr (std::is_same_v<T, double>) {
      return static_cast<T>(r);
    } else {
      const T f = canonical(r);
      return kFtz ? flush(f) : f;
    }
  });
}
template <class T, bool kSqrt, bool kFtz>
Handler directed(int mode) {
  return mode == 1 ? h_directed<T, kSqrt, Round::Zero, kFtz>
         : mode == 2 ? h_directed<T, kSqrt, Round::Down, kFtz> : h_directed<T, kSqrt, Round::Up, kFtz>;
}

template <bool kApprox, bool kFtz>
void h_div(Warp& w, const Ins& i) {
  map2<float, float, float>(w, i, [](float a, float b) {
    if (kFtz) a = flush(a), b = flush(b);
    float r = a / b;
    // Above 2^126 the approximate reciprocal underflows to zero.
    if (kApprox && std::fabs(b) > 0x1p126f && std::isfinite(b)) r = a * std::copysign(0.f, b);
    r = canonical(r);
    return kFtz ? flush(r) : r;
  });
}

Type require_type(Decoder& d) {
  auto t = d.mods().take_type();
  if (!t) d.unsupported("no type");
  return *t;
}

template <class F, int kIndex>
void decode_function(Decoder& d, Ins& i) {
  if (!d.mods().take("approx")) d.unsupported("needs .approx");
  const bool ftz = d.mods().take("ftz");
  const Type t = require_type(d);
  if (t == Type::F32) {
    i.d = d.dest(0, 4);
    i.a = d.source(1, t);
    i.fn = unary<F>(ftz);
  } else {
    decode_half_unary_approx(d, i, t, kIndex);
  }
}

template <class F, bool kSqrt>
void decode_rcp_sqrt(Decoder& d, Ins& i) {
  const bool approx = d.mods().take("approx");
  const int round = d.mods().take_one({"rn", "rz", "rm", "rp"});
  const bool ftz = d.mods().take("ftz");
  const Type t = require_type(d);
  i.d = d.dest(0, bytes_of(t));
  i.a = d.source(1, t);
  if (t == Type::F64) {
    i.fn = approx ? (kSqrt ? nullptr : h_coarse_f64<false>) : round > 0 ? directed<double, kSqrt, false>(round) : kSqrt ? h_sqrt_f64 : h_rcp_f64;
  } else if (t == Type::F32) {
    i.fn = round <= 0 ? unary<F>(ftz) : ftz ? directed<float, kSqrt, true>(round) : directed<float, kSqrt, false>(round);
  }
}

}  // namespace

void decode_approx_div(Decoder& d, Ins& i, Type t) {
  const bool approx = d.mods().take("approx");
  d.mods().take("full");
  const bool ftz = d.mods().take("ftz");
  if (t != Type::F32) d.unsupported("this type");
  i.d = d.dest(0, 4);
  i.a = d.source(1, t);
  i.b = d.source(2, t);
  i.fn = approx ? (ftz ? h_div<true, true> : h_div<true, false>) : (ftz ? h_div<false, true> : h_div<false, false>);
}

void register_approx(DecoderTable& table) {
  table.add("ex2", decode_function<Ex2, 0>);
  table.add("tanh", decode_function<Tanh, 1>);
  table.add("lg2", decode_function<Lg2, 2>);
  table.add("sin", decode_function<Sin, 3>);
  table.add("cos", decode_function<Cos, 4>);
  table.add("rcp", decode_rcp_sqrt<Rcp, false>);
  table.add("sqrt", decode_rcp_sqrt<Sqrt, true>);
  table.add("rsqrt", [](Decoder& d, Ins& i) {
    d.mods().take("approx");
    const bool ftz = d.mods().take("ftz");
    const Type t = require_type(d);
    i.d = d.dest(0, bytes_of(t));
    i.a = d.source(1, t);
    i.fn = t == Type::F32 ? unary<Rsqrt>(ftz) : t == Type::F64 ? h_coarse_f64<true> : nullptr;
  });
}

}  // namespace cake::emu
