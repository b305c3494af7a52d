"""What ptxas says about each kernel (`-Xptxas -v`), as numbers."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass

_KERNEL = re.compile(r"Compiling entry function '([^']+)' for '([^']+)'")
_FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")


@dataclass
class KernelReport:
    """One kernel as compiled: registers per thread, static shared memory per CTA, local memory per thread."""

    registers: int = 0
    shared_bytes: int = 0
    stack_bytes: int = 0
    spill_store_bytes: int = 0
    spill_load_bytes: int = 0

    def as_dict(self) -> dict[str, int]:
        """Return the numbers by name."""
        return asdict(self)


def parse_report(log: str) -> dict[str, KernelReport]:
    """Return the report of every kernel in a compiler's log.

    Raises
    ------
    ValueError
        A kernel has no line of registers: the log's format is not the one that this function knows.
    """
    reports: dict[str, KernelReport] = {}
    complete: set[str] = set()
    name = None
    for line in log.splitlines():
        if match := _KERNEL.search(line):
            name = match[1]
            reports[name] = KernelReport()
        elif name is not None and (match := _FRAME.search(line)):
            # Lines of device functions that were not inlined follow; the kernel's own frame comes first and holds
            # theirs.
            report = reports[name]
            report.stack_bytes = max(report.stack_bytes, int(match[1]))
            report.spill_store_bytes += int(match[2])
            report.spill_load_bytes += int(match[3])
        elif name is not None and (match := _USED.search(line)):
            reports[name].registers = int(match[1])
            shared = _SHARED.search(line)
            reports[name].shared_bytes = int(shared[1]) if shared else 0
            complete.add(name)
    missing = sorted(set(reports) - complete)
    if missing:
        raise ValueError(f"the compiler's report states no registers for {', '.join(missing)}")
    return reports
