// Comparisons and selections.
#include <cmath>

#include "decode.h"
#include "machine.h"

namespace cake::emu {
namespace {

enum Compare : int { Eq, Ne, Lt, Le, Gt, Ge, Equ, Neu, Ltu, Leu, Gtu, Geu, Num, Nan };

// The U forms are true when an operand is NaN; for integers NaN never occurs and they are not decoded.
template <int kCompare, class T>
inline bool compare(T a, T b) {
  if constexpr (kCompare == Eq) return a == b;
  if constexpr (kCompare == Ne) return a < b || a > b;  // false for NaN
  if constexpr (kCompare == Lt) return a < b;
  if constexpr (kCompare == Le) return a <= b;
  if constexpr (kCompare == Gt) return a > b;
  if constexpr (kCompare == Ge) return a >= b;
  if constexpr (kCompare == Equ) return !(a < b || a > b);
  if constexpr (kCompare == Neu) return !(a == b);
  if constexpr (kCompare == Ltu) return !(a >= b);
  if constexpr (kCompare == Leu) return !(a > b);
  if constexpr (kCompare == Gtu) return !(a <= b);
  if constexpr (kCompare == Geu) return !(a < b);
  if constexpr (kCompare == Num) return a == a && b == b;
  return a != a || b != b;
}

template <class T>
struct Value {
  using type = T;
  static T from(T v) { return v; }
};
template <>
struct Value<Half> {
  using type = float;
  static float from(Half v) { return to_float(v); }
};
template <>
struct Value<BFloat> {
  using type = float;
  static float from(BFloat v) { return to_float(v); }
};

// .ftz on values widened to FP32: what is subnormal in the lane's own format becomes zero.
template <class T, class V>
V flush_lane(V v) {
  if constexpr (std::is_same_v<T, Half>) return v > -0x1p-14f && v < 0x1p-14f ? V(0) : v;
  if constexpr (std::is_same_v<T, float> || std::is_same_v<T, BFloat>) return flush(v);
  return v;
}

// Ins::flags beside the word of the combination: the two lowest bits are 0 for none, or 1 and, 2 or, 3 xor. 0 is plain.
constexpr u32 kFtzPacked = 4, kCombined = 8, kToRegister = 16;

u32 combined(const Ins& i, u32 t, u32 c) {
  const u32 op = i.flags & 3;
  return op == 1 ? t & c : op == 2 ? t | c : op == 3 ? t ^ c : t;
}

// What is done with the result of a comparison unless it goes into a predicate as it is; one for all comparisons.
void finish(Warp& w, const Ins& i, u32 t) {
  const u32 c = i.flags & 3 ? w.predicates[i.c] : 0;
  if (i.flags & kToRegister) {  // set: all ones or 1.0 where true
    const u32 r = combined(i, t, c), yes = static_cast<u32>(i.imm);
    each_lane(w.mask, [&](int l) { w.set32(i.d, l, r >> l & 1 ? yes : 0); });
  } else {  // p|q = (a cmp b) op c, !(a cmp b) op c
    w.set_predicate(i.d, combined(i, t, c));
    w.set_predicate(i.e, combined(i, ~t, c));
  }
}

template <int kCompare, class T, bool kFtz>
void h_compare(Warp& w, const Ins& i) {
  auto *a = w.slot<T>(i.a), *b = w.slot<T>(i.b);
  u32 r = 0;
  for (int l = 0; l < kLanes; ++l) {
    auto x = Value<T>::from(get<T>(a, l)), y = Value<T>::from(get<T>(b, l));
    if constexpr (kFtz) x = flush_lane<T>(x), y = flush_lane<T>(y);
    r |= u32(compare<kCompare>(x, y)) << l;
  }
  if (i.flags == 0) w.set_predicate(i.d, r);
  else finish(w, i, r);
}

template <class T, bool kFtz, int... kAll>
Handler of_compare(int c, std::integer_sequence<int, kAll...>) {
  constexpr Handler handlers[] = {h_compare<kAll, T, kFtz>...};
  return handlers[c];
}
template <class T>
Handler integer(int c) {
  return c <= Ge ? of_compare<T, false>(c, std::make_integer_sequence<int, Ge + 1>{}) : nullptr;
}
template <class T>
Handler floating(int c, bool ftz) {
  constexpr std::make_integer_sequence<int, Nan + 1> all{};
  return ftz ? of_compare<T, true>(c, all) : of_compare<T, false>(c, all);
}

Handler choose(Type t, int c, bool ftz) {
  switch (t) {
    case Type::U16:
    case Type::B16: return integer<u16>(c);
    case Type::U32:
    case Type::B32: return integer<u32>(c);
    case Type::U64:
    case Type::B64: return integer<u64>(c);
    case Type::S16: return integer<i16>(c);
    case Type::S32: return integer<i32>(c);
    case Type::S64: return integer<i64>(c);
    case Type::F32: return floating<float>(c, ftz);
    case Type::F64: return of_compare<double, false>(c, std::make_integer_sequence<int, Nan + 1>{});
    case Type::F16: return floating<Half>(c, ftz);
    case Type::BF16: return floating<BFloat>(c, ftz);
    default: return nullptr;
  }
}

int take_compare(Decoder& d) {
  const int c =
      d.mods().take_one({"eq", "ne", "lt", "le", "gt", "ge", "equ", "neu", "ltu", "leu", "gtu", "geu", "num", "nan"});
  if (c >= 0) return c;
  constexpr int kUnsigned[] = {Lt, Le, Gt, Ge};
  const int u = d.mods().take_one({"lo", "ls", "hi", "hs"});
  if (u < 0) d.unsupported("comparison");
  return kUnsigned[u];
}

// setp.f16x2 / bf16x2: p from the low halves, q from the high ones.
template <class H>
void h_setp_packed(Warp& w, const Ins& i) {
  u32 r[2] = {0, 0};
  const u32 c = i.flags & 3 ? w.predicates[i.c] : 0;
  each_lane(w.mask, [&](int l) {
    for (int k = 0; k < 2; ++k) {
      float x = to_float(H{u16(w.lane32(i.a, l) >> 16 * k)}), y = to_float(H{u16(w.lane32(i.b, l) >> 16 * k)});
      if (i.flags & kFtzPacked) x = flush_lane<H>(x), y = flush_lane<H>(y);
      bool t = false;
      switch (i.imm) {
        case Eq: t = compare<Eq>(x, y); break;
        case Ne: t = compare<Ne>(x, y); break;
        case Lt: t = compare<Lt>(x, y); break;
        case Le: t = compare<Le>(x, y); break;
        case Gt: t = compare<Gt>(x, y); break;
        case Ge: t = compare<Ge>(x, y); break;
        case Equ: t = compare<Equ>(x, y); break;
        case Neu: t = compare<Neu>(x, y); break;
        case Ltu: t = compare<Ltu>(x, y); break;
        case Leu: t = compare<Leu>(x, y); break;
        case Gtu: t = compare<Gtu>(x, y); break;
        case Geu: t = compare<Geu>(x, y); break;
        case Num: t = compare<Num>(x, y); break;
        default: t = compare<Nan>(x, y);
      }
      r[k] |= u32(t) << l;
    }
  });
  for (int k = 0; k < 2; ++k) w.set_predicate(k ? i.e : i.d, combined(i, r[k], c));
}

// set.cmp.f16x2.f16x2: 1.0 or 0 in each half.
template <class H>
void h_set_packed(Warp& w, const Ins& i) {
  const u32 saved[2] = {w.predicates[i.d], w.predicates[i.e]};
  h_setp_packed<H>(w, i);
  const u32 low = w.predicates[i.d], high = w.predicates[i.e],
            one = static_cast<u32>(i.width) << 8 | 0x80u * (i.width == 0x3f);
  const u32 slot = w.gang->launch->program->operands[i.list];
  each_lane(w.mask, [&](int l) { w.set32(slot, l, (low >> l & 1 ? one : 0) | (high >> l & 1 ? one << 16 : 0)); });
  w.predicates[i.d] = saved[0];
  w.predicates[i.e] = saved[1];
}

void decode_setp(Decoder& d, Ins& i) {
  const int c = take_compare(d);
  const int combine = d.mods().take_one({"and", "or", "xor"});
  const bool ftz = d.mods().take("ftz");
  const auto t = d.mods().take_type();
  if (!t) d.unsupported("no type");
  const Operand& out = d.op(0);
  const bool pair = out.kind == Operand::Pair;
  i.d = d.predicate_dest(pair ? out.items[0] : out);
  i.e = pair ? d.predicate_dest(out.items[1]) : 0;
  i.a = d.source(1, *t);
  i.b = d.source(2, *t);
  if (combine >= 0) i.c = d.predicate(3);
  i.flags = static_cast<u32>(combine + 1);
  if (*t == Type::F16x2 || *t == Type::BF16x2) {
    if (ftz) i.flags |= kFtzPacked;
    i.imm = c;
    i.fn = *t == Type::F16x2 ? h_setp_packed<Half> : h_setp_packed<BFloat>;
    return;
  }
  if (pair || combine >= 0) i.flags |= kCombined;
  i.fn = choose(*t, c, ftz);
}

void decode_set(Decoder& d, Ins& i) {
  const int c = take_compare(d);
  const int combine = d.mods().take_one({"and", "or", "xor"});
  const bool ftz = d.mods().take("ftz");
  const auto to = d.mods().take_type(), t = d.mods().take_type();
  if (!to || !t) d.unsupported("types");
  i.d = d.dest(0, bytes_of(*to));
  i.a = d.source(1, *t);
  i.b = d.source(2, *t);
  if (combine >= 0) i.c = d.predicate(3);
  i.flags = static_cast<u32>(combine + 1);
  switch (*to) {
    case Type::U32:
    case Type::S32: i.imm = 0xffffffff; break;
    case Type::F32: i.imm = 0x3f800000; break;
    case Type::U16:
    case Type::S16: i.imm = 0xffff; break;
    case Type::F16: i.imm = 0x3c00; break;
    case Type::BF16: i.imm = 0x3f80; break;
    case Type::F16x2:
    case Type::BF16x2: {
      if (ftz) i.flags |= kFtzPacked;
      const u32 slot = i.d;
      i.list = static_cast<u32>(d.program().operands.size());
      d.add_operand(slot);
      i.d = d.new_predicate();
      i.e = d.new_predicate();
      i.imm = c;
      i.width = *to == Type::F16x2 ? 0x3c : 0x3f;  // high byte of 1.0
      i.fn = *t == Type::F16x2 ? h_set_packed<Half> : *t == Type::BF16x2 ? h_set_packed<BFloat> : nullptr;
      return;
    }
    default: d.unsupported("this destination type");
  }
  i.flags |= kToRegister;
  i.fn = choose(*t, c, ftz);
}

template <class T>
void h_selp(Warp& w, const Ins& i) {
  auto *d = w.slot<T>(i.d), *a = w.slot<T>(i.a), *b = w.slot<T>(i.b);
  const u32 p = w.predicates[i.c];
  for_lanes(w.mask, [&](int l) { d[l] = p >> l & 1 ? a[l] : b[l]; });
}

template <class T, class C, bool kFtz = false>
void h_slct(Warp& w, const Ins& i) {
  auto *d = w.slot<T>(i.d), *a = w.slot<T>(i.a), *b = w.slot<T>(i.b);
  auto* c = w.slot<C>(i.c);
  for_lanes(w.mask, [&](int l) {
    C by = get<C>(c, l);
    if constexpr (kFtz) by = flush(by);
    d[l] = by >= 0 ? a[l] : b[l];
  });
}

}  // namespace

void register_predicate(DecoderTable& table) {
  table.add("setp", decode_setp);
  table.add("set", decode_set);
  table.add("selp", [](Decoder& d, Ins& i) {
    const auto t = d.mods().take_type();
    if (!t) d.unsupported("no type");
    i.d = d.dest(0, bytes_of(*t));
    i.a = d.source(1, *t);
    i.b = d.source(2, *t);
    i.c = d.predicate(3);
    i.fn = bytes_of(*t) == 8 ? h_selp<u64> : h_selp<u32>;
  });
  table.add("slct", [](Decoder& d, Ins& i) {
    const bool ftz = d.mods().take("ftz");
    const auto t = d.mods().take_type(), c = d.mods().take_type();
    if (!t || !c) d.unsupported("types");
    i.d = d.dest(0, bytes_of(*t));
    i.a = d.source(1, *t);
    i.b = d.source(2, *t);
    i.c = d.source(3, *c);
    if (*c == Type::S32) {
      i.fn = bytes_of(*t) == 8 ? h_slct<u64, i32> : h_slct<u32, i32>;
    } else if (*c == Type::F32) {
      if (ftz) i.fn = bytes_of(*t) == 8 ? h_slct<u64, float, true> : h_slct<u32, float, true>;
      else i.fn = bytes_of(*t) == 8 ? h_slct<u64, float> : h_slct<u32, float>;
    }
  });
}

}  // namespace cake::emu
