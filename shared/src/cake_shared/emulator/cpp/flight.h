// Registers that operations in flight will write or still read: destinations and register operands of wgmma, destinations
// of tcgen05.ld. Until the wait that covers an operation, its destinations must not be used and its operands not changed.
#pragma once
#include <memory>
#include <vector>

#include "async.h"

namespace cake::emu {

struct Warp;

struct FlightEntry {
  AsyncHandle op;
  std::vector<u32> writes, reads;  // register slots
  u32 sequence = 0;                // a wgmma's number among those of its warpgroup, from 1
  int pc = -1;
  u32 opcode = 0;
  bool waited = false;
  // Compilers copy and pack destinations with mov before the wait, which assembles to nothing. A plain copy happens when
  // the operation does; packing makes the operation happen. Either way what the mov writes is in flight too.
  struct Copy {
    u32 to, from, mask;
  };
  std::vector<Copy> copies;
  void run_copies(Warp& w) const;
};
using FlightHandle = std::shared_ptr<FlightEntry>;

class RegisterFlight {
 public:
  explicit RegisterFlight(u32 register_bytes) : marks_(register_bytes / (kLanes * 4) + 2, 0) {}
  void add(FlightHandle entry);
  void settle();  // forgets entries that have been waited for
  // Checks the current instruction against what is in flight; false when it was a copy that is now part of an entry.
  bool admit(Warp& w);
  bool is_written(u32 slot) const { return marks_[unit(slot)] & kWritten; }
  bool is_read(u32 slot) const { return marks_[unit(slot)] & kRead; }
  // The newest entry that writes `slot`, or null.
  FlightHandle writer(u32 slot) const;
  // A register that `e` writes is used before its wait: a fault, or with cheap detectors the operation happens now.
  void unwaited(Warp& w, const FlightEntry& e) const;
  // A register that an operation in flight reads is changed: a fault.
  void still_read(Warp& w, u32 slot) const;
  bool empty() const { return entries_.empty(); }

 private:
  static constexpr u8 kWritten = 1, kRead = 2;
  static u32 unit(u32 slot) { return slot / (kLanes * 4); }
  void overwrite(Warp& w, u32 slot);
  bool admit_copy(Warp& w);
  std::vector<FlightHandle> entries_;
  std::vector<u8> marks_;
};

}  // namespace cake::emu
