// st.async and red.async: one value to the shared memory of a cluster's CTA, counted as bytes on an mbarrier there.
#include "access.h"
#include "decode.h"
#include "mbarrier.h"
#include "reduce.h"
#include "shared_opcodes.h"

namespace cake::emu {
namespace {

constexpr u32 kReduce = 1u << 31;

void h_store_async(Warp& w, const Ins& i) {
  const u32* extra = w.gang->launch->program->operands.data() + i.list;  // values, then the barrier's offset
  const i32 barrier_offset = static_cast<i32>(extra[i.n]);
  const u32 bytes = i.width * i.n;
  each_lane(w.mask, [&](int l) {
    const u32 address = w.lane32(i.a, l) + static_cast<u32>(i.imm);
    const u32 barrier = w.lane32(i.e, l) + static_cast<u32>(barrier_offset);
    if (address % bytes) misaligned(address, bytes, l);
    if (address >> kRankShift != barrier >> kRankShift) {
      fault("IllegalInstruction", "the value and its mbarrier lie in different CTAs", l);
    }
    Cta& target = shared_owner(w, address, bytes, Rw::Write, l, true);
    mbarrier_issue(w, barrier, l);
    if (target.shadow)
      target.shadow->async_write(w, address & (kSharedWindow - 1), bytes,
                                 i.flags & kReduce ? SharedShadow::Async::GenericReduce : SharedShadow::Async::Copy);
    u8 value[32];
    for (u32 k = 0; k < i.n; ++k) {
      const u64 word = i.width == 8 ? w.lane64(extra[k], l) : w.lane32(extra[k], l);
      std::memcpy(value + k * i.width, &word, i.width);
    }
    std::string data(reinterpret_cast<const char*>(value), bytes);
    Warp* warp = &w;
    const u32 flags = i.flags;
    w.gang->async.issue(*w.gang, [warp, address, barrier, flags, data, l] {
      const u32 n = static_cast<u32>(data.size());
      Cta& cta = shared_owner(*warp, address, n, Rw::Write, l, true);
      const u32 offset = address & (kSharedWindow - 1);
      const u8* from = reinterpret_cast<const u8*>(data.data());
      if (flags & kReduce) reduce_bytes(cta.shared + offset, from, n, flags & ~kReduce);
      else std::memcpy(cta.shared + offset, from, n);
      if (cta.shadow) cta.shadow->async_arrived(offset, n, barrier);
      mbarrier_complete_tx(*warp->gang, barrier, n);
    });
  });
  ++w.stats->async_copies;
}

}  // namespace

void decode_store_async(Decoder& d, Ins& i, bool reduces) {
  Modifiers& m = d.mods();
  m.take("async");
  m.take_one({"weak", "relaxed"});
  m.take("cluster");
  m.take("shared::cluster");
  if (!m.take("mbarrier::complete_tx::bytes")) d.unsupported("completion mechanism");
  const int op = reduces ? m.take_one({"add", "min", "max", "and", "or", "xor", "inc", "dec"}) : -1;
  const int v = m.take_one({"v2", "v4"});
  const auto t = m.take_type();
  if (!t || (bytes_of(*t) != 4 && bytes_of(*t) != 8)) d.unsupported("type");
  if (reduces) {
    i.flags = static_cast<u32>(op) | static_cast<u32>(*t) << 8;
    if (op < 0 || !reducible(i.flags)) d.unsupported("reduction");
    i.flags |= kReduce;
  }
  i.width = static_cast<u8>(bytes_of(*t));
  d.address(0, Space::Cluster, i);
  std::vector<u32> slots;
  const Operand& data = d.op(1);
  if (data.kind == Operand::Vector) {
    for (const auto& item : data.items) slots.push_back(d.source(item, bytes_of(*t)));
  } else {
    slots.push_back(d.source(data, *t));
  }
  if (slots.size() != (v < 0 ? 1u : 2u << v)) d.syntax("vector of a wrong length");
  Ins barrier;
  i64 offset = 0;
  d.address(d.op(2), Space::Cluster, i.e, offset, barrier);
  i.list = static_cast<u32>(d.program().operands.size());
  i.n = static_cast<u16>(slots.size());
  for (u32 slot : slots) d.add_operand(slot);
  d.add_operand(static_cast<u32>(offset));
  d.note_shared_access(bytes_of(*t));
  i.fn = h_store_async;
}

}  // namespace cake::emu
