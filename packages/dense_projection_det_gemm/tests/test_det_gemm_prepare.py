"""Plans: what they state, that they depend on the shape alone, and that `launch()` allocates nothing."""

import copy
import dataclasses
import pickle

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import dense_projection_det_gemm as det
from cake_shared.gemm.problem import GemmProblem, RouterProblem
from cake_shared.testing import assert_bitwise_equal
from dense_projection_det_gemm.plan import plan_gemm, plan_router, split_products

BF16, FP32 = torch.bfloat16, torch.float32


def normal(*shape, seed=0, dtype=BF16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def special(x):
    """With a row and a column that the split cannot serve."""
    x = x.clone()
    x[1, 0], x[3, 2] = float("inf"), 1e38
    x[3, 1] = 1e-38
    return x


def prepared():
    x, w, g = normal(130, 600), normal(72, 600, seed=1), normal(130, 72, seed=2)
    xf, wf, gf = special(x.float()), special(w.float()), special(g.float())
    out = torch.zeros(2, 70, 72)
    a, b = normal(2, 70, 40), normal(2, 40, 72)
    yield "gemm", det.prepare_gemm(a, b, out), lambda: det.dense_projection_det_gemm(a, b, torch.empty(2, 70, 72))
    turned = torch.zeros(2, 72, 72)[:, :, :70].transpose(1, 2)
    plain = det.dense_projection_det_gemm(a, b, out.clone())
    yield "gemm_transposed", det.prepare_gemm(a, b, turned, True), lambda: plain
    yield "forward", det.prepare_forward(x, w), lambda: det.projection_forward(x, w)
    yield "dgrad", det.prepare_dgrad(g, w), lambda: det.projection_dgrad(g, w)
    yield "wgrad", det.prepare_wgrad(g, x, out_dtype=FP32), lambda: det.projection_wgrad(g, x, out_dtype=FP32)
    yield "backward", det.prepare_backward(g, x, w), lambda: det.projection_backward(g, x, w)
    yield "router_forward", det.prepare_router_forward(xf, wf), lambda: det.router_forward(xf, wf)
    yield "router_forward_bf16", det.prepare_router_forward(x, wf), lambda: det.router_forward(x, wf)
    yield "router_dgrad", det.prepare_router_dgrad(gf, wf), lambda: det.router_dgrad(gf, wf)
    yield "router_wgrad", det.prepare_router_wgrad(gf, xf), lambda: det.router_wgrad(gf, xf)


def allocated_bytes(run):
    """Bytes that torch's CPU allocator handed out during `run()`."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        run()
    return sum(max(0, e.self_cpu_memory_usage) for e in record.events())


def test_the_profiler_sees_an_allocation():
    assert allocated_bytes(lambda: torch.zeros(1000)) >= 4000


@pytest.mark.parametrize("index", range(10))
def test_launch_allocates_nothing_and_repeats_the_function(index):
    name, plan, function = list(prepared())[index]
    plan.launch()
    assert allocated_bytes(plan.launch) == 0, name
    assert plan.launch() is plan.out
    for actual, expected in zip(*(r if isinstance(r, tuple) else (r,) for r in (plan.out, function()))):
        assert_bitwise_equal(actual, expected)


def test_launch_reads_what_operands_hold_then():
    x, w = normal(5, 16), normal(8, 16, seed=1)
    plan = det.prepare_forward(x, w)
    plan.launch()
    x.copy_(normal(5, 16, seed=7))
    assert_bitwise_equal(plan.launch(), det.projection_forward(x, w))


def test_an_accumulating_plan_adds_at_every_launch():
    g, x = normal(20, 8), normal(20, 16, seed=1)
    once = det.projection_wgrad(g, x, out_dtype=FP32)
    plan = det.prepare_wgrad(g, x, torch.zeros(8, 16), accumulate=True)
    plan.launch()
    assert_bitwise_equal(plan.launch(), once + once)


def test_parameters_are_read_but_not_recorded():
    x, w = normal(5, 16).requires_grad_(), torch.nn.Parameter(normal(8, 16, seed=1))
    assert not det.prepare_forward(x, w).launch().requires_grad


def test_a_plan_prints_every_choice_and_is_frozen():
    plan = det.prepare_wgrad(normal(1300, 8), normal(1300, 16), out_dtype=FP32).plan
    text = repr(plan)
    for part in ("cpu_tiles", "a_major='m'", "b_major='n'", "slab=512", "row_tile=64", "workspace_bytes=", "ascending"):
        assert part in text
    assert plan.slabs == 3
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.slab = 1


def gemm_problem(m=100, n=64, k=2048, a_major="k"):
    return GemmProblem(1, m, n, k, a_major, "k", "bfloat16")


def test_what_moves_bits_depends_on_neither_rows_nor_width():
    """Tile, slab and order are the same for every m and n; the other fields only bound the workspace."""
    reference = plan_gemm(gemm_problem())
    for m in (1, 63, 1024, 100_000):
        for n in (8, 512, 4096):
            plan = plan_gemm(gemm_problem(m, n))
            for field in ("program", "row_tile", "col_multiple", "slab", "order"):
                assert getattr(plan, field) == getattr(reference, field)
    wide = plan_router(RouterProblem(1, 8, 512, "k", "k", 3, 3))
    tall = plan_router(RouterProblem(9000, 256, 512, "k", "k", 3, 3))
    for field in ("program", "row_tile", "col_multiple", "slab", "order", "products", "scale_exponent"):
        assert getattr(wide, field) == getattr(tall, field)


def test_only_the_cpu_is_planned():
    for plan, problem in ((plan_gemm, gemm_problem()), (plan_router, RouterProblem(1, 8, 512, "k", "k", 3, 3))):
        with pytest.raises(ValueError, match=r"problem.target: got 'cuda', takes 'cpu'"):
            plan(dataclasses.replace(problem, target="cuda"))


def test_workspace_is_bounded():
    """Widened tiles only: operands of any size take a few MB."""
    assert plan_gemm(gemm_problem(m=10**6, n=10**5, k=10**6)).workspace_bytes < 6 * 2**20
    router = plan_router(RouterProblem(10**6, 256, 6144, "k", "k", 3, 3)).workspace_bytes
    assert router < 8 * 2**20 + 17 * 10**6  # tiles, and scale and flag of every row


def test_split_products_keep_what_fp32_can_see():
    assert split_products(3, 3) == ((3, 1), (2, 2), (1, 3), (2, 1), (1, 2), (1, 1))
    assert split_products(1, 3) == ((1, 3), (1, 2), (1, 1))
    assert split_products(3, 1) == ((3, 1), (2, 1), (1, 1))


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_plan_is_not_copied(duplicate):
    """A copy would launch into the memory of the original and return another output."""
    plan = det.prepare_forward(normal(3, 40), normal(24, 40))
    with pytest.raises(TypeError, match="Prepared: got asked for a copy or a pickle, takes neither"):
        duplicate(plan)
