"""Peak memory of one call on the CPU, taken in a process that does nothing else."""

import gc
import resource
import sys
from collections.abc import Callable
from pathlib import Path

METHOD = (
    "growth of the peak resident set over the resident set before the call, in a fresh process, "
    "less the gradients that stay"
)


def peak_growth_bytes(call: Callable[[], int]) -> int:
    """Runs `call` once; returns by how much the resident set grew at its peak, less the bytes that `call` returns.

    `call` returns the bytes of the results that stay alive and are not to be counted (gradients). Inputs must exist
    before, and the libraries must be warm: call it on a small problem first.
    """
    gc.collect()
    before = resident_bytes()
    reset_peak()
    keep = call()
    peak = peak_bytes()
    return max(peak - before - keep, 0)


def resident_bytes() -> int:
    """The resident set now."""
    status = _status("VmRSS")
    return status if status is not None else _maxrss()


def peak_bytes() -> int:
    """The largest resident set since the last `reset_peak` (since the start where the system cannot reset it)."""
    status = _status("VmHWM")
    return status if status is not None else _maxrss()


def reset_peak():
    """Asks the kernel to forget the peak so far, where it can: Linux does, elsewhere the peak is the process's own."""
    clear = Path("/proc/self/clear_refs")
    if clear.exists():
        clear.write_text("5")


def _status(name: str) -> int | None:
    status = Path("/proc/self/status")
    if not status.is_file():
        return None
    for line in status.read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    return None


def _maxrss() -> int:
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale
