// Checks of the tensors that a bind.cu receives. Every message names the argument, what it got and what it takes.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <sstream>
#include <string>

#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/error.h>

#include "cake/host/launch.h"

namespace cake::host {

using tvm::ffi::TensorView;

inline constexpr DLDataType kInt32{kDLInt, 32, 1};
inline constexpr DLDataType kInt64{kDLInt, 64, 1};
inline constexpr DLDataType kFloat32{kDLFloat, 32, 1};
inline constexpr DLDataType kBFloat16{kDLBfloat, 16, 1};

// A size of a shape that the caller does not fix.
inline constexpr int64_t kAny = -1;

#ifdef CAKE_EMULATOR
inline constexpr int kDeviceType = kDLCPU;
#else
inline constexpr int kDeviceType = kDLCUDA;
#endif

inline bool same_dtype(DLDataType a, DLDataType b) {
  return a.code == b.code && a.bits == b.bits && a.lanes == b.lanes;
}

inline std::string dtype_text(DLDataType dtype) {
  const char* kind = dtype.code == kDLInt      ? "int"
                     : dtype.code == kDLUInt   ? "uint"
                     : dtype.code == kDLFloat  ? "float"
                     : dtype.code == kDLBfloat ? "bfloat"
                     : dtype.code == kDLBool   ? "bool"
                                               : "type";
  return kind + std::to_string(dtype.bits);
}

template <class Sizes>
std::string sizes_text(const Sizes& sizes) {
  std::ostringstream text;
  text << '[';
  bool first = true;
  for (int64_t size : sizes) {
    if (!first) text << ", ";
    if (size == kAny) {
      text << "any";
    } else {
      text << size;
    }
    first = false;
  }
  text << ']';
  return text.str();
}

namespace detail {

inline void check_device(const char* name, const TensorView& tensor, DLDevice device) {
  const DLDevice got = tensor.device();
  if (got.device_type != kDeviceType || got.device_type != device.device_type || got.device_id != device.device_id) {
    TVM_FFI_THROW(ValueError) << name << ": expected a tensor on " << (kDeviceType == kDLCUDA ? "CUDA" : "CPU")
                              << " device " << device.device_id << ", got device type " << got.device_type << ", index "
                              << got.device_id;
  }
}

inline void check_dtype(const char* name, const TensorView& tensor, std::initializer_list<DLDataType> dtypes) {
  std::string expected;
  for (DLDataType dtype : dtypes) {
    if (same_dtype(tensor.dtype(), dtype)) return;
    expected += (expected.empty() ? "" : " or ") + dtype_text(dtype);
  }
  TVM_FFI_THROW(TypeError) << name << ": expected dtype " << expected << ", got " << dtype_text(tensor.dtype());
}

inline void check_shape(const char* name, const TensorView& tensor, std::initializer_list<int64_t> shape) {
  bool same = tensor.ndim() == static_cast<int>(shape.size());
  int axis = 0;
  for (int64_t size : shape) {
    if (same && size != kAny && tensor.size(axis) != size) same = false;
    ++axis;
  }
  if (!same) {
    TVM_FFI_THROW(ValueError) << name << ": expected shape " << sizes_text(shape) << ", got "
                              << sizes_text(tensor.shape());
  }
}

inline char* first_element(const TensorView& tensor) {
  return static_cast<char*>(tensor.data_ptr()) + tensor.byte_offset();
}

// Tells the emulator which bytes the coming launches may touch; a driver needs no telling. An output `holds` something
// where kernels read it before they write.
inline void declare([[maybe_unused]] const char* name, [[maybe_unused]] const TensorView& tensor,
                    [[maybe_unused]] bool writable, [[maybe_unused]] bool holds = false) {
#ifdef CAKE_EMULATOR
  if (emulator::tensor_callback == nullptr || tensor.numel() == 0) return;
  const int64_t element_bytes = tensor.dtype().bits / 8;
  int64_t below = 0, above = 0;
  for (int axis = 0; axis < tensor.ndim(); ++axis) {
    const int64_t span = (tensor.size(axis) - 1) * tensor.stride(axis) * element_bytes;
    (span < 0 ? below : above) += span;
  }
  const CakeTensor told{name, first_element(tensor) + below, static_cast<uint64_t>(above - below + element_bytes),
                        writable ? (holds ? 2u : 1u) : 0u, 0u};
  emulator::tensor_callback(&told);
#endif
}

}  // namespace detail

// A tensor that kernels read, any strides. Returns the address of its first element.
inline const void* check_input(const char* name, const TensorView& tensor, std::initializer_list<DLDataType> dtypes,
                               std::initializer_list<int64_t> shape, DLDevice device) {
  detail::check_device(name, tensor, device);
  detail::check_dtype(name, tensor, dtypes);
  detail::check_shape(name, tensor, shape);
  detail::declare(name, tensor, false);
  return detail::first_element(tensor);
}

// A contiguous tensor that kernels write, aligned to alignment_bytes. Returns the address of its first element.
inline void* check_output(const char* name, const TensorView& tensor, DLDataType dtype,
                          std::initializer_list<int64_t> shape, DLDevice device, uint64_t alignment_bytes = 16) {
  detail::check_device(name, tensor, device);
  detail::check_dtype(name, tensor, {dtype});
  detail::check_shape(name, tensor, shape);
  if (!tensor.IsContiguous()) {
    TVM_FFI_THROW(ValueError) << name << ": expected a contiguous tensor, got strides " << sizes_text(tensor.strides());
  }
  if (reinterpret_cast<uintptr_t>(detail::first_element(tensor)) % alignment_bytes != 0) {
    TVM_FFI_THROW(ValueError) << name << ": expected an address that is a multiple of " << alignment_bytes
                              << " bytes";
  }
  detail::declare(name, tensor, true);
  return detail::first_element(tensor);
}

}  // namespace cake::host
