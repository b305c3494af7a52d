"""The project's own matrix products: every stage of the packages, cut and whole, in the layouts that they serve."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

from cake_shared.emulator.conformance.model import Case, Check, Program

if TYPE_CHECKING:
    from cake_shared.emulator.conformance.recorded import Recorder

DET, SPLIT = "dense_projection_det_gemm", "dense_projection_gemm"
MULTIPROCESSORS = 16

# Keywords of GemmCase, then of the plan; every stage of the module also runs with _SIZES.
_SIZES = {"m": 137, "n": 264, "k": 100}
_DET_CASES = (
    ({"m": 137, "n": 56, "k": 330, "a_major": "m", "b_major": "n"}, {}),
    ({"m": 40, "n": 520, "k": 200, "a_major": "m"}, {}),
    ({"m": 72, "n": 264, "k": 330, "a_major": "m", "b_major": "n"}, {"pieces": 3}),
    ({"m": 300, "n": 264, "k": 200, "a_major": "m", "b_major": "n", "batch": 2}, {"pieces": 2, "whole": 1}),
    ({"m": 73, "n": 72, "k": 300, "a_major": "m", "b_major": "n", "out_major": "m"}, {"pieces": 2}),
)
# Two parts a tile at most: the order in which they come changes nothing.
_SPLIT_CASES = (
    ({"m": 130, "n": 264, "k": 70, "b_major": "n"}, {"whole_units": 2}),
    ({"m": 260, "n": 264, "k": 128, "a_major": "m", "b_major": "n"}, {"whole_units": 0, "pieces": 8}),
    ({"m": 48, "n": 520, "k": 200, "a_major": "m", "b_major": "n"}, {"whole_units": 0, "pieces": 4}),
)


def _problem(case: object) -> object:
    from cake_shared.gemm.problem import GemmProblem

    dtype = str(case.out_dtype).removeprefix("torch.")
    layout = (case.a_major, case.b_major, dtype, case.out_major, case.accumulate, "cuda")
    return GemmProblem(case.batch, case.m, case.n, case.k, *layout)


def _det(recorder: Recorder) -> None:
    import torch

    from cake_shared.testing.gemm_cuda import GemmCase
    from dense_projection_det_gemm.cuda import GemmBackend
    from dense_projection_det_gemm.cuda_plan import NATIVE, plan_gemm_cuda

    backend = GemmBackend(recorder.module, "sm_90a", MULTIPROCESSORS, lambda: 0)
    layouts = (("k", "k"), ("k", "n"), ("m", "n"), ("m", "k"))
    every_stage = [
        ({**_SIZES, "a_major": layouts[k % 4][0], "b_major": layouts[k % 4][1]}, {"stage": stage})
        for k, stage in enumerate(NATIVE)
    ]
    for dtype in (torch.bfloat16, torch.float32):
        for keywords, choices in (*every_stage, *_DET_CASES):
            case = GemmCase(**keywords, out_dtype=dtype, pad=1)
            problem = _problem(case)
            plan = plan_gemm_cuda(problem, backend.native, **choices)
            operands = case.operands("cpu")
            backend.prepare("gemm_out", problem, *operands, case.output("cpu")[0], plan)[1]()


def _backward(recorder: Recorder) -> None:
    """Both gradients side by side, whichever comes first."""
    import torch

    from cake_shared.gemm.problem import GemmProblem
    from dense_projection_det_gemm.cuda import GemmBackend
    from dense_projection_det_gemm.cuda_backward_plan import CudaBackwardPlan
    from dense_projection_det_gemm.cuda_plan import plan_gemm_cuda

    backend = GemmBackend(recorder.module, "sm_90a", MULTIPROCESSORS, lambda: 0)
    generator = torch.Generator().manual_seed(0)
    for tokens, d_in, d_out, pieces, dgrad_first in ((650, 520, 48, 3, False), (200, 264, 64, 1, True)):
        g, x, w = (
            torch.randn(1, *shape, generator=generator).bfloat16()
            for shape in ((tokens, d_out), (tokens, d_in), (d_out, d_in))
        )
        dx, dw = torch.zeros(1, tokens, d_in, dtype=torch.bfloat16), torch.zeros(1, d_out, d_in)
        dgrad = GemmProblem(1, tokens, d_in, d_out, "k", "n", "bfloat16", target="cuda")
        wgrad = GemmProblem(1, d_out, d_in, tokens, "m", "n", "float32", target="cuda")
        plans = plan_gemm_cuda(dgrad), plan_gemm_cuda(wgrad, stage="slim_out", pieces=pieces)
        plan = CudaBackwardPlan(*plans, beside=True, dgrad_first=dgrad_first)
        backend.prepare_backward((dgrad, g, w, dx), (wgrad, g.transpose(1, 2), x, dw), plan)[1]()


def _router(recorder: Recorder) -> None:
    import torch

    from cake_shared.gemm.problem import RouterProblem
    from dense_projection_det_gemm.cuda import GemmBackend
    from dense_projection_det_gemm.cuda_router_plan import plan_router_cuda

    backend = GemmBackend(recorder.module, "sm_90a", MULTIPROCESSORS, lambda: 0)
    generator = torch.Generator().manual_seed(0)

    def rows(count: int, depth: int, dtype: torch.dtype) -> torch.Tensor:
        buffer = torch.zeros(count, -(-depth // 8) * 8, dtype=dtype)
        return buffer[:, :depth].copy_(torch.randn(count, depth, generator=generator))

    for m, n, k, dtype in ((130, 40, 72, torch.float32), (70, 264, 136, torch.bfloat16), (264, 136, 70, torch.float32)):
        a, b = rows(m, k, dtype), rows(n, k, torch.float32).t()
        terms = 3 if dtype == torch.float32 else 1
        problem = RouterProblem(m=m, n=n, k=k, a_major="k", b_major="k", a_terms=terms, b_terms=3, target="cuda")
        plan = plan_router_cuda(problem, MULTIPROCESSORS)
        backend.router.prepare(problem, a, b, torch.zeros(m, n), plan)[1]()


def _router_wgrad(recorder: Recorder) -> None:
    import torch

    from cake_shared.gemm.problem import RouterProblem
    from dense_projection_det_gemm.cuda import GemmBackend

    generator = torch.Generator().manual_seed(0)
    g, x = torch.randn(600, 40, generator=generator), torch.randn(600, 72, generator=generator)
    problem = RouterProblem(m=40, n=72, k=600, a_major="m", b_major="n", a_terms=3, b_terms=3, target="cuda")
    backend = GemmBackend(recorder.module, "sm_90a", MULTIPROCESSORS, lambda: 0)
    backend.router.prepare(problem, g.t(), x, torch.zeros(40, 72))[1]()


def _split(recorder: Recorder) -> None:
    import torch

    from cake_shared.testing.gemm_cuda import GemmCase
    from dense_projection_gemm.cuda import SplitBackend
    from dense_projection_gemm.cuda_plan import plan_split

    for dtype in (torch.bfloat16, torch.float32):
        for keywords, choices in _SPLIT_CASES:
            case = GemmCase(**keywords, out_dtype=dtype)
            plan = plan_split(_problem(case), MULTIPROCESSORS, **choices)
            backend = SplitBackend(recorder.module, MULTIPROCESSORS, lambda: 0)
            backend.prepare(plan, *case.operands("cpu"), case.output("cpu")[0])()


def _out(name: str, size: int) -> Check | None:
    return Check(name, "", "u8", size) if name.endswith((" out", " other_out")) else None


def _case(package: str, call: object) -> Case:
    from cake_shared.emulator.conformance.recorded import record

    return record(package, call, _out)


PROGRAMS = []
if importlib.util.find_spec(DET):
    PROGRAMS += [
        Program("deterministic gemm", "own programs", lambda: _case(DET, _det)),
        Program("gradients of a projection", "own programs", lambda: _case(DET, _backward)),
        Program("router", "own programs", lambda: _case(DET, _router)),
        Program("weight gradient of the router", "own programs", lambda: _case(DET, _router_wgrad)),
    ]
if importlib.util.find_spec(SPLIT):
    PROGRAMS.append(Program("split gemm", "own programs", lambda: _case(SPLIT, _split)))
