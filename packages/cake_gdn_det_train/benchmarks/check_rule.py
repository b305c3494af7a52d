"""Compares the rule on this GPU with float64 and with itself, and writes the result file that its records name.

    python packages/cake_gdn_det_train/benchmarks/check_rule.py
    python packages/cake_gdn_det_train/benchmarks/check_rule.py --package cake_gdn_train

The twin promises no bits; today it runs the same blocks, so its repeats are compared too.
"""

import argparse
import datetime
import hashlib
import importlib
import json
import platform
import subprocess
import sys
import time
from pathlib import Path

import torch

import cake_shared
from cake_shared import jit
from cake_shared.bench.gdn_oracle import float64_rule
from cake_shared.program import programs_of
from cake_shared.target import target_of
from cake_shared.testing.bits import bits_of, same_bits
from cake_shared.testing.gdn_cuda import exit_paths, gate_gradient_scale, moved, on_cpu
from cake_shared.testing.gdn_inputs import GATES, base, packed, states
from cake_shared.testing.gdn_reference import SMALLEST_NORMAL, widened
from cake_shared.testing.gdn_run import run

PACKAGES = ("cake_gdn_det_train", "cake_gdn_train")
# Of the deterministic package check_gate.py compares them with the CPU bit for bit.
GATE_STAGES = ("pack_offsets", "prologue")
REPEATS = 20

# Relative L2 error against float64 that no result may pass: products have BF16 operands, gates at zero do not damp it.
LIMIT = 6e-3
# Sums of dg over tokens may be smaller than what they add.
SUMS_LIMIT = 2e-2

# gate_gradient_scale holds a sequence's pairs of tokens at once.
DENSE_TOKENS = 2048
# float64_rule takes sequences one by one.
FEW_SEQUENCES = 100


def command(*words: str) -> str:
    try:
        return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError) as error:
        return f"not known ({error})"


def with_states(case, sequences):
    h0, ds = states(case, sequences)
    return case.with_(initial_state=h0, d_state=ds)


def cases():
    """Named cases; together they launch every program of the rule."""
    for gate in GATES:
        yield f"gates {gate}", with_states(base(1000, 1, 2, gate=gate), 1)
    for heads, value_heads in ((1, 1), (1, 3), (2, 8), (1, 5)):
        yield f"heads {heads}/{value_heads}", base(330, heads, value_heads)
    yield "batch of three", with_states(base(200, 2, 4, B=3), 3)
    yield "pack with empty sequences", with_states(packed(base(300, 1, 2), (0, 5, 0, 65, 200)), 5)
    lengths = tuple(3 * (i % 35 == 0) for i in range(1030))  # more than the prologue scans by itself
    yield "pack of 1030 sequences", with_states(packed(base(sum(lengths), 1, 2), lengths), len(lengths))
    yield "segments", with_states(packed(base(8193 + 12288 + 70, 1, 2), (8193, 70, 12288)), 3)
    case = with_states(base(200, 1, 2), 1)
    options = {
        "use_qk_l2norm_in_kernel": True,
        "use_gate_in_kernel": True,
        "A_log": torch.tensor([-0.5, 1.0]),
        "dt_bias": torch.tensor([0.3, -0.2]),
        "use_beta_sigmoid_in_kernel": True,
        "allow_neg_eigval": True,
    }
    yield "all options", case.with_(q=case.q * 3, k=case.k * 2, g=torch.randn(1, 200, 2), options=options)


def digest(results) -> str:
    """SHA-256 of all results, in the order of their names."""
    sha = hashlib.sha256()
    for name in sorted(name for name, x in results.items() if x is not None):
        sha.update(name.encode())
        sha.update(bits_of(results[name]).cpu().numpy().tobytes())
    return sha.hexdigest()


