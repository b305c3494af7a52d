"""Floating-point arithmetic rounded once: the NumPy references of floating, comparing and convert."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from cake_shared.emulator.conformance import rounding as rd
from cake_shared.emulator.conformance.model import widen

Array = np.ndarray
MODES = ("rn", "rz", "rm", "rp")
FORMATS = {"f32": rd.F32, "f16": rd.F16, "bf16": rd.BF16}
TO_BITS = {"f32": rd.f32_bits, "f16": rd.f16_bits, "bf16": rd.bf16_bits}


def _zero_sum_sign(result: Array, x: Array, y: Array, mode: str) -> Array:
    """An exact zero sum of terms of opposite signs is +0, or -0 when rounding down (IEEE 754)."""
    cancels = (result == 0) & (x == -y) & (np.signbit(x) != np.signbit(y))
    return np.where(cancels, -0.0 if mode == "rm" else 0.0, result)


def add_exact(x: Array, y: Array, fmt: rd.Format, mode: str) -> Array:
    """x + y rounded once."""
    high, low = rd.two_sum(x, y)
    return _zero_sum_sign(rd.round_to(high, low, fmt, mode), x, y, mode)


def fma_exact(x: Array, y: Array, z: Array, fmt: rd.Format, mode: str) -> Array:
    """x * y + z rounded once; the product of two values of at most 24 bits is exact in float64."""
    return add_exact(x * y, z, fmt, mode)


def _tiny_to_zero(high: Array, low: Array | float, rounded: Array, fmt: rd.Format, mode: str) -> Array:
    """What ``.ftz`` makes of high + low: an H200 looks at the result rounded as if its exponent had no lower bound."""
    unbounded = rd.round_to(high, low, dataclasses.replace(fmt, min_exponent=-900), mode)
    tiny = (np.abs(unbounded) < 2.0**fmt.min_exponent) & (unbounded != 0)
    return np.where(tiny, np.copysign(0.0, high), rounded)


def multiply(x: Array, y: Array, fmt: rd.Format, mode: str, ftz: object) -> Array:
    """x * y rounded once; with ``ftz`` flushed by the exact product."""
    rounded = rd.round_to(x * y, 0.0, fmt, mode)
    return _tiny_to_zero(x * y, 0.0, rounded, fmt, mode) if ftz else rounded


def fuse(x: Array, y: Array, z: Array, fmt: rd.Format, mode: str, ftz: object) -> Array:
    """x * y + z rounded once; with ``ftz`` flushed by the exact sum."""
    rounded = fma_exact(x, y, z, fmt, mode)
    return _tiny_to_zero(*rd.two_sum(x * y, z), rounded, fmt, mode) if ftz else rounded


def div_exact(x: Array, y: Array, fmt: rd.Format, mode: str) -> Array:
    """x / y rounded once: the sign of the residual decides on which side of the nearest value the quotient lies."""
    quotient = x / y
    nearest = rd.round_to(quotient, 0.0, fmt, "rn")
    overflowed = np.isinf(nearest) & np.isfinite(x) & (y != 0) & np.isfinite(y)
    nearest = np.where(overflowed, quotient, nearest)
    residual = np.sign(x - nearest * y) * np.where(np.signbit(y), -1.0, 1.0)
    return rd.round_to(nearest, np.where(np.isfinite(nearest), residual * 1e-320, 0.0), fmt, mode)


def sqrt_exact(x: Array, fmt: rd.Format, mode: str) -> Array:
    """The square root rounded once."""
    nearest = rd.round_to(np.sqrt(x), 0.0, fmt, "rn")
    residual = np.sign(x - nearest * nearest)
    return rd.round_to(nearest, np.where(np.isfinite(nearest), residual * 1e-320, 0.0), fmt, mode)


def saturate(x: Array) -> Array:
    """Clamp to [+0, 1]; NaN becomes +0."""
    return np.where(np.isnan(x) | (x <= 0), 0.0, np.minimum(x, 1.0))


def relu(x: Array) -> Array:
    """Negative values become +0; NaN stays NaN."""
    return np.where(x <= 0, 0.0, x)


def lesser(x: Array, y: Array, greater: bool, propagate: bool) -> Array:
    """min or max as PTX has it: -0 below +0; NaN loses unless ``propagate``."""
    sign = -1.0 if greater else 1.0
    tie = np.where(np.signbit(x) ^ greater, x, y)
    result = np.where(x == y, tie, np.where(sign * x < sign * y, x, y))
    if propagate:
        return np.where(np.isnan(x) | np.isnan(y), np.nan, result)
    return np.where(np.isnan(x), y, np.where(np.isnan(y), x, result))


def elementwise(kind: str, function: Callable[..., Array], ftz: bool) -> Callable[..., Array]:
    """The bits that ``function`` of float64 values gives for bits of ``kind``; with ``ftz`` subnormals are flushed."""
    fmt = FORMATS[kind]

    def reference(*arrays: Array) -> Array:
        values = [widen(a, kind) for a in arrays]
        if ftz:
            values = [rd.flush_subnormals(v, fmt) for v in values]
        result = function(*values)
        if ftz:
            result = rd.flush_subnormals(result, fmt)
        return TO_BITS[kind](result)

    return reference


def in_pairs(kind: str, function: Callable[..., Array], ftz: bool) -> Callable[..., Array]:
    """The same for two values in a word."""
    scalar = elementwise(kind, function, ftz)

    def reference(*arrays: Array) -> Array:
        low = scalar(*[(a & 0xFFFF).astype(np.uint16) for a in arrays])
        high = scalar(*[(a >> 16).astype(np.uint16) for a in arrays])
        return low.astype(np.uint32) | high.astype(np.uint32) << 16

    return reference
