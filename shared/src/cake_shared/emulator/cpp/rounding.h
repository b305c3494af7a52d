// Directed rounding through the CPU's own rounding mode.
#pragma once
#include <cfenv>

#include "core.h"

namespace cake::emu {

enum class Round : u8 { Nearest, Zero, Down, Up };

// While it lives, arithmetic rounds in the given direction. Operands and results must pass through volatile variables, so
// that the compiler keeps the arithmetic inside.
class RoundingScope {
 public:
  explicit RoundingScope(Round mode) : saved_(std::fegetround()) {
    constexpr int kModes[] = {FE_TONEAREST, FE_TOWARDZERO, FE_DOWNWARD, FE_UPWARD};
    std::fesetround(kModes[static_cast<int>(mode)]);
  }
  ~RoundingScope() { std::fesetround(saved_); }
  RoundingScope(const RoundingScope&) = delete;
  RoundingScope& operator=(const RoundingScope&) = delete;

 private:
  int saved_;
};

}  // namespace cake::emu
