// The C interface that Python loads.
#pragma once
#include <cstdint>

#define CAKE_EMU_API __attribute__((visibility("default")))

extern "C" {

struct CakeEmuAllocation {
  uint64_t begin, bytes;
  uint8_t* written;  // one byte a byte, or null
  uint32_t flags;    // 1: const
  const char* name;
};

struct CakeEmuLimits {
  uint32_t threads, shared_bytes, registers_per_sm, registers_per_thread, cluster_ctas, tmem_columns;
};

struct CakeEmuLaunch {
  uint32_t grid[3], block[3], cluster[3];
  uint32_t dynamic_shared;
  const uint8_t* params;
  uint64_t param_bytes;
  const CakeEmuAllocation* allocations;
  uint64_t allocation_count;
  uint32_t order, detect, threads, profile;
  uint64_t seed, max_instructions;
  int64_t trace_cta;
  int32_t trace_warp;
  uint32_t stop_line;
  uint32_t dump_shared[2];  // offset and bytes to show when stop_line is reached
  uint32_t dump_tensor[2];  // column and count
  CakeEmuLimits limits;
  uint32_t registers;     // a thread's, as the compiler reports them; 0: not known
  uint32_t programmatic;  // may overlap the launch before it on the stream
  void* stream;           // of cake_emu_stream, or null
};

// Every function that can fail returns JSON through `json`, to be freed with cake_emu_free.
CAKE_EMU_API void* cake_emu_module(const char* text, const char* target, char** json);
CAKE_EMU_API void cake_emu_module_free(void* module);
CAKE_EMU_API int cake_emu_launch(void* module, const char* kernel, const CakeEmuLaunch* launch, char** json);
CAKE_EMU_API char* cake_emu_forms();  // the table of instructions
CAKE_EMU_API void cake_emu_free(char* json);
// What the launches of a stream have done to global memory. `unknown_before`: something else may still run on it.
CAKE_EMU_API void* cake_emu_stream(int unknown_before);
CAKE_EMU_API void cake_emu_stream_restart(void* stream, int unknown_before);
CAKE_EMU_API void cake_emu_stream_free(void* stream);
}
