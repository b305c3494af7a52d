"""Both gradients by one call into the module, in the emulator: side by side or not, the bits of two calls."""

import dataclasses
import math

import pytest
import torch

from cake_shared.emulator import Options
from cake_shared.gemm.problem import GemmProblem
from cake_shared.target import TARGETS
from cake_shared.testing.emulated import emulated_or_skip
from dense_projection_det_gemm import cuda
from dense_projection_det_gemm.cuda_backward_plan import plan_backward_cuda
from dense_projection_det_gemm.cuda_plan import plan_gemm_cuda

BF16, FP32 = torch.bfloat16, torch.float32


@pytest.fixture(scope="module")
def emulated():
    return emulated_or_skip(cuda.PACKAGE)


def problems(tokens, d_in, d_out, dtype, accumulate):
    name = str(dtype).removeprefix("torch.")
    return (
        GemmProblem(1, tokens, d_in, d_out, "k", "n", "bfloat16", target="cuda"),
        GemmProblem(1, d_out, d_in, tokens, "m", "n", name, "n", accumulate, "cuda"),
    )


def both(
    package, architecture, size, dtype=FP32, accumulate=False, pieces=None, stage=None, multiprocessors=6, **choice
):
    """dx and dw of two calls and of one under the planner's choice, or under another."""
    tokens, d_in, d_out = size
    generator = torch.Generator().manual_seed(3)
    g, x, w = (
        torch.randn(*shape, generator=generator).to(BF16) for shape in ((tokens, d_out), (tokens, d_in), (d_out, d_in))
    )

    def results():
        dw = torch.ones(d_out, d_in, dtype=dtype) if accumulate else torch.full((d_out, d_in), math.nan, dtype=dtype)
        return torch.full((tokens, d_in), math.nan, dtype=BF16), dw

    def products(dx, dw):
        return (dgrad, g[None], w[None], dx[None]), (wgrad, g.t()[None], x[None], dw[None])

    dgrad, wgrad = problems(*size, dtype, accumulate)
    with package:
        backend = cuda.GemmBackend(package.module, architecture, multiprocessors, lambda: 0)
        plan = plan_backward_cuda(dgrad, wgrad, backend.native)
        cut = plan_gemm_cuda(wgrad, backend.native, pieces=pieces) if pieces else plan.wgrad
        tiles = plan_gemm_cuda(dgrad, backend.native, stage=stage) if stage else plan.dgrad
        plan = dataclasses.replace(plan, dgrad=tiles, wgrad=cut, **choice)
        expected, found, again = results(), results(), results()
        for product, one in zip(products(*expected), (plan.dgrad, plan.wgrad)):
            backend.prepare("gemm_out", *product, one)[1]()
        backend.prepare_backward(*products(*found), plan)[1]()
        kernels = [report.kernel for report in package.reports]
        if min(size) > 0 and pieces is None and stage is None and not choice:
            launch = backend.backward_launcher(dgrad, wgrad)
            launch(*products(*again)[0][1:], *products(*again)[1][1:])
            assert all(torch.equal(*pair) for pair in zip(again, found))
    assert torch.equal(found[0], expected[0])
    assert torch.equal(found[1], expected[1])
    return plan, kernels


SIZES = [(200, 264, 32), (330, 200, 64), (137, 264, 72), (300, 136, 264)]


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("architecture", TARGETS)
def test_the_bits_of_two_calls(emulated, architecture, size):
    package = emulated(architecture)
    package.options = Options(order="random", seed=SIZES.index(size))
    for dtype, accumulate in ((FP32, False), (FP32, True), (BF16, False)):
        both(package, architecture, size, dtype, accumulate)


@pytest.mark.parametrize("order", ["eager", "lazy", "random"])
@pytest.mark.parametrize("dgrad_first", [True, False], ids=("dgrad first", "wgrad first"))
@pytest.mark.parametrize("stage", ["broad_out", "turns_out"])
def test_sums_come_after_both(emulated, order, dgrad_first, stage):
    """Whichever starts beside the other: no detector fires, and partial sums are added when all of them are there."""
    package = emulated("sm_90a")
    package.options = Options(order=order)
    for dtype, accumulate in ((FP32, False), (FP32, True), (BF16, False)):
        _, kernels = both(
            package, "sm_90a", (700, 264, 48), dtype, accumulate, 3, stage=stage, beside=True, dgrad_first=dgrad_first
        )
        assert kernels[2:] == ["gemm_sum_any"]


@pytest.mark.parametrize("multiprocessors", [1, 2, 14, 1000])
def test_every_size_of_device(emulated, multiprocessors):
    package = emulated("sm_90a")
    package.options = Options()
    both(
        package,
        "sm_90a",
        (700, 264, 48),
        pieces=3,
        multiprocessors=multiprocessors,
        dgrad_first=False,
        stage="broad_out",
    )


@pytest.mark.parametrize("size", [(0, 64, 32), (40, 64, 0), (40, 0, 32)], ids=str)
@pytest.mark.parametrize("architecture", ["sm_90a", "sm_100a"])
def test_empty_extents(emulated, architecture, size):
    package = emulated(architecture)
    package.options = Options()
    for accumulate in (False, True):
        both(package, architecture, size, FP32, accumulate)


def test_portable_programs_are_not_run_side_by_side(emulated):
    package = emulated("sm_100a")
    with pytest.raises(ValueError, match="program, beside: expected two native programs"):
        both(package, "sm_100a", (40, 64, 32), beside=True)
