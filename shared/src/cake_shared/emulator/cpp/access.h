// Checked access to memory: an address of some space becomes a host pointer, or a fault.
#pragma once
#include "machine.h"
#include "overlap.h"
#include "shadow.h"

namespace cake::emu {

// Bits: 1 reads, 2 writes, 4 strong (relaxed, acquire, release, volatile or atomic), 8 atomic whose result nobody looks at.
enum class Rw : u8 { Read = 1, Write = 2, StrongRead = 5, StrongWrite = 6, Atomic = 7, Unread = 15 };
constexpr bool reads(Rw rw) { return static_cast<u8>(rw) & 1; }
constexpr bool writes(Rw rw) { return static_cast<u8>(rw) & 2; }
constexpr SharedShadow::Access access_of(Rw rw) {
  return rw == Rw::Unread ? SharedShadow::Access::Unread : static_cast<u8>(rw) & 4 ? SharedShadow::Access::Strong : SharedShadow::Access::Ordinary;
}

[[noreturn]] void global_fault(Warp& w, u64 address, u32 bytes, Rw rw, int lane);
[[noreturn]] void shared_fault(Warp& w, u32 address, u32 bytes, Rw rw, int lane);
[[noreturn]] void misaligned(u64 address, u32 bytes, int lane);
void check_written(const Allocation& a, u64 address, u32 bytes, int lane);

inline u8* global_at(Warp& w, u64 address, u32 bytes, Rw rw, int lane) {
  const Registry& registry = w.gang->launch->registry;
  int k = w.allocation;
  if (k < 0 || address < registry[k].begin || address + bytes > registry[k].end || address + bytes < address) {
    k = registry.find(address, bytes);
    if (k < 0) global_fault(w, address, bytes, rw, lane);
    w.allocation = k;
  }
  const Allocation& a = registry[k];
  if (writes(rw) && a.read_only) global_fault(w, address, bytes, rw, lane);
  if (w.gang->launch->record) overlap_access(w, k, address, bytes, rw, lane);
  if (a.written) {
    if (reads(rw)) check_written(a, address, bytes, lane);
    if (writes(rw)) std::memset(a.written + (address - a.begin), 1, bytes);
  }
  return reinterpret_cast<u8*>(address);
}

// The CTA that a shared address names: its own, or with `cluster` any of the cluster.
inline Cta& shared_owner(Warp& w, u32 address, u32 bytes, Rw rw, int lane, bool cluster) {
  const u32 rank = address >> kRankShift, offset = address & (kSharedWindow - 1);
  Cta* cta = w.cta;
  if (rank != cta->rank) {
    if (!cluster || rank >= w.gang->ctas.size() || w.gang->ctas[rank]->done) shared_fault(w, address, bytes, rw, lane);
    cta = w.gang->ctas[rank].get();
  }
  if (offset < kSharedBase || offset + bytes > cta->shared_end) shared_fault(w, address, bytes, rw, lane);
  return *cta;
}

inline u8* shared_at(Warp& w, u32 address, u32 bytes, Rw rw, int lane, bool cluster = false) {
  Cta& cta = shared_owner(w, address, bytes, rw, lane, cluster);
  const u32 offset = address & (kSharedWindow - 1);
  if (cta.shadow) cta.shadow->access(w, offset, bytes, reads(rw), writes(rw), access_of(rw), lane);
  return cta.shared + offset;
}

u8* local_at(Warp& w, u64 address, u32 bytes, int lane);

inline bool in_arena(const Warp& w, u64 address) {
  return address - reinterpret_cast<u64>(w.gang->arena) < w.gang->arena_bytes;
}

inline u8* generic_at(Warp& w, u64 address, u32 bytes, Rw rw, int lane) {
  if (in_arena(w, address)) {
    return shared_at(w, static_cast<u32>(address - reinterpret_cast<u64>(w.gang->arena)), bytes, rw, lane, true);
  }
  const u64 local = address - reinterpret_cast<u64>(w.local);
  if (local < static_cast<u64>(w.local_bytes) * kLanes) {
    return local_at(w, local - static_cast<u64>(lane) * w.local_bytes, bytes, lane);
  }
  return global_at(w, address, bytes, rw, lane);
}

// Address of one lane in the space of the instruction; alignment is checked.
inline u8* lane_at(Warp& w, const Ins& i, u32 base, i64 offset, int lane, u32 bytes, Rw rw) {
  if (i.space == Space::Shared || i.space == Space::Cluster) {
    const u32 address = w.lane32(base, lane) + static_cast<u32>(offset);
    if (address & (bytes - 1)) misaligned(address, bytes, lane);
    return shared_at(w, address, bytes, rw, lane, i.space == Space::Cluster);
  }
  u64 address = w.lane64(base, lane) + static_cast<u64>(offset);
  if (address & (bytes - 1)) misaligned(address, bytes, lane);
  if (i.space == Space::Param)
    return global_at(w, address + reinterpret_cast<u64>(w.gang->launch->param_data), bytes, rw, lane);
  if (i.space == Space::Global || i.space == Space::Const) return global_at(w, address, bytes, rw, lane);
  if (i.space == Space::Local) return local_at(w, address, bytes, lane);
  return generic_at(w, address, bytes, rw, lane);
}

// What a strong access by `lane` at a host address passes on and learns, beside moving data. Detect::All only.
void order_access(Warp& w, const u8* at, u32 bytes, Rw rw, bool acquires, bool releases, int lane);

}  // namespace cake::emu
