// Tensor copies in tiled mode: boxes between global and shared memory through tensor maps, reductions, multicast.
#include <algorithm>
#include <cmath>

#include "access.h"
#include "decode.h"
#include "mbarrier.h"
#include "tensor.h"
#include "tensor_map.h"
#include "tile.h"

namespace cake::emu {
namespace {

enum class Move : u8 { Load, Store, Reduce, Prefetch };
enum class Reduction : u8 { Add, Min, Max, Inc, Dec, And, Or, Xor };
constexpr u32 kMulticast = 1;

// Ins: d Move, e Reduction, n rank; `list`: coordinates, then three words: offsets of barrier and map, slot of the mask.
struct Operands {
  const u32* coordinates;
  u32 barrier_offset, map_offset, mask_slot;
};
Operands operands_of(Warp& w, const Ins& i) {
  const u32* list = w.gang->launch->program->operands.data() + i.list;
  return {list, list[i.n], list[i.n + 1], list[i.n + 2]};
}

// One box of a map at a place: how its rows lie in global and in shared memory.
struct Box {
  TensorMap map;
  i64 at[5] = {};
  u32 count[5] = {1, 1, 1, 1, 1};  // elements that arrive along each dimension
  u32 size = 0, row_bytes = 0, bytes = 0;

  Box(const TensorMap& m, const i32* coordinates) : map(m), size(map_type_bytes(m.type)) {
    bytes = size;
    for (u32 k = 0; k < m.rank; ++k) {
      at[k] = coordinates[k];
      count[k] = (m.box[k] + m.steps[k] - 1u) / m.steps[k];
      bytes *= count[k];
    }
    row_bytes = count[0] * size;
  }

  // Measured: where a row's bytes are no multiple of 16, an H200 stores the whole last unit, past the row's end.
  void round_up_rows() { map.dims[0] = (map.dims[0] * size + 15) / 16 * 16 / size; }

  bool inside(u32 k, u32 index) const {
    const i64 c = at[k] + static_cast<i64>(index) * map.steps[k];
    return c >= 0 && c < static_cast<i64>(map.dims[k]);
  }

  // f(row number, address of element 0 of the row (it may lie outside), whether the row lies inside of the outer dimensions)
  template <class F>
  void each_row(F&& f) const {
    const u32 rows = bytes / row_bytes;
    for (u32 r = 0; r < rows; ++r) {
      u64 address = map.base + static_cast<u64>(at[0]) * size;
      bool in = true;
      u32 rest = r;
      for (u32 k = 1; k < map.rank; ++k) {
        const u32 index = rest % count[k];
        rest /= count[k];
        in = in && inside(k, index);
        address += static_cast<u64>(at[k] + static_cast<i64>(index) * map.steps[k]) * map.strides[k - 1];
      }
      f(r, address, in);
    }
  }

