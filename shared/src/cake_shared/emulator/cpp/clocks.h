// Happens-before between the warps of a gang: vector clocks, passed on by barriers, fences and asynchronous
// completions.
//
// Actors are the warps; by warp, the bulk copies out of shared memory and the matrix products that it has issued; one actor
// a mbarrier for the copies that complete on it; and the launches before this one. A warp knows of another actor's work up
// to a clock; what an actor did at a later clock is unordered with it. A second vector tells up to which clock the other
// warps' ordinary writes are visible to the asynchronous proxy (they lie before a proxy fence).
#pragma once
#include <vector>

#include "core.h"

namespace cake::emu {

struct Knowledge {
  std::vector<u32> seen;    // by actor
  std::vector<u32> fenced;  // by warp
  void reset(u32 actors, u32 warps) {
    seen.assign(actors, 0);
    fenced.assign(warps, 0);
  }
  void learn(const Knowledge& other) {
    for (size_t k = 0; k < seen.size(); ++k) seen[k] = seen[k] < other.seen[k] ? other.seen[k] : seen[k];
    for (size_t k = 0; k < fenced.size(); ++k) fenced[k] = fenced[k] < other.fenced[k] ? other.fenced[k] : fenced[k];
  }
};

class Clocks {
 public:
  static constexpr u32 kBarrierActors = 64;  // more mbarriers than this share actors: orders too much, never too little

  void reset(u32 warps);
  u32 warps() const { return warps_; }
  u32 actors() const { return first_barrier() + kBarrierActors + 1; }
  u32 bulk_actor(u32 warp) const { return warps_ + warp; }
  u32 matrix_actor(u32 warp) const { return 2 * warps_ + warp; }
  u32 first_barrier() const { return 3 * warps_; }
  u32 grid_actor() const { return actors() - 1; }  // clock 1: the launches before this one have ended
  Knowledge& of(u32 warp) { return warps_knowledge_[warp]; }
  u32 now(u32 warp) const { return warps_knowledge_[warp].seen[warp]; }
  // The warp hands on what it knows; what it does from now on is not part of that.
  void release(u32 warp, Knowledge& into) {
    into.learn(warps_knowledge_[warp]);
    ++warps_knowledge_[warp].seen[warp];
  }
  void acquire(u32 warp, const Knowledge& from) { warps_knowledge_[warp].learn(from); }
  // A fence orders with every other fence: coarser than the memory model, so that no legal program is accused.
  void fence(u32 warp) {
    release(warp, fences_);
    acquire(warp, fences_);
  }
  void proxy_fence(u32 warp) {
    Knowledge& k = warps_knowledge_[warp];
    for (u32 w = 0; w < warps_; ++w) k.fenced[w] = k.seen[w];
  }
  void cluster_arrive(u32 warp) { release(warp, cluster_); }
  void cluster_release();  // every warp learns what all have handed on
  u32 new_barrier_actor() { return first_barrier() + next_barrier_++ % kBarrierActors; }
  u32 completed(u32 actor) const { return clocks_[actor]; }
  u32 complete(u32 actor) { return ++clocks_[actor]; }
  // Operations that a warp issues count up the clock of its bulk or matrix actor; whoever waits for one knows of it.
  u32 issued(u32 actor) const { return clocks_[actor]; }
  u32 issue(u32 actor) { return ++clocks_[actor]; }
  void know(u32 warp, u32 actor, u32 clock) {
    u32& seen = warps_knowledge_[warp].seen[actor];
    seen = seen < clock ? clock : seen;
  }
  bool knows(u32 warp, u32 actor, u32 clock) const { return warps_knowledge_[warp].seen[actor] >= clock; }

 private:
  u32 warps_ = 0, next_barrier_ = 0;
  std::vector<Knowledge> warps_knowledge_;
  Knowledge fences_, cluster_;
  std::vector<u32> clocks_;  // by actor: of mbarriers the phases completed, of the others the operations issued
};

}  // namespace cake::emu
