// Loads and stores of every space, in scalars and vectors.
#include "access.h"
#include "decode.h"
#include "shared_opcodes.h"

namespace cake::emu {
namespace {

// kStrong: another thread is meant to see it or to be seen; a wait loop may spin on such a load.
constexpr u32 kStrong = 1, kAcquire = 2, kRelease = 4;

inline int row(Space s) { return static_cast<int>(s); }

void count_bytes(Warp& w, const Ins& i, u32 bytes, bool write) {
  w.stats->bytes[row(i.space)][write] += static_cast<u64>(bytes) * static_cast<u32>(std::popcount(w.mask));
}

// Wavefronts of one shared access: the most distinct 4-byte words that one bank must give.
void count_conflicts(Warp& w, const Ins& i, u32 bytes) {
  u32 addresses[kLanes];
  int n = 0;
  each_lane(w.mask, [&](int l) { addresses[n++] = w.lane32(i.a, l) + static_cast<u32>(i.imm); });
  // Wide accesses go in phases of 128 bytes.
  const int per_phase = bytes <= 4 ? 32 : bytes == 8 ? 16 : 8;
  for (int from = 0; from < n; from += per_phase) {
    u32 words[32][32];
    int used[32] = {}, worst = 1;
    for (int k = from; k < std::min(n, from + per_phase); ++k) {
      for (u32 b = 0; b < bytes; b += 4) {
        const u32 word = (addresses[k] + b) / 4, bank = word % 32;
        bool seen = false;
        for (int j = 0; j < used[bank]; ++j) seen = seen || words[bank][j] == word;
        if (!seen && used[bank] < 32) words[bank][used[bank]++] = word;
        worst = std::max(worst, used[bank]);
      }
    }
    ++w.stats->shared_accesses;
    w.stats->shared_wavefronts += static_cast<u64>(worst);
  }
}

// After a polling load: a wait loop that sees nothing new lets others run.
void after_poll(Warp& w, u64 value) {
  if (w.poll_pc == w.pc && w.poll_value == value) w.signal = Signal::Yield;
  w.poll_pc = w.pc;
  w.poll_value = value;
}

template <class T>
inline T read(const u8* p) {
  T v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
template <class T>
inline SlotWord<T> extended(T v) {  // as it stands in a register slot
  if constexpr (std::is_signed_v<T> && sizeof(T) < 4) return static_cast<u32>(static_cast<i32>(v));
  return static_cast<SlotWord<T>>(v);
}

template <class T, u32 kCount>
void h_load(Warp& w, const Ins& i) {
  const u32* slots = w.gang->launch->program->operands.data() + i.list;
  constexpr u32 kBytes = sizeof(T) * kCount;
  u64 seen = 0;
  const bool strong = i.flags & kStrong;
  each_lane(w.mask, [&](int l) {
    const u8* p = lane_at(w, i, i.a, i.imm, l, kBytes, strong ? Rw::StrongRead : Rw::Read);
    if (strong) order_access(w, p, kBytes, Rw::StrongRead, i.flags & kAcquire, false, l);
    for (u32 k = 0; k < kCount; ++k) {
      const T v = read<T>(p + k * sizeof(T));
      w.slot<T>(slots[k])[l] = extended(v);
      seen = seen * 31 + static_cast<u64>(v);
    }
  });
  count_bytes(w, i, kBytes, false);
  if (strong) after_poll(w, seen);
  if (w.gang->launch->profile && i.space == Space::Shared) count_conflicts(w, i, kBytes);
}

template <class T, u32 kCount>
void h_store(Warp& w, const Ins& i) {
  const u32* slots = w.gang->launch->program->operands.data() + i.list;
  constexpr u32 kBytes = sizeof(T) * kCount;
  const bool strong = i.flags & kStrong;
  each_lane(w.mask, [&](int l) {
    u8* p = lane_at(w, i, i.a, i.imm, l, kBytes, strong ? Rw::StrongWrite : Rw::Write);
    if (strong) order_access(w, p, kBytes, Rw::StrongWrite, false, i.flags & kRelease, l);
    for (u32 k = 0; k < kCount; ++k) {
      const T v = static_cast<T>(w.slot<T>(slots[k])[l]);
      std::memcpy(p + k * sizeof(T), &v, sizeof(T));
    }
  });
  if (i.space != Space::Local) ++w.gang->progress;  // that nobody else sees
  if (strong) told_others(w);
  count_bytes(w, i, kBytes, true);
  if (w.gang->launch->profile && i.space == Space::Shared) count_conflicts(w, i, kBytes);
}

// b128: one register of two 64-bit planes.
void h_load128(Warp& w, const Ins& i) {
  const u32 slot = w.gang->launch->program->operands[i.list];
  const bool strong = i.flags & kStrong;
  each_lane(w.mask, [&](int l) {
    const u8* p = lane_at(w, i, i.a, i.imm, l, 16, strong ? Rw::StrongRead : Rw::Read);
    if (strong) order_access(w, p, 16, Rw::StrongRead, i.flags & kAcquire, false, l);
    w.set64(slot, l, read<u64>(p));
    w.set64(slot + 8 * kLanes, l, read<u64>(p + 8));
  });
  count_bytes(w, i, 16, false);
}
void h_store128(Warp& w, const Ins& i) {
  const u32 slot = w.gang->launch->program->operands[i.list];
  const bool strong = i.flags & kStrong;
  each_lane(w.mask, [&](int l) {
    u8* p = lane_at(w, i, i.a, i.imm, l, 16, strong ? Rw::StrongWrite : Rw::Write);
    if (strong) order_access(w, p, 16, Rw::StrongWrite, false, i.flags & kRelease, l);
    const u64 parts[2] = {w.lane64(slot, l), w.lane64(slot + 8 * kLanes, l)};
    std::memcpy(p, parts, 16);
  });
  if (i.space != Space::Local) ++w.gang->progress;
  if (strong) told_others(w);
  count_bytes(w, i, 16, true);
}

// Kernel parameters are the same for every thread.
template <class T>
void h_load_param(Warp& w, const Ins& i) {
  const u32* slots = w.gang->launch->program->operands.data() + i.list;
  const u8* p = w.gang->launch->param_data + i.imm;
  for (u32 k = 0; k < i.n; ++k) {
    auto* d = w.slot<T>(slots[k]);
    const auto v = extended(read<T>(p + k * sizeof(T)));
    for_lanes(w.mask, [&](int l) { d[l] = v; });
  }
}

// Whole warps that touch neighbouring words of one allocation, or any words of shared memory: one check for all lanes.
template <class T, bool kStore>
void h_fast_global(Warp& w, const Ins& i) {
  if (w.mask == kFull) {
    const u64* base = reinterpret_cast<const u64*>(w.registers + i.a);
    const u64 first = base[0];
    bool consecutive = true;
    for (int l = 1; l < kLanes; ++l) consecutive &= base[l] == first + sizeof(T) * static_cast<u64>(l);
    const u64 address = first + static_cast<u64>(i.imm);
    const Registry& registry = w.gang->launch->registry;
    if (consecutive && !(address & (sizeof(T) - 1)) && w.allocation >= 0) {
      const Allocation* a = &registry[w.allocation];
      if (address < a->begin || address + kLanes * sizeof(T) > a->end) {
        const int k = registry.find(address, kLanes * sizeof(T));
        if (k >= 0) a = &registry[w.allocation = k];
        else a = nullptr;
      }
      // Lanes that differ in what they know of earlier launches are judged one by one.
      if (a && w.gang->launch->record) {
        const u32 known = w.gang->clocks.grid_lanes(w.cta->shadow->id(w));
        if (known && known != kFull) a = nullptr;
      }
      if (a && !a->written && !(kStore && a->read_only)) {
        const u32 slot = w.gang->launch->program->operands[i.list];
        auto* lanes = w.slot<T>(slot);
        if (w.gang->launch->record) {
          overlap_access(w, w.allocation, address, kLanes * sizeof(T), kStore ? Rw::Write : Rw::Read, 0);
        }
        u8* p = reinterpret_cast<u8*>(address);
        if constexpr (kStore) {
          for (int l = 0; l < kLanes; ++l) {
            const T v = static_cast<T>(lanes[l]);
            std::memcpy(p + l * sizeof(T), &v, sizeof(T));
          }
          ++w.gang->progress;
        } else {
          for (int l = 0; l < kLanes; ++l) lanes[l] = extended(read<T>(p + l * sizeof(T)));
        }
        w.stats->bytes[row(Space::Global)][kStore] += kLanes * sizeof(T);
        return;
      }
    }
  }
  if constexpr (kStore) h_store<T, 1>(w, i);
  else h_load<T, 1>(w, i);
}

template <class T, u32 kCount, bool kStore>
void h_fast_shared(Warp& w, const Ins& i) {
  constexpr u32 kBytes = sizeof(T) * kCount;
  Cta& cta = *w.cta;
  if (!cta.shadow && !w.gang->launch->profile) {
    const u32* base = reinterpret_cast<const u32*>(w.registers + i.a);
    const u32 add = static_cast<u32>(i.imm) - (cta.rank << kRankShift);
    u32 offsets[kLanes], bits = 0, low = ~0u, high = 0;
    for (int l = 0; l < kLanes; ++l) {
      const u32 o = base[l] + add, active = w.mask >> l & 1 ? ~0u : 0u;
      offsets[l] = o;
      bits |= o & active;
      low = std::min(low, o | ~active);
      high = std::max(high, o & active);
    }
    if (!(bits & (kBytes - 1)) && low >= kSharedBase && high < kSharedWindow && high + kBytes <= cta.shared_end) {
      const u32* slots = w.gang->launch->program->operands.data() + i.list;
      u8* shared = cta.shared;
      for (u32 k = 0; k < kCount; ++k) {
        auto* lanes = w.slot<T>(slots[k]);
        each_lane(w.mask, [&](int l) {
          u8* p = shared + offsets[l] + k * sizeof(T);
          if constexpr (kStore) {
            const T v = static_cast<T>(lanes[l]);
            std::memcpy(p, &v, sizeof(T));
          } else {
            lanes[l] = extended(read<T>(p));
          }
        });
      }
      if (kStore) ++w.gang->progress;
      count_bytes(w, i, kBytes, kStore);
      return;
    }
  }
  if constexpr (kStore) h_store<T, kCount>(w, i);
  else h_load<T, kCount>(w, i);
}

template <class T, u32 kCount>
Handler choose(bool store, Space space, bool strong) {
  if (!strong && (space == Space::Shared))
    return store ? h_fast_shared<T, kCount, true> : h_fast_shared<T, kCount, false>;
  if constexpr (kCount == 1) {
    if (!strong && space == Space::Global) return store ? h_fast_global<T, true> : h_fast_global<T, false>;
  }
  return store ? h_store<T, kCount> : h_load<T, kCount>;
}
template <class T>
Handler choose_count(u32 count, bool store, Space space, bool strong) {
  switch (count) {
    case 1: return choose<T, 1>(store, space, strong);
    case 2: return choose<T, 2>(store, space, strong);
    case 4: return choose<T, 4>(store, space, strong);
    case 8:
      if constexpr (sizeof(T) == 4) return choose<T, 8>(store, space, strong);
      else return nullptr;
    default: return nullptr;
  }
}
template <class T>
Handler choose_param() {
  return h_load_param<T>;
}

Handler choose_type(Type t, u32 count, bool store, Space space, bool strong) {
  const bool s = is_signed(t) && !store;
  switch (bytes_of(t)) {
    case 1: return s ? choose_count<i8>(count, store, space, strong) : choose_count<u8>(count, store, space, strong);
    case 2: return s ? choose_count<i16>(count, store, space, strong) : choose_count<u16>(count, store, space, strong);
    case 4: return choose_count<u32>(count, store, space, strong);
    case 8: return choose_count<u64>(count, store, space, strong);
    default: return nullptr;
  }
}

// Modifiers that bear on order or caching: kStrong, kAcquire, kRelease of Ins::flags.
u32 take_ordering(Decoder& d, bool& global_order) {
  Modifiers& m = d.mods();
  const bool weak = m.take("weak");
  u32 flags = m.take("volatile") | m.take("relaxed") ? kStrong : 0;
  if (m.take("acquire")) flags |= kStrong | kAcquire;
  if (m.take("release")) flags |= kStrong | kRelease;
  if (m.take("mmio")) flags |= kStrong;
  const int scope = m.take_one({"cta", "cluster", "gpu", "sys"});
  global_order = flags && scope != 0 && scope != 1;
  for (const char* hint : {"nc", "ca", "cg", "cs", "lu", "cv", "wb", "wt", "L1::evict_normal", "L1::evict_unchanged",
                           "L1::evict_first", "L1::evict_last", "L1::no_allocate", "L2::evict_normal",
                           "L2::evict_first", "L2::evict_last", "L2::64B", "L2::128B", "L2::256B"}) {
    m.take(hint);
  }
  return weak ? 0 : flags;
}

void decode_load_store(Decoder& d, Ins& i, bool store) {
  bool global_order = false;
  const u32 order = take_ordering(d, global_order);
  const bool hint = d.mods().take("L2::cache_hint");
  const bool unified = d.mods().take("unified");
  if (unified) d.unsupported("modifier .unified");
  const Space space = d.take_space(Space::Generic);
  const int v = d.mods().take_one({"v2", "v4", "v8"});
  const u32 count = v < 0 ? 1 : 2u << v;
  const auto t = d.mods().take_type();
  if (!t) d.unsupported("no type");
  const size_t expected = hint ? 3 : 2;
  if (d.count() != expected) d.syntax("wrong number of operands");
  const Operand& data = store ? d.op(1) : d.op(0);
  d.address(store ? 0 : 1, space, i);
  i.flags = order;
  i.width = static_cast<u8>(bytes_of(*t));
  // A scalar in a wider register is narrowed or extended by the operand helpers.
  if (data.kind == Operand::Vector) {
    d.list(data, bytes_of(*t), !store, i);
    if (i.n != count) d.syntax("vector of a wrong length");
  } else {
    const u32 slot = store ? d.source(data, *t) : d.dest(data, bytes_of(*t), is_signed(*t));
    i.list = static_cast<u32>(d.program().operands.size());
    i.n = 1;
    d.add_operand(slot);
    if (count != 1) d.syntax("a vector operand is expected");
  }
  if (i.space == Space::Shared || i.space == Space::Cluster || i.space == Space::Generic)
    d.note_shared_access(bytes_of(*t));
  if (global_order && i.space != Space::Shared && i.space != Space::Cluster) d.program().communicates = true;
  if (i.space == Space::Param && store) d.unsupported("store to kernel parameters");
  if (i.space == Space::Param && d.names_parameter(d.op(1))) {
    if (static_cast<u64>(i.imm) + static_cast<u64>(count) * bytes_of(*t) > d.program().param_bytes)
      d.syntax("read past the end of the parameters");
    switch (bytes_of(*t)) {
      case 1: i.fn = is_signed(*t) ? choose_param<i8>() : choose_param<u8>(); break;
      case 2: i.fn = is_signed(*t) ? choose_param<i16>() : choose_param<u16>(); break;
      case 4: i.fn = choose_param<u32>(); break;
      case 8: i.fn = choose_param<u64>(); break;
    }
    return;
  }
  if (bytes_of(*t) == 16) {
    i.fn = count != 1 ? nullptr : store ? h_store128 : h_load128;
    return;
  }
  i.fn = choose_type(*t, count, store, i.space, order != 0);
}

void h_nothing(Warp&, const Ins&) {}

void h_prefetch_check(Warp&, const Ins&) {}

}  // namespace

void register_memory(DecoderTable& table) {
  table.add("ld", [](Decoder& d, Ins& i) { decode_load_store(d, i, false); });
  table.add("ldu", [](Decoder& d, Ins& i) { decode_load_store(d, i, false); });
  table.add("st", [](Decoder& d, Ins& i) {
    if (d.mods().has("async")) decode_store_async(d, i, false);
    else decode_load_store(d, i, true);
  });
  auto ignored = [](Decoder& d, Ins& i) {
    for (const char* part : {"L1", "L2", "L2::evict_last", "L2::evict_normal", "tensormap", "const", "param", "global",
                             "local", "L2::128B", "discard"}) {
      d.mods().take(part);
    }
    i.fn = h_prefetch_check;
  };
  table.add("prefetch", ignored);
  table.add("prefetchu", ignored);
  table.add("applypriority", ignored);
  table.add("discard", ignored);
  // A cache policy is an opaque number.
  table.add("createpolicy", [](Decoder& d, Ins& i) {
    for (const char* part : {"fractional", "range", "global", "L2::evict_last", "L2::evict_normal", "L2::evict_first",
                             "L2::evict_unchanged"}) {
      while (d.mods().take(part)) {
      }
    }
    d.mods().take_type();
    i.d = d.dest(0, 8);
    i.fn = h_nothing;
  });
}

}  // namespace cake::emu
