"""Tensor copies (TMA, tiled mode): ranks 1 to 5, every swizzle, out-of-bounds fill, stores, reductions, multicast."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from cake_shared.emulator.conformance import ptx_text
from cake_shared.emulator.conformance import rounding as rd
from cake_shared.emulator.conformance.families.tensor_copies import (
    FILL_BYTE,
    THREADS,
    Copy,
    barrier_offset,
    join,
    load_kernel,
    multicast_kernel,
    store_kernel,
)
from cake_shared.emulator.conformance.model import Case, Check, Launch, Program, Ptr, Refusal, widen

Array = np.ndarray

LOADS = [
    Copy("1d u8", "u8", (100,), (64,), (16,)),
    Copy("1d f32 beyond the end", "f32", (50,), (32,), (40,)),
    Copy("1d f32 before the start", "f32", (50,), (32,), (-8,)),
    Copy("1d f64", "f64", (40,), (16,), (4,)),
    Copy("2d bf16 no swizzle", "bf16", (72, 20), (16, 8), (8, 4)),
    Copy("2d bf16 32B", "bf16", (72, 40), (16, 24), (8, 3), 32),
    Copy("2d bf16 64B", "bf16", (72, 40), (32, 24), (8, 2), 64),
    Copy("2d bf16 128B", "bf16", (136, 40), (64, 32), (64, 5), 128),
    Copy("2d bf16 128B all corners out", "bf16", (40, 10), (64, 16), (-8, -3), 128),
    Copy("2d bf16 entirely outside", "bf16", (40, 10), (16, 8), (64, 32)),
    Copy("2d f16 NaN fill 128B", "f16", (40, 10), (64, 16), (8, 4), 128, True),
    Copy("2d f32 NaN fill", "f32", (20, 6), (16, 8), (-4, 2), 0, True),
    Copy("2d bf16 NaN fill", "bf16", (20, 6), (16, 8), (8, -2), 32, True),
    Copy("2d f32 128B padded rows", "f32", (40, 20), (32, 16), (12, 2), 128, False, 48),
    Copy("2d u8 128B", "u8", (200, 20), (128, 8), (112, 9), 128),
    Copy("2d u32 64B", "u32", (30, 20), (16, 20), (20, 1), 64),
    Copy("2d u64 128B", "u64", (30, 9), (16, 8), (2, 2), 128),
    Copy("3d bf16 128B", "bf16", (72, 12, 5), (64, 8, 3), (24, 6, 3), 128),
    Copy("3d f32 64B", "f32", (20, 7, 6), (16, 4, 2), (-4, 5, 4), 64),
    Copy("4d u16 32B", "u16", (24, 5, 4, 3), (16, 4, 2, 2), (8, 2, -1, 2), 32),
    Copy("5d bf16", "bf16", (16, 5, 4, 3, 3), (8, 3, 2, 2, 2), (8, 3, 1, -1, 2)),
    Copy("5d f32 128B", "f32", (40, 3, 4, 3, 2), (32, 2, 2, 2, 2), (12, 2, 3, 1, 1), 128),
    Copy("2d bf16 element strides", "bf16", (64, 32), (16, 16), (8, 3), 0, False, 0, (1, 2)),
]

STORES = [
    Copy("1d u32", "u32", (50,), (32,), (28,)),
    Copy("2d bf16", "bf16", (40, 20), (16, 8), (32, 15)),
    Copy("2d bf16 32B", "bf16", (40, 20), (16, 8), (32, 14), 32),
    Copy("2d bf16 64B", "bf16", (72, 40), (32, 16), (48, 30), 64),
    Copy("2d bf16 128B", "bf16", (136, 40), (64, 16), (64, 5), 128),
    Copy("2d f32 128B", "f32", (40, 20), (32, 16), (20, 10), 128),
    Copy("3d u8 128B", "u8", (144, 6, 4), (128, 4, 2), (32, 3, 1), 128),
    Copy("4d f32", "f32", (20, 4, 3, 3), (8, 2, 2, 2), (16, 3, 2, 0)),
    Copy("5d u64 64B", "u64", (12, 3, 3, 2, 2), (8, 2, 2, 2, 2), (6, 2, 2, 1, 1), 64),
]


def _integer_reduction(operation: str, signed: str | None) -> Callable[[Array, Array], Array]:
    functions = {
        "add": lambda a, b: a + b,
        "min": np.minimum,
        "max": np.maximum,
        "and": lambda a, b: a & b,
        "or": lambda a, b: a | b,
        "xor": lambda a, b: a ^ b,
        "inc": lambda a, b: np.where(a >= b, 0, a + 1).astype(a.dtype),
        "dec": lambda a, b: np.where((a == 0) | (a > b), b, a - 1).astype(a.dtype),
    }
    function = functions[operation]
    if signed is None:
        return function
    return lambda a, b: function(a.view(signed), b.view(signed)).view(a.dtype)


def _half_reduction(kind: str, operation: str) -> Callable[[Array, Array], Array]:
    fmt, bits = {"f16": (rd.F16, rd.f16_bits), "bf16": (rd.BF16, rd.bf16_bits)}[kind]
    function = {"add": lambda x, y: x + y, "min": np.minimum, "max": np.maximum}[operation]
    return lambda a, b: bits(rd.round_to(function(widen(a, kind), widen(b, kind)), 0.0, fmt, "rn"))


def _f32_add(a: Array, b: Array) -> Array:
    return (a.view(np.float32) + b.view(np.float32)).view(np.uint32)


REDUCTIONS: list[tuple[str, Copy, Callable[[Array, Array], Array]]] = [
    (op, Copy(f"{op} u32", "u32", (40, 12), (16, 8), (28, 6), 64), _integer_reduction(op, None))
    for op in ("add", "min", "max", "and", "or", "xor", "inc", "dec")
]
REDUCTIONS += [
    ("add", Copy("add s32", "s32", (40, 12), (16, 8), (28, 6)), _integer_reduction("add", None)),
    ("min", Copy("min s32", "s32", (40, 12), (16, 8), (28, 6)), _integer_reduction("min", "int32")),
    ("max", Copy("max s32", "s32", (40, 12), (16, 8), (28, 6)), _integer_reduction("max", "int32")),
    ("add", Copy("add u64", "u64", (40, 12), (16, 8), (28, 6)), _integer_reduction("add", None)),
    ("min", Copy("min s64", "s64", (40, 12), (16, 8), (28, 6)), _integer_reduction("min", "int64")),
    ("add", Copy("add f32 128B", "f32", (40, 12), (32, 8), (20, 6), 128), _f32_add),
]
REDUCTIONS += [
    (op, Copy(f"{op} {kind} 128B", kind, (72, 12), (64, 8), (16, 6), 128), _half_reduction(kind, op))
    for kind in ("f16", "bf16")
    for op in ("add", "min", "max")
]


def _tensors(copies: list[Copy], seed: int, floats_tame: bool = False) -> list[Array]:
    rng = np.random.default_rng(seed)
    tensors = []
    for copy in copies:
        data = rng.integers(0, 256, copy.tensor_bytes, dtype=np.uint8)
        if floats_tame and copy.dtype in ("f16", "bf16", "f32"):
            values = rng.normal(size=copy.tensor_bytes // copy.itemsize).astype(np.float32)
            bits = {"f32": lambda v: v.view(np.uint32), "f16": lambda v: v.astype(np.float16), "bf16": rd.bf16_round}
            data = np.ascontiguousarray(bits[copy.dtype](values)).view(np.uint8)
        tensors.append(data)
    return tensors


def _coordinates(copy: Copy) -> tuple[np.int32, ...]:
    return tuple(np.int32(c) for c in copy.at)


def build_loads() -> Case:
    """Every load of ``LOADS``."""
    joined, offsets = join(_tensors(LOADS, 11))
    out, out_offsets = join([np.zeros(c.box_bytes, np.uint8) for c in LOADS])
    launches, checks, entries = [], [], []
    for i, copy in enumerate(LOADS):
        entries.append(load_kernel(f"load{i}", copy))
        tensor = joined[offsets[i] : offsets[i] + copy.tensor_bytes]
        args = (copy.map_arg("tensor", offsets[i]), Ptr("out", out_offsets[i]), *_coordinates(copy))
        shared_bytes = barrier_offset(copy.box_bytes) + 16
        launches.append(Launch(f"load{i}", (1, 1, 1), (THREADS, 1, 1), args, shared_bytes=shared_bytes))
        checks.append(Check(copy.name, "out", "b8", copy.box_bytes, out_offsets[i], "bits", copy.loaded(tensor)))
    return Case(lambda: ptx_text.module(*entries), {"tensor": joined, "out": out}, launches, checks)


def _build_writes(rows: list[tuple[str | None, Copy, Callable[[Array, Array], Array] | None]], seed: int) -> Case:
    copies = [copy for _, copy, _ in rows]
    tensors = _tensors(copies, seed, floats_tame=True)
    joined, offsets = join(tensors)
    rng = np.random.default_rng(seed + 1)
    images = []
    for copy in copies:
        twin = dataclasses.replace(copy, dims=(copy.box_bytes // copy.itemsize,), box=(16,), at=(0,), pad_bytes=0)
        images.append(_tensors([twin], int(rng.integers(1 << 30)), floats_tame=True)[0][: copy.box_bytes])
    sources, source_offsets = join(images)
    launches, checks, entries = [], [], []
    for i, (operation, copy, combine) in enumerate(rows):
        entries.append(store_kernel(f"write{i}", copy, operation))
        args = (copy.map_arg("tensor", offsets[i]), Ptr("source", source_offsets[i], const=True), *_coordinates(copy))
        launches.append(Launch(f"write{i}", (1, 1, 1), (THREADS, 1, 1), args, shared_bytes=copy.box_bytes))
        expected = copy.stored(tensors[i], images[i], combine)
        checks.append(Check(copy.name, "tensor", "b8", copy.tensor_bytes, offsets[i], "bits", expected))
    return Case(lambda: ptx_text.module(*entries), {"tensor": joined, "source": sources}, launches, checks)


def build_stores() -> Case:
    """Every store of ``STORES``."""
    return _build_writes([(None, copy, None) for copy in STORES], 21)


def build_reductions() -> Case:
    """Every reduction of ``REDUCTIONS``."""
    return _build_writes(list(REDUCTIONS), 31)


MULTICASTS = [
    (2, 0b11, Copy("2 CTAs", "bf16", (72, 20), (64, 8), (16, 15), 128)),
    (4, 0b1011, Copy("3 of 4 CTAs", "f32", (40, 20), (16, 8), (-4, 3), 64)),
]


def build_multicasts() -> Case:
    """Multicast loads into clusters; CTAs outside of the mask keep what they had."""
    copies = [copy for _, _, copy in MULTICASTS]
    joined, offsets = join(_tensors(copies, 41))
    out, out_offsets = join([np.zeros(c.box_bytes * size, np.uint8) for size, _, c in MULTICASTS])
    launches, checks, entries = [], [], []
    for i, (size, mask, copy) in enumerate(MULTICASTS):
        entries.append(multicast_kernel(f"multicast{i}", copy, mask))
        tensor = joined[offsets[i] : offsets[i] + copy.tensor_bytes]
        args = (copy.map_arg("tensor", offsets[i]), Ptr("out", out_offsets[i]), *_coordinates(copy))
        shared_bytes = barrier_offset(copy.box_bytes) + 16
        launches.append(
            Launch(
                f"multicast{i}", (size, 1, 1), (THREADS, 1, 1), args, cluster=(size, 1, 1), shared_bytes=shared_bytes
            )
        )
        untouched = np.full(copy.box_bytes, FILL_BYTE, np.uint8)
        images = [copy.loaded(tensor) if mask >> rank & 1 else untouched for rank in range(size)]
        expected = np.concatenate(images)
        checks.append(Check(copy.name, "out", "b8", expected.size, out_offsets[i], "bits", expected))
    return Case(lambda: ptx_text.module(*entries), {"tensor": joined, "out": out}, launches, checks)


def _build_refused(copy: Copy, store: bool) -> Case:
    """A copy that an H200 answers with an illegal instruction."""
    args = (copy.map_arg("tensor"), Ptr("data", const=store), *_coordinates(copy))
    launch = Launch("k", (1, 1, 1), (THREADS, 1, 1), args, shared_bytes=barrier_offset(copy.box_bytes) + 16)
    buffers = {"tensor": np.zeros(copy.tensor_bytes, np.uint8), "data": np.zeros(copy.box_bytes, np.uint8)}
    refused = Refusal("IllegalInstruction", "CUDA_ERROR_ILLEGAL_INSTRUCTION")
    kernel = store_kernel("k", copy) if store else load_kernel("k", copy)
    return Case(lambda: ptx_text.module(kernel), buffers, [launch], [], refused)


# Starts of the innermost dimension that are no multiple of 16 bytes; and, for stores alone, negative ones in any.
REFUSED = [
    (False, Copy("unaligned start, before the tensor", "f32", (50, 8), (32, 4), (-9, 0))),
    (False, Copy("unaligned start, inside", "bf16", (72, 20), (64, 8), (3, 2), 128)),
    (True, Copy("store, negative inner start", "bf16", (40, 20), (16, 8), (-8, 2), 32)),
    (True, Copy("store, negative outer start", "f32", (20, 4, 3, 3), (8, 2, 2, 2), (16, -1, 2, 0))),
    (True, Copy("store, negative outermost start", "u64", (12, 3, 3, 2, 2), (8, 2, 2, 2, 2), (2, 2, 1, -1, 1), 64)),
]

PROGRAMS = [
    *(
        Program(f"tensor copy refused: {copy.name}", "tensor copies", lambda c=copy, s=store: _build_refused(c, s))
        for store, copy in REFUSED
    ),
    Program("tensor copy loads", "tensor copies", build_loads),
    Program("tensor copy stores", "tensor copies", build_stores),
    Program("tensor copy reductions", "tensor copies", build_reductions),
    Program("tensor copy multicast", "tensor copies", build_multicasts),
]
