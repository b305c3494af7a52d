// Tensor maps in the emulator's own encoding.
#pragma once
#include <string>

#include "core.h"

namespace cake::emu {

// The data types in the order of the driver's CUtensorMapDataType.
enum class MapType : u8 { U8, U16, U32, S32, U64, S64, F16, F32, F64, BF16, F32Ftz, TF32, TF32Ftz };

struct alignas(64) TensorMap {
  static constexpr u32 kMagic = 0x4d54454b;
  u32 magic = 0;
  MapType type = MapType::U8;
  u8 rank = 0;
  u8 swizzle_bytes = 0;   // 0, 32, 64, 128
  u8 fill_nan = 0;
  u64 base = 0;
  u64 dims[5] = {};       // elements, innermost first
  u64 strides[4] = {};    // bytes, of dimensions 1 to 4
  u16 box[5] = {};        // elements traversed
  u8 steps[5] = {};       // element strides
  u8 pad[9] = {};
};
static_assert(sizeof(TensorMap) == 128);

u32 map_type_bytes(MapType t);

// Checks what cuTensorMapEncodeTiled checks and fills `map`; returns what is wrong, or an empty text.
std::string encode_tensor_map(TensorMap& map, u32 type, u32 rank, u64 address, const u64* dims, const u64* strides, const u32* box,
                              const u32* steps, u32 interleave, u32 swizzle, u32 fill);

}  // namespace cake::emu
