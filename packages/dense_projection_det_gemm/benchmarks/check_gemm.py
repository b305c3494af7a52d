"""Compares the GEMMs on this GPU with float64 and with themselves, and writes the result file that the records name.

Run in the package's folder of a checkout: python benchmarks/check_gemm.py [--out benchmarks/results/gemm_h200.json].
With --sanitize it also runs a few launches of every program under compute-sanitizer's four tools.
"""

import argparse
import datetime
import hashlib
import json
import platform
import subprocess
import sys
from pathlib import Path

import torch

import cake_shared
import dense_projection_det_gemm as det
from cake_shared import jit
from cake_shared.bench.gemm import relative_error
from cake_shared.bench.gpu import gpu_facts
from cake_shared.gemm import oracle
from cake_shared.program import programs_of
from cake_shared.target import target_of
from cake_shared.testing.bits import bits_of, same_bits
from cake_shared.testing.gemm_cuda import RAGGED, GemmCase, fp32_limit, layout_cases, normal
from cake_shared.testing.sanitizer import sanitize
from dense_projection_det_gemm import cuda

PACKAGE = "dense_projection_det_gemm"
BF16, FP32 = torch.bfloat16, torch.float32
REPEATS = 20
BF16_LIMIT = 2.5e-3
ROUTER_LIMIT = 3e-7


def gemm_cases():
    """Named cases of the BF16 GEMM."""
    for index, case in enumerate(RAGGED):
        yield f"ragged {index}: {case.m} x {case.n} x {case.k}", case
    for case in layout_cases(130, 72, 200, batch=2, pad=1):
        majors = f"{case.a_major}{case.b_major}{case.out_major}"
        kind = "accumulated" if case.accumulate else str(case.out_dtype).removeprefix("torch.")
        yield f"layout {majors}, {kind}", case
    for tokens in (16172, 16231, 16384):
        for d_in, d_out in ((4096, 48), (5120, 64), (4096, 512), (1024, 1024)):
            yield f"forward {tokens}, {d_in} -> {d_out}", GemmCase(tokens, d_out, d_in, "k", "k")
            yield f"dgrad {tokens}, {d_in} -> {d_out}", GemmCase(tokens, d_in, d_out, "k", "n")
            yield f"wgrad {tokens}, {d_in} -> {d_out}", GemmCase(d_out, d_in, tokens, "m", "n", FP32)


def router_cases():
    """Named cases of the router: operands, the call and its float64 value."""
    for tokens, d_in, experts in ((4096, 6144, 256), (333, 200, 40)):
        for dtype in (FP32, BF16):
            x, w, g = (
                normal(*shape, seed=seed, dtype=FP32)
                for seed, shape in enumerate(((tokens, d_in), (experts, d_in), (tokens, experts)))
            )
            x = x.to(dtype)
            name = f"router {tokens}, {d_in} -> {experts}, x {str(dtype).removeprefix('torch.')}"
            yield f"{name}, forward", lambda x=x, w=w: det.router_forward(x, w), oracle.forward(x, w)
            yield f"{name}, wgrad", lambda g=g, x=x: det.router_wgrad(g, x), oracle.wgrad(g, x)
        yield (
            f"router {tokens}, {d_in} -> {experts}, dgrad",
            lambda g=g, w=w: det.router_dgrad(g, w),
            oracle.dgrad(g, w),
        )


def calls():
    """All cases: name, call, float64 value, limit."""
    for name, case in gemm_cases():
        a, b = case.operands("cuda")
        prior, _ = case.output("cuda")

        def call(case=case, a=a, b=b):
            out, _ = case.output("cuda")
            det.dense_projection_det_gemm(a, b, out, case.out_major == "m", accumulate=case.accumulate)
            return out

        exact = oracle.product(a, b) + (prior.double() if case.accumulate else 0.0)
        yield name, call, exact, BF16_LIMIT if case.out_dtype == BF16 else fp32_limit(case.k)
    for name, call, exact in router_cases():
        yield name, call, exact, ROUTER_LIMIT


