// mbarriers, as the detectors see them: their operations need no order among themselves, but initialisation and invalidation
// need one with every operation of another warp, and nothing else may touch their bytes while they are initialised.
#include "machine.h"
#include "shadow.h"

namespace cake::emu {

std::string SharedShadow::mbarrier_name(u32 offset) const { return "mbarrier " + hex(static_cast<u64>(cta_->rank) << kRankShift | offset); }

// The bytes become the warp's, as by an ordinary write.
void SharedShadow::claim(Warp& w, u32 offset, int lane) {
  if (!suspects_.empty()) confirm();
  const u32 me = id(w);
  for (u32 cell = offset / granule_; cell <= (offset + 7) / granule_; ++cell) {
    check_order(w, cell, true, false, lane);
    cells_[cell] = Cell{clocks_->now(me), static_cast<u16>(me), kWritten, 0};
    write_pcs_[cell] = w.pc;
  }
}

void SharedShadow::mbarrier_init(Warp& w, u32 offset, int lane) {
  claim(w, offset, lane);
  for (u32 cell = offset / granule_; cell <= (offset + 7) / granule_; ++cell) cells_[cell].flags |= kMbarrier;
  const u32 me = id(w);
  Mbarrier m{clocks_->new_barrier_actor(), {}, {}, me, clocks_->now(me), w.pc, std::vector<Use>(warps_), 0, {}, {}};
  m.arriving.reset(clocks_->actors(), warps_);
  m.completed.reset(clocks_->actors(), warps_);
  mbarriers_.insert_or_assign(offset, std::move(m));
}

// By an acquiring wait, or because a relaxed wait that has seen it end comes before.
bool SharedShadow::knows_phase(u32 me, const Mbarrier& m, u32 phase) const {
  const auto& seen = clocks_->of(me).seen;
  if (seen[m.actor] >= phase) return true;
  for (u32 k = 0; k < m.relaxed.size(); ++k) {
    const Use& wait = m.relaxed[k];
    if (wait.clock && wait.phase >= phase && (k == me || wait.clock <= seen[k])) return true;
  }
  return false;
}

void SharedShadow::mbarrier_inval(Warp& w, u32 offset, int lane) {
  const auto it = mbarriers_.find(offset);
  if (it == mbarriers_.end()) return;
  const Mbarrier& m = it->second;
  const u32 me = id(w);
  const auto& seen = clocks_->of(me).seen;
  const std::string text = mbarrier_name(offset) + ": mbarrier.inval by " + name(me);
  for (u32 k = 0; k < warps_; ++k) {
    const Use& use = m.uses[k];
    // Whoever knows that a phase has ended knows of what it counted.
    if (use.clock <= seen[k] || (use.how != Touch::Waits && knows_phase(me, m, use.phase))) continue;
    const char* what = use.how == Touch::Waits ? "wait" : use.how == Touch::Issues ? "copy" : "arrival";
    fault("SharedRace", text + " with nothing that orders it after the " + what + " of " + name(k) + at(use.pc), lane);
  }
  if (!clocks_->knows_init(me, m.initialiser, m.clock)) {
    fault("SharedRace", text + " with nothing that orders it after the initialisation by " + name(m.initialiser) + at(m.pc), lane);
  }
  if (m.signals) fault("SharedRace", text + " while copies that will signal it are under way", lane);
  if (m.signal.clock && !knows_phase(me, m, m.signal.phase)) {
    fault("SharedRace", text + ", which knows of no wait for the phase that counts the copy" + at(m.signal.pc), lane);
  }
  mbarriers_.erase(it);
  for (u32 cell = offset / granule_; cell <= (offset + 7) / granule_; ++cell) cells_[cell].flags &= static_cast<u8>(~kMbarrier);
  claim(w, offset, lane);
  for (u32 cell = offset / granule_; cell <= (offset + 7) / granule_; ++cell) cells_[cell].flags = 0;  // holds nothing now
}

void SharedShadow::mbarrier_touch(Warp& w, u32 offset, Touch how, int lane) {
  const auto it = mbarriers_.find(offset);
  if (it == mbarriers_.end()) return;
  Mbarrier& m = it->second;
  const u32 me = id(w);
  if (!clocks_->knows_init(me, m.initialiser, m.clock)) {
    const char* what = how == Touch::Waits ? "a wait" : how == Touch::Issues ? "a copy that signals it," : "an arrival";
    fault("SharedRace", mbarrier_name(offset) + ": " + what + " by " + name(me) + " with nothing that orders it after the initialisation by " +
          name(m.initialiser) + at(m.pc), lane);
  }
  m.uses[me] = {clocks_->now(me), clocks_->completed(m.actor) + 1, w.pc, how};
  if (how == Touch::Issues) ++m.signals;
}

void SharedShadow::mbarrier_arrive(Warp& w, u32 lanes, u32 offset, bool relaxed) {
  auto it = mbarriers_.find(offset);
  if (it == mbarriers_.end()) return;
  relaxed ? clocks_->release_relaxed(id(w), it->second.arriving) : clocks_->release(id(w), lanes, it->second.arriving);
}

void SharedShadow::mbarrier_signal(u32 offset, int pc, const Knowledge* told) {
  auto it = mbarriers_.find(offset);
  if (it == mbarriers_.end()) return;
  Mbarrier& m = it->second;
  if (m.signals) --m.signals;
  m.signal = {1, clocks_->completed(m.actor) + 1, pc, Touch::Issues};
  if (told) m.arriving.learn(*told);
}

void SharedShadow::mbarrier_phase(u32 offset) {
  auto it = mbarriers_.find(offset);
  if (it == mbarriers_.end()) return;
  Mbarrier& m = it->second;
  m.completed.learn(m.arriving);
  m.completed.seen[m.actor] = clocks_->complete(m.actor);
  m.completed.empty = false;
}

void SharedShadow::mbarrier_tells(u32 offset, u32 actor, u32 clock) {
  auto it = mbarriers_.find(offset);
  if (it == mbarriers_.end()) return;
  u32& told = it->second.arriving.seen[actor];
  told = std::max(told, clock);
  it->second.arriving.empty = false;
}

bool SharedShadow::mbarrier_clock(u32 offset, u32& actor, u32& clock) const {
  auto it = mbarriers_.find(offset);
  if (it == mbarriers_.end()) return false;
  actor = it->second.actor;
  clock = clocks_->completed(actor) + 1;
  return true;
}

void SharedShadow::mbarrier_acquire(Warp& w, u32 lanes, u32 offset, bool relaxed) {
  auto it = mbarriers_.find(offset);
  if (it == mbarriers_.end()) return;
  Mbarrier& m = it->second;
  const u32 me = id(w);
  if (!relaxed) return clocks_->acquire(me, lanes, m.completed);
  clocks_->acquire_relaxed(me, m.completed);
  m.relaxed.resize(warps_);
  const u32 phase = clocks_->completed(m.actor);
  if (m.relaxed[me].phase < phase) m.relaxed[me] = {clocks_->now(me), phase, w.pc, Touch::Waits};
}

void SharedShadow::gone(u32 other, const char* what, int pc) const {
  fault("SharedRace", "the CTA of rank " + std::to_string(cta_->rank) + " ends, and its shared memory with it, with nothing that orders its end after the " +
        std::string(what) + " of " + name(other) + at(pc));
}

// Who reaches into the shared memory of another CTA must be known to it, or have met it at the cluster's barrier, before it ends,
// and so must whoever waited for a copy out of it.
void SharedShadow::finish() {
  if (!suspects_.empty()) confirm();
  auto known = [&](u32 other, u32 clock) {
    bool found = clocks_->met(other) >= clock;
    for (u32 k = first_warp_; k < first_warp_ + warps_per_cta_; ++k) found |= clocks_->of(k).seen[other] >= clock;
    return found;
  };
  for (u32 k = 0; k < remote_.size(); ++k) {
    if (remote_[k].clock && !known(k, remote_[k].clock)) gone(k, "access", remote_[k].pc);
  }
  for (const auto& [actor, use] : sent_) {
    if (!known(actor, use.clock)) gone(actor, "reads", use.pc);
  }
  if (remote_.empty()) return;
  for (const auto& [offset, m] : mbarriers_) {
    for (u32 k = 0; k < warps_; ++k) {
      const Use& use = m.uses[k];
      if (k - first_warp_ < warps_per_cta_ || !use.clock || known(k, use.clock)) continue;
      bool counted = false;
      for (u32 own = first_warp_; own < first_warp_ + warps_per_cta_; ++own) counted |= knows_phase(own, m, use.phase);
      if (!counted) gone(k, use.how == Touch::Issues ? "copy" : "arrival", use.pc);
    }
  }
}

}  // namespace cake::emu
