#include "shadow.h"

#include "machine.h"

namespace cake::emu {

SharedShadow::SharedShadow(Cta& cta, u32 granule) : written_(cta.shared_end, 0) { (void)granule; }

void SharedShadow::check_written(u32 offset, u32 bytes, int lane) const {
  for (u32 k = 0; k < bytes; ++k) {
    if (!written_[offset + k]) {
      fault("UninitialisedRead", "shared byte " + hex(offset + k) + " has never been written", lane);
    }
  }
}

}  // namespace cake::emu
