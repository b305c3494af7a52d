"""GemmProblem -> CudaGemmPlan: every choice of the CUDA path, pure and printable, made without a GPU.

In the weight-gradient layout (a has unit stride on m, b on n) the contraction of some tiles may be cut into pieces; how
depends on the shape alone. Any other layout is contracted in one piece, so that a row's bits do not depend on how many
rows there are. Which tile is used moves no bit: every program adds k in ascending steps of 16 to one FP32 accumulator.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from cake_shared.gemm.problem import GemmProblem

BLOCK_K = 64  # elements of the contraction that a program fetches at a time; pieces are multiples of it


@dataclass(frozen=True)
class Tile:
    """What one program computes at a time.

    Attributes
    ----------
    number
        Of the program in the module: enum TileKind of cake/gemm/tiles.h, and the portable one after them.
    rows, columns
        Of a unit: the tiles of a cluster's two CTAs, or the portable program's one.
    at_once
        Units that 132 multiprocessors work on. A constant, so that devices with other counts get the same bits.
    block_ns
        What a unit takes for `BLOCK_K` elements of the contraction, roughly.
    unit_ns
        And for its results.
    halves
        Whether a unit may be computed as its left and its right columns, and its last rows by two CTAs with columns of
        their own.
    kept_blocks
        Blocks of the contraction of B that the program keeps in shared memory for all rows; 0: B comes with every tile.
    """

    number: int
    rows: int
    columns: int
    at_once: int
    block_ns: float
    unit_ns: float
    halves: bool = False
    kept_blocks: int = 0


PORTABLE = Tile(7, 128, 128, 264, 900.0, 1000.0)
NATIVE = {
    "wide_out": Tile(0, 256, 256, 66, 660.0, 1200.0, True),
    "broad_out": Tile(5, 256, 192, 66, 510.0, 1000.0),
    "turns_out": Tile(6, 256, 128, 66, 350.0, 150.0),
    "middle_out": Tile(1, 256, 128, 66, 340.0, 700.0),
    "narrow_out": Tile(2, 256, 64, 66, 330.0, 500.0),
    "slim_out": Tile(4, 64, 256, 66, 500.0, 500.0),
    "kept_out": Tile(8, 128, 512, 66, 620.0, 1200.0, kept_blocks=3),
    "square_out": Tile(9, 384, 192, 66, 760.0, 1300.0),
}

MIN_PIECE_BLOCKS = 8
MAX_PIECES = 32
# Below, the bytes of results bound a product and turns gain nothing.
TURNS_MIN_BLOCKS = 8
MANY_ROUNDS = 3  # of a tile's units: what overlaps with the tiles before and after needs them
GROUP_ROWS = 8  # units along m that are visited before the columns advance
# With so few blocks the stores of a result are all there is: they go fastest where a tile's results have room in shared
# memory, which is the case of this stage's, and where units at work write whole rows.
STORED_BLOCKS, STORED_STAGE, STORED_GROUP_ROWS = 1, "broad_out", 1
UNCUT_STAGES = "turns_out", "square_out"  # not for what may be cut: its bits depend on the tile
TRANSPOSING_STAGE = "broad_out"  # whose program stores an FP32 tile transposed
KEPT_ROW_UNITS = 16  # that share a B which is worth keeping
SUM_NS = 3000.0  # a launch, and filling and draining the device once more
PARTIAL_BYTES_PER_NS = 3500.0
HALF_UNIT = 0.56  # of a unit's time


@dataclass(frozen=True)
class Cut:
    """The first `whole_units` units are computed whole.

    Each other is cut into `pieces` of `piece_blocks` blocks of the contraction or, where `halved`, into its left and
    its right columns, which moves no bit.
    """

    whole_units: int
    pieces: int
    piece_blocks: int
    halved: bool = False


@dataclass(frozen=True)
class CudaGemmPlan:
    """How a `GemmProblem` is computed on CUDA.

    Attributes
    ----------
    problem
        What is computed.
    stage
        Whose program runs.
    swapped
        The transpose is computed, `out.T = b.T @ a.T`: the result has unit stride on m, or its transpose fits tiles
        better, which threads then store transposed.
    tile
        Of that product.
    cut
        Which units are cut along the contraction, and how.
    group_rows
        Order of the units.
    order
        How an element is summed.
    workspace_bytes
        FP32 partial sums of the cut units; 0 where there are none.
    """

    problem: GemmProblem
    stage: str
    swapped: bool
    tile: Tile
    cut: Cut
    group_rows: int
    order: str
    workspace_bytes: int


def may_cut(problem: GemmProblem) -> bool:
    """Return whether the contraction may be cut: in the weight gradient's layout, where rows are not promised apart."""
    return problem.a_major == "m" and problem.b_major == "n"


