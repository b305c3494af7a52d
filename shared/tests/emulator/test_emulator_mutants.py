"""Every detector catches its mutants, and the kernels that the mutants are made from run clean under every order.

A mutant may show only when asynchronous work completes late or at random, so each is run under all ORDERS and must be
caught at least once; `always` says that it must be caught in every one of them.
"""

import functools
import pathlib
from dataclasses import dataclass

import numpy as np
import pytest

from cake_shared.emulator import (
    AsyncInFlight,
    BarrierMisuse,
    ConstWrite,
    Deadlock,
    EmulatorError,
    Hang,
    IllegalInstruction,
    Misaligned,
    MissingProxyFence,
    Module,
    Options,
    OutOfBounds,
    PtxSyntaxError,
    SharedRace,
    TensorMemoryLeak,
    Trap,
    UninitialisedRead,
    UnsupportedInstruction,
    UnwaitedResult,
    tensor_map,
)
from cake_shared.emulator.conformance import rounding as rd
from cake_shared.emulator.conformance.model import widen

KERNELS = pathlib.Path(__file__).parent / "kernels"
ORDERS = [("eager", 0), ("lazy", 0), ("random", 1), ("random", 2), ("random", 3)]


class WrongResult(AssertionError):
    """The mutant ran to its end and gave a wrong result: caught by the comparison, as a test would."""


@functools.cache
def module(source: str, target: str) -> Module:
    return Module.from_cuda(str(KERNELS / source), target=target)


def expect_equal(got: np.ndarray, want: np.ndarray) -> None:
    if not np.array_equal(got, want):
        raise WrongResult(f"{int((got != want).sum())} of {want.size} elements are wrong")


def words(count: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 50000, count, dtype=np.uint32)


def run_simple(kernel: str, mutant: int, target: str, options: Options) -> None:
    """Launch kernel ``<kernel>_<mutant>`` of simple_mutants.cu and compare with what the right one gives."""
    program = module("simple_mutants.cu", target)
    sizes = {"global": (128, 128, 128), "shared": (128, 128, 128), "named": (64, 64, 128), "copy": (512, 128, 128)}
    sizes |= {"bulk": (256, 256, 128), "handover": (128, 32, 64), "cluster": (128, 128, 64)}
    inputs, outputs, threads = sizes[kernel]
    data, out = words(inputs, 1), np.zeros(outputs, np.uint32)
    if kernel == "global" and mutant == 5:
        out = program.uninit(out)
    program.launch(
        f"{kernel}_{mutant}",
        grid=2 if kernel == "cluster" else 1,
        block=threads,
        cluster=(2, 1, 1) if kernel == "cluster" else (1, 1, 1),
        smem_bytes=128 if kernel == "shared" else 0,
        params=[program.const(data), out],
        options=options,
    )
    if not isinstance(out, np.ndarray):
        out = out.array
    if kernel == "global":
        want = data * 2 + 1
    elif kernel == "shared":
        want = data[::-1] + 7
    elif kernel == "named":
        want = data[::-1] + 1
    elif kernel == "copy":
        want = data[:128] + data[511 - np.arange(128)]
    elif kernel == "bulk":
        want = data[::-1] + 5
    elif kernel == "handover":
        want = np.zeros(32, np.uint32)
        for k in range(4):
            want = want * 3 + data[32 * k : 32 * k + 32][::-1]
    else:
        want = np.concatenate([data[64:], data[:64]])
    expect_equal(out, want)


def run_gemm(
    source: str, mutant: int, target: str, options: Options, rows: int, threads: int, shared_bytes: int
) -> None:
    """D[rows, 64] = A[rows, K] B[64, K]^T through tensor maps."""
    program = module(source, target)
    rng = np.random.default_rng(2)
    depth = 64 * 7
    a, b = (rd.bf16_round(rng.normal(size=(n, depth))) for n in (rows, 64))
    d = np.full((rows, 64), np.nan, np.float32)
    maps = [tensor_map(x, (64, x.shape[0]), swizzle="128B", dtype="bf16") for x in (a, b)]
    program.launch(
        f"gemm_{mutant}",
        grid=1,
        block=threads,
        smem_bytes=shared_bytes,
        params=[*maps, d, 7],
        allocations=[program.const(a), program.const(b)],
        options=options,
    )
    x, y = widen(a, "bf16"), widen(b, "bf16")
    bound = (depth + 1) * 2.0**-23 * (np.abs(x) @ np.abs(y).T)
    wrong = ~(np.abs(d - x @ y.T) <= bound)
    if wrong.any():
        raise WrongResult(f"{int(wrong.sum())} of {wrong.size} elements are wrong")


