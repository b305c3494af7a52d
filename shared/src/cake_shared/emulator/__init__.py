"""A functional emulator: runs the PTX of a CUDA program on the CPU."""