def cut_into(units: int, blocks: int, whole_units: int, pieces: int) -> Cut:
    """Return the cut of the units after `whole_units` into at most `pieces` equal pieces."""
    if pieces == 1 or blocks <= 1:
        return Cut(units, 1, blocks)
    piece_blocks = math.ceil(blocks / pieces)
    pieces = math.ceil(blocks / piece_blocks)
    return Cut(whole_units, pieces, piece_blocks) if pieces > 1 else Cut(units, 1, blocks)


def cost_ns(tile: Tile, units: int, blocks: int, cut: Cut) -> float:
    """Return roughly what a cut takes: rounds of whole units, rounds of pieces, and their sum."""
    rest = units - cut.whole_units
    total = math.ceil(cut.whole_units / tile.at_once) * (blocks * tile.block_ns + tile.unit_ns)
    if cut.halved:
        total += math.ceil(2 * rest / tile.at_once) * (blocks * tile.block_ns + tile.unit_ns) * HALF_UNIT
    elif rest:
        slots = rest * cut.pieces
        total += math.ceil(slots / tile.at_once) * (cut.piece_blocks * tile.block_ns + tile.unit_ns)
        total += SUM_NS + 2 * 4 * slots * tile.rows * tile.columns / PARTIAL_BYTES_PER_NS
    return total


