// Tensor copies, as the decoder of "cp" hands them over.
#pragma once

namespace cake::emu {

class Decoder;
struct Ins;

// Decodes cp.async.bulk.tensor, cp.reduce.async.bulk.tensor and cp.async.bulk.prefetch.tensor; false for other opcodes.
bool decode_tensor_copy(Decoder& d, Ins& i);

}  // namespace cake::emu
