#include "access.h"

namespace cake::emu {
namespace {

const char* verb(Rw rw) { return rw == Rw::Atomic || rw == Rw::Unread ? "atomic" : writes(rw) ? "write" : "read"; }

}  // namespace

void global_fault(Warp& w, u64 address, u32 bytes, Rw rw, int lane) {
  const Registry& registry = w.gang->launch->registry;
  const int k = registry.find(address, bytes);
  if (k >= 0 && registry[k].read_only) {
    fault("ConstWrite",
          std::string(verb(rw)) + " of " + std::to_string(bytes) + " bytes into " + registry[k].name +
              ", which is const, at byte " + std::to_string(address - registry[k].begin),
          lane);
  }
  fault("OutOfBounds", std::string(verb(rw)) + " of " + registry.describe(address, bytes), lane);
}

void shared_fault(Warp& w, u32 address, u32 bytes, Rw rw, int lane) {
  const u32 rank = address >> kRankShift, offset = address & (kSharedWindow - 1);
  std::string text =
      std::string(verb(rw)) + " of " + std::to_string(bytes) + " bytes at shared address " + hex(address);
  if (rank != w.cta->rank) {
    if (rank >= w.gang->ctas.size()) {
      text += ": no CTA of rank " + std::to_string(rank) + " in a cluster of " + std::to_string(w.gang->ctas.size());
    } else if (w.gang->ctas[rank]->done) {
      text += ": the CTA of rank " + std::to_string(rank) + " has exited";
    } else {
      text += ": another CTA's shared memory needs .shared::cluster";
    }
  }
  if (offset < kSharedBase) text += ": the first " + std::to_string(kSharedBase) + " bytes belong to the system";
  if (offset + bytes > w.cta->shared_end) {
    text += ": shared memory of the CTA ends at " + hex(w.cta->shared_end) + " (" +
            std::to_string(w.cta->shared_end - kSharedBase) + " bytes)";
  }
  fault("OutOfBounds", text, lane);
}

void misaligned(u64 address, u32 bytes, int lane) {
  fault("Misaligned", "address " + hex(address) + " for an access of " + std::to_string(bytes) + " bytes", lane);
}

void check_written(const Allocation& a, u64 address, u32 bytes, int lane) {
  const u8* written = a.written + (address - a.begin);
  for (u32 k = 0; k < bytes; ++k) {
    if (!written[k]) {
      fault("UninitialisedRead",
            "byte " + std::to_string(address - a.begin + k) + " of " + a.name + " has never been written", lane);
    }
  }
}

void order_access(Warp& w, const u8* at, u32 bytes, Rw rw, bool acquires, bool releases, int lane) {
  if (!w.cta->shadow) return;
  Gang& gang = *w.gang;
  const u32 lanes = 1u << lane;
  if (reads(rw)) gang.clocks.strong_read(w.cta->shadow->id(w), lanes);
  if (in_arena(w, reinterpret_cast<u64>(at))) {
    const u64 offset = reinterpret_cast<u64>(at) - reinterpret_cast<u64>(gang.arena);
    SharedShadow& shadow = *gang.ctas[offset >> kRankShift]->shadow;
    shadow.order(w, static_cast<u32>(offset & (kSharedWindow - 1)), bytes, {reads(rw), rw != Rw::Unread, writes(rw), acquires, releases, lanes});
    return;
  }
  const u32 me = w.cta->shadow->id(w);
  Knowledge& place = gang.clocks.global_place();
  if (reads(rw)) acquires ? gang.clocks.acquire(me, lanes, place) : gang.clocks.acquire_relaxed(me, place);
  if (writes(rw)) releases ? gang.clocks.release(me, lanes, place) : gang.clocks.release_relaxed(me, place);
}

u8* local_at(Warp& w, u64 address, u32 bytes, int lane) {
  if (address + bytes > w.local_bytes || address + bytes < address) {
    fault("OutOfBounds",
          std::to_string(bytes) + " bytes at local address " + hex(address) + " of " + std::to_string(w.local_bytes),
          lane);
  }
  return w.local + static_cast<u64>(lane) * w.local_bytes + address;
}

}  // namespace cake::emu
