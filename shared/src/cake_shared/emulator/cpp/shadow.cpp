#include "shadow.h"

#include <algorithm>

#include "machine.h"

namespace cake::emu {

SharedShadow::SharedShadow(Cta& cta, u32 granule) : gang_(cta.gang), granule_(granule) {}

void SharedShadow::reset(Cta& cta) {
  cta_ = &cta;
  gang_ = cta.gang;
  suspects_.clear();
  clocks_ = &gang_->clocks;
  warps_ = clocks_->warps();
  warps_per_cta_ = static_cast<u32>(cta.warps.size());
  const u32 cells = (cta.shared_end + granule_ - 1) / granule_;
  cells_.assign(cells, Cell{});
  const Program& program = *gang_->launch->program;
  async_columns_ = program.barrier_reads  ? 2 * warps_ + Clocks::kBarrierActors
                   : program.matrix_reads ? 2 * warps_
                   : program.bulk_reads   ? warps_
                                          : 0;
  readers_.assign(static_cast<size_t>(cells) * warps_, 0);
  async_readers_.assign(static_cast<size_t>(cta.shared_end / kUnit + 1) * async_columns_, 0);
  write_pcs_.resize(cells);
  read_pcs_.resize(readers_.size());
  async_read_pcs_.resize(async_readers_.size());
  synced_.clear();
  past_.clear();
  reducing_.clear();
  first_warp_ = cta.rank * warps_per_cta_;
  remote_.assign(warps_ > warps_per_cta_ ? warps_ : 0, Use{});
  sent_.clear();
  mbarriers_.clear();
  copies_.clear();
  issuing_.clear();
  for (auto& b : named_) {
    b.told.reset(clocks_->actors(), warps_);
    b.last.clear();
    b.now.clear();
  }
}

u32 SharedShadow::id(const Warp& w) const { return w.cta->rank * warps_per_cta_ + static_cast<u32>(w.index); }

std::string SharedShadow::place(u32 cell) const {
  return "shared byte" + std::string(granule_ > 1 ? "s " : " ") + hex(cell * granule_) +
         (granule_ > 1 ? " to " + hex(cell * granule_ + granule_ - 1) : "");
}

std::string SharedShadow::name(u32 actor) const {
  if (actor >= clocks_->first_barrier()) return "an asynchronous copy";
  const u32 warp = actor % warps_;
  std::string text = actor < warps_       ? "warp "
                     : actor < 2 * warps_ ? "a bulk copy issued by warp "
                                          : "a matrix product or tcgen05.cp issued by warp ";
  text += std::to_string(warp % warps_per_cta_);
  if (warps_ > warps_per_cta_) text += " of CTA rank " + std::to_string(warp / warps_per_cta_);
  return text;
}

std::string SharedShadow::at(int pc) const { return " at " + place_text(*gang_->launch, pc); }

std::string SharedShadow::unordered(u32 me, u32 other, int other_pc, u32 cell, const char* what, const char* before) const {
  return place(cell) + ": " + what + " by " + name(me) + " with nothing that orders it after the " + before + " of " + name(other) + at(other_pc);
}

void SharedShadow::race(u32 me, u32 other, int other_pc, u32 cell, const char* what, const char* before, int lane) const {
  if (other < warps_) fault("SharedRace", unordered(me, other, other_pc, cell, what, before), lane);
  fault("SharedRace", place(cell) + ": " + what + " by " + name(me) + " where " + name(other) + at(other_pc) +
        " may still read: it knows of no wait that covers it" + ungrouped_read(other, other_pc), lane);
}

// What to add where a wait cannot cover the copy into a cell: no group has it.
std::string SharedShadow::ungrouped_copy(u32 cell) const {
  for (const auto& [warp, list] : copies_) {
    for (const Copies& c : list) {
      for (const Range& r : c.ranges) {
        if (cell < r.offset / granule_ || cell > (r.offset + r.bytes - 1) / granule_) continue;
        const auto& open = c.op->issuer->copies.lane(r.lane).open;
        if (std::find(open.begin(), open.end(), c.op) != open.end()) return ": no cp.async.commit_group follows it";
      }
    }
  }
  return "";
}

std::string SharedShadow::ungrouped_read(u32 actor, int pc) const {
  if (actor < warps_ || actor >= 2 * warps_) return "";  // not a bulk copy's
  const u32 warp = actor - warps_;
  const auto& lanes = gang_->ctas[warp / warps_per_cta_]->warps[warp % warps_per_cta_].bulk.lanes;
  for (int l = 0; lanes && l < kLanes; ++l) {
    for (const auto& op : lanes[l].open) {
      if (op->pc == pc) return ": no cp.async.bulk.commit_group follows it";
    }
  }
  return "";
}

// `before` is not known to the warp. A write of the same value is let pass, for now.
void SharedShadow::unordered_write(Warp& w, u32 cell, const Past& before, bool writes, bool forgive, int lane) {
  const u32 me = id(w);
  if (before.actor >= clocks_->first_barrier()) {
    fault(writes ? "SharedRace" : "UnwaitedResult",
          place(cell) + ": the mbarrier of the copy" + at(before.pc) + " that wrote " + number("it", "them") + " has not been waited for by " + name(me), lane);
  }
  if (!forgive || before.strong) race(me, before.actor, before.pc, cell, writes ? "a write" : "a read", "write", lane);
  u32 old = 0;
  std::memcpy(&old, cta_->shared + cell * granule_, granule_);
  suspects_.push_back({cell, me, before.actor, old, lane, &w, w.pc, before.pc});
}

// The writes before must be known to the warp, to a strong access the ordinary ones; a write must also know of every read.
// True when an ordinary write that is not known was let pass.
bool SharedShadow::check_order(Warp& w, u32 cell, bool writes, bool strong, int lane, bool forgive) {
  const Cell& c = cells_[cell];
  const u32 me = id(w);
  if (c.flags & kMbarrier) {
    fault("BarrierMisuse", place(cell) + (writes ? ": a write to" : ": a read of") + " an mbarrier by other than its own operations: it is " +
          "initialised, and nothing but mbarrier.inval makes memory of it again", lane);
  }
  if (c.flags & kUnderWay && !(strong && c.flags & kReducing)) {
    fault(writes ? "SharedRace" : "UnwaitedResult",
          place(cell) + ": the asynchronous copy" + at(write_pcs_[cell]) + " into " + number("it", "them") +
          " is under way and has not been waited for" + ungrouped_copy(cell), lane);
  }
  bool passed = false;
  if (c.flags & kPast) {
    for (const Past& before : past_.at(cell)) {
      if ((strong && before.strong) || knows(me, before)) continue;
      unordered_write(w, cell, before, writes, forgive, lane);
      passed = true;
    }
  } else if (c.clock > clocks_->of(me).seen[c.writer]) {
    unordered_write(w, cell, {c.clock, c.writer, false, false, false, write_pcs_[cell], {}}, writes, forgive, lane);
    passed = true;
  }
  if (!writes) return passed;
  check_readers(me, cell, readers(cell), 0, warps_, lane);
  if (async_columns_) check_readers(me, cell, async_readers(cell), warps_, async_columns_, lane);
  if (c.flags & kSynced && !strong) check_strong_readers(me, cell, lane);
  return passed;
}

// `read`: clocks of the actors from `first` on.
void SharedShadow::check_readers(u32 me, u32 cell, const u32* read, u32 first, u32 count, int lane) const {
  const u32* seen = clocks_->of(me).seen.data() + first;
  bool unordered = false;
  for (u32 k = 0; k < count; ++k) unordered |= read[k] > seen[k];
  if (!unordered) return;
  for (u32 k = 0; k < count; ++k) {
    if (read[k] <= seen[k]) continue;
    const int pc = first ? async_read_pcs_[static_cast<size_t>(read - async_readers_.data()) + k]
                         : read_pcs_[static_cast<size_t>(read - readers_.data()) + k];
    race(me, first + k, pc, cell, "a write", "read", lane);
  }
}

void SharedShadow::confirm() {
  const std::vector<Suspect> list = std::move(suspects_);
  suspects_.clear();
  for (const Suspect& s : list) {
    u32 now = 0;
    std::memcpy(&now, cta_->shared + s.cell * granule_, granule_);
    if (now == s.old) continue;
    Fault f{"SharedRace", unordered(s.me, s.other, s.other_pc, s.cell, "a write", "write"), s.lane};
    f.warp = s.warp;
    f.pc = s.pc;
    throw f;
  }
}

void SharedShadow::access(Warp& w, u32 offset, u32 bytes, bool reads, bool writes, Access how, int lane) {
  const bool strong = how != Access::Ordinary;
  // Lanes come in order: one that is not behind the last belongs to another execution of the instruction.
  if (!suspects_.empty() && (suspects_[0].pc != w.pc || suspects_[0].warp != &w || lane <= suspects_.back().lane)) confirm();
  const u32 me = id(w), now = clocks_->now(me);
  const auto& seen = clocks_->of(me).seen;
  const u32 first = offset / granule_, last = (offset + bytes - 1) / granule_;
  if (me - first_warp_ >= warps_per_cta_) remote_[me] = {now, 0, w.pc};
  for (u32 cell = first; cell <= last; ++cell) {
    Cell& c = cells_[cell];
    if (reads && !(c.flags & kWritten)) {
      if (c.flags & kUnderWay) check_order(w, cell, writes, strong, lane);
      fault("UninitialisedRead", place(cell) + number(" has", " have") + " never been written", lane);
    }
    bool passed = false;
    if (writes || (c.flags & (kUnderWay | kPast | kMbarrier)) || c.clock > seen[c.writer]) {
      passed = check_order(w, cell, writes, strong, lane, writes && !strong && granule_ <= 4);
    }
    if (strong) {
      strong_access(w, cell, me, now, reads, how != Access::Unread, writes);
    } else if (writes) {
      if (passed) let_pass(cell, me);
      c.writer = static_cast<u16>(me);
      c.clock = now;
      c.flags = passed ? kWritten | kPast : kWritten;
      write_pcs_[cell] = w.pc;
      if (passed) past_[cell].push_back({now, c.writer, false, false, false, w.pc, {}});
    } else {
      const size_t at = static_cast<size_t>(cell) * warps_ + me;
      readers_[at] = now;
      read_pcs_[at] = w.pc;
    }
  }
}

void SharedShadow::check_fenced(const Knowledge& known, u32 cell, u32 actor, u32 clock, int pc) const {
  if (actor >= warps_ || clock > known.seen[actor] || clock <= known.fenced[actor]) return;
  fault("MissingProxyFence",
        place(cell) + number(" was", " were") + " written by " + name(actor) + at(pc) +
            " with ordinary stores and are read by the asynchronous proxy without fence.proxy.async between");
}

void SharedShadow::async_order(Warp& issuer, u32 cell, bool reads, bool writes, bool fenced, bool strong) {
  const Cell& c = cells_[cell];
  const Knowledge& known = clocks_->of(id(issuer));
  if (reads) {
    if (!(c.flags & (kWritten | kUnderWay))) fault("UninitialisedRead", place(cell) + number(" has", " have") + " never been written");
    if (!fenced) {
      // of the generic proxy itself
    } else if (c.flags & kPast) {
      for (const Past& before : past_.at(cell)) {
        if (!before.proxy) check_fenced(known, cell, before.actor, before.clock, before.pc);
      }
    } else if (!(c.flags & (kProxy | kUnderWay))) {
      check_fenced(known, cell, c.writer, c.clock, write_pcs_[cell]);
    }
  }
  check_order(issuer, cell, writes, strong, -1);
}

void SharedShadow::async_read(Warp& issuer, u32 offset, u32 bytes, Reader& reader) {
  if (bytes == 0) return;
  for (u32 cell = offset / granule_; cell <= (offset + bytes - 1) / granule_; ++cell) {
    const u64 history = std::bit_cast<u64>(cells_[cell]);
    if (history == reader.checked) continue;
    async_order(issuer, cell, true, false);
    if (!(cells_[cell].flags & kPast)) reader.checked = history;
  }
  if (reader.actor - warps_ >= async_columns_) return;
  for (u32 at = offset / kUnit; at <= (offset + bytes - 1) / kUnit; ++at) {
    const size_t column = static_cast<size_t>(at) * async_columns_ + reader.actor - warps_;
    async_readers_[column] = std::max(async_readers_[column], reader.clock);
    async_read_pcs_[column] = issuer.pc;
  }
}

void SharedShadow::async_write(Warp& issuer, u32 offset, u32 bytes, Async how) {
  if (bytes == 0) return;
  if (!suspects_.empty()) confirm();  // before the copy changes the bytes
  for (u32 cell = offset / granule_; cell <= (offset + bytes - 1) / granule_; ++cell) {
    Cell& c = cells_[cell];
    const bool reduces = how != Async::Copy;
    async_order(issuer, cell, reduces, true, how != Async::GenericReduce, reduces);
    if (reduces) {
      past(cell);
      ++reducing_[cell];
      c.flags |= kUnderWay | kReducing;
    } else {
      c.flags = static_cast<u8>((c.flags & kWritten) | kUnderWay);
    }
    write_pcs_[cell] = issuer.pc;
  }
}

void SharedShadow::async_arrived(u32 offset, u32 bytes, u32 barrier) {
  if (bytes == 0) return;
  u32 actor = 0, clock = 0;
  const bool known = gang_->ctas[barrier >> kRankShift]->shadow->mbarrier_clock(barrier & (kSharedWindow - 1), actor, clock);
  const u32 first = offset / granule_, last = (offset + bytes - 1) / granule_;
  for (u32 cell = first; cell <= last; ++cell) {
    Cell& c = cells_[cell];
    if (c.flags & kReducing) {
      reduced(cell, actor, known ? clock : 0);
      continue;
    }
    c.flags = kWritten | kProxy;
    if (!known) {
      c.clock = 0;  // an mbarrier that this shadow has not seen initialised: nothing can be said
      continue;
    }
    c.writer = static_cast<u16>(actor);
    c.clock = clock;  // known to whoever waits for the phase that counts it
  }
}

void SharedShadow::copy_begin(Warp& w, u32 offset, u32 bytes, int lane) {
  if (!suspects_.empty()) confirm();
  const u32 first = offset / granule_, last = (offset + bytes - 1) / granule_;
  for (u32 cell = first; cell <= last; ++cell) {
    Cell& c = cells_[cell];
    check_order(w, cell, true, false, lane);
    c.flags = static_cast<u8>((c.flags & kWritten) | kUnderWay);
    write_pcs_[cell] = w.pc;
  }
  issuing_.push_back({offset, bytes, lane});
}

void SharedShadow::copy_issued(Warp& w, const std::shared_ptr<AsyncOp>& op) {
  copies_[id(w)].push_back({op, std::move(issuing_)});
  issuing_.clear();
}

// From here on what the copies wrote for these lanes counts as written by their warp.
void SharedShadow::settle(Warp& w, Copies& copies, u32 lanes, u32 clock) {
  const u32 me = id(w);
  for (const Range& r : copies.ranges) {
    if (!(lanes >> r.lane & 1)) continue;
    for (u32 cell = r.offset / granule_; cell <= (r.offset + r.bytes - 1) / granule_; ++cell) {
      cells_[cell] = Cell{clock, static_cast<u16>(me), kWritten, 0};
    }
  }
  std::erase_if(copies.ranges, [&](const Range& r) { return lanes >> r.lane & 1; });
}

void SharedShadow::copy_waited(Warp& w) {
  auto& list = copies_[id(w)];
  for (auto& c : list) {
    if (c.op->waited) settle(w, c, c.op->waited, clocks_->now(id(w)));
  }
  std::erase_if(list, [](const Copies& c) { return c.ranges.empty(); });
}

void SharedShadow::copy_signal(Warp& w, int lane, const std::vector<std::shared_ptr<AsyncOp>>& copies, u32 clock) {
  auto& list = copies_[id(w)];
  for (auto& c : list) {
    if (std::find(copies.begin(), copies.end(), c.op) != copies.end()) settle(w, c, 1u << lane, clock);
  }
  std::erase_if(list, [](const Copies& c) { return c.ranges.empty(); });
}

// Who arrives must know that the phase before is over, or the arrival may count for that one.
void SharedShadow::barrier_arrive(Warp& w, u32 id_of_barrier) {
  const u32 me = id(w);
  Named& b = named_[id_of_barrier];
  for (const Arrival& before : b.last) {
    if (before.clock <= clocks_->of(me).seen[before.warp]) continue;
    fault("BarrierMisuse", name(me) + " arrives at barrier " + std::to_string(id_of_barrier) + " with nothing that orders it after the arrival of " +
          name(before.warp) + at(before.pc) + " in the phase before: it may count for either phase");
  }
  b.now.push_back({me, clocks_->now(me), w.pc});
  clocks_->release(me, w.mask, b.told);
}

void SharedShadow::barrier_released(Cta& cta, u32 id_of_barrier) {
  Named& b = named_[id_of_barrier];
  for (auto& w : cta.warps) {
    for (const auto& s : w.splits) {
      if (s.state == State::WaitBarrier && s.barrier == id_of_barrier) clocks_->acquire(id(w), s.mask, b.told);
    }
  }
  b.told.reset(clocks_->actors(), warps_);
  std::swap(b.last, b.now);
  b.now.clear();
}

}  // namespace cake::emu
