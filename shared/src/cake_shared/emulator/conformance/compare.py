"""Judges what a run wrote: against NumPy, and the GPU's run against the emulator's."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence

import numpy as np

from cake_shared.emulator.conformance.model import STORAGE, Check, is_nan_bits, widen

FLOATS = ("f16", "bf16", "f32", "f64", "f16x2", "bf16x2", "e4m3", "e5m2")


@dataclasses.dataclass
class Verdict:
    """The outcome of one check: how many elements differ, the worst error and up to four examples."""

    name: str
    rule: str
    elements: int
    wrong: int
    worst_error: float = 0.0
    worst_of_bound: float = 0.0
    examples: tuple[str, ...] = ()
    identical: int | None = None  # elements of the same bits, where two runs need not agree in them
    spread: float | None = None  # root mean square of the differences over that of the values

    @property
    def passed(self) -> bool:
        """Whether every element is right."""
        return self.wrong == 0


def _examples(wrong: np.ndarray, got: np.ndarray, want: np.ndarray) -> tuple[str, ...]:
    def show(value: np.generic) -> str:
        return f"{value:#x}" if isinstance(value, np.unsignedinteger) else repr(value.item())

    return tuple(f"[{i}] got {show(got[i])}, wants {show(want[i])}" for i in np.flatnonzero(wrong)[:4])


def _within(check: Check, got: np.ndarray, want: np.ndarray, bound: np.ndarray | float) -> Verdict:
    """Compare float64 arrays: equal, both NaN, or within ``bound``."""
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        error = np.where((got == want) | (np.isnan(got) & np.isnan(want)), 0.0, np.abs(got - want))
        error = np.where(np.isnan(error), np.inf, error)
        wrong = error > bound
        relative = np.where(error == 0, 0.0, error / np.broadcast_to(bound, error.shape))
    finite = error[np.isfinite(error)]
    return Verdict(
        check.name,
        check.rule,
        got.size,
        int(wrong.sum()),
        float(finite.max(initial=0.0)),
        float(relative.max(initial=0.0)),
        _examples(wrong, got, np.broadcast_to(want, got.shape)),
    )


def _spread(check: Check, verdict: Verdict, got: np.ndarray, want: np.ndarray) -> Verdict:
    """The verdict with what the differences are as a whole, which tells of errors that no single element shows."""
    size = np.sqrt(np.mean(want**2))
    spread = float(np.sqrt(np.mean((got - want) ** 2)) / size) if size else 0.0
    if spread <= check.spread:
        return dataclasses.replace(verdict, spread=spread)
    text = f"the differences' root mean square is {spread:.3g} of the values', at most {check.spread:.3g}"
    return dataclasses.replace(
        verdict, spread=spread, wrong=max(verdict.wrong, 1), examples=(text, *verdict.examples[:3])
    )


def _equal(check: Check, got: np.ndarray, want: np.ndarray) -> Verdict:
    """Compare bit patterns; under the rule ``nan`` any NaN equals any NaN."""
    wrong = got != want
    if check.rule == "nan" and check.dtype in FLOATS:
        wrong &= ~(is_nan_bits(got, check.dtype) & is_nan_bits(want, check.dtype))
    return Verdict(check.name, "bits", got.size, int(wrong.sum()), examples=_examples(wrong, got, want))


def against_reference(check: Check, data: np.ndarray) -> Verdict | None:
    """Compare a run's buffer with the check's NumPy reference; None when it has none."""
    if check.expected is None:
        return None
    got = check.view(data)
    if check.rule == "bound":
        return _within(check, widen(got, check.dtype), np.asarray(check.expected, np.float64), check.bound)
    return _equal(check, got, np.asarray(check.expected).reshape(-1).view(STORAGE[check.dtype]))


def against_device(check: Check, emulated: np.ndarray, measured: np.ndarray) -> Verdict:
    """Compare the emulator's buffer with the GPU's. Two runs that are each within a bound may differ by twice it."""
    got, want = check.view(emulated), check.view(measured)
    if check.rule == "bound" and not check.same_bits:
        ours, theirs = widen(got, check.dtype), widen(want, check.dtype)
        verdict = _within(check, ours, theirs, 2 * np.asarray(check.bound))
        verdict = dataclasses.replace(verdict, identical=int((got == want).sum()))
        return verdict if check.spread is None else _spread(check, verdict, ours, theirs)
    return _equal(check, got, want)


def fingerprint(checks: Sequence[Check], data: dict[str, np.ndarray], sums: bool = False) -> str | None:
    """SHA-256 of all results that must agree bit for bit, NaN made canonical; None when a program has none such.

    With ``sums`` of those that NumPy judges within a bound while the emulator gives the GPU's bits, else of the others.
    """
    digest = hashlib.sha256()
    any_exact = False
    for check in checks:
        if check.same_bits != sums or (check.rule == "bound" and not sums):
            continue
        any_exact = True
        values = check.view(data[check.buffer]).copy()
        if check.rule == "nan" and check.dtype in FLOATS:
            values[is_nan_bits(values, check.dtype)] = np.iinfo(values.dtype).max
        digest.update(check.name.encode())
        digest.update(values.tobytes())
    return digest.hexdigest() if any_exact else None