  // The elements [first, last) of a row that lie inside of dimension 0.
  void inner_range(u32& first, u32& last) const {
    first = 0;
    last = count[0];
    while (first < last && !inside(0, first)) ++first;
    while (last > first && !inside(0, last - 1)) --last;
  }
};

TensorMap read_map(Warp& w, u64 address, int lane) {
  const Launch& launch = *w.gang->launch;
  const u64 params = reinterpret_cast<u64>(launch.param_data);
  const bool in_params = address >= params && address + sizeof(TensorMap) <= params + launch.params.size();
  if (!in_params && launch.registry.find(address, sizeof(TensorMap)) < 0) {
    fault("OutOfBounds", "the tensor map's address " + hex(address) + " is neither in the parameters nor in an allocation", lane);
  }
  if (address % 64) misaligned(address, 64, lane);
  TensorMap map;
  std::memcpy(static_cast<void*>(&map), reinterpret_cast<const void*>(address), sizeof(map));
  if (map.magic != TensorMap::kMagic) fault("IllegalInstruction", "no tensor map lies at " + hex(address), lane);
  return map;
}

// Measured on an H200 for 16 and 32 bits: one NaN of 16 bits, repeated.
u64 fill_bits(const TensorMap& m) {
  if (!m.fill_nan) return 0;
  switch (m.type) {
    case MapType::F16:
    case MapType::BF16: return 0x7ff7;
    case MapType::F64: return 0x7ff77ff77ff77ff7ull;
    default: return 0x7ff77ff7;
  }
}

// Global memory that the box touches lies in allocations, and may be written if it is to be.
void check_global(Warp& w, const Box& box, Rw rw, int lane) {
  u32 first, last;
  box.inner_range(first, last);
  if (first == last) return;
  const u32 span = ((last - 1 - first) * box.map.steps[0] + 1) * box.size;
  box.each_row([&](u32, u64 address, bool in) {
    if (!in) return;
    const u64 from = address + static_cast<u64>(first) * box.map.steps[0] * box.size;
    const int k = w.gang->launch->registry.find(from, span);
    if (k < 0 || (rw != Rw::Read && w.gang->launch->registry[k].read_only)) global_fault(w, from, span, rw, lane);
    if (w.gang->launch->record) overlap_access(w, k, from, span, rw, lane, true);
  });
}

// Calls f(shared address of an element, address of the same element in global memory, inside, elements in one piece).
template <class F>
void each_piece(const Box& box, u32 shared, F&& f) {
  u32 first, last;
  box.inner_range(first, last);
  const bool dense = box.map.steps[0] == 1;
  const u32 piece = dense ? 16 / box.size : 1;  // a swizzle keeps 16 bytes together
  box.each_row([&](u32 row, u64 address, bool in) {
    for (u32 e = 0; e < box.count[0];) {
      u32 n = std::min(piece - e % piece, box.count[0] - e);
      bool valid = in && e >= first && e < last;
      if (in && e < first) n = std::min(n, first - e);
      if (valid) n = std::min(n, last - e);
      const u32 linear = shared + row * box.row_bytes + e * box.size;
      f(swizzled(linear, box.map.swizzle_bytes), address + static_cast<u64>(e) * box.map.steps[0] * box.size, valid, n);
      e += n;
    }
  });
}

template <class T>
T combine(Reduction op, T a, T b) {
  switch (op) {
    case Reduction::Add: return static_cast<T>(a + b);
    case Reduction::Min: return std::min(a, b);
    case Reduction::Max: return std::max(a, b);
    default: break;
  }
  if constexpr (std::is_unsigned_v<T>) {
    switch (op) {
      case Reduction::Inc: return a >= b ? 0 : a + 1;
      case Reduction::Dec: return a == 0 || a > b ? b : a - 1;
      case Reduction::And: return a & b;
      case Reduction::Or: return a | b;
      case Reduction::Xor: return a ^ b;
      default: break;
    }
  }
  return a;
}

template <class T>
void combine_into(u8* to, const u8* from, Reduction op) {
  T a, b;
  std::memcpy(&a, to, sizeof(T));
  std::memcpy(&b, from, sizeof(T));
  a = combine(op, a, b);
  std::memcpy(to, &a, sizeof(T));
}

template <class T, T (*Round)(float)>
void combine_half(u8* to, const u8* from, Reduction op) {
  T a, b;
  std::memcpy(&a, to, 2);
  std::memcpy(&b, from, 2);
  const float x = to_float(a), y = to_float(b);
  const float r = op == Reduction::Add ? x + y : op == Reduction::Min ? std::fmin(x, y) : std::fmax(x, y);
  a = Round(r);
  std::memcpy(to, &a, 2);
}

void combine_element(const TensorMap& m, Reduction op, u8* to, const u8* from) {
  const bool bitwise = op >= Reduction::And;
  switch (m.type) {
    case MapType::U32: combine_into<u32>(to, from, op); break;
    case MapType::S32: bitwise ? combine_into<u32>(to, from, op) : combine_into<i32>(to, from, op); break;
    case MapType::U64: combine_into<u64>(to, from, op); break;
    case MapType::S64: bitwise ? combine_into<u64>(to, from, op) : combine_into<i64>(to, from, op); break;
    case MapType::F32: combine_into<float>(to, from, op); break;
    case MapType::F64: combine_into<double>(to, from, op); break;
    case MapType::F16: combine_half<Half, to_half>(to, from, op); break;
    case MapType::BF16: combine_half<BFloat, to_bfloat>(to, from, op); break;
    default: fault("IllegalInstruction", "a reduction through a tensor map of this type");
  }
}

void check_reduction(const TensorMap& m, Reduction op, int lane) {
  const bool is_float = m.type == MapType::F16 || m.type == MapType::BF16 || m.type == MapType::F32 || m.type == MapType::F64;
  const bool half = m.type == MapType::F16 || m.type == MapType::BF16;
  const bool known = is_float || (m.type >= MapType::U32 && m.type <= MapType::S64);
  const bool fits = op == Reduction::Add || (op <= Reduction::Max ? !is_float || half : op <= Reduction::Dec ? m.type == MapType::U32 : !is_float);
  if (!known || !fits) fault("IllegalInstruction", "this reduction is not defined for the tensor map's type", lane);
}

void load_box(Warp& w, const Box& box, Cta& cta, u32 offset) {
  const u64 fill = fill_bits(box.map);
  each_piece(box, offset, [&](u32 shared, u64 global, bool valid, u32 n) {
    u8* to = cta.shared + shared;
    if (valid) {
      std::memcpy(to, global_at(w, global, n * box.size, Rw::Read, -1), n * box.size);
    } else {
      for (u32 k = 0; k < n; ++k) std::memcpy(to + k * box.size, &fill, box.size);
    }
  });
}

void store_box(Warp& w, const Box& box, Cta& cta, u32 offset, bool reduce, Reduction op) {
  each_piece(box, offset, [&](u32 shared, u64 global, bool valid, u32 n) {
    if (!valid) return;
    const u8* from = cta.shared + shared;
    u8* to = global_at(w, global, n * box.size, reduce ? Rw::Atomic : Rw::Write, -1);
    if (!reduce) {
      std::memcpy(to, from, n * box.size);
    } else {
      for (u32 k = 0; k < n; ++k) combine_element(box.map, op, to + k * box.size, from + k * box.size);
    }
  });
}

void h_tensor_copy(Warp& w, const Ins& i) {
  const Operands ops = operands_of(w, i);
  const Move move = static_cast<Move>(i.d);
  each_lane(w.mask, [&](int l) {
    const TensorMap map = read_map(w, w.lane64(i.c, l) + ops.map_offset, l);
    if (map.rank != i.n) {
      fault("IllegalInstruction", "the instruction is of rank " + std::to_string(i.n) + ", the tensor map of rank " +
            std::to_string(map.rank), l);
    }
    i32 coordinates[5];
    for (u32 k = 0; k < i.n; ++k) coordinates[k] = static_cast<i32>(w.lane32(ops.coordinates[k], l));
    Box box(map, coordinates);
    // Measured: an H200 answers anything else with an illegal instruction.
    if (coordinates[0] * static_cast<i64>(box.size) % 16) {
      fault("IllegalInstruction", "the box starts " + std::to_string(coordinates[0] * static_cast<i64>(box.size)) +
            " bytes into the innermost dimension, a multiple of 16 is taken", l);
    }
    const bool writes = move == Move::Store || move == Move::Reduce;
    for (u32 k = 0; writes && k < i.n; ++k) {
      if (coordinates[k] >= 0) continue;
      fault("IllegalInstruction", "the box starts at " + std::to_string(coordinates[k]) + " in dimension " + std::to_string(k) +
            ": an H200 refuses to write from before the tensor's start", l);
    }
    if (writes && map.dims[0] * box.size % 16) {
      if (move == Move::Reduce) {
        fault("IllegalInstruction", "a reduction into rows of " + std::to_string(map.dims[0] * box.size) +
              " bytes, no multiple of 16, is not modelled", l);
      }
      box.round_up_rows();
    }
    if (map.swizzle_bytes && box.row_bytes < map.swizzle_bytes) {
      fault("IllegalInstruction", "a box of " + std::to_string(box.row_bytes) + " bytes along the innermost dimension under a swizzle of " +
            std::to_string(map.swizzle_bytes) + " is not modelled", l);
    }
    if (move == Move::Prefetch) return;
    check_global(w, box, move == Move::Store ? Rw::Write : move == Move::Reduce ? Rw::Atomic : Rw::Read, l);
    ++w.stats->async_copies;
    const u32 shared = w.lane32(i.a, l) + static_cast<u32>(i.imm);
    if (shared % 128) misaligned(shared, 128, l);
    Warp* warp = &w;
    Gang* gang = w.gang;
    if (move == Move::Load) {
      const u32 barrier = w.lane32(i.b, l) + ops.barrier_offset;
      const u32 own_rank = shared >> kRankShift;
      const u32 mask = i.flags & kMulticast ? w.lane32(ops.mask_slot, l) & 0xffff : 1u << own_rank;
      if (mask == 0 || mask >> gang->ctas.size()) {
        fault("IllegalInstruction", "multicast mask " + hex(mask) + " in a cluster of " + std::to_string(gang->ctas.size()), l);
      }
      const u32 offset = shared & (kSharedWindow - 1);
      std::vector<u32> barriers;
      for (u32 rank = 0; rank < gang->ctas.size(); ++rank) {
        if (!(mask >> rank & 1)) continue;
        const u32 address = rank << kRankShift | offset;
        Cta& cta = shared_owner(w, address, box.bytes, Rw::Write, l, true);
        const u32 signal = i.flags & kMulticast ? rank << kRankShift | (barrier & (kSharedWindow - 1)) : barrier;
        shared_owner(w, signal, 8, Rw::Atomic, l, true);
        mbarrier_issue(w, signal, l);
        if (cta.shadow) cta.shadow->async_write(w, offset, box.bytes, SharedShadow::Async::Copy);
        barriers.push_back(signal);
      }
      w.stats->bytes[static_cast<int>(Space::Global)][0] += box.bytes;
      gang->async.issue(*gang, [warp, gang, box, mask, offset, barriers] {
        size_t next = 0;
        for (u32 rank = 0; rank < gang->ctas.size(); ++rank) {
          if (!(mask >> rank & 1)) continue;
          load_box(*warp, box, *gang->ctas[rank], offset);
          const u32 signal = barriers[next++];
          if (gang->ctas[rank]->shadow) gang->ctas[rank]->shadow->async_arrived(offset, box.bytes, signal);
          mbarrier_complete_tx(*gang, signal, box.bytes);
        }
      });
      return;
    }
    Cta& cta = shared_owner(w, shared, box.bytes, Rw::Read, l, false);
    const u32 offset = shared & (kSharedWindow - 1);
    u32 clock = 0;
    if (cta.shadow) {
      const u32 reader = gang->clocks.bulk_actor(cta.shadow->id(w));
      clock = gang->clocks.issue(reader);
      SharedShadow::Reader by{reader, clock};
      cta.shadow->async_read(w, offset, box.bytes, by);
    }
    w.stats->bytes[static_cast<int>(Space::Global)][1] += box.bytes;
    const bool reduce = move == Move::Reduce;
    const Reduction op = static_cast<Reduction>(i.e);
    if (reduce) check_reduction(map, op, l);
    Cta* owner = &cta;
    auto handle = gang->async.issue(*gang, [warp, box, owner, offset, reduce, op] { store_box(*warp, box, *owner, offset, reduce, op); });
    handle->clock = clock;
    w.bulk.lane(l).open.push_back(std::move(handle));
  });
}

u32 take_rank(Decoder& d) {
  static const char* const names[5] = {"1d", "2d", "3d", "4d", "5d"};
  for (u32 k = 0; k < 5; ++k) {
    if (d.mods().take(names[k])) return k + 1;
  }
  d.unsupported("no dimension");
}

}  // namespace

bool decode_tensor_copy(Decoder& d, Ins& i) {
  Modifiers& m = d.mods();
  if (d.statement().parts[0] != "cp" || !m.has("tensor")) return false;
  const bool reduce = m.take("reduce");
  for (const char* part : {"async", "bulk"}) m.take(part);
  const bool prefetch = m.take("prefetch");
  m.take("tensor");
  i.n = static_cast<u16>(take_rank(d));
  if (m.has("im2col") || m.has("im2col::w") || m.has("tile::gather4") || m.has("tile::scatter4")) d.unsupported("load mode");
  m.take("tile");
  const bool to_global = m.starts({"global", "shared::cta"});
  Move move = Move::Load;
  if (prefetch) {
    move = Move::Prefetch;
    m.take("L2");
    m.take("global");
  } else if (to_global) {
    move = reduce ? Move::Reduce : Move::Store;
    d.program().bulk_reads = true;
  } else if (m.take("shared::cluster") || m.take("shared::cta")) {
    m.take("global");
    d.program().loads_in_bulk = true;
  } else {
    d.unsupported("direction");
  }
  if (reduce) {
    if (!to_global) d.unsupported("direction");
    const int op = m.take_one({"add", "min", "max", "inc", "dec", "and", "or", "xor"});
    if (op < 0) d.unsupported("no reduction operation");
    i.e = static_cast<u32>(op);
  }
  m.take("tile");
  if (move == Move::Load && !m.take("mbarrier::complete_tx::bytes")) d.unsupported("completion mechanism");
  if ((move == Move::Store || move == Move::Reduce) && !m.take("bulk_group")) d.unsupported("completion mechanism");
  if (m.take("multicast::cluster")) i.flags |= kMulticast;
  m.take_one({"cta_group::1", "cta_group::2"});
  const bool hint = m.take("L2::cache_hint");
  i.d = static_cast<u32>(move);
  const size_t map_at = move == Move::Load ? 1 : 0;
  i64 shared_offset = 0, barrier_offset = 0, map_offset = 0;
  Ins unused;  // the space of each address is known, the instruction has none of its own
  if (move != Move::Prefetch) d.address(d.op(move == Move::Load ? 0 : 1), Space::Shared, i.a, shared_offset, unused);
  const Operand& map = d.op(map_at);
  if (map.kind != Operand::Address || map.items.size() != 2 || map.items[1].kind != Operand::Vector) {
    d.syntax("[map, {coordinates}] is expected");
  }
  if (map.items[1].items.size() != i.n) d.syntax(std::to_string(i.n) + " coordinates are expected");
  d.address(map, Space::Generic, i.c, map_offset, unused);
  size_t next = 2;
  if (move == Move::Load) d.address(d.op(next++), Space::Shared, i.b, barrier_offset, unused);
  if (move == Move::Prefetch) next = 1;
  u32 mask = 0;
  if (i.flags & kMulticast) mask = d.source(next++, 4u);
  if (hint) ++next;
  if (next != d.count()) d.syntax("too many operands");
  std::vector<u32> coordinates;
  for (const auto& c : map.items[1].items) coordinates.push_back(d.source(c, 4u));
  i.imm = shared_offset;
  i.list = static_cast<u32>(d.program().operands.size());
  for (u32 c : coordinates) d.add_operand(c);
  d.add_operand(static_cast<u32>(barrier_offset));
  d.add_operand(static_cast<u32>(map_offset));
  d.add_operand(mask);
  i.fn = h_tensor_copy;
  return true;
}

}  // namespace cake::emu
