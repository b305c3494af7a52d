// Happens-before between the warps of a gang: vector clocks, passed on by barriers, by releases and acquires, by fences
// with strong accesses, and by asynchronous completions.
//
// Actors are the warps; by warp, the bulk copies out of shared memory and the matrix products that it has issued; one actor
// a mbarrier for the copies that complete on it; and the launches before this one. A warp knows of another actor's work up
// to a clock; what an actor did at a later clock is unordered with it. A second vector tells up to which clock the other
// warps' ordinary writes are visible to the asynchronous proxy (they lie before a proxy fence).
// A third tells up to which clock their initialisations of mbarriers are known, where a fence speaks for those alone.
//
// What two lanes of a warp do counts as ordered, with one exception: which lanes know that the launches before this one
// have ended is kept a lane.
#pragma once
#include <vector>

#include "core.h"

namespace cake::emu {

struct Knowledge {
  std::vector<u32> seen;    // by actor
  std::vector<u32> fenced;  // by warp
  std::vector<u32> inits;   // by warp
  bool empty = true;
  void reset(u32 actors, u32 warps) {
    seen.assign(actors, 0);
    fenced.assign(warps, 0);
    inits.assign(warps, 0);
    empty = true;
  }
  void learn(const Knowledge& other) {
    if (other.empty) return;
    empty = false;
    for (size_t k = 0; k < seen.size(); ++k) seen[k] = seen[k] < other.seen[k] ? other.seen[k] : seen[k];
    for (size_t k = 0; k < fenced.size(); ++k) fenced[k] = fenced[k] < other.fenced[k] ? other.fenced[k] : fenced[k];
    for (size_t k = 0; k < inits.size(); ++k) inits[k] = inits[k] < other.inits[k] ? other.inits[k] : inits[k];
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
  u32 grid_actor() const { return actors() - 1; }  // in what is passed on: clock 1, the launches before this one have ended
  Knowledge& of(u32 warp) { return warps_knowledge_[warp]; }
  u32 now(u32 warp) const { return warps_knowledge_[warp].seen[warp]; }
  Knowledge nothing() const;

  // These lanes of the warp hand on what it knows; what it does from now on is not part of that.
  void release(u32 warp, u32 lanes, Knowledge& into) {
    copy_out(warp, lanes, into);
    ++warps_knowledge_[warp].seen[warp];
  }
  // As a relaxed operation does: only what lay before the warp's last releasing fence.
  void release_relaxed(u32 warp, Knowledge& into) const { into.learn(staged_[warp]); }
  void acquire(u32 warp, u32 lanes, const Knowledge& from);
  // As a relaxed operation does: it is known after the warp's next acquiring fence.
  void acquire_relaxed(u32 warp, const Knowledge& from) { observed_[warp].learn(from); }
  // `total`: fence.sc, of which any two are ordered. Which of them came first a warp can only tell by what it reads by a
  // strong access after its own: from then on it counts.
  void fence(u32 warp, u32 lanes, bool acquires, bool releases, bool total);
  void strong_read(u32 warp, u32 lanes) {
    if (sequential_[warp].empty) return;
    acquire(warp, lanes, sequential_[warp]);
    sequential_[warp].reset(actors(), warps_);
  }
  // fence.mbarrier_init: its release is of the warp's initialisations of mbarriers alone.
  void init_fence(u32 warp) {
    staged_[warp].inits[warp] = now(warp);
    staged_[warp].empty = false;
    ++warps_knowledge_[warp].seen[warp];
  }
  bool knows_init(u32 warp, u32 initialiser, u32 clock) const {
    const Knowledge& k = warps_knowledge_[warp];
    return k.seen[initialiser] >= clock || k.inits[initialiser] >= clock;
  }
  // What the warp writes from now on does not lie before it.
  void proxy_fence(u32 warp) {
    Knowledge& k = warps_knowledge_[warp];
    for (u32 w = 0; w < warps_; ++w) k.fenced[w] = k.seen[w];
    ++k.seen[warp];
  }
  // Strong accesses to global memory count as accesses to one place: who acquires there may have learned through any chain
  // of other CTAs from whoever released there.
  Knowledge& global_place() { return global_; }

  void cluster_arrive(u32 warp, u32 lanes, bool relaxed) {
    reach(warp);
    if (!relaxed) return release(warp, lanes, cluster_arriving_);
    release_relaxed(warp, cluster_arriving_);
    ++warps_knowledge_[warp].seen[warp];  // the barrier does not wait for what follows
  }
  void cluster_complete() {
    cluster_completed_.learn(cluster_arriving_);
    met_ = meeting_;
  }
  // What the actor did up to this clock was over when the last phase of the cluster's barrier ended, relaxed or not: that
  // orders no memory, but it tells who may exit. Of asynchronous actors it is what a warp that arrived knew.
  u32 met(u32 actor) const { return met_[actor]; }
  void left(u32 warp) { reach(warp); }  // exited: the barrier does not wait for it
  void cluster_wait(u32 warp, u32 lanes) { acquire(warp, lanes, cluster_completed_); }

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

  // The launches before this one have ended, to the knowledge of these lanes.
  u32 grid_lanes(u32 warp) const { return grid_lanes_[warp]; }
  void know_grid(u32 warp, u32 lanes) { grid_lanes_[warp] |= lanes; }
  void share_grid(u32 warp, u32 lanes) {  // lanes of a warp meet
    if (grid_lanes_[warp] & lanes) grid_lanes_[warp] |= lanes;
  }

 private:
  void reach(u32 warp) {
    const std::vector<u32>& seen = warps_knowledge_[warp].seen;
    meeting_[warp] = now(warp);
    for (size_t a = warps_; a < seen.size(); ++a) meeting_[a] = meeting_[a] < seen[a] ? seen[a] : meeting_[a];
  }
  void copy_out(u32 warp, u32 lanes, Knowledge& into) const {
    into.learn(warps_knowledge_[warp]);
    if (grid_lanes_[warp] & lanes) into.seen[grid_actor()] = 1;
  }

  u32 warps_ = 0, next_barrier_ = 0;
  std::vector<Knowledge> warps_knowledge_;
  std::vector<Knowledge> staged_, observed_;  // by warp: before its last releasing fence, after its next acquiring one
  std::vector<Knowledge> sequential_;         // by warp: before the fence.sc that came before its last one
  std::vector<u32> grid_lanes_;               // by warp
  std::vector<u32> meeting_, met_;            // by actor: clock at the last arrivals at the cluster's barrier; when a phase ended
  Knowledge total_, global_, cluster_arriving_, cluster_completed_;
  std::vector<u32> clocks_;  // by actor: of mbarriers the phases completed, of the others the operations issued
};

}  // namespace cake::emu
