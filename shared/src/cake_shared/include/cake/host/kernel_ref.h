// How host code names a kernel. A kernel takes one plain struct, extern "C" __global__ void name(const __grid_constant__
// Params p); Params lives in the package's params.h (plain C++17), where CAKE_DECLARE_KERNEL(name, Params) declares it.
#pragma once

namespace cake::host {

// A launch with another struct than the kernel's own does not compile.
template <class Params>
struct KernelRef {
  const char* name;
  const void* function;  // null where no CUDA compiler is at work: the emulator finds the kernel by its name
};

}  // namespace cake::host

#ifdef __CUDACC__
#define CAKE_DECLARE_KERNEL(kernel, Params)                          \
  extern "C" __global__ void kernel(const __grid_constant__ Params); \
  inline cake::host::KernelRef<Params> cake_kernel_ref_##kernel() {  \
    return {#kernel, reinterpret_cast<const void*>(&kernel)};        \
  }
#else
#define CAKE_DECLARE_KERNEL(kernel, Params)                         \
  inline cake::host::KernelRef<Params> cake_kernel_ref_##kernel() { \
    return {#kernel, nullptr};                                      \
  }
#endif

#define CAKE_KERNEL_REF(kernel) cake_kernel_ref_##kernel()
