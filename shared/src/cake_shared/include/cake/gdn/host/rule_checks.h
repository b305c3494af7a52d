// Checks of the tensors that a call of the rule brings, and its workspace. Host side.
#pragma once

#include "cake/gdn/host/pack_stages.h"

namespace cake::gdn {

using OptionalTensor = tvm::ffi::Optional<TensorView>;

// Hands out a buffer of bytes in the order that plan.py states its regions, each a multiple of 1024 bytes long.
class Regions {
 public:
  Regions(const char* name, const OptionalTensor& bytes, bool made, DLDevice device) : name_(name) {
    constexpr DLDataType kUInt8{kDLUInt, 8, 1};
    if (!bytes.has_value()) return;
    const TensorView& tensor = bytes.value();
    size_ = tensor.numel();
    // What an earlier call has made is only read.
    next_ = static_cast<char*>(made ? const_cast<void*>(host::check_input(name, tensor, {kUInt8}, {host::kAny}, device))
                                    : host::check_output(name, tensor, kUInt8, {host::kAny}, device));
  }

  template <class T = char>
  T* take(int64_t bytes) {
    char* region = next_;
    const int64_t rounded = (bytes + 1023) / 1024 * 1024;
    next_ += rounded;
    size_ -= rounded;
    if (size_ < 0) TVM_FFI_THROW(ValueError) << name_ << ": expected " << -size_ << " bytes more than it has";
    return reinterpret_cast<T*>(region);
  }

  void finish() const {
    if (size_ != 0) TVM_FFI_THROW(ValueError) << name_ << ": expected " << size_ << " bytes less than it has";
  }

 private:
  const char* name_;
  char* next_ = nullptr;
  int64_t size_ = 0;
};

// Bits of what a call answers instead of launching anything: rows that a copy must bring to 16-byte alignment.
enum RowsOf : int64_t { kRowsOfQ = 1, kRowsOfK = 2, kRowsOfV = 4, kRowsOfGradO = 8 };

// Rows [B, T, heads, 128] BF16. The last dimension must be contiguous and every row 16-byte aligned, else `which` is added to
// `misaligned`.
inline TokenRows check_rows(const char* name, const TensorView& x, const Pack& pack, int64_t heads, DLDevice device, RowsOf which,
                            int64_t& misaligned) {
  const void* data = host::check_input(name, x, {host::kBFloat16}, {pack.rows, pack.tokens_per_row, heads, int64_t{kHeadDim}},
                                       device);
  bool aligned = x.stride(3) == 1 && reinterpret_cast<uintptr_t>(data) % 16 == 0;
  for (int axis = 0; axis < 3; ++axis) aligned = aligned && (x.stride(axis) % 8 == 0 || x.size(axis) == 1);
  if (!aligned && x.numel() > 0) misaligned |= which;
  return {const_cast<void*>(data), x.stride(0), x.stride(1), x.stride(2)};
}

inline TokenRows check_rows_out(const char* name, const TensorView& x, const Pack& pack, int64_t heads, DLDevice device) {
  void* data = host::check_output(name, x, host::kBFloat16, {pack.rows, pack.tokens_per_row, heads, int64_t{kHeadDim}}, device);
  return {data, x.stride(0), x.stride(1), x.stride(2)};
}

inline TokenScalars check_scalars(const char* name, const TensorView& x, const Pack& pack, DLDevice device) {
  const void* data = host::check_input(name, x, {host::kFloat32, host::kBFloat16},
                                       {pack.rows, pack.tokens_per_row, pack.heads}, device);
  return {const_cast<void*>(data), x.stride(0), x.stride(1), x.stride(2), host::same_dtype(x.dtype(), host::kBFloat16) ? 1 : 0};
}

inline TokenScalars check_scalars_out(const char* name, const TensorView& x, const TensorView& like, const Pack& pack,
                                      DLDevice device) {
  void* data = host::check_output(name, x, like.dtype(), {pack.rows, pack.tokens_per_row, pack.heads}, device, 2);
  return {data, x.stride(0), x.stride(1), x.stride(2), host::same_dtype(x.dtype(), host::kBFloat16) ? 1 : 0};
}

inline HeadScalars check_head_scalars(const char* name, const OptionalTensor& x, const Pack& pack, DLDevice device) {
  if (!x.has_value()) return {};
  const TensorView& t = x.value();
  const void* data = host::check_input(name, t, {host::kFloat32, host::kBFloat16}, {pack.heads}, device);
  return {const_cast<void*>(data), t.stride(0), host::same_dtype(t.dtype(), host::kBFloat16) ? 1 : 0};
}

inline HeadScalars check_head_scalars_out(const char* name, const OptionalTensor& x, const OptionalTensor& like, const Pack& pack,
                                          DLDevice device) {
  if (!x.has_value()) return {};
  if (!like.has_value()) TVM_FFI_THROW(ValueError) << name << ": expected none, because there is no such input";
  const TensorView& t = x.value();
  void* data = host::check_output(name, t, like.value().dtype(), {pack.heads}, device, 2);
  return {data, 1, host::same_dtype(t.dtype(), host::kBFloat16) ? 1 : 0};
}

inline States check_states(const char* name, const OptionalTensor& x, const Pack& pack, bool v_first, bool out, DLDevice device) {
  if (!x.has_value()) return {};
  const std::initializer_list<int64_t> shape = {pack.sequences, pack.heads, int64_t{kHeadDim}, int64_t{kHeadDim}};
  const TensorView& t = x.value();
  const void* data = out ? host::check_output(name, t, host::kFloat32, shape, device)
                         : host::check_input(name, t, {host::kFloat32}, shape, device);
  if (!t.IsContiguous()) {
    TVM_FFI_THROW(ValueError) << name << ": expected a contiguous tensor, got strides " << host::sizes_text(t.strides());
  }
  float* states = static_cast<float*>(const_cast<void*>(data));
  return v_first ? States{states, 1, kHeadDim} : States{states, kHeadDim, 1};
}

}  // namespace cake::gdn