def run(kernel: str, mutant: int, target: str, options: Options) -> None:
    if kernel == "wgmma":
        run_gemm("gemm_wgmma_mutants.cu", mutant, target, options, 64, 160, 3 * 16384 + 64)
    elif kernel == "tcgen05":
        run_gemm("gemm_tcgen05_mutants.cu", mutant, target, options, 128, 192, 3 * 24576 + 128)
    else:
        run_simple(kernel, mutant, target, options)


@dataclass(frozen=True)
class Mutant:
    kernel: str
    number: int
    fault: str
    caught_by: tuple[type[Exception], ...]
    always: bool = True
    target: str = "sm_90a"

    def __str__(self) -> str:
        return f"{self.kernel}-{self.number} {self.fault}"


MUTANTS = [
    Mutant("global", 1, "reads past the end", (OutOfBounds,)),
    Mutant("global", 2, "writes before the start", (OutOfBounds,)),
    Mutant("global", 3, "misaligned read", (Misaligned,)),
    Mutant("global", 4, "writes a const input", (ConstWrite,)),
    Mutant("global", 5, "reads global memory that nothing wrote", (UninitialisedRead,)),
    Mutant("global", 6, "traps", (Trap,)),
    Mutant("global", 7, "fails an assertion", (Trap,)),
    Mutant("global", 8, "spins on memory that nobody writes", (Hang, Deadlock)),
    Mutant("global", 9, "never ends, with stores to local memory alone", (Hang,)),
    Mutant("shared", 1, "reads shared memory that nothing wrote", (UninitialisedRead,)),
    Mutant("shared", 2, "writes past the shared memory", (OutOfBounds,)),
    Mutant("shared", 3, "misaligned shared write", (Misaligned,)),
    Mutant("shared", 4, "no barrier between write and read", (SharedRace, UninitialisedRead)),
    Mutant("shared", 5, "overwrites what others still read", (SharedRace,)),
    Mutant("shared", 6, "a barrier that half of the threads reach", (Deadlock, BarrierMisuse, SharedRace)),
    Mutant("shared", 7, "two warps write one word", (SharedRace,)),
    Mutant("named", 1, "producers never arrive", (Deadlock,)),
    Mutant("named", 2, "producers arrive twice", (BarrierMisuse, Deadlock, SharedRace)),
    Mutant("named", 3, "thread counts disagree", (BarrierMisuse, UninitialisedRead)),
    Mutant("named", 4, "waits at another barrier", (Deadlock,)),
    Mutant("copy", 1, "waits for one group too few", (UnwaitedResult, UninitialisedRead, SharedRace)),
    Mutant("copy", 2, "no wait at all", (UnwaitedResult, UninitialisedRead, SharedRace, AsyncInFlight)),
    Mutant("copy", 3, "a copy in no group", (UnwaitedResult, UninitialisedRead, SharedRace, AsyncInFlight)),
    Mutant("copy", 4, "no barrier after the wait", (SharedRace, UnwaitedResult, UninitialisedRead)),
    Mutant("bulk", 1, "mbarrier never initialised", (BarrierMisuse, UninitialisedRead)),
    Mutant("bulk", 2, "an arrival that never comes", (Deadlock,)),
    Mutant("bulk", 3, "expects too many bytes", (Deadlock,)),
    Mutant("bulk", 4, "expects too few bytes", (Deadlock, BarrierMisuse, UnwaitedResult, UninitialisedRead)),
    Mutant("bulk", 5, "a size that is no multiple of 16", (Misaligned, IllegalInstruction)),
    Mutant("bulk", 6, "one arrival too many", (BarrierMisuse, Deadlock)),
    Mutant("bulk", 7, "no wait for the copy", (UnwaitedResult, UninitialisedRead, SharedRace)),
    Mutant("bulk", 8, "waits for the wrong parity", (UnwaitedResult, UninitialisedRead, SharedRace)),
    Mutant("bulk", 9, "waits for a phase that nobody completes", (Deadlock,)),
    Mutant("bulk", 10, "no proxy fence before the copy out", (MissingProxyFence,)),
    Mutant("bulk", 11, "no barrier before the copy out", (SharedRace, UninitialisedRead, MissingProxyFence)),
    Mutant("bulk", 12, "exits while copying", (AsyncInFlight,)),
    Mutant("bulk", 14, "a copy in no group", (AsyncInFlight,)),
    Mutant("bulk", 15, "changes the source of a copy", (SharedRace,)),
    Mutant("handover", 1, "half of the count", (BarrierMisuse, SharedRace, Deadlock)),
    Mutant("handover", 2, "a count one too large", (Deadlock,)),
    Mutant("handover", 3, "does not wait for the reader", (BarrierMisuse, SharedRace, Deadlock)),
    Mutant("handover", 4, "one lane forgets to arrive", (Deadlock,)),
    Mutant("handover", 5, "does not wait for the writer", (BarrierMisuse, SharedRace, UninitialisedRead, WrongResult)),
    Mutant("handover", 6, "initialises a barrier in use", (BarrierMisuse,)),
    Mutant("cluster", 1, "reads a neighbour before it has written", (SharedRace, UninitialisedRead)),
    Mutant("cluster", 2, "addresses a CTA that does not exist", (OutOfBounds,)),
    Mutant("cluster", 3, "may exit while a neighbour reads", (OutOfBounds, SharedRace)),
    Mutant("wgmma", 1, "half of the count", (BarrierMisuse, SharedRace, Deadlock, UnwaitedResult)),
    Mutant("wgmma", 2, "overwrites tiles in use", (SharedRace, BarrierMisuse, UnwaitedResult)),
    Mutant("wgmma", 3, "expects 16 bytes too many", (Deadlock,)),
    Mutant("wgmma", 4, "expects 16 bytes too few", (Deadlock, BarrierMisuse, UnwaitedResult), always=False),
    Mutant("wgmma", 5, "forgets a load", (Deadlock,)),
    Mutant("wgmma", 6, "the wrong swizzle", (WrongResult,)),
    Mutant(
        "wgmma",
        7,
        "multiplies before the tiles are there",
        (UnwaitedResult, UninitialisedRead, SharedRace, BarrierMisuse),
    ),
    Mutant("wgmma", 8, "uses results before the wait", (UnwaitedResult, SharedRace)),
    Mutant("wgmma", 9, "no proxy fence after generic writes", (MissingProxyFence,)),
    Mutant("wgmma", 10, "no wgmma.fence", (IllegalInstruction,)),
    Mutant("wgmma", 11, "never commits its group", (UnwaitedResult, AsyncInFlight, SharedRace)),
    Mutant("wgmma", 12, "frees tiles before the product is done", (SharedRace,)),
    Mutant("wgmma", 13, "one arrival missing", (Deadlock,)),
    Mutant("wgmma", 14, "overwrites a tile between barriers, before the wait", (SharedRace,)),
    Mutant("tcgen05", 1, "an arrival that never comes", (Deadlock,), target="sm_100a"),
    Mutant("tcgen05", 2, "allocates 48 columns", (TensorMemoryLeak,), target="sm_100a"),
    Mutant("tcgen05", 3, "overwrites tiles in use", (SharedRace, BarrierMisuse, UnwaitedResult), target="sm_100a"),
    Mutant("tcgen05", 4, "expects 16 bytes too many", (Deadlock,), target="sm_100a"),
    Mutant("tcgen05", 5, "the wrong swizzle", (WrongResult,), target="sm_100a"),
    Mutant(
        "tcgen05",
        6,
        "multiplies before the tiles are there",
        (UnwaitedResult, UninitialisedRead, SharedRace, BarrierMisuse),
        target="sm_100a",
    ),
    Mutant("tcgen05", 7, "adds to what nothing wrote", (UninitialisedRead,), target="sm_100a"),
    Mutant("tcgen05", 8, "a stage is never given back", (Deadlock,), target="sm_100a"),
    Mutant("tcgen05", 9, "reads before the product is done", (UninitialisedRead, WrongResult), False, "sm_100a"),
    Mutant("tcgen05", 10, "a quarter that the warp cannot reach", (IllegalInstruction,), target="sm_100a"),
    Mutant("tcgen05", 11, "reads past its columns", (OutOfBounds,), target="sm_100a"),
    Mutant("tcgen05", 12, "uses registers in flight", (UnwaitedResult,), target="sm_100a"),
    Mutant("tcgen05", 13, "keeps its tensor memory", (TensorMemoryLeak,), target="sm_100a"),
    Mutant("tcgen05", 14, "gives half of it back", (TensorMemoryLeak,), target="sm_100a"),
    Mutant("tcgen05", 15, "changes an operand in use", (SharedRace,), target="sm_100a"),
    Mutant("tcgen05", 16, "another warp changes an operand, behind a barrier", (SharedRace,), target="sm_100a"),
]


