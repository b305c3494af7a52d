// State of the asynchronous matrix products of a CTA's warps.
#pragma once
#include <vector>

#include "async.h"
#include "flight.h"

namespace cake::emu {

struct WgmmaState {
  struct PerWarp {
    std::vector<FlightHandle> open;                  // issued, not committed
    std::deque<std::vector<FlightHandle>> committed;  // oldest first
    bool fenced = false;                             // has executed wgmma.fence at all
    std::vector<u32> sequence;                       // line of each product, to compare the four warps
    bool outstanding() const {
      if (!open.empty()) return true;
      for (const auto& group : committed) {
        if (!group.empty()) return true;
      }
      return false;
    }
  };
  std::vector<PerWarp> warps;
  // What must hold when the CTA ends.
  void check_exit() const;
};

}  // namespace cake::emu
