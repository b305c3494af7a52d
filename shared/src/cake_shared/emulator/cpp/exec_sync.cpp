// Barriers of warps, CTAs, clusters and grids, and fences.
#include "access.h"
#include "decode.h"
#include "overlap.h"

namespace cake::emu {

// Ends a barrier's phase once all that it waits for have arrived.
void release_barriers(Cta& cta) {
  for (u32 id = 0; id < 16; ++id) {
    NamedBarrier& b = cta.barriers[id];
    if (!b.used) continue;
    const u32 expected = b.has_count ? b.expected : cta.alive;
    if (b.arrived < expected) continue;
    if (cta.shadow) cta.shadow->barrier_released(cta, id);
    const bool all = b.predicate_true == b.predicate_lanes;
    const u32 count = b.predicate_true;
    for (auto& w : cta.warps) {
      for (auto& s : w.splits) {
        if (s.state != State::WaitBarrier || s.barrier != id) continue;
        const Ins& i = cta.gang->launch->program->code[s.pc];
        const u32 reduction = i.flags >> 1 & 3;
        if (reduction) {
          const u32 saved = w.mask;
          w.mask = s.mask;
          if (reduction == 3) {
            each_lane(s.mask, [&](int l) { w.set32(i.d, l, count); });
          } else {
            w.set_predicate(i.d, (reduction == 1 ? all : count != 0) ? kFull : 0);
          }
          w.mask = saved;
        }
        s.state = State::Run;
        ++s.pc;
      }
    }
    b = NamedBarrier{};
    ++cta.gang->progress;
  }
}

namespace {

// A warp has arrived once all of its lanes that are alive have. A count is of whole warps, with the lanes that have exited.
void gather(Warp& w, u32 id, int lane) {
  u32& lanes = w.gathered[id];
  if (!lanes || w.alive & ~lanes) return;
  NamedBarrier& b = w.cta->barriers[id];
  b.arrived += b.has_count ? kLanes : static_cast<u32>(std::popcount(lanes));
  lanes = 0;
  if (b.has_count && b.arrived > b.expected) {
    fault("BarrierMisuse",
          "barrier " + std::to_string(id) + ": " + std::to_string(b.arrived) + " threads arrive where " +
              std::to_string(b.expected) + " are expected",
          lane);
  }
}

u32 actor_of(const Warp& w) { return w.cta->rank * static_cast<u32>(w.cta->warps.size()) + static_cast<u32>(w.index); }

}  // namespace

// The phase ends when every lane of the cluster that is alive has arrived.
void release_cluster(Gang& gang) {
  if (gang.cluster_arrived == 0 || gang.cluster_arrived < gang.alive) return;
  gang.cluster_arrived = 0;
  ++gang.cluster_phase;
  ++gang.progress;
  const bool watched = gang.ctas[0]->shadow != nullptr;
  if (watched) gang.clocks.cluster_complete();
  for (auto& cta : gang.ctas) {
    for (auto& w : cta->warps) {
      for (auto& s : w.splits) {
        if (s.state != State::WaitCluster || s.token == gang.cluster_phase) continue;
        if (watched) gang.clocks.cluster_wait(actor_of(w), s.mask);
        s.state = State::Run;
        ++s.pc;
      }
    }
  }
}

// Whose lanes that are left have all arrived has arrived as a whole.
void leave_barriers(Warp& w) {
  for (u32 id = 0; id < 16; ++id) gather(w, id, -1);
  release_barriers(*w.cta);
}

// What lanes that exit have arrived for does not stand in for those that still have to.
void leave_cluster(Warp& w, u32 lanes) {
  Gang& gang = *w.gang;
  each_lane(lanes, [&](int l) {
    if (w.cluster_phase[l] == gang.cluster_phase + 1) --gang.cluster_arrived;
  });
  gang.alive -= static_cast<u32>(std::popcount(lanes));
  if (!w.alive && w.cta->shadow) gang.clocks.left(actor_of(w));
  release_cluster(gang);
}

namespace {

constexpr u32 kArrive = 1;  // bits 1 and 2 of flags: reduction (1 and, 2 or, 3 popc)

// One id and one count for all lanes of the instruction: they are warp-uniform in every legal program.
void h_barrier(Warp& w, const Ins& i) {
  const int lane = first_lane(w.mask);
  const u32 id = w.lane32(i.a, lane);
  if (id >= 16) fault("BarrierMisuse", "barrier " + std::to_string(id) + " of 16", lane);
  Cta& cta = *w.cta;
  NamedBarrier& b = cta.barriers[id];
  const bool has_count = i.imm != 0;
  const u32 count = has_count ? w.lane32(i.b, lane) : 0;
  if (has_count && (count == 0 || count % kLanes)) {
    fault("BarrierMisuse",
          "thread count " + std::to_string(count) + " of barrier " + std::to_string(id) + " is no multiple of 32",
          lane);
  }
  if (b.used && (b.has_count != has_count || b.expected != count)) {
    fault("BarrierMisuse",
          "barrier " + std::to_string(id) + " is used with " + std::to_string(count) +
              " threads while others wait with " + std::to_string(b.expected) + " (0 stands for all)",
          lane);
  }
  b.used = true;
  b.has_count = has_count;
  b.expected = count;
  w.gathered[id] |= w.mask;
  gather(w, id, lane);
  if (i.flags >> 1 & 3) {
    const u32 p = w.predicates[i.c] & w.mask;
    b.predicate_true += static_cast<u32>(std::popcount(p));
    b.predicate_lanes += static_cast<u32>(std::popcount(w.mask));
  }
  if (cta.shadow) cta.shadow->barrier_arrive(w, id);
  if (i.flags & kArrive) {
    release_barriers(cta);
    told_others(w);
    return;
  }
  Split& s = w.split();
  s.state = State::WaitBarrier;
  s.barrier = static_cast<u8>(id);
  w.signal = Signal::Wait;
  release_barriers(cta);
}

constexpr u32 kRelaxed = 1;

void h_cluster_arrive(Warp& w, const Ins& i) {
  Gang& gang = *w.gang;
  each_lane(w.mask, [&](int l) {
    if (w.cluster_phase[l]) fault("BarrierMisuse", "second barrier.cluster.arrive without a wait between", l);
    w.cluster_phase[l] = gang.cluster_phase + 1;
  });
  gang.cluster_arrived += static_cast<u32>(std::popcount(w.mask));
  if (w.cta->shadow) gang.clocks.cluster_arrive(actor_of(w), w.mask, i.flags & kRelaxed);
  release_cluster(gang);
  told_others(w);
}

void h_cluster_wait(Warp& w, const Ins&) {
  Gang& gang = *w.gang;
  u32 phase = 0;
  each_lane(w.mask, [&](int l) {
    if (!w.cluster_phase[l]) fault("BarrierMisuse", "barrier.cluster.wait without an arrive before it", l);
    phase = std::max(phase, w.cluster_phase[l]);
    w.cluster_phase[l] = 0;
  });
  if (gang.cluster_phase >= phase) {
    if (w.cta->shadow) gang.clocks.cluster_wait(actor_of(w), w.mask);
    return;
  }
  Split& s = w.split();
  s.state = State::WaitCluster;
  s.token = gang.cluster_phase;
  w.signal = Signal::Wait;
}

// Lanes that meet pass on to each other that earlier launches have ended.
void h_warp_barrier(Warp& w, const Ins& i) {
  if (!w.gang->launch->record) return;
  each_lane(w.mask, [&](int l) { w.gang->clocks.share_grid(actor_of(w), w.lane32(i.sync_mask, l) & w.alive); });
}

void decode_barrier(Decoder& d, Ins& i) {
  Modifiers& m = d.mods();
  if (m.take("cluster")) {
    const int what = m.take_one({"arrive", "wait"});
    if (m.take_one({"release", "relaxed", "acquire"}) == 1) i.flags = kRelaxed;
    const bool aligned = m.take("aligned");
    i.kind = Kind::Sync;
    i.sync = aligned ? Sync::All : Sync::None;
    i.fn = what == 0 ? h_cluster_arrive : what == 1 ? h_cluster_wait : nullptr;
    return;
  }
  m.take("cta");
  if (m.take("warp")) {
    if (!m.take("sync")) d.unsupported("form");
    i.kind = Kind::Sync;
    i.sync = Sync::Mask;
    i.sync_mask = d.source(0, 4u);
    i.flags = kWarpBarrier;
    i.fn = h_warp_barrier;
    return;
  }
  const int what = m.take_one({"sync", "arrive", "red"});
  const bool aligned = m.take("aligned");
  i.kind = Kind::Sync;
  // bar.* and the .aligned forms are executed by whole warps.
  i.sync = aligned || d.statement().parts[0] == "bar" ? Sync::All : Sync::None;
  size_t k = 0;
  if (what == 2) {
    const int op = m.take_one({"and", "or", "popc"});
    m.take_one({"pred", "u32"});
    i.flags = static_cast<u32>(op + 1) << 1;
    i.d = op == 2 ? d.dest(k, 4) : d.predicate_dest(d.op(k));
    ++k;
  } else if (what == 1) {
    i.flags = kArrive;
  } else if (what < 0) {
    d.unsupported("form");
  }
  i.a = d.source(k++, 4u);
  const size_t left = d.count() - k;
  if (what == 1 && left != 1) d.syntax("an arrival takes a thread count");
  if (left == (what == 2 ? 2u : 1u)) {
    i.b = d.source(k++, 4u);
    i.imm = 1;
  }
  if (what == 2) i.c = d.predicate(k);
  i.fn = h_barrier;
}

enum Fence : u32 { kPlain, kProxyAsync, kProxyAsyncShared, kProxyAsyncGlobal, kProxyTensormap, kProxyAlias, kBarrierInit };
constexpr i64 kAcquires = 1, kReleases = 2, kTotal = 4;  // Ins::imm of a plain one

void h_fence(Warp& w, const Ins& i) {
  const bool of_global = i.flags == kProxyAsync || i.flags == kProxyAsyncGlobal;
  if (of_global && w.gang->launch->record) w.gang->launch->record->proxy_fenced = true;
  if (!w.cta->shadow) return;
  Clocks& clocks = w.gang->clocks;
  if (i.flags == kProxyAsync || i.flags == kProxyAsyncShared) clocks.proxy_fence(actor_of(w));
  if (i.flags == kBarrierInit) clocks.init_fence(actor_of(w));
  if (i.flags == kPlain) clocks.fence(actor_of(w), w.mask, i.imm & kAcquires, i.imm & kReleases, i.imm & kTotal);
  if (i.flags == kPlain && i.imm & kTotal) told_others(w);  // which of two comes first is for the schedule to say
}

void decode_fence(Decoder& d, Ins& i) {
  Modifiers& m = d.mods();
  i.fn = h_fence;
  if (m.take("mbarrier_init")) {
    i.flags = kBarrierInit;
    m.take("release");
    m.take("cluster");
    return;
  }
  if (m.take("proxy")) {
    if (m.take("alias")) {
      i.flags = kProxyAlias;
      return;
    }
    if (m.take("async") || m.take("async::generic")) {
      const bool shared = m.has("shared::cta") || m.has("shared::cluster") || m.has("sync_restrict::shared::cta") ||
                          m.has("sync_restrict::shared::cluster");
      i.flags = shared ? kProxyAsyncShared : m.has("global") ? kProxyAsyncGlobal : kProxyAsync;
      for (const char* part : {"global", "shared::cta", "shared::cluster", "acquire", "release",
                               "sync_restrict::shared::cta", "sync_restrict::shared::cluster", "cluster"}) {
        m.take(part);
      }
      return;
    }
    if (m.take("tensormap::generic")) {
      i.flags = kProxyTensormap;
      m.take_one({"acquire", "release"});
      m.take_one({"cta", "cluster", "gpu", "sys"});
      return;
    }
    d.unsupported("proxy");
  }
  const int order = m.take_one({"sc", "acq_rel", "acquire", "release"});
  i.imm = order == 2 ? kAcquires : order == 3 ? kReleases : order == 0 ? kAcquires | kReleases | kTotal : kAcquires | kReleases;
  m.take_one({"cta", "cluster", "gpu", "sys"});
  m.take_one({"sync_restrict::shared::cta", "sync_restrict::shared::cluster"});
  m.take("gl");
}

// The launches before have ended, since launches run one after the other; what matters is who knows it.
void h_grid_wait(Warp& w, const Ins&) {
  LaunchRecord* record = w.gang->launch->record;
  if (!record) return;
  record->waited = true;
  w.cta->grid_waited = true;
  w.gang->clocks.know_grid(actor_of(w), w.mask);
}

void h_launch_dependents(Warp& w, const Ins&) {
  LaunchRecord* record = w.gang->launch->record;
  if (!record || w.cta->dependents_started) return;
  w.cta->dependents_started = true;
  if (w.gang->clocks.grid_lanes(actor_of(w)) & w.mask) record->starts_late = true;
}

void h_fewer_registers(Warp& w, const Ins& i) {
  const u32 count = static_cast<u32>(i.imm);
  if (count > w.registers_held) {
    fault("IllegalInstruction", "a decrease to " + std::to_string(count) + " registers a thread, which has " +
          std::to_string(w.registers_held));
  }
  w.cta->free_registers += (w.registers_held - count) * kLanes;
  w.registers_held = count;
  w.register_changes.push_back(count);
  ++w.gang->progress;
}

// Waits until other warps of the CTA have given enough back.
void h_more_registers(Warp& w, const Ins& i) {
  const u32 count = static_cast<u32>(i.imm);
  if (count < w.registers_held) {
    fault("IllegalInstruction", "an increase to " + std::to_string(count) + " registers a thread, which has " +
          std::to_string(w.registers_held));
  }
  const u32 more = (count - w.registers_held) * kLanes;
  if (more > w.cta->free_registers) {
    w.signal = Signal::Again;
    return;
  }
  w.cta->free_registers -= more;
  w.registers_held = count;
  w.register_changes.push_back(count);
}

}  // namespace

void register_sync(DecoderTable& table) {
  table.add("bar", decode_barrier);
  table.add("barrier", decode_barrier);
  table.add("fence", decode_fence);
  table.add("membar", [](Decoder& d, Ins& i) {
    Modifiers& m = d.mods();
    if (m.take("proxy")) {
      m.take("alias");
      i.flags = kProxyAlias;
    }
    m.take_one({"cta", "gl", "sys"});
    i.imm = kAcquires | kReleases | kTotal;  // another name of fence.sc
    i.fn = h_fence;
  });
  table.add("griddepcontrol", [](Decoder& d, Ins& i) {
    if (d.mods().take("wait")) {
      i.kind = Kind::Sync;
      i.fn = h_grid_wait;
    } else if (d.mods().take("launch_dependents")) {
      i.fn = h_launch_dependents;
    }
  });
  table.add("setmaxnreg", [](Decoder& d, Ins& i) {
    const int direction = d.mods().take_one({"inc", "dec"});
    if (direction < 0 || !d.mods().take("sync") || !d.mods().take("aligned")) d.unsupported("form");
    d.mods().take("u32");
    const i64 count = d.constant(d.op(0));
    if (count < 24 || count > 256 || count % 8)
      d.syntax("register count " + std::to_string(count) + " is not 24 to 256 in steps of 8");
    d.program().moves_registers = true;
    i.kind = Kind::Sync;
    i.sync = Sync::Whole;
    i.imm = count;
    i.fn = direction == 0 ? h_more_registers : h_fewer_registers;
  });
}

}  // namespace cake::emu