def best_cut(tile: Tile, units: int, blocks: int, may_cut_k: bool) -> Cut:
    """Return the cheapest cut of the units after the last full round: none, halves or, where it may be, pieces."""
    best = Cut(units, 1, blocks)
    whole = units // tile.at_once * tile.at_once
    if whole == units:
        return best
    candidates = [Cut(whole, 1, blocks, True)] if tile.halves else []
    if may_cut_k:
        most = min(MAX_PIECES, blocks // MIN_PIECE_BLOCKS)
        candidates += [cut_into(units, blocks, whole, pieces) for pieces in range(2, most + 1)]
    best_ns = cost_ns(tile, units, blocks, best)
    for cut in candidates:
        ns = cost_ns(tile, units, blocks, cut)
        if ns < best_ns:
            best, best_ns = cut, ns
    return best


def units_of(tile: Tile, batch: int, m: int, n: int, shortens: bool = False) -> int:
    """Return how many units a result has.

    With `shortens` the last rows, where one CTA's tile has them all, come in units of two columns where a tile halves.
    """
    rows, columns = math.ceil(m / tile.rows), math.ceil(n / tile.columns)
    if shortens and tile.halves and columns > 1 and 0 < 2 * (m % tile.rows) <= tile.rows:
        return batch * ((rows - 1) * columns + math.ceil(columns / 2))
    return batch * rows * columns


def keeps(tile: Tile, batch: int, m: int, n: int, blocks: int) -> bool:
    """Return whether a program that keeps B serves a result best: B fits and fills it, and many rows share it."""
    fits = 0 < blocks <= tile.kept_blocks and 3 * tile.columns < 4 * n <= 4 * tile.columns
    row_units = math.ceil(m / tile.rows)
    return fits and row_units >= KEPT_ROW_UNITS and batch * row_units >= MANY_ROUNDS * tile.at_once


def best_stage(batch: int, m: int, n: int, blocks: int, may_cut_k: bool) -> str:
    """Return the stage whose native program is the cheapest for a result of `m` rows and `n` columns."""

    def ns(stage: str) -> float:
        tile = NATIVE[stage]
        units = units_of(tile, batch, m, n, not may_cut_k)
        turns = blocks >= TURNS_MIN_BLOCKS and units >= MANY_ROUNDS * tile.at_once
        if tile.kept_blocks or (stage == "turns_out" and not turns) or (stage in UNCUT_STAGES and may_cut_k):
            return math.inf
        return cost_ns(tile, units, blocks, best_cut(tile, units, blocks, may_cut_k))

    for stage, tile in NATIVE.items():
        if not may_cut_k and keeps(tile, batch, m, n, blocks):
            return stage
    stored = NATIVE[STORED_STAGE]
    many = units_of(stored, batch, m, n) >= MANY_ROUNDS * stored.at_once and n > stored.columns
    if blocks <= STORED_BLOCKS and many and not may_cut_k:
        return STORED_STAGE
    return min(NATIVE, key=ns)


def turns_over(problem: GemmProblem, stage: str, cut: Cut) -> bool:
    """Return whether the transpose of a product that this stage would compute uncut takes a seventh less time.

    Only where no contraction is cut, so that no sum depends on it; an FP32 result, which threads can store transposed.
    """
    if problem.out_major == "m" or problem.out_dtype != "float32" or cut.pieces > 1 or not may_cut(problem):
        return False
    blocks = math.ceil(problem.k / BLOCK_K)
    straight, over = NATIVE[stage], NATIVE[TRANSPOSING_STAGE]
    units = units_of(straight, problem.batch, problem.m, problem.n)
    over_units = units_of(over, problem.batch, problem.n, problem.m)
    return 7 * cost_ns(over, over_units, blocks, Cut(over_units, 1, blocks)) < 6 * cost_ns(straight, units, blocks, cut)


@lru_cache(maxsize=1024)
def plan_gemm_cuda(
    problem: GemmProblem,
    native: bool = True,
    *,
    stage: str | None = None,
    pieces: int | None = None,
    whole: int = 0,
    halved: bool = False,
    swapped: bool | None = None,
) -> CudaGemmPlan:
    """Return the plan of a problem.

    Parameters
    ----------
    problem
        What is computed.
    native
        Whether the architecture has the native programs; else the portable one runs.
    stage, pieces, whole, halved
        Instead of what the planner would choose, for tests and measurements: the units after the first `whole` are cut
        into `pieces`, or halved.
    swapped
        Whether the transpose is computed, instead of where the planner would.
    """
    free = native and stage is None and pieces is None and swapped is None and not halved
    plan = _planned(
        problem, native, stage, pieces, whole, halved, problem.out_major == "m" if swapped is None else swapped
    )
    if free and turns_over(problem, plan.stage, plan.cut):
        return _planned(problem, native, TRANSPOSING_STAGE, 1, 0, False, True)
    return plan


def _planned(
    problem: GemmProblem, native: bool, stage: str | None, pieces: int | None, whole: int, halved: bool, swapped: bool
) -> CudaGemmPlan:
    m, n = (problem.n, problem.m) if swapped else (problem.m, problem.n)
    blocks = math.ceil(problem.k / BLOCK_K)
    stage = stage or best_stage(problem.batch, m, n, blocks, may_cut(problem))
    tile = NATIVE[stage] if native else PORTABLE
    uncut = not may_cut(problem) and (pieces is None or pieces == 1)
    units = units_of(tile, problem.batch, m, n, uncut)
    if halved:
        cut = Cut(whole, 1, blocks, True)
    elif pieces is not None:
        cut = cut_into(units, blocks, whole, pieces)
    else:
        cut = best_cut(tile, units, blocks, may_cut(problem))
    slots = (units - cut.whole_units) * cut.pieces if cut.pieces > 1 else 0
    group_rows = STORED_GROUP_ROWS if blocks <= STORED_BLOCKS else GROUP_ROWS
    if tile.kept_blocks:
        group_rows = max(1, math.ceil(m / tile.rows))  # all rows, before the B that they share changes
    return CudaGemmPlan(
        problem=problem,
        stage=stage,
        swapped=swapped,
        tile=tile,
        cut=cut,
        group_rows=group_rows,
        order="k ascending in FP32" + (", pieces ascending in FP32" if slots else "") + ", then the output",
        workspace_bytes=4 * slots * tile.rows * tile.columns,
    )
