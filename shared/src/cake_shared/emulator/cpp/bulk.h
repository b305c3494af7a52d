// cp.async.bulk and cp.reduce.async.bulk of plain byte ranges.
#pragma once
#include "decode.h"

namespace cake::emu {

void decode_bulk_copy(Decoder& d, Ins& i);

}  // namespace cake::emu
