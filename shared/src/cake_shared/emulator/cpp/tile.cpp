#include "tile.h"

#include <cmath>

#include "shadow.h"

namespace cake::emu {

u32 element_bytes(Element e) {
  switch (e) {
    case Element::F16:
    case Element::BF16: return 2;
    case Element::TF32: return 4;
    default: return 1;
  }
}

int lowest_exponent(Element e) {
  switch (e) {
    case Element::F16:
    case Element::E5M2: return -14;
    case Element::E4M3: return -6;
    default: return -126;
  }
}

namespace {

float small_float(u32 bits, int exponent_bits, int mantissa_bits, bool has_infinity) {
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const u32 mantissa = bits & ((1u << mantissa_bits) - 1), exponent = bits >> mantissa_bits & ((1u << exponent_bits) - 1);
  const bool top = exponent == (1u << exponent_bits) - 1;
  float value;
  if (exponent == 0) {
    value = std::ldexp(static_cast<float>(mantissa), 1 - bias - mantissa_bits);
  } else if (has_infinity && top) {
    value = mantissa ? NAN : INFINITY;
  } else if (!has_infinity && top && mantissa == (1u << mantissa_bits) - 1) {
    value = NAN;
  } else {
    value = std::ldexp(static_cast<float>(mantissa + (1u << mantissa_bits)), static_cast<int>(exponent) - bias - mantissa_bits);
  }
  return bits >> (exponent_bits + mantissa_bits) & 1 ? -value : value;
}

struct Table8 {
  float value[256];
  Table8(int exponent_bits, int mantissa_bits, bool has_infinity) {
    for (u32 k = 0; k < 256; ++k) value[k] = small_float(k, exponent_bits, mantissa_bits, has_infinity);
  }
};

struct Table16 {
  std::vector<float> value = std::vector<float>(65536);
  Table16() {
    for (u32 k = 0; k < 65536; ++k) value[k] = to_float(Half{static_cast<u16>(k)});
  }
};

}  // namespace

float element_value(Element e, u32 bits) {
  static const Table8 e4m3(4, 3, false), e5m2(5, 2, true);
  static const Table16 f16;
  switch (e) {
    case Element::F16: return f16.value[bits & 0xffff];
    case Element::BF16: return std::bit_cast<float>(bits << 16);
    case Element::TF32: return std::bit_cast<float>(bits & 0xffffe000u);  // the tensor core ignores the low 13 bits
    case Element::E4M3: return e4m3.value[bits & 0xff];
    case Element::E5M2: return e5m2.value[bits & 0xff];
    default: return 0;
  }
}

u8* tile_chunk(Cta& cta, u32 offset) {
  if (offset < kSharedBase || offset + 16 > cta.shared_end) {
    fault("OutOfBounds", "the operand tile reaches shared address " + hex(offset) + ", the CTA's shared memory is [" +
          hex(kSharedBase) + ", " + hex(cta.shared_end) + ")");
  }
  return cta.shared + offset;
}

void announce_tile(Warp& w, Cta& cta, const SharedTile& t, Element e, u32 rows, u32 first_row, u32 reader, u32 clock) {
  if (!cta.shadow) return;
  SharedShadow::Reader by{reader, clock};
  each_chunk(t, e, rows, first_row, [&](u32 at, u32, u32) {
    tile_chunk(cta, at);
    cta.shadow->async_read(w, at, 16, by);
  });
}

}  // namespace cake::emu
