"""Guard bands: an access past an array is out of bounds even where another array follows it in memory."""

import numpy as np
import pytest

from cake_shared.emulator import Module, Options, OutOfBounds, Stream, tensor_map

SOURCE = """
#include <cuda.h>
#include <cstdint>
struct Pointers { uint32_t* out; uint64_t shift; };
extern "C" __global__ void store(Pointers p) { p.out[threadIdx.x + p.shift] = 7; }
extern "C" __global__ void load(const uint32_t* in, uint32_t* out, int shift) {
  out[threadIdx.x] = in[threadIdx.x + shift];
}
extern "C" __global__ void tile(const __grid_constant__ CUtensorMap map) {
  __shared__ __align__(128) uint32_t data[32];
  data[threadIdx.x] = threadIdx.x;
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  __syncthreads();
  if (threadIdx.x == 0) {
    asm volatile("cp.async.bulk.tensor.1d.global.shared::cta.tile.bulk_group [%0, {%1}], [%2];" ::"l"(&map), "r"(0),
                 "r"(static_cast<uint32_t>(__cvta_generic_to_shared(data)))
                 : "memory");
    asm volatile("cp.async.bulk.commit_group;\\ncp.async.bulk.wait_group 0;" ::: "memory");
  }
}
"""
GUARDED = Options(guard_bytes=4096)


@pytest.fixture(scope="module")
def program():
    return Module.from_cuda(SOURCE)


def neighbours():
    buffer = np.zeros(64, np.uint32)
    return buffer[:32], buffer[32:]


@pytest.mark.parametrize("shift", [1, 32, 33, 900])
def test_a_read_past_an_array_meets_the_band(program, shift):
    x, y = neighbours()
    out = np.zeros(32, np.uint32)
    if shift == 32:
        program.launch("load", 1, 32, [x, out, shift], allocations=[y])  # without bands this is a read of y
    with pytest.raises(OutOfBounds, match="past the end of parameter 0"):
        program.launch("load", 1, 32, [x, out, shift], allocations=[y], options=GUARDED)


def test_pointers_in_structs_are_moved_and_results_come_back(program):
    x, y = neighbours()
    pointers = np.array([x.ctypes.data, 0], np.uint64)
    program.launch("store", 1, 32, [pointers.tobytes()], allocations=[x, y], options=GUARDED)
    assert (x == 7).all()
    assert (y == 0).all()
    pointers[1] = 32
    with pytest.raises(OutOfBounds, match="past the end of allocation 0"):
        program.launch("store", 1, 32, [pointers.tobytes()], allocations=[x, y], options=GUARDED)


def test_arrays_that_overlap_stay_together(program):
    x, _ = neighbours()
    out = np.zeros(32, np.uint32)
    x[:] = np.arange(32)
    program.launch("load", 1, 16, [x[:24], out, 16], allocations=[x[8:]], options=GUARDED)
    assert out[:16].tolist() == list(range(16, 32))


def test_tensor_maps_are_moved(program):
    x, y = neighbours()
    encoded = tensor_map(x, (32,), dtype="u32")
    program.launch("tile", 1, 32, [encoded], allocations=[x, y], options=GUARDED)
    assert x.tolist() == list(range(32))
    assert (y == 0).all()


def test_not_on_a_stream(program):
    x, _ = neighbours()
    with pytest.raises(ValueError, match="guard_bytes"):
        Stream(GUARDED).launch(program, "load", 1, 32, [x, x, 0])
