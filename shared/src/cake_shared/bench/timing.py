"""Arms timed side by side: paired groups, again in the opposite order in a fresh process, with an A/A arm."""

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

SAME_ARM = "ours again"


@dataclass(frozen=True)
class Arm:
    """One thing to time: `make()` prepares its inputs and returns the call to time."""

    name: str
    make: Callable[[], Callable[[], object]]


@dataclass(frozen=True)
class Cell:
    """One comparison. The first arm is ours, the others are peers.

    `check()` returns, for each arm that was checked, its largest error against the float64 oracle as (error, limit); an
    arm above its limit is not timed, and nothing is timed when ours is above.
    """

    name: str
    arms: Sequence[Arm]
    check: Callable[[], dict[str, tuple[float, float]]]
    groups: int = 7
    labels: dict[str, str] = field(default_factory=dict)


class RefusedToTime(RuntimeError):
    """Our own arm failed its accuracy check, so no time of this cell means anything."""


def admitted(
    checks: dict[str, tuple[float, float]], arms: Sequence[Arm], cell_name: str
) -> tuple[list[Arm], list[str]]:
    """Splits the arms of a cell into those that may be timed and sentences about those that may not.

    Raises `RefusedToTime` when the first arm (ours) is above its limit, or was not checked at all.
    """
    timed, refused = [], []
    for position, arm in enumerate(arms):
        if arm.name not in checks:
            raise RefusedToTime(f"{cell_name}: {arm.name} was not checked against float64")
        error, limit = checks[arm.name]
        if error <= limit:
            timed.append(arm)
            continue
        sentence = f"{cell_name}: {arm.name} has error {error:.2g} against float64, the limit is {limit:.2g}"
        if position == 0:
            raise RefusedToTime(sentence)
        refused.append(sentence + ": not timed")
    return timed, refused


def time_arms(arms: Sequence[Arm], *, groups: int, reverse: bool, warm: int = 1) -> dict[str, list[float]]:
    """Milliseconds of each arm, one sample a group; ours runs twice in every group (the A/A arm).

    In a group every arm runs once, one after the other, so slow drifts of the machine hit all of them alike.
    """
    if groups < 3:
        raise ValueError(f"groups: got {groups}, takes 3 or more")
    calls = {arm.name: arm.make() for arm in arms}
    names = [arms[0].name, SAME_ARM, *(arm.name for arm in arms[1:])]
    calls[SAME_ARM] = calls[arms[0].name]
    if reverse:
        names.reverse()
    for _ in range(warm):
        for arm in arms:
            calls[arm.name]()
    samples: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(groups):
        for name in names:
            begin = time.perf_counter_ns()
            calls[name]()
            samples[name].append((time.perf_counter_ns() - begin) / 1e6)
    return samples


@dataclass(frozen=True)
class Comparison:
    """What the samples of one cell say."""

    median_ms: dict[str, float]
    ratio_to_ours: dict[str, float]
    same_arm_spread: float
    verdict: dict[str, str]


def compare(ours: str, runs: Sequence[dict[str, list[float]]]) -> Comparison:
    """Medians over all runs, each peer's ratio to ours, and what the spread of the A/A arm lets one say of it.

    The spread is the 90th percentile of |ln| of the paired A/A ratios: nine of ten groups of equals differ by less.
    """
    merged: dict[str, list[float]] = {}
    for run in runs:
        for name, samples in run.items():
            merged.setdefault(name, []).extend(samples)
    pairs = sorted(abs(math.log(a / b)) for a, b in zip(merged[ours], merged[SAME_ARM]))
    spread = pairs[min(len(pairs) - 1, math.ceil(0.9 * len(pairs)) - 1)]
    median_ms = {name: statistics.median(samples) for name, samples in merged.items()}
    ratio = {name: median / median_ms[ours] for name, median in median_ms.items()}
    verdict = {}
    for name, value in ratio.items():
        if name in (ours, SAME_ARM):
            continue
        distance = math.log(value)
        if abs(distance) <= spread:
            verdict[name] = "at parity"
        else:
            verdict[name] = "ours is faster" if distance > 0 else "ours is slower"
    return Comparison(median_ms, ratio, math.exp(spread) - 1.0, verdict)
