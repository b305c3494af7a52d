// mov, address conversions, thread-local copies, and the small handlers that the decoder inserts.
#include "access.h"
#include "decode.h"
#include "handlers.h"

namespace cake::emu {

void h_narrow(Warp& w, const Ins& i) { map1<u32, u64>(w, i, [](u64 a) { return static_cast<u32>(a); }); }
void h_widen_unsigned(Warp& w, const Ins& i) { map1<u64, u32>(w, i, [](u32 a) { return static_cast<u64>(a); }); }
void h_widen_signed(Warp& w, const Ins& i) { map1<i64, i32>(w, i, [](i32 a) { return static_cast<i64>(a); }); }
void h_not_predicate(Warp& w, const Ins& i) { w.set_predicate(i.d, ~w.predicates[i.a]); }
void h_set_predicate(Warp& w, const Ins& i) { w.set_predicate(i.d, i.imm ? kFull : 0); }

void h_clock(Warp& w, const Ins& i) {
  // Time is the number of instructions that the gang has executed: monotonic and the same in every run.
  const u64 now = w.gang->executed + ++w.gang->stats->thread_instructions;
  each_lane(w.mask, [&](int l) {
    if (i.width == 8) w.set64(i.d, l, now); else w.set32(i.d, l, static_cast<u32>(now));
  });
}

void h_copy_local(Warp& w, const Ins& i) {
  each_lane(w.mask, [&](int l) {
    u8* base = w.local + static_cast<u64>(l) * w.local_bytes;
    std::memmove(base + i.d, base + i.a, static_cast<size_t>(i.imm));
  });
}

namespace {

template <class T> void h_mov(Warp& w, const Ins& i) { map1<T, T>(w, i, [](T a) { return a; }); }
void h_mov_predicate(Warp& w, const Ins& i) { w.set_predicate(i.d, w.predicates[i.a]); }
void h_mov128(Warp& w, const Ins& i) {
  each_lane(w.mask, [&](int l) {
    const u64 low = w.lane64(i.a, l), high = w.lane64(i.a + 8 * kLanes, l);
    w.set64(i.d, l, low);
    w.set64(i.d + 8 * kLanes, l, high);
  });
}

// mov.bN between one register and a vector of parts.
void h_pack(Warp& w, const Ins& i) {
  const u32* parts = w.gang->launch->program->operands.data() + i.list;
  const u32 bits = i.width * 8u;
  each_lane(w.mask, [&](int l) {
    u64 r = 0;
    for (u32 k = 0; k < i.n; ++k) {
      const u64 part = i.width == 8 ? w.lane64(parts[k], l) : w.lane32(parts[k], l) & ((1ull << bits) - 1);
      r |= part << bits * k;
    }
    if (i.flags == 8) w.set64(i.d, l, r); else w.set32(i.d, l, static_cast<u32>(r));
  });
}
void h_unpack(Warp& w, const Ins& i) {
  const u32* parts = w.gang->launch->program->operands.data() + i.list;
  const u32 bits = i.width * 8u;
  each_lane(w.mask, [&](int l) {
    const u64 v = i.flags == 8 ? w.lane64(i.a, l) : w.lane32(i.a, l);
    for (u32 k = 0; k < i.n; ++k) w.set32(parts[k], l, static_cast<u32>(v >> bits * k & ((1ull << bits) - 1)));
  });
}
template <bool kPack>
void h_move_parts128(Warp& w, const Ins& i) {
  const u32* parts = w.gang->launch->program->operands.data() + i.list;
  each_lane(w.mask, [&](int l) {
    for (u32 k = 0; k < i.n; ++k) {
      const u32 plane = i.width == 8 ? k * 8 * kLanes : k / 2 * 8 * kLanes;
      if (i.width == 8) {
        if (kPack) w.set64(i.d + plane, l, w.lane64(parts[k], l)); else w.set64(parts[k], l, w.lane64(i.a + plane, l));
      } else if (kPack) {
        u64 word = w.lane64(i.d + plane, l);
        std::memcpy(reinterpret_cast<u8*>(&word) + 4 * (k & 1), &reinterpret_cast<const u32*>(w.registers + parts[k])[l], 4);
        w.set64(i.d + plane, l, word);
      } else {
        w.set32(parts[k], l, static_cast<u32>(w.lane64(i.a + plane, l) >> 32 * (k & 1)));
      }
    }
  });
}

void decode_mov(Decoder& d, Ins& i) {
  const auto t = d.mods().take_type();
  if (!t) d.unsupported("no type");
  const Operand &to = d.op(0), &from = d.op(1);
  if (*t == Type::Pred) {
    i.d = d.predicate_dest(to);
    i.a = d.predicate(from);
    i.fn = h_mov_predicate;
    return;
  }
  const u32 bytes = bytes_of(*t);
  const bool packs = from.kind == Operand::Vector, unpacks = to.kind == Operand::Vector;
  if (packs || unpacks) {
    const size_t parts = (packs ? from : to).items.size();
    i.width = static_cast<u8>(bytes / parts);
    i.flags = bytes;
    d.list(packs ? from : to, i.width, unpacks, i);
    if (packs) i.d = d.dest(to, bytes); else i.a = d.source(from, bytes);
    if (bytes == 16) {
      i.fn = packs ? h_move_parts128<true> : h_move_parts128<false>;
    } else {
      i.fn = packs ? h_pack : h_unpack;
    }
    return;
  }
  i.d = d.dest(to, bytes);
  i.a = d.source(from, *t);
  i.fn = bytes == 16 ? h_mov128 : bytes == 8 ? h_mov<u64> : h_mov<u32>;
}

// Generic addresses of shared memory point into the gang's arena, those of local memory at the lane's own bytes.
template <bool kToGeneric>
void h_cvta_shared(Warp& w, const Ins& i) {
  const u64 base = reinterpret_cast<u64>(w.gang->arena);
  each_lane(w.mask, [&](int l) {
    const u64 a = w.lane64(i.a, l);
    w.set64(i.d, l, kToGeneric ? a + base : static_cast<u32>(a - base));
  });
}
template <bool kToGeneric>
void h_cvta_local(Warp& w, const Ins& i) {
  each_lane(w.mask, [&](int l) {
    const u64 base = reinterpret_cast<u64>(w.local) + static_cast<u64>(l) * w.local_bytes;
    w.set64(i.d, l, kToGeneric ? w.lane64(i.a, l) + base : w.lane64(i.a, l) - base);
  });
}

template <bool kToGeneric>
void h_cvta_param(Warp& w, const Ins& i) {
  const u64 base = reinterpret_cast<u64>(w.gang->launch->param_data);
  map1<u64, u64>(w, i, [base](u64 a) { return kToGeneric ? a + base : a - base; });
}

void decode_cvta(Decoder& d, Ins& i) {
  const bool to = d.mods().take("to");
  const Space space = d.take_space(Space::Generic);
  const auto t = d.mods().take_type();
  if (!t || bytes_of(*t) != 8) d.unsupported("only 64-bit addresses");
  i.d = d.dest(0, 8);
  const Operand& from = d.op(1);
  i.a = d.source(from, 8u);
  switch (space) {
    case Space::Global: case Space::Const: i.fn = h_mov<u64>; break;
    case Space::Param: i.fn = to ? h_cvta_param<false> : h_cvta_param<true>; break;
    case Space::Shared: case Space::Cluster: i.fn = to ? h_cvta_shared<false> : h_cvta_shared<true>; break;
    case Space::Local: i.fn = to ? h_cvta_local<false> : h_cvta_local<true>; break;
    default: d.unsupported("no state space");
  }
}

void h_isspacep(Warp& w, const Ins& i) {
  u32 r = 0;
  each_lane(w.mask, [&](int l) {
    const u64 a = w.lane64(i.a, l);
    const bool shared = in_arena(w, a);
    const u64 rank = (a - reinterpret_cast<u64>(w.gang->arena)) >> kRankShift;
    const bool local = a - reinterpret_cast<u64>(w.local) < static_cast<u64>(w.local_bytes) * kLanes;
    const u64 params = reinterpret_cast<u64>(w.gang->launch->param_data);
    const bool param = a - params < w.gang->launch->params.size();
    bool t = false;
    switch (i.space) {
      case Space::Shared: t = shared && rank == w.cta->rank; break;
      case Space::Cluster: t = shared; break;
      case Space::Local: t = local; break;
      case Space::Param: t = param; break;
      case Space::Global: t = !shared && !local && !param; break;
      default: break;
    }
    r |= u32(t) << l;
  });
  w.set_predicate(i.d, r);
}

// mapa: the same variable in the CTA of another rank.
template <bool kShared>
void h_mapa(Warp& w, const Ins& i) {
  const u64 arena = kShared ? 0 : reinterpret_cast<u64>(w.gang->arena);
  each_lane(w.mask, [&](int l) {
    const u64 a = i.flags == 8 ? w.lane64(i.a, l) : w.lane32(i.a, l);
    const u32 rank = w.lane32(i.b, l);
    if (rank >= w.gang->ctas.size()) fault("OutOfBounds", "rank " + std::to_string(rank) + " in a cluster of " + std::to_string(w.gang->ctas.size()), l);
    const u64 r = arena + (((a - arena) & (kSharedWindow - 1)) | static_cast<u64>(rank) << kRankShift);
    if (i.flags == 8) w.set64(i.d, l, r); else w.set32(i.d, l, static_cast<u32>(r));
  });
}
template <bool kShared>
void h_getctarank(Warp& w, const Ins& i) {
  const u64 arena = kShared ? 0 : reinterpret_cast<u64>(w.gang->arena);
  each_lane(w.mask, [&](int l) {
    const u64 a = i.flags == 8 ? w.lane64(i.a, l) : w.lane32(i.a, l);
    w.set32(i.d, l, static_cast<u32>((a - arena) >> kRankShift));
  });
}

}  // namespace

void register_move(DecoderTable& table) {
  table.add("mov", decode_mov);
  table.add("cvta", decode_cvta);
  table.add("isspacep", [](Decoder& d, Ins& i) {
    const Space space = d.take_space(Space::Generic);
    i.d = d.predicate_dest(d.op(0));
    i.a = d.source(1, 8u);
    i.space = space;
    i.fn = space == Space::Generic ? nullptr : h_isspacep;
  });
  table.add("mapa", [](Decoder& d, Ins& i) {
    const bool shared = d.mods().take("shared::cluster");
    const auto t = d.mods().take_type();
    if (!t) d.unsupported("no type");
    i.flags = bytes_of(*t);
    i.d = d.dest(0, i.flags);
    i.a = d.source(1, i.flags);
    i.b = d.source(2, 4u);
    i.fn = shared ? h_mapa<true> : h_mapa<false>;
  });
  table.add("getctarank", [](Decoder& d, Ins& i) {
    const bool shared = d.mods().take("shared::cluster");
    const auto t = d.mods().take_type();
    if (!t) d.unsupported("no type");
    i.flags = bytes_of(*t);
    i.d = d.dest(0, 4);
    i.a = d.source(1, i.flags);
    i.fn = shared ? h_getctarank<true> : h_getctarank<false>;
  });
}

}  // namespace cake::emu
