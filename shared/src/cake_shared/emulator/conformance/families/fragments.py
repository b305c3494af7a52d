"""Where the elements of a matrix live: register fragments of mma.sync and wgmma, canonical shared-memory layouts.

Written from the fragment figures and the canonical-layout table of the PTX ISA, independently of the emulator.
"""

from __future__ import annotations

import numpy as np

from cake_shared.emulator.conformance import rounding as rd
from cake_shared.emulator.conformance.families.convert import _fp8_bits, _fp8_values
from cake_shared.emulator.conformance.families.tensor_copies import swizzle

Array = np.ndarray
LANES = np.arange(32)
GROUP, THREAD = LANES // 4, LANES % 4
ELEMENT_BYTES = {"f16": 2, "bf16": 2, "tf32": 4, "e4m3": 1, "e5m2": 1, "s8": 1, "u8": 1, "f64": 8}


def a_fragment(element_bytes: int, k: int) -> tuple[Array, Array]:
    """(rows, columns), each [32 lanes, elements], of a 16 x k operand A of mma.sync or of one warp of a wgmma."""
    per = 4 // element_bytes if element_bytes < 4 else 1
    count = 16 * k // 32
    index = np.arange(count)
    inner, register = index % per, index // per
    rows = GROUP[:, None] + 8 * (register % 2)[None, :]
    columns = THREAD[:, None] * per + inner[None, :] + (4 * per * (register // 2))[None, :]
    return rows, columns


def b_fragment(element_bytes: int, k: int) -> tuple[Array, Array]:
    """(k index, column), each [32 lanes, elements], of a k x 8 operand B of mma.sync."""
    per = 4 // element_bytes if element_bytes < 4 else 1
    count = k * 8 // 32
    index = np.arange(count)
    inner, register = index % per, index // per
    depth = THREAD[:, None] * per + inner[None, :] + (4 * per * register)[None, :]
    return depth, np.broadcast_to(GROUP[:, None], depth.shape)


def c_fragment(columns: int) -> tuple[Array, Array]:
    """(row, column), each [32 lanes, elements], of a 16 x columns accumulator of one warp."""
    index = np.arange(columns // 2)
    row = GROUP[:, None] + 8 * (index // 2 % 2)[None, :]
    column = 8 * (index // 4)[None, :] + 2 * THREAD[:, None] + (index % 2)[None, :]
    return row, column


def shared_offsets(
    rows: int, k: int, element_bytes: int, span_bytes: int, mn_major: bool, leading: int, stride: int
) -> Array:
    """Byte offset of every element [rows, k] of a wgmma operand in its canonical shared-memory layout.

    ``span_bytes`` is the swizzle (0 none, 32, 64, 128); ``leading`` and ``stride`` are the descriptor's byte offsets.
    The matrix must begin at a multiple of the swizzle's repeat.
    """
    r, c = np.meshgrid(np.arange(rows), np.arange(k), indexing="ij")
    chunk = 16 // element_bytes
    if not mn_major:
        if span_bytes == 0:
            return r // 8 * stride + r % 8 * 16 + c // chunk * leading + c % chunk * element_bytes
        linear = r // 8 * stride + r % 8 * span_bytes + c * element_bytes
        return swizzle(linear, span_bytes)
    if span_bytes == 0:
        return r // chunk * stride + r % chunk * element_bytes + c // 8 * leading + c % 8 * 16
    wide = span_bytes // element_bytes
    linear = r // wide * leading + r % wide * element_bytes + c // 8 * stride + c % 8 * span_bytes
    return swizzle(linear, span_bytes)


def encode(values: Array, kind: str) -> tuple[Array, Array]:
    """Values rounded to a matrix element type: (bit patterns, what the tensor core sees as float64)."""
    if kind in ("s8", "u8"):
        low, high = (-128, 127) if kind == "s8" else (0, 255)
        whole = np.clip(np.rint(values), low, high)
        return whole.astype(np.int64).astype(np.uint8), whole
    if kind == "f16":
        rounded = rd.round_to(values, 0.0, rd.F16, "rn")
        return rd.f16_bits(rounded), rounded
    if kind == "bf16":
        rounded = rd.round_to(values, 0.0, rd.BF16, "rn")
        return rd.bf16_bits(rounded), rounded
    if kind == "tf32":
        # The full FP32 word is stored; the tensor core reads its upper 19 bits.
        bits = rd.f32_bits(rd.round_to(values, 0.0, rd.F32, "rn")).astype(np.uint32)
        return bits, (bits & np.uint32(0xFFFFE000)).view(np.float32).astype(np.float64)
    if kind in ("e4m3", "e5m2"):
        fmt = rd.E4M3 if kind == "e4m3" else rd.E5M2
        bits = _fp8_bits(values, fmt).astype(np.uint8)
        return bits, _fp8_values(bits, fmt)
    if kind == "f64":
        return values.astype(np.float64).view(np.uint64), values.astype(np.float64)
    raise ValueError(f"kind: got {kind!r}, takes one of {sorted(ELEMENT_BYTES)}")


def sum_bound(a: Array, b: Array, c: Array, kind: str, d_kind: str) -> Array:
    """The largest error of a product sum accumulated in FP32 in any order, for a [m, k], b [k, n], c [m, n].

    Tensor cores add aligned, truncated terms: each of the k + 1 additions may lose one unit of the last place of the
    running magnitude, at most ``sum |a||b| + |c|``. FP16 results round once more; sums of 8-bit floats keep 13 bits.
    """
    magnitude = np.abs(a) @ np.abs(b) + np.abs(c)
    if d_kind == "s32":
        return np.zeros_like(magnitude)
    if d_kind == "f64":
        return (a.shape[1] + 1) * 2.0**-53 * magnitude
    unit = 2.0**-13 if kind in ("e4m3", "e5m2") else 2.0**-23
    bound = (a.shape[1] + 1) * unit * magnitude
    if d_kind == "f16":
        bound = bound + (a.shape[1] // 8 + 1) * 2.0**-10 * magnitude
    return bound + 2.0**-126


# Operands whose sums the emulator forms as an H200 does, with FP32 accumulators (FP64: its own).
SAME_BITS = ("bf16", "f16", "tf32", "e4m3", "e5m2", "f64")


def matrix(rng: np.random.Generator, shape: tuple[int, int], kind: str) -> tuple[Array, Array]:
    """A random operand: bits and float64 values."""
    if kind in ("s8", "u8"):
        return encode(rng.integers(-200, 300, shape).astype(np.float64), kind)
    return encode(rng.normal(size=shape) * np.exp2(rng.integers(-3, 4, shape)), kind)


def accumulator(rng: np.random.Generator, shape: tuple[int, int], kind: str) -> tuple[Array, Array]:
    """A random accumulator: bits and float64 values."""
    if kind == "s32":
        whole = rng.integers(-100000, 100000, shape)
        return whole.astype(np.int32).view(np.uint32), whole.astype(np.float64)
    if kind == "f32":
        values = rng.normal(size=shape).astype(np.float32)
        return values.view(np.uint32), values.astype(np.float64)
    if kind == "f16":
        return encode(rng.normal(size=shape), "f16")
    return encode(rng.normal(size=shape), "f64")


def words(bits: Array) -> Array:
    """A [lanes, elements] array of narrow elements as [lanes, registers] of 32 (or 64) bits, first element lowest."""
    if bits.itemsize == 8:
        return bits
    return np.ascontiguousarray(bits).view(np.uint32)
