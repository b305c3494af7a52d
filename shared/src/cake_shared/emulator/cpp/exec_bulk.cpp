#include "bulk.h"

#include "access.h"
#include "mbarrier.h"
#include "reduce.h"

namespace cake::emu {
namespace {

enum Direction : u32 { kGlobalToShared = 0, kSharedToShared = 1, kSharedToGlobal = 2 };
constexpr u32 kMulticast = 4, kReduce = 8;

struct Transfer {
  u32 direction;
  u32 bytes;
  u64 global;
  u32 shared;       // source of a store; of a copy between CTAs
  u32 destination;  // shared destination with rank bits
  u32 barrier;
  u16 multicast;
  u32 reduction;  // ReduceOp | type << 8, for cp.reduce
};

// Host address of a shared range with rank bits; faults when it is outside.
u8* shared_range(Warp& w, u32 address, u32 bytes, Rw rw, int lane) {
  Cta& cta = shared_owner(w, address, bytes, rw, lane, true);
  return cta.shared + (address & (kSharedWindow - 1));
}

void check(const char* what, u64 value, u64 to, int lane) {
  if (value % to)
    fault("Misaligned",
          std::string(what) + " " + hex(value) + " of a bulk copy is no multiple of " + std::to_string(to), lane);
}

// The CTAs that receive the data: the one that the destination names, or those of the mask at the same offset.
template <class F>
void receivers(Gang& gang, const Transfer& t, u32 flags, F f) {
  if (!(flags & kMulticast)) return f(t.destination, t.barrier);
  for (u32 rank = 0; rank < gang.ctas.size(); ++rank) {
    if (!(t.multicast >> rank & 1)) continue;
    f((t.destination & (kSharedWindow - 1)) | rank << kRankShift,
      (t.barrier & (kSharedWindow - 1)) | rank << kRankShift);
  }
}

void perform(Warp& w, const Transfer& t, u32 flags, int lane) {
  Gang& gang = *w.gang;
  if (t.direction == kSharedToGlobal) {
    u8* to = global_at(w, t.global, t.bytes, flags & kReduce ? Rw::Atomic : Rw::Write, lane);
    const u8* from = shared_range(w, t.shared, t.bytes, Rw::Read, lane);
    if (flags & kReduce) reduce_bytes(to, from, t.bytes, t.reduction);
    else std::memcpy(to, from, t.bytes);
    return;
  }
  const u8* from = t.direction == kGlobalToShared ? global_at(w, t.global, t.bytes, Rw::Read, lane)
                                                  : shared_range(w, t.shared, t.bytes, Rw::Read, lane);
  receivers(gang, t, flags, [&](u32 destination, u32 barrier) {
    u8* to = shared_range(w, destination, t.bytes, Rw::Write, lane);
    if (flags & kReduce) reduce_bytes(to, from, t.bytes, t.reduction);
    else std::memcpy(to, from, t.bytes);
    Cta& cta = *gang.ctas[destination >> kRankShift];
    if (cta.shadow) cta.shadow->async_arrived(destination & (kSharedWindow - 1), t.bytes, barrier);
    mbarrier_complete_tx(gang, barrier, t.bytes);
  });
}

// The source counts as read until the wait that covers the copy: of its group, or of the mbarrier that counts its bytes.
u32 note_source(Warp& w, Cta& cta, const Transfer& t) {
  Clocks& clocks = w.gang->clocks;
  u32 actor = clocks.bulk_actor(cta.shadow->id(w)), clock = 0;
  if (t.direction == kSharedToGlobal) {
    clock = clocks.issue(actor);
  } else {
    const Cta& owner = shared_owner(w, t.barrier, 8, Rw::Atomic, -1, true);
    if (!owner.shadow->mbarrier_clock(t.barrier & (kSharedWindow - 1), actor, clock)) return 0;
  }
  SharedShadow::Reader by{actor, clock};
  cta.shadow->async_read(w, t.shared & (kSharedWindow - 1), t.bytes, by);
  if (t.direction == kSharedToShared) cta.shadow->sends(by, w.pc);
  return clock;
}

void h_bulk(Warp& w, const Ins& i) {
  const u32* extra = w.gang->launch->program->operands.data() + i.list;  // slots and offsets, see the decoder
  each_lane(w.mask, [&](int l) {
    Transfer t{};
    t.direction = i.flags & 3;
    t.bytes = w.lane32(i.c, l);
    const i64 second_offset = static_cast<i32>(extra[1]), barrier_offset = static_cast<i32>(extra[2]);
    if (t.direction == kSharedToGlobal) {
      t.global = w.lane64(i.a, l) + static_cast<u64>(i.imm);
      t.shared = w.lane32(i.b, l) + static_cast<u32>(second_offset);
      t.reduction = extra[3];
    } else {
      t.destination = w.lane32(i.a, l) + static_cast<u32>(i.imm);
      t.barrier = w.lane32(i.e, l) + static_cast<u32>(barrier_offset);
      if (t.direction == kGlobalToShared) {
        t.global = w.lane64(i.b, l) + static_cast<u64>(second_offset);
      } else {
        t.shared = w.lane32(i.b, l) + static_cast<u32>(second_offset);
      }
      t.reduction = extra[3];
      if (i.flags & kMulticast) t.multicast = static_cast<u16>(w.lane32(extra[0], l));
    }
    check("size", t.bytes, 16, l);
    if (t.direction != kSharedToShared) check("global address", t.global, 16, l);
    if (t.direction != kGlobalToShared) check("shared address", t.shared, 16, l);
    if (t.direction != kSharedToGlobal) check("shared address", t.destination, 16, l);
    // The range is checked now, where the fault has a place; the data move later.
    u32 clock = 0;
    if (t.direction == kSharedToGlobal) {
      const int k = w.gang->launch->registry.find(t.global, t.bytes);
      if (k < 0) global_fault(w, t.global, t.bytes, Rw::Write, l);
      if (w.gang->launch->record) overlap_access(w, k, t.global, t.bytes, i.flags & kReduce ? Rw::Atomic : Rw::Write, l, true);
    } else if (t.direction == kGlobalToShared) {
      const int k = w.gang->launch->registry.find(t.global, t.bytes);
      if (k < 0) global_fault(w, t.global, t.bytes, Rw::Read, l);
      if (w.gang->launch->record) overlap_access(w, k, t.global, t.bytes, Rw::Read, l, true);
      const Allocation& a = w.gang->launch->registry[k];
      if (a.written) check_written(a, t.global, t.bytes, l);
    }
    if (t.direction != kGlobalToShared) {
      Cta& cta = shared_owner(w, t.shared, t.bytes, Rw::Read, l, false);
      if (cta.shadow) clock = note_source(w, cta, t);
    }
    if (t.direction != kSharedToGlobal) {
      receivers(*w.gang, t, i.flags, [&](u32 destination, u32 barrier) {
        Cta& cta = shared_owner(w, destination, t.bytes, Rw::Write, l, true);
        mbarrier_issue(w, barrier, l);
        if (cta.shadow)
          cta.shadow->async_write(w, destination & (kSharedWindow - 1), t.bytes,
                                  i.flags & kReduce ? SharedShadow::Async::Reduce : SharedShadow::Async::Copy);
      });
    }
    w.stats->bytes[static_cast<int>(Space::Global)][t.direction == kSharedToGlobal] +=
        t.direction == kSharedToShared ? 0 : t.bytes;
    w.stats->bytes[static_cast<int>(Space::Shared)][t.direction != kSharedToGlobal] += t.bytes;
    ++w.stats->async_copies;
    Warp* warp = &w;
    const u32 flags = i.flags;
    auto op = w.gang->async.issue(*w.gang, [warp, t, flags, l] { perform(*warp, t, flags, l); });
    op->clock = clock;
    if (t.direction == kSharedToGlobal) w.bulk.lane(l).open.push_back(op);
  });
}

void h_prefetch(Warp&, const Ins&) {}

}  // namespace

void decode_bulk_copy(Decoder& d, Ins& i) {
  Modifiers& m = d.mods();
  const bool reduces = m.take("reduce");
  if (!m.take("async") || !m.take("bulk")) d.unsupported("form");
  if (m.take("prefetch")) {
    m.take("L2");
    m.take("global");
    m.take("L2::cache_hint");
    i.fn = h_prefetch;
    return;
  }
  u32 direction;
  if (m.starts({"global", "shared::cta"})) {
    direction = kSharedToGlobal;
  } else if (m.starts({"shared::cluster", "global"}) || m.starts({"shared::cta", "global"})) {
    direction = kGlobalToShared;
  } else if (m.starts({"shared::cluster", "shared::cta"})) {
    direction = kSharedToShared;
  } else {
    d.unsupported("state spaces");
  }
  i.flags = direction;
  if (direction == kSharedToGlobal) d.program().bulk_reads = true;
  if (direction == kSharedToShared) d.program().barrier_reads = true;
  if (direction == kGlobalToShared) d.program().loads_in_bulk = true;
  const bool by_barrier = m.take("mbarrier::complete_tx::bytes");
  if (!by_barrier && !m.take("bulk_group")) d.unsupported("completion mechanism");
  if (by_barrier == (direction == kSharedToGlobal)) d.unsupported("this completion mechanism for this direction");
  if (m.take("multicast::cluster")) i.flags |= kMulticast;
  const bool hint = m.take("L2::cache_hint");
  (void)hint;
  u32 reduction = 0;
  if (reduces) {
    i.flags |= kReduce;
    const int op = m.take_one({"add", "min", "max", "and", "or", "xor", "inc", "dec"});
    m.take("noftz");
    const auto t = m.take_type();
    if (op < 0 || !t) d.unsupported("reduction");
    reduction = static_cast<u32>(op) | static_cast<u32>(*t) << 8;
    if (!reducible(reduction)) d.unsupported("this reduction of this type");
  }
  const bool to_global = direction == kSharedToGlobal;
  i64 second = 0, barrier = 0;
  d.address(0, to_global ? Space::Global : Space::Cluster, i);
  Ins scratch;
  d.address(d.op(1), direction == kGlobalToShared ? Space::Global : Space::Shared, i.b, second, scratch);
  i.c = d.source(2, 4u);
  size_t k = 3;
  u32 mask = 0;
  if (by_barrier) d.address(d.op(k++), Space::Cluster, i.e, barrier, scratch);
  if (i.flags & kMulticast) mask = d.source(k++, 4u);
  i.list = static_cast<u32>(d.program().operands.size());
  d.add_operand(mask);
  d.add_operand(static_cast<u32>(second));
  d.add_operand(static_cast<u32>(barrier));
  d.add_operand(reduction);
  i.fn = h_bulk;
}

}  // namespace cake::emu
