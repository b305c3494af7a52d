#include "memory.h"

#include <algorithm>

namespace cake::emu {

void Registry::add(Allocation a) { list_.push_back(std::move(a)); }

void Registry::finish() {
  std::stable_sort(list_.begin(), list_.end(), [](const Allocation& x, const Allocation& y) { return x.begin < y.begin; });
  // Views of one tensor overlap. Their union is legal to touch; it is const or tracked only if all parts are.
  std::vector<Allocation> joined;
  for (auto& a : list_) {
    if (a.begin == a.end) continue;
    if (!joined.empty() && a.begin < joined.back().end) {
      Allocation& last = joined.back();
      const bool same = last.begin == a.begin && last.end == a.end;
      last.read_only = last.read_only && a.read_only;
      if (!same || last.written != a.written) last.written = nullptr;
      last.end = std::max(last.end, a.end);
      if (!same) last.name += "+" + a.name;
    } else {
      joined.push_back(a);
    }
  }
  list_ = std::move(joined);
}

int Registry::find(u64 address, u64 bytes) const {
  auto it = std::upper_bound(list_.begin(), list_.end(), address, [](u64 x, const Allocation& a) { return x < a.begin; });
  if (it == list_.begin()) return -1;
  --it;
  return address + bytes <= it->end && address + bytes >= address ? static_cast<int>(it - list_.begin()) : -1;
}

std::string Registry::describe(u64 address, u64 bytes) const {
  const Allocation* best = nullptr;
  u64 distance = ~0ull;
  for (const auto& a : list_) {
    const u64 d = address < a.begin ? a.begin - address : address >= a.end ? address - a.end : 0;
    if (d < distance) distance = d, best = &a;
  }
  const std::string what = std::to_string(bytes) + " bytes at " + hex(address);
  if (!best) return what + "; no allocation is registered";
  const std::string size = " (" + std::to_string(best->end - best->begin) + " bytes)";
  if (address < best->begin) return what + ", " + std::to_string(best->begin - address) + " bytes before " + best->name + size;
  if (address >= best->end) return what + ", " + std::to_string(address - best->end) + " bytes past the end of " + best->name + size;
  return what + ", across the end of " + best->name + size;
}

}  // namespace cake::emu
