// Handlers that the decoder itself inserts.
#pragma once
#include <string>

#include "program.h"

namespace cake::emu {

void h_narrow(Warp&, const Ins&);         // 32-bit slot d = low half of 64-bit slot a
void h_widen_unsigned(Warp&, const Ins&); // 64-bit slot d = zero-extended 32-bit slot a
void h_widen_signed(Warp&, const Ins&);
void h_not_predicate(Warp&, const Ins&);  // predicate d = !a
void h_set_predicate(Warp&, const Ins&);  // predicate d = imm != 0
void h_clock(Warp&, const Ins&);          // slot d = a counter; width 4 or 8
void h_copy_local(Warp&, const Ins&);     // imm bytes of thread-local memory from offset a to offset d

Handler external_function(const std::string& name);  // vprintf, __assertfail; null for others

}  // namespace cake::emu
