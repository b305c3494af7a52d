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

void RegisterFlight::unwaited(Warp& w, const FlightEntry& e) const {
  if (w.gang->launch->detect != Detect::All) {
    w.gang->async.complete(*w.gang, e.op);
    return;
  }
  fault("UnwaitedResult", "uses a register that " + w.gang->launch->program->opcodes[e.opcode] + " at " +
        place_text(*w.gang->launch, e.pc) + " writes, before the wait for it");
}

void RegisterFlight::still_read(Warp& w, u32 slot) const {
  for (const auto& e : entries_) {
    if (std::find(e->reads.begin(), e->reads.end(), slot) == e->reads.end()) continue;
    fault("UnwaitedResult", "changes a register that " + w.gang->launch->program->opcodes[e->opcode] + " at " +
          place_text(*w.gang->launch, e->pc) + " still reads, before the wait for it");
  }
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

// A mov whose source is in flight.
bool RegisterFlight::admit_copy(Warp& w) {
  const Program& p = *w.gang->launch->program;
  const Program::Touched& touched = p.touched[w.pc];
  const u32* reads = p.touched_slots.data() + touched.first;
  const u32* writes = reads + touched.reads;
  FlightHandle last;
  for (u32 k = 0; k < touched.reads; ++k) {
    if (!is_written(reads[k])) continue;
    last = writer(reads[k]);
    if (touched.reads > 1 || touched.writes > 1) w.gang->async.complete(*w.gang, last->op);
  }
  for (u32 k = 0; k < touched.writes; ++k) {
    if (touched.reads == 1 && writes[k] == reads[0]) return true;
    if (is_written(writes[k])) overwrite(w, writes[k]);
    last->writes.push_back(writes[k]);
    marks_[unit(writes[k])] |= kWritten;
  }
  if (last->op->done) return true;
  last->copies.push_back({writes[0], reads[0], w.mask});
  return false;
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
    if (copy) return admit_copy(w);
    unwaited(w, *writer(slot));
  }
  for (u32 k = 0; k < touched.writes; ++k) {
    const u32 slot = p.touched_slots[touched.first + touched.reads + k];
    if (is_written(slot)) {
      if (!copy) unwaited(w, *writer(slot));
      overwrite(w, slot);
    }
    if (is_read(slot) && w.gang->launch->detect == Detect::All) still_read(w, slot);
  }
  return true;
}

}  // namespace cake::emu
