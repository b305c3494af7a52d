"""Plans of the CUDA path: what may be cut, that every block of the contraction is somewhere, what depends on what."""

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cake_shared.gemm.problem import GemmProblem
from dense_projection_det_gemm.cuda_plan import GROUP_ROWS, MIN_PIECE_BLOCKS, PORTABLE, plan_gemm_cuda, units_of

EXTENT = st.integers(1, 70000)


def problem(m, n, k, a_major="m", b_major="n", **changes):
    return GemmProblem(1, m, n, k, a_major, b_major, "bfloat16", target="cuda", **changes)


@given(EXTENT, EXTENT, st.integers(0, 70000), st.sampled_from(["m", "k"]), st.sampled_from(["n", "k"]), st.booleans())
def test_every_block_of_every_unit_belongs_to_one_piece(m, n, k, a_major, b_major, native):
    plan = plan_gemm_cuda(problem(m, n, k, a_major, b_major), native)
    blocks = math.ceil(k / 64)
    cut = plan.cut
    units = units_of(plan.tile, 1, m, n, (a_major, b_major) != ("m", "n"))
    assert 0 <= cut.whole_units <= units
    if cut.whole_units == units:
        assert (cut.pieces, plan.workspace_bytes) == (1, 0)
        return
    if cut.halved:
        assert plan.tile.halves
        assert (cut.pieces, plan.workspace_bytes) == (1, 0)
        return
    assert (a_major, b_major) == ("m", "n")
    assert cut.pieces > 1
    assert (cut.pieces - 1) * cut.piece_blocks < blocks <= cut.pieces * cut.piece_blocks
    assert cut.piece_blocks >= MIN_PIECE_BLOCKS
    slots = (units - cut.whole_units) * cut.pieces
    assert plan.workspace_bytes == 4 * slots * plan.tile.rows * plan.tile.columns


@pytest.mark.parametrize("layout", [("k", "k"), ("k", "n"), ("m", "k")])
def test_rows_that_are_promised_apart_are_never_cut(layout):
    for m in (1, 48, 4096, 16384):
        plan = plan_gemm_cuda(problem(m, 64, 65536, *layout))
        assert plan.cut.pieces == 1


def test_a_last_round_that_half_units_fill_is_halved():
    plan = plan_gemm_cuda(problem(16384, 5120, 5120, "k", "k"))
    assert (plan.stage, plan.cut.whole_units, plan.cut.halved) == ("wide_out", 19 * 66, True)


def test_last_rows_of_one_cta_come_two_columns_at_a_time():
    def cut(m, a_major="k"):
        return plan_gemm_cuda(problem(m, 4096, 4096, a_major, "n")).cut

    assert (cut(16384).whole_units, cut(16384).halved) == (64 * 16, False)
    for tokens in (16172, 16231):  # 63 x 16 + 8 units, the last 26 of them halved
        assert (cut(tokens).whole_units, cut(tokens).halved) == (15 * 66, True)
    assert cut(63 * 256 + 129) == cut(16384)


def test_short_contractions_of_many_tiles_take_turns():
    def stage(m, n, k, a_major="k", b_major="n"):
        return plan_gemm_cuda(problem(m, n, k, a_major, b_major)).stage

    assert stage(16384, 4096, 512) == stage(16231, 5120, 512) == stage(16384, 5120, 1024) == "turns_out"
    # Bound by the bytes of the result, by products alone, or of few tiles.
    assert "turns_out" not in (stage(16384, 4096, 64), stage(16384, 4096, 4096), stage(1024, 1024, 512))
    # A weight gradient's cut, and so its bits, would depend on the tile.
    assert stage(4096, 4096, 512, "m") != "turns_out"


def test_what_stores_bound_writes_whole_rows():
    for k in (32, 48, 64):
        plan = plan_gemm_cuda(problem(16231, 4096, k, "k", "n"))
        assert (plan.stage, plan.group_rows, plan.cut.pieces) == ("broad_out", 1, 1)
    assert plan_gemm_cuda(problem(16231, 64, 64, "k", "n")).stage == "narrow_out"
    assert plan_gemm_cuda(problem(16231, 4096, 128, "k", "n")).group_rows == GROUP_ROWS


def test_many_rows_of_a_batch_keep_the_b_that_they_share():
    def plan(batch, m, n, k, b_major="n"):
        return plan_gemm_cuda(GemmProblem(batch, m, n, k, "k", b_major, "bfloat16", target="cuda"))

    for tokens in (16172, 16384):
        kept = plan(64, tokens, 512, 192)
        assert (kept.stage, kept.group_rows, kept.cut.pieces) == ("kept_out", math.ceil(tokens / 128), 1)
    # More terms than there is room for, columns that a tile has no use for, few rows to a B, few tiles.
    others = plan(64, 16384, 512, 200), plan(64, 16384, 256, 192), plan(64, 1024, 512, 192), plan(1, 4096, 512, 192)
    assert "kept_out" not in [other.stage for other in others]
    weight = GemmProblem(64, 16384, 512, 192, "m", "n", "bfloat16", target="cuda")  # bits would depend on the tile
    assert plan_gemm_cuda(weight).stage != "kept_out"


def test_columns_that_square_tiles_fit():
    def stage(m, a_major="k", b_major="k"):
        return plan_gemm_cuda(GemmProblem(64, m, 192, 512, a_major, b_major, "bfloat16", target="cuda")).stage

    assert [stage(tokens) for tokens in (16172, 16231, 16384)] == ["square_out"] * 3
    assert stage(16384, "m", "n") != "square_out"  # a cut, and so bits, would depend on the tile


def test_a_transpose_that_fits_tiles_better_is_computed():
    def plan(dtype="float32", **changes):
        return plan_gemm_cuda(GemmProblem(64, 192, 512, 16384, "m", "n", dtype, target="cuda", **changes))

    assert (plan().stage, plan().swapped, plan().cut.pieces) == ("broad_out", True, 1)
    assert plan(accumulate=True) == dataclasses.replace(plan(), problem=plan(accumulate=True).problem)
    # A BF16 result would be stored in pieces of 16 bytes; the sums are the same, uncut.
    assert (plan("bfloat16").swapped, plan("bfloat16").cut.pieces) == (False, 1)
    assert not plan_gemm_cuda(problem(48, 4096, 16384, accumulate=True)).swapped


def test_transposed_results_are_cut_by_the_layout_of_the_operands():
    straight = plan_gemm_cuda(problem(48, 4096, 16384))
    turned = plan_gemm_cuda(problem(4096, 48, 16384, out_major="m"))
    assert turned.swapped
    assert turned.cut == straight.cut
    assert turned.tile == straight.tile


def test_the_dtype_of_the_result_moves_no_sum():
    for shape in ((48, 4096, 16231), (1024, 5120, 16384), (512, 4096, 16172)):
        rounded = problem(*shape)
        exact = dataclasses.replace(rounded, out_dtype="float32", accumulate=True)
        assert plan_gemm_cuda(rounded).cut == plan_gemm_cuda(exact).cut
        assert plan_gemm_cuda(rounded).tile == plan_gemm_cuda(exact).tile


def test_narrow_weight_gradients_fill_a_device():
    for d_out, d_in in ((32, 4096), (64, 4096), (48, 5120)):
        plan = plan_gemm_cuda(problem(d_out, d_in, 16384))
        assert plan.tile.rows == 64
        assert plan.cut.pieces * math.ceil(d_in / plan.tile.columns) > plan.tile.at_once * 0.8


def test_portable_plans_have_the_portable_tile():
    assert plan_gemm_cuda(problem(48, 4096, 16384), native=False).tile == PORTABLE
