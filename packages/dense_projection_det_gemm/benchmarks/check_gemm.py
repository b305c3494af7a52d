"""Compares the GEMMs on this GPU with float64 and with themselves, and writes the result file that the records name.

Run in the package's folder of a checkout: python benchmarks/check_gemm.py [--out benchmarks/results/gemm_h200.json].
With --sanitize it also runs a few launches of every program under compute-sanitizer's four tools.
"""

import hashlib
import sys
from pathlib import Path

import torch

import dense_projection_det_gemm as det
from cake_shared.bench.gemm import BF16_LIMIT, relative_error
from cake_shared.bench.gemm_check import Findings, GemmCheck
from cake_shared.gemm import oracle
from cake_shared.gemm.problem import GemmProblem
from cake_shared.testing.bits import bits_of, same_bits
from cake_shared.testing.gemm_cuda import RAGGED, GemmCase, fp32_limit, layout_cases, normal
from dense_projection_det_gemm import cuda
from dense_projection_det_gemm.cuda_plan import NATIVE, plan_gemm_cuda

BF16, FP32 = torch.bfloat16, torch.float32
REPEATS = 20
ROUTER_LIMIT = 3e-7
PUBLISHED = [
    (t, *widths) for t in (16172, 16231, 16384) for widths in ((4096, 48), (5120, 64), (4096, 512), (1024, 1024))
]
SMALL = ((137, 264, 72), (1, 64, 8), (300, 72, 136))


def gemm_cases():
    """Named cases of the BF16 GEMM."""
    for index, case in enumerate(RAGGED):
        yield f"ragged {index}: {case.m} x {case.n} x {case.k}", case
    for case in layout_cases(130, 72, 200, batch=2, pad=1):
        majors = f"{case.a_major}{case.b_major}{case.out_major}"
        kind = "accumulated" if case.accumulate else str(case.out_dtype).removeprefix("torch.")
        yield f"layout {majors}, {kind}", case
    for tokens, d_in, d_out in PUBLISHED:
        yield f"forward {tokens}, {d_in} -> {d_out}", GemmCase(tokens, d_out, d_in, "k", "k")
        yield f"dgrad {tokens}, {d_in} -> {d_out}", GemmCase(tokens, d_in, d_out, "k", "n")
        yield f"wgrad {tokens}, {d_in} -> {d_out}", GemmCase(d_out, d_in, tokens, "m", "n", FP32)


def backward_cases():
    """Named cases of both gradients in one call: that, two calls of one each, the float64 values, the limits."""
    for tokens, d_in, d_out in (*PUBLISHED, *SMALL):
        shapes = (tokens, d_out), (tokens, d_in), (d_out, d_in)
        g, x, w = (normal(*shape, seed=seed) for seed, shape in enumerate(shapes))
        exact = [oracle.dgrad(g, w), oracle.wgrad(g, x)]
        for kind, dtype in (("FP32", FP32), ("BF16", BF16), ("accumulated", FP32)):
            adds = kind == "accumulated"

            def prior(w=w, adds=adds):
                return torch.ones_like(w, dtype=FP32) if adds else None

            def both(g=g, x=x, w=w, dtype=dtype, adds=adds, prior=prior):
                return det.projection_backward(g, x, w, prior(), dtype, adds)

            def apart(g=g, x=x, w=w, dtype=dtype, adds=adds, prior=prior):
                return det.projection_dgrad(g, w), det.projection_wgrad(g, x, prior(), dtype, adds)

            right = exact[0], exact[1] + 1 if adds else exact[1]
            limits = BF16_LIMIT, BF16_LIMIT if dtype == BF16 else fp32_limit(tokens)
            yield f"backward {tokens}, {d_in} -> {d_out}, dw {kind}", both, apart, right, limits


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
    return error, digest_of(result), found


def digest_of(result):
    """A hash of a result's bits."""
    return hashlib.sha256(bits_of(result).cpu().numpy().tobytes()).hexdigest()


def check_backward(backend, name, both, apart, right, limits, findings):
    """Each gradient as `check` does, and its bits beside those of a call of its own."""
    for place, (part, expected) in enumerate(zip(("dx", "dw"), apart())):
        label = f"{name}: {part}"
        error, digest, found = check(backend, lambda place=place: both()[place], right[place], limits[place])
        findings.errors[label], findings.sha256[label] = error, digest
        if digest != digest_of(expected):
            found.append("other bits than a call of its own")
        if found:
            findings.refuse(label, found)


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
    # So few tiles run few of the programs of their own accord.
    case, backend = GemmCase(300, 264, 136, "k", "k"), cuda.gemm_backend(torch.device("cuda"))
    problem = GemmProblem(1, case.m, case.n, case.k, "k", "k", "bfloat16", target="cuda")
    for stage in NATIVE:
        (a, b), (out, _) = case.operands("cuda"), case.output("cuda")
        backend.prepare("gemm_out", problem, a, b, out, plan_gemm_cuda(problem, backend.native, stage=stage))[1]()
    for d_out in (40, 264):  # side by side, partial sums among them
        g, x, w = (normal(*s, seed=i) for i, s in enumerate(((2100, d_out), (2100, 264), (d_out, 264))))
        det.projection_backward(g, x, w, out_dtype=FP32)
    x, w, g = (normal(*s, seed=i, dtype=FP32) for i, s in enumerate(((130, 200), (40, 200), (130, 40))))
    x[1, 0], x[3, 2], x[3, 1] = float("inf"), 1e38, 1e-38
    det.router_forward(x, w)
    det.router_forward(x.bfloat16(), w)
    det.router_dgrad(g, w)
    det.router_wgrad(g, x)


def measure() -> Findings:
    """Errors, hashes, and what is wrong, of all cases."""
    backend, findings = cuda.gemm_backend(torch.device("cuda")), Findings()
    for name, call, exact, limit in calls():
        findings.errors[name], findings.sha256[name], found = check(backend, call, exact, limit)
        if found:
            findings.refuse(name, found)
    for name, *case in backward_cases():
        check_backward(backend, name, *case, findings)
    return findings


CHECK = GemmCheck(
    package="dense_projection_det_gemm",
    version=det.__version__,
    script=Path(__file__),
    result="gemm_h200.json",
    what="GEMMs against float64 (relative L2), repeated and planned for other SM counts for their bits",
    repeats=REPEATS,
    measure=measure,
    launch=launch_for_the_sanitizer,
)

if __name__ == "__main__":
    sys.exit(CHECK.main())
