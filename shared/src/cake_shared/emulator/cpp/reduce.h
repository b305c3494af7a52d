// Elementwise reductions of bulk copies into their destination.
#pragma once
#include "types.h"

namespace cake::emu {

// `code` is the operation (add min max and or xor inc dec) with the Type in bits 8 and up.
bool reducible(u32 code);
void reduce_bytes(u8* to, const u8* from, u32 bytes, u32 code);

}  // namespace cake::emu
