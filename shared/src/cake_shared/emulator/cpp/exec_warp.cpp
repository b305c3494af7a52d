// What lanes of a warp exchange: shuffles, votes, matches, reductions, elections.
#include "access.h"
#include "decode.h"

namespace cake::emu {
namespace {

enum Shuffle : int { kUp, kDown, kBfly, kIdx };

[[noreturn]] void not_a_source(const Warp& w, u32 members, int lane, int from) {
  const std::string why = !(members >> from & 1)   ? "is not in its member mask " + hex(members)
                          : w.alive >> from & 1 ? "does not execute this"
                                                : "has exited";
  fault("IllegalInstruction", "lane " + std::to_string(lane) + " reads lane " + std::to_string(from) + ", which " + why, lane);
}

template <int kMode>
void h_shfl(Warp& w, const Ins& i) {
  auto *d = w.slot<u32>(i.d), *b = w.slot<u32>(i.b), *c = w.slot<u32>(i.c);
  const u32* members = w.slot<u32>(i.sync_mask);
  u32 values[kLanes];
  std::memcpy(values, w.slot<u32>(i.a), sizeof values);
  u32 valid = 0;
  each_lane(w.mask, [&](int l) {
    const u32 lane = static_cast<u32>(l), amount = b[l] & 31, clamp = c[l] & 31, segment = c[l] >> 8 & 31;
    const u32 highest = (lane & segment) | (clamp & ~segment), lowest = lane & segment;
    i32 from;
    bool ok;
    switch (kMode) {
      case kUp:
        from = static_cast<i32>(lane - amount);
        ok = from >= static_cast<i32>(highest);
        break;
      case kDown:
        from = static_cast<i32>(lane + amount);
        ok = from <= static_cast<i32>(highest);
        break;
      case kBfly:
        from = static_cast<i32>(lane ^ amount);
        ok = from <= static_cast<i32>(highest);
        break;
      default: from = static_cast<i32>(lowest | (amount & ~segment)); ok = from <= static_cast<i32>(highest);
    }
    if (!ok) from = l;
    if (!(members[l] & w.mask & 1u << (from & 31))) not_a_source(w, members[l], l, from & 31);
    d[l] = values[from & 31];
    valid |= u32(ok) << l;
  });
  if (i.flags) w.set_predicate(i.e, valid);
}

// Lanes that share a member mask form a group; groups of one warp may differ.
template <class F>
void for_groups(Warp& w, const Ins& i, F f) {
  for (u32 left = w.mask; left;) {
    const u32 members = w.lane32(i.sync_mask, first_lane(left)) & w.mask;
    const u32 group = members ? members : 1u << first_lane(left);
    f(group);
    left &= ~group;
  }
}

enum Vote : u32 { kAll, kAny, kUni, kBallot };
void h_vote(Warp& w, const Ins& i) {
  const u32 p = w.predicates[i.a];
  u32 result = 0;
  for_groups(w, i, [&](u32 group) {
    const u32 yes = p & group;
    const bool t = i.flags == kAll ? yes == group : i.flags == kAny ? yes != 0 : yes == group || yes == 0;
    if (i.flags == kBallot) each_lane(group, [&](int l) { w.set32(i.d, l, yes); });
    if (t) result |= group;
  });
  if (i.flags != kBallot) w.set_predicate(i.d, result);
}

template <class T>
void h_match(Warp& w, const Ins& i) {
  u32 all_equal = 0;
  auto* a = w.slot<T>(i.a);
  T values[kLanes];
  for (int l = 0; l < kLanes; ++l) values[l] = get<T>(a, l);
  for_groups(w, i, [&](u32 group) {
    const T first = values[first_lane(group)];
    bool equal = true;
    each_lane(group, [&](int l) { equal = equal && values[l] == first; });
    each_lane(group, [&](int l) {
      u32 same = 0;
      each_lane(group, [&](int k) { same |= u32(values[k] == values[l]) << k; });
      w.set32(i.d, l, i.flags ? (equal ? group : 0) : same);
    });
    if (equal) all_equal |= group;
  });
  if (i.flags) w.set_predicate(i.e, all_equal);
}

enum Redux : u32 { kAdd, kMin, kMax, kAnd, kOr, kXor };

// Minimum or maximum of two numbers, or of a number and a NaN, in any order the same; -0 is below +0.
float least_or_most(u32 op, bool keeps_nan, float a, float b) {
  const float canonical_nan = std::bit_cast<float>(0x7fffffffu);
  if (a != a || b != b) return keeps_nan || (a != a && b != b) ? canonical_nan : a != a ? b : a;
  if (a == b) {
    const u32 x = std::bit_cast<u32>(a), y = std::bit_cast<u32>(b);
    return std::bit_cast<float>(op == kMin ? x | y : x & y);
  }
  return op == kMin ? std::min(a, b) : std::max(a, b);
}

template <class T>
void h_redux(Warp& w, const Ins& i) {
  auto* a = w.slot<T>(i.a);
  T values[kLanes];
  for (int l = 0; l < kLanes; ++l) {
    values[l] = get<T>(a, l);
    if constexpr (std::is_floating_point_v<T>) {
      if (i.flags >> 5 & 1) values[l] = std::bit_cast<T>(std::bit_cast<u32>(values[l]) & 0x7fffffffu);
    }
  }
  for_groups(w, i, [&](u32 group) {
    T r = values[first_lane(group)];
    if constexpr (std::is_floating_point_v<T>) r = least_or_most(i.flags & 15, i.flags >> 4 & 1, r, r);
    each_lane(group & (group - 1), [&](int l) {
      const T v = values[l];
      if constexpr (std::is_floating_point_v<T>) {
        r = least_or_most(i.flags & 15, i.flags >> 4 & 1, r, v);
      } else {
        switch (i.flags & 15) {
          case kAdd: r = T(u32(r) + u32(v)); break;
          case kMin: r = std::min(r, v); break;
          case kMax: r = std::max(r, v); break;
          case kAnd: r &= v; break;
          case kOr: r |= v; break;
          default: r ^= v;
        }
      }
    });
    each_lane(group, [&](int l) { put<T>(w.slot<T>(i.d), l, r); });
  });
}

void h_activemask(Warp& w, const Ins& i) {
  const u32 mask = w.mask;
  each_lane(mask, [&](int l) { w.set32(i.d, l, mask); });
}

void h_elect(Warp& w, const Ins& i) {
  u32 chosen = 0;
  for_groups(w, i, [&](u32 group) {
    const int leader = first_lane(group);
    chosen |= 1u << leader;
    if (i.flags) each_lane(group, [&](int l) { w.set32(i.d, l, static_cast<u32>(leader)); });
  });
  w.set_predicate(i.e, chosen);
}

void member_mask(Decoder& d, Ins& i, const Operand& o) {
  i.kind = Kind::Sync;
  i.sync = Sync::Mask;
  i.sync_mask = d.source(o, 4u);
}

void decode_shfl(Decoder& d, Ins& i) {
  if (!d.mods().take("sync")) d.unsupported("without .sync");
  const int mode = d.mods().take_one({"up", "down", "bfly", "idx"});
  d.mods().take("b32");
  const Operand& out = d.op(0);
  if (out.kind == Operand::Pair) {
    i.d = d.dest(out.items[0], 4);
    i.e = d.predicate_dest(out.items[1]);
    i.flags = 1;
  } else {
    i.d = d.dest(out, 4);
  }
  i.a = d.source(1, 4u);
  i.b = d.source(2, 4u);
  i.c = d.source(3, 4u);
  member_mask(d, i, d.op(4));
  constexpr Handler kHandlers[] = {h_shfl<kUp>, h_shfl<kDown>, h_shfl<kBfly>, h_shfl<kIdx>};
  i.fn = mode < 0 ? nullptr : kHandlers[mode];
}

}  // namespace

void register_warp(DecoderTable& table) {
  table.add("shfl", decode_shfl);
  table.add("vote", [](Decoder& d, Ins& i) {
    if (!d.mods().take("sync")) d.unsupported("without .sync");
    const int mode = d.mods().take_one({"all", "any", "uni", "ballot"});
    d.mods().take_one({"pred", "b32"});
    if (mode < 0) d.unsupported("mode");
    i.flags = static_cast<u32>(mode);
    i.d = mode == kBallot ? d.dest(0, 4) : d.predicate_dest(d.op(0));
    i.a = d.predicate(1);
    member_mask(d, i, d.op(2));
    i.fn = h_vote;
  });
  table.add("match", [](Decoder& d, Ins& i) {
    const int mode = d.mods().take_one({"any", "all"});
    if (mode < 0 || !d.mods().take("sync")) d.unsupported("mode");
    const auto t = d.mods().take_type();
    const Operand& out = d.op(0);
    i.flags = static_cast<u32>(mode);
    if (out.kind == Operand::Pair) {
      i.d = d.dest(out.items[0], 4);
      i.e = d.predicate_dest(out.items[1]);
    } else {
      i.d = d.dest(out, 4);
    }
    i.a = d.source(1, bytes_of(*t));
    member_mask(d, i, d.op(2));
    i.fn = bytes_of(*t) == 8 ? h_match<u64> : h_match<u32>;
  });
  table.add("redux", [](Decoder& d, Ins& i) {
    if (!d.mods().take("sync")) d.unsupported("without .sync");
    const int op = d.mods().take_one({"add", "min", "max", "and", "or", "xor"});
    const bool abs = d.mods().take("abs"), nan = d.mods().take("NaN");
    const auto t = d.mods().take_type();
    if (op < 0 || !t) d.unsupported("operation");
    i.flags = static_cast<u32>(op) | (nan ? 16u : 0u) | (abs ? 32u : 0u);
    i.d = d.dest(0, 4);
    i.a = d.source(1, 4u);
    member_mask(d, i, d.op(2));
    i.fn = *t == Type::S32 ? h_redux<i32> : *t == Type::F32 ? h_redux<float> : h_redux<u32>;
  });
  table.add("activemask", [](Decoder& d, Ins& i) {
    d.mods().take("b32");
    i.d = d.dest(0, 4);
    i.fn = h_activemask;
  });
  table.add("elect", [](Decoder& d, Ins& i) {
    if (!d.mods().take("sync")) d.unsupported("without .sync");
    const Operand& out = d.op(0);
    if (out.kind != Operand::Pair) d.syntax("a destination pair d|p is expected");
    i.flags = !d.is_sink(out.items[0]);
    if (i.flags) i.d = d.dest(out.items[0], 4);
    i.e = d.predicate_dest(out.items[1]);
    member_mask(d, i, d.op(1));
    i.fn = h_elect;
  });
}

}  // namespace cake::emu
