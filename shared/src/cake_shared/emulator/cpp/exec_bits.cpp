// Logic, shifts, bit fields, byte permutations.
#include "decode.h"
#include "machine.h"

namespace cake::emu {
namespace {

template <class T> struct And { static void run(Warp& w, const Ins& i) { map2<T, T, T>(w, i, [](T a, T b) { return T(a & b); }); } };
template <class T> struct Or { static void run(Warp& w, const Ins& i) { map2<T, T, T>(w, i, [](T a, T b) { return T(a | b); }); } };
template <class T> struct Xor { static void run(Warp& w, const Ins& i) { map2<T, T, T>(w, i, [](T a, T b) { return T(a ^ b); }); } };
template <class T> struct Not { static void run(Warp& w, const Ins& i) { map1<T, T>(w, i, [](T a) { return T(~a); }); } };
template <class T> struct Cnot { static void run(Warp& w, const Ins& i) { map1<T, T>(w, i, [](T a) { return T(a == 0); }); } };

// Shift amounts clamp at the width of the type.
template <class T> struct Shl { static void run(Warp& w, const Ins& i) { map2<T, T, u32>(w, i, [](T a, u32 n) { return n >= sizeof(T) * 8 ? T(0) : T(std::make_unsigned_t<T>(a) << n); }); } };
template <class T> struct Shr { static void run(Warp& w, const Ins& i) { map2<T, T, u32>(w, i, [](T a, u32 n) -> T { constexpr u32 kBits = sizeof(T) * 8; if (std::is_signed_v<T>) return T(a >> (n >= kBits ? kBits - 1 : n)); return n >= kBits ? T(0) : T(a >> n); }); } };

// Predicates are bits of a mask: logic on whole warps at once.
template <int kOp>
void h_predicate_logic(Warp& w, const Ins& i) {
  const u32 a = w.predicates[i.a], b = w.predicates[i.b];
  w.set_predicate(i.d, kOp == 0 ? a & b : kOp == 1 ? a | b : kOp == 2 ? a ^ b : ~a);
}

void h_lop3(Warp& w, const Ins& i) {
  auto *d = w.slot<u32>(i.d), *a = w.slot<u32>(i.a), *b = w.slot<u32>(i.b), *c = w.slot<u32>(i.c);
  const u32 table = static_cast<u32>(i.imm);
  u32 terms[8];
  for (int k = 0; k < 8; ++k) terms[k] = table >> k & 1 ? kFull : 0;
  for_lanes(w.mask, [&](int l) {
    const u32 x = a[l], y = b[l], z = c[l];
    d[l] = (terms[0] & ~x & ~y & ~z) | (terms[1] & ~x & ~y & z) | (terms[2] & ~x & y & ~z) | (terms[3] & ~x & y & z) |
           (terms[4] & x & ~y & ~z) | (terms[5] & x & ~y & z) | (terms[6] & x & y & ~z) | (terms[7] & x & y & z);
  });
}
// lop3.BoolOp.b32 d|p, a, b, c, lut, q
void h_lop3_predicate(Warp& w, const Ins& i) {
  h_lop3(w, i);
  auto* d = w.slot<u32>(i.d);
  u32 r = 0;
  each_lane(w.mask, [&](int l) { r |= u32(d[l] != 0) << l; });
  const u32 q = w.predicates[w.gang->launch->program->operands[i.list]];
  w.set_predicate(i.e, i.flags ? r | q : r & q);
}

template <bool kLeft, bool kWrap>
void h_shf(Warp& w, const Ins& i) {
  map3<u32, u32, u32, u32>(w, i, [](u32 a, u32 b, u32 c) {
    const u32 n = kWrap ? c & 31 : (c > 32 ? 32 : c);
    const u64 both = u64(b) << 32 | a;
    return kLeft ? static_cast<u32>((both << n) >> 32) : static_cast<u32>(both >> n);
  });
}

template <class T> struct Popc { static void run(Warp& w, const Ins& i) { map1<u32, T>(w, i, [](T a) { return u32(std::popcount(a)); }); } };
template <class T> struct Clz { static void run(Warp& w, const Ins& i) { map1<u32, T>(w, i, [](T a) { return u32(std::countl_zero(a)); }); } };

template <class T>
T reverse(T a) {
  T r = 0;
  for (u32 k = 0; k < sizeof(T) * 8; ++k) r |= T(a >> k & 1) << (sizeof(T) * 8 - 1 - k);
  return r;
}
template <class T> struct Brev { static void run(Warp& w, const Ins& i) { map1<T, T>(w, i, reverse<T>); } };

template <class T>
struct Bfind {
  static u32 position(T a) {
    using U = std::make_unsigned_t<T>;
    const U u = std::is_signed_v<T> && a < 0 ? U(~a) : U(a);
    return u == 0 ? kFull : u32(sizeof(T) * 8 - 1 - std::countl_zero(u));
  }
  static void run(Warp& w, const Ins& i) {
    if (i.flags) {  // .shiftamt
      map1<u32, T>(w, i, [](T a) { const u32 p = position(a); return p == kFull ? p : u32(sizeof(T) * 8 - 1) - p; });
    } else {
      map1<u32, T>(w, i, [](T a) { return position(a); });
    }
  }
};

// Position and length are taken from the low 8 bits by the 32-bit forms and whole by the 64-bit ones; the field is cut at the word's end, its sign bit included.
template <class T>
struct Bfe {
  static void run(Warp& w, const Ins& i) {
    map3<T, T, u32, u32>(w, i, [](T a, u32 position, u32 length) -> T {
      constexpr u32 kBits = sizeof(T) * 8;
      const u32 p = sizeof(T) == 8 ? std::min(position, 255u) : position & 0xff;
      const u32 n = sizeof(T) == 8 ? std::min(length, 255u) : length & 0xff;
      if (n == 0) return 0;
      using U = std::make_unsigned_t<T>;
      const bool sign = std::is_signed_v<T> && (U(a) >> std::min(p + n - 1, kBits - 1) & 1);
      const U low = p >= kBits ? 0 : U(a) >> p;
      if (n >= kBits || p + n > kBits) {
        const u32 valid = p >= kBits ? 0 : kBits - p;
        const U mask = valid >= kBits ? ~U(0) : (U(1) << valid) - 1;
        const U wanted = n >= kBits ? ~U(0) : (U(1) << n) - 1;
        const U r = (low & mask) | (sign ? ~mask : U(0));
        return sign ? T(r) : T(r & wanted);
      }
      const U mask = (U(1) << n) - 1;
      return T((low & mask) | (sign ? ~mask : U(0)));
    });
  }
};

template <class T>
void h_bfi(Warp& w, const Ins& i) {
  auto *d = w.slot<T>(i.d), *a = w.slot<T>(i.a), *b = w.slot<T>(i.b);
  auto *c = w.slot<u32>(i.c), *e = w.slot<u32>(i.e);
  each_lane(w.mask, [&](int l) {
    constexpr u32 kBits = sizeof(T) * 8;
    const u32 p = sizeof(T) == 8 ? std::min(c[l], 255u) : c[l] & 0xff;
    const u32 n = sizeof(T) == 8 ? std::min(e[l], 255u) : e[l] & 0xff;
    T mask = n >= kBits ? ~T(0) : T((T(1) << n) - 1);
    mask = p >= kBits ? 0 : T(mask << p);
    d[l] = (b[l] & ~mask) | ((p >= kBits ? 0 : T(a[l] << p)) & mask);
  });
}

template <class T, bool kClampWrap>
void h_bmsk(Warp& w, const Ins& i) {
  map2<u32, u32, u32>(w, i, [](u32 a, u32 b) {
    if (kClampWrap) a &= 31, b &= 31;
    if (a >= 32 || b == 0) return 0u;
    const u32 field = b >= 32 ? kFull : (1u << b) - 1;
    return field << a;
  });
}

// szext: the low b bits, sign- or zero-extended; .wrap takes b modulo 32, .clamp stops at 32.
template <bool kSigned, bool kWrap>
void h_szext(Warp& w, const Ins& i) {
  map2<u32, u32, u32>(w, i, [](u32 a, u32 b) {
    const u32 n = kWrap ? b & 31 : b;
    if (n == 0) return 0u;
    if (n >= 32) return a;
    const u32 shift = 32 - n;
    return kSigned ? static_cast<u32>(static_cast<i32>(a << shift) >> shift) : a << shift >> shift;
  });
}

// fns: the position of the n-th set bit from a base, upwards or downwards.
void h_fns(Warp& w, const Ins& i) {
  map3<u32, u32, u32, i32>(w, i, [](u32 mask, u32 base, i32 offset) {
    i32 position = static_cast<i32>(base);
    if (offset == 0) return base < 32 && (mask >> base & 1) ? base : kFull;
    u32 left = static_cast<u32>(offset < 0 ? -offset : offset);
    for (; position >= 0 && position < 32; position += offset < 0 ? -1 : 1) {
      if ((mask >> position & 1) && --left == 0) return static_cast<u32>(position);
    }
    return kFull;
  });
}

u32 pick_byte(u64 both, u32 selector) {
  const u32 byte = static_cast<u32>(both >> 8 * (selector & 7)) & 0xff;
  return selector & 8 ? (byte & 0x80 ? 0xff : 0) : byte;  // bit 3 replicates the sign
}
// Modes: 0 default, then f4e b4e rc8 ecl ecr rc16.
void h_prmt(Warp& w, const Ins& i) {
  auto *d = w.slot<u32>(i.d), *a = w.slot<u32>(i.a), *b = w.slot<u32>(i.b), *c = w.slot<u32>(i.c);
  each_lane(w.mask, [&](int l) {
    const u64 both = u64(b[l]) << 32 | a[l];
    const u32 s = c[l] & 3;
    u32 r = 0;
    for (u32 k = 0; k < 4; ++k) {
      u32 selector;
      switch (i.flags) {
        case 1: selector = s + k; break;
        case 2: selector = (s + 8 - k) & 7; break;
        case 3: selector = s; break;
        case 4: selector = std::max(k, s); break;
        case 5: selector = std::min(k, s); break;
        case 6: selector = (s & 1) * 2 + (k & 1); break;
        default: selector = c[l] >> 4 * k & 15;
      }
      r |= pick_byte(both, selector) << 8 * k;
    }
    d[l] = r;
  });
}

Type require_type(Decoder& d) {
  auto t = d.mods().take_type();
  if (!t) d.unsupported("no type");
  return *t;
}

template <template <class> class Op, int kPredicate>
void decode_logic(Decoder& d, Ins& i) {
  const Type t = require_type(d);
  if (t == Type::Pred) {
    i.d = d.predicate_dest(d.op(0));
    i.a = d.predicate(1);
    i.b = kPredicate == 3 ? i.a : d.predicate(2);
    i.fn = h_predicate_logic<kPredicate>;
    return;
  }
  i.d = d.dest(0, bytes_of(t));
  i.a = d.source(1, t);
  if (kPredicate != 3) i.b = d.source(2, t);
  i.fn = pick<Op, u16, u32, u64>(t);
}

template <template <class> class Op>
void decode_shift(Decoder& d, Ins& i) {
  const Type t = require_type(d);
  i.d = d.dest(0, bytes_of(t));
  i.a = d.source(1, t);
  i.b = d.source(2, 4u);
  i.fn = pick<Op, u16, u32, u64, i16, i32, i64>(t);
}

template <template <class> class Op, bool kSameWidth>
void decode_count(Decoder& d, Ins& i) {
  const Type t = require_type(d);
  i.d = d.dest(0, kSameWidth ? bytes_of(t) : 4);
  i.a = d.source(1, t);
  i.fn = pick<Op, u32, u64>(t);
}

}  // namespace

void register_bits(DecoderTable& table) {
  table.add("and", decode_logic<And, 0>);
  table.add("or", decode_logic<Or, 1>);
  table.add("xor", decode_logic<Xor, 2>);
  table.add("not", decode_logic<Not, 3>);
  table.add("cnot", [](Decoder& d, Ins& i) {
    const Type t = require_type(d);
    i.d = d.dest(0, bytes_of(t));
    i.a = d.source(1, t);
    i.fn = pick<Cnot, u16, u32, u64>(t);
  });
  table.add("shl", decode_shift<Shl>);
  table.add("shr", decode_shift<Shr>);
  table.add("popc", decode_count<Popc, false>);
  table.add("clz", decode_count<Clz, false>);
  table.add("brev", decode_count<Brev, true>);
  table.add("bfind", [](Decoder& d, Ins& i) {
    i.flags = d.mods().take("shiftamt");
    const Type t = require_type(d);
    i.d = d.dest(0, 4);
    i.a = d.source(1, t);
    i.fn = pick<Bfind, u32, u64, i32, i64>(t);
  });
  table.add("bfe", [](Decoder& d, Ins& i) {
    const Type t = require_type(d);
    i.d = d.dest(0, bytes_of(t));
    i.a = d.source(1, t);
    i.b = d.source(2, 4u);
    i.c = d.source(3, 4u);
    i.fn = pick<Bfe, u32, u64, i32, i64>(t);
  });
  table.add("bfi", [](Decoder& d, Ins& i) {
    const Type t = require_type(d);
    i.d = d.dest(0, bytes_of(t));
    i.a = d.source(1, t);
    i.b = d.source(2, t);
    i.c = d.source(3, 4u);
    i.e = d.source(4, 4u);
    i.fn = bytes_of(t) == 8 ? h_bfi<u64> : h_bfi<u32>;
  });
  table.add("bmsk", [](Decoder& d, Ins& i) {
    const bool wrap = d.mods().take_one({"clamp", "wrap"}) == 1;
    require_type(d);
    i.d = d.dest(0, 4);
    i.a = d.source(1, 4u);
    i.b = d.source(2, 4u);
    i.fn = wrap ? h_bmsk<u32, true> : h_bmsk<u32, false>;
  });
  table.add("szext", [](Decoder& d, Ins& i) {
    const bool wrap = d.mods().take_one({"clamp", "wrap"}) == 1;
    const Type t = require_type(d);
    i.d = d.dest(0, 4);
    i.a = d.source(1, t);
    i.b = d.source(2, 4u);
    i.fn = is_signed(t) ? (wrap ? h_szext<true, true> : h_szext<true, false>) : (wrap ? h_szext<false, true> : h_szext<false, false>);
  });
  table.add("fns", [](Decoder& d, Ins& i) {
    d.mods().take("b32");
    i.d = d.dest(0, 4);
    i.a = d.source(1, 4u);
    i.b = d.source(2, 4u);
    i.c = d.source(3, 4u);
    i.fn = h_fns;
  });
  table.add("prmt", [](Decoder& d, Ins& i) {
    require_type(d);
    i.flags = static_cast<u32>(d.mods().take_one({"f4e", "b4e", "rc8", "ecl", "ecr", "rc16"}) + 1);
    i.d = d.dest(0, 4);
    i.a = d.source(1, 4u);
    i.b = d.source(2, 4u);
    i.c = d.source(3, 4u);
    i.fn = h_prmt;
  });
  table.add("lop3", [](Decoder& d, Ins& i) {
    const int combine = d.mods().take_one({"and", "or"});
    require_type(d);
    const Operand& out = d.op(0);
    i.a = d.source(1, 4u);
    i.b = d.source(2, 4u);
    i.c = d.source(3, 4u);
    i.imm = d.constant(d.op(4));
    i.fn = h_lop3;
    if (combine < 0) {
      i.d = d.dest(out, 4);
      return;
    }
    if (out.kind != Operand::Pair) d.syntax("a destination pair d|p is expected");
    i.d = d.dest(out.items[0], 4);
    i.e = d.predicate_dest(out.items[1]);
    const u32 q = d.predicate(5);
    i.list = static_cast<u32>(d.program().operands.size());
    d.add_operand(q);
    i.flags = static_cast<u32>(combine);
    i.fn = h_lop3_predicate;
  });
  table.add("shf", [](Decoder& d, Ins& i) {
    const bool right = d.mods().take_one({"l", "r"}) == 1;
    const bool wrap = d.mods().take_one({"clamp", "wrap"}) == 1;
    require_type(d);
    i.d = d.dest(0, 4);
    i.a = d.source(1, 4u);
    i.b = d.source(2, 4u);
    i.c = d.source(3, 4u);
    i.fn = right ? (wrap ? h_shf<false, true> : h_shf<false, false>) : (wrap ? h_shf<true, true> : h_shf<true, false>);
  });
}

}  // namespace cake::emu
