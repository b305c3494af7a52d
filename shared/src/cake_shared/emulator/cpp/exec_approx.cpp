// Approximate functions, computed more accurately than the documented bounds ask for, and the IEEE forms of their kin.
#include <cmath>
#include <limits>

#include "decode.h"
#include "machine.h"
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

// 1/x or sqrt(x) in FP64 with what is left of the dividend or the radicand, which tells the side of the exact value.
template <bool kSqrt>
double with_rest(double x, double& rest) {
  const double r = kSqrt ? std::sqrt(x) : 1. / x;
  rest = 0;
  if (std::isfinite(r) && std::isfinite(x)) rest = kSqrt ? std::fma(-r, r, x) : std::fma(-r, x, 1.) * (x < 0 ? -1 : 1);
  return r;
}

template <bool kSqrt, int kMode, bool kFtz>  // mode 1 zero, 2 down, 3 up
void h_directed(Warp& w, const Ins& i) {
  map1<float, float>(w, i, [](float a) {
    double rest;
    double r = with_rest<kSqrt>(kFtz ? flush(a) : a, rest);
    if (rest != 0 && static_cast<double>(static_cast<float>(r)) == r) r = std::nextafter(r, rest > 0 ? INFINITY : -INFINITY);
    const float f = canonical(round_directed(r, kMode));
    return kFtz ? flush(f) : f;
  });
}
template <bool kSqrt, int kMode>
void h_directed_f64(Warp& w, const Ins& i) {
  map1<double, double>(w, i, [](double x) {
    double rest;
    const double r = with_rest<kSqrt>(x, rest);
    if (std::isinf(r) && x != 0 && std::isfinite(x)) {  // 1/x overflows
      const bool inward = kMode == 1 || (kMode == 2 && x > 0) || (kMode == 3 && x < 0);
      return inward ? std::copysign(std::numeric_limits<double>::max(), x) : r;
    }
    return step_directed(r, rest, kMode);
  });
}
template <bool kSqrt>
Handler directed_f64(int mode) {
  return mode == 1 ? h_directed_f64<kSqrt, 1> : mode == 2 ? h_directed_f64<kSqrt, 2> : h_directed_f64<kSqrt, 3>;
}
template <bool kSqrt>
Handler directed(int mode, bool ftz) {
  switch (mode) {
    case 1: return ftz ? h_directed<kSqrt, 1, true> : h_directed<kSqrt, 1, false>;
    case 2: return ftz ? h_directed<kSqrt, 2, true> : h_directed<kSqrt, 2, false>;
    default: return ftz ? h_directed<kSqrt, 3, true> : h_directed<kSqrt, 3, false>;
  }
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
    i.fn = approx ? (kSqrt ? nullptr : h_coarse_f64<false>) : round > 0 ? directed_f64<kSqrt>(round) : kSqrt ? h_sqrt_f64 : h_rcp_f64;
  } else if (t == Type::F32) {
    i.fn = round > 0 ? directed<kSqrt>(round, ftz) : unary<F>(ftz);
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
