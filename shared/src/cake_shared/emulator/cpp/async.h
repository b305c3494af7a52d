// Copies and products that run beside the threads, and when they complete: at once, as late as allowed, or at random.
#pragma once
#include <deque>
#include <functional>
#include <memory>
#include <vector>

#include "core.h"

namespace cake::emu {

struct Warp;
struct Gang;

// One asynchronous operation. `run` performs its reads, writes and signals. Operations of one `stream` complete in
// order (stream 0: no order).
struct AsyncOp {
  std::function<void()> run;
  u64 stream = 0;
  bool done = false;
  u32 waited = 0;          // lanes that have waited for it
  Warp* issuer = nullptr;  // for the place of a fault
  int pc = -1;
  u32 clock = 0;  // of the actor that reads shared memory, see Clocks
};
using AsyncHandle = std::shared_ptr<AsyncOp>;

class AsyncQueue {
 public:
  // Runs the operation now under Order::Eager, queues it otherwise.
  AsyncHandle issue(Gang& gang, std::function<void()> run, u64 stream = 0);
  bool empty() const { return pending_.empty(); }
  size_t size() const { return pending_.size(); }
  const AsyncOp& oldest() const { return *pending_.front(); }
  void complete(Gang& gang, const AsyncHandle& op);  // with what must come before it
  bool complete_some(Gang& gang);                    // one, chosen by the order; false when there is none
  void maybe_complete(Gang& gang);                   // Order::Random: sometimes one
  void clear() { pending_.clear(); }

 private:
  void perform(Gang& gang, size_t index);
  static void run_placed(Gang& gang, AsyncOp& op);
  std::deque<AsyncHandle> pending_;
};

// Groups of a thread's operations: cp.async.commit_group, cp.async.bulk.commit_group, wgmma.commit_group.
struct GroupList {
  std::vector<AsyncHandle> open;
  std::deque<std::vector<AsyncHandle>> committed;
  void commit() {
    committed.push_back(std::move(open));
    open.clear();
  }
  u32 wait(Gang& gang, AsyncQueue& queue, size_t leave, int lane);  // the newest clock of what is done now
  const AsyncOp* unwaited() const;                        // one that no wait has covered, or null
};

struct LaneCopies {
  std::unique_ptr<GroupList[]> lanes;
  GroupList& lane(int l) {
    if (!lanes) lanes = std::make_unique<GroupList[]>(kLanes);
    return lanes[l];
  }
};

// Bulk groups have two points to wait for: the source has been read, and the whole copy is done.
struct BulkGroups {
  std::unique_ptr<GroupList[]> lanes;
  GroupList& lane(int l) {
    if (!lanes) lanes = std::make_unique<GroupList[]>(kLanes);
    return lanes[l];
  }
};

}  // namespace cake::emu
