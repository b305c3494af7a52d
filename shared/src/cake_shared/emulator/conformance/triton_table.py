"""The emulator judged by code of another author: PTX that Triton compiles offline, for four architectures.

``python -m cake_shared.emulator.conformance.triton_table --out FILE`` compiles every row for every architecture, runs
it in the emulator and compares with NumPy. Triton (the pinned version) is needed for this alone; no GPU, no ptxas.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
import re
import sys
import tempfile
import time
from collections.abc import Callable

import numpy as np

from cake_shared.emulator.conformance import rounding as rd
from cake_shared.emulator.conformance.model import widen
from cake_shared.emulator.conformance.runner import environment

TRITON_VERSION = "3.9.0"
TARGETS = {90: "sm_90a", 100: "sm_100a", 103: "sm_103a", 107: "sm_107a"}
Array = np.ndarray


@dataclasses.dataclass(frozen=True)
class Row:
    """One kernel with its constants: how to compile it, what to feed it and how far the result may be off.

    ``signature`` has Triton's types by argument name, ``constants`` its constexpr arguments. ``inputs`` makes the
    arguments in order (arrays, integers, or TensorArg); the last array is the output. ``judge`` maps the inputs to
    (expected float64, bound).
    """

    name: str
    kernel: str
    signature: dict[str, str]
    constants: dict[str, int]
    inputs: Callable[[np.random.Generator], list[object]]
    judge: Callable[[list[object]], tuple[Array, Array]]
    output_dtype: str
    grid: tuple[int, int, int] = (1, 1, 1)
    warps: int = 4
    stages: int = 2


@dataclasses.dataclass(frozen=True)
class TensorArg:
    """An argument that the kernel takes as a tensor map: ``array`` is 2-d, its box and swizzle come from Triton."""

    array: Array


def _bf16(values: Array) -> Array:
    return rd.bf16_round(values)


def _encode(values: Array, kind: str) -> Array:
    if kind == "bf16":
        return _bf16(values)
    return values.astype(np.float16).view(np.uint16) if kind == "fp16" else values.astype(np.float32)


def _decode(array: Array, kind: str) -> Array:
    if kind == "fp32":  # the tensor core reads the upper 19 bits
        return (array.view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)
    return widen(array, {"bf16": "bf16", "fp16": "f16"}[kind])


def _product_bound(x: Array, y: Array, kind: str) -> Array:
    magnitude = np.abs(x) @ np.abs(y)
    # TF32 operands are truncated or rounded to 10 bits, as the compiler chooses; sums are FP32 in any order.
    unit = 2.0**-9 if kind == "fp32" else 0.0
    return ((x.shape[1] + 1) * 2.0**-23 + unit) * magnitude + 1e-30


def _matmul(
    name: str,
    m: int,
    n: int,
    k: int,
    block: tuple[int, int, int],
    kind: str,
    layout: str,
    warps: int = 4,
    stages: int = 2,
) -> Row:
    """``layout``: two letters, n or t, for a and b: t is stored transposed."""
    unit_strides = {"sak" if layout[0] == "n" else "sam": 1, "sbn" if layout[1] == "n" else "sbk": 1}
    signature = {"a": f"*{kind}", "b": f"*{kind}", "c": "*fp32"}
    signature |= {s: "i32" for s in ("m", "n", "k", "sam", "sak", "sbk", "sbn", "scm") if s not in unit_strides}
    constants = {**unit_strides, "BM": block[0], "BN": block[1], "BK": block[2]}

    def inputs(rng: np.random.Generator) -> list[object]:
        a = _encode(rng.normal(size=(m, k)), kind)
        b = _encode(rng.normal(size=(k, n)), kind)
        a_stored = np.ascontiguousarray(a if layout[0] == "n" else a.T)
        b_stored = np.ascontiguousarray(b if layout[1] == "n" else b.T)
        strides = {"sam": k, "sak": m, "sbk": n, "sbn": k, "scm": n, "m": m, "n": n, "k": k}
        scalars = [strides[s] for s in ("m", "n", "k", "sam", "sak", "sbk", "sbn", "scm") if s not in unit_strides]
        return [a_stored, b_stored, np.full((m, n), np.nan, np.float32), *scalars]

    def judge(arguments: list[object]) -> tuple[Array, Array]:
        a, b = (_decode(x, kind) for x in arguments[:2])
        x, y = (a if layout[0] == "n" else a.T), (b if layout[1] == "n" else b.T)
        return x @ y, _product_bound(x, y, kind)

    grid = (-(-m // block[0]), -(-n // block[1]), 1)
    return Row(name, "matmul", signature, constants, inputs, judge, "f32", grid, warps, stages)


def _chained(size: int) -> Row:
    def inputs(rng: np.random.Generator) -> list[object]:
        a, b, c = (_bf16(rng.normal(size=(size, size))) for _ in range(3))
        return [a, b, c, np.full((size, size), np.nan, np.float32)]

    def judge(arguments: list[object]) -> tuple[Array, Array]:
        a, b, c = (widen(x, "bf16") for x in arguments[:3])
        middle = a @ b
        rounded = widen(_bf16(middle), "bf16")
        # A middle element may round to the neighbouring BF16 where the FP32 sum differs by its order.
        slack = 2.0**-8 * np.abs(middle) * (np.abs(middle - rounded) > 0.499 * 2.0**-8 * np.abs(middle))
        return rounded @ c, _product_bound(rounded, c, "bf16") + slack @ np.abs(c) + 1e-3

    signature = dict.fromkeys("abc", "*bf16") | {"d": "*fp32"}
    return Row(f"chained {size}", "chained", signature, {"N": size}, inputs, judge, "f32")


def _tensor_matmul(m: int, n: int, k: int, block: tuple[int, int, int]) -> Row:
    bm, bn, bk = block
    signature = {
        "a": f"tensordesc<bf16[{bm},{bk}]>",
        "b": f"tensordesc<bf16[{bk},{bn}]>",
        "c": f"tensordesc<bf16[{bm},{bn}]>",
        "k": "i32",
    }

    def inputs(rng: np.random.Generator) -> list[object]:
        a, b = _bf16(rng.normal(size=(m, k))), _bf16(rng.normal(size=(k, n)))
        return [TensorArg(a), TensorArg(b), TensorArg(np.full((m, n), 0xFFFF, np.uint16)), k]

    def judge(arguments: list[object]) -> tuple[Array, Array]:
        a, b = (widen(x.array, "bf16") for x in arguments[:2])
        exact = a @ b
        return exact, _product_bound(a, b, "bf16") + 2.0**-8 * np.abs(exact)

    grid = (-(-m // bm), -(-n // bn), 1)
    constants = {"BM": bm, "BN": bn, "BK": bk}
    return Row(f"tensor maps {m}x{n}x{k}", "tensor_matmul", signature, constants, inputs, judge, "bf16", grid)


def _row_sum(rows: int, n: int) -> Row:
    def inputs(rng: np.random.Generator) -> list[object]:
        return [_bf16(rng.normal(size=(rows, n))), np.full(rows, np.nan, np.float32), n, n]

    def judge(arguments: list[object]) -> tuple[Array, Array]:
        x = widen(arguments[0], "bf16")
        return x.sum(1), n * 2.0**-24 * np.abs(x).sum(1)

    signature = {"x": "*bf16", "y": "*fp32", "n": "i32", "stride": "i32"}
    return Row(f"row sum of {n}", "row_sum", signature, {"B": 1024}, inputs, judge, "f32", (rows, 1, 1))


def _softmax(rows: int, n: int, block: int) -> Row:
    def inputs(rng: np.random.Generator) -> list[object]:
        return [_bf16(3 * rng.normal(size=(rows, n))), np.full((rows, n), 0xFFFF, np.uint16), n, n]

    def judge(arguments: list[object]) -> tuple[Array, Array]:
        x = widen(arguments[0], "bf16")
        power = np.exp(x - x.max(1, keepdims=True))
        expected = power / power.sum(1, keepdims=True)
        return expected, (2.0**-8 + 1e-5) * expected + 1e-30

    signature = {"x": "*bf16", "y": "*bf16", "n": "i32", "stride": "i32"}
    return Row(f"softmax of {n}", "softmax", signature, {"B": block}, inputs, judge, "bf16", (rows, 1, 1))


ROWS = [
    _matmul("bf16 128x128x64 nn, 256x128x320", 256, 128, 320, (128, 128, 64), "bf16", "nn"),
    _matmul("bf16 64x64x64 nt, 96x80x144", 96, 80, 144, (64, 64, 64), "bf16", "nt"),
    _matmul("bf16 128x64x32 tn, 8 warps, 3 stages", 128, 128, 160, (128, 64, 32), "bf16", "tn", 8, 3),
    _matmul("bf16 64x128x64 tt", 64, 128, 128, (64, 128, 64), "bf16", "tt"),
    _matmul("fp16 32x32x32 nn", 64, 64, 96, (32, 32, 32), "fp16", "nn"),
    _matmul("fp16 128x128x32 nn, 4 stages", 128, 128, 256, (128, 128, 32), "fp16", "nn", 4, 4),
    _matmul("fp32 as tf32 64x64x32 nn", 64, 64, 96, (64, 64, 32), "fp32", "nn"),
    _matmul("bf16 16x64x64 nn", 16, 64, 128, (16, 64, 64), "bf16", "nn"),
    _chained(64),
    _chained(128),
    _tensor_matmul(256, 128, 192, (128, 128, 64)),
    _tensor_matmul(64, 64, 128, (64, 64, 32)),
    _row_sum(5, 3000),
    _softmax(4, 1000, 1024),
    _softmax(3, 300, 512),
]


@dataclasses.dataclass(frozen=True)
class Compiled:
    """What Triton made of a row for one architecture."""

    ptx: str
    shared_bytes: int
    tensor_maps: list[dict]


def compile_row(row: Row, architecture: int) -> Compiled:
    """Compile a row offline for ``architecture`` (90, 100, 103 or 107)."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from cake_shared.emulator.conformance import triton_kernels

    if triton.__version__ != TRITON_VERSION:
        raise RuntimeError(f"triton: got {triton.__version__}, this table is for {TRITON_VERSION}")
    # Strides that are passed as arguments are multiples of 16 in every row, as are pointers.
    divisible = {(i,): [["tt.divisibility", 16]] for i, t in enumerate(row.signature.values()) if t[0] in "*i"}
    source = ASTSource(
        fn=getattr(triton_kernels, row.kernel),
        signature=row.signature | dict.fromkeys(row.constants, "constexpr"),
        constexprs=row.constants,
        attrs=divisible if row.kernel in ("matmul", "chained") else {},
    )
    options = {"num_warps": row.warps, "num_stages": row.stages}
    result = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    return Compiled(result.asm["ptx"], result.metadata.shared, result.metadata.tensordesc_meta or [])


