// mma.sync, ldmatrix, stmatrix, movmatrix: a warp's registers as fragments of matrices.
#include <cmath>

#include "access.h"
#include "decode.h"
#include "tensor_core.h"

namespace cake::emu {
namespace {

enum class Element : u8 { F16, BF16, TF32, F64, S8, U8, E4M3, E5M2 };
enum class Accumulator : u8 { F32, F16, F64, S32 };

struct Shape {
  u32 m, n, k;
  Element a, b;
  Accumulator acc;
  bool saturate;
};
// Packed into Ins::flags.
u32 pack(const Shape& s) {
  return s.m | s.n << 6 | s.k << 12 | static_cast<u32>(s.a) << 20 | static_cast<u32>(s.b) << 23 |
         static_cast<u32>(s.acc) << 26 | static_cast<u32>(s.saturate) << 28;
}
Shape unpack(u32 f) {
  return {f & 63,
          f >> 6 & 63,
          f >> 12 & 255,
          Element(f >> 20 & 7),
          Element(f >> 23 & 7),
          Accumulator(f >> 26 & 3),
          (f >> 28 & 1) != 0};
}

u32 per_register(Element e) {
  switch (e) {
    case Element::F16:
    case Element::BF16: return 2;
    case Element::TF32:
    case Element::F64: return 1;
    default: return 4;
  }
}

double value(Element e, u32 word, u32 index) {
  switch (e) {
    case Element::F16: return to_float(Half{static_cast<u16>(word >> 16 * index)});
    case Element::BF16: return to_float(BFloat{static_cast<u16>(word >> 16 * index)});
    // The tensor core reads the upper 19 bits of a TF32 operand.
    case Element::TF32: return std::bit_cast<float>(word & 0xffffe000u);
    case Element::S8: return static_cast<i8>(word >> 8 * index);
    case Element::U8: return static_cast<u8>(word >> 8 * index);
    case Element::E4M3: return decode_fp8(static_cast<u8>(word >> 8 * index), true);
    default: return decode_fp8(static_cast<u8>(word >> 8 * index), false);
  }
}

template <Element kElement>
float single(u32 word, u32 index) {
  return static_cast<float>(value(kElement, word, index));
}

// BF16, FP16 or TF32 operands with FP32 accumulators, the same bits as on an H200. The fragments are those of h_mma.
template <Element kElement>
void h_mma_single(Warp& w, const Ins& i) {
  const Shape s = unpack(i.flags);
  const u32* slots = w.gang->launch->program->operands.data() + i.list;
  constexpr u32 e = kElement == Element::TF32 ? 1 : 2;
  const u32 a_registers = s.k / (2 * e), b_registers = s.k / (4 * e);
  const u32 *d_slots = slots, *a_slots = slots + 4, *b_slots = a_slots + a_registers, *c_slots = b_slots + b_registers;
  float a[16][16], b[16][8], c[16][8];
  for (u32 r = 0; r < a_registers; ++r) {
    const u32* words = w.slot<u32>(a_slots[r]);
    for (u32 lane = 0; lane < kLanes; ++lane) {
      float* to = &a[lane / 4 + 8 * (r % 2)][e * (lane % 4) + r / 2 * 4 * e];
      for (u32 x = 0; x < e; ++x) to[x] = single<kElement>(words[lane], x);
    }
  }
  for (u32 r = 0; r < b_registers; ++r) {
    const u32* words = w.slot<u32>(b_slots[r]);
    for (u32 lane = 0; lane < kLanes; ++lane) {
      for (u32 x = 0; x < e; ++x) b[e * (lane % 4) + r * 4 * e + x][lane / 4] = single<kElement>(words[lane], x);
    }
  }
  for (u32 r = 0; r < 4; ++r) {
    const u32* words = w.slot<u32>(c_slots[r]);
    for (u32 lane = 0; lane < kLanes; ++lane) c[lane / 4 + 8 * (r / 2)][2 * (lane % 4) + r % 2] = std::bit_cast<float>(words[lane]);
  }
  constexpr int lowest = kElement == Element::F16 ? -14 : -126;
  const TensorCore core(&b[0][0], 8, s.k, {lowest, lowest});
  for (u32 row = 0; row < 16; ++row) core.multiply_add(a[row], 1, c[row]);
  for (u32 r = 0; r < 4; ++r) {
    u32* words = w.slot<u32>(d_slots[r]);
    for (u32 lane = 0; lane < kLanes; ++lane) words[lane] = std::bit_cast<u32>(c[lane / 4 + 8 * (r / 2)][2 * (lane % 4) + r % 2]);
  }
  w.stats->mma_flops += 2ull * s.m * s.n * s.k;
}

// FP8: each register's first two values go into one product of FP16, its last two into the next.
void add_small_floats(const double (&a)[16][64], const double (&b)[64][8], double (&c)[16][8], u32 depth) {
  float left[2][16][16], right[2][16][8], sums[16][8] = {};
  for (u32 k = 0; k < depth; ++k) {
    const u32 part = k / 2 % 2, at = k / 4 * 2 + k % 2;
    for (u32 row = 0; row < 16; ++row) left[part][row][at] = static_cast<float>(a[row][k]);
    for (u32 n = 0; n < 8; ++n) right[part][at][n] = static_cast<float>(b[k][n]);
  }
  for (u32 part = 0; part < 2; ++part) {
    const TensorCore core(&right[part][0][0], 8, depth / 2, {-14, -14});
    for (u32 row = 0; row < 16; ++row) core.multiply_add(left[part][row], 1, sums[row]);
  }
  for (u32 row = 0; row < 16; ++row) {
    for (u32 n = 0; n < 8; ++n) c[row][n] = static_cast<float>(c[row][n]) + sums[row][n];
  }
}

// Rows of A and columns of B follow the lane's quad, contraction indices its place in the quad; each further register
// adds eight rows first, then the next stretch of the contraction.
void h_mma(Warp& w, const Ins& i) {
  const Shape s = unpack(i.flags);
  const u32* slots = w.gang->launch->program->operands.data() + i.list;
  const u32 e = per_register(s.a);
  const u32 rows = s.m / 8, a_registers = s.m * s.k / (32 * e), b_registers = s.k * s.n / (32 * e);
  const bool half = s.acc == Accumulator::F16;
  const u32 c_registers = s.m * s.n / 32 / (half ? 2 : 1);
  const u32 *d_slots = slots, *a_slots = slots + c_registers, *b_slots = a_slots + a_registers,
            *c_slots = b_slots + b_registers;
  double a[16][64], b[64][8], c[16][8];
  for (u32 lane = 0; lane < kLanes; ++lane) {
    const u32 quad = lane / 4, place = lane % 4;
    for (u32 r = 0; r < a_registers; ++r) {
      const u32 row = quad + 8 * (r % rows), first = e * place + r / rows * 4 * e;
      for (u32 x = 0; x < e; ++x) {
        a[row][first + x] = s.a == Element::F64 ? std::bit_cast<double>(w.lane64(a_slots[r], static_cast<int>(lane)))
                                                : value(s.a, w.lane32(a_slots[r], static_cast<int>(lane)), x);
      }
    }
    for (u32 r = 0; r < b_registers; ++r) {
      const u32 first = e * place + r * 4 * e;
      for (u32 x = 0; x < e; ++x) {
        b[first + x][quad] = s.b == Element::F64 ? std::bit_cast<double>(w.lane64(b_slots[r], static_cast<int>(lane)))
                                                 : value(s.b, w.lane32(b_slots[r], static_cast<int>(lane)), x);
      }
    }
    for (u32 r = 0; r < s.m * s.n / 32; ++r) {
      const u32 row = quad + 8 * (r / 2), column = 2 * place + r % 2;
      const int l = static_cast<int>(lane);
      switch (s.acc) {
        case Accumulator::F64: c[row][column] = std::bit_cast<double>(w.lane64(c_slots[r], l)); break;
        case Accumulator::F32: c[row][column] = std::bit_cast<float>(w.lane32(c_slots[r], l)); break;  // of 8-bit floats
        case Accumulator::S32: c[row][column] = static_cast<i32>(w.lane32(c_slots[r], l)); break;
        case Accumulator::F16:
          c[row][column] = to_float(Half{static_cast<u16>(w.lane32(c_slots[r / 2], l) >> 16 * (r % 2))});
          break;
      }
    }
  }
  // Otherwise exact in FP64 and rounded once at the end (FP64 itself: fused, in order).
  if (s.acc == Accumulator::F32) add_small_floats(a, b, c, s.k);
  for (u32 row = 0; row < s.m && s.acc != Accumulator::F32; ++row) {
    for (u32 k = 0; k < s.k; ++k) {
      const double x = a[row][k];
      if (s.acc == Accumulator::F64) {
        for (u32 n = 0; n < 8; ++n) c[row][n] = std::fma(x, b[k][n], c[row][n]);
      } else {
        for (u32 n = 0; n < 8; ++n) c[row][n] += x * b[k][n];
      }
    }
  }
  for (u32 lane = 0; lane < kLanes; ++lane) {
    const u32 quad = lane / 4, place = lane % 4;
    const int l = static_cast<int>(lane);
    for (u32 r = 0; r < s.m * s.n / 32; ++r) {
      const double v = c[quad + 8 * (r / 2)][2 * place + r % 2];
      switch (s.acc) {
        case Accumulator::F64: w.set64(d_slots[r], l, std::bit_cast<u64>(v)); break;
        case Accumulator::F32: {
          const float f = static_cast<float>(v);
          w.set32(d_slots[r], l, f == f ? std::bit_cast<u32>(f) : 0x7fffffffu);
          break;
        }
        case Accumulator::S32: {
          const i64 sum = static_cast<i64>(v);
          const i64 kept = s.saturate ? std::min<i64>(std::max<i64>(sum, INT32_MIN), INT32_MAX) : sum;
          w.set32(d_slots[r], l, static_cast<u32>(kept));
          break;
        }
        case Accumulator::F16: {
          const u32 bits = to_half_from_double(v).bits;
          if (r % 2 == 0) {
            w.set32(d_slots[r / 2], l, bits);
          } else {
            w.set32(d_slots[r / 2], l, (w.lane32(d_slots[r / 2], l) & 0xffff) | bits << 16);
          }
          break;
        }
      }
    }
  }
  w.stats->mma_flops += 2ull * s.m * s.n * s.k;
}

std::optional<Element> element(Type t) {
  switch (t) {
    case Type::F16: return Element::F16;
    case Type::BF16: return Element::BF16;
    case Type::TF32: return Element::TF32;
    case Type::F64: return Element::F64;
    case Type::S8: return Element::S8;
    case Type::U8: return Element::U8;
    case Type::E4M3: return Element::E4M3;
    case Type::E5M2: return Element::E5M2;
    default: return std::nullopt;
  }
}

void decode_mma(Decoder& d, Ins& i) {
  Modifiers& m = d.mods();
  if (!m.take("sync") || !m.take("aligned")) d.unsupported("form");
  static constexpr struct {
    const char* name;
    u32 m, n, k;
  } kShapes[] = {{"m16n8k4", 16, 8, 4},   {"m16n8k8", 16, 8, 8}, {"m16n8k16", 16, 8, 16},
                 {"m16n8k32", 16, 8, 32}, {"m8n8k4", 8, 8, 4},   {"m8n8k16", 8, 8, 16}};
  Shape s{};
  for (const auto& shape : kShapes) {
    if (m.take(shape.name)) s.m = shape.m, s.n = shape.n, s.k = shape.k;
  }
  if (!s.m) d.unsupported("shape");
  if (!m.take("row") || !m.take("col")) d.unsupported("layout other than .row.col");
  s.saturate = m.take("satfinite");
  m.take_one({"rn"});
  const auto td = m.take_type(), ta = m.take_type(), tb = m.take_type(), tc = m.take_type();
  if (!td || !ta || !tb || !tc) d.unsupported("types");
  const auto ea = element(*ta), eb = element(*tb);
  if (!ea || !eb || per_register(*ea) != per_register(*eb)) d.unsupported("operand types");
  if (*td != *tc) d.unsupported("accumulators of two types");
  s.a = *ea, s.b = *eb;
  switch (*td) {
    case Type::F32: s.acc = Accumulator::F32; break;
    case Type::F16: s.acc = Accumulator::F16; break;
    case Type::F64: s.acc = Accumulator::F64; break;
    case Type::S32: s.acc = Accumulator::S32; break;
    default: d.unsupported("accumulator type");
  }
  const bool integers = s.a == Element::S8 || s.a == Element::U8;
  if (integers != (s.acc == Accumulator::S32) || (s.a == Element::F64) != (s.acc == Accumulator::F64))
    d.unsupported("accumulator type");
  const u32 e = per_register(s.a);
  static constexpr u32 kLeast[] = {0, 4, 8, 0, 16};  // contraction of one register of B, by elements in it
  const u32 step = kLeast[e];
  if (s.k % step || (s.m == 8 && (s.a != Element::F64 && !integers))) d.unsupported("shape for these types");
  if (s.a != Element::F64 && s.k / step > 2) d.unsupported("shape for these types");
  const u32 width = s.a == Element::F64 ? 8 : 4, acc_width = s.acc == Accumulator::F64 ? 8 : 4;
  const u32 counts[] = {s.m * s.n / 32 / (s.acc == Accumulator::F16 ? 2 : 1), s.m * s.k / (32 * e),
                        s.k * s.n / (32 * e)};
  std::vector<u32> slots;
  auto add = [&](const Operand& o, u32 bytes, bool dest, u32 count) {
    if (o.kind == Operand::Vector) {
      if (o.items.size() != count)
        d.syntax("fragment of " + std::to_string(o.items.size()) + " registers, " + std::to_string(count) +
                 " are needed");
      for (const auto& item : o.items) slots.push_back(dest ? d.dest(item, bytes) : d.source(item, bytes));
    } else {
      if (count != 1) d.syntax("a fragment in braces is expected");
      slots.push_back(dest ? d.dest(o, bytes) : d.source(o, bytes));
    }
  };
  add(d.op(0), acc_width, true, counts[0]);
  add(d.op(1), width, false, counts[1]);
  add(d.op(2), width, false, counts[2]);
  add(d.op(3), acc_width, false, counts[0]);
  i.list = static_cast<u32>(d.program().operands.size());
  i.n = static_cast<u16>(slots.size());
  for (u32 slot : slots) d.add_operand(slot);
  i.flags = pack(s);
  i.kind = Kind::Sync;
  i.sync = Sync::Whole;
  i.fn = h_mma;
  if (s.acc != Accumulator::F32 || e > 2) return;
  if (s.a == s.b && s.a == Element::F16) i.fn = h_mma_single<Element::F16>;
  if (s.a == s.b && s.a == Element::BF16) i.fn = h_mma_single<Element::BF16>;
  if (s.a == s.b && s.a == Element::TF32) i.fn = h_mma_single<Element::TF32>;
}

// Lane l holds two neighbouring elements of row l/4; .trans swaps rows and columns on the way.
void h_ldmatrix(Warp& w, const Ins& i) {
  const u32* slots = w.gang->launch->program->operands.data() + i.list;
  const bool transposed = i.flags & 1;
  u16 rows[4][8][8];  // all rows first: a destination may be the register of the addresses
  for (u32 r = 0; r < 8u * i.n; ++r) {
    std::memcpy(rows[r / 8][r % 8], lane_at(w, i, i.a, i.imm, static_cast<int>(r), 16, Rw::Read), 16);
  }
  for (u32 matrix = 0; matrix < i.n; ++matrix) {
    const auto& m = rows[matrix];
    for (u32 l = 0; l < kLanes; ++l) {
      const u32 x = l / 4, y = 2 * (l % 4);
      const u32 low = transposed ? m[y][x] : m[x][y], high = transposed ? m[y + 1][x] : m[x][y + 1];
      w.set32(slots[matrix], static_cast<int>(l), low | high << 16);
    }
  }
  w.stats->bytes[static_cast<int>(Space::Shared)][0] += 128ull * i.n;
}

void h_stmatrix(Warp& w, const Ins& i) {
  const u32* slots = w.gang->launch->program->operands.data() + i.list;
  const bool transposed = i.flags & 1;
  for (u32 matrix = 0; matrix < i.n; ++matrix) {
    u16 rows[8][8];
    for (u32 l = 0; l < kLanes; ++l) {
      const u32 x = l / 4, y = 2 * (l % 4), v = w.lane32(slots[matrix], static_cast<int>(l));
      (transposed ? rows[y][x] : rows[x][y]) = static_cast<u16>(v);
      (transposed ? rows[y + 1][x] : rows[x][y + 1]) = static_cast<u16>(v >> 16);
    }
    for (u32 r = 0; r < 8; ++r) {
      const int lane = static_cast<int>(8 * matrix + r);
      std::memcpy(lane_at(w, i, i.a, i.imm, lane, 16, Rw::Write), rows[r], 16);
    }
  }
  ++w.gang->progress;
  w.stats->bytes[static_cast<int>(Space::Shared)][1] += 128ull * i.n;
}

void h_movmatrix(Warp& w, const Ins& i) {
  u16 rows[8][8];
  for (u32 l = 0; l < kLanes; ++l) {
    const u32 v = w.lane32(i.a, static_cast<int>(l));
    rows[l / 4][2 * (l % 4)] = static_cast<u16>(v);
    rows[l / 4][2 * (l % 4) + 1] = static_cast<u16>(v >> 16);
  }
  for (u32 l = 0; l < kLanes; ++l) {
    const u32 low = rows[2 * (l % 4)][l / 4], high = rows[2 * (l % 4) + 1][l / 4];
    w.set32(i.d, static_cast<int>(l), low | high << 16);
  }
}

void decode_matrix(Decoder& d, Ins& i, bool store) {
  Modifiers& m = d.mods();
  if (!m.take("sync") || !m.take("aligned")) d.unsupported("form");
  if (!m.take("m8n8")) d.unsupported("shape");
  const int count = m.take_one({"x1", "x2", "x4"});
  i.flags = m.take("trans");
  const Space space = d.take_space(Space::Generic);
  if (!m.take("b16") || count < 0) d.unsupported("type");
  d.address(store ? 0 : 1, space, i);
  d.list(store ? d.op(1) : d.op(0), 4, !store, i);
  if (i.n != 1u << count) d.syntax("a wrong number of registers");
  d.note_shared_access(4);
  i.kind = Kind::Sync;
  i.sync = Sync::Whole;
  i.fn = store ? h_stmatrix : h_ldmatrix;
}

}  // namespace

void register_mma(DecoderTable& table) {
  table.add("mma", decode_mma);
  table.add("ldmatrix", [](Decoder& d, Ins& i) { decode_matrix(d, i, false); });
  table.add("stmatrix", [](Decoder& d, Ins& i) { decode_matrix(d, i, true); });
  table.add("movmatrix", [](Decoder& d, Ins& i) {
    for (const char* part : {"sync", "aligned", "m8n8", "trans", "b16"}) {
      if (!d.mods().take(part)) d.unsupported("form");
    }
    i.d = d.dest(0, 4);
    i.a = d.source(1, 4u);
    i.kind = Kind::Sync;
    i.sync = Sync::Whole;
    i.fn = h_movmatrix;
  });
}

}  // namespace cake::emu
