#include "reduce.h"

#include <algorithm>

namespace cake::emu {
namespace {

enum : u32 { kAdd, kMin, kMax, kAnd, kOr, kXor, kInc, kDec };

template <class T>
T apply(u32 op, T a, T b) {
  if constexpr (std::is_floating_point_v<T>) {
    if (op == kAdd) return a + b;
    if (a != a) return b;
    if (b != b) return a;
    return op == kMin ? std::min(a, b) : std::max(a, b);
  } else {
    using U = std::make_unsigned_t<T>;
    switch (op) {
      case kAdd: return T(U(a) + U(b));
      case kMin: return std::min(a, b);
      case kMax: return std::max(a, b);
      case kAnd: return a & b;
      case kOr: return a | b;
      case kXor: return a ^ b;
      case kInc: return a >= b ? T(0) : T(U(a) + 1);
      default: return a == 0 || a > b ? b : T(U(a) - 1);
    }
  }
}

template <class T>
void run(u8* to, const u8* from, u32 bytes, u32 op) {
  for (u32 k = 0; k < bytes; k += sizeof(T)) {
    T a, b;
    std::memcpy(&a, to + k, sizeof(T));
    std::memcpy(&b, from + k, sizeof(T));
    a = apply<T>(op, a, b);
    std::memcpy(to + k, &a, sizeof(T));
  }
}
template <class H>
void run_half(u8* to, const u8* from, u32 bytes, u32 op) {
  for (u32 k = 0; k < bytes; k += 2) {
    H a, b;
    std::memcpy(&a, to + k, 2);
    std::memcpy(&b, from + k, 2);
    const float r = apply<float>(op, to_float(a), to_float(b));
    if constexpr (std::is_same_v<H, Half>) a = to_half(r); else a = to_bfloat(r);
    std::memcpy(to + k, &a, 2);
  }
}

}  // namespace

bool reducible(u32 code) {
  const u32 op = code & 0xff;
  switch (static_cast<Type>(code >> 8)) {
    case Type::U32: return true;
    case Type::S32: case Type::S64: return op <= kMax;
    case Type::U64: return op <= kMax || op >= kInc;
    case Type::B32: case Type::B64: return op >= kAnd && op <= kXor;
    case Type::F32: case Type::F64: return op == kAdd;
    case Type::F16: case Type::BF16: return op <= kMax;
    default: return false;
  }
}

void reduce_bytes(u8* to, const u8* from, u32 bytes, u32 code) {
  const u32 op = code & 0xff;
  switch (static_cast<Type>(code >> 8)) {
    case Type::U32: case Type::B32: return run<u32>(to, from, bytes, op);
    case Type::S32: return run<i32>(to, from, bytes, op);
    case Type::U64: case Type::B64: return run<u64>(to, from, bytes, op);
    case Type::S64: return run<i64>(to, from, bytes, op);
    case Type::F32: return run<float>(to, from, bytes, op);
    case Type::F64: return run<double>(to, from, bytes, op);
    case Type::F16: return run_half<Half>(to, from, bytes, op);
    case Type::BF16: return run_half<BFloat>(to, from, bytes, op);
    default: return;
  }
}

}  // namespace cake::emu
