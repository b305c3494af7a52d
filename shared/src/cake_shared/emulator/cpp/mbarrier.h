// mbarrier objects: 64 bits of shared memory that count arrivals and transferred bytes, phase after phase.
#pragma once
#include "machine.h"

namespace cake::emu {

// Completion by the asynchronous proxy, from an operation's closure. `address` is a shared address with rank bits.
void mbarrier_complete_tx(Gang& gang, u32 address, u32 bytes);
void mbarrier_arrive(Gang& gang, u32 address, u32 count, bool for_copies = false);

// What the lanes of a wait wait for, with the state of their mbarriers; empty for other instructions.
std::string mbarrier_waiting(const Warp& w, const Ins& i, u32 lanes);

void mbarrier_expect_arrival(Gang& gang, u32 address);  // one more arrival in this phase

}  // namespace cake::emu
