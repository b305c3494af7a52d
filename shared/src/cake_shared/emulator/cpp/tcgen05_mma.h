// The asynchronous pipe of tcgen05: products, copies from shared memory, shifts.
#pragma once
#include "decode.h"
#include "machine.h"

namespace cake::emu {

constexpr u32 kPair = 1;  // Ins::flags: cta_group::2

TensorMemory& tensor_memory(Cta& cta);
u64 tensor_pipe(const Cta& cta);         // the stream whose operations complete in order
Cta& pair_peer(Warp& w, Cta& cta);       // the other CTA of a pair (cta_group::2)

void decode_tensor_mma(Decoder& d, Ins& i);
void decode_tensor_cp(Decoder& d, Ins& i);
void decode_tensor_shift(Decoder& d, Ins& i);

}  // namespace cake::emu
