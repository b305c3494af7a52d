// mbarrier objects: 64 bits of shared memory that count arrivals and transferred bytes, phase after phase.
#pragma once
#include "machine.h"

namespace cake::emu {

// By the asynchronous proxy: when an operation is issued that will signal the mbarrier, and, from the operation's closure,
// when it does. `address` is a shared address with rank bits; `told` is what the issuer knew, which an arrival passes on.
void mbarrier_issue(Warp& w, u32 address, int lane);
void mbarrier_complete_tx(Gang& gang, u32 address, u32 bytes);
void mbarrier_arrive(Gang& gang, u32 address, u32 count, const Knowledge& told, bool for_copies = false);

// What the lanes of a wait wait for, with the state of their mbarriers; empty for other instructions.
std::string mbarrier_waiting(const Warp& w, const Ins& i, u32 lanes);

void mbarrier_expect_arrival(Gang& gang, u32 address);  // one more arrival in this phase

}  // namespace cake::emu
