"""Measures the emulator: `python -m cake_shared.emulator.speed --page EMULATOR.md` on an otherwise idle machine.

The engine is built from cold in an empty cache; kernels run on one core. Rates are the best of several runs, in warp
instructions a second of processor time.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from cake_shared._version import __version__
from cake_shared.emulator import Module, Options, Report
from cake_shared.emulator.conformance.emulate import run_case
from cake_shared.emulator.conformance.families import own, own_gemm

RESULTS = Path(__file__).parent / "results_speed.json"
RESULTS_AVX2 = RESULTS.with_name("results_speed_avx2.json")  # of a processor without AVX-512
# What the engine has to reach: millions of warp instructions a second, and seconds to build.
LEAST = {"cheap": 30.0, "all": 5.0}
MOST_BUILD_SECONDS = 40.0

_ROUNDS = {"arithmetic": 4000, "shared_tile": 1500}
_REPEATS = 3


def _cpu() -> tuple[str, bool]:
    """What the processor calls itself, and whether it has AVX-512, which says more."""
    facts = dict(line.partition(":")[::2] for line in Path("/proc/cpuinfo").read_text().splitlines())
    facts = {name.strip(): value.strip() for name, value in facts.items()}
    return facts.get("model name", platform.machine()), "avx512f" in facts.get("flags", "").split()


def build_seconds() -> dict[str, float]:
    """Build the engine in an empty cache directory; return wall seconds and the seconds of all cores together."""
    program = "from cake_shared.emulator import native; print(native.library_path())"
    with tempfile.TemporaryDirectory(prefix="cake-speed-") as cache:
        began = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "CAKE_CACHE_DIR": cache},
            capture_output=True,
            text=True,
            check=True,
        )
        wall = time.perf_counter() - began
        manifest = json.loads((Path(done.stdout.split()[-1]).parent / "manifest.json").read_text())
    return {"wall": round(wall, 1), "core": round(manifest["core_seconds"], 1)}


def _rate(run: object) -> float:
    """Millions of warp instructions a second of the best of several runs."""
    best = 0.0
    for _ in range(_REPEATS):
        began = time.process_time()
        instructions = run()
        best = max(best, instructions / (time.process_time() - began))
    return round(best * 1e-6, 1)


def kernel_rates() -> dict[str, dict[str, float]]:
    """Return the rates of the kernels of speed.cu by the detectors that watch."""
    module = Module.from_cuda(str(Path(__file__).with_name("speed.cu")))
    source, out = np.ones(1024, np.float32), np.zeros(1024, np.float32)
    found: dict[str, dict[str, float]] = {}
    for kernel, rounds in _ROUNDS.items():
        params = [out, rounds] if kernel == "arithmetic" else [module.const(source), out, rounds]

        def run(detect: str, kernel: str = kernel, params: list = params) -> Report:
            return module.launch(kernel, 4, 256, params, options=Options(detect=detect))

        found[kernel] = {detect: _rate(lambda d=detect: run(d).instructions) for detect in LEAST}
    return found


def program_rates() -> dict[str, dict[str, float]]:
    """Return the rates of the project's own programs, host chains of the packages that are installed here."""
    found = {}
    for program in own.PROGRAMS + own_gemm.PROGRAMS:
        if "segments" in program.name:  # what it does for long is in the others too
            continue
        case = program.build()

        def run(detect: str, case: object = case) -> int:
            reports: list[Report] = []
            run_case(case, options=Options(detect=detect), reports=reports)
            return sum(report.instructions for report in reports)

        found[program.name] = {detect: _rate(lambda d=detect: run(d)) for detect in LEAST}
    return found


def measure() -> dict:
    """Return everything that the result file holds."""
    load = os.getloadavg()[0]
    cpu, avx512 = _cpu()
    return {
        "what": "millions of warp instructions a second on one core, by detectors; seconds to build the engine",
        "cpu": cpu,
        "avx512": avx512,
        "cores": os.cpu_count(),
        "load_average_before": round(load, 2),
        "python": platform.python_version(),
        "cxx": subprocess.run(["c++", "--version"], capture_output=True, text=True, check=True).stdout.splitlines()[0],
        "cake_shared": __version__,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "build_seconds": build_seconds(),
        "kernels": kernel_rates(),
        "programs": program_rates(),
    }


def shortfalls(result: dict) -> list[str]:
    """Return what of a result misses the demands; uniform arithmetic for the cheap detectors, all kernels for all."""
    found = []
    if result["build_seconds"]["wall"] > MOST_BUILD_SECONDS:
        found.append(f"the build takes {result['build_seconds']['wall']} s, at most {MOST_BUILD_SECONDS} are asked for")
    for name, rates in result["kernels"].items():
        found += [
            f"{name} under {detect} detectors: {rates[detect]} million a second, at least {least} are asked for"
            for detect, least in LEAST.items()
            if rates[detect] < least
        ]
    return found


def markdown(result: dict) -> str:
    """Return the table that EMULATOR.md quotes."""
    rates = result["kernels"] | result["programs"]
    rows = [f"| {name} | {rate['cheap']} | {rate['all']} |" for name, rate in rates.items()]
    build = result["build_seconds"]
    vectors = "with" if result["avx512"] else "without"
    return "\n".join(
        [
            f"Measured {result['date']} on one core of {result['cpu']} "
            f"({vectors} AVX-512), load average {result['load_average_before']} before; "
            f"cake-shared {result['cake_shared']}.",
            f"The engine is built in {build['wall']} s ({build['core']} core-seconds, {result['cores']} cores).",
            *[f"Less than is wanted: {missed}." for missed in shortfalls(result)],
            "Millions of warp instructions a second:",
            "",
            "| program (a product of matrices is one instruction) | cheap detectors | all |",
            "|---|---:|---:|",
            *rows,
        ]
    )


def renewed(page: str) -> str:
    """Return the text of EMULATOR.md with each table, between the markers that name its file, as the file has it."""
    for path in (RESULTS, RESULTS_AVX2):
        begin, end = markers(path)
        before, _, rest = page.partition(begin)
        page = f"{before}{begin}\n{markdown(json.loads(path.read_text()))}\n{end}{rest.partition(end)[2]}"
    return page


def markers(path: Path) -> tuple[str, str]:
    """Return what stands in EMULATOR.md before and after the table of a result file."""
    return f"<!-- {path.name}:begin -->", f"<!-- {path.name}:end -->"


def main(argv: list[str] | None = None) -> int:
    """Measure, write the file, renew the tables of EMULATOR.md; 1 when a demand is missed."""
    parser = argparse.ArgumentParser(prog="python -m cake_shared.emulator.speed", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=RESULTS, help=f"the result file ({RESULTS.name} beside this)")
    parser.add_argument("--page", type=Path, help="EMULATOR.md, to renew its tables from the result files")
    arguments = parser.parse_args(argv)
    result = measure()
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(markdown(result))
    if arguments.page:
        arguments.page.write_text(renewed(arguments.page.read_text()))
    missed = shortfalls(result)
    print("\n".join(missed), file=sys.stderr) if missed else None
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
