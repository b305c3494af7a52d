// Tensor memory of a CTA: 128 lanes of the target's number of columns of 32 bits, allocated in columns.
#pragma once
#include <deque>
#include <vector>

#include "async.h"
#include "core.h"
#include "flight.h"

namespace cake::emu {

class TensorMemory {
 public:
  static constexpr u32 kRows = 128;
  explicit TensorMemory(u32 columns) : columns_(columns) {}

  u32 columns() const { return columns_; }
  // First column of a fresh allocation, or columns() when there is no room now.
  u32 allocate(u32 columns);
  void release(u32 first, u32 columns);  // faults unless it is exactly an allocation
  void relinquish() { may_allocate_ = false; }
  bool may_allocate() const { return may_allocate_; }
  // One cell; faults outside of allocations, and on reading what nothing wrote.
  u32 read(u32 row, u32 column) const;
  void write(u32 row, u32 column, u32 value);
  void check_range(u32 row, u32 column, u32 rows, u32 columns) const;
  void check_exit() const;

  struct PerWarp {
    std::vector<FlightHandle> loads;
    std::vector<AsyncHandle> stores;
  };
  std::vector<PerWarp> warps;

 private:
  struct Allocation {
    u32 first, columns;
  };
  bool allocated(u32 column) const;
  std::vector<Allocation> allocations_;
  u32 columns_;
  std::vector<u32> cells_ = std::vector<u32>(kRows * columns_, 0x7fc0dead);
  std::vector<u8> written_ = std::vector<u8>(kRows * columns_, 0);
  bool may_allocate_ = true;
};

}  // namespace cake::emu
