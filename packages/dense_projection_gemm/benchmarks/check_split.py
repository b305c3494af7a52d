"""Compares the split programs on this GPU with float64, and writes the result file that the records name.

Run in the package's folder of a checkout: python benchmarks/check_split.py [--out benchmarks/results/split_h200.json].
With --sanitize it also runs a few launches under compute-sanitizer's four tools.
"""

import sys
from pathlib import Path

import torch

import dense_projection_det_gemm as det
import dense_projection_gemm as free
from cake_shared.bench.gemm import BF16_LIMIT, relative_error
from cake_shared.bench.gemm_check import Findings, GemmCheck
from cake_shared.gemm import oracle
from cake_shared.gemm.problem import GemmProblem
from cake_shared.testing.bits import same_bits
from cake_shared.testing.gemm_cuda import GemmCase, fp32_limit, layout_cases, normal
from dense_projection_gemm import cuda
from dense_projection_gemm.cuda_plan import plan_split

BF16, FP32 = torch.bfloat16, torch.float32
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


def check_backward(tokens, d_in, d_out, findings):
    """Both gradients in one call of `deterministic=False`: their errors, and the bits of the deterministic form."""
    shapes = (tokens, d_out), (tokens, d_in), (d_out, d_in)
    g, x, w = (normal(*shape, seed=seed) for seed, shape in enumerate(shapes))
    results = free.projection_backward(g, x, w, out_dtype=FP32, deterministic=False)
    twins = det.projection_backward(g, x, w, out_dtype=FP32)
    exact, limits = (oracle.dgrad(g, w), oracle.wgrad(g, x)), (BF16_LIMIT, fp32_limit(tokens))
    for part, result, twin, right, limit in zip(("dx", "dw"), results, twins, exact, limits):
        label = f"backward {tokens}, {d_in} -> {d_out}: {part}"
        findings.errors[label] = error = relative_error(result, right)
        found = [] if error <= limit else [f"error {error:.2e}, limit {limit:.1e}"]
        if not same_bits(result, twin):
            found.append("other bits than deterministic=True")
        if found:
            findings.refuse(label, "; ".join(found))


def launch_for_the_sanitizer():
    """A few launches of every program: whole and split tiles, both tiles, BF16, FP32 and accumulated results."""
    backend = cuda.split_backend(torch.device("cuda"))
    for case, multiprocessors in (
        (GemmCase(260, 264, 140, "m", "n", FP32), 6),
        (GemmCase(260, 264, 140, "k", "n", BF16, pad=1), 6),
        (GemmCase(48, 520, 200, "m", "n", FP32, accumulate=True), 6),
        (GemmCase(40, 264, 200, "k", "k", BF16), 6),
        (GemmCase(72, 64, 130, "k", "k", FP32, "m", batch=2), 6),
    ):
        (a, b), (out, _) = case.operands("cuda"), case.output("cuda")
        backend.prepare(plan_split(problem_of(case), multiprocessors), a, b, out)()


def measure() -> Findings:
    """Errors, and what is wrong, of all cases."""
    backend, findings = cuda.split_backend(torch.device("cuda")), Findings()
    for name, case, counts in cases():
        for multiprocessors in counts:
            label = f"{name}, {multiprocessors} SMs"
            error, limit = check(backend, case, multiprocessors)
            findings.errors[label] = error
            if not error <= limit:
                findings.refuse(label, f"error {error:.2e}, limit {limit:.1e}")
    for tokens in (16231, 16384):
        for d_in, d_out in ((4096, 48), (5120, 64), (4096, 512), (5120, 1024)):
            check_backward(tokens, d_in, d_out, findings)
    return findings


CHECK = GemmCheck(
    package="dense_projection_gemm",
    version=free.__version__,
    script=Path(__file__),
    result="split_h200.json",
    what="split GEMMs against float64 (relative L2), the largest of some repeats, planned for several SM counts",
    repeats=REPEATS,
    measure=measure,
    launch=launch_for_the_sanitizer,
)

if __name__ == "__main__":
    sys.exit(CHECK.main())
