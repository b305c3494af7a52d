// wgmma: products of a warpgroup's 64 rows, A from registers or shared memory, B from shared memory, D in registers.
// Each warp computes its own 16 rows when the order of completion says so; reads of shared memory happen then. A product is
// done when all four warps have issued it and it has run for all of them: one warp's wait speaks for the warpgroup.
#include <algorithm>
#include <array>

#include "decode.h"
#include "shadow.h"
#include "tensor_core.h"
#include "tile.h"
#include "wgmma.h"

namespace cake::emu {

void WgmmaState::check_exit() const {
  for (size_t k = 0; k < warps.size(); ++k) {
    if (warps[k].outstanding()) {
      const auto& committed = warps[k].committed;
      const auto group = std::find_if(committed.begin(), committed.end(), [](const auto& g) { return !g.empty(); });
      const bool grouped = group != committed.end();
      const AsyncOp& op = *(grouped ? group->front() : warps[k].open.front())->op;
      throw Fault{"AsyncInFlight",
                  "the CTA ends with wgmma products that no wait has covered (warp " + std::to_string(k) + ")" +
                      (grouped ? "" : ": no wgmma.commit_group follows"), -1, op.issuer, op.pc};
    }
    if (warps[k].sequence != warps[k / 4 * 4].sequence) {
      fault("IllegalInstruction", "warps " + std::to_string(k / 4 * 4) + " and " + std::to_string(k) +
            " of one warpgroup executed different wgmma instructions");
    }
  }
}

namespace {

enum Flag : u32 { kARegisters = 1, kNegateA = 2, kNegateB = 4, kTransposeA = 8, kTransposeB = 16, kSaturate = 32 };
enum class Accumulator : u8 { F32, F16, S32 };

// Ins::imm: N, element types of A and B, accumulator, a byte each.
struct Shape {
  u32 n;
  Element a, b;
  Accumulator d;
};
Shape shape_of(const Ins& i) {
  return {static_cast<u32>(i.imm & 0x1ff), static_cast<Element>(i.imm >> 16 & 0xff), static_cast<Element>(i.imm >> 24 & 0xff),
          static_cast<Accumulator>(i.imm >> 32 & 0xff)};
}

WgmmaState::PerWarp& state_of(Warp& w) {
  Cta& cta = *w.cta;
  if (!cta.wgmma) cta.wgmma = std::make_unique<WgmmaState>();
  if (cta.wgmma->warps.size() != cta.warps.size()) cta.wgmma->warps.resize(cta.warps.size());
  return cta.wgmma->warps[w.index];
}

SharedTile tile_of(u64 descriptor, bool mn_major) {
  static constexpr u32 spans[4] = {0, 128, 64, 32};
  if (descriptor >> 49 & 7) {
    fault("IllegalInstruction", "matrix descriptor " + hex(descriptor) + " has a base offset, which the emulator does not model");
  }
  SharedTile t;
  t.start = static_cast<u32>(descriptor & 0x3fff) << 4;
  t.leading = static_cast<u32>(descriptor >> 16 & 0x3fff) << 4;
  t.stride = static_cast<u32>(descriptor >> 32 & 0x3fff) << 4;
  t.span = spans[descriptor >> 62];
  t.mn_major = mn_major;
  return t;
}

// Row and column of register j of a lane, in the 16 rows of its warp.
template <class T>
struct Fragment {
  static void load(Warp& w, const u32* slots, const Shape& s, std::vector<T>& d) {
    for_registers(w, slots, s, [&](u32 row, u32 column, T* value, bool) { d[row * s.n + column] = *value; });
  }
  static void store(Warp& w, const u32* slots, const Shape& s, const std::vector<T>& d) {
    for_registers(w, slots, s, [&](u32 row, u32 column, T* value, bool) { *value = d[row * s.n + column]; });
  }