def check(backend, call, exact, limit):
    """The error, the hash of the result, and what is wrong."""
    result, found = call(), []
    error = relative_error(result, exact)
    if not error <= limit:
        found.append(f"error {error:.2e}, limit {limit:.1e}")
    if any(not same_bits(call(), result) for _ in range(REPEATS)):
        found.append("other bits on a repeat")
    real = backend.multiprocessors
    for pretended in (1, 1000):
        backend.multiprocessors = pretended
        if not same_bits(call(), result):
            found.append(f"other bits when planned for {pretended} multiprocessors")
    backend.multiprocessors = real
    return error, hashlib.sha256(bits_of(result).cpu().numpy().tobytes()).hexdigest(), found


def launch_for_the_sanitizer():
    """A few launches of every program, small enough for a tool that slows them down a thousand times."""
    small = (
        GemmCase(130, 72, 200, "k", "k"),
        GemmCase(130, 72, 100, "k", "n", BF16, batch=2, pad=1),
        GemmCase(72, 136, 700, "m", "n", FP32, accumulate=True),
        GemmCase(65, 40, 33, "m", "k", FP32, "m"),
        GemmCase(48, 264, 2100, "m", "n", FP32),
        GemmCase(300, 520, 130, "k", "k"),
    )
    for case in small:
        (a, b), (out, _) = case.operands("cuda"), case.output("cuda")
        det.dense_projection_det_gemm(a, b, out, case.out_major == "m", accumulate=case.accumulate)
    x, w, g = (normal(*s, seed=i, dtype=FP32) for i, s in enumerate(((130, 200), (40, 200), (130, 40))))
    x[1, 0], x[3, 2], x[3, 1] = float("inf"), 1e38, 1e-38
    det.router_forward(x, w)
    det.router_forward(x.bfloat16(), w)
    det.router_dgrad(g, w)
    det.router_wgrad(g, x)
    torch.cuda.synchronize()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "gemm_h200.json")
    parser.add_argument("--commit", default=None, help="commit of the checkout (default: git's answer)")
    parser.add_argument("--sanitize", action="store_true", help="run a few launches under compute-sanitizer too")
    parser.add_argument("--seconds", type=float, default=150.0, help="after which the tools are stopped")
    parser.add_argument("--launch", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.launch:
        launch_for_the_sanitizer()
        return 0
    target = target_of()
    backend = cuda.gemm_backend(torch.device("cuda"))
    failures, errors, hashes = {}, {}, {}
    for name, call, exact, limit in calls():
        errors[name], hashes[name], found = check(backend, call, exact, limit)
        if found:
            failures[name] = found
            print(f"{name}: {'; '.join(found)}", file=sys.stderr)
    commit = options.commit
    if commit is None:
        command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
        commit = subprocess.run(command, capture_output=True, text=True).stdout.strip() or "not known"
    manifest = json.loads((jit.build_module(PACKAGE, target.name) / "manifest.json").read_text())
    result = {
        "what": "GEMMs against float64 (relative L2), repeated and planned for other SM counts for their bits",
        "gpu": torch.cuda.get_device_name(),
        "architecture": target.name,
        "driver": gpu_facts()["driver"],
        "date": datetime.date.today().isoformat(),
        "commit": commit,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "nvcc": manifest["compiler"],
        "cake_shared": cake_shared.__version__,
        PACKAGE: det.__version__,
        "programs": [record.program for record in programs_of(PACKAGE).records_for(target.name)],
        "cases": len(errors),
        "repeats": REPEATS,
        "passed": len(errors) - len(failures),
        "failed": len(failures),
        "failures": failures,
        "sha256": hashes,
        "errors": {name: float(f"{error:.2e}") for name, error in errors.items()},
    }
    clean = True
    if options.sanitize:
        result["compute_sanitizer"], clean = sanitize(Path(__file__), options.seconds)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({name: value for name, value in result.items() if name not in ("sha256", "errors")}, indent=1))
    return 1 if failures or not clean else 0


if __name__ == "__main__":
    sys.exit(main())
