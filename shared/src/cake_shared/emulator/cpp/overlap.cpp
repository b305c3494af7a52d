#include "overlap.h"

#include <algorithm>
#include <cstdlib>

#include "access.h"

namespace cake::emu {
namespace {

// Which bytes of a word an access covers, as four bits.
u32 byte_mask(u64 word, u64 address, u32 bytes) {
  const u64 first = word * 4, from = std::max(address, first) - first, to = std::min(address + bytes, first + 4) - first;
  return (1u << to) - (1u << from);
}

constexpr u32 kOrdinary = 16, kLow = 31, kShift = 5;

// CTAs on other threads note at the same time; the last instruction stands whatever the order.
void merge(u32& word, u32 entry) {
  std::atomic_ref<u32> shared(word);
  u32 old = shared.load(std::memory_order_relaxed);
  for (;;) {
    const u32 next = (std::max(old, entry) & ~kLow) | ((old | entry) & kLow);
    if (next == old || shared.compare_exchange_weak(old, next, std::memory_order_relaxed)) return;
  }
}

void check_against(Warp& w, const LaunchRecord& other, const Allocation& a, u64 address, u32 bytes, Rw rw, int lane, bool waited) {
  const bool writes = cake::emu::writes(rw);
  auto what = [&] {
    return std::string(writes ? "writes " : "reads ") + std::to_string(bytes) + " bytes of " + a.name + " at byte " +
           std::to_string(address - a.begin);
  };
  if (other.unknown()) {
    if (a.owner != Allocation::Owner::Caller) return;
    fault("MissingGridWait", what() + (waited ? ": the launches between execute no griddepcontrol.wait, and" : " before griddepcontrol.wait:") +
          " what ran before them on the stream may still write there", lane);
  }
  bool wrote = false;
  const int pc = other.touched(address, bytes, !writes, wrote);
  if (pc < 0) return;
  const std::string there = std::string(wrote ? " wrote" : " read") + " at " + other.place(pc);
  if (waited) {
    fault("MissingGridWait", what() + ", which kernel " + other.kernel + there + ": it may still run, the launch between the two "
          "executes no griddepcontrol.wait", lane);
  }
  fault("MissingGridWait", what() + " before griddepcontrol.wait, which kernel " + other.kernel + there + ": it may still run", lane);
}

}  // namespace

void LaunchRecord::Free::operator()(u32* p) const { std::free(p); }

LaunchRecord::Words LaunchRecord::zeroed(u64 count) {
  auto* p = static_cast<u32*>(std::calloc(count, sizeof(u32)));  // pages that nothing touches cost nothing
  if (!p) fault("LaunchError", "no memory to note the accesses of a launch");
  return Words(p);
}

LaunchRecord::LaunchRecord(const Program& program, const std::map<u32, std::string>& files, const Registry& registry)
    : kernel(program.name), files_(files) {
  for (size_t k = 0; k < registry.size(); ++k) {
    const Allocation& a = registry[static_cast<int>(k)];
    Table t{a.begin, a.end, nullptr, nullptr};
    if (a.owner != Allocation::Owner::Launch) {
      const u64 words = (a.end + 3) / 4 - a.begin / 4;
      t.reads = zeroed(words);
      if (!a.read_only) t.writes = zeroed(words);
    }
    tables_.push_back(std::move(t));
  }
  for (const Ins& i : program.code) places_.emplace_back(i.line, i.loc);
}

void LaunchRecord::note(int allocation, u64 address, u32 bytes, bool reads, bool writes, bool by_copy, int pc) {
  Table& t = tables_[static_cast<size_t>(allocation)];
  if (!t.reads) return;
  const u64 base = t.begin / 4, last = (address + bytes - 1) / 4;
  for (u64 word = address / 4; word <= last; ++word) {
    const u32 entry = static_cast<u32>(pc + 1) << kShift | (by_copy ? 0 : kOrdinary) | byte_mask(word, address, bytes);
    if (reads) merge(t.reads[word - base], entry);
    if (writes && t.writes) merge(t.writes[word - base], entry);
  }
}

int LaunchRecord::touched(u64 address, u32 bytes, bool writes_only, bool& wrote) const {
  auto t = std::upper_bound(tables_.begin(), tables_.end(), address, [](u64 x, const Table& y) { return x < y.begin; });
  // An access may start before an allocation of the other launch and reach into it.
  if (t != tables_.begin() && (t - 1)->end > address) --t;
  for (; t != tables_.end() && t->begin < address + bytes; ++t) {
    if (!t->reads) continue;
    const u64 from = std::max(address, t->begin), to = std::min(address + bytes, t->end);
    for (u64 word = from / 4; word <= (to - 1) / 4; ++word) {
      const u32 mask = byte_mask(word, from, static_cast<u32>(to - from));
      const u32 write = t->writes ? t->writes[word - t->begin / 4] : 0;
      wrote = (write & mask) != 0;
      if (wrote) return static_cast<int>(write >> kShift) - 1;
      const u32 read = t->reads[word - t->begin / 4];
      if (!writes_only && (read & mask)) return static_cast<int>(read >> kShift) - 1;
    }
  }
  return -1;
}

int LaunchRecord::stored(int allocation, u64 address, u32 bytes) const {
  const Table& t = tables_[static_cast<size_t>(allocation)];
  if (!t.writes) return -1;
  for (u64 word = address / 4; word <= (address + bytes - 1) / 4; ++word) {
    const u32 write = t.writes[word - t.begin / 4];
    if ((write & kOrdinary) && (write & byte_mask(word, address, bytes))) return static_cast<int>(write >> kShift) - 1;
  }
  return -1;
}

std::string LaunchRecord::place(int pc) const {
  const auto& [line, loc] = places_[static_cast<size_t>(pc)];
  std::string text = "line " + std::to_string(line);
  if (!loc.line) return text;
  auto file = files_.find(loc.file);
  return text + " (" + (file == files_.end() ? "?" : file->second) + ":" + std::to_string(loc.line) + ")";
}

void StreamHistory::restart(bool unknown_before) {
  last_ = unknown_before ? std::make_shared<LaunchRecord>() : nullptr;
}

std::shared_ptr<LaunchRecord> StreamHistory::begin(const Program& program, const std::map<u32, std::string>& files,
                                                   const Registry& registry, bool programmatic) {
  auto record = std::make_shared<LaunchRecord>(program, files, registry);
  record->programmatic = programmatic;
  if (!programmatic || !last_) return record;  // an ordinary launch starts when everything before it has ended
  record->at_start.push_back(last_);
  if (last_->programmatic) {
    if (!last_->starts_late) record->at_start.insert(record->at_start.end(), last_->at_start.begin(), last_->at_start.end());
    record->after_wait = last_->waited ? last_->after_wait : last_->at_start;
  }
  // What those knew of still earlier launches has been taken over: a chain of launches keeps no more than it needs.
  last_->at_start.clear();
  last_->after_wait.clear();
  return record;
}

void overlap_access(Warp& w, int allocation, u64 address, u32 bytes, Rw rw, int lane, bool by_copy) {
  LaunchRecord& record = *w.gang->launch->record;
  if (bytes == 0 || w.gang->async_issuer) return;  // asynchronous operations are judged where they are issued
  if (record.programmatic) {
    const u32 lanes = lane < 0 ? w.mask : 1u << lane;
    const bool waited = !(lanes & ~w.gang->clocks.grid_lanes(w.cta->shadow->id(w)));
    const auto& others = waited ? record.after_wait : record.at_start;
    for (const auto& other : others) {
      check_against(w, *other, w.gang->launch->registry[allocation], address, bytes, rw, lane, waited);
    }
  }
  if (by_copy && reads(rw) && !record.proxy_fenced) {
    const int pc = record.stored(allocation, address, bytes);
    if (pc >= 0) {
      const Allocation& a = w.gang->launch->registry[allocation];
      fault("MissingProxyFence", "a copy reads " + a.name + " from byte " + std::to_string(address - a.begin) +
            " on, where this kernel has stored at " + record.place(pc) +
            ": no thread has executed fence.proxy.async for global memory", lane);
    }
  }
  record.note(allocation, address, bytes, reads(rw), writes(rw), by_copy, w.pc);
}

}  // namespace cake::emu
