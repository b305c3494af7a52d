// How parts of a diverged warp meet again, and which lanes an instruction waits for.
#include "scheduler.h"
#include "shadow.h"

namespace cake::emu {

// Parts of a warp that stand at the same instruction become one.
void GangRunner::merge(Warp& w) {
  auto& splits = w.splits;
  for (size_t i = 0; i < splits.size(); ++i) {
    Split& s = splits[i];
    if (s.state != State::Run && s.state != State::WaitLanes) continue;
    for (size_t j = i + 1; j < splits.size();) {
      Split& t = splits[j];
      if (t.pc == s.pc && (t.state == State::Run || t.state == State::WaitLanes) && t.returns == s.returns) {
        s.mask |= t.mask;
        s.state = State::Run;
        s.parked = ~0ull;
        splits.erase(splits.begin() + static_cast<std::ptrdiff_t>(j));
      } else {
        ++j;
      }
    }
  }
  // bar.warp.sync meets across different instructions.
  for (auto& s : splits) {
    if (s.state != State::WaitLanes || !(program_.code[s.pc].flags & kWarpBarrier)) continue;
    u32 together = 0;
    auto meets = [&](const Split& t) {
      return t.state == State::WaitLanes && t.want == s.want && (program_.code[t.pc].flags & kWarpBarrier);
    };
    for (const auto& t : splits) together |= meets(t) ? t.mask : 0;
    if ((together & s.want & w.alive) != (s.want & w.alive)) continue;
    const u32 want = s.want;
    if (launch_.record) gang_.clocks.share_grid(w.cta->shadow->id(w), together);
    for (auto& t : splits) {
      if (t.state == State::WaitLanes && t.want == want && (program_.code[t.pc].flags & kWarpBarrier)) {
        t.state = State::Run;
        ++t.pc;
      }
    }
  }
}

// Parts that all wait for lanes of each other, at different instructions, wait for ever.
void GangRunner::check_parted(Warp& w) {
  for (const Split& s : w.splits) {
    if (s.state != State::WaitLanes) return;
  }
  const Split &here = w.splits[0], &there = w.splits[1];
  w.pc = here.pc;
  fault("IllegalInstruction", "lanes " + hex(here.mask) + " wait here for lanes " + hex(here.want & ~here.mask) + " of their warp, but lanes " +
        hex(there.mask) + " wait at " + program_.opcodes[program_.code[there.pc].opcode] + " at " + place_text(launch_, there.pc) +
        " for lanes " + hex(there.want & ~there.mask) + ": they must execute one instruction together");
}

namespace {

[[noreturn]] void outside(u32 members, int lane) {
  fault("IllegalInstruction", "lane " + std::to_string(lane) + " executes this with member mask " + hex(members) + ", which it is not in", lane);
}

// The lanes that `current` wait for, after their member masks: every lane in its own, and one mask for those that meet.
u32 members_of(const Warp& w, const Ins& i, u32 current) {
  const u32* masks = reinterpret_cast<const u32*>(w.registers + i.sync_mask);
  const u32 first = masks[first_lane(current)];
  bool uniform = true;
  each_lane(current, [&](int l) { uniform &= masks[l] == first; });
  if (uniform) {
    if (current & ~first) outside(first, first_lane(current & ~first));
    return first & w.alive;
  }
  u32 want = 0;
  each_lane(current, [&](int l) {
    if (!(masks[l] >> l & 1)) outside(masks[l], l);
    want |= masks[l];
    each_lane(masks[l] & current, [&](int k) {
      if (masks[k] == masks[l]) return;
      fault("IllegalInstruction", "lane " + std::to_string(l) + " executes this with member mask " + hex(masks[l]) + ", lane " + std::to_string(k) +
            ", which is in it, with " + hex(masks[k]), l);
    });
  });
  return want & w.alive;
}

}  // namespace

// True when other lanes must arrive first; the current part then waits.
bool GangRunner::needs_lanes(Warp& w, const Ins& i, u32 current) {
  u32 want = w.alive;
  if (i.sync == Sync::Mask) want = members_of(w, i, current);
  if (i.sync == Sync::Whole && w.alive != kFull) {
    fault("IllegalInstruction", "a warp of which only lanes " + hex(w.alive) + " are alive executes this: it takes all 32");
  }
  if ((current & want) == want) return false;
  Split& s = w.split();
  s.state = State::WaitLanes;
  s.want = want;
  return true;
}

}  // namespace cake::emu
