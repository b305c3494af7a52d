// What crosses from a host module built with CAKE_EMULATOR to the emulator: plain C, so that ctypes can mirror it.
#pragma once

#include <stddef.h>
#include <stdint.h>

extern "C" {

// One launch. The emulator writes a terminated error text and returns non-zero to refuse it.
struct CakeLaunch {
  uint32_t grid[3];
  uint32_t block[3];
  uint32_t cluster[3];
  uint32_t smem_bytes;    // dynamic shared memory
  uint32_t programmatic;  // 1: may overlap its predecessor until griddepcontrol.wait
  uint32_t reserved;
  int64_t stream;
  char* error_text;
  uint64_t error_text_bytes;
};

// One tensor that passed the host's checks: the bytes that kernels may touch, before the launches that touch them.
struct CakeTensor {
  const char* name;
  void* data;         // lowest address that the view reaches
  uint64_t bytes;     // from there to the end of its highest element
  uint32_t writable;  // 0: an input, never written; 1: an output; 2: an output that is read before it is written
  uint32_t reserved;
};

typedef int (*CakeLaunchCallback)(const char* kernel, const struct CakeLaunch* launch, const void* params,
                                  size_t params_bytes);
typedef void (*CakeTensorCallback)(const struct CakeTensor* tensor);
}
