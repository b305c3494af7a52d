// Vocabulary shared by every file of the emulator: fixed-width names, faults, memory spaces.
#pragma once
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>

namespace cake::emu {

using u8 = uint8_t;
using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;
using i8 = int8_t;
using i16 = int16_t;
using i32 = int32_t;
using i64 = int64_t;
using u128 = unsigned __int128;
using i128 = __int128;

constexpr int kLanes = 32;
constexpr u32 kFull = 0xffffffffu;
// The system keeps the first KiB of shared memory of a CTA for itself on these architectures.
constexpr u32 kSharedBase = 1024;
// Shared addresses carry the CTA's rank in its cluster from this bit on.
constexpr u32 kRankShift = 24;
constexpr u32 kSharedWindow = 1u << kRankShift;

enum class Space : u8 { Generic, Global, Shared, Cluster, Local, Param, Const };
enum class Order : u8 { Eager, Lazy, Random };
enum class Detect : u8 { None, Cheap, All };

// What a detector found. The scheduler adds where: PTX line, source line, CTA, warp.
struct Fault {
  const char* detector;
  std::string text;
  int lane = -1;
  // Where it comes from, when that is not the instruction being executed: an asynchronous operation's.
  const void* warp = nullptr;
  int pc = -1;
};

[[noreturn]] inline void fault(const char* detector, std::string text, int lane = -1) {
  throw Fault{detector, std::move(text), lane};
}

// An error in the PTX text or a request outside of what is executed; found before anything runs.
struct ParseError {
  const char* kind;  // "PtxSyntaxError" or "UnsupportedInstruction"
  u32 line;
  std::string text;
  u32 source_file = 0, source_line = 0;  // of the CUDA source, where .loc tells
};

std::string hex(u64 value);

inline int first_lane(u32 mask) { return std::countr_zero(mask); }

inline u32 round_up(u32 value, u32 to) { return (value + to - 1) / to * to; }

}  // namespace cake::emu
