"""A package's host chain in the emulator: overlapping launches, and launches against the budgets of the records."""

import json
import sys
import textwrap

import pytest
import torch

from cake_shared.emulator import Options
from cake_shared.testing.emulated import EmulatedPackage
from cake_shared.testing.tiny_package import PROGRAMS, TinyPackage, forget

NAME = "cake_tiny_chain"
BIND = """
    #include <tvm/ffi/function.h>
    #include "cake/host/launch.h"
    #include "cake/host/tensor.h"
    #include "params.h"

    // Adds one to x for each launch, the first of which is `first` programmatic.
    void run(tvm::ffi::TensorView x, tvm::ffi::TensorView y, int64_t launches, bool first, bool waits,
             int64_t threads, int64_t smem_bytes) {
      const DLDevice device = x.device();
      auto* data = static_cast<int32_t*>(
          cake::host::check_output("x", x, cake::host::kInt32, {cake::host::kAny}, device));
      cake::host::check_output("y", y, cake::host::kInt32, {cake::host::kAny}, device);
      for (int64_t k = 0; k < launches; ++k) {
        cake::host::LaunchConfig config;
        config.block = {static_cast<uint32_t>(threads)};
        config.smem_bytes = static_cast<uint32_t>(smem_bytes);
        config.programmatic = k > 0 || first;
        cake::host::launch(CAKE_KERNEL_REF(fill_any), config, FillParams{data, k, waits});
      }
    }
    TVM_FFI_DLL_EXPORT_TYPED_FUNC(run, run);
"""
PARAMS = """
    #pragma once
    #include <cstdint>
    #include "cake/host/kernel_ref.h"
    struct FillParams { int32_t* out; int64_t number; bool waits; };
    CAKE_DECLARE_KERNEL(fill_any, FillParams)
"""
KERNEL = """
    #pragma once
    #include "params.h"
    extern "C" __global__ void fill_any(const __grid_constant__ FillParams p) {
      asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
      if (p.waits) asm volatile("griddepcontrol.wait;" ::: "memory");
      const int before = p.number ? p.out[threadIdx.x] : 0;
      p.out[threadIdx.x] = before + 1;
    }
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    root = tmp_path_factory.mktemp("packages")
    tiny = TinyPackage(root, NAME)
    (tiny.csrc / "bind.cu").write_text(textwrap.dedent(BIND))
    (tiny.csrc / "params.h").write_text(textwrap.dedent(PARAMS))
    (tiny.csrc / "any" / "fill.cuh").write_text(textwrap.dedent(KERNEL))
    programs = json.loads(json.dumps(PROGRAMS))
    programs["records"][0]["budget"] |= {"threads": 64, "shared_bytes": 256}
    (tiny.directory / "programs.json").write_text(json.dumps(programs))
    sys.path.insert(0, str(root))
    try:
        with EmulatedPackage(NAME, "sm_90a", Options(order="random", seed=1)) as entered:
            yield entered
    finally:
        sys.path.remove(str(root))
        forget(NAME)


def run(package, launches=3, first=True, waits=True, threads=32, smem_bytes=0):
    x, y = torch.zeros(128, dtype=torch.int32).split(64)
    package.module["run"](x, y, launches, first, waits, threads, smem_bytes)
    return x


def test_a_write_into_the_neighbouring_tensor_is_out_of_bounds(package):
    buffer = torch.zeros(128, dtype=torch.int32)
    package.module["run"](buffer[:64], buffer[64:], 1, True, True, 64, 0)
    assert buffer.tolist() == [1] * 64 + [0] * 64
    with pytest.raises(RuntimeError, match=r"OutOfBounds.*past the end of x"):
        package.module["run"](buffer[:32], buffer[32:], 1, True, True, 64, 0)


def test_launches_that_wait_may_overlap(package):
    for _ in range(2):
        assert run(package)[:32].tolist() == [3] * 32
    assert [report.kernel for report in package.reports] == ["fill_any"] * 3


def test_a_first_launch_that_does_not_wait_may_meet_what_ran_before_the_call(package):
    assert run(package, launches=1, first=False, waits=False)[0] == 1
    with pytest.raises(RuntimeError, match=r"MissingGridWait.*what ran before"):
        run(package, launches=1, waits=False)


def test_a_later_launch_that_does_not_wait_meets_the_one_before(package):
    with pytest.raises(RuntimeError, match=r"MissingGridWait.*kernel fill_any"):
        run(package, launches=2, first=False, waits=False)


@pytest.mark.parametrize(("beyond", "text"), [({"threads": 128}, "128 threads"), ({"smem_bytes": 272}, "272 shared")])
def test_a_launch_beyond_its_budget_is_refused(package, beyond, text):
    run(package, threads=64, smem_bytes=256)
    with pytest.raises(RuntimeError, match=f"LaunchError.*{text}.*budget"):
        run(package, **beyond)
