#include "tcgen05_mma.h"

#include <algorithm>
#include <cmath>
#include <optional>

#include "access.h"
#include "tensor_memory.h"
#include "tile.h"

namespace cake::emu {
namespace {

enum class MmaKind : u8 { F16, TF32, F8F6F4, I8 };
constexpr u32 kAInTensorMemory = 2, kScaleD = 4;

SharedTile tile_of(u64 descriptor, bool mn_major) {
  if ((descriptor >> 46 & 3) != 1) fault("IllegalInstruction", "matrix descriptor " + hex(descriptor) + " has not version 1 in bits 46 and 47");
  if (descriptor >> 49 & 7 || descriptor >> 52 & 1) {
    fault("IllegalInstruction", "matrix descriptor " + hex(descriptor) + " has a base offset or an absolute leading dimension, "
          "which the emulator does not model");
  }
  SharedTile t;
  t.start = static_cast<u32>(descriptor & 0x3fff) << 4;
  t.leading = static_cast<u32>(descriptor >> 16 & 0x3fff) << 4;
  t.stride = static_cast<u32>(descriptor >> 32 & 0x3fff) << 4;
  switch (descriptor >> 61) {
    case 0: t.span = 0; break;
    case 2: t.span = 128; break;
    case 4: t.span = 64; break;
    case 6: t.span = 32; break;
    default: fault("IllegalInstruction", "matrix descriptor " + hex(descriptor) + " has swizzle code " + std::to_string(descriptor >> 61));
  }
  t.mn_major = mn_major;
  return t;
}

// The instruction descriptor, read for its kind.
struct Shape {
  u32 m, n;
  Element a, b;
  bool negate_a, negate_b, a_mn, b_mn, whole;
};

Element element_of(MmaKind kind, u32 code) {
  switch (kind) {
    case MmaKind::F16:
      if (code <= 1) return code ? Element::BF16 : Element::F16;
      break;
    case MmaKind::TF32:
      if (code == 2) return Element::TF32;
      break;
    case MmaKind::F8F6F4:
      if (code <= 1) return code ? Element::E5M2 : Element::E4M3;
      break;
    case MmaKind::I8:
      if (code <= 1) return code ? Element::S8 : Element::U8;
      break;
  }
  fault("IllegalInstruction", "the instruction descriptor's operand format " + std::to_string(code) + " is not modelled for this kind");
}

Shape shape_of(MmaKind kind, u32 descriptor, bool pair) {
  Shape s;
  if (descriptor & 7) fault("IllegalInstruction", "the instruction descriptor asks for sparsity, which the emulator does not model");
  s.whole = kind == MmaKind::I8;
  const u32 format = descriptor >> 4 & 3;
  if (format != (s.whole ? 2u : 1u)) {
    fault("IllegalInstruction", "accumulator format " + std::to_string(format) + ": the emulator models FP32 and, for kind::i8, S32");
  }
  if (s.whole && descriptor >> 3 & 1) fault("IllegalInstruction", "saturating integer products are not modelled");
  s.a = element_of(kind, descriptor >> 7 & 7);
  s.b = element_of(kind, descriptor >> 10 & 7);
  s.negate_a = descriptor >> 13 & 1;
  s.negate_b = descriptor >> 14 & 1;
  s.a_mn = descriptor >> 15 & 1;
  s.b_mn = descriptor >> 16 & 1;
  s.n = (descriptor >> 17 & 0x3f) * 8;
  s.m = (descriptor >> 24 & 0x1f) * 16;
  const bool m_fits = pair ? s.m == 128 || s.m == 256 : s.m == 64 || s.m == 128;
  const u32 step = s.m == 64 ? 8 : s.m == 256 ? 32 : 16;
  if (!m_fits || s.n < step || s.n > 256 || s.n % step) {
    fault("IllegalInstruction", "the instruction descriptor's shape " + std::to_string(s.m) + "x" + std::to_string(s.n) +
          " does not exist for cta_group::" + (pair ? "2" : "1"));
  }
  return s;
}

struct Product {
  Shape shape;
  u32 d_address = 0, a_address = 0;
  u64 a_descriptor = 0, b_descriptor = 0;
  bool a_in_tensor = false, accumulate = false, pair = false;
  float scale = 1;
  u32 disabled[8] = {};  // lanes of D that are not written, 32 a word; the second CTA of a pair from word 4 on
};

// Where row r of a CTA's part and column c of D lie, relative to the address of D.
void d_place(const Product& p, u32 r, u32 c, u32& lane, u32& column) {
  const u32 rows = p.pair ? p.shape.m / 2 : p.shape.m;
  lane = r;
  column = c;
  if (!p.pair && rows == 64) lane = r / 16 * 32 + r % 16;
  if (p.pair && rows == 64 && c >= p.shape.n / 2) {  // the right half of D lies in the lower half of the lanes
    lane = r + 64;
    column = c - p.shape.n / 2;
  }
}

template <class T>
T cell_as(u32 bits) {
  return std::bit_cast<T>(bits);
}

// A's rows from tensor memory: each 32-bit column holds the next elements along k.
template <class T>
void a_from_tensor(const TensorMemory& memory, const Product& p, u32 rows, std::vector<T>& a) {
  const u32 size = element_bytes(p.shape.a), per = 4 / size, lane0 = p.a_address >> 16, column0 = p.a_address & 0xffff;
  memory.check_range(0, column0, 1, 8);
  for (u32 r = 0; r < rows; ++r) {
    const u32 lane = lane0 + (!p.pair && rows == 64 ? r / 16 * 32 + r % 16 : r);
    for (u32 c = 0; c < 8; ++c) {
      const u32 cell = memory.read(lane, column0 + c);
      for (u32 q = 0; q < per; ++q) {
        a[(c * per + q) * rows + r] = element_as<T>(p.shape.a, reinterpret_cast<const u8*>(&cell) + q * size);
      }
    }
  }
}

// The rows of D that lie in `cta`, from A of that CTA and B of one or both.
template <class T>
void multiply_part(Cta& cta, const Product& p, const std::vector<T>& b, u32 part) {
  TensorMemory& memory = tensor_memory(cta);
  const u32 rows = p.pair ? p.shape.m / 2 : p.shape.m, n = p.shape.n, depth = 32 / element_bytes(p.shape.a);
  std::vector<T> a(depth * rows), d(static_cast<size_t>(rows) * n, T(0));
  if (p.a_in_tensor) {
    a_from_tensor(memory, p, rows, a);
  } else {
    read_tile(cta, tile_of(p.a_descriptor, p.shape.a_mn), p.shape.a, rows, 0, a.data());
  }
  if (p.shape.negate_a != p.shape.negate_b) {
    for (T& x : a) x = -x;
  }
  const u32 lane0 = p.d_address >> 16, column0 = p.d_address & 0xffff;
  const bool split = p.pair && rows == 64;
  memory.check_range(lane0, column0, 1, split ? n / 2 : n);
  auto skipped = [&](u32 lane) { return p.disabled[part * 4 + lane / 32] >> (lane % 32) & 1; };
  if (p.accumulate) {
    for (u32 r = 0; r < rows; ++r) {
      for (u32 c = 0; c < n; ++c) {
        u32 lane, column;
        d_place(p, r, c, lane, column);
        if (skipped(lane0 + lane)) continue;
        T old = cell_as<T>(memory.read(lane0 + lane, column0 + column));
        if constexpr (std::is_same_v<T, float>) old *= p.scale;
        d[static_cast<size_t>(r) * n + c] = old;
      }
    }
  }
  multiply_add<T>(a.data(), b.data(), rows, n, depth, d.data(), n);
  for (u32 r = 0; r < rows; ++r) {
    for (u32 c = 0; c < n; ++c) {
      u32 lane, column;
      d_place(p, r, c, lane, column);
      if (!skipped(lane0 + lane)) memory.write(lane0 + lane, column0 + column, std::bit_cast<u32>(d[static_cast<size_t>(r) * n + c]));
    }
  }
}

template <class T>
void multiply(Cta& first, Cta* second, const Product& p) {
  const u32 n = p.shape.n, depth = 32 / element_bytes(p.shape.b);
  std::vector<T> b(depth * n);
  const SharedTile tile = tile_of(p.b_descriptor, p.shape.b_mn);
  if (!second) {
    read_tile(first, tile, p.shape.b, n, 0, b.data());
  } else {  // each CTA holds half of B's columns
    std::vector<T> half(depth * n / 2);
    for (u32 part = 0; part < 2; ++part) {
      read_tile(part ? *second : first, tile, p.shape.b, n / 2, 0, half.data());
      for (u32 k = 0; k < depth; ++k) std::copy_n(half.begin() + k * n / 2, n / 2, b.begin() + k * n + part * n / 2);
    }
  }
  multiply_part<T>(first, p, b, 0);
  if (second) multiply_part<T>(*second, p, b, 1);
}

// Operations on tensor memory that a warp has issued since its last commit share the clock that the next commit passes on.
u32 reader_of(Warp& w) {
  return w.gang->clocks.matrix_actor(w.cta->rank * static_cast<u32>(w.cta->warps.size()) + static_cast<u32>(w.index));
}

// What a product will read of shared memory, told to the detectors when it is issued.
void announce(Warp& w, Cta& cta, const Product& p) {
  if (!cta.shadow) return;
  const u32 rows = p.pair ? p.shape.m / 2 : p.shape.m, columns = p.pair ? p.shape.n / 2 : p.shape.n;
  const u32 reader = reader_of(w), clock = w.gang->clocks.issued(reader) + 1;
  if (!p.a_in_tensor) announce_tile(w, cta, tile_of(p.a_descriptor, p.shape.a_mn), p.shape.a, rows, 0, reader, clock);
  announce_tile(w, cta, tile_of(p.b_descriptor, p.shape.b_mn), p.shape.b, columns, 0, reader, clock);
}

// Ins: a D's address (offset imm), b A, c B, d instruction descriptor, e predicate; list: disabled lanes; width kind.
// target: scale as an exponent; the offset of A's address is the last entry of the list.
void h_mma(Warp& w, const Ins& i) {
  const u32* list = w.gang->launch->program->operands.data() + i.list;
  each_lane(w.mask, [&](int l) {
    Product p;
    p.pair = i.flags & kPair;
    p.shape = shape_of(static_cast<MmaKind>(i.width), w.lane32(i.d, l), p.pair);
    p.d_address = w.lane32(i.a, l) + static_cast<u32>(i.imm);
    p.a_in_tensor = i.flags & kAInTensorMemory;
    if (p.a_in_tensor) p.a_address = w.lane32(i.b, l) + list[i.n]; else p.a_descriptor = w.lane64(i.b, l);
    if (p.a_in_tensor && p.shape.a_mn) fault("IllegalInstruction", "A in tensor memory is K-major", l);
    p.b_descriptor = w.lane64(i.c, l);
    p.accumulate = w.predicates[i.e] >> l & 1;
    if (i.flags & kScaleD) p.scale = std::ldexp(1.0f, -i.target);
    for (u32 k = 0; k < i.n; ++k) p.disabled[k] = w.lane32(list[k], l);
    Cta* first = w.cta;
    Cta* second = nullptr;
    if (p.pair) {
      second = &pair_peer(w, *w.cta);
      if (w.cta->rank & 1) fault("IllegalInstruction", "cta_group::2 products are issued by the even CTA of a pair", l);
      announce(w, *second, p);
    }
    announce(w, *first, p);
    w.stats->mma_flops += 2ull * p.shape.m * p.shape.n * (32 / element_bytes(p.shape.a));
    w.gang->async.issue(*w.gang, [first, second, p] {
      p.shape.whole ? multiply<i32>(*first, second, p) : multiply<float>(*first, second, p);
    }, tensor_pipe(*w.cta));
  });
}

// ---------------------------------------------------------------- copies and shifts

enum class CopyShape : u8 { C128x256b, C4x256b, C128x128b, C64x128b02_13, C64x128b01_23, C32x128b };

// Every 16-byte chunk of the source: f(shared offset, row, chunk of the row).
template <class F>
void each_copied(const SharedTile& t, CopyShape shape, F&& f) {
  const u32 chunks = shape == CopyShape::C128x256b || shape == CopyShape::C4x256b ? 2 : 1;
  const u32 rows = shape == CopyShape::C4x256b ? 4 : shape == CopyShape::C64x128b02_13 || shape == CopyShape::C64x128b01_23 ? 64
                   : shape == CopyShape::C32x128b ? 32 : 128;
  for (u32 r = 0; r < rows; ++r) {
    for (u32 c = 0; c < chunks; ++c) {
      const u32 linear = t.span ? t.start + r / 8 * t.stride + r % 8 * t.span + c * 16
                                : t.start + r / 8 * t.stride + r % 8 * 16 + c * t.leading;
      f(swizzled(linear, t.span), r, c);
    }
  }
}

void copy_tile(Cta& cta, u32 address, const SharedTile& t, CopyShape shape) {
  TensorMemory& memory = tensor_memory(cta);
  const u32 lane0 = address >> 16, column0 = address & 0xffff;
  memory.check_range(lane0, column0, 1, shape == CopyShape::C128x256b || shape == CopyShape::C4x256b ? 8 : 4);
  each_copied(t, shape, [&](u32 at, u32 r, u32 c) {
    u32 words[4];
    std::memcpy(words, tile_chunk(cta, at), 16);
    u32 lanes[4], copies = 1;
    lanes[0] = r;
    if (shape == CopyShape::C32x128b) {
      copies = 4;
      for (u32 q = 0; q < 4; ++q) lanes[q] = r + 32 * q;
    } else if (shape == CopyShape::C64x128b02_13) {  // rows 0-31 to warps 0 and 2, rows 32-63 to warps 1 and 3
      copies = 2;
      lanes[1] = r + 64;
    } else if (shape == CopyShape::C64x128b01_23) {  // rows 0-31 to warps 0 and 1, rows 32-63 to warps 2 and 3
      copies = 2;
      lanes[0] = r % 32 + r / 32 * 64;
      lanes[1] = lanes[0] + 32;
    }
    for (u32 q = 0; q < copies; ++q) {
      for (u32 k = 0; k < 4; ++k) memory.write(lane0 + lanes[q], column0 + c * 4 + k, words[k]);
    }
  });
}

void announce_copy(Warp& w, Cta& cta, const SharedTile& tile, CopyShape shape) {
  if (!cta.shadow) return;
  const u32 reader = reader_of(w), clock = w.gang->clocks.issued(reader) + 1;
  SharedShadow::Reader by{reader, clock};
  each_copied(tile, shape, [&](u32 at, u32, u32) {
    tile_chunk(cta, at);
    cta.shadow->async_read(w, at, 16, by);
  });
}

void h_cp(Warp& w, const Ins& i) {
  each_lane(w.mask, [&](int l) {
    const u32 address = w.lane32(i.a, l) + static_cast<u32>(i.imm);
    const SharedTile tile = tile_of(w.lane64(i.b, l), false);
    const CopyShape shape = static_cast<CopyShape>(i.width);
    Cta* first = w.cta;
    Cta* second = i.flags & kPair ? &pair_peer(w, *w.cta) : nullptr;
    announce_copy(w, *first, tile, shape);
    if (second) announce_copy(w, *second, tile, shape);
    w.gang->async.issue(*w.gang, [first, second, address, tile, shape] {
      copy_tile(*first, address, tile, shape);
      if (second) copy_tile(*second, address, tile, shape);
    }, tensor_pipe(*w.cta));
  });
}

// 32 bytes of every row move to the next row; the last row's have nowhere to go and stay.
void shift_rows(Cta& cta, u32 address) {
  TensorMemory& memory = tensor_memory(cta);
  const u32 lane0 = address >> 16, column0 = address & 0xffff;
  memory.check_range(lane0, column0, 1, 8);
  for (u32 row = TensorMemory::kRows - 1; row > lane0; --row) {
    for (u32 k = 0; k < 8; ++k) memory.write(row, column0 + k, memory.read(row - 1, column0 + k));
  }
}

void h_shift(Warp& w, const Ins& i) {
  each_lane(w.mask, [&](int l) {
    const u32 address = w.lane32(i.a, l) + static_cast<u32>(i.imm);
    if ((address >> 16) % 32) fault("IllegalInstruction", "tcgen05.shift at lane " + std::to_string(address >> 16) + ", a multiple of 32 is taken", l);
    Cta* first = w.cta;
    Cta* second = i.flags & kPair ? &pair_peer(w, *w.cta) : nullptr;
    w.gang->async.issue(*w.gang, [first, second, address] {
      shift_rows(*first, address);
      if (second) shift_rows(*second, address);
    }, tensor_pipe(*w.cta));
  });
}

}  // namespace

void decode_tensor_mma(Decoder& d, Ins& i) {
  Modifiers& m = d.mods();
  d.program().matrix_reads = true;
  const int kind = m.take_one({"kind::f16", "kind::tf32", "kind::f8f6f4", "kind::i8"});
  if (kind < 0) d.unsupported("kind");
  for (const char* hint : {"collector::a::fill", "collector::a::use", "collector::a::lastuse", "collector::a::discard"}) m.take(hint);
  i.width = static_cast<u8>(kind);
  Ins unused;
  d.address(d.op(0), Space::Shared, i.a, i.imm, unused);
  i64 a_offset = 0;
  if (d.op(1).kind == Operand::Address) {
    i.flags |= kAInTensorMemory;
    d.address(d.op(1), Space::Shared, i.b, a_offset, unused);
  } else {
    i.b = d.source(1, 8u);
  }
  i.c = d.source(2, 8u);
  i.d = d.source(3, 4u);
  size_t next = 4;
  std::vector<u32> disabled;
  if (d.op(next).kind == Operand::Vector) {
    for (const auto& item : d.op(next).items) disabled.push_back(d.source(item, 4u));
    if (disabled.size() != (i.flags & kPair ? 8u : 4u)) d.syntax("number of disable-output-lane registers");
    ++next;
  }
  i.e = d.predicate(next++);
  if (next < d.count()) {
    const i64 scale = d.constant(d.op(next++));
    if (scale < 0 || scale > 15) d.syntax("scale-input-d is 0 to 15");
    i.flags |= kScaleD;
    i.target = static_cast<i32>(scale);
  }
  if (next != d.count()) d.syntax("too many operands");
  i.list = static_cast<u32>(d.program().operands.size());
  i.n = static_cast<u16>(disabled.size());
  for (u32 slot : disabled) d.add_operand(slot);
  d.add_operand(static_cast<u32>(a_offset));
  i.fn = h_mma;
}

void decode_tensor_cp(Decoder& d, Ins& i) {
  Modifiers& m = d.mods();
  d.program().matrix_reads = true;
  CopyShape shape = CopyShape::C128x256b;
  if (m.take("128x256b")) shape = CopyShape::C128x256b;
  else if (m.take("4x256b")) shape = CopyShape::C4x256b;
  else if (m.take("128x128b")) shape = CopyShape::C128x128b;
  else if (m.take("64x128b")) {
    if (m.take("warpx2::02_13")) shape = CopyShape::C64x128b02_13;
    else if (m.take("warpx2::01_23")) shape = CopyShape::C64x128b01_23;
    else d.unsupported("multicast");
  } else if (m.take("32x128b")) {
    if (!m.take("warpx4")) d.unsupported("multicast");
    shape = CopyShape::C32x128b;
  } else {
    d.unsupported("shape");
  }
  Ins unused;
  d.address(d.op(0), Space::Shared, i.a, i.imm, unused);
  i.b = d.source(1, 8u);
  i.width = static_cast<u8>(shape);
  i.fn = h_cp;
}

void decode_tensor_shift(Decoder& d, Ins& i) {
  if (!d.mods().take("down")) d.unsupported("direction");
  Ins unused;
  d.address(d.op(0), Space::Shared, i.a, i.imm, unused);
  i.fn = h_shift;
}

}  // namespace cake::emu
