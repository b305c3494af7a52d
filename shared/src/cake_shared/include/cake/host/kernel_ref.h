// How host code names a kernel. A kernel takes one plain struct, extern "C" __global__ void name(const __grid_constant__
// Params p); Params lives in the package's params.h (plain C++17), where CAKE_DECLARE_KERNEL(name, Params) declares it.
#pragma once

#include <atomic>
#include <cstdint>

namespace cake::host {

// What a process has told the driver about a kernel, so that it is told once and not at every launch.
struct KernelState {
  static constexpr int kDevices = 64;
  std::atomic<uint32_t> allowed_smem_bytes[kDevices] = {};
};

// A launch with another struct than the kernel's own does not compile.
template <class Params>
struct KernelRef {
  const char* name;
  const void* function;  // null where no CUDA compiler is at work: the emulator finds the kernel by its name
  KernelState* state;    // null there too
};

}  // namespace cake::host

#ifdef __CUDACC__
#define CAKE_DECLARE_KERNEL(kernel, Params)                          \
  extern "C" __global__ void kernel(const __grid_constant__ Params); \
  inline cake::host::KernelRef<Params> cake_kernel_ref_##kernel() {  \
    static cake::host::KernelState state;                            \
    return {#kernel, reinterpret_cast<const void*>(&kernel), &state}; \
  }
#else
#define CAKE_DECLARE_KERNEL(kernel, Params)                         \
  inline cake::host::KernelRef<Params> cake_kernel_ref_##kernel() { \
    return {#kernel, nullptr, nullptr};                             \
  }
#endif

#define CAKE_KERNEL_REF(kernel) cake_kernel_ref_##kernel()