def outcome(mutant: Mutant, order: str, seed: int) -> Exception | None:
    """What a run of the mutant raises; None when it went unnoticed."""
    options = Options(order=order, seed=seed, max_instructions=200_000)
    try:
        run(mutant.kernel, mutant.number, mutant.target, options)
    except (EmulatorError, WrongResult) as error:
        return error
    return None


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_a_mutant_is_caught(mutant):
    outcomes = {f"{order} {seed}": outcome(mutant, order, seed) for order, seed in ORDERS}
    caught = {order: error for order, error in outcomes.items() if error is not None}
    assert caught, "no order of completion shows it"
    if mutant.always:
        assert len(caught) == len(outcomes), f"only {sorted(caught)} show it"
    for order, error in caught.items():
        assert isinstance(error, mutant.caught_by), f"{order}: {type(error).__name__}: {error}"
        if isinstance(error, EmulatorError) and not isinstance(error, (AsyncInFlight, TensorMemoryLeak)):
            assert error.line, f"{order}: {type(error).__name__} names no line: {error}"


CLEAN = [(kernel, "sm_90a") for kernel in ("global", "shared", "named", "copy", "bulk", "handover", "cluster", "wgmma")]
CLEAN += [("tcgen05", "sm_100a"), ("tcgen05", "sm_103a"), ("cluster", "sm_100a"), ("bulk", "sm_100a")]


