#include "tensor_memory.h"

#include <algorithm>

namespace cake::emu {

u32 TensorMemory::allocate(u32 columns) {
  for (u32 first = 0; first + columns <= columns_; first += 32) {
    const bool clash = std::any_of(allocations_.begin(), allocations_.end(), [&](const Allocation& a) {
      return first < a.first + a.columns && a.first < first + columns;
    });
    if (clash) continue;
    allocations_.push_back({first, columns});
    // What an earlier owner left is not this owner's data.
    for (u32 row = 0; row < kRows; ++row) std::fill_n(written_.begin() + row * columns_ + first, columns, u8(0));
    return first;
  }
  return columns_;
}

void TensorMemory::release(u32 first, u32 columns) {
  auto at = std::find_if(allocations_.begin(), allocations_.end(),
                         [&](const Allocation& a) { return a.first == first && a.columns == columns; });
  if (at == allocations_.end()) {
    std::string live;
    for (const auto& a : allocations_) live += " [" + std::to_string(a.first) + ", +" + std::to_string(a.columns) + ")";
    fault("TensorMemoryLeak", "deallocates columns [" + std::to_string(first) + ", +" + std::to_string(columns) +
          "), allocated are" + (live.empty() ? " none" : live));
  }
  allocations_.erase(at);
}

bool TensorMemory::allocated(u32 column) const {
  for (const auto& a : allocations_) {
    if (column >= a.first && column < a.first + a.columns) return true;
  }
  return false;
}

void TensorMemory::check_range(u32 row, u32 column, u32 rows, u32 columns) const {
  if (row + rows > kRows) fault("OutOfBounds", "tensor-memory lanes " + std::to_string(row) + " to " + std::to_string(row + rows - 1) + " of 128");
  for (u32 k = 0; k < columns; ++k) {
    if (column + k >= columns_ || !allocated(column + k)) {
      fault("OutOfBounds", "tensor-memory column " + std::to_string(column + k) + " is not allocated");
    }
  }
}

u32 TensorMemory::read(u32 row, u32 column) const {
  const u32 at = row * columns_ + column;
  if (!written_[at]) {
    fault("UninitialisedRead", "tensor memory at lane " + std::to_string(row) + ", column " + std::to_string(column) +
          " has never been written");
  }
  return cells_[at];
}

void TensorMemory::write(u32 row, u32 column, u32 value) {
  const u32 at = row * columns_ + column;
  cells_[at] = value;
  written_[at] = 1;
}

void TensorMemory::check_exit() const {
  if (!allocations_.empty()) {
    fault("TensorMemoryLeak", "the CTA ends with " + std::to_string(allocations_[0].columns) +
          " columns of tensor memory from column " + std::to_string(allocations_[0].first) + " on still allocated");
  }
  for (const auto& w : warps) {
    if (!w.stores.empty()) fault("AsyncInFlight", "the CTA ends with tcgen05.st that no tcgen05.wait::st has covered");
    if (!w.loads.empty()) fault("AsyncInFlight", "the CTA ends with tcgen05.ld that no tcgen05.wait::ld has covered");
  }
}

}  // namespace cake::emu
