"""Times calls on the GPU side by side: graph replay or eager, L2 cold before each sample, arms in turn, an A/A arm.

    times = sample({"ours": captured(ours), "cuBLAS": captured(theirs)}, groups=30)
    print(summary(times))

A sample is the time between two CUDA events around the call. The L2 cache is overwritten before it, and that takes
longer than the host needs to enqueue a call, so a graph's sample holds no host time; an eager one holds what the host
takes beyond the flush.
"""

import math
import statistics
import subprocess
import time
from collections.abc import Callable

import torch

from cake_shared.bench.timing import SAME_ARM, compare

_FLUSH_CAPACITIES = 3  # of the L2 cache, which is not strictly least recently used
_FACTS = {
    "driver": "driver_version",
    "sm_clock": "clocks.sm",
    "memory_clock": "clocks.mem",
    "power": "power.draw",
    "temperature": "temperature.gpu",
    "throttle_reasons": "clocks_event_reasons.active",
}


class Flush:
    """Overwrites a buffer of several times the L2 cache of the current device, on the current stream."""

    def __init__(self):
        size = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
        self._buffer = torch.empty(_FLUSH_CAPACITIES * size // 4, dtype=torch.int32, device="cuda")

    def __call__(self):
        """Enqueue one flush."""
        self._buffer.zero_()


def captured(call: Callable[[], object], warm: int = 2) -> Callable[[], None]:
    """The call as a CUDA graph; returns what replays it.

    Parameters
    ----------
    call
        Enqueues work on the current stream and waits for nothing.
    warm
        Calls before the capture: builds, plans and library handles are made there.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    # Not torch.cuda.graph: it collects garbage and empties the allocator's cache, tens of milliseconds a capture.
    with torch.cuda.stream(stream):
        for _ in range(warm):
            call()
        torch.cuda.synchronize()
        graph.capture_begin()
        try:
            call()
        finally:
            graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    return graph.replay


def sample(
    calls: dict[str, Callable[[], object]],
    *,
    groups: int,
    reverse: bool = False,
    warm: int = 2,
    flush: Callable[[], None] | None = None,
) -> dict[str, list[float]]:
    """Milliseconds of each call, one sample a group; the first one, ours, runs twice in every group (the A/A arm).

    Parameters
    ----------
    calls
        By name. In a group every one runs once, one after the other, so slow drifts of the device hit all alike.
    groups
        Samples of each.
    reverse
        Run them in the opposite order.
    warm
        Groups before the first that counts.
    flush
        A `Flush` to share; made here otherwise.
    """
    if groups < 3:
        raise ValueError(f"groups: got {groups}, takes 3 or more")
    flush = flush or Flush()
    first, *others = calls
    names = [first, SAME_ARM, *others]
    calls = {**calls, SAME_ARM: calls[first]}
    if reverse:
        names.reverse()
    events = {name: [torch.cuda.Event(enable_timing=True) for _ in range(2)] for name in names}
    samples: dict[str, list[float]] = {name: [] for name in names}
    for group in range(warm + groups):
        for name in names:
            begin, end = events[name]
            flush()
            begin.record()
            calls[name]()
            end.record()
        torch.cuda.synchronize()
        if group >= warm:
            for name, (begin, end) in events.items():
                samples[name].append(begin.elapsed_time(end))
    return samples


def summary(*runs: dict[str, list[float]]) -> str:
    """One line: medians in microseconds, each one's ratio to the first, and the spread of the A/A arm."""
    ours = next(name for name in runs[0] if name != SAME_ARM)
    found = compare(ours, runs)
    parts = [f"{ours} {1e3 * found.median_ms[ours]:.1f} us"]
    for name, verdict in found.verdict.items():
        parts.append(f"{name} {1e3 * found.median_ms[name]:.1f} ({found.ratio_to_ours[name]:.3f}, {verdict})")
    return ", ".join([*parts, f"A/A {100 * found.same_arm_spread:.1f} %"])


def enqueue_microseconds(call: Callable[[], object], calls: int = 50, tries: int = 20) -> float:
    """Host microseconds of one call that enqueues work, the least mean of some tries, the device idle before each.

    The launch queue holds more than `calls` launches, so none waits for the device.
    """
    means = []
    for _ in range(tries + 1):
        torch.cuda.synchronize()
        begin = time.perf_counter_ns()
        for _ in range(calls):
            call()
        means.append((time.perf_counter_ns() - begin) / calls / 1000)
    torch.cuda.synchronize()
    return min(means[1:])


def gpu_facts() -> dict[str, str]:
    """The current GPU's driver, clocks, power, temperature and throttle reasons now, as nvidia-smi says them."""
    uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
    words = ["nvidia-smi", f"--query-gpu={','.join(_FACTS.values())}", "--format=csv,noheader", f"--id=GPU-{uuid}"]
    try:
        line = subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return dict.fromkeys(_FACTS, "not known")
    return dict(zip(_FACTS, line.split(", ")))


def geometric_mean(values) -> float:
    """Of positive numbers; 1 of none."""
    values = list(values)
    return statistics.geometric_mean(values) if values else 1.0


def sign_test(wins) -> float:
    """One-sided p of at least so many wins in pairs that are won as often as lost."""
    wins = [bool(win) for win in wins]
    count, won = len(wins), sum(wins)
    return sum(math.comb(count, i) for i in range(won, count + 1)) / 2**count
