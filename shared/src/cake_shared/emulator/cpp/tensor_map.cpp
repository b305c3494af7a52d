#include "tensor_map.h"

#include <cstdlib>

#include "api.h"

namespace cake::emu {

u32 map_type_bytes(MapType t) {
  switch (t) {
    case MapType::U8: return 1;
    case MapType::U16:
    case MapType::F16:
    case MapType::BF16: return 2;
    case MapType::U64:
    case MapType::S64:
    case MapType::F64: return 8;
    default: return 4;
  }
}

std::string encode_tensor_map(TensorMap& map, u32 type, u32 rank, u64 address, const u64* dims, const u64* strides, const u32* box,
                              const u32* steps, u32 interleave, u32 swizzle, u32 fill) {
  const auto text = [](u64 v) { return std::to_string(v); };
  if (type > static_cast<u32>(MapType::TF32Ftz)) return "dtype: got code " + text(type) + ", takes 0 to 12 (no packed 4 or 6-bit types)";
  if (rank < 1 || rank > 5) return "rank: got " + text(rank) + ", takes 1 to 5";
  if (interleave) return "interleave: got " + text(interleave) + ", takes 0 (none)";
  if (swizzle > 3) return "swizzle: got code " + text(swizzle) + ", takes 0 to 3 (none, 32, 64, 128 bytes)";
  if (fill > 1) return "fill: got " + text(fill) + ", takes 0 or 1";
  const MapType t = static_cast<MapType>(type);
  const u32 size = map_type_bytes(t);
  const bool is_float = t >= MapType::F16;
  if (fill && !is_float) return "fill: got NaN for an integer type, takes zero";
  if (address % 16) return "address: got " + hex(address) + ", takes a multiple of 16";
  TensorMap m;
  m.magic = TensorMap::kMagic;
  m.type = t;
  m.rank = static_cast<u8>(rank);
  static constexpr u8 spans[4] = {0, 32, 64, 128};
  m.swizzle_bytes = spans[swizzle];
  m.fill_nan = static_cast<u8>(fill);
  m.base = address;
  for (u32 k = 0; k < rank; ++k) {
    if (dims[k] == 0 || dims[k] > 1ull << 32) return "dims[" + text(k) + "]: got " + text(dims[k]) + ", takes 1 to 2^32";
    if (box[k] == 0 || box[k] > 256) return "box[" + text(k) + "]: got " + text(box[k]) + ", takes 1 to 256";
    if (steps[k] == 0 || steps[k] > 8) return "element_strides[" + text(k) + "]: got " + text(steps[k]) + ", takes 1 to 8";
    m.dims[k] = dims[k];
    m.box[k] = static_cast<u16>(box[k]);
    m.steps[k] = static_cast<u8>(steps[k]);
  }
  for (u32 k = 0; k + 1 < rank; ++k) {
    if (strides[k] % 16 || strides[k] >= 1ull << 40) {
      return "strides_bytes[" + text(k) + "]: got " + text(strides[k]) + ", takes a multiple of 16 below 2^40";
    }
    m.strides[k] = strides[k];
  }
  const u32 inner = (box[0] + steps[0] - 1) / steps[0] * size;
  if (inner % 16) return "box[0]: got " + text(inner) + " bytes, takes a multiple of 16";
  if (m.swizzle_bytes && inner > m.swizzle_bytes) {
    return "box[0]: got " + text(inner) + " bytes, takes at most the swizzle's " + text(m.swizzle_bytes);
  }
  map = m;
  return {};
}

}  // namespace cake::emu

extern "C" {

// Signature and result codes of cuTensorMapEncodeTiled, for host code that runs against the emulator.
CAKE_EMU_API int cake_emulator_encode_tiled(void* map, uint32_t type, uint32_t rank, void* address, const uint64_t* dims,
                                            const uint64_t* strides, const uint32_t* box, const uint32_t* steps, uint32_t interleave,
                                            uint32_t swizzle, uint32_t l2_promotion, uint32_t fill) {
  (void)l2_promotion;
  cake::emu::TensorMap encoded;
  if (!cake::emu::encode_tensor_map(encoded, type, rank, reinterpret_cast<uint64_t>(address), dims, strides, box, steps, interleave,
                                    swizzle, fill)
           .empty()) {
    return 1;  // CUDA_ERROR_INVALID_VALUE
  }
  std::memcpy(map, &encoded, sizeof(encoded));
  return 0;
}

// As above, with what is wrong as a text to be freed with cake_emu_free; null when all is well.
CAKE_EMU_API char* cake_emu_tensor_map(void* map, uint32_t type, uint32_t rank, uint64_t address, const uint64_t* dims,
                                       const uint64_t* strides, const uint32_t* box, const uint32_t* steps, uint32_t swizzle,
                                       uint32_t fill) {
  cake::emu::TensorMap encoded;
  const std::string wrong = cake::emu::encode_tensor_map(encoded, type, rank, address, dims, strides, box, steps, 0, swizzle, fill);
  if (wrong.empty()) {
    std::memcpy(map, &encoded, sizeof(encoded));
    return nullptr;
  }
  char* out = static_cast<char*>(std::malloc(wrong.size() + 1));
  std::memcpy(out, wrong.c_str(), wrong.size() + 1);
  return out;
}
}
