// FP16, BF16 and packed arithmetic. Sums, products and fused products are rounded once.
#include <cmath>

#include "decode.h"
#include "machine.h"
#include "shared_opcodes.h"

namespace cake::emu {
namespace {

template <class H> H from_float(float f);
template <> Half from_float<Half>(float f) { return to_half(f); }
template <> BFloat from_float<BFloat>(float f) { return to_bfloat(f); }
template <class H> H from_double(double d);
template <> Half from_double<Half>(double d) { return to_half_from_double(d); }
template <> BFloat from_double<BFloat>(double d) { return to_bfloat_from_double(d); }

template <class H> constexpr u16 kExponent = std::is_same_v<H, Half> ? 0x7c00 : 0x7f80;
template <class H> bool is_nan(H h) { return (h.bits & 0x7fff) > kExponent<H>; }
template <class H> H flush_half(H h) { return (h.bits & kExponent<H>) ? h : H{u16(h.bits & 0x8000)}; }
constexpr u16 kNanBits = 0x7fff;

struct Flags {
  static constexpr u32 kFtz = 1, kSat = 2, kRelu = 4, kNan = 8, kXorSign = 16;
};

template <class H>
H finish(float r, u32 flags) {
  if (flags & Flags::kSat) r = r > 0.f ? (r < 1.f ? r : 1.f) : 0.f;
  if ((flags & Flags::kRelu) && r < 0.f) r = 0.f;
  H h = from_float<H>(r);
  return flags & Flags::kFtz ? flush_half(h) : h;
}

template <class H>
H min_max(H a, H b, bool is_max, u32 flags) {
  if (flags & Flags::kFtz) a = flush_half(a), b = flush_half(b);
  if (flags & Flags::kXorSign) {
    const u16 sign = (a.bits ^ b.bits) & 0x8000;
    const H m = min_max(H{u16(a.bits & 0x7fff)}, H{u16(b.bits & 0x7fff)}, is_max, flags & ~(Flags::kXorSign | Flags::kFtz));
    return {u16((m.bits & 0x7fff) | sign)};
  }
  if (is_nan(a) || is_nan(b)) {
    if ((flags & Flags::kNan) || (is_nan(a) && is_nan(b))) return {kNanBits};
    return is_nan(a) ? b : a;
  }
  const float x = to_float(a), y = to_float(b);
  if (x == y) return (a.bits >> 15 != 0) == is_max ? b : a;
  return (x < y) == is_max ? b : a;
}

// .ftz looks at the exact result, before it is rounded to FP16.
template <class T>
T flush_tiny(T exact, u32 flags) {
  return (flags & Flags::kFtz) && std::fabs(exact) < T(0x1p-14) ? std::copysign(T(0), exact) : exact;
}

template <class H, HalfOp kOp>
H apply(H a, H b, H c, u32 flags) {
  if constexpr (kOp == HalfOp::Min || kOp == HalfOp::Max) return min_max(a, b, kOp == HalfOp::Max, flags);
  if (flags & Flags::kFtz) a = flush_half(a), b = flush_half(b), c = flush_half(c);
  if constexpr (kOp == HalfOp::Abs) return {u16(a.bits & 0x7fff)};
  if constexpr (kOp == HalfOp::Neg) return {u16(a.bits ^ 0x8000)};
  const float x = to_float(a), y = to_float(b);
  if constexpr (kOp == HalfOp::Add) return finish<H>(x + y, flags);
  if constexpr (kOp == HalfOp::Sub) return finish<H>(x - y, flags);
  if constexpr (kOp == HalfOp::Mul) return finish<H>(flush_tiny(x * y, flags), flags);
  if constexpr (kOp == HalfOp::Fma) {
    // The product is exact in FP64, the sum rounded to odd: the last rounding alone counts.
    const double r = flush_tiny(add_to_odd(double(x) * y, to_float(c)), flags);
    if (flags & (Flags::kSat | Flags::kRelu)) {
      if (r != r && (flags & Flags::kSat)) return H{0};
      if (r <= 0) return H{0};
      if ((flags & Flags::kSat) && r > 1) return finish<H>(1.f, 0);
    }
    H h = from_double<H>(r);
    return flags & Flags::kFtz ? flush_half(h) : h;
  }
  return a;
}

template <class H, HalfOp kOp, int kPack>
void h_half(Warp& w, const Ins& i) {
  auto *d = w.slot<u32>(i.d), *a = w.slot<u32>(i.a), *b = w.slot<u32>(i.b), *c = w.slot<u32>(i.c);
  const u32 flags = i.flags;
  for_lanes(w.mask, [&](int l) {
    u32 r = 0;
    for (int k = 0; k < kPack; ++k) {
      const H x{u16(a[l] >> 16 * k)}, y{u16(b[l] >> 16 * k)}, z{u16(c[l] >> 16 * k)};
      r |= u32(apply<H, kOp>(x, y, z, flags).bits) << 16 * k;
    }
    d[l] = r;
  });
}

template <HalfOp kOp>
Handler choose(Type t) {
  switch (t) {
    case Type::F16: return h_half<Half, kOp, 1>;
    case Type::F16x2: return h_half<Half, kOp, 2>;
    case Type::BF16: return h_half<BFloat, kOp, 1>;
    case Type::BF16x2: return h_half<BFloat, kOp, 2>;
    default: return nullptr;
  }
}

template <class H, int kPack>
void h_approx(Warp& w, const Ins& i) {
  auto *d = w.slot<u32>(i.d), *a = w.slot<u32>(i.a);
  each_lane(w.mask, [&](int l) {
    u32 r = 0;
    for (int k = 0; k < kPack; ++k) {
      H x{u16(a[l] >> 16 * k)};
      if (i.flags & Flags::kFtz) x = flush_half(x);
      const float f = to_float(x);
      H h = from_float<H>(i.imm == 0 ? exp2f(f) : tanhf(f));
      r |= u32(h.bits) << 16 * k;
    }
    d[l] = r;
  });
}

u32 take_flags(Decoder& d) {
  Modifiers& m = d.mods();
  m.take("rn");
  u32 flags = 0;
  if (m.take("ftz")) flags |= Flags::kFtz;
  if (m.take("sat")) flags |= Flags::kSat;
  if (m.take("relu")) flags |= Flags::kRelu;
  if (m.take("NaN")) flags |= Flags::kNan;
  if (m.starts({"xorsign", "abs"})) flags |= Flags::kXorSign;
  return flags;
}

float apply32(HalfOp op, float a, float b, float c) {
  switch (op) {
    case HalfOp::Add: return a + b;
    case HalfOp::Sub: return a - b;
    case HalfOp::Mul: return a * b;
    default: return std::fma(a, b, c);
  }
}
template <HalfOp kOp>
void h_f32x2(Warp& w, const Ins& i) {
  auto *d = w.slot<u64>(i.d), *a = w.slot<u64>(i.a), *b = w.slot<u64>(i.b), *c = w.slot<u64>(i.c);
  const bool ftz = i.flags & Flags::kFtz;
  for_lanes(w.mask, [&](int l) {
    u64 r = 0;
    for (int k = 0; k < 2; ++k) {
      auto part = [&](u64 v) { const float f = std::bit_cast<float>(u32(v >> 32 * k)); return ftz ? flush(f) : f; };
      float f = apply32(kOp, part(a[l]), part(b[l]), part(c[l]));
      if (f != f) f = std::bit_cast<float>(0x7fffffffu);
      r |= u64(std::bit_cast<u32>(ftz ? flush(f) : f)) << 32 * k;
    }
    d[l] = r;
  });
}

}  // namespace

void decode_half_binary(Decoder& d, Ins& i, Type t, HalfOp op) {
  i.flags = take_flags(d);
  i.d = d.dest(0, bytes_of(t));
  i.a = i.b = i.c = d.source(1, t);
  if (d.count() > 2) i.b = d.source(2, t);
  if (d.count() > 3) d.unsupported("three inputs of this type");
  switch (op) {
    case HalfOp::Add: i.fn = choose<HalfOp::Add>(t); break;
    case HalfOp::Sub: i.fn = choose<HalfOp::Sub>(t); break;
    case HalfOp::Mul: i.fn = choose<HalfOp::Mul>(t); break;
    case HalfOp::Min: i.fn = choose<HalfOp::Min>(t); break;
    case HalfOp::Max: i.fn = choose<HalfOp::Max>(t); break;
    case HalfOp::Abs: i.fn = choose<HalfOp::Abs>(t); break;
    case HalfOp::Neg: i.fn = choose<HalfOp::Neg>(t); break;
    case HalfOp::Fma: break;
  }
}

void decode_half_fma(Decoder& d, Ins& i, Type t) {
  i.flags = take_flags(d);
  i.d = d.dest(0, bytes_of(t));
  i.a = d.source(1, t);
  i.b = d.source(2, t);
  i.c = d.source(3, t);
  i.fn = choose<HalfOp::Fma>(t);
}

void decode_f32x2(Decoder& d, Ins& i, HalfOp op) {
  d.mods().take("rn");
  if (d.mods().take("ftz")) i.flags = Flags::kFtz;
  i.d = d.dest(0, 8);
  i.a = d.source(1, 8u);
  i.b = d.source(2, 8u);
  i.c = op == HalfOp::Fma ? d.source(3, 8u) : i.a;
  i.fn = op == HalfOp::Add ? h_f32x2<HalfOp::Add> : op == HalfOp::Sub ? h_f32x2<HalfOp::Sub>
         : op == HalfOp::Mul ? h_f32x2<HalfOp::Mul> : h_f32x2<HalfOp::Fma>;
}

bool decode_half_unary_approx(Decoder& d, Ins& i, Type t, int function) {
  if (function > 1) d.unsupported("this type");
  if (d.mods().take("ftz")) i.flags = Flags::kFtz;
  i.imm = function;
  i.d = d.dest(0, bytes_of(t));
  i.a = d.source(1, t);
  switch (t) {
    case Type::F16: i.fn = h_approx<Half, 1>; break;
    case Type::F16x2: i.fn = h_approx<Half, 2>; break;
    case Type::BF16: i.fn = h_approx<BFloat, 1>; break;
    case Type::BF16x2: i.fn = h_approx<BFloat, 2>; break;
    default: break;
  }
  return i.fn != nullptr;
}

void register_half(DecoderTable&) {}  // every opcode is reached through the shared ones

}  // namespace cake::emu
