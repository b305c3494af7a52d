// mbarrier instructions. The object's layout is the emulator's own: programs only pass it to these instructions.
#include "mbarrier.h"

#include "access.h"
#include "decode.h"

namespace cake::emu {
namespace {

constexpr u32 kMostArrivals = (1u << 20) - 1;
constexpr i64 kMostBytes = (1 << 20) - 1;

// Bits: [0,20) arrivals still to come, [20,40) arrivals of a phase, [40,61) bytes still to come (signed), 61 and 62 set
// in every initialised object (and not both in the pattern of fresh shared memory), 63 phase.
struct Mbarrier {
  u32 pending, expected;
  i32 bytes;
  bool valid, phase;

  static Mbarrier load(const u8* p) {
    u64 v;
    std::memcpy(&v, p, 8);
    return {static_cast<u32>(v & 0xfffff), static_cast<u32>(v >> 20 & 0xfffff),
            static_cast<i32>(static_cast<u32>(v >> 40 & 0x1fffff) << 11) >> 11, (v >> 61 & 3) == 3, v >> 63 != 0};
  }
  u64 word() const {
    return static_cast<u64>(pending) | static_cast<u64>(expected) << 20 |
           static_cast<u64>(static_cast<u32>(bytes) & 0x1fffff) << 40 | (valid ? 3ull << 61 : 0) |
           static_cast<u64>(phase) << 63;
  }
  // True when this ended the phase.
  bool store(u8* p) {
    const bool ends = pending == 0 && bytes == 0;
    if (ends) {
      phase = !phase;
      pending = expected;
    }
    const u64 v = word();
    std::memcpy(p, &v, 8);
    return ends;
  }
};

struct Place {
  Cta* cta;
  u32 offset;
  u8* host;
};

Place place_of(Gang& gang, u32 address) {
  const u32 rank = address >> kRankShift, offset = address & (kSharedWindow - 1);
  if (rank >= gang.ctas.size())
    fault("OutOfBounds", "mbarrier at " + hex(address) + ": no CTA of rank " + std::to_string(rank));
  Cta* cta = gang.ctas[rank].get();
  if (offset % 8) fault("Misaligned", "mbarrier at " + hex(address));
  if (offset < kSharedBase || offset + 8 > cta->shared_end) fault("OutOfBounds", "mbarrier at " + hex(address));
  return {cta, offset, cta->shared + offset};
}

std::string state(const Mbarrier& b, u32 address) {
  return "mbarrier " + hex(address) + " (phase " + std::to_string(b.phase) + ", " + std::to_string(b.pending) + " of " +
         std::to_string(b.expected) + " arrivals and " + std::to_string(b.bytes) + " bytes to come)";
}

Mbarrier valid(const Place& p, u32 address, int lane) {
  const Mbarrier b = Mbarrier::load(p.host);
  if (!b.valid) fault("BarrierMisuse", "the bytes at " + hex(address) + " are no initialised mbarrier", lane);
  return b;
}

BarrierUse& use_of(const Place& p) {
  for (auto& use : p.cta->barrier_uses) {
    if (use.offset == p.offset) return use;
  }
  p.cta->barrier_uses.push_back({p.offset});
  return p.cta->barrier_uses.back();
}

void forget_use(const Place& p) {
  std::erase_if(p.cta->barrier_uses, [&](const BarrierUse& use) { return use.offset == p.offset; });
}

void update(const Place& p, Mbarrier b, u32 address, u32 arrivals, i64 bytes, int lane) {
  if (b.pending < arrivals) {
    fault("BarrierMisuse", std::to_string(arrivals) + " arrivals are too many for " + state(b, address), lane);
  }
  if (b.bytes + bytes > kMostBytes || b.bytes + bytes < -kMostBytes) {
    fault("BarrierMisuse", std::to_string(bytes) + " more bytes to come are out of range, at most " + std::to_string(kMostBytes) +
          " are counted: " + state(b, address), lane);
  }
  b.pending -= arrivals;
  b.bytes += static_cast<i32>(bytes);
  if (b.store(p.host)) {
    ++use_of(p).phases;
    if (p.cta->shadow) p.cta->shadow->mbarrier_phase(p.offset);
  }
  ++p.cta->gang->progress;
}

void touch(Warp& w, const Place& p, SharedShadow::Touch how, int lane) {
  if (p.cta->shadow) p.cta->shadow->mbarrier_touch(w, p.offset, how, lane);
}

u32 address_of(const Warp& w, const Ins& i, int lane) {
  if (i.space == Space::Generic) {
    const u64 a = w.lane64(i.a, lane) + static_cast<u64>(i.imm);
    if (!in_arena(w, a))
      fault("OutOfBounds", "mbarrier at generic address " + hex(a) + " is not in shared memory", lane);
    return static_cast<u32>(a - reinterpret_cast<u64>(w.gang->arena));
  }
  const u32 a = w.lane32(i.a, lane) + static_cast<u32>(i.imm);
  if (i.space == Space::Shared && a >> kRankShift != w.cta->rank) {
    fault("OutOfBounds", "mbarrier at " + hex(a) + " is of another CTA: .shared::cluster is needed", lane);
  }
  return a;
}

void h_init(Warp& w, const Ins& i) {
  each_lane(w.mask, [&](int l) {
    const u32 address = address_of(w, i, l), count = w.lane32(i.b, l);
    const Place p = place_of(*w.gang, address);
    if (count == 0 || count > kMostArrivals)
      fault("BarrierMisuse", "count " + std::to_string(count) + " of an mbarrier", l);
    // One that is in use must be invalidated first.
    if (p.cta->shadow && p.cta->shadow->is_mbarrier(p.offset)) {
      fault("BarrierMisuse", state(Mbarrier::load(p.host), address) + " is initialised again without mbarrier.inval",
            l);
    }
    if (p.cta->shadow) p.cta->shadow->mbarrier_init(w, p.offset, l);
    const u64 v = Mbarrier{count, count, 0, true, false}.word();
    std::memcpy(p.host, &v, 8);
    forget_use(p);
  });
  ++w.gang->progress;
}

void h_inval(Warp& w, const Ins& i) {
  each_lane(w.mask, [&](int l) {
    const u32 address = address_of(w, i, l);
    const Place p = place_of(*w.gang, address);
    valid(p, address, l);
    const BarrierUse& use = use_of(p);
    if (use.counted > use.waited) {
      throw Fault{"AsyncInFlight", "nobody has waited for phase " + std::to_string((use.counted - 1) & 1) + " of mbarrier " + hex(address) +
                  ", which counts this copy, and the mbarrier is invalidated at " + place_text(*w.gang->launch, w.pc), -1, use.issuer, use.pc};
    }
    if (p.cta->shadow) p.cta->shadow->mbarrier_inval(w, p.offset, l);
    std::memset(p.host, 0xcd, 8);
    forget_use(p);
  });
}

constexpr u32 kExpect = 1, kDrop = 2, kReturns = 4, kCount = 8, kNoComplete = 16, kRelaxed = 32;

void h_arrive(Warp& w, const Ins& i) {
  each_lane(w.mask, [&](int l) {
    const u32 address = address_of(w, i, l);
    const Place p = place_of(*w.gang, address);
    if (p.cta->done)
      fault("OutOfBounds", "mbarrier of CTA rank " + std::to_string(p.cta->rank) + ", which has exited", l);
    Mbarrier b = valid(p, address, l);
    touch(w, p, SharedShadow::Touch::Counts, l);
    const u32 count = i.flags & kCount ? w.lane32(i.b, l) : 1;
    const i64 bytes = i.flags & kExpect ? w.lane32(i.c, l) : 0;
    if (count == 0) fault("BarrierMisuse", "an arrival with count 0", l);
    if (i.flags & kReturns) w.set64(i.d, l, b.word());
    if (i.flags & kDrop) {
      if (count > b.expected) fault("BarrierMisuse", std::to_string(count) + " participants drop out of " + state(b, address), l);
      b.expected -= count;  // perhaps to none: the phase under way is the last
    }
    if (i.flags & kNoComplete && b.pending <= count && b.bytes + bytes == 0) {
      fault("BarrierMisuse", "arrive.noComplete would end the phase of " + state(b, address), l);
    }
    if (p.cta->shadow) p.cta->shadow->mbarrier_arrive(w, 1u << l, p.offset, i.flags & kRelaxed);
    update(p, b, address, count, bytes, l);
  });
  told_others(w);
}

void h_expect_tx(Warp& w, const Ins& i) {
  each_lane(w.mask, [&](int l) {
    const u32 address = address_of(w, i, l);
    const Place p = place_of(*w.gang, address);
    const Mbarrier b = valid(p, address, l);
    touch(w, p, SharedShadow::Touch::Counts, l);
    update(p, b, address, 0, static_cast<i64>(w.lane32(i.c, l)) * (i.flags & kDrop ? -1 : 1), l);
  });
}

constexpr u32 kParity = 1, kTry = 2, kRelaxedWait = 4;

bool waited_phase(const Warp& w, const Ins& i, int lane) {
  return i.flags & kParity ? (w.lane32(i.b, lane) & 1) != 0 : w.lane64(i.b, lane) >> 63 != 0;
}

void h_wait(Warp& w, const Ins& i) {
  u32 done = 0;
  each_lane(w.mask, [&](int l) {
    const u32 address = address_of(w, i, l);
    const Place p = place_of(*w.gang, address);
    const Mbarrier b = valid(p, address, l);
    touch(w, p, SharedShadow::Touch::Waits, l);
    if (b.phase != waited_phase(w, i, l)) {
      done |= 1u << l;
      BarrierUse& use = use_of(p);
      use.waited = use.phases;
      if (p.cta->shadow) p.cta->shadow->mbarrier_acquire(w, 1u << l, p.offset, i.flags & kRelaxedWait);
    }
  });
  w.set_predicate(i.d, done);
  if (done != w.mask) w.signal = Signal::Yield;
  else told_others(w);
}

void h_pending_count(Warp& w, const Ins& i) {
  map1<u32, u64>(w, i, [](u64 v) { return static_cast<u32>(v & 0xfffff); });
}

// What the instructions share: semantics, scope, space, type.
Space take_common(Decoder& d, bool& relaxed) {
  Modifiers& m = d.mods();
  relaxed = m.take_one({"relaxed", "release", "acquire"}) == 0;
  m.take_one({"cta", "cluster"});
  const Space space = d.take_space(Space::Generic);
  m.take("b64");
  return space;
}

void decode_arrive(Decoder& d, Ins& i) {
  Modifiers& m = d.mods();
  if (m.take("expect_tx")) i.flags |= kExpect;
  if (m.take("noComplete")) i.flags |= kNoComplete;
  bool relaxed = false;
  const Space space = take_common(d, relaxed);
  if (relaxed) i.flags |= kRelaxed;
  size_t k = 0;
  // The destination may be left out for another CTA's barrier.
  if (d.op(0).kind != Operand::Address) {
    if (!d.is_sink(d.op(0))) {
      if (space == Space::Cluster) d.syntax("an arrival on another CTA's mbarrier returns no state");
      i.flags |= kReturns;
      i.d = d.dest(0, 8);
    }
    k = 1;
  }
  d.address(k++, space, i);
  if (i.flags & kExpect) {
    i.c = d.source(k++, 4u);
  } else if (k < d.count()) {
    i.flags |= kCount;
    i.b = d.source(k++, 4u);
  }
  i.fn = h_arrive;
}

void decode_mbarrier(Decoder& d, Ins& i) {
  Modifiers& m = d.mods();
  bool relaxed = false;
  // These end wait loops of other parts of a warp: a part may be kept waiting while another goes on.
  switch (m.take_one({"init", "inval", "arrive", "arrive_drop", "test_wait", "try_wait", "expect_tx", "complete_tx",
                      "pending_count"})) {
    case 0:
      d.address(0, take_common(d, relaxed), i);
      i.b = d.source(1, 4u);
      i.fn = h_init;
      break;
    case 1:
      d.address(0, take_common(d, relaxed), i);
      i.fn = h_inval;
      break;
    case 3: i.flags |= kDrop; [[fallthrough]];
    case 2: decode_arrive(d, i); break;
    case 5: i.flags |= kTry; [[fallthrough]];
    case 4: {
      const bool parity = m.take("parity");
      const Space space = take_common(d, relaxed);
      i.flags |= (parity ? kParity : 0) | (relaxed ? kRelaxedWait : 0);
      i.d = d.predicate_dest(d.op(0));
      d.address(1, space, i);
      i.b = parity ? d.source(2, 4u) : d.source(2, 8u);
      i.fn = h_wait;  // a time limit as a further operand changes nothing here
      break;
    }
    case 7: i.flags |= kDrop; [[fallthrough]];
    case 6:
      d.address(0, take_common(d, relaxed), i);
      i.c = d.source(1, 4u);
      i.fn = h_expect_tx;
      break;
    case 8:
      m.take("b64");
      i.d = d.dest(0, 4);
      i.a = d.source(1, 8u);
      i.fn = h_pending_count;
      break;
    default: d.unsupported("form");
  }
}

}  // namespace

namespace {

// The phase under way tells of copies: somebody has to wait for it.
void count_copies(const Gang& gang, const Place& p) {
  BarrierUse& use = use_of(p);
  use.counted = use.phases + 1;
  use.issuer = gang.async_issuer;
  use.pc = gang.async_pc;
}

}  // namespace

void mbarrier_issue(Warp& w, u32 address, int lane) {
  const Place p = place_of(*w.gang, address);
  valid(p, address, lane);
  touch(w, p, SharedShadow::Touch::Issues, lane);
}

void mbarrier_complete_tx(Gang& gang, u32 address, u32 bytes) {
  const Place p = place_of(gang, address);
  const Mbarrier b = valid(p, address, -1);
  count_copies(gang, p);
  if (p.cta->shadow) p.cta->shadow->mbarrier_signal(p.offset, gang.async_pc, nullptr);
  update(p, b, address, 0, -static_cast<i64>(bytes), -1);
}

std::string mbarrier_waiting(const Warp& w, const Ins& i, u32 lanes) {
  if (i.fn != h_wait || !lanes) return "";
  std::string text;
  u32 shown = ~0u;
  each_lane(lanes, [&](int l) {
    const u32 address = address_of(w, i, l);
    if (address == shown) return;
    shown = address;
    const Place p = place_of(*w.gang, address);
    const Mbarrier b = Mbarrier::load(p.host);
    text += "; " + (b.valid ? state(b, address) : "mbarrier " + hex(address) + " (not initialised)") + ", waits for the end of phase " +
            std::to_string(waited_phase(w, i, l));
  });
  return text;
}

void mbarrier_arrive(Gang& gang, u32 address, u32 count, const Knowledge& told, bool for_copies) {
  const Place p = place_of(gang, address);
  if (for_copies) count_copies(gang, p);
  if (p.cta->shadow) p.cta->shadow->mbarrier_signal(p.offset, gang.async_pc, &told);
  update(p, valid(p, address, -1), address, count, 0, -1);
}

void mbarrier_expect_arrival(Gang& gang, u32 address) {
  const Place p = place_of(gang, address);
  Mbarrier b = valid(p, address, -1);
  ++b.pending;
  b.store(p.host);
}

void register_mbarrier(DecoderTable& table) { table.add("mbarrier", decode_mbarrier); }

}  // namespace cake::emu
