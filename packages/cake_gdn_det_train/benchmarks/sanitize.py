"""Runs small forwards and backwards under compute-sanitizer's four tools, side by side, and writes what they said.

    python packages/cake_gdn_det_train/benchmarks/sanitize.py --write

The parts launch every program of the records: packs with empty and ragged sequences, both widths of the chains, every
option, segments. Each part under each tool is a process of its own, so that none waits for another. Each tensor has an
allocation of its own, so that a tool sees where one ends and which was written. Nothing that a tool says is left out:
its reports are counted by the places in the source that they name.
"""

import argparse
import datetime
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch

from cake_gdn_det_train import chunk_gated_delta_rule, cuda
from cake_shared import jit
from cake_shared.bench.environment import commit
from cake_shared.bench.gdn_bench import gpu_name
from cake_shared.bench.gpu import gpu_facts
from cake_shared.bench.result import write_whole
from cake_shared.program import programs_of
from cake_shared.target import target_of
from cake_shared.testing.gdn_cuda import moved
from cake_shared.testing.gdn_inputs import GdnCase, base, packed, states
from cake_shared.testing.gdn_run import run
from cake_shared.testing.sanitizer import TOOLS, found_nothing

PACKAGE = "cake_gdn_det_train"
WIDE, NARROW = 1, 1000  # multiprocessors that the plan counts with: chains of 8 or of 4 warps
# What a tool's output holds of one report: a pair of accesses, or a kind of fault, and where.
_RACE = re.compile(r"Race reported between (\w+) access at .*? in (\S+)")
_OTHER_ACCESS = re.compile(r"and (\w+) access at .*? in (\S+)")
_FAULT = re.compile(r"={9} (Invalid|Uninitialized|Barrier error|Divergent|Address|Program hit|Out-of-range)(.*)")
_PLACE = re.compile(r"={9} +at .*? in (\S+:\d+)")


def _pack() -> GdnCase:
    case = packed(base(140, 1, 2), (70, 0, 65))
    h0, ds = states(case, 3)
    return case.with_(initial_state=h0, d_state=ds)


def _options() -> GdnCase:
    case = base(70, 2, 6)
    options = {
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True,
        "A_log": torch.linspace(-0.5, 1.0, 6),
        "dt_bias": torch.linspace(-0.3, 0.3, 6),
        "use_beta_sigmoid_in_kernel": True,
        "allow_neg_eigval": True,
    }
    return case.with_(options=options, beta=case.beta.bfloat16())


def _segments() -> GdnCase:
    case = packed(base(8193 + 66, 1, 1), (8193, 66))
    h0, ds = states(case, 2)
    return case.with_(initial_state=h0, d_state=ds)


PARTS = {
    "pack of 70, 0 and 65 tokens, 5 rows past them, wide chains": (_pack, WIDE),
    "the same, narrow chains": (_pack, NARROW),
    "every option, H/HV 2/6": (_options, NARROW),
    "segments: 8193 and 66 tokens, wide chains": (_segments, WIDE),
    "segments: the same, narrow chains": (_segments, NARROW),
}


def launch(part: str):
    """Forward and backward of one part."""
    begin = time.monotonic()
    make, multiprocessors = PARTS[part]
    backend = cuda.rule_backend(torch.device("cuda"))
    backend.multiprocessors = multiprocessors
    case = moved(make(), "cuda")
    torch.cuda.synchronize()
    print(f"ready after {time.monotonic() - begin:.1f} s", flush=True)
    run(chunk_gated_delta_rule, case)
    torch.cuda.synchronize()
    print(f"done after {time.monotonic() - begin:.1f} s", flush=True)


def reports_of(output: str) -> Counter:
    """How often a tool reported what: by both accesses of a race, or by the fault and its place."""
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
    return found


def summary_of(output: str, status: int) -> tuple[str, bool]:
    """The last summary line, and whether the tool found nothing."""
    lines = [line for line in re.findall(r"SUMMARY: (.*)", output) if "not printed" not in line]
    said = lines[-1].strip() if lines else f"no summary, exit status {status}"
    return said, status == 0 and bool(lines) and found_nothing(said)


def run_tools(tools: list[str], seconds: float, logs: Path) -> tuple[dict, dict, bool]:
    """Summaries by tool and part, reports by tool, and whether every tool ended and found nothing."""
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    begin, started = time.monotonic(), {}
    runs = [(tool, part) for tool in tools for part in PARTS]
    for tool, part in sorted(runs, key=lambda run: (run[0] != "racecheck", "segments" not in run[1])):  # longest first
        log = logs / f"{tool}-{list(PARTS).index(part)}.txt"
        words = ["compute-sanitizer", "--tool", tool, "--print-limit", "1000", "--show-backtrace", "device"]
        words += [sys.executable, __file__]
        with log.open("w") as file:
            process = subprocess.Popen(
                [*words, "--launch", part], stdout=file, stderr=subprocess.STDOUT, env=environment
            )
        started[tool, part] = process, log
    said, reports, clean = {tool: {} for tool in tools}, {tool: Counter() for tool in tools}, True
    for tool, part in runs:
        process, log = started[tool, part]
        try:
            status = process.wait(timeout=max(begin + seconds - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            said[tool][part], nothing = f"not run to its end within {seconds:.0f} s", False
        else:
            said[tool][part], nothing = summary_of(log.read_text(errors="replace"), status)
        reports[tool] += reports_of(log.read_text(errors="replace"))
        clean = clean and nothing
        print(f"{time.monotonic() - begin:5.1f} s  {tool}, {part}: {said[tool][part]}", flush=True)
    return said, {tool: dict(found.most_common()) for tool, found in reports.items()}, clean


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="keep the summary in benchmarks/results")
    parser.add_argument("--out", type=Path, help="write the summary to this file instead")
    parser.add_argument("--logs", type=Path, help="keep the tools' whole output in this folder")
    parser.add_argument("--tools", default=",".join(TOOLS), help=f"of {','.join(TOOLS)}")
    parser.add_argument("--commit", default="", help="commit of this tree where git cannot say it")
    parser.add_argument("--seconds", type=float, default=150.0, help="what the tools together may take (150)")
    parser.add_argument("--launch", choices=PARTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.launch:
        launch(options.launch)
        return 0
    tools = options.tools.split(",")
    target = target_of()
    manifest = json.loads((jit.build_module(PACKAGE, target.name) / "manifest.json").read_text())
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as scratch:
        logs = options.logs or Path(scratch)
        logs.mkdir(parents=True, exist_ok=True)
        said, reports, clean = run_tools(tools, options.seconds, logs)
    result = {
        "what": "compute-sanitizer on forward and backward, every allocation its own",
        "gpu": torch.cuda.get_device_name(),
        "architecture": target.name,
        "driver": gpu_facts()["driver"],
        "date": datetime.date.today().isoformat(),
        "commit": options.commit or commit(Path(__file__).resolve().parents[3]),
        "torch": torch.__version__,
        "nvcc": manifest["compiler"],
        "programs": [record.program for record in programs_of(PACKAGE).records_for(target.name)],
        "tools": said,
        "reports": reports,
        "clean": clean,
        "seconds": round(time.monotonic() - begin),
    }
    text = json.dumps(result, indent=1) + "\n"
    print(text)
    path = options.out or Path(__file__).parent / "results" / f"sanitizer_{gpu_name()}.json"
    if options.write or options.out:
        write_whole(path, text)
    return 0 if clean else 1


if __name__ == "__main__":
    sys.exit(main())
