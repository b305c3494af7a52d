"""How a launch is emulated."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

ORDERS = {"eager": 0, "lazy": 1, "random": 2}
DETECT = {"none": 0, "cheap": 1, "all": 2}
DEFAULT_MAX_INSTRUCTIONS = 200_000_000


def _is_whole(value: object, least: int, limit: int) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and least <= value < limit


def _whole(name: str, value: object, least: int, limit: int) -> None:
    if not _is_whole(value, least, limit):
        raise ValueError(f"{name} takes a whole number from {least} to {limit - 1}, got {value!r}")


def _several(name: str, value: object, takes: str, counts: tuple[int, ...], limit: int) -> None:
    fits = isinstance(value, (tuple, list)) and len(value) in counts and all(_is_whole(v, 0, limit) for v in value)
    if not fits:
        raise ValueError(f"{name} takes {takes}, each from 0 to {limit - 1}, got {value!r}")


@dataclass(frozen=True)
class Options:
    """How a launch is emulated.

    Attributes
    ----------
    order
        When asynchronous operations complete: `"eager"` at issue, `"lazy"` when something waits for them, `"random"`
        drawn from the seed, which then also draws the order of warps.
    seed
        Of every random choice.
    detect
        `"all"`, `"cheap"` (bounds, alignment, const inputs, synchronisation) or `"none"` (as cheap).
    threads
        Threads that run independent CTAs; results do not depend on it.
    guard_bytes
        Run on copies of the arrays with bands of so many bytes between, so that an access past one never meets another.
        Pointers that lie in memory are not moved along. Not together with a stream.
    max_instructions
        Warp instructions of a CTA or cluster without a store or a signal before `Hang` is raised.
    profile
        Count bank conflicts.
    trace
        None, (linear CTA index, warp index) or (linear CTA index,): print every instruction of that warp, or of all of
        that CTA's, to stderr.
    stop_line
        Raise `Stop` when a PTX line is reached.
    dump_shared, dump_tensor
        (offset, bytes) of shared memory and (column, count) of tensor memory to print in the text of `Stop`.
    """

    order: str = "eager"
    seed: int = 0
    detect: str = "all"
    threads: int = 1
    guard_bytes: int = 0
    max_instructions: int | None = None
    profile: bool = False
    trace: tuple[int, ...] | None = None
    stop_line: int | None = None
    dump_shared: tuple[int, int] | None = None
    dump_tensor: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        """Refuse names that do not exist."""
        if self.order not in ORDERS:
            raise ValueError(f"order takes one of {', '.join(ORDERS)}, got {self.order!r}")
        if self.detect not in DETECT:
            raise ValueError(f"detect takes one of {', '.join(DETECT)}, got {self.detect!r}")
        _whole("threads", self.threads, 1, 1 << 16)
        _whole("seed", self.seed, 0, 1 << 64)
        _whole("guard_bytes", self.guard_bytes, 0, 1 << 40)
        if self.max_instructions is not None:
            _whole("max_instructions", self.max_instructions, 1, 1 << 64)
        if self.stop_line is not None:
            _whole("stop_line", self.stop_line, 1, 1 << 32)
        if self.trace is not None:
            _several("trace", self.trace, "(CTA, warp) or (CTA,)", (1, 2), 1 << 31)
        for name in ("dump_shared", "dump_tensor"):
            if getattr(self, name) is not None:
                _several(name, getattr(self, name), "two numbers", (2,), 1 << 32)
