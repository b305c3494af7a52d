// cp.async: copies of 4, 8 or 16 bytes a thread from global to shared memory, in groups; and the waits of bulk groups.
#include "access.h"
#include "bulk.h"
#include "decode.h"
#include "mbarrier.h"
#include "tensor.h"

namespace cake::emu {
namespace {

struct LaneCopy {
  u32 destination;
  u64 source;
  u32 bytes;  // read from the source; the rest of the destination becomes zero
  int lane;
};

constexpr u32 kSourceSize = 1, kIgnore = 2;

void h_copy(Warp& w, const Ins& i) {
  const u32 size = i.width;
  std::vector<LaneCopy> copies;
  const u32* extra = w.gang->launch->program->operands.data() + i.list;
  const i64 source_offset = static_cast<i64>(static_cast<i32>(extra[1]));
  each_lane(w.mask, [&](int l) {
    LaneCopy c{w.lane32(i.a, l) + static_cast<u32>(i.imm), w.lane64(i.b, l) + static_cast<u64>(source_offset), size, l};
    if (i.flags & kSourceSize) c.bytes = w.lane32(i.c, l);
    if (i.flags & kIgnore && w.predicates[i.c] >> l & 1) c.bytes = 0;
    if (c.bytes > size)
      fault("IllegalInstruction",
            "source size " + std::to_string(c.bytes) + " of a copy of " + std::to_string(size) + " bytes", l);
    if (c.destination % size) misaligned(c.destination, size, l);
    if (c.bytes && c.source % size) misaligned(c.source, size, l);
    Cta& cta = shared_owner(w, c.destination, size, Rw::Write, l, false);
    if (c.bytes) global_at(w, c.source, c.bytes, Rw::Read, l);
    if (cta.shadow) cta.shadow->copy_begin(w, c.destination & (kSharedWindow - 1), size, l);
    copies.push_back(c);
  });
  w.stats->bytes[static_cast<int>(Space::Global)][0] += static_cast<u64>(size) * copies.size();
  w.stats->bytes[static_cast<int>(Space::Shared)][1] += static_cast<u64>(size) * copies.size();
  Warp* warp = &w;
  const u32 mask = w.mask;
  auto op = w.gang->async.issue(*w.gang, [warp, size, copies = std::move(copies)] {
    for (const LaneCopy& c : copies) {
      u8* to = warp->cta->shared + (c.destination & (kSharedWindow - 1));
      if (c.bytes) std::memcpy(to, reinterpret_cast<const void*>(c.source), c.bytes);
      std::memset(to + c.bytes, 0, size - c.bytes);
    }
  });
  ++w.stats->async_copies;
  if (w.cta->shadow) w.cta->shadow->copy_issued(w, op);
  each_lane(mask, [&](int l) { w.copies.lane(l).open.push_back(op); });
}

void h_commit(Warp& w, const Ins&) {
  each_lane(w.mask, [&](int l) { w.copies.lane(l).commit(); });
}

// Waits until at most `imm` groups of each thread are left; imm < 0: for everything, committed or not.
void h_wait(Warp& w, const Ins& i) {
  each_lane(w.mask, [&](int l) {
    GroupList& list = w.copies.lane(l);
    if (i.imm < 0) list.commit();
    list.wait(*w.gang, w.gang->async, i.imm < 0 ? 0 : static_cast<size_t>(i.imm), l);
  });
  if (w.cta->shadow) w.cta->shadow->copy_waited(w);
}

// The arrival happens once all copies that the thread has issued so far are done.
void h_mbarrier_arrive(Warp& w, const Ins& i) {
  each_lane(w.mask, [&](int l) {
    const u64 raw =
        i.space == Space::Generic ? w.lane64(i.a, l) - reinterpret_cast<u64>(w.gang->arena) : w.lane32(i.a, l);
    const u32 address = static_cast<u32>(raw) + static_cast<u32>(i.imm);
    std::vector<AsyncHandle> before = w.copies.lane(l).open;
    for (const auto& group : w.copies.lane(l).committed) before.insert(before.end(), group.begin(), group.end());
    Gang* gang = w.gang;
    Warp* warp = &w;
    mbarrier_issue(w, address, l);
    if (!i.flags) mbarrier_expect_arrival(*gang, address);
    // What the thread does from here on the arrival does not tell of, however late it is.
    u32 clock = 0;
    Knowledge told;
    if (w.cta->shadow) {
      const u32 me = w.cta->shadow->id(w);
      clock = gang->clocks.now(me);
      told = gang->clocks.nothing();
      gang->clocks.release(me, 1u << l, told);
    }
    auto op = gang->async.issue(*gang, [gang, warp, address, l, clock, told = std::move(told), before = std::move(before)] {
      for (const auto& b : before) gang->async.complete(*gang, b);
      if (warp->cta->shadow) warp->cta->shadow->copy_signal(*warp, l, before, clock);
      mbarrier_arrive(*gang, address, 1, told, !before.empty());
    });
    // The thread itself need not wait for what the mbarrier tells others.
    w.copies.lane(l).open.clear();
    w.copies.lane(l).committed.clear();
  });
}

void h_bulk_commit(Warp& w, const Ins&) {
  each_lane(w.mask, [&](int l) { w.bulk.lane(l).commit(); });
}
void h_bulk_wait(Warp& w, const Ins& i) {
  u32 clock = 0;
  each_lane(w.mask, [&](int l) {
    clock = std::max(clock, w.bulk.lane(l).wait(*w.gang, w.gang->async, static_cast<size_t>(i.imm), l));
  });
  if (!w.cta->shadow) return;
  const u32 me = w.cta->shadow->id(w);
  w.gang->clocks.know(me, w.gang->clocks.bulk_actor(me), clock);
}

void decode_copy(Decoder& d, Ins& i) {
  Modifiers& m = d.mods();
  const bool cg = m.take_one({"ca", "cg"}) == 1;
  if (!m.take("shared") && !m.take("shared::cta")) d.unsupported("destination space");
  if (!m.take("global")) d.unsupported("source space");
  const bool hint = m.take("L2::cache_hint");
  m.take_one({"L2::64B", "L2::128B", "L2::256B"});
  d.address(0, Space::Shared, i);
  i64 source_offset = 0;
  d.address(d.op(1), Space::Global, i.b, source_offset, i);
  i.space = Space::Shared;
  const i64 size = d.constant(d.op(2));
  if (size != 16 && (cg || (size != 4 && size != 8))) d.syntax("copy of " + std::to_string(size) + " bytes");
  i.width = static_cast<u8>(size);
  if (d.count() > (hint ? 4u : 3u)) {
    if (d.is_predicate(d.op(3)) || d.op(3).negated) {
      i.flags = kIgnore;
      i.c = d.predicate(3);
    } else {
      i.flags = kSourceSize;
      i.c = d.source(3, 4u);
    }
  }
  i.list = static_cast<u32>(d.program().operands.size());
  d.add_operand(0);
  d.add_operand(static_cast<u32>(source_offset));
  d.note_shared_access(static_cast<u32>(size));
  i.fn = h_copy;
}

void decode_cp(Decoder& d, Ins& i) {
  Modifiers& m = d.mods();
  if (m.has("tensor")) {
    if (!decode_tensor_copy(d, i)) d.unsupported("form");
    return;
  }
  if (m.starts({"async", "commit_group"})) {
    i.fn = h_commit;
  } else if (m.starts({"async", "wait_group"})) {
    i.imm = d.constant(d.op(0));
    i.fn = h_wait;
  } else if (m.starts({"async", "wait_all"})) {
    i.imm = -1;
    i.fn = h_wait;
  } else if (m.starts({"async", "mbarrier", "arrive"})) {
    i.flags = m.take("noinc");
    const Space space = d.take_space(Space::Generic);
    m.take("b64");
    d.address(0, space, i);
    i.fn = h_mbarrier_arrive;
  } else if (m.starts({"async", "bulk", "commit_group"})) {
    i.fn = h_bulk_commit;
  } else if (m.starts({"async", "bulk", "wait_group"})) {
    m.take("read");
    i.imm = d.constant(d.op(0));
    i.fn = h_bulk_wait;
  } else if (m.has("bulk")) {
    decode_bulk_copy(d, i);
  } else if (m.take("async")) {
    decode_copy(d, i);
  } else {
    d.unsupported("form");
  }
}

}  // namespace

void register_async(DecoderTable& table) { table.add("cp", decode_cp); }

}  // namespace cake::emu