def _parameters(arguments: list[object], compiled: Compiled) -> tuple[list[object], list[Array]]:
    from cake_shared.emulator import tensor_map

    params: list[object] = []
    allocations: list[Array] = []
    maps = iter(compiled.tensor_maps)
    for argument in arguments:
        if isinstance(argument, TensorArg):
            meta, array = next(maps), argument.array
            box = tuple(meta["block_size"][::-1])
            swizzle = ("none", "32B", "64B", "128B")[meta["swizzle"]]
            encoded = tensor_map(
                array, box, swizzle=swizzle, dims=array.shape[::-1], strides_bytes=(array.strides[0],), dtype="bf16"
            )
            params += [encoded, *array.shape, *(s // array.itemsize for s in array.strides)]
            allocations.append(array)
        else:
            params.append(argument)
    scratch = np.zeros(256, np.uint8)  # Triton's two trailing pointers; these kernels ask for no bytes of either
    return [*params, scratch, scratch], allocations


def run_row(row: Row, architecture: int, compiled: Compiled, options: object | None = None) -> dict:
    """Run a compiled row in the emulator and compare with NumPy: worst error, and as a fraction of its bound."""
    from cake_shared.emulator import Module, Options

    arguments = row.inputs(np.random.default_rng(7))
    module = Module.from_ptx(compiled.ptx, target=TARGETS[architecture], name=f"{row.kernel}.ptx")
    params, allocations = _parameters(arguments, compiled)
    report = module.launch(
        row.kernel,
        grid=row.grid,
        block=(32 * row.warps, 1, 1),
        smem_bytes=compiled.shared_bytes,
        params=params,
        allocations=allocations,
        options=options if options is not None else Options(),
    )
    arrays = [a.array if isinstance(a, TensorArg) else a for a in arguments if not isinstance(a, int)]
    got = widen(arrays[-1].view(np.uint32 if row.output_dtype == "f32" else np.uint16), row.output_dtype)
    expected, bound = row.judge(arguments)
    with np.errstate(invalid="ignore"):
        error = np.abs(got - expected)
        fraction = np.where(np.isnan(error), np.inf, error / bound)
    return {
        "elements": int(got.size),
        "worst_error": float(np.nanmax(error)),
        "worst_error_as_fraction_of_bound": float(fraction.max()),
        "outside": int((fraction > 1).sum()),
        "warp_instructions": int(report.instructions),
    }


def matrix_opcodes(ptx: str) -> list[str]:
    """The matrix, copy and synchronisation opcodes of a PTX text, for the result file: what the row exercises."""
    found = re.findall(r"\b((?:tcgen05|wgmma|mma|ldmatrix|stmatrix|cp\.async|mbarrier)\.[\w.:]*)", ptx)
    return sorted(set(found))


def judged(row: Row, architecture: int, compiled: Compiled, order: str, seed: int) -> dict:
    """Run with all detectors, and again with the cheap ones where the compiler uses tcgen05.ld's results early.

    LLVM moves uses of a tcgen05.ld above the wait that should come before them. The PTX ISA forbids that, the
    hardware's scoreboard forgives it; the detector is right to report it, and the row is judged without it.
    """
    from cake_shared.emulator import EmulatorError, Options, UnwaitedResult

    try:
        return run_row(row, architecture, compiled, Options(order=order, seed=seed))
    except UnwaitedResult as error:
        if "tcgen05.ld" not in str(error):
            return {"error": f"{type(error).__name__}: {error}"}
        reported = str(error)
    except EmulatorError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    try:
        outcome = run_row(row, architecture, compiled, Options(order=order, seed=seed, detect="cheap"))
    except EmulatorError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    here = f"{pathlib.Path(__file__).parent}/"  # where the kernels lie says nothing on another machine
    return outcome | {"detect": "cheap", "reported_by_all": reported.split(" [")[0].replace(here, "")}


def main(argv: list[str] | None = None) -> int:
    """Compile and run the whole table; the exit status says whether every row is right everywhere."""
    parser = argparse.ArgumentParser(
        prog="python -m cake_shared.emulator.conformance.triton_table", description=__doc__
    )
    parser.add_argument("--out", type=pathlib.Path, help="write the results here as JSON")
    parser.add_argument("--only", default="", help="only rows whose name contains this text")
    parser.add_argument("--arch", type=int, choices=sorted(TARGETS), help="only this architecture")
    arguments = parser.parse_args(argv)
    orders = [("eager", 0), ("lazy", 0), ("random", 1), ("random", 2)]
    table, wrong = {}, 0
    with tempfile.TemporaryDirectory() as cache:
        import triton

        triton.knobs.cache.dir = cache
        for architecture in [arguments.arch] if arguments.arch else sorted(TARGETS):
            for row in ROWS:
                if arguments.only not in row.name:
                    continue
                compiled = compile_row(row, architecture)
                entry: dict = {"opcodes": matrix_opcodes(compiled.ptx), "orders": {}}
                for order, seed in orders:
                    label = order if order != "random" else f"random {seed}"
                    outcome = judged(row, architecture, compiled, order, seed)
                    good = outcome.get("outside") == 0
                    wrong += not good
                    entry["orders"][label] = outcome
                    text = outcome.get("error") or f"{outcome['worst_error_as_fraction_of_bound']:.3f} of the bound"
                    print(
                        f"{'right' if good else 'WRONG'} {TARGETS[architecture]} {row.name}, {label}: {text}",
                        flush=True,
                    )
                table.setdefault(TARGETS[architecture], {})[row.name] = entry
    runs = sum(len(e["orders"]) for rows in table.values() for e in rows.values())
    print(f"{runs - wrong} of {runs} runs right")
    if arguments.out:
        facts = environment(False) | {
            "triton": TRITON_VERSION,
            "utc": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        arguments.out.write_text(json.dumps({"environment": facts, "targets": table}, indent=1) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
