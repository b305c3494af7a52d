"""Compares the split programs on this GPU with float64, and writes the result file that the records name.

Run in the package's folder of a checkout: python benchmarks/check_split.py [--out benchmarks/results/split_h200.json].
With --sanitize it also runs a few launches under compute-sanitizer's four tools.
"""

import argparse
import datetime
import json
import platform
import sys
from pathlib import Path

import torch

import cake_shared
import dense_projection_gemm as free
from cake_shared import jit
from cake_shared.bench.environment import commit
from cake_shared.bench.gemm import relative_error
from cake_shared.bench.gpu import gpu_facts
from cake_shared.gemm import oracle
from cake_shared.gemm.problem import GemmProblem
from cake_shared.program import programs_of
from cake_shared.target import target_of
from cake_shared.testing.gemm_cuda import GemmCase, fp32_limit, layout_cases
from cake_shared.testing.sanitizer import sanitize
from dense_projection_gemm import cuda
from dense_projection_gemm.cuda_plan import plan_split

PACKAGE = "dense_projection_gemm"
BF16, FP32 = torch.bfloat16, torch.float32
BF16_LIMIT = 2.5e-3
REPEATS = 8


def cases():
    """Named cases, with the numbers of SMs that they are planned for."""
    for extents in ((136, 72, 200), (48, 520, 1000)):
        for case in layout_cases(*extents, batch=2, pad=1):
            kind = "accumulated" if case.accumulate else str(case.out_dtype).removeprefix("torch.")
            yield f"{case.a_major}{case.b_major}{case.out_major} {extents}, {kind}", case, (2, 10, 132)
    for tokens in (16231, 16384):
        for d_in, d_out in ((4096, 48), (5120, 64), (4096, 512), (5120, 1024)):
            for out_dtype in (FP32, BF16):
                name = f"wgrad {tokens}, {d_in} -> {d_out}, {str(out_dtype).removeprefix('torch.')}"
                yield name, GemmCase(d_out, d_in, tokens, "m", "n", out_dtype), (132,)


def problem_of(case):
    """The problem of a case on CUDA."""
    dtype = str(case.out_dtype).removeprefix("torch.")
    layout = (case.a_major, case.b_major, dtype, case.out_major, case.accumulate, "cuda")
    return GemmProblem(case.batch, case.m, case.n, case.k, *layout)


def check(backend, case, multiprocessors):
    """The largest relative error over repeats, sums arriving in another order each time, and the limit."""
    plan = plan_split(problem_of(case), multiprocessors)
    a, b = case.operands("cuda")
    prior, _ = case.output("cuda")
    exact = oracle.product(a, b) + (prior.double() if case.accumulate else 0.0)
    worst = 0.0
    for _ in range(REPEATS):
        out, _ = case.output("cuda")
        backend.prepare(plan, a, b, out)()
        worst = max(worst, relative_error(out, exact))
    return worst, BF16_LIMIT if case.out_dtype == BF16 else fp32_limit(case.k)


def launch_for_the_sanitizer(backend):
    """A few launches of every program: whole and split tiles, both tiles, BF16, FP32 and accumulated results."""
    for case, multiprocessors in (
        (GemmCase(260, 264, 140, "m", "n", FP32), 6),
        (GemmCase(260, 264, 140, "k", "n", BF16, pad=1), 6),
        (GemmCase(48, 520, 200, "m", "n", FP32, accumulate=True), 6),
        (GemmCase(40, 264, 200, "k", "k", BF16), 6),
        (GemmCase(72, 64, 130, "k", "k", FP32, "m", batch=2), 6),
    ):
        (a, b), (out, _) = case.operands("cuda"), case.output("cuda")
        backend.prepare(plan_split(problem_of(case), multiprocessors), a, b, out)()
    torch.cuda.synchronize()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "split_h200.json")
    parser.add_argument("--commit", default="", help="commit of the checkout where git cannot say it")
    parser.add_argument("--sanitize", action="store_true", help="run a few launches under compute-sanitizer too")
    parser.add_argument("--seconds", type=float, default=150.0, help="after which the tools are stopped")
    parser.add_argument("--launch", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    backend = cuda.split_backend(torch.device("cuda"))
    if options.launch:
        launch_for_the_sanitizer(backend)
        return 0
    errors, failures = {}, {}
    for name, case, counts in cases():
        for multiprocessors in counts:
            label = f"{name}, {multiprocessors} SMs"
            errors[label], limit = check(backend, case, multiprocessors)
            if not errors[label] <= limit:
                failures[label] = f"error {errors[label]:.2e}, limit {limit:.1e}"
                print(f"{label}: {failures[label]}", file=sys.stderr)
    target = target_of()
    manifest = json.loads((jit.build_module(PACKAGE, target.name) / "manifest.json").read_text())
    result = {
        "what": "split GEMMs against float64 (relative L2), the largest of some repeats, planned for several SM counts",
        "gpu": torch.cuda.get_device_name(),
        "architecture": target.name,
        "driver": gpu_facts()["driver"],
        "date": datetime.date.today().isoformat(),
        "commit": options.commit or commit(Path(__file__).resolve().parents[3]),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "nvcc": manifest["compiler"],
        "cake_shared": cake_shared.__version__,
        PACKAGE: free.__version__,
        "programs": [record.program for record in programs_of(PACKAGE).records_for(target.name)],
        "cases": len(errors),
        "repeats": REPEATS,
        "passed": len(errors) - len(failures),
        "failed": len(failures),
        "failures": failures,
        "errors": {name: float(f"{error:.2e}") for name, error in errors.items()},
    }
    clean = True
    if options.sanitize:
        result["compute_sanitizer"], clean = sanitize(Path(__file__), options.seconds)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({name: value for name, value in result.items() if name != "errors"}, indent=1))
    return 1 if failures or not clean else 0


if __name__ == "__main__":
    sys.exit(main())
