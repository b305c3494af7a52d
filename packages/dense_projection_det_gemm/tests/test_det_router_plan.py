"""The router's CUDA plans: what they may look at, and how work is cut."""

import dataclasses
from math import ceil

import pytest

from cake_shared.gemm.problem import RouterProblem
from dense_projection_det_gemm.cuda_router_plan import AT_ONCE, PART_STEPS, ROWS, STEP, plan_router_cuda

FORWARD = RouterProblem(m=16384, n=256, k=6144, a_major="k", b_major="k", a_terms=3, b_terms=3, target="cuda")
DGRAD = dataclasses.replace(FORWARD, n=6144, k=256, b_major="n")
WGRAD = dataclasses.replace(FORWARD, m=256, n=6144, k=16384, a_major="m", b_major="n")


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("problem", [FORWARD, DGRAD])
def test_rows_and_multiprocessors_move_no_segment(problem, native):
    """Where a contraction is cut depends on its length alone."""
    parts = ceil(problem.k / STEP / PART_STEPS)
    for m in (1, 127, 128, 4096, 20000, 100000):
        for multiprocessors in (1, 78, 132, 1000):
            plan = plan_router_cuda(dataclasses.replace(problem, m=m), multiprocessors, native)
            tiles = ceil(m / (plan.ctas * ROWS)) * ceil(problem.n / (64 * plan.blocks))
            assert plan.part_steps == min(PART_STEPS, ceil(problem.k / STEP))
            assert (plan.units, plan.units_per_tile) in ((tiles, 1), (tiles * parts, parts))


def test_4096_rows_fill_the_device_and_16384_add_up_in_place():
    assert plan_router_cuda(dataclasses.replace(FORWARD, m=4096), 132).units == 64  # of two CTAs
    plan = plan_router_cuda(FORWARD, 132)
    assert (plan.units, plan.units_per_tile) == (64, 1)
    assert {b.name: b.size_bytes for b in plan.buffers}["slots"] == 0


@pytest.mark.parametrize("tokens", [1, 100, 512, 513, 4096, 16231, 1 << 20])
def test_ranges_come_from_the_shape_alone(tokens):
    problem = dataclasses.replace(WGRAD, k=tokens)
    for native, ctas in ((True, 2), (False, 1)):
        plans = {plan_router_cuda(problem, count, native).units for count in (1, 78, 132, 1000)}
        tiles = 48 // ctas
        assert plans == {tiles if tokens <= 512 else min(AT_ONCE // ctas, tiles * ceil(tokens / STEP) // 16)}


def test_which_operand_is_streamed_and_what_is_multiplied():
    assert plan_router_cuda(FORWARD, 132).streamed == plan_router_cuda(DGRAD, 132).streamed == "a"
    assert plan_router_cuda(WGRAD, 132).streamed == "b"
    assert plan_router_cuda(FORWARD, 132).products == ((3, 1), (2, 2), (1, 3), (2, 1), (1, 2), (1, 1))
    # Of a and b, so turned about where b is the streamed one.
    assert plan_router_cuda(WGRAD, 132).products == ((1, 3), (2, 2), (3, 1), (1, 2), (2, 1), (1, 1))
    bf16 = plan_router_cuda(dataclasses.replace(WGRAD, b_terms=1), 132)
    assert (bf16.stage, bf16.products) == ("router_bf16_out", ((3, 1), (2, 1), (1, 1)))


@pytest.mark.parametrize(
    ("columns", "blocks", "stage"), [(8, 1, "router_narrow_out"), (128, 1, "router_narrow_out"), (136, 4, "router_out")]
)
def test_few_columns_take_narrow_tiles(columns, blocks, stage):
    plan = plan_router_cuda(dataclasses.replace(FORWARD, n=columns), 132)
    assert (plan.blocks, plan.stage) == (blocks, stage)


def test_workspace_holds_every_buffer():
    plan = plan_router_cuda(WGRAD, 132)
    sizes = {b.name: b.size_bytes for b in plan.buffers}
    assert sizes["planes"] == 2 * 3 * 256 * 16384
    assert sizes["slots"] == 4 * 2 * AT_ONCE * 128 * 256
    assert plan.workspace_bytes >= sum(sizes.values())
    assert plan.workspace_bytes % 256 == 0
