// Strong accesses to shared memory (relaxed, acquire, release, volatile and atomic ones), as the memory model of the PTX
// ISA has them: they do not race with each other, and a release that a strong read observes passes on what its warp knew.
#include "machine.h"
#include "shadow.h"

namespace cake::emu {

SharedShadow::Synced& SharedShadow::synced(u32 cell) {
  Synced& s = synced_[cell];
  if (!(cells_[cell].flags & kSynced)) {  // an ordinary write or a copy has ended what was before
    s = Synced{clocks_->nothing(), std::vector<u32>(warps_, 0), std::vector<int>(warps_, -1), std::vector<bool>(warps_, false), {}, {}};
    cells_[cell].flags |= kSynced;
  }
  return s;
}

// What was before the next write stays on record: the cell itself tells of the last one only.
std::vector<SharedShadow::Past>& SharedShadow::past(u32 cell) {
  Cell& c = cells_[cell];
  std::vector<Past>& list = past_[cell];
  if (c.flags & kPast) return list;
  list.clear();
  if (c.clock) list.push_back({c.clock, c.writer, false, (c.flags & kProxy) != 0, false, write_pcs_[cell], {}});
  c.flags |= kPast;
  return list;
}

// A warp that has read a strong write with a strong read comes after that write, if not after what its writer did before,
// and so does whoever knows of that read.
bool SharedShadow::knows(u32 me, const Past& write) const {
  const auto& seen = clocks_->of(me).seen;
  if (write.clock <= seen[write.actor]) return true;
  for (const auto& [warp, when] : write.observers) {
    if (warp == me || when <= seen[warp]) return true;
  }
  return false;
}

// An ordinary write of the same value follows: those before that it is not ordered after still count.
void SharedShadow::let_pass(u32 cell, u32 me) {
  std::erase_if(past(cell), [&](const Past& before) { return knows(me, before); });
}

void SharedShadow::observe(u32 cell, u32 me, u32 now) {
  for (Past& before : past_.at(cell)) {
    if (!before.strong || !before.chained || before.actor == me) continue;
    bool known = false;
    for (const auto& [warp, when] : before.observers) known |= warp == me;
    if (!known) before.observers.emplace_back(me, now);
  }
}

void SharedShadow::check_strong_readers(u32 me, u32 cell, int lane) const {
  const Synced& s = synced_.at(cell);
  const auto& seen = clocks_->of(me).seen;
  for (u32 k = 0; k < warps_; ++k) {
    if (s.reads[k] > seen[k]) race(me, k, s.read_pcs[k], cell, "a write", "read", lane);
  }
}

void SharedShadow::strong_access(Warp& w, u32 cell, u32 me, u32 now, bool reads, bool looks, bool writes) {
  Cell& c = cells_[cell];
  Synced& s = synced(cell);
  if (reads && looks) {
    if (!s.observed[me] && c.flags & kPast) observe(cell, me, now);
    s.observed[me] = true;
    s.reads[me] = now;
    s.read_pcs[me] = w.pc;
  }
  if (!writes) return;
  s.reads[me] = 0;  // who comes after the write comes after what its warp has read before, an atomic's own read with it
  std::vector<Past>& list = past(cell);
  Past* own = nullptr;
  for (Past& before : list) {
    if (before.strong && before.actor == me) own = &before;
    before.chained = before.chained && reads;
  }
  if (!own) own = &list.emplace_back();
  *own = {now, static_cast<u16>(me), true, false, true, w.pc, {}};
  c.writer = static_cast<u16>(me);
  c.clock = now;
  c.flags = static_cast<u8>((c.flags & (kUnderWay | kReducing)) | kWritten | kSynced | kPast);
  write_pcs_[cell] = w.pc;
  // An atomic that has looked has seen all before; one that has not, or a plain store, has not.
  const bool knew = s.observed[me] && looks;
  s.observed.assign(warps_, false);
  s.observed[me] = knew;
}

// One of the reductions under way is done: a strong write, known to whoever waits for the phase of the mbarrier that counts it.
void SharedShadow::reduced(u32 cell, u32 actor, u32 clock) {
  Cell& c = cells_[cell];
  if (--reducing_[cell] == 0) c.flags &= static_cast<u8>(~(kUnderWay | kReducing));
  if (!clock) return;  // an mbarrier that this shadow has not seen initialised: nothing can be said
  for (Past& before : past_.at(cell)) {
    if (before.actor != actor || !before.strong) continue;
    before.clock = clock;
    before.pc = write_pcs_[cell];
    return;
  }
  past_.at(cell).push_back({clock, static_cast<u16>(actor), true, true, false, write_pcs_[cell], {}});
}

void SharedShadow::order(Warp& w, u32 offset, u32 bytes, Strong how) {
  const u32 me = id(w);
  for (u32 cell = offset / granule_; cell <= (offset + bytes - 1) / granule_; ++cell) {
    Synced& s = synced(cell);
    if (how.reads && how.looks) {
      if (!s.handed.empty) {
        s.read.try_emplace(me, clocks_->nothing()).first->second.learn(s.handed);
        if (!how.acquires) clocks_->acquire_relaxed(me, s.handed);
      }
      // A strong read here and then an acquire here by the same thread are an acquire pattern too.
      const auto read = s.read.find(me);
      if (how.acquires && read != s.read.end()) clocks_->acquire(me, how.lanes, read->second);
    }
    if (!how.writes) continue;
    if (!how.reads) s.handed = clocks_->nothing();
    if (how.releases) {
      Knowledge& released = s.released.try_emplace(me, clocks_->nothing()).first->second;
      clocks_->release(me, how.lanes, released);
      s.handed.learn(released);
    } else {
      clocks_->release_relaxed(me, s.handed);
      // A release here and then a strong write here by the same thread are a release pattern too.
      const auto before = s.released.find(me);
      if (before != s.released.end()) s.handed.learn(before->second);
    }
  }
}

}  // namespace cake::emu
