"""What Python costs: importing a package, and a call on a problem too small to matter."""

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

from cake_shared.bench.result import Table


def least_microseconds(call: Callable[[], object], calls: int = 200, tries: int = 20) -> float:
    """Mean time of a call in the best of some tries, which other processes disturbed least."""
    means = []
    for _ in range(tries + 1):
        begin = time.perf_counter_ns()
        for _ in range(calls):
            call()
        means.append((time.perf_counter_ns() - begin) / calls / 1000)
    return min(means[1:])


def import_seconds(package: str, processes: int = 5) -> dict[str, float]:
    """Seconds that `import package` takes once torch is imported, in fresh processes: the median and the least."""
    program = f"import time, torch; begin = time.perf_counter(); import {package}; print(time.perf_counter() - begin)"
    taken = []
    for _ in range(processes):
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True, env=dict(os.environ)
        )
        taken.append(float(done.stdout))
    return {"median": statistics.median(taken), "least": min(taken)}


def import_table(package: str) -> tuple[Table, dict[str, float]]:
    """`import_seconds` as a table."""
    figures = import_seconds(package)
    rows = [[f"import {package}", f"{1e3 * figures['median']:.0f} ms", f"{1e3 * figures['least']:.0f} ms"]]
    return Table("Import time on top of torch", ["", "median of 5", "least"], rows), figures
