// Operand tiles of the tensor cores: canonical shared-memory layouts, element types, and the product itself.
#pragma once
#include <vector>

#include "machine.h"

namespace cake::emu {

enum class Element : u8 { F16, BF16, TF32, E4M3, E5M2, S8, U8 };

u32 element_bytes(Element e);
float element_value(Element e, u32 bits);  // of a floating-point element
int lowest_exponent(Element e);            // of its normal numbers

struct SharedTile {
  u32 start = 0, leading = 0, stride = 0;  // bytes
  u32 span = 0;                            // swizzle: 0, 32, 64 or 128 bytes
  bool mn_major = false;
};

inline u32 swizzled(u32 address, u32 span) {
  const u32 mask = span == 128 ? 7 : span == 64 ? 3 : span == 32 ? 1 : 0;
  return address ^ ((address >> 7 & mask) << 4);
}

u8* tile_chunk(Cta& cta, u32 offset);  // 16 bytes at a shared offset, bounds checked

template <class T>
inline T element_as(Element e, const u8* p) {
  if constexpr (std::is_same_v<T, i32>) {
    return e == Element::S8 ? static_cast<i32>(static_cast<i8>(*p)) : static_cast<i32>(*p);
  } else {
    u32 bits = 0;
    std::memcpy(&bits, p, element_bytes(e));
    return element_value(e, bits);
  }
}

// Every 16-byte chunk of a [rows, 32 bytes of k] operand: f(shared offset, row from 0, k of its first element).
template <class F>
inline void each_chunk(const SharedTile& t, Element e, u32 rows, u32 first_row, F&& f) {
  const u32 size = element_bytes(e), per_chunk = 16 / size;
  if (!t.mn_major) {
    for (u32 r = 0; r < rows; ++r) {
      const u32 row = first_row + r;
      for (u32 half = 0; half < 2; ++half) {
        const u32 linear = t.span ? t.start + row / 8 * t.stride + row % 8 * t.span + half * 16
                                  : t.start + row / 8 * t.stride + row % 8 * 16 + half * t.leading;
        f(swizzled(linear, t.span), r, half * per_chunk);
      }
    }
    return;
  }
  const u32 depth = 32 / size, wide = t.span ? t.span / size : per_chunk;
  for (u32 k = 0; k < depth; ++k) {
    for (u32 r = 0; r < rows; r += per_chunk) {
      const u32 row = first_row + r;
      const u32 linear = t.span ? t.start + row / wide * t.leading + row % wide * size + k / 8 * t.stride + k % 8 * t.span
                                : t.start + row / wide * t.stride + k / 8 * t.leading + k % 8 * 16;
      f(swizzled(linear, t.span), r, k);
    }
  }
}

// The operand's values, [k][rows] so that a product runs along rows. k runs over 32 bytes: 16 elements of 2 bytes, 8 of 4,
// 32 of 1. Faults when a chunk lies outside of shared memory.
template <class T>
void read_tile(Cta& cta, const SharedTile& t, Element e, u32 rows, u32 first_row, T* out) {
  const u32 size = element_bytes(e), per_chunk = 16 / size;
  each_chunk(t, e, rows, first_row, [&](u32 at, u32 r, u32 k) {
    const u8* p = tile_chunk(cta, at);
    if (t.mn_major) {
      for (u32 j = 0; j < per_chunk && r + j < rows; ++j) out[k * rows + r + j] = element_as<T>(e, p + j * size);
    } else {
      for (u32 j = 0; j < per_chunk; ++j) out[(k + j) * rows + r] = element_as<T>(e, p + j * size);
    }
  });
}

// Tells the detectors what a product issued by `w` will read, until whoever writes there knows `reader` up to `clock`.
void announce_tile(Warp& w, Cta& cta, const SharedTile& t, Element e, u32 rows, u32 first_row, u32 reader, u32 clock);

// d[m][n] += sum over k of a[k][m] b[k][n]: the sum of the block in FP32 (or wrapping 32-bit integers) first.
template <class T>
void multiply_add(const T* a, const T* b, u32 m, u32 n, u32 k, T* d, u32 d_stride) {
  T sum[256];
  for (u32 i = 0; i < m; ++i) {
    for (u32 j = 0; j < n; ++j) sum[j] = 0;
    for (u32 q = 0; q < k; ++q) {
      const T x = a[q * m + i];
      const T* row = b + q * n;
      if constexpr (std::is_same_v<T, i32>) {
        for (u32 j = 0; j < n; ++j) sum[j] = static_cast<i32>(static_cast<u32>(sum[j]) + static_cast<u32>(x * row[j]));
      } else {
        for (u32 j = 0; j < n; ++j) sum[j] += x * row[j];
      }
    }
    T* to = d + i * d_stride;
    for (u32 j = 0; j < n; ++j) {
      if constexpr (std::is_same_v<T, i32>) {
        to[j] = static_cast<i32>(static_cast<u32>(to[j]) + static_cast<u32>(sum[j]));
      } else {
        to[j] += sum[j];
      }
    }
  }
}

}  // namespace cake::emu
