"""compute-sanitizer's four tools on a script's launches, side by side: what each said, and whether that was nothing."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")


def sanitize(script: Path, seconds: float = 150.0) -> tuple[dict[str, str], bool]:
    """Run `script --launch` under every tool.

    Every tensor has an allocation of its own there, so that a tool sees where one ends and which was written.

    Parameters
    ----------
    script
        Launches a few small kernels when it is given `--launch`: a tool slows them down a thousand times.
    seconds
        After which tools that still run are stopped.

    Returns
    -------
    tuple
        The last summary line by tool, and whether all of them found nothing. What was found goes to standard error.
    """
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    begin, started, said, clean = time.monotonic(), {}, {}, True
    for tool in TOOLS:
        command = ["compute-sanitizer", "--tool", tool, "--print-limit", "20", sys.executable, str(script), "--launch"]
        try:
            started[tool] = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
            )
        except FileNotFoundError:
            said[tool], clean = "not run: compute-sanitizer is not on PATH", False
    for tool, process in started.items():
        try:
            output, _ = process.communicate(timeout=max(begin + seconds - time.monotonic(), 1.0))
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            said[tool], clean = f"not run to its end within {seconds:.0f} s", False
            continue
        lines = re.findall(r"SUMMARY: (.*)", output)
        said[tool] = lines[-1].strip() if lines else f"no summary, exit status {process.returncode}"
        if process.returncode or not found_nothing(said[tool]):
            clean = False
            print(f"{tool}:\n{output[-6000:]}", file=sys.stderr)
    return said, clean


def found_nothing(summary: str) -> bool:
    """Whether a tool's summary counts no error and no hazard."""
    return re.search(r"(?<!\d)0 (errors|hazards)", summary) is not None
