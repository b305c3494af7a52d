// One launch, two destinations: the CUDA driver when nvcc compiles this file, the emulator when a C++ compiler does with
// CAKE_EMULATOR defined. A package's bind.cu is written once against this header and knows nothing of the difference.
//
// A launch copies the parameter struct; pointers in it must stay valid until the kernel has run.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include <tvm/ffi/error.h>

#include "cake/host/emulator_abi.h"
#include "cake/host/kernel_ref.h"

#ifdef CAKE_EMULATOR
#include <tvm/ffi/function.h>
#else
#include <cuda_runtime.h>
#include <mutex>
#endif

namespace cake::host {

struct Dim3 {
  uint32_t x = 1, y = 1, z = 1;
};

struct LaunchConfig {
  Dim3 grid;
  Dim3 block;
  Dim3 cluster;               // 1, 1, 1: no cluster
  uint32_t smem_bytes = 0;    // dynamic shared memory
  bool programmatic = false;  // may start before its predecessor on the stream ends; the kernel waits by griddepcontrol
  int64_t stream = 0;         // a cudaStream_t; ignored by the emulator, which keeps the order of the calls
};

#ifdef CAKE_EMULATOR

namespace emulator {
inline CakeLaunchCallback launch_callback = nullptr;
inline CakeTensorCallback tensor_callback = nullptr;

inline void set_callbacks(void* launch, void* tensor) {
  launch_callback = reinterpret_cast<CakeLaunchCallback>(launch);
  tensor_callback = reinterpret_cast<CakeTensorCallback>(tensor);
}
}  // namespace emulator

template <class Params>
void launch(KernelRef<Params> kernel, const LaunchConfig& config, const Params& params) {
  static_assert(std::is_trivially_copyable_v<Params> && sizeof(Params) <= 4096, "a kernel takes one plain struct");
  if (emulator::launch_callback == nullptr) {
    TVM_FFI_THROW(RuntimeError) << "launch of " << kernel.name
                                << ": no emulator is installed; call cake_set_emulator_callbacks first";
  }
  char error_text[4096] = "";
  const CakeLaunch launch{{config.grid.x, config.grid.y, config.grid.z},
                          {config.block.x, config.block.y, config.block.z},
                          {config.cluster.x, config.cluster.y, config.cluster.z},
                          config.smem_bytes,
                          config.programmatic ? 1u : 0u,
                          0u,
                          config.stream,
                          error_text,
                          sizeof(error_text)};
  if (emulator::launch_callback(kernel.name, &launch, &params, sizeof(Params)) != 0) {
    error_text[sizeof(error_text) - 1] = '\0';
    TVM_FFI_THROW(RuntimeError) << "launch of " << kernel.name << ": " << error_text;
  }
}

// The calls that follow run on the device of the tensors; the emulator has one device.
class DeviceGuard {
 public:
  explicit DeviceGuard(DLDevice) {}
};

#else

inline void check_cuda(cudaError_t status, const char* what) {
  if (status != cudaSuccess) {
    cudaGetLastError();  // the error is reported here, once; it must not surface again in somebody else's next call
    TVM_FFI_THROW(RuntimeError) << what << ": " << cudaGetErrorName(status) << ", " << cudaGetErrorString(status);
  }
}

// Dynamic shared memory beyond 48 KB needs the driver's leave, once for a kernel and device.
inline void allow_smem(const char* name, const void* function, KernelState& state, uint32_t smem_bytes) {
  constexpr uint32_t kSharedBytesWithoutOptIn = 48 * 1024;
  if (smem_bytes <= kSharedBytesWithoutOptIn) return;
  int device = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  std::atomic<uint32_t>* allowed = device < KernelState::kDevices ? &state.allowed_smem_bytes[device] : nullptr;
  if (allowed != nullptr && allowed->load(std::memory_order_relaxed) >= smem_bytes) return;
  static std::mutex telling;  // the driver holds the last value told, so that no thread may lower what another has raised
  const std::lock_guard<std::mutex> lock(telling);
  if (allowed != nullptr && allowed->load(std::memory_order_relaxed) >= smem_bytes) return;
  check_cuda(cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(smem_bytes)), name);
  if (allowed != nullptr) allowed->store(smem_bytes, std::memory_order_relaxed);
}

template <class Params>
void launch(KernelRef<Params> kernel, const LaunchConfig& config, const Params& params) {
  static_assert(std::is_trivially_copyable_v<Params> && sizeof(Params) <= 4096, "a kernel takes one plain struct");
  allow_smem(kernel.name, kernel.function, *kernel.state, config.smem_bytes);
  cudaLaunchAttribute attributes[2];
  unsigned count = 0;
  if (config.cluster.x * config.cluster.y * config.cluster.z > 1) {
    attributes[count].id = cudaLaunchAttributeClusterDimension;
    attributes[count].val.clusterDim = {config.cluster.x, config.cluster.y, config.cluster.z};
    ++count;
  }
  if (config.programmatic) {
    attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[count].val.programmaticStreamSerializationAllowed = 1;
    ++count;
  }
  cudaLaunchConfig_t cuda{};
  cuda.gridDim = dim3(config.grid.x, config.grid.y, config.grid.z);
  cuda.blockDim = dim3(config.block.x, config.block.y, config.block.z);
  cuda.dynamicSmemBytes = config.smem_bytes;
  cuda.stream = reinterpret_cast<cudaStream_t>(config.stream);
  cuda.attrs = attributes;
  cuda.numAttrs = count;
  void* arguments[] = {const_cast<Params*>(&params)};
  check_cuda(cudaLaunchKernelExC(&cuda, kernel.function, arguments), kernel.name);
}

// Makes the tensors' device current for the launches of one call, and puts the caller's back.
class DeviceGuard {
 public:
  explicit DeviceGuard(DLDevice device) {
    check_cuda(cudaGetDevice(&previous_), "cudaGetDevice");
    if (device.device_id != previous_) {
      check_cuda(cudaSetDevice(device.device_id), "cudaSetDevice");
      switched_ = true;
    }
  }
  ~DeviceGuard() {
    if (switched_) cudaSetDevice(previous_);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int previous_ = 0;
  bool switched_ = false;
};

#endif

}  // namespace cake::host

#ifdef CAKE_EMULATOR
// Installs (or, with null pointers, removes) the emulator of this module.
TVM_FFI_DLL_EXPORT_TYPED_FUNC(cake_set_emulator_callbacks, cake::host::emulator::set_callbacks);
#endif
