"""Compares the gate stage on this GPU with the CPU plan, bit for bit, and writes the result file that its records name.

Run in the package's folder of a checkout: python benchmarks/check_gate.py [--out benchmarks/results/gate_h200.json]
"""

import argparse
import datetime
import json
import platform
import subprocess
import sys
from pathlib import Path

import torch

import cake_gdn_det_train
import cake_shared
from cake_gdn_det_train import cuda
from cake_shared import jit
from cake_shared.program import programs_of
from cake_shared.target import target_of
from cake_shared.testing.gate_cases import GATE_CASES, differences, expected

STAGES = ("pack_offsets", "prologue")
ROUNDS = 3


def command(*words: str) -> str:
    try:
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError) as error:
        return f"not known ({error})"


def check_case(case) -> list[str]:
    g = case.gates()
    g = torch.empty_strided(g.shape, g.stride(), dtype=g.dtype, device="cuda").copy_(g)
    cu_seqlens = case.cu_seqlens()
    word = cuda.error_word_of(g.device)
    stage = cuda.gate_sums(g, None if cu_seqlens is None else cu_seqlens.cuda())
    torch.cuda.synchronize()
    reported = int(word.tensor)
    word.tensor.zero_()
    got = {name: array.cpu() for name, array in {**stage.plan.views(stage.tables), "sums": stage.sums}.items()}
    found = differences(got, expected(case, stage.plan.chunk_capacity, stage.plan.segment_capacity))
    if reported != case.faults:
        found.append(f"error word: got {reported}, expected {case.faults}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "gate_h200.json")
    parser.add_argument("--commit", default=None, help="commit of the checkout (default: git's answer)")
    options = parser.parse_args()
    target = target_of()
    failures = {}
    for _ in range(ROUNDS):
        for case in GATE_CASES:
            found = check_case(case)
            if found:
                failures[case.name] = found
                print(f"{case.name}: {'; '.join(found)}", file=sys.stderr)
    records = [r for r in programs_of("cake_gdn_det_train").records_for(target.name) if r.stage in STAGES]
    entry = jit.build_module("cake_gdn_det_train", target.name)
    result = {
        "what": "gate stage against the CPU plan, bit for bit",
        "gpu": torch.cuda.get_device_name(),
        "architecture": target.name,
        "driver": command("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"),
        "date": datetime.date.today().isoformat(),
        "commit": options.commit or command("git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "nvcc": json.loads((entry / "manifest.json").read_text())["compiler"],
        "cake_shared": cake_shared.__version__,
        "cake_gdn_det_train": cake_gdn_det_train.__version__,
        "programs": [record.program for record in records],
        "cases": len(GATE_CASES),
        "rounds": ROUNDS,
        "passed": len(GATE_CASES) - len(failures),
        "failed": len(failures),
        "failures": failures,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
