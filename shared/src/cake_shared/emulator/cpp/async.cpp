#include "async.h"

#include <algorithm>

#include "machine.h"

namespace cake::emu {

AsyncHandle AsyncQueue::issue(Gang& gang, std::function<void()> run, u64 stream) {
  auto op = std::make_shared<AsyncOp>();
  op->run = std::move(run);
  op->stream = stream;
  if (gang.running) op->issuer = gang.running, op->pc = gang.running->pc;
  if (gang.launch->order == Order::Eager) {
    op->done = true;
    run_placed(gang, *op);
    ++gang.progress;
  } else {
    pending_.push_back(op);
  }
  return op;
}

void AsyncQueue::perform(Gang& gang, size_t index) {
  AsyncHandle op = pending_[index];
  pending_.erase(pending_.begin() + static_cast<std::ptrdiff_t>(index));
  op->done = true;
  run_placed(gang, *op);
  ++gang.progress;
}

void AsyncQueue::run_placed(Gang& gang, AsyncOp& op) {
  const auto run = std::move(op.run);
  op.run = nullptr;
  Warp* const outer = gang.async_issuer;
  const int outer_pc = gang.async_pc;
  gang.async_issuer = op.issuer;
  gang.async_pc = op.pc;
  try {
    run();
    gang.async_issuer = outer;
    gang.async_pc = outer_pc;
  } catch (Fault& f) {
    if (!f.warp) f.warp = op.issuer, f.pc = op.pc;
    throw;
  }
}

void AsyncQueue::complete(Gang& gang, const AsyncHandle& op) {
  while (!op->done) {
    for (size_t k = 0; k < pending_.size(); ++k) {
      if (pending_[k] == op || (op->stream && pending_[k]->stream == op->stream)) {
        perform(gang, k);
        break;
      }
    }
  }
}

bool AsyncQueue::complete_some(Gang& gang) {
  if (pending_.empty()) return false;
  size_t k = pending_.size() - 1;  // lazy: the newest first, which is as far from program order as it gets
  if (gang.launch->order == Order::Random) k = gang.random() % pending_.size();
  // Nothing overtakes its own stream.
  const u64 stream = pending_[k]->stream;
  if (stream) {
    for (size_t j = 0; j < k; ++j) {
      if (pending_[j]->stream == stream) {
        k = j;
        break;
      }
    }
  }
  perform(gang, k);
  return true;
}

void AsyncQueue::maybe_complete(Gang& gang) {
  if (gang.launch->order == Order::Random && !pending_.empty() && (gang.random() & 3) == 0) complete_some(gang);
}

u32 GroupList::wait(Gang& gang, AsyncQueue& queue, size_t leave, int lane) {
  u32 clock = 0;
  while (committed.size() > leave) {
    for (auto& op : committed.front()) {
      queue.complete(gang, op);
      op->waited |= 1u << lane;
      clock = std::max(clock, op->clock);
    }
    committed.pop_front();
  }
  return clock;
}

const AsyncOp* GroupList::unwaited() const {
  for (const auto& group : committed) {
    if (!group.empty()) return group.front().get();
  }
  return open.empty() ? nullptr : open.front().get();
}

}  // namespace cake::emu
