#include "flight.h"

#include <algorithm>

#include "machine.h"

namespace cake::emu {

void FlightEntry::run_copies(Warp& w) const {
  for (const Copy& c : copies) {
    each_lane(c.mask, [&](int l) { w.set32(c.to, l, w.lane32(c.from, l)); });
  }
}

void RegisterFlight::add(FlightHandle entry) {
  for (u32 slot : entry->writes) marks_[unit(slot)] |= kWritten;
  for (u32 slot : entry->reads) marks_[unit(slot)] |= kRead;
  entries_.push_back(std::move(entry));
}

void RegisterFlight::settle() {
  auto gone = [](const FlightHandle& e) { return e->waited; };
  if (std::none_of(entries_.begin(), entries_.end(), gone)) return;
  for (const auto& e : entries_) {
    if (!e->waited) continue;
    for (u32 slot : e->writes) marks_[unit(slot)] = 0;
    for (u32 slot : e->reads) marks_[unit(slot)] = 0;
  }
  entries_.erase(std::remove_if(entries_.begin(), entries_.end(), gone), entries_.end());
  for (const auto& e : entries_) {
    for (u32 slot : e->writes) marks_[unit(slot)] |= kWritten;
    for (u32 slot : e->reads) marks_[unit(slot)] |= kRead;
  }
}

FlightHandle RegisterFlight::writer(u32 slot) const {
  for (auto e = entries_.rbegin(); e != entries_.rend(); ++e) {
    if (std::find((*e)->writes.begin(), (*e)->writes.end(), slot) != (*e)->writes.end()) return *e;
  }
  return nullptr;
}

void RegisterFlight::unwaited(const Warp& w, const FlightEntry& e) const {
  fault("UnwaitedResult", "uses a register that " + w.gang->launch->program->opcodes[e.opcode] + " of line " +
        std::to_string(e.line) + " writes, before the wait for it");
}

// A copy into a register that an operation in flight would write later: the operation happens first.
void RegisterFlight::overwrite(Warp& w, u32 slot) {
  for (auto& e : entries_) {
    auto at = std::find(e->writes.begin(), e->writes.end(), slot);
    if (at == e->writes.end()) continue;
    w.gang->async.complete(*w.gang, e->op);
    e->writes.erase(at);
  }
  marks_[unit(slot)] &= static_cast<u8>(~kWritten);
}

bool RegisterFlight::admit(Warp& w) {
  if (entries_.empty()) return true;
  const Program& p = *w.gang->launch->program;
  const Program::Touched& touched = p.touched[w.pc];
  if (touched.role == Program::Role::InFlight) return true;  // checks for itself
  const bool copy = touched.role == Program::Role::Copy;
  for (u32 k = 0; k < touched.reads; ++k) {
    const u32 slot = p.touched_slots[touched.first + k];
    if (!is_written(slot)) continue;
    const FlightHandle e = writer(slot);
    if (!copy) unwaited(w, *e);
    const u32 to = p.touched_slots[touched.first + touched.reads];
    if (to == slot) return true;
    if (is_written(to)) overwrite(w, to);
    e->writes.push_back(to);
    marks_[unit(to)] |= kWritten;
    if (e->op->done) return true;
    e->copies.push_back({to, slot, w.mask});
    return false;
  }
  for (u32 k = 0; k < touched.writes; ++k) {
    const u32 slot = p.touched_slots[touched.first + touched.reads + k];
    if (is_written(slot)) {
      if (!copy) unwaited(w, *writer(slot));
      overwrite(w, slot);
    }
    if (is_read(slot)) {
      for (const auto& e : entries_) {
        if (std::find(e->reads.begin(), e->reads.end(), slot) == e->reads.end()) continue;
        fault("UnwaitedResult", "changes a register that " + p.opcodes[e->opcode] + " of line " + std::to_string(e->line) +
              " still reads, before the wait for it");
      }
    }
  }
  return true;
}

}  // namespace cake::emu
