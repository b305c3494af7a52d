"""The gate stage in the emulator, for every architecture: the arrays of the CPU plan, and no detector fires."""

import pytest
import torch

from cake_gdn_det_train import cuda
from cake_shared.emulator import ConstWrite, Options, OutOfBounds, UninitialisedRead
from cake_shared.target import TARGETS
from cake_shared.testing.emulated import EmulatedPackage, emulated_or_skip
from cake_shared.testing.gate_cases import GATE_CASES, differences, expected

STATUS_PADDING = range(8, 16)  # of the 4 status words the first two are used
ORDERS = (Options(order="eager"), Options(order="lazy"), Options(order="random", seed=1))
SMALL = [case for case in GATE_CASES if case.shape[0] * case.shape[1] <= 1000]
LARGE = [case for case in GATE_CASES if case not in SMALL]


@pytest.fixture(scope="module")
def emulated():
    return emulated_or_skip(cuda.PACKAGE)


def check(package, case):
    word = cuda.ErrorWord(torch.zeros(1, dtype=torch.int32))
    stage = cuda.launch_gate_sums(package.module, case.gates(), case.cu_seqlens(), word, 0)
    got = {**stage.plan.views(stage.tables), "sums": stage.sums}
    assert differences(got, expected(case, stage.plan.chunk_capacity, stage.plan.segment_capacity)) == []
    assert int(word.tensor) == case.faults
    assert set(package.unwritten_bytes("tables").tolist()) == set(STATUS_PADDING)
    if stage.sums.numel():
        assert package.unwritten_bytes("sums").size == 0


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
@pytest.mark.parametrize("architecture", TARGETS)
def test_every_array_of_small_packs(emulated, architecture, case):
    package = emulated(architecture)
    for package.options in ORDERS:
        with package:
            check(package, case)


@pytest.mark.parametrize("case", LARGE, ids=lambda case: case.name)
@pytest.mark.parametrize("architecture", TARGETS)
def test_every_array_of_large_packs(emulated, architecture, case):
    package = emulated(architecture)
    package.options = ORDERS[LARGE.index(case) % len(ORDERS)]
    with package:
        check(package, case)


class Short(EmulatedPackage):
    """Takes the last 4 bytes of the sums away."""

    def _on_tensor(self, name, address, size_bytes, writable):
        super()._on_tensor(name, address, size_bytes - 4 if name == "sums" else size_bytes, writable)


class ReadOnly(EmulatedPackage):
    """Declares the sums an input."""

    def _on_tensor(self, name, address, size_bytes, writable):
        super()._on_tensor(name, address, size_bytes, writable and name != "sums")


class Skipping(EmulatedPackage):
    """Leaves out the kernel that writes the offsets."""

    def _on_launch(self, kernel, launch, params):
        if kernel != "pack_offsets_any":
            super()._on_launch(kernel, launch, params)


@pytest.mark.parametrize(
    ("broken", "error", "name"),
    [
        (Short, OutOfBounds, "uneven"),
        (ReadOnly, ConstWrite, "uneven"),
        (Skipping, UninitialisedRead, "1,500 uneven sequences"),
    ],
)
def test_detectors_watch_the_memory_of_the_host(emulated, broken, error, name):
    whole = emulated("sm_90a")
    case = next(case for case in GATE_CASES if case.name == name)
    package = broken(cuda.PACKAGE, "sm_90a")
    with package, pytest.raises(RuntimeError, match=f"launch of .*: {error.__name__}"):
        check(package, case)
    assert isinstance(package.error, error)
    with whole:
        check(whole, case)
