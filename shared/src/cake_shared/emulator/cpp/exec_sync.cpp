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

void release_cluster(Gang& gang) {
  if (gang.cluster_arrived == 0 || gang.cluster_arrived < gang.alive) return;
  gang.cluster_arrived = 0;
  ++gang.cluster_phase;
  ++gang.progress;
  gang.clocks.cluster_release();
  for (auto& cta : gang.ctas) {
    for (auto& w : cta->warps) {
      for (auto& s : w.splits) {
        if (s.state == State::WaitCluster && s.token != gang.cluster_phase) {
          s.state = State::Run;
          ++s.pc;
        }
      }
    }
  }
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
  // Lanes that have exited count with the rest of their warp when a count is given.
  const u32 arrivals = has_count && w.mask == w.alive ? kLanes : static_cast<u32>(std::popcount(w.mask));
  b.arrived += arrivals;
  if (has_count && b.arrived > count) {
    fault("BarrierMisuse",
          "barrier " + std::to_string(id) + ": " + std::to_string(b.arrived) + " threads arrive where " +
              std::to_string(count) + " are expected",
          lane);
  }
  if (i.flags >> 1 & 3) {
    const u32 p = w.predicates[i.c] & w.mask;
    b.predicate_true += static_cast<u32>(std::popcount(p));
    b.predicate_lanes += static_cast<u32>(std::popcount(w.mask));
  }
  if (cta.shadow) cta.shadow->barrier_arrive(w, id);
  if (i.flags & kArrive) {
    release_barriers(cta);
    return;
  }
  Split& s = w.split();
  s.state = State::WaitBarrier;
  s.barrier = static_cast<u8>(id);
  w.signal = Signal::Wait;
  release_barriers(cta);
}

void decode_barrier(Decoder& d, Ins& i) {
  Modifiers& m = d.mods();
  if (m.take("cluster")) {
    const int what = m.take_one({"arrive", "wait"});
    m.take_one({"release", "relaxed", "acquire"});
    const bool aligned = m.take("aligned");
    i.kind = Kind::Sync;
    i.sync = aligned ? Sync::All : Sync::None;
    i.fn = what == 0 ? [](Warp& w, const Ins&) {
      Gang& gang = *w.gang;
      each_lane(w.mask, [&](int l) {
        if (w.cluster_phase[l] == gang.cluster_phase + 1) {
          fault("BarrierMisuse", "second barrier.cluster.arrive without a wait between", l);
        }
        w.cluster_phase[l] = gang.cluster_phase + 1;
      });
      gang.cluster_arrived += static_cast<u32>(std::popcount(w.mask));
      if (w.cta->shadow) gang.clocks.cluster_arrive(w.cta->rank * static_cast<u32>(w.cta->warps.size()) + static_cast<u32>(w.index));
      release_cluster(gang);
    } : what == 1 ? [](Warp& w, const Ins&) {
      Gang& gang = *w.gang;
      const int lane = first_lane(w.mask);
      const u32 mine = w.cluster_phase[lane];
      if (mine == 0) fault("BarrierMisuse", "barrier.cluster.wait before any arrive", lane);
      if (gang.cluster_phase >= mine) {
        return;
      }
      Split& s = w.split();
      s.state = State::WaitCluster;
      s.token = gang.cluster_phase;
      w.signal = Signal::Wait;
    } : Handler(nullptr);
    return;
  }
  m.take("cta");
  if (m.take("warp")) {
    if (!m.take("sync")) d.unsupported("form");
    i.kind = Kind::Sync;
    i.sync = Sync::Mask;
    i.sync_mask = d.source(0, 4u);
    i.flags = kWarpBarrier;
    i.fn = [](Warp&, const Ins&) {};
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
  if (left == (what == 2 ? 2u : 1u)) {
    i.b = d.source(k++, 4u);
    i.imm = 1;
  }
  if (what == 2) i.c = d.predicate(k);
  i.fn = h_barrier;
}

enum Fence : u32 { kPlain, kProxyAsync, kProxyAsyncShared, kProxyTensormap, kProxyAlias };
void h_fence(Warp& w, const Ins& i) {
  if (i.flags == kProxyAsync && w.gang->launch->record) w.gang->launch->record->proxy_fenced = true;
  if (!w.cta->shadow) return;
  if (i.flags == kProxyAsync || i.flags == kProxyAsyncShared) w.cta->shadow->proxy_fence(w);
  if (i.flags == kPlain) w.cta->shadow->fence(w);
}

void decode_fence(Decoder& d, Ins& i) {
  Modifiers& m = d.mods();
  i.fn = h_fence;
  if (m.take("mbarrier_init")) {
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
      i.flags = shared ? kProxyAsyncShared : kProxyAsync;
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
  m.take_one({"sc", "acq_rel", "acquire", "release"});
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
  w.gang->clocks.know(w.cta->shadow->id(w), w.gang->clocks.grid_actor(), 1);
}

void h_launch_dependents(Warp& w, const Ins&) {
  LaunchRecord* record = w.gang->launch->record;
  if (!record || w.cta->dependents_started) return;
  w.cta->dependents_started = true;
  const Clocks& clocks = w.gang->clocks;
  if (clocks.knows(w.cta->shadow->id(w), clocks.grid_actor(), 1)) record->starts_late = true;
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
    if (m.take("proxy")) m.take("alias");
    m.take_one({"cta", "gl", "sys"});
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
    i.sync = Sync::All;
    i.imm = count;
    i.fn = direction == 0 ? h_more_registers : h_fewer_registers;
  });
}

}  // namespace cake::emu
