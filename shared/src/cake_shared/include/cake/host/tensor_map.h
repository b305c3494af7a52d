// Tensor maps for the copy engine: what cuTensorMapEncodeTiled makes, or the emulator's own form of it in a host module
// that was built for it. A map is 128 opaque bytes in a kernel's parameter struct; kernels pass its address on.
#pragma once

#include <cstdint>

#include "cake/host/launch.h"
#include "cake/host/tensor_map_value.h"

namespace cake::host {

enum class MapType : int { kUInt8 = 0, kInt32 = 3, kFloat32 = 7, kBFloat16 = 9 };
enum class MapSwizzle : int { kNone = 0, k32Bytes = 1, k64Bytes = 2, k128Bytes = 3 };
enum class MapL2 : int { kNone = 0, k64Bytes = 1, k128Bytes = 2, k256Bytes = 3 };

namespace detail {

// cuTensorMapEncodeTiled; its enumerations are ints.
using EncodeTiled = int (*)(void* map, int type, uint32_t rank, void* address, const uint64_t* extents,
                            const uint64_t* strides_bytes, const uint32_t* box, const uint32_t* element_strides,
                            int interleave, int swizzle, int l2_promotion, int fill);

}  // namespace detail

#ifdef CAKE_EMULATOR

namespace emulator {
inline detail::EncodeTiled encode_tiled = nullptr;

inline void set_encode_tiled(void* function) { encode_tiled = reinterpret_cast<detail::EncodeTiled>(function); }
}  // namespace emulator

namespace detail {
inline EncodeTiled encode_tiled() {
  if (emulator::encode_tiled == nullptr) TVM_FFI_THROW(RuntimeError) << "tensor map: no emulator is installed";
  return emulator::encode_tiled;
}
}  // namespace detail

#else

namespace detail {
// Through the runtime, so that a module links no driver library and loads without one.
inline EncodeTiled encode_tiled() {
  static const EncodeTiled function = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult result{};
    check_cuda(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &result),
               "cuTensorMapEncodeTiled");
    if (found == nullptr || result != cudaDriverEntryPointSuccess) {
      TVM_FFI_THROW(RuntimeError) << "cuTensorMapEncodeTiled: expected a driver of CUDA 12 or newer, got none";
    }
    return reinterpret_cast<EncodeTiled>(found);
  }();
  return function;
}
}  // namespace detail

#endif

// What a map covers. Axes innermost first; the innermost has unit stride, strides_bytes[i] belongs to axis i + 1 and is a
// multiple of 16 (an axis of extent 1 too).
template <int kRank>
struct TensorBox {
  const void* address;  // a multiple of 16
  uint64_t extents[kRank];
  uint64_t strides_bytes[kRank > 1 ? kRank - 1 : 1];
  uint32_t box[kRank];  // elements of one copy, at most 256 an axis
  MapType type = MapType::kBFloat16;
  MapSwizzle swizzle = MapSwizzle::k128Bytes;
  MapL2 l2 = MapL2::k128Bytes;
};

// `name` is the argument that the map covers, for the error.
template <int kRank>
TensorMap encode_tensor_map(const char* name, const TensorBox<kRank>& what) {
  static_assert(kRank >= 1 && kRank <= 5, "the copy engine takes one to five axes");
  TensorMap map;
  uint32_t ones[kRank];
  for (uint32_t& step : ones) step = 1;
  const auto encode = [&] {
    return detail::encode_tiled()(&map, static_cast<int>(what.type), kRank, const_cast<void*>(what.address), what.extents,
                                  what.strides_bytes, what.box, ones, 0, static_cast<int>(what.swizzle),
                                  static_cast<int>(what.l2), 0);
  };
  int status = encode();
#ifndef CAKE_EMULATOR
  // A thread that has not used its device yet, such as autograd's, has no current context, which the driver asks for.
  constexpr int kInvalidContext = 201;
  if (status == kInvalidContext) {
    int device = 0;
    check_cuda(cudaGetDevice(&device), "cudaGetDevice");
    check_cuda(cudaSetDevice(device), "cudaSetDevice");
    status = encode();
  }
#endif
  if (status != 0) {
    TVM_FFI_THROW(RuntimeError) << name << ": no tensor map for these extents and strides (driver error " << status << ")";
  }
  return map;
}

}  // namespace cake::host

#ifdef CAKE_EMULATOR
// Gives this module the emulator's cuTensorMapEncodeTiled.
TVM_FFI_DLL_EXPORT_TYPED_FUNC(cake_set_emulator_encode_tiled, cake::host::emulator::set_encode_tiled);
#endif
