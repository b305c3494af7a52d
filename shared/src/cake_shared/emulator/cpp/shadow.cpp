#include "shadow.h"

#include <algorithm>

#include "machine.h"

namespace cake::emu {

SharedShadow::SharedShadow(Cta& cta, u32 granule) : gang_(cta.gang), granule_(granule) {}

void SharedShadow::reset(Cta& cta) {
  gang_ = cta.gang;
  clocks_ = &gang_->clocks;
  warps_ = clocks_->warps();
  warps_per_cta_ = static_cast<u32>(cta.warps.size());
  const u32 cells = (cta.shared_end + granule_ - 1) / granule_;
  cells_.assign(cells, Cell{});
  readers_.assign(static_cast<size_t>(cells) * warps_, 0);
  mbarriers_.clear();
  copies_.clear();
  issuing_.clear();
  for (auto& k : named_) k.reset(clocks_->actors(), warps_);
}

u32 SharedShadow::id(const Warp& w) const { return w.cta->rank * warps_per_cta_ + static_cast<u32>(w.index); }

std::string SharedShadow::place(u32 cell) const {
  return "shared byte" + std::string(granule_ > 1 ? "s " : " ") + hex(cell * granule_) +
         (granule_ > 1 ? " to " + hex(cell * granule_ + granule_ - 1) : "");
}

std::string SharedShadow::name(u32 actor) const {
  if (actor >= warps_) return "an asynchronous copy";
  std::string text = "warp " + std::to_string(actor % warps_per_cta_);
  if (warps_ > warps_per_cta_) text += " of CTA rank " + std::to_string(actor / warps_per_cta_);
  return text;
}

void SharedShadow::race(u32 me, u32 other, u32 cell, const char* what, int lane) const {
  fault("SharedRace", place(cell) + ": " + what + " by " + name(me) + " with nothing that orders it after that of " + name(other), lane);
}

// The last write must be known to the warp; a write must also know of every read.
void SharedShadow::check_order(Warp& w, u32 cell, bool writes, bool atomic, int lane) {
  const Cell& c = cells_[cell];
  const u32 me = id(w);
  const auto& seen = clocks_->of(me).seen;
  if (c.flags & kUnderWay) {
    fault("UnwaitedResult", place(cell) + ": an asynchronous copy into them is under way and has not been waited for", lane);
  }
  if (c.clock > seen[c.writer] && !(atomic && (c.flags & kAtomic))) {
    if (c.writer >= warps_) {
      fault("UnwaitedResult", place(cell) + ": the mbarrier of the copy that wrote them has not been waited for by " + name(me), lane);
    }
    race(me, c.writer, cell, writes ? "a write" : "a read", lane);
  }
  if (!writes) return;
  const u32* read = readers(cell);
  bool unordered = false;
  for (u32 k = 0; k < warps_; ++k) unordered |= read[k] > seen[k];
  if (!unordered) return;
  for (u32 k = 0; k < warps_; ++k) {
    if (read[k] > seen[k]) race(me, k, cell, "a write", lane);
  }
}

void SharedShadow::access(Warp& w, u32 offset, u32 bytes, bool reads, bool writes, bool atomic, int lane) {
  const u32 me = id(w), now = clocks_->now(me);
  const auto& seen = clocks_->of(me).seen;
  const u32 first = offset / granule_, last = (offset + bytes - 1) / granule_;
  for (u32 cell = first; cell <= last; ++cell) {
    Cell& c = cells_[cell];
    if (reads && !(c.flags & kWritten)) {
      if (c.flags & kUnderWay) check_order(w, cell, writes, atomic, lane);
      fault("UninitialisedRead", place(cell) + " have never been written", lane);
    }
    if (writes || (c.flags & kUnderWay) || c.clock > seen[c.writer]) check_order(w, cell, writes, atomic, lane);
    if (writes) {
      c.writer = static_cast<u16>(me);
      c.clock = now;
      c.flags = static_cast<u8>(kWritten | (atomic ? kAtomic : 0));
    } else {
      readers(cell)[me] = now;
    }
  }
}

void SharedShadow::async_access(Warp& issuer, u32 offset, u32 bytes, bool reads, bool writes) {
  if (bytes == 0) return;
  const u32 me = id(issuer);
  const Knowledge& known = clocks_->of(me);
  const u32 first = offset / granule_, last = (offset + bytes - 1) / granule_;
  for (u32 cell = first; cell <= last; ++cell) {
    Cell& c = cells_[cell];
    if (reads) {
      if (!(c.flags & (kWritten | kUnderWay))) fault("UninitialisedRead", place(cell) + " have never been written");
      if (c.writer < warps_ && !(c.flags & (kProxy | kUnderWay)) && c.clock <= known.seen[c.writer] && c.clock > known.fenced[c.writer]) {
        fault("MissingProxyFence", place(cell) + " were written by " + name(c.writer) +
              " with ordinary stores and are read by the asynchronous proxy without fence.proxy.async between");
      }
    }
    check_order(issuer, cell, writes, false, -1);
    if (writes) {
      c.flags = static_cast<u8>((c.flags & kWritten) | kUnderWay);
    } else {
      readers(cell)[me] = clocks_->now(me);
    }
  }
}

void SharedShadow::async_arrived(u32 offset, u32 bytes, u32 barrier) {
  if (bytes == 0) return;
  const SharedShadow& owner = *gang_->ctas[barrier >> kRankShift]->shadow;
  auto it = owner.mbarriers_.find(barrier & (kSharedWindow - 1));
  const bool known = it != owner.mbarriers_.end();
  const u32 first = offset / granule_, last = (offset + bytes - 1) / granule_;
  for (u32 cell = first; cell <= last; ++cell) {
    Cell& c = cells_[cell];
    c.flags = kWritten | kProxy;
    if (!known) {
      c.clock = 0;  // an mbarrier that this shadow has not seen initialised: nothing can be said
      continue;
    }
    c.writer = static_cast<u16>(it->second.actor);
    c.clock = clocks_->completed(it->second.actor) + 1;  // known to whoever waits for the phase that counts it
  }
}

void SharedShadow::copy_begin(Warp& w, u32 offset, u32 bytes, int lane) {
  const u32 first = offset / granule_, last = (offset + bytes - 1) / granule_;
  for (u32 cell = first; cell <= last; ++cell) {
    Cell& c = cells_[cell];
    check_order(w, cell, true, false, lane);
    c.flags = static_cast<u8>((c.flags & kWritten) | kUnderWay);
  }
  issuing_.emplace_back(offset, bytes);
}

void SharedShadow::copy_issued(Warp& w, const std::shared_ptr<AsyncOp>& op) {
  copies_[id(w)].push_back({op, std::move(issuing_)});
  issuing_.clear();
}

// From here on the copies count as writes of the warp that waited.
void SharedShadow::settle(Warp& w, const std::vector<std::pair<u32, u32>>& ranges) {
  const u32 me = id(w), now = clocks_->now(me);
  for (const auto& [offset, bytes] : ranges) {
    for (u32 cell = offset / granule_; cell <= (offset + bytes - 1) / granule_; ++cell) {
      cells_[cell] = Cell{now, static_cast<u16>(me), kWritten, 0};
    }
  }
}

void SharedShadow::copy_waited(Warp& w) {
  auto& list = copies_[id(w)];
  for (auto& c : list) {
    if (c.op->waited) settle(w, c.ranges);
  }
  list.erase(std::remove_if(list.begin(), list.end(), [](const Copies& c) { return c.op->waited; }), list.end());
}

void SharedShadow::copy_signal(Warp& w, u32 barrier) {
  auto& list = copies_[id(w)];
  for (auto& c : list) {
    if (c.op->done) settle(w, c.ranges);
  }
  list.erase(std::remove_if(list.begin(), list.end(), [](const Copies& c) { return c.op->done; }), list.end());
  mbarrier_arrive(w, barrier);
}

void SharedShadow::barrier_arrive(Warp& w, u32 id_of_barrier) { clocks_->release(id(w), named_[id_of_barrier]); }

void SharedShadow::barrier_released(Cta& cta, u32 id_of_barrier) {
  Knowledge& k = named_[id_of_barrier];
  for (auto& w : cta.warps) {
    for (const auto& s : w.splits) {
      if (s.state == State::WaitBarrier && s.barrier == id_of_barrier) clocks_->acquire(id(w), k);
    }
  }
  k.reset(clocks_->actors(), warps_);
}

void SharedShadow::fence(Warp& w) { clocks_->fence(id(w)); }
void SharedShadow::proxy_fence(Warp& w) { clocks_->proxy_fence(id(w)); }

void SharedShadow::mbarrier_init(Warp& w, u32 offset) {
  (void)w;
  Mbarrier m{clocks_->new_barrier_actor(), {}, {}};
  m.arriving.reset(clocks_->actors(), warps_);
  m.completed.reset(clocks_->actors(), warps_);
  mbarriers_.insert_or_assign(offset, std::move(m));
}

void SharedShadow::mbarrier_arrive(Warp& w, u32 offset) {
  auto it = mbarriers_.find(offset);
  if (it != mbarriers_.end()) clocks_->release(id(w), it->second.arriving);
}

void SharedShadow::mbarrier_phase(u32 offset) {
  auto it = mbarriers_.find(offset);
  if (it == mbarriers_.end()) return;
  Mbarrier& m = it->second;
  m.completed.learn(m.arriving);
  m.completed.seen[m.actor] = clocks_->complete(m.actor);
}

void SharedShadow::mbarrier_acquire(Warp& w, u32 offset) {
  auto it = mbarriers_.find(offset);
  if (it != mbarriers_.end()) clocks_->acquire(id(w), it->second.completed);
}

}  // namespace cake::emu
