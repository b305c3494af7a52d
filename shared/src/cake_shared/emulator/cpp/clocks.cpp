#include "clocks.h"

namespace cake::emu {

void Clocks::reset(u32 warps) {
  warps_ = warps;
  next_barrier_ = 0;
  warps_knowledge_.resize(warps);
  for (u32 w = 0; w < warps; ++w) {
    warps_knowledge_[w].reset(actors(), warps);
    warps_knowledge_[w].seen[w] = 1;
  }
  fences_.reset(actors(), warps);
  cluster_.reset(actors(), warps);
  clocks_.assign(actors(), 0);
}

void Clocks::cluster_release() {
  for (u32 w = 0; w < warps_; ++w) acquire(w, cluster_);
}

}  // namespace cake::emu