 private:
  template <class F>
  static void for_registers(Warp& w, const u32* slots, const Shape& s, F&& f) {
    for (u32 j = 0; j < s.n / 2; ++j) {
      const u32 column = j / 4 * 8 + (j & 1), row = j / 2 % 2 * 8;
      if (s.d == Accumulator::F16) {
        u32* slot = w.slot<u32>(slots[j / 2]);
        const u32 shift = (j & 1) * 16;
        for (int l = 0; l < kLanes; ++l) {
          T value = static_cast<T>(to_float(Half{static_cast<u16>(slot[l] >> shift)}));
          f(row + l / 4, column + l % 4 * 2, &value, true);
          slot[l] = (slot[l] & ~(0xffffu << shift)) | static_cast<u32>(to_half(static_cast<float>(value)).bits) << shift;
        }
      } else {
        T* slot = reinterpret_cast<T*>(w.slot<u32>(slots[j]));
        for (int l = 0; l < kLanes; ++l) f(row + l / 4, column + l % 4 * 2, slot + l, false);
      }
    }
  }
};

// A's 16 rows of this warp from four registers a lane: [k][16].
template <class T>
void a_from_registers(Warp& w, const u32* slots, Element e, T* out) {
  const u32 size = element_bytes(e), per = 4 / size;
  for (u32 r = 0; r < 4; ++r) {
    const u32* slot = w.slot<u32>(slots[r]);
    for (int l = 0; l < kLanes; ++l) {
      for (u32 q = 0; q < per; ++q) {
        const u32 row = l / 4 + r % 2 * 8, k = l % 4 * per + q + r / 2 * 4 * per;
        out[k * 16 + row] = element_as<T>(e, reinterpret_cast<const u8*>(slot + l) + q * size);
      }
    }
  }
}

template <class T>
void compute(Warp& w, const Ins& i, const std::array<u64, 2>& descriptors, bool accumulate) {
  const Shape s = shape_of(i);
  const u32* d_slots = w.gang->launch->program->operands.data() + i.list;
  const u32* a_slots = d_slots + i.n;
  const u32 depth = 32 / element_bytes(s.a);
  std::vector<T> a(depth * 16), b(depth * s.n), d(16 * s.n, T(0));
  if (i.flags & kARegisters) {
    a_from_registers(w, a_slots, s.a, a.data());
  } else {
    read_tile(*w.cta, tile_of(descriptors[0], i.flags & kTransposeA), s.a, 16, static_cast<u32>(w.index % 4) * 16, a.data());
  }
  read_tile(*w.cta, tile_of(descriptors[1], i.flags & kTransposeB), s.b, s.n, 0, b.data());
  if (!(i.flags & kNegateA) != !(i.flags & kNegateB)) {
    for (T& x : a) x = -x;
  }
  if (accumulate) Fragment<T>::load(w, d_slots, s, d);
  if constexpr (std::is_same_v<T, i32>) {
    if (i.flags & kSaturate) {
      for (u32 m = 0; m < 16; ++m) {
        for (u32 n = 0; n < s.n; ++n) {
          i64 sum = d[m * s.n + n];
          for (u32 k = 0; k < depth; ++k) sum += static_cast<i64>(a[k * 16 + m]) * b[k * s.n + n];
          d[m * s.n + n] = static_cast<i32>(std::clamp<i64>(sum, INT32_MIN, INT32_MAX));
        }
      }
      Fragment<T>::store(w, d_slots, s, d);
      return;
    }
  }
  if constexpr (std::is_same_v<T, float>) {
    if (s.d == Accumulator::F32) {
      const TensorCore core(b.data(), s.n, depth, {lowest_exponent(s.a), lowest_exponent(s.b), element_bytes(s.a) == 1});
      for (u32 m = 0; m < 16; ++m) core.multiply_add(a.data() + m, 16, d.data() + m * s.n);
      Fragment<T>::store(w, d_slots, s, d);
      return;
    }
  }
  multiply_add<T>(a.data(), b.data(), 16, s.n, depth, d.data(), s.n);
  Fragment<T>::store(w, d_slots, s, d);
}

// The registers of this product must not be in flight, except as the same accumulator of products before it.
void check_registers(Warp& w, const u32* d_slots, u32 d_count, const u32* a_slots, u32 a_count) {
  for (u32 k = 0; k < a_count; ++k) {
    if (w.flight->is_written(a_slots[k])) w.flight->unwaited(w, *w.flight->writer(a_slots[k]));
  }
  for (u32 k = 0; k < d_count; ++k) {
    if (w.flight->is_read(d_slots[k])) w.flight->still_read(w, d_slots[k]);
    if (!w.flight->is_written(d_slots[k])) continue;
    const FlightHandle before = w.flight->writer(d_slots[k]);
    const u32 opcode = w.gang->launch->program->code[w.pc].opcode;
    if (before->opcode != opcode && w.gang->launch->program->opcodes[before->opcode].rfind("wgmma", 0) != 0) {
      w.flight->unwaited(w, *before);
    }
  }
}

// A product belongs to the whole warpgroup, and so does the clock that tells when its operands have been read.
u32 reader_of(Warp& w) {
  const u32 warp = w.cta->rank * static_cast<u32>(w.cta->warps.size()) + static_cast<u32>(w.index);
  return w.gang->clocks.matrix_actor(warp - static_cast<u32>(w.index % 4));
}

void announce(Warp& w, const Ins& i, const std::array<u64, 2>& descriptors, u32 sequence) {
  if (!w.cta->shadow) return;
  const Shape s = shape_of(i);
  const u32 reader = reader_of(w);
  if (!(i.flags & kARegisters)) {
    const SharedTile a = tile_of(descriptors[0], i.flags & kTransposeA);
    announce_tile(w, *w.cta, a, s.a, 16, static_cast<u32>(w.index % 4) * 16, reader, sequence);
  }
  announce_tile(w, *w.cta, tile_of(descriptors[1], i.flags & kTransposeB), s.b, s.n, 0, reader, sequence);
}

template <class T>
void h_wgmma(Warp& w, const Ins& i) {
  WgmmaState::PerWarp& state = state_of(w);
  if (!state.fenced) fault("IllegalInstruction", "the first wgmma of a warp needs wgmma.fence before it");
  if (w.index / 4 * 4 + 4 > static_cast<int>(w.cta->warps.size())) {
    fault("IllegalInstruction", "wgmma takes four warps, the warpgroup of warp " + std::to_string(w.index) + " has " +
          std::to_string(w.cta->warps.size() % 4));
  }
  const Program& program = *w.gang->launch->program;
  const u32* d_slots = program.operands.data() + i.list;
  const u32* a_slots = d_slots + i.n;
  const u32 a_count = i.flags & kARegisters ? 4 : 0;
  if (!w.flight) w.flight = std::make_unique<RegisterFlight>(program.register_bytes);
  check_registers(w, d_slots, i.n, a_slots, a_count);
  const std::array<u64, 2> descriptors = {a_count ? 0 : w.lane64(i.a, 0), w.lane64(i.b, 0)};
  const bool accumulate = w.predicates[i.c] & 1;
  const Shape s = shape_of(i);
  w.stats->mma_flops += 2ull * 16 * s.n * (32 / element_bytes(s.a));
  state.sequence.push_back(i.line);
  auto entry = std::make_shared<FlightEntry>();
  entry->writes.assign(d_slots, d_slots + i.n);
  entry->reads.assign(a_slots, a_slots + a_count);
  entry->pc = w.pc;
  entry->opcode = i.opcode;
  entry->sequence = static_cast<u32>(state.sequence.size());
  announce(w, i, descriptors, entry->sequence);
  Warp* warp = &w;
  const Ins* ins = &i;
  FlightEntry* own = entry.get();  // the entry outlives its operation: the warp's groups hold it
  // Products of one warp complete in order.
  const u64 stream = 1 + 2 * (static_cast<u64>(w.cta->rank) * 64 + static_cast<u64>(w.index));
  entry->op = w.gang->async.issue(*w.gang, [warp, ins, descriptors, accumulate, own] {
    compute<T>(*warp, *ins, descriptors, accumulate);
    own->run_copies(*warp);
  }, stream);
  state.open.push_back(entry);
  w.flight->add(entry);
  ++w.gang->progress;
}

void h_fence(Warp& w, const Ins&) { state_of(w).fenced = true; }

void h_commit(Warp& w, const Ins&) {
  WgmmaState::PerWarp& state = state_of(w);
  state.committed.push_back(std::move(state.open));
  state.open.clear();
}

// The warps of the warpgroup must have issued the product too. True when they have.
bool issued_by_all(Warp& w, u32 sequence) {
  for (u32 k = 0; k < 4; ++k) {
    const size_t at = static_cast<size_t>(w.index) / 4 * 4 + k;
    if (w.cta->wgmma->warps[at].sequence.size() >= sequence) continue;
    if (!w.cta->warps[at].alive) {
      fault("IllegalInstruction", "warp " + std::to_string(at) + " has exited without this warpgroup's wgmma number " +
            std::to_string(sequence));
    }
    return false;
  }
  return true;
}

void complete_for_all(Warp& w, u32 sequence) {
  for (u32 k = 0; k < 4; ++k) {
    WgmmaState::PerWarp& sibling = w.cta->wgmma->warps[static_cast<size_t>(w.index) / 4 * 4 + k];
    auto finish = [&](const FlightHandle& entry) {
      if (entry->sequence <= sequence) w.gang->async.complete(*w.gang, entry->op);
    };
    for (const auto& group : sibling.committed) std::for_each(group.begin(), group.end(), finish);
    std::for_each(sibling.open.begin(), sibling.open.end(), finish);
  }
}

void h_wait(Warp& w, const Ins& i) {
  WgmmaState::PerWarp& state = state_of(w);
  u32 newest = 0;
  for (size_t k = 0; k + static_cast<size_t>(i.imm) < state.committed.size(); ++k) {
    if (!state.committed[k].empty()) newest = state.committed[k].back()->sequence;
  }
  if (newest && !issued_by_all(w, newest)) {
    w.signal = Signal::Again;
    return;
  }
  if (newest) complete_for_all(w, newest);
  while (state.committed.size() > static_cast<size_t>(i.imm)) {
    for (auto& entry : state.committed.front()) entry->waited = true;
    state.committed.pop_front();
  }
  if (newest && w.cta->shadow) w.gang->clocks.know(w.cta->shadow->id(w), reader_of(w), newest);
  if (w.flight) w.flight->settle();
}

Element element_of(Decoder& d, const std::string& type) {
  static const std::pair<const char*, Element> names[] = {{"f16", Element::F16}, {"bf16", Element::BF16}, {"tf32", Element::TF32},
                                                          {"e4m3", Element::E4M3}, {"e5m2", Element::E5M2}, {"s8", Element::S8},
                                                          {"u8", Element::U8}};
  for (const auto& [name, element] : names) {
    if (type == name && d.mods().take(type)) return element;
  }
  d.unsupported("element type " + type);
}

// .mN.kK as m64nNkK: the shape is one modifier.
u32 take_shape(Decoder& d, u32& k) {
  for (const auto& part : d.statement().parts) {
    u32 m = 0, n = 0;
    if (std::sscanf(part.c_str(), "m%un%uk%u", &m, &n, &k) != 3) continue;
    d.mods().take(part);
    if (m != 64 || n < 8 || n > 256 || n % 8) d.unsupported("shape " + part);
    return n;
  }
  d.unsupported("no shape");
}

void decode_product(Decoder& d, Ins& i) {
  Modifiers& m = d.mods();
  if (!m.take("sync") || !m.take("aligned")) d.unsupported("form");
  u32 k = 0;
  const u32 n = take_shape(d, k);
  const bool saturate = m.take("satfinite");
  // Types in order: D, A, B. D comes first, so FP16 accumulators are taken before FP16 operands.
  Accumulator accumulator = Accumulator::F32;
  const auto& parts = d.statement().parts;
  std::vector<std::string> types;
  for (size_t p = 1; p < parts.size(); ++p) {
    if (parts[p] == "f32" || parts[p] == "s32" || parts[p] == "f16" || parts[p] == "bf16" || parts[p] == "tf32" ||
        parts[p] == "e4m3" || parts[p] == "e5m2" || parts[p] == "s8" || parts[p] == "u8") {
      types.push_back(parts[p]);
    }
  }
  if (types.size() != 3) d.syntax("types of D, A and B are expected");
  if (!m.take(types[0])) d.syntax("accumulator type");
  if (types[0] == "f16") accumulator = Accumulator::F16;
  else if (types[0] == "s32") accumulator = Accumulator::S32;
  else if (types[0] != "f32") d.unsupported("accumulator " + types[0]);
  const Element a = element_of(d, types[1]), b = element_of(d, types[2]);
  if (element_bytes(a) != element_bytes(b)) d.syntax("operand types of different width");
  const bool whole = a == Element::S8 || a == Element::U8;
  if (whole != (accumulator == Accumulator::S32)) d.syntax("this accumulator does not go with these operands");
  if (k != 32 / element_bytes(a)) d.syntax("k of the shape does not fit the operand type");
  d.program().matrix_reads = true;
  i.kind = Kind::Sync;
  i.sync = Sync::Whole;
  i.fn = whole ? h_wgmma<i32> : h_wgmma<float>;
  i.imm = static_cast<i64>(n) | static_cast<i64>(a) << 16 | static_cast<i64>(b) << 24 | static_cast<i64>(accumulator) << 32;
  if (saturate) i.flags |= kSaturate;
  const u32 registers = accumulator == Accumulator::F16 ? n / 4 : n / 2;
  if (d.op(0).kind != Operand::Vector || d.op(0).items.size() != registers) {
    d.syntax(std::to_string(registers) + " accumulator registers are expected");
  }
  // One list: the accumulators, then A's registers.
  std::vector<u32> slots;
  for (const auto& item : d.op(0).items) slots.push_back(d.dest(item, 4));
  if (d.op(1).kind == Operand::Vector) {
    if (d.op(1).items.size() != 4) d.syntax("four registers of A are expected");
    i.flags |= kARegisters;
    for (const auto& item : d.op(1).items) slots.push_back(d.source(item, 4u));
  } else {
    i.a = d.source(1, 8u);
  }
  i.b = d.source(2, 8u);
  i.c = d.predicate(3);
  i.list = static_cast<u32>(d.program().operands.size());
  i.n = static_cast<u16>(registers);
  for (u32 slot : slots) d.add_operand(slot);
  size_t next = 4;
  if (!whole && d.count() > next) {
    if (d.constant(d.op(next++)) == -1) i.flags |= kNegateA;
    if (d.constant(d.op(next++)) == -1) i.flags |= kNegateB;
    if (element_bytes(a) == 2) {
      if (!(i.flags & kARegisters) && d.constant(d.op(next++)) == 1) i.flags |= kTransposeA;
      if (d.constant(d.op(next++)) == 1) i.flags |= kTransposeB;
    }
  }
  if (next != d.count()) d.syntax("too many operands");
}

void decode_wgmma(Decoder& d, Ins& i) {
  Modifiers& m = d.mods();
  if (m.take("mma_async")) {
    decode_product(d, i);
    return;
  }
  const int what = m.take_one({"fence", "commit_group", "wait_group"});
  if (what < 0 || !m.take("sync") || !m.take("aligned")) d.unsupported("form");
  i.kind = Kind::Sync;
  i.sync = Sync::Whole;
  i.fn = what == 0 ? h_fence : what == 1 ? h_commit : h_wait;
  if (what == 2) i.imm = d.constant(d.op(0));
}

}  // namespace

void register_wgmma(DecoderTable& table) { table.add("wgmma", decode_wgmma); }

}  // namespace cake::emu
