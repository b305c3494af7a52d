#include "clocks.h"

namespace cake::emu {

void Clocks::reset(u32 warps) {
  warps_ = warps;
  next_barrier_ = 0;
  for (auto* list : {&warps_knowledge_, &staged_, &observed_, &sequential_}) {
    list->resize(warps);
    for (auto& k : *list) k.reset(actors(), warps);
  }
  for (u32 w = 0; w < warps; ++w) {
    warps_knowledge_[w].seen[w] = 1;
    warps_knowledge_[w].empty = false;
  }
  for (auto* k : {&total_, &global_, &cluster_arriving_, &cluster_completed_}) k->reset(actors(), warps);
  grid_lanes_.assign(warps, 0);
  meeting_.assign(actors(), 0);
  met_.assign(actors(), 0);
  clocks_.assign(actors(), 0);
}

Knowledge Clocks::nothing() const {
  Knowledge k;
  k.reset(actors(), warps_);
  return k;
}

void Clocks::acquire(u32 warp, u32 lanes, const Knowledge& from) {
  if (from.empty) return;
  Knowledge& k = warps_knowledge_[warp];
  k.learn(from);
  k.seen[grid_actor()] = 0;
  if (from.seen[grid_actor()]) grid_lanes_[warp] |= lanes;
}

void Clocks::fence(u32 warp, u32 lanes, bool acquires, bool releases, bool total) {
  if (acquires) acquire(warp, lanes, observed_[warp]);
  if (total) {
    sequential_[warp].learn(total_);
    release(warp, lanes, total_);
  }
  if (!releases) return;
  copy_out(warp, lanes, staged_[warp]);
  ++warps_knowledge_[warp].seen[warp];
}

}  // namespace cake::emu