@pytest.mark.parametrize(("kernel", "target"), CLEAN)
def test_the_kernel_that_mutants_are_made_from_is_clean(kernel, target):
    for order, seed in [*ORDERS, ("random", 4), ("random", 5)]:
        run(kernel, 0, target, Options(order=order, seed=seed))


@pytest.mark.parametrize(("order", "seed"), ORDERS)
def test_one_thread_speaks_for_its_warpgroup_after_the_wait(order, seed):
    run("wgmma", 15, "sm_90a", Options(order=order, seed=seed))


def ptx(body: str, directives: str = "") -> str:
    head = ".version 8.7\n.target sm_90a\n.address_size 64\n"
    return f"{head}.visible .entry k() {directives}\n{{\n{body}\nret;\n}}\n"


def test_an_unknown_instruction_is_named_before_anything_runs():
    with pytest.raises(UnsupportedInstruction, match=r"frobnicate\.u32") as caught:
        Module.from_ptx(ptx(".reg .b32 r;\nfrobnicate.u32 r, r;"))
    assert caught.value.line == 7


def test_an_unknown_modifier_is_named_before_anything_runs():
    with pytest.raises(UnsupportedInstruction, match="purple"):
        Module.from_ptx(ptx(".reg .b32 r;\nadd.purple.u32 r, r, r;"))


def test_a_text_that_cannot_be_read_names_its_line():
    with pytest.raises(PtxSyntaxError) as caught:
        Module.from_ptx(ptx(".reg .b32 r;\nmov.u32 r, unknown_name;"))
    assert caught.value.line == 7


def test_a_deadlock_names_the_source_line_of_every_waiting_warp():
    with pytest.raises(Deadlock) as caught:
        run("named", 1, "sm_90a", Options())
    text = str(caught.value)
    source = (KERNELS / "simple_mutants.cu").read_text().splitlines()
    line = next(k for k, row in enumerate(source, 1) if 'else asm volatile("bar.sync 1, 128;"' in row)
    assert f"source line {line}" in text
    assert "warp 2" in text
    assert "warp 3" in text
