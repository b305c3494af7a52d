"""compute-sanitizer's four tools on a script's launches, side by side: what each said, and whether that was nothing."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
# The tools count barriers in the compiler's notes, which say one for an array of them; what they do not count they do
# not follow.
WORDS = ("--print-limit", "1000", "--show-backtrace", "device", "--num-cuda-barriers", "128")
# What a tool's output holds of one report: a pair of accesses, or a kind of fault, and where.
_RACE = re.compile(r"Race reported between (\w+) access at .*? in (\S+)")
_OTHER_ACCESS = re.compile(r"and (\w+) access at .*? in (\S+)")
_KINDS = ("Invalid", "Uninitialized", "Barrier error", "Divergent", "Address", "Program hit", "Out-of-range", "Missing")
_FAULT = re.compile(rf"={{9}} (?:Error: |Warning: )?({'|'.join(_KINDS)})(.*)")
_PLACE = re.compile(r"={9} +at .*? in (\S+:\d+)")


@dataclass(frozen=True)
class ToolRun:
    """One tool on one command, in a process of its own: on `kernels` alone, or on all. Its output goes to `log`."""

    name: tuple[str, ...]
    tool: str
    command: tuple[str, ...]
    log: Path
    kernels: tuple[str, ...] = ()


@dataclass(frozen=True)
class ToolSaid:
    """What came of a `ToolRun`: its summary, whether that was nothing, its reports by place, and its seconds."""

    summary: str
    nothing: bool
    reports: dict[str, int]
    seconds: float


def reports_of(output: str) -> dict[str, int]:
    """How often a tool reported what: by both accesses of a race, or by fault and place; the most frequent first."""
    found: Counter = Counter()
    race = fault = None
    for line in output.splitlines():
        if begun := _RACE.search(line):
            race = f"{begun[1]} at {begun[2]}"
        elif race and (other := _OTHER_ACCESS.search(line)):
            found[f"race: {race}, {other[1]} at {other[2]}"] += 1
        elif begun := _FAULT.match(line):
            fault, race = (begun[1] + begun[2]).strip(), None
        elif fault and (place := _PLACE.match(line)):
            found[f"{fault} at {place[1]}"] += 1
            fault = None
    return dict(found.most_common())


def summary_of(output: str, status: int) -> tuple[str, bool]:
    """The last summary line, and whether the tool found nothing."""
    lines = [line for line in re.findall(r"SUMMARY: (.*)", output) if "not printed" not in line]
    said = lines[-1].strip() if lines else "no summary"
    if status or not lines:
        said += f", exit status {status}"
    return said, status == 0 and bool(lines) and found_nothing(said)


def run_side_by_side(
    runs: list[ToolRun],
    on_said: Callable[[ToolRun, ToolSaid], None],
    *,
    workers: int,
    seconds: float,
    each: float,
    sanitizer: str = "compute-sanitizer",
    extra: tuple[str, ...] = (),
) -> None:
    """Run tools, `workers` at a time, in the order given, and tell `on_said` of each as it ends.

    Every tensor has an allocation of its own there, so that a tool sees where one ends and which was written.

    Parameters
    ----------
    runs
        What to run.
    on_said
        Called once for each of them, those included that did not begin in time.
    workers
        How many run at a time.
    seconds, each
        What all of them and what one of them may take; those that still run then are stopped.
    sanitizer, extra
        The tool's program, and words for it beyond `--tool`.
    """
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "OMP_NUM_THREADS": "1"}
    begin = time.monotonic()
    waiting, running = list(runs), []

    def finish(run: ToolRun, process: subprocess.Popen, started: float):
        late = process.poll() is None
        if late:
            with contextlib.suppress(ProcessLookupError):  # its children too: the tool starts the program as one
                os.killpg(process.pid, signal.SIGKILL)
        status = process.wait()
        took = time.monotonic() - started
        output = run.log.read_text(errors="replace")
        summary, nothing = summary_of(output, status)
        if late:
            summary, nothing = f"not run to its end within {took:.0f} s", False
        on_said(run, ToolSaid(summary, nothing, reports_of(output), round(took, 1)))

    try:
        while waiting or running:
            now = time.monotonic()
            while waiting and len(running) < workers and now - begin < seconds:
                run = waiting.pop(0)
                some = [word for kernel in run.kernels for word in ("--kernel-name", f"kne={kernel}")]
                words = [sanitizer, "--tool", run.tool, *extra, *some, *run.command]
                with run.log.open("w") as log:
                    process = subprocess.Popen(
                        words, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
                    )
                running.append((run, process, now))
            over = [
                (run, process, started)
                for run, process, started in running
                if process.poll() is not None or now - started > each or now - begin > seconds
            ]
            for entry in over:
                running.remove(entry)
                finish(*entry)
            if now - begin > seconds:
                for run in waiting:
                    on_said(run, ToolSaid(f"not begun within {seconds:.0f} s", False, {}, 0.0))
                waiting = []
            if not over:
                time.sleep(0.05)
    finally:
        for _, process, _ in running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def version_of(sanitizer: str = "compute-sanitizer") -> str:
    """The tool's version, as it says it."""
    said = subprocess.run([sanitizer, "--version"], capture_output=True, text=True, check=False).stdout
    lines = [line for line in said.splitlines() if line.startswith("Version")]
    return lines[0] if lines else "not known"


def sanitize(script: Path, seconds: float = 150.0) -> tuple[dict[str, object], bool]:
    """Run `script --launch` under every tool.

    Parameters
    ----------
    script
        Launches a few small kernels when it is given `--launch`: a tool slows them down a thousand times.
    seconds
        After which tools that still run are stopped.

    Returns
    -------
    tuple
        The tool's version, and by tool its summary and its reports by place; and whether all of them found nothing.
        The end of what a tool printed that found something goes to standard error.
    """
    if shutil.which("compute-sanitizer") is None:
        return {tool: {"said": "not run: compute-sanitizer is not on PATH", "reports": {}} for tool in TOOLS}, False
    found, clean = {"version": version_of()}, True
    with tempfile.TemporaryDirectory() as folder:

        def note(run: ToolRun, said: ToolSaid):
            nonlocal clean
            found[run.tool] = {"said": said.summary, "reports": said.reports}
            if not said.nothing:
                clean = False
                print(f"{run.tool}:\n{run.log.read_text(errors='replace')[-6000:]}", file=sys.stderr)

        command = (sys.executable, str(script), "--launch")
        runs = [ToolRun((tool,), tool, command, Path(folder) / f"{tool}.txt") for tool in TOOLS]
        run_side_by_side(runs, note, workers=len(TOOLS), seconds=seconds, each=seconds, extra=WORDS)
    return found, clean


def found_nothing(summary: str) -> bool:
    """Whether a tool's summary counts no error and no hazard."""
    return re.search(r"(?<!\d)0 (errors|hazards)", summary) is not None
