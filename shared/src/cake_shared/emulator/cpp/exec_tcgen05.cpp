// tcgen05: tensor memory, its loads and stores, and the asynchronous pipe of products, copies and shifts.
#include <algorithm>

#include "access.h"
#include "decode.h"
#include "mbarrier.h"
#include "tcgen05_mma.h"
#include "tensor_memory.h"

namespace cake::emu {

TensorMemory& tensor_memory(Cta& cta) {
  if (!cta.tensor) cta.tensor = std::make_unique<TensorMemory>(cta.gang->launch->limits.tmem_columns);
  if (cta.tensor->warps.size() != cta.warps.size()) cta.tensor->warps.resize(cta.warps.size());
  return *cta.tensor;
}

u64 tensor_pipe(const Cta& cta) { return 2 + 2 * static_cast<u64>(cta.rank); }

Cta& pair_peer(Warp& w, Cta& cta) {
  const u32 peer = cta.rank ^ 1;
  if (peer >= w.gang->ctas.size()) fault("IllegalInstruction", "cta_group::2 in a cluster without the CTA of rank " + std::to_string(peer));
  return *w.gang->ctas[peer];
}

namespace {

u32 take_group(Decoder& d) {
  const int g = d.mods().take_one({"cta_group::1", "cta_group::2"});
  if (g < 0) d.unsupported("no cta_group");
  return g == 1 ? kPair : 0;
}

void whole_warp(Ins& i, Decoder& d) {
  if (!d.mods().take("sync") || !d.mods().take("aligned")) d.unsupported("form");
  i.kind = Kind::Sync;
  i.sync = Sync::Whole;
}

u32 column_count(Warp& w, u32 slot) {
  const u32 n = w.lane32(slot, first_lane(w.mask));
  const u32 most = w.gang->launch->limits.tmem_columns;
  if (n < 32 || n > most || (n & (n - 1))) {
    fault("TensorMemoryLeak", std::to_string(n) + " columns: a power of two from 32 to " + std::to_string(most) + " is taken");
  }
  return n;
}

// ---------------------------------------------------------------- allocation

void h_alloc(Warp& w, const Ins& i) {
  TensorMemory& t = tensor_memory(*w.cta);
  const u32 n = column_count(w, i.b);
  if (!t.may_allocate()) fault("TensorMemoryLeak", "allocates after tcgen05.relinquish_alloc_permit");
  const u32 first = t.allocate(n);
  if (first == t.columns()) {
    w.signal = Signal::Again;  // until another warp gives columns back
    return;
  }
  const int lane = first_lane(w.mask);
  std::memcpy(lane_at(w, i, i.a, i.imm, lane, 4, Rw::Write), &first, 4);
  ++w.gang->progress;
}

void h_dealloc(Warp& w, const Ins& i) {
  const u32 address = w.lane32(i.a, first_lane(w.mask));
  const u32 n = column_count(w, i.b);
  if (address >> 16) fault("TensorMemoryLeak", "deallocates at lane " + std::to_string(address >> 16) + ", lane 0 is taken");
  tensor_memory(*w.cta).release(address & 0xffff, n);
  ++w.gang->progress;
}

// ---------------------------------------------------------------- loads and stores of a warp

enum class LoadShape : u8 { L32x32b, L16x64b, L16x128b, L16x256b, L16x32bx2 };

// Row (from the lane of the address) and column (from its column) of register r of thread l.
void place(LoadShape s, u32 l, u32 r, u32 half, u32& row, u32& column) {
  switch (s) {
    case LoadShape::L32x32b:
      row = l;
      column = r;
      break;
    case LoadShape::L16x64b:
      row = l / 4 + 8 * (l % 2);
      column = l / 2 % 2 + 2 * r;
      break;
    case LoadShape::L16x128b:
      row = l / 4 + 8 * (r % 2);
      column = l % 4 + 4 * (r / 2);
      break;
    case LoadShape::L16x256b:
      row = l / 4 + 8 * (r / 2 % 2);
      column = r % 2 + 2 * (l % 4) + 8 * (r / 4);
      break;
    case LoadShape::L16x32bx2:
      row = l % 16;
      column = r + l / 16 * half;
      break;
  }
}

struct Window {
  u32 lane, column;
};

// A warp reaches the 32 lanes of its own quarter.
Window window_of(Warp& w, const Ins& i, LoadShape s) {
  const u32 address = w.lane32(i.a, first_lane(w.mask)) + static_cast<u32>(i.imm);
  const Window at{address >> 16, address & 0xffff};
  const u32 quarter = static_cast<u32>(w.index % 4) * 32, rows = s == LoadShape::L32x32b ? 32 : 16;
  if (at.lane < quarter || at.lane + rows > quarter + 32 || at.lane % 16) {
    fault("IllegalInstruction", "warp " + std::to_string(w.index) + " reaches tensor-memory lanes " + std::to_string(quarter) + " to " +
          std::to_string(quarter + 31) + ", the address names lane " + std::to_string(at.lane));
  }
  u32 row = 0, column = 0, last = 0;
  for (u32 l = 0; l < kLanes; ++l) {
    place(s, l, i.n - 1u, i.e, row, column);
    last = std::max(last, column);
  }
  tensor_memory(*w.cta).check_range(at.lane, at.column, rows, last + 1);
  return at;
}

void h_load(Warp& w, const Ins& i) {
  const LoadShape s = static_cast<LoadShape>(i.width);
  const Window at = window_of(w, i, s);
  const Program& program = *w.gang->launch->program;
  const u32* slots = program.operands.data() + i.list;
  if (!w.flight) w.flight = std::make_unique<RegisterFlight>(program.register_bytes);
  auto entry = std::make_shared<FlightEntry>();
  entry->writes.assign(slots, slots + i.n);
  entry->pc = w.pc;
  entry->opcode = i.opcode;
  Warp* warp = &w;
  TensorMemory* memory = &tensor_memory(*w.cta);
  FlightEntry* own = entry.get();
  const u32 count = i.n, half = i.e;
  entry->op = w.gang->async.issue(*w.gang, [warp, memory, own, slots, count, half, at, s] {
    for (u32 r = 0; r < count; ++r) {
      for (u32 l = 0; l < kLanes; ++l) {
        u32 row = 0, column = 0;
        place(s, l, r, half, row, column);
        warp->set32(slots[r], static_cast<int>(l), memory->read(at.lane + row, at.column + column));
      }
    }
    own->run_copies(*warp);
  });
  memory->warps[w.index].loads.push_back(entry);
  w.flight->add(entry);
}

void h_store(Warp& w, const Ins& i) {
  const LoadShape s = static_cast<LoadShape>(i.width);
  const Window at = window_of(w, i, s);
  const u32* slots = w.gang->launch->program->operands.data() + i.list;
  // The registers are read when the instruction is issued.
  std::vector<u32> values;
  values.reserve(i.n * kLanes);
  for (u32 r = 0; r < i.n; ++r) {
    for (int l = 0; l < kLanes; ++l) values.push_back(w.lane32(slots[r], l));
  }
  TensorMemory* memory = &tensor_memory(*w.cta);
  const u32 count = i.n, half = i.e;
  auto handle = w.gang->async.issue(*w.gang, [memory, values = std::move(values), count, half, at, s] {
    for (u32 r = 0; r < count; ++r) {
      for (u32 l = 0; l < kLanes; ++l) {
        u32 row = 0, column = 0;
        place(s, l, r, half, row, column);
        memory->write(at.lane + row, at.column + column, values[r * kLanes + l]);
      }
    }
  });
  memory->warps[w.index].stores.push_back(std::move(handle));
}

void h_wait_load(Warp& w, const Ins&) {
  auto& loads = tensor_memory(*w.cta).warps[w.index].loads;
  for (auto& entry : loads) {
    w.gang->async.complete(*w.gang, entry->op);
    entry->waited = true;
  }
  loads.clear();
  if (w.flight) w.flight->settle();
}

void h_wait_store(Warp& w, const Ins&) {
  auto& stores = tensor_memory(*w.cta).warps[w.index].stores;
  for (auto& op : stores) w.gang->async.complete(*w.gang, op);
  stores.clear();
}

void decode_load_store(Decoder& d, Ins& i, bool store) {
  whole_warp(i, d);
  Modifiers& m = d.mods();
  static const std::pair<const char*, LoadShape> shapes[] = {{"32x32b", LoadShape::L32x32b}, {"16x64b", LoadShape::L16x64b},
                                                             {"16x128b", LoadShape::L16x128b}, {"16x256b", LoadShape::L16x256b},
                                                             {"16x32bx2", LoadShape::L16x32bx2}};
  const LoadShape* shape = nullptr;
  for (const auto& [name, s] : shapes) {
    if (m.take(name)) shape = &s;
  }
  if (!shape) d.unsupported("shape");
  const int power = m.take_one({"x1", "x2", "x4", "x8", "x16", "x32", "x64", "x128"});
  if (power < 0) d.unsupported("repetition");
  const u32 per = *shape == LoadShape::L16x128b ? 2 : *shape == LoadShape::L16x256b ? 4 : 1;
  const u32 expected = (1u << power) * per;
  m.take("b32");
  i.width = static_cast<u8>(*shape);
  const bool split = *shape == LoadShape::L16x32bx2;
  size_t values, address;
  if (store) {
    address = 0;
    values = split ? 2 : 1;
  } else {
    values = 0;
    address = 1;
  }
  Ins unused;
  d.address(d.op(address), Space::Shared, i.a, i.imm, unused);
  if (split) i.e = static_cast<u32>(d.constant(d.op(store ? 1 : 2)));
  d.list(d.op(values), 4, !store, i);
  if (i.n != expected) d.syntax(std::to_string(expected) + " registers are expected");
  i.fn = store ? h_store : h_load;
}

// ---------------------------------------------------------------- the pipe

// Arrives once everything that the CTA has put into the pipe before is done.
void h_commit(Warp& w, const Ins& i) {
  each_lane(w.mask, [&](int l) {
    const u32 address = w.lane32(i.a, l) + static_cast<u32>(i.imm);
    const u32 own = address >> kRankShift;
    const u32 mask = i.flags & 2 ? w.lane32(i.b, l) & 0xffff : 1u << own;
    if (mask == 0 || mask >> w.gang->ctas.size()) {
      fault("IllegalInstruction", "multicast mask " + hex(mask) + " in a cluster of " + std::to_string(w.gang->ctas.size()), l);
    }
    const u32 offset = address & (kSharedWindow - 1);
    for (u32 rank = 0; rank < w.gang->ctas.size(); ++rank) {
      if (!(mask >> rank & 1)) continue;
      shared_owner(w, rank << kRankShift | offset, 8, Rw::Atomic, l, true);
      mbarrier_issue(w, rank << kRankShift | offset, l);
    }
    Gang* gang = w.gang;
    // Whoever waits for the phase knows that what this warp had issued has read its operands.
    u32 reader = 0, clock = 0;
    Knowledge told;
    if (w.cta->shadow) {
      const u32 me = w.cta->shadow->id(w);
      reader = gang->clocks.matrix_actor(me);
      clock = gang->clocks.issue(reader);
      told = gang->clocks.nothing();
      gang->clocks.release(me, 1u << l, told);
    }
    gang->async.issue(*gang, [gang, mask, offset, reader, clock, told = std::move(told)] {
      for (u32 rank = 0; rank < gang->ctas.size(); ++rank) {
        if (!(mask >> rank & 1)) continue;
        if (gang->ctas[rank]->shadow) gang->ctas[rank]->shadow->mbarrier_tells(offset, reader, clock);
        mbarrier_arrive(*gang, rank << kRankShift | offset, 1, told);
      }
    }, tensor_pipe(*w.cta));
  });
}

void decode_tcgen05(Decoder& d, Ins& i) {
  Modifiers& m = d.mods();
  Ins unused;
  if (m.take("alloc")) {
    i.flags = take_group(d);
    whole_warp(i, d);
    const Space space = d.take_space(Space::Shared);
    m.take("b32");
    d.address(0, space, i);
    if (space == Space::Generic) d.unsupported("generic address");
    i.b = d.source(1, 4u);
    i.fn = h_alloc;
  } else if (m.take("dealloc")) {
    i.flags = take_group(d);
    whole_warp(i, d);
    m.take("b32");
    i.a = d.source(0, 4u);
    i.b = d.source(1, 4u);
    i.fn = h_dealloc;
  } else if (m.take("relinquish_alloc_permit")) {
    take_group(d);
    whole_warp(i, d);
    i.fn = [](Warp& w, const Ins&) { tensor_memory(*w.cta).relinquish(); };
  } else if (m.take("ld")) {
    decode_load_store(d, i, false);
  } else if (m.take("st")) {
    decode_load_store(d, i, true);
  } else if (m.take("wait::ld")) {
    whole_warp(i, d);
    i.fn = h_wait_load;
  } else if (m.take("wait::st")) {
    whole_warp(i, d);
    i.fn = h_wait_store;
  } else if (m.take("fence::before_thread_sync") || m.take("fence::after_thread_sync")) {
    i.fn = [](Warp&, const Ins&) {};
  } else if (m.take("commit")) {
    i.flags = take_group(d);
    m.take("mbarrier::arrive::one");
    m.take_one({"shared::cluster", "shared::cta"});
    if (m.take("multicast::cluster")) {
      i.flags |= 2;
      i.b = d.source(1, 4u);
    }
    m.take("b64");
    d.address(d.op(0), Space::Shared, i.a, i.imm, unused);
    i.fn = h_commit;
  } else if (m.take("mma")) {
    i.flags = take_group(d);
    decode_tensor_mma(d, i);
  } else if (m.take("cp")) {
    i.flags = take_group(d);
    decode_tensor_cp(d, i);
  } else if (m.take("shift")) {
    i.flags = take_group(d);
    decode_tensor_shift(d, i);
  } else {
    d.unsupported("form");
  }
}

}  // namespace

void register_tcgen05(DecoderTable& table) { table.add("tcgen05", decode_tcgen05); }

}  // namespace cake::emu
