// Global memory: what a launch may touch, and what it may do there.
#pragma once
#include <string>
#include <vector>

#include "core.h"

namespace cake::emu {

struct Allocation {
  enum class Owner : u8 { Caller, Module, Launch };  // Launch: its parameters, which end with it
  u64 begin, end;
  bool read_only = false;
  u8* written = nullptr;  // one byte a byte, non-zero once written; null: everything counts as written
  std::string name;
  Owner owner = Owner::Caller;
};

// Sorted by address and fixed while a launch runs, so that threads read it without locks.
class Registry {
 public:
  void add(Allocation a);
  void finish();  // sorts; overlapping allocations are joined
  // Index of the allocation that holds [address, address + bytes), or -1.
  int find(u64 address, u64 bytes) const;
  const Allocation& operator[](int k) const { return list_[k]; }
  size_t size() const { return list_.size(); }
  std::string describe(u64 address, u64 bytes) const;  // where an address lies, for messages

 private:
  std::vector<Allocation> list_;
};

}  // namespace cake::emu
