#include "scheduler.h"

namespace cake::emu {
namespace {

// A failing poll may be tried this often with nothing else moving before a gang counts as stuck: loops that try two
// barriers in turn need a few rounds.
constexpr int kIdleRounds = 24;
constexpr u64 kSlice = 4096;

}  // namespace

void Stats::add(const Stats& other) {
  if (executed.size() < other.executed.size()) executed.resize(other.executed.size());
  for (size_t k = 0; k < other.executed.size(); ++k) executed[k] += other.executed[k];
  thread_instructions += other.thread_instructions;
  for (int s = 0; s < 7; ++s) {
    bytes[s][0] += other.bytes[s][0];
    bytes[s][1] += other.bytes[s][1];
  }
  shared_accesses += other.shared_accesses;
  shared_wavefronts += other.shared_wavefronts;
  mma_flops += other.mma_flops;
  async_copies += other.async_copies;
  printed += other.printed;
}

// Deepest call first, then the lowest program counter: parts that lag behind catch up and merge.
bool GangRunner::pick(Warp& w, bool rotate) {
  if (w.splits.size() > 1) merge(w);
  int best = -1;
  const int count = static_cast<int>(w.splits.size());
  for (int k = 0; k < count; ++k) {
    const int j = rotate ? (w.current + 1 + k) % count : k;
    const Split& s = w.splits[j];
    if (s.state != State::Run || s.parked == gang_.progress) continue;
    if (rotate) {
      w.current = j;
      return true;
    }
    if (best < 0 || s.returns.size() > w.splits[best].returns.size() ||
        (s.returns.size() == w.splits[best].returns.size() && s.pc < w.splits[best].pc)) {
      best = j;
    }
  }
  if (best < 0) {
    if (count > 1) check_parted(w);
    return false;
  }
  w.current = best;
  return true;
}

void GangRunner::leave(Warp& w, u32 lanes, i32 pc) {
  w.alive &= ~lanes;
  w.cta->alive -= static_cast<u32>(std::popcount(lanes));
  ++gang_.progress;
  Split& s = w.split();
  s.mask &= ~lanes;
  s.pc = pc;
  if (!s.mask) w.splits.erase(w.splits.begin() + w.current);
  // Those who waited for the lanes that left look again.
  for (auto& t : w.splits) {
    if (t.state == State::WaitLanes) t.state = State::Run;
  }
  leave_barriers(w);
  leave_cluster(w, lanes);
  if (w.cta->alive == 0) check_exit(*w.cta);
}

template <bool kTrace>
SliceEnd GangRunner::run(Warp& w, u64 budget) {
  gang_.running = &w;
  const bool rotate = w.signal != Signal::None && w.signal != Signal::Turn;
  w.signal = Signal::None;
  if (!pick(w, rotate)) return w.splits.empty() ? SliceEnd::Done : SliceEnd::Idle;
  const Ins* const code = program_.code.data();
  u64* const executed = stats_.executed.data();
  u64 count = 0, threads = 0;
  u32 current = w.split().mask;
  i32 pc = w.split().pc;
  SliceEnd end = SliceEnd::Busy;
  auto repick = [&](bool next) {
    if (!pick(w, next)) {
      end = w.splits.empty() ? SliceEnd::Done : SliceEnd::Busy;
      return false;
    }
    current = w.split().mask;
    pc = w.split().pc;
    return true;
  };
  for (;;) {
    const Ins& i = code[pc];
    u32 m = current;
    if (i.guard_mode) m &= i.guard_mode == 1 ? w.predicates[i.guard] : ~w.predicates[i.guard];
    if constexpr (kTrace) {
      w.pc = pc;
      trace(w, i, m);
    }
    switch (i.kind) {
      case Kind::Plain:
        ++count;
        ++executed[pc];
        if (m) {
          threads += static_cast<u32>(std::popcount(m));
          w.mask = m;
          w.pc = pc;
          if (w.flight && !w.flight->admit(w)) {
            ++pc;
            break;
          }
          i.fn(w, i);
        }
        ++pc;
        if (w.signal != Signal::None) {
          w.split().pc = pc;
          if (w.signal == Signal::Rest || w.signal == Signal::Turn) goto out;
          w.split().parked = gang_.progress;
          if (!repick(true)) goto out;
          w.signal = Signal::None;
        }
        break;
      case Kind::Sync: {
        if (!m) {
          ++pc;
          break;
        }
        Split& s = w.split();
        s.pc = pc;
        if (m != current) {  // the lanes whose guard is false go on alone
          w.pc = pc;
          if (i.sync == Sync::All || i.sync == Sync::Whole) {
            fault("IllegalInstruction", "the guard is true for lanes " + hex(m) + " of " + hex(current) + ": all lanes of a warp execute this together",
                  first_lane(m));
          }
          Split rest = s;
          rest.mask = current & ~m;
          rest.pc = pc + 1;
          s.mask = m;
          current = m;
          w.splits.push_back(std::move(rest));
        }
        w.pc = pc;
        if (i.sync != Sync::None && needs_lanes(w, i, current)) {
          if (!repick(false)) goto out;
          break;
        }
        ++count;
        ++executed[pc];
        threads += static_cast<u32>(std::popcount(m));
        w.mask = m;
        if (w.flight) w.flight->admit(w);
        i.fn(w, i);
        if (w.signal == Signal::None) {
          ++pc;
          if (w.splits.size() > 1) {
            w.split().pc = pc;
            if (!repick(false)) goto out;
          }
        } else if (w.signal == Signal::Turn) {
          w.split().pc = pc + 1;
          goto out;
        } else {
          const bool again = w.signal == Signal::Again;
          if (w.signal == Signal::Yield) w.split().pc = pc + 1;
          if (w.signal != Signal::Wait) w.split().parked = gang_.progress;
          w.signal = Signal::None;
          if (!repick(again)) goto out;
        }
        break;
      }
      case Kind::Label:
        if (w.splits.size() > 1) {
          w.split().pc = pc + 1;
          if (!repick(false)) goto out;
        } else {
          ++pc;
        }
        break;
      case Kind::Branch:
        ++count;
        ++executed[pc];
        threads += static_cast<u32>(std::popcount(current));
        if (m == current) {
          pc = i.target;
          if (count > budget) {
            w.split().pc = pc;
            w.signal = w.splits.size() > 1 ? Signal::Yield : Signal::None;
            goto out;
          }
        } else if (!m) {
          ++pc;
        } else {
          Split taken = w.split();
          taken.mask = m;
          taken.pc = i.target;
          w.split().mask = current & ~m;
          w.split().pc = pc + 1;
          w.splits.push_back(std::move(taken));
          if (!repick(false)) goto out;
        }
        break;
      case Kind::Indexed: {
        ++count;
        ++executed[pc];
        threads += static_cast<u32>(std::popcount(current));
        const Split origin = w.split();
        w.splits.erase(w.splits.begin() + w.current);
        if (current & ~m) {
          Split rest = origin;
          rest.mask = current & ~m;
          rest.pc = pc + 1 + i.n;
          w.splits.push_back(std::move(rest));
        }
        for (u32 left = m; left;) {
          const u32 index = w.lane32(i.a, first_lane(left));
          if (index >= i.n)
            fault("IllegalInstruction", "branch index " + std::to_string(index) + " of " + std::to_string(i.n));
          Split part = origin;
          part.mask = 0;
          each_lane(left, [&](int l) { part.mask |= u32(w.lane32(i.a, l) == index) << l; });
          part.pc = static_cast<i32>(program_.operands[i.list + index]);
          left &= ~part.mask;
          w.splits.push_back(std::move(part));
        }
        if (!repick(false)) goto out;
        break;
      }
      case Kind::Call:
      case Kind::Return: {
        ++count;
        ++executed[pc];
        threads += static_cast<u32>(std::popcount(m));
        if (!m) {
          ++pc;
          break;
        }
        Split& s = w.split();
        s.pc = pc + 1;
        Split moved = s;
        moved.mask = m;
        if (i.kind == Kind::Call) {
          moved.returns.push_back(pc + 1);
          moved.pc = i.target;
        } else {
          moved.pc = moved.returns.back();
          moved.returns.pop_back();
        }
        if (m == current) {
          s = std::move(moved);
        } else {
          s.mask = current & ~m;
          w.splits.push_back(std::move(moved));
        }
        if (!repick(false)) goto out;
        break;
      }
      case Kind::Exit:
        ++count;
        ++executed[pc];
        if (!m) {
          ++pc;
          break;
        }
        threads += static_cast<u32>(std::popcount(m));
        w.pc = pc;
        leave(w, m, pc + 1);
        if (!repick(false)) goto out;
        break;
    }
  }
out:
  gang_.executed += count;
  stats_.thread_instructions += threads;
  return end;
}

Outcome GangRunner::round() {
  const bool random = launch_.order == Order::Random;
  const bool backwards = launch_.order == Order::Lazy;  // who comes last under one order comes first under another
  bool busy = false, all_done = true;
  const bool traced = launch_.trace_warp >= 0 || launch_.trace_cta >= 0 || launch_.stop_line;
  const size_t total = static_cast<size_t>(ctas_) * warps_;
  const size_t first = random ? gang_.random() % total : 0;
  for (size_t k = 0; k < total; ++k) {
    const size_t at = backwards ? total - 1 - k : (first + k) % total;
    Cta& cta = *gang_.ctas[at / warps_];
    Warp& w = cta.warps[at % warps_];
    if (w.splits.empty()) continue;
    const u64 budget = random ? 1 + gang_.random() % 512 : kSlice;
    const SliceEnd end = traced ? run<true>(w, budget) : run<false>(w, budget);
    if (end != SliceEnd::Done) all_done = false;
    if (end != SliceEnd::Idle) busy = true;
    if (random) gang_.async.maybe_complete(gang_);
  }
  gang_.running = nullptr;
  if (all_done && gang_.alive == 0) return Outcome::Done;
  if (gang_.progress != last_progress_) {
    last_progress_ = gang_.progress;
    ++advances_;
    gang_.executed_at_progress = gang_.executed;
    idle_rounds_ = 0;
  } else if (gang_.executed - gang_.executed_at_progress > launch_.max_instructions) {
    fault("Hang",
          std::to_string(launch_.max_instructions) + " warp instructions without a store or a signal; " + waiting());
  }
  if (busy) return Outcome::Running;
  if (gang_.async.complete_some(gang_)) {
    last_progress_ = gang_.progress;
    idle_rounds_ = 0;
    return Outcome::Running;
  }
  if (++idle_rounds_ > kIdleRounds) return Outcome::Stuck;
  last_progress_ = ++gang_.progress;  // lets every poll try again; that alone is no progress
  return Outcome::Running;
}

}  // namespace cake::emu