def right_results(rule, case) -> dict[str, tuple[torch.Tensor, float]]:
    """Float64 results, each with the size that its error is judged against; on the GPU where that is the quicker."""
    few = case.cu_seqlens is None or len(case.cu_seqlens) < FEW_SEQUENCES
    there = moved(widened(case), "cuda") if few and not case.options else widened(case)
    expected = on_cpu(run(rule if there.q.device.type == "cpu" else float64_rule, there))
    sizes = {name: float(x.norm()) for name, x in expected.items() if x is not None}
    if not case.options and case.g.shape[1] <= DENSE_TOKENS:
        with torch.device(there.q.device):
            sizes["dg"] = gate_gradient_scale(there, expected)
    elif not case.options:
        sizes["dg"] += exit_paths(case, expected)
    return {name: (expected[name], size) for name, size in sizes.items()}


def check_case(rule, case, right) -> tuple[dict[str, float], str, list[str]]:
    """Errors by result, the hash of all results, and what is wrong."""
    on_gpu = moved(case, "cuda")
    results = run(rule, on_gpu)
    found = []
    for _ in range(REPEATS):
        again = run(rule, on_gpu)
        found += [f"{name}: other bits on a repeat" for name in results if not same_bits(again[name], results[name])]
    errors = {}
    for name, actual in on_cpu(results).items():
        if actual is None:
            continue
        expected, size = right[name]
        error = float((actual.double() - expected).norm())
        errors[name] = error / size if size else error
        limit = SUMS_LIMIT if name in ("dA_log", "ddt_bias") else LIMIT
        # What FP32 holds as less than a normal number, such as a state behind a gate of -100, may be zero.
        if not error <= limit * size + SMALLEST_NORMAL * actual.numel() ** 0.5:
            found.append(f"{name}: error {errors[name]:.2e}, limit {limit:.1e}")
    return errors, digest(results), sorted(set(found))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--package", choices=PACKAGES, default=PACKAGES[0])
    parser.add_argument("--out", type=Path, help="default: rule_h200.json in the results of the package")
    parser.add_argument("--commit", default=None, help="commit of the checkout (default: git's answer)")
    options = parser.parse_args()
    package = importlib.import_module(options.package)
    cuda = importlib.import_module(f"{options.package}.cuda")
    out = options.out or Path(__file__).parents[2] / options.package / "benchmarks" / "results" / "rule_h200.json"
    begin = time.monotonic()
    torch.manual_seed(0)
    target = target_of()
    failures, errors, hashes = {}, {}, {}
    backend = cuda.rule_backend(torch.device("cuda"))
    for name, case in cases():
        right = right_results(package.chunk_gated_delta_rule, case)
        for pretended in (1, 1000):  # both widths of the chains
            backend.multiprocessors = pretended
            errors[name], hashed, found = check_case(package.chunk_gated_delta_rule, case, right)
            if hashes.setdefault(name, hashed) != hashed:
                found.append("the two widths of the chains give other bits")
            if found:
                failures[name] = found
                print(f"{name}: {'; '.join(found)}", file=sys.stderr, flush=True)
        print(f"{name}: {time.monotonic() - begin:.1f} s", flush=True)
    entry = jit.build_module(options.package, target.name)
    apart = GATE_STAGES if options.package == PACKAGES[0] else ()
    records = [r for r in programs_of(options.package).records_for(target.name) if r.stage not in apart]
    result = {
        "what": "the rule against float64 (relative L2), with both widths of the chains, repeated for its bits",
        "gpu": torch.cuda.get_device_name(),
        "architecture": target.name,
        "driver": command("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"),
        "date": datetime.date.today().isoformat(),
        "commit": options.commit or command("git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "nvcc": json.loads((entry / "manifest.json").read_text())["compiler"],
        "cake_shared": cake_shared.__version__,
        options.package: package.__version__,
        "programs": [record.program for record in records],
        "cases": len(errors),
        "repeats": REPEATS,
        "passed": len(errors) - len(failures),
        "failed": len(failures),
        "failures": failures,
        "sha256": hashes,
        "errors": {name: {k: float(f"{v:.2e}") for k, v in by.items()} for name, by in errors.items()},
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
