"""Runs small forwards and backwards under compute-sanitizer's four tools, side by side, and writes a summary.

    python packages/cake_gdn_det_train/benchmarks/sanitize.py --write

The calls launch every program of the records: packs with empty and ragged sequences, both widths of the chains, every
option, segments. Each tensor has an allocation of its own, so that a tool sees where one ends and which was written.
"""

import argparse
import datetime
import json
import os
import re
import subprocess
import sys
import time
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
from cake_shared.testing.gdn_inputs import base, packed, states
from cake_shared.testing.gdn_run import run

PACKAGE = "cake_gdn_det_train"
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")


def cases():
    """What runs under each tool, by name."""
    case = packed(base(140, 1, 2), (70, 0, 65))
    h0, ds = states(case, 3)
    yield "pack of 70, 0 and 65 tokens, 5 rows past them", case.with_(initial_state=h0, d_state=ds)
    case = base(70, 2, 6)
    options = {
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True,
        "A_log": torch.linspace(-0.5, 1.0, 6),
        "dt_bias": torch.linspace(-0.3, 0.3, 6),
        "use_beta_sigmoid_in_kernel": True,
        "allow_neg_eigval": True,
    }
    yield "every option, H/HV 2/6", case.with_(options=options, beta=case.beta.bfloat16())
    case = packed(base(8193 + 66, 1, 1), (8193, 66))
    h0, ds = states(case, 2)
    yield "segments: 8193 and 66 tokens", case.with_(initial_state=h0, d_state=ds)


def launch():
    """All cases with both widths of the chains."""
    backend = cuda.rule_backend(torch.device("cuda"))
    for _, case in cases():
        on_gpu = moved(case, "cuda")
        for multiprocessors in (1, 1000):
            backend.multiprocessors = multiprocessors
            run(chunk_gated_delta_rule, on_gpu)
            torch.cuda.synchronize()


def start(tool: str) -> subprocess.Popen:
    """The tool on this script's launches."""
    command = ["compute-sanitizer", "--tool", tool, "--print-limit", "20", sys.executable, __file__, "--launch"]
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment)


def verdict(tool: str, started: subprocess.Popen, seconds: float) -> tuple[str, bool]:
    """The last summary line of a tool, and whether it found nothing."""
    try:
        output, _ = started.communicate(timeout=max(seconds, 1.0))
    except subprocess.TimeoutExpired:
        started.kill()
        started.communicate()
        return "not run to its end", False
    lines = re.findall(r"SUMMARY: (.*)", output)
    said = lines[-1].strip() if lines else f"no summary, exit status {started.returncode}"
    clean = started.returncode == 0 and re.match(r"0 (errors|hazards)", said) is not None
    if not clean:
        print(f"{tool}:\n{output[-6000:]}", file=sys.stderr)
    return said, clean


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="keep the summary in benchmarks/results")
    parser.add_argument("--out", type=Path, help="write the summary to this file instead")
    parser.add_argument("--commit", default="", help="commit of this tree where git cannot say it")
    parser.add_argument("--seconds", type=float, default=150.0, help="what the tools together may take (150)")
    parser.add_argument("--launch", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.launch:
        launch()
        return 0
    target = target_of()
    manifest = json.loads((jit.build_module(PACKAGE, target.name) / "manifest.json").read_text())
    begin = time.monotonic()
    started = {tool: start(tool) for tool in TOOLS}
    found = {}
    for tool, process in started.items():
        found[tool] = verdict(tool, process, begin + options.seconds - time.monotonic())
        print(f"{tool}: {found[tool][0]}", flush=True)
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
        "cases": [name for name, _ in cases()],
        "tools": {tool: said for tool, (said, _) in found.items()},
        "clean": all(clean for _, clean in found.values()),
        "seconds": round(time.monotonic() - begin),
    }
    text = json.dumps(result, indent=1) + "\n"
    print(text)
    path = options.out or Path(__file__).parent / "results" / f"sanitizer_{gpu_name()}.json"
    if options.write or options.out:
        write_whole(path, text)
    return 0 if result["clean"] else 1


if __name__ == "__main__":
    sys.exit(main())
