// Which native programs a host unit may name. A module links the programs of its own architecture alone, or, where
// CAKE_PORTABLE_PROGRAMS is defined, portable ones; the emulator's host module names those of all.
#pragma once

#if defined(CAKE_EMULATOR)
#define CAKE_HAS_SM90 1
#elif defined(__CUDA_ARCH_LIST__) && !defined(CAKE_PORTABLE_PROGRAMS)
#define CAKE_HAS_SM90 (__CUDA_ARCH_LIST__ == 900)
#else
#define CAKE_HAS_SM90 0
#endif
