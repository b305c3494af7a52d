// atom and red. Lanes act one after the other in lane order; that order is part of the seeded schedule.
#include <cmath>

#include "access.h"
#include "decode.h"
#include "shared_opcodes.h"

namespace cake::emu {
namespace {

enum Op : u32 { kAdd, kMin, kMax, kAnd, kOr, kXor, kExch, kCas, kInc, kDec };

template <class T>
T apply_integer(u32 op, T old, T b, T c) {
  using U = std::make_unsigned_t<T>;
  switch (op) {
    case kAdd: return T(U(old) + U(b));
    case kMin: return std::min(old, b);
    case kMax: return std::max(old, b);
    case kAnd: return old & b;
    case kOr: return old | b;
    case kXor: return old ^ b;
    case kExch: return b;
    case kCas: return old == b ? c : old;
    case kInc: return U(old) >= U(b) ? T(0) : T(U(old) + 1);
    default: return old == 0 || U(old) > U(b) ? b : T(U(old) - 1);
  }
}

// Sums of FP32: in global memory subnormals are zero, in shared memory they are kept.
float add_float(float a, float b, bool flush) {
  auto flushed = [&](float f) {
    const u32 bits = std::bit_cast<u32>(f);
    return flush && !(bits & 0x7f800000u) ? std::bit_cast<float>(bits & 0x80000000u) : f;
  };
  const float sum = flushed(flushed(a) + flushed(b));
  return sum == sum ? sum : std::bit_cast<float>(0x7fffffffu);
}

template <class T>
T apply_float(u32 op, T old, T b) {
  if (op == kAdd) return old + b;
  if (old != old) return b;
  if (b != b) return old;
  return op == kMin ? std::min(old, b) : std::max(old, b);
}

template <class T>
T apply(u32 op, T old, T b, T c) {
  if constexpr (std::is_floating_point_v<T>) {
    return apply_float(op, old, b);
  } else if constexpr (std::is_same_v<T, Half>) {
    return to_half(apply_float(op, to_float(old), to_float(b)));
  } else if constexpr (std::is_same_v<T, BFloat>) {
    return to_bfloat(apply_float(op, to_float(old), to_float(b)));
  } else {
    return apply_integer(op, old, b, c);
  }
}

// Ins::flags: the operation in four bits, then these.
constexpr u32 kThird = 16, kReturns = 32, kAcquire = 64, kRelease = 128;

u8* atomic_at(Warp& w, const Ins& i, int lane, u32 bytes) {
  const Rw rw = i.unread && !(i.flags & kAcquire) ? Rw::Unread : Rw::Atomic;
  u8* p = lane_at(w, i, i.a, i.imm, lane, bytes, rw);
  order_access(w, p, bytes, rw, i.flags & kAcquire, i.flags & kRelease, lane);
  return p;
}

// kPack elements of T make one memory word of the instruction; the register holds it as it is.
template <class T, int kPack>
void h_atomic(Warp& w, const Ins& i) {
  constexpr u32 kBytes = sizeof(T) * kPack;
  using Word = std::conditional_t<kBytes == 8, u64, u32>;
  const u32* lists = w.gang->launch->program->operands.data() + i.list;
  const u32 count = i.n;  // elements of a vector
  bool changed = false;
  each_lane(w.mask, [&](int l) {
    u8* p = atomic_at(w, i, l, kBytes * count);
    for (u32 k = 0; k < count; ++k) {
      const Word source = w.slot<Word>(lists[k])[l];
      const Word third = i.flags & kThird ? w.slot<Word>(i.c)[l] : 0;
      Word before = 0, after = 0;
      std::memcpy(&before, p + k * kBytes, kBytes);
      T old[kPack], with[kPack], other[kPack], result[kPack];
      std::memcpy(old, &before, kBytes);
      std::memcpy(with, &source, kBytes);
      std::memcpy(other, &third, kBytes);
      for (int e = 0; e < kPack; ++e) {
        if constexpr (std::is_same_v<T, float>) {
          if ((i.flags & 15) == kAdd) {
            result[e] = add_float(old[e], with[e], !in_arena(w, reinterpret_cast<u64>(p)));
            continue;
          }
        }
        result[e] = apply<T>(i.flags & 15, old[e], with[e], other[e]);
      }
      std::memcpy(&after, result, kBytes);
      std::memcpy(p + k * kBytes, &after, kBytes);
      changed = changed || before != after;
      if (i.flags & kReturns) w.slot<Word>(lists[count + k])[l] = before;
    }
  });
  if (changed) {
    ++w.gang->progress;
    told_others(w);
  } else {
    w.signal = Signal::Yield;  // a lock that stays taken: let its owner run
  }
  w.stats->bytes[static_cast<int>(i.space)][1] +=
      static_cast<u64>(kBytes * count) * static_cast<u32>(std::popcount(w.mask));
}

// b128 exchange and compare-and-swap
void h_atomic128(Warp& w, const Ins& i) {
  const u32* lists = w.gang->launch->program->operands.data() + i.list;
  constexpr u32 kPlane = 8 * kLanes;
  each_lane(w.mask, [&](int l) {
    u8* p = atomic_at(w, i, l, 16);
    u64 old[2];
    std::memcpy(old, p, 16);
    const u64 b[2] = {w.lane64(lists[0], l), w.lane64(lists[0] + kPlane, l)};
    const bool cas = (i.flags & 15) == kCas;
    const u64 c[2] = {cas ? w.lane64(i.c, l) : b[0], cas ? w.lane64(i.c + kPlane, l) : b[1]};
    if (!cas || (old[0] == b[0] && old[1] == b[1])) std::memcpy(p, c, 16);
    if (i.flags & kReturns) {
      w.set64(lists[1], l, old[0]);
      w.set64(lists[1] + kPlane, l, old[1]);
    }
  });
  ++w.gang->progress;
  told_others(w);
}

Handler choose(Type t, u32 op) {
  const bool bitwise = op == kAnd || op == kOr || op == kXor || op == kExch || op == kCas;
  switch (t) {
    case Type::B16: return op == kCas || op == kExch ? h_atomic<u16, 1> : nullptr;
    case Type::B32: return bitwise ? h_atomic<u32, 1> : nullptr;
    case Type::B64: return bitwise ? h_atomic<u64, 1> : nullptr;
    case Type::U32: return h_atomic<u32, 1>;
    case Type::U64: return h_atomic<u64, 1>;
    case Type::S32: return h_atomic<i32, 1>;
    case Type::S64: return h_atomic<i64, 1>;
    case Type::F32: return op <= kMax ? h_atomic<float, 1> : nullptr;
    case Type::F64: return op == kAdd ? h_atomic<double, 1> : nullptr;
    case Type::F16: return op <= kMax ? h_atomic<Half, 1> : nullptr;
    case Type::F16x2: return op <= kMax ? h_atomic<Half, 2> : nullptr;
    case Type::BF16: return op <= kMax ? h_atomic<BFloat, 1> : nullptr;
    case Type::BF16x2: return op <= kMax ? h_atomic<BFloat, 2> : nullptr;
    case Type::B128: return op == kCas || op == kExch ? h_atomic128 : nullptr;
    default: return nullptr;
  }
}

void decode_atomic(Decoder& d, Ins& i, bool returns) {
  Modifiers& m = d.mods();
  const int order = m.take_one({"relaxed", "acquire", "release", "acq_rel"});
  const int scope = m.take_one({"cta", "cluster", "gpu", "sys"});
  (void)scope;
  const Space space = d.take_space(Space::Generic);
  const int op = m.take_one({"add", "min", "max", "and", "or", "xor", "exch", "cas", "inc", "dec"});
  if (op < 0) d.unsupported("operation");
  m.take("noftz");
  const bool hint = m.take("L2::cache_hint");
  (void)hint;
  const int v = m.take_one({"v2", "v4", "v8"});
  const auto t = m.take_type();
  if (!t) d.unsupported("no type");
  const u32 bytes = bytes_of(*t);
  size_t k = 0;
  const Operand* result = returns ? &d.op(k++) : nullptr;
  const Operand& place = d.op(k++);
  const Operand& source = d.op(k++);
  d.address(place, space, i.a, i.imm, i);
  const u32 count = v < 0 ? 1 : 2u << v;
  std::vector<u32> slots;
  auto add = [&](const Operand& o, bool dest) {
    if (o.kind == Operand::Vector) {
      if (o.items.size() != count) d.syntax("vector of a wrong length");
      for (const auto& item : o.items) slots.push_back(dest ? d.dest(item, bytes) : d.source(item, bytes));
    } else {
      slots.push_back(dest ? d.dest(o, bytes) : d.source(o, *t));
    }
  };
  add(source, false);
  i.flags = static_cast<u32>(op) | (order == 1 || order == 3 ? kAcquire : 0) | (order >= 2 ? kRelease : 0);
  if (op == kCas) {
    i.c = d.source(k++, *t);
    i.flags |= kThird;
  }
  if (result && !d.is_sink(*result)) {
    add(*result, true);
    i.flags |= kReturns;
  }
  i.list = static_cast<u32>(d.program().operands.size());
  i.n = static_cast<u16>(count);
  for (u32 slot : slots) d.add_operand(slot);
  if (i.space == Space::Shared || i.space == Space::Cluster || i.space == Space::Generic) d.note_shared_access(bytes);
  if (i.space == Space::Global || i.space == Space::Generic) d.program().communicates = true;
  i.fn = choose(*t, static_cast<u32>(op));
}

}  // namespace

void register_atomic(DecoderTable& table) {
  table.add("atom", [](Decoder& d, Ins& i) { decode_atomic(d, i, true); });
  table.add("red", [](Decoder& d, Ins& i) {
    if (d.mods().has("async")) decode_store_async(d, i, true);
    else decode_atomic(d, i, false);
  });
}

}  // namespace cake::emu
