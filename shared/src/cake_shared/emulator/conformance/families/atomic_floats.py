"""Floating-point atomics at the edges of their types: subnormals, infinities, NaN, signed zeros."""

from __future__ import annotations

import numpy as np

from cake_shared.emulator.conformance import nvcc
from cake_shared.emulator.conformance.model import Case, Check, Launch, Program, Ptr, is_nan_bits

Array = np.ndarray
THREADS = 64
_F32 = [
    0, 0x80000000, 1, 0x80000001, 0x007FFFFF, 0x807FFFFF, 0x00400000, 0x00800000, 0x80800000, 0x00800001, 0x80C00000,
    0x3F800000, 0xBF800000, 0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7FC01234, 0xFFC00001,
    0x7F800001, 0x7FFFFFFF,
]  # fmt: skip
_F16 = [
    0,
    0x8000,
    1,
    0x8001,
    0x03FF,
    0x83FF,
    0x0400,
    0x8400,
    0x3C00,
    0xBC00,
    0x7BFF,
    0x7C00,
    0xFC00,
    0x7E00,
    0xFE01,
    0x7C01,
]
_BF16 = [
    0,
    0x8000,
    1,
    0x8001,
    0x007F,
    0x807F,
    0x0080,
    0x8080,
    0x3F80,
    0xBF80,
    0x7F7F,
    0x7F80,
    0xFF80,
    0x7FC0,
    0xFFC1,
    0x7F81,
]
_F64 = [
    0, 1 << 63, 1, 1 << 63 | 1, 0x000FFFFFFFFFFFFF, 0x800FFFFFFFFFFFFF, 1 << 52, 1 << 63 | 1 << 52, 0x3FF0000000000000,
    0xBFF0000000000000, 0x7FEFFFFFFFFFFFFF, 0x7FF0000000000000, 0xFFF0000000000000, 0x7FF8000000000000,
    0xFFF8000000001234, 0x7FF0000000000001,
]  # fmt: skip


def _pairs(special: list[int], bits: int, tiny: int) -> tuple[Array, Array]:
    """Every pair of special patterns, then random ones of which half lie near the subnormals below ``tiny``."""
    kind = np.dtype(f"uint{bits}")
    values = np.array(special, np.uint64).astype(kind)
    a, b = np.repeat(values, len(values)), np.tile(values, len(values))
    rng = np.random.default_rng(bits)
    size = 512
    close = rng.integers(0, 4 * tiny, (2, size), dtype=np.uint64) | rng.integers(
        0, 2, (2, size), dtype=np.uint64
    ) << np.uint64(bits - 1)
    wide = rng.integers(0, 1 << bits, (2, size), dtype=np.uint64)
    a = np.concatenate([a, close[0].astype(kind), wide[0].astype(kind)])
    b = np.concatenate([b, close[1].astype(kind), wide[1].astype(kind)])
    fill = -len(a) % (2 * THREADS)
    return np.concatenate([a, np.zeros(fill, kind)]), np.concatenate([b, np.zeros(fill, kind)])


def _one_nan(bits: Array, dtype: str) -> Array:
    """The results with the pattern that an H200 gives to every NaN of these types."""
    return np.where(is_nan_bits(bits, dtype), np.iinfo(bits.dtype).max >> 1, bits).astype(bits.dtype)


def _flush(bits: Array) -> Array:
    return np.where(bits & 0x7F800000, bits, bits & 0x80000000).astype(np.uint32)


def _add32(a: Array, b: Array, *, flush: bool) -> Array:
    with np.errstate(all="ignore"):
        if not flush:
            return _one_nan((a.view(np.float32) + b.view(np.float32)).view(np.uint32), "f32")
        return _one_nan(_flush((_flush(a).view(np.float32) + _flush(b).view(np.float32)).view(np.uint32)), "f32")


def _floats() -> Case:
    a, b = _pairs(_F32, 32, 1 << 23)
    n = len(a)
    buffers = {"a": a, "b": b, "global": a.copy(), "returned": np.zeros(n, np.uint32), "shared": np.zeros(n, np.uint32)}
    buffers |= {"generic": np.zeros(n, np.uint32), "reduced": a.copy(), "pairs": np.stack([a, b], 1).reshape(-1)}
    flushed, kept = _add32(a, b, flush=True), _add32(a, b, flush=False)
    results = {"global": flushed, "returned": a, "shared": kept, "generic": kept, "reduced": flushed}
    results["pairs"] = np.repeat(flushed, 2)
    names = ("a", "b", "global", "returned", "shared", "generic", "reduced", "pairs")
    launch = Launch(
        "atomic_floats", (n // THREADS, 1, 1), (THREADS, 1, 1), tuple(Ptr(k, const=k in "ab") for k in names)
    )
    checks = [Check(k, k, "f32", len(v), expected=v) for k, v in results.items()]
    return Case(lambda: nvcc.ptx_of("atomic_floats.cu"), buffers, [launch], checks)


def _other(kernel: str, a: Array, b: Array, want: Array, dtype: str, threads: int) -> Case:
    buffers = {"a": a, "b": b, "global": a.copy(), "shared": np.zeros_like(a)}
    args = (Ptr("a", const=True), Ptr("b", const=True), Ptr("global"), Ptr("shared"))
    launch = Launch(kernel, (threads // THREADS, 1, 1), (THREADS, 1, 1), args)
    # FP64 sums pass a NaN on, which of two and whether quiet depends on the memory.
    rule = "nan" if dtype == "f64" else "bits"
    want = want if dtype == "f64" else _one_nan(want, dtype)
    checks = [Check(k, k, dtype, len(want), rule=rule, expected=want) for k in ("global", "shared")]
    return Case(lambda: nvcc.ptx_of("atomic_floats.cu"), buffers, [launch], checks)


def _doubles() -> Case:
    a, b = _pairs(_F64, 64, 1 << 52)
    with np.errstate(all="ignore"):
        want = (a.view(np.float64) + b.view(np.float64)).view(np.uint64)
    return _other("atomic_doubles", a, b, want, "f64", len(a))


def _halves() -> Case:
    a, b = _pairs(_F16, 16, 1 << 10)
    with np.errstate(all="ignore"):
        want = (a.view(np.float16) + b.view(np.float16)).view(np.uint16)
    return _other("atomic_halves", a, b, want, "f16", len(a) // 2)


def _bfloats() -> Case:
    from cake_shared.emulator.conformance import rounding

    a, b = _pairs(_BF16, 16, 1 << 7)
    with np.errstate(all="ignore"):
        exact = (a.astype(np.uint32) << 16).view(np.float32) + (b.astype(np.uint32) << 16).view(np.float32)
        want = rounding.bf16_round(exact)
    return _other("atomic_bfloats", a, b, want, "bf16", len(a) // 2)


PROGRAMS = [
    Program("atomics of fp32 at the edges", "atomics", _floats),
    Program("atomics of fp64 at the edges", "atomics", _doubles),
    Program("atomics of fp16 at the edges", "atomics", _halves),
    Program("atomics of bf16 at the edges", "atomics", _bfloats),
]
