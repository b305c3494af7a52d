// Integer arithmetic.
#include <algorithm>

#include "decode.h"
#include "machine.h"

namespace cake::emu {
namespace {

template <class T>
using Wide = std::conditional_t<sizeof(T) == 2, std::conditional_t<std::is_signed_v<T>, i32, u32>,
             std::conditional_t<sizeof(T) == 4, std::conditional_t<std::is_signed_v<T>, i64, u64>,
                                std::conditional_t<std::is_signed_v<T>, i128, u128>>>;
template <class T>
using Unsigned = std::make_unsigned_t<T>;

// Wrapping arithmetic in unsigned types: PTX integers have no undefined overflow.
template <class T> struct Add { static void run(Warp& w, const Ins& i) { map2<T, T, T>(w, i, [](T a, T b) { return T(Unsigned<T>(a) + Unsigned<T>(b)); }); } };
template <class T> struct Sub { static void run(Warp& w, const Ins& i) { map2<T, T, T>(w, i, [](T a, T b) { return T(Unsigned<T>(a) - Unsigned<T>(b)); }); } };
template <class T> struct MulLo { static void run(Warp& w, const Ins& i) { map2<T, T, T>(w, i, [](T a, T b) { return T(u64(Unsigned<T>(a)) * Unsigned<T>(b)); }); } };
template <class T> struct MulHi { static void run(Warp& w, const Ins& i) { map2<T, T, T>(w, i, [](T a, T b) { return T((Wide<T>(a) * Wide<T>(b)) >> (sizeof(T) * 8)); }); } };
template <class T> struct MulWide { static void run(Warp& w, const Ins& i) { map2<Wide<T>, T, T>(w, i, [](T a, T b) { return Wide<T>(a) * Wide<T>(b); }); } };
template <class T> struct MadLo { static void run(Warp& w, const Ins& i) { map3<T, T, T, T>(w, i, [](T a, T b, T c) { return T(u64(Unsigned<T>(a)) * Unsigned<T>(b) + Unsigned<T>(c)); }); } };
template <class T> struct MadHi { static void run(Warp& w, const Ins& i) { map3<T, T, T, T>(w, i, [](T a, T b, T c) { return T(Unsigned<T>((Wide<T>(a) * Wide<T>(b)) >> (sizeof(T) * 8)) + Unsigned<T>(c)); }); } };
template <class T> struct MadWide { static void run(Warp& w, const Ins& i) { map3<Wide<T>, T, T, Wide<T>>(w, i, [](T a, T b, Wide<T> c) { return Wide<T>(std::make_unsigned_t<Wide<T>>(Wide<T>(a) * Wide<T>(b)) + std::make_unsigned_t<Wide<T>>(c)); }); } };

// Division by zero gives all ones, the remainder the dividend, as the hardware's instruction sequences do.
template <class T> struct Div { static void run(Warp& w, const Ins& i) { map2<T, T, T>(w, i, [](T a, T b) -> T { if (b == 0) return T(-1); if (std::is_signed_v<T> && b == T(-1)) return T(0 - Unsigned<T>(a)); return T(a / b); }); } };
template <class T> struct Rem { static void run(Warp& w, const Ins& i) { map2<T, T, T>(w, i, [](T a, T b) -> T { if (b == 0) return a; if (std::is_signed_v<T> && b == T(-1)) return 0; return T(a % b); }); } };

template <class T> struct Min { static void run(Warp& w, const Ins& i) { map2<T, T, T>(w, i, [](T a, T b) { return b < a ? b : a; }); } };
template <class T> struct Max { static void run(Warp& w, const Ins& i) { map2<T, T, T>(w, i, [](T a, T b) { return a < b ? b : a; }); } };
template <class T> struct Abs { static void run(Warp& w, const Ins& i) { map1<T, T>(w, i, [](T a) { return T(a < 0 ? 0 - Unsigned<T>(a) : Unsigned<T>(a)); }); } };
template <class T> struct Neg { static void run(Warp& w, const Ins& i) { map1<T, T>(w, i, [](T a) { return T(0 - Unsigned<T>(a)); }); } };
template <class T> struct Sad { static void run(Warp& w, const Ins& i) { map3<T, T, T, T>(w, i, [](T a, T b, T c) { return T(Unsigned<T>(c) + (a < b ? Unsigned<T>(b) - Unsigned<T>(a) : Unsigned<T>(a) - Unsigned<T>(b))); }); } };

// Two 16-bit integers in a word.
enum Packed : int { kPackedAdd, kPackedMin, kPackedMax, kPackedMinRelu, kPackedMaxRelu };
template <int kOp, class T>
void h_packed16(Warp& w, const Ins& i) {
  map2<u32, u32, u32>(w, i, [](u32 a, u32 b) {
    u32 r = 0;
    for (int k = 0; k < 2; ++k) {
      const T x = static_cast<T>(a >> 16 * k), y = static_cast<T>(b >> 16 * k);
      constexpr bool kMin = kOp == kPackedMin || kOp == kPackedMinRelu, kRelu = kOp >= kPackedMinRelu;
      T v = kOp == kPackedAdd ? static_cast<T>(x + y) : kMin ? std::min(x, y) : std::max(x, y);
      if (kRelu) v = std::max(v, T(0));
      r |= static_cast<u32>(static_cast<u16>(v)) << 16 * k;
    }
    return r;
  });
}

void h_min_relu(Warp& w, const Ins& i) { map2<i32, i32, i32>(w, i, [](i32 a, i32 b) { return std::max(0, std::min(a, b)); }); }
void h_max_relu(Warp& w, const Ins& i) { map2<i32, i32, i32>(w, i, [](i32 a, i32 b) { return std::max(0, std::max(a, b)); }); }

i32 saturate(i64 v) { return static_cast<i32>(std::clamp<i64>(v, INT32_MIN, INT32_MAX)); }
void h_add_sat(Warp& w, const Ins& i) { map2<i32, i32, i32>(w, i, [](i32 a, i32 b) { return saturate(i64(a) + b); }); }
void h_sub_sat(Warp& w, const Ins& i) { map2<i32, i32, i32>(w, i, [](i32 a, i32 b) { return saturate(i64(a) - b); }); }
void h_mad_hi_sat(Warp& w, const Ins& i) { map3<i32, i32, i32, i32>(w, i, [](i32 a, i32 b, i32 c) { return saturate((i64(a) * b >> 32) + c); }); }

// mul24 keeps the low 32 bits of the 48-bit product of the low 24 bits, or its bits 16 to 47.
template <class T> T low24(T v) { return T(Unsigned<T>(v) << 8) >> 8; }
template <class T> struct Mul24Lo { static void run(Warp& w, const Ins& i) { map2<T, T, T>(w, i, [](T a, T b) { return T(Wide<T>(low24(a)) * low24(b)); }); } };
template <class T> struct Mul24Hi { static void run(Warp& w, const Ins& i) { map2<T, T, T>(w, i, [](T a, T b) { return T((Wide<T>(low24(a)) * low24(b)) >> 16); }); } };
template <class T> struct Mad24Lo { static void run(Warp& w, const Ins& i) { map3<T, T, T, T>(w, i, [](T a, T b, T c) { return T(Unsigned<T>(Wide<T>(low24(a)) * low24(b)) + Unsigned<T>(c)); }); } };
template <class T> struct Mad24Hi { static void run(Warp& w, const Ins& i) { map3<T, T, T, T>(w, i, [](T a, T b, T c) { return T(Unsigned<T>((Wide<T>(low24(a)) * low24(b)) >> 16) + Unsigned<T>(c)); }); } };

// Carry flag: a predicate of the warp, one bit a lane (Ins::e).
template <class T, bool kSub, bool kIn, bool kOut>
void h_carry(Warp& w, const Ins& i) {
  auto *d = w.slot<T>(i.d), *a = w.slot<T>(i.a), *b = w.slot<T>(i.b);
  const u32 in = kIn ? w.predicates[i.e] : 0;
  u32 out = 0;
  each_lane(w.mask, [&](int l) {
    const u64 x = get<T>(a, l), y = get<T>(b, l), c = in >> l & 1;
    const u128 r = kSub ? u128(x) - y - c : u128(x) + y + c;
    put<T>(d, l, static_cast<T>(r));
    out |= u32(r >> (sizeof(T) * 8) & 1) << l;
  });
  if (kOut) w.set_predicate(i.e, out);
}

template <class T, bool kHi, bool kIn, bool kOut>
void h_mad_carry(Warp& w, const Ins& i) {
  auto *d = w.slot<T>(i.d), *a = w.slot<T>(i.a), *b = w.slot<T>(i.b), *c = w.slot<T>(i.c);
  const u32 in = kIn ? w.predicates[i.e] : 0;
  u32 out = 0;
  each_lane(w.mask, [&](int l) {
    using U = Unsigned<T>;
    const Wide<T> product = Wide<T>(get<T>(a, l)) * Wide<T>(get<T>(b, l));
    const U part = kHi ? static_cast<U>(product >> (sizeof(T) * 8)) : static_cast<U>(product);
    const u128 r = u128(part) + U(get<T>(c, l)) + (in >> l & 1);
    put<T>(d, l, static_cast<T>(static_cast<U>(r)));
    out |= u32(r >> (sizeof(T) * 8) & 1) << l;
  });
  if (kOut) w.set_predicate(i.e, out);
}

template <bool kSignedA, bool kSignedB>
void h_dp4a(Warp& w, const Ins& i) {
  map3<u32, u32, u32, u32>(w, i, [](u32 a, u32 b, u32 c) {
    u32 sum = c;
    for (int k = 0; k < 4; ++k) {
      const i32 x = kSignedA ? i32(i8(a >> 8 * k)) : i32(u8(a >> 8 * k));
      const i32 y = kSignedB ? i32(i8(b >> 8 * k)) : i32(u8(b >> 8 * k));
      sum += static_cast<u32>(x * y);
    }
    return sum;
  });
}
template <bool kSignedA, bool kSignedB, bool kHi>
void h_dp2a(Warp& w, const Ins& i) {
  map3<u32, u32, u32, u32>(w, i, [](u32 a, u32 b, u32 c) {
    u32 sum = c;
    for (int k = 0; k < 2; ++k) {
      const i32 x = kSignedA ? i32(i16(a >> 16 * k)) : i32(u16(a >> 16 * k));
      const u32 byte = b >> (8 * k + (kHi ? 16 : 0));
      sum += static_cast<u32>(x * (kSignedB ? i32(i8(byte)) : i32(u8(byte))));
    }
    return sum;
  });
}

void operands(Decoder& d, Ins& i, Type t) {
  i.d = d.dest(0, bytes_of(t));
  i.a = d.source(1, t);
  if (d.count() > 2) i.b = d.source(2, t);
  if (d.count() > 3) i.c = d.source(3, t);
}

Type integer_type(Decoder& d) {
  auto t = d.mods().take_type();
  if (!t) d.unsupported("no type");
  return *t;
}

}  // namespace

#define CAKE_INT u16, u32, u64, i16, i32, i64

u32 carry_flag(Decoder& d) {
  // One carry flag a function is enough: it never lives across calls or labels in compiler output.
  return d.program().carry_predicate ? d.program().carry_predicate : (d.program().carry_predicate = d.new_predicate());
}

template <bool kSub>
static void decode_carry(Decoder& d, Ins& i, bool in) {
  const bool out = d.mods().take("cc");
  const Type t = integer_type(d);
  operands(d, i, t);
  i.e = carry_flag(d);
  if (bytes_of(t) == 4) {
    i.fn = in ? (out ? h_carry<u32, kSub, true, true> : h_carry<u32, kSub, true, false>) : h_carry<u32, kSub, false, true>;
  } else if (bytes_of(t) == 8) {
    i.fn = in ? (out ? h_carry<u64, kSub, true, true> : h_carry<u64, kSub, true, false>) : h_carry<u64, kSub, false, true>;
  }
}

bool decode_packed16(Decoder& d, Ins& i, int op) {
  const bool is_signed_pair = d.mods().take("s16x2");
  if (!is_signed_pair && !d.mods().take("u16x2")) return false;
  operands(d, i, Type::B32);
  if (d.mods().take("relu")) {
    if (!is_signed_pair || op == kPackedAdd) d.unsupported("modifier .relu");
    i.fn = op == kPackedMin ? h_packed16<kPackedMinRelu, i16> : h_packed16<kPackedMaxRelu, i16>;
  } else if (op == kPackedAdd) {
    i.fn = h_packed16<kPackedAdd, u16>;
  } else if (op == kPackedMin) {
    i.fn = is_signed_pair ? h_packed16<kPackedMin, i16> : h_packed16<kPackedMin, u16>;
  } else {
    i.fn = is_signed_pair ? h_packed16<kPackedMax, i16> : h_packed16<kPackedMax, u16>;
  }
  return true;
}

bool decode_integer_add(Decoder& d, Ins& i, bool subtract, Type t) {
  const bool sat = d.mods().take("sat");
  operands(d, i, t);
  if (sat) {
    if (t != Type::S32) d.unsupported(".sat for this type");
    i.fn = subtract ? h_sub_sat : h_add_sat;
  } else {
    i.fn = subtract ? pick<Sub, CAKE_INT>(t) : pick<Add, CAKE_INT>(t);
  }
  return i.fn != nullptr;
}

void decode_integer_min_max(Decoder& d, Ins& i, bool is_max, Type t) {
  operands(d, i, t);
  if (d.mods().take("relu")) {
    if (t != Type::S32) d.unsupported(".relu for this type");
    i.fn = is_max ? h_max_relu : h_min_relu;
    return;
  }
  i.fn = is_max ? pick<Max, CAKE_INT>(t) : pick<Min, CAKE_INT>(t);
}

void decode_integer_mul(Decoder& d, Ins& i, Type t) {
  const int part = d.mods().take_one({"lo", "hi", "wide"});
  if (part == 2) {
    i.fn = pick<MulWide, u16, u32, i16, i32>(t);
    if (bytes_of(t) == 8) d.unsupported("mul.wide of 64-bit integers");
    i.d = d.dest(0, bytes_of(t) * 2);
    i.a = d.source(1, t);
    i.b = d.source(2, t);
    return;
  }
  operands(d, i, t);
  i.fn = part == 1 ? pick<MulHi, CAKE_INT>(t) : part == 0 ? pick<MulLo, CAKE_INT>(t) : nullptr;
}

void decode_integer_unary(Decoder& d, Ins& i, bool negate, Type t) {
  operands(d, i, t);
  i.fn = negate ? pick<Neg, i16, i32, i64>(t) : pick<Abs, i16, i32, i64>(t);
}

void decode_integer_div(Decoder& d, Ins& i, Type t) {
  operands(d, i, t);
  i.fn = pick<Div, CAKE_INT>(t);
}

void decode_integer_mad(Decoder& d, Ins& i, bool carry_in, Type t) {
  const int part = d.mods().take_one({"lo", "hi", "wide"});
  const bool carry_out = d.mods().take("cc"), sat = d.mods().take("sat");
  if (part == 2) {
    if (bytes_of(t) == 8) d.unsupported("mad.wide of 64-bit integers");
    i.d = d.dest(0, bytes_of(t) * 2);
    i.a = d.source(1, t);
    i.b = d.source(2, t);
    i.c = d.source(3, bytes_of(t) * 2);
    i.fn = pick<MadWide, u16, u32, i16, i32>(t);
    return;
  }
  operands(d, i, t);
  const bool hi = part == 1;
  if (sat) {
    if (!hi || t != Type::S32) d.unsupported(".sat for this type");
    i.fn = h_mad_hi_sat;
  } else if (carry_in || carry_out) {
    i.e = carry_flag(d);
    auto choose = [&]<class T>() -> Handler {
      if (hi) return carry_in ? (carry_out ? h_mad_carry<T, true, true, true> : h_mad_carry<T, true, true, false>) : h_mad_carry<T, true, false, true>;
      return carry_in ? (carry_out ? h_mad_carry<T, false, true, true> : h_mad_carry<T, false, true, false>) : h_mad_carry<T, false, false, true>;
    };
    if (t == Type::U32) i.fn = choose.operator()<u32>();
    if (t == Type::S32) i.fn = choose.operator()<i32>();
    if (t == Type::U64) i.fn = choose.operator()<u64>();
    if (t == Type::S64) i.fn = choose.operator()<i64>();
  } else {
    i.fn = hi ? pick<MadHi, CAKE_INT>(t) : pick<MadLo, CAKE_INT>(t);
  }
}

void register_integer(DecoderTable& table) {
  table.add("rem", [](Decoder& d, Ins& i) {
    const Type t = integer_type(d);
    operands(d, i, t);
    i.fn = pick<Rem, CAKE_INT>(t);
  });
  table.add("sad", [](Decoder& d, Ins& i) {
    const Type t = integer_type(d);
    operands(d, i, t);
    i.fn = pick<Sad, CAKE_INT>(t);
  });
  table.add("addc", [](Decoder& d, Ins& i) { decode_carry<false>(d, i, true); });
  table.add("subc", [](Decoder& d, Ins& i) { decode_carry<true>(d, i, true); });
  table.add("madc", [](Decoder& d, Ins& i) { decode_integer_mad(d, i, true, integer_type(d)); });
  table.add("mul24", [](Decoder& d, Ins& i) {
    const bool hi = d.mods().take_one({"lo", "hi"}) == 1;
    const Type t = integer_type(d);
    operands(d, i, t);
    i.fn = hi ? pick<Mul24Hi, u32, i32>(t) : pick<Mul24Lo, u32, i32>(t);
  });
  table.add("mad24", [](Decoder& d, Ins& i) {
    const bool hi = d.mods().take_one({"lo", "hi"}) == 1;
    const Type t = integer_type(d);
    operands(d, i, t);
    i.fn = hi ? pick<Mad24Hi, u32, i32>(t) : pick<Mad24Lo, u32, i32>(t);
  });
  table.add("dp4a", [](Decoder& d, Ins& i) {
    const bool a = is_signed(integer_type(d)), b = is_signed(integer_type(d));
    operands(d, i, Type::U32);
    i.fn = a ? (b ? h_dp4a<true, true> : h_dp4a<true, false>) : (b ? h_dp4a<false, true> : h_dp4a<false, false>);
  });
  table.add("dp2a", [](Decoder& d, Ins& i) {
    const bool hi = d.mods().take_one({"lo", "hi"}) == 1;
    const bool a = is_signed(integer_type(d)), b = is_signed(integer_type(d));
    operands(d, i, Type::U32);
    auto choose = [&]<bool kHi>() -> Handler {
      return a ? (b ? h_dp2a<true, true, kHi> : h_dp2a<true, false, kHi>) : (b ? h_dp2a<false, true, kHi> : h_dp2a<false, false, kHi>);
    };
    i.fn = hi ? choose.operator()<true>() : choose.operator()<false>();
  });
}

// add.cc and sub.cc, reached from the decoders of add and sub.
void decode_carry_start(Decoder& d, Ins& i, bool subtract) {
  if (subtract) decode_carry<true>(d, i, false); else decode_carry<false>(d, i, false);
}

}  // namespace cake::emu
