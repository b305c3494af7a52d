"""Exact rounding of values to narrow formats, for references: every IEEE direction, subnormals, saturation.

A value comes as ``high + low`` of two float64 with ``|low| <= ulp(high) / 2``, which holds sums, differences and fused
multiply-adds of FP32 numbers exactly (Knuth's two-sum; a product of two FP32 numbers fits one float64).
"""

from __future__ import annotations

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True)
class Format:
    """A binary floating-point format: ``precision`` bits of significand and the exponent of its smallest normal."""

    name: str
    precision: int
    min_exponent: int
    max_finite: float


F32 = Format("f32", 24, -126, float(np.finfo(np.float32).max))
F16 = Format("f16", 11, -14, 65504.0)
BF16 = Format("bf16", 8, -126, float.fromhex("0x1.fep127"))
TF32 = Format("tf32", 11, -126, float.fromhex("0x1.ffcp127"))
E4M3 = Format("e4m3", 4, -6, 448.0)
E5M2 = Format("e5m2", 3, -14, 57344.0)


def two_sum(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """``a + b`` exactly as high + low (Knuth 1969)."""
    high = a + b
    bb = high - a
    low = (a - (high - bb)) + (b - bb)
    return high, np.where(np.isfinite(high), low, 0.0)


def round_to(high: np.ndarray, low: np.ndarray | float, fmt: Format, mode: str) -> np.ndarray:
    """Round ``high + low`` to ``fmt`` and return it as float64.

    ``mode``: ``rn`` nearest even, ``rna`` nearest away from zero, ``rz``, ``rm`` (down), ``rp`` (up). Overflow follows
    IEEE 754: to infinity or to the largest finite value, as the direction says.
    """
    high = np.asarray(high, np.float64)
    low = np.broadcast_to(np.asarray(low, np.float64), high.shape)
    finite = np.isfinite(high)
    value = np.where(finite, high, 0.0)
    mantissa, exponent = np.frexp(value)
    # Just inside of a power of two the spacing is that of the binade below.
    inside = (np.abs(mantissa) == 0.5) & (np.sign(low) * np.sign(value) < 0)
    exponent = np.where(value == 0, fmt.min_exponent, exponent - inside)
    step_exponent = np.maximum(exponent - fmt.precision, fmt.min_exponent - fmt.precision + 1)
    scaled = np.ldexp(value, -step_exponent)
    # |low| is below one unit in the last place of `high`, so its sign alone decides next to an integer or a tie.
    low_sign = np.where(finite, np.sign(low), 0.0)
    floor = np.floor(scaled)
    rest = scaled - floor
    crossed = (rest == 0) & (low_sign < 0)
    floor = np.where(crossed, floor - 1, floor)
    rest = np.where(crossed, 1.0, rest)
    inexact = (rest > 0) | (low_sign > 0)
    negative = (value < 0) | ((value == 0) & (low_sign < 0))
    if mode in ("rn", "rna"):
        # With `crossed` the value is just under the upper neighbour.
        above = (rest > 0.5) | ((rest == 0.5) & (low_sign > 0)) | crossed
        tie = (rest == 0.5) & (low_sign == 0)
        tie_up = (floor % 2 != 0) if mode == "rn" else ~negative
        up = above | (tie & tie_up)
    elif mode == "rz":
        up = negative & inexact
    elif mode == "rm":
        up = np.zeros(high.shape, bool)
    elif mode == "rp":
        up = inexact
    else:
        raise ValueError(f"mode: got {mode!r}, takes rn, rna, rz, rm or rp")
    rounded = np.ldexp(floor + up, step_exponent)
    rounded = np.where(rounded == 0, np.copysign(0.0, np.where(negative, -1.0, high)), rounded)
    overflow = np.abs(rounded) > fmt.max_finite
    to_inf = {"rn": True, "rna": True, "rz": False, "rm": negative, "rp": ~negative}[mode]
    limit = np.where(to_inf, np.inf, fmt.max_finite)
    rounded = np.where(overflow, np.copysign(limit, rounded), rounded)
    return np.where(finite, rounded, high)


def flush_subnormals(value: np.ndarray, fmt: Format = F32) -> np.ndarray:
    """Values of ``fmt`` (as float64) with subnormals replaced by zero of the same sign, as ``.ftz`` does."""
    return np.where(np.abs(value) < 2.0**fmt.min_exponent, np.copysign(0.0, value), value)


def f32_bits(value: np.ndarray) -> np.ndarray:
    """Float64 values that are FP32 values, as FP32 bit patterns with the canonical NaN 0x7fffffff."""
    with np.errstate(over="ignore", invalid="ignore"):
        bits = np.asarray(value, np.float64).astype(np.float32).view(np.uint32)
    return np.where(np.isnan(value), np.uint32(0x7FFFFFFF), bits)


def f16_bits(value: np.ndarray) -> np.ndarray:
    """Float64 values that are FP16 values, as FP16 bit patterns with the canonical NaN 0x7fff."""
    with np.errstate(over="ignore", invalid="ignore"):
        bits = np.asarray(value, np.float64).astype(np.float16).view(np.uint16)
    return np.where(np.isnan(value), np.uint16(0x7FFF), bits)


def bf16_bits(value: np.ndarray) -> np.ndarray:
    """Float64 values that are BF16 values, as BF16 bit patterns with the canonical NaN 0x7fff."""
    return np.where(np.isnan(value), np.uint16(0x7FFF), (f32_bits(value) >> 16).astype(np.uint16))


def bf16_round(value: np.ndarray) -> np.ndarray:
    """FP32 or float64 values rounded to nearest-even BF16, as BF16 bit patterns."""
    return bf16_bits(round_to(np.asarray(value, np.float64), 0.0, BF16, "rn"))
