"""GemmProblem -> CudaGemmPlan: every choice of the CUDA path, pure and printable, made without a GPU.

The contraction of the weight-gradient layout (a has unit stride on m, b on n) may be cut into pieces; how depends on
the shape alone. Any other layout is contracted in one piece, so that a row's bits do not depend on how many rows there
are. Which tile is used moves no bit: every program adds k in ascending steps of 16 to one FP32 accumulator.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from cake_shared.gemm.problem import GemmProblem

BLOCK_K = 64  # elements of the contraction that a program fetches at a time; pieces are multiples of it
# By stage: the number of enum TileKind in cake/gemm/tiles.h, rows and columns of a tile.
PROGRAMS = {
    "wide_out": (0, 128, 256),
    "middle_out": (1, 128, 128),
    "narrow_out": (2, 128, 64),
    "flat_out": (3, 64, 256),
}
PORTABLE = 4

# What the cut is made for. A constant, so that devices with other counts get the same bits.
DESIGN_MULTIPROCESSORS = 132
MIN_PIECE_BLOCKS = 8
MAX_PIECES = 32
GROUP_ROWS = 8  # pairs of tiles along m that are visited before the columns advance


@dataclass(frozen=True)
class CudaGemmPlan:
    """How a `GemmProblem` is computed on CUDA.

    Attributes
    ----------
    problem
        What is computed.
    stage
        Whose program runs: the tile that the result is made of.
    swapped
        The result has unit stride on m: its transpose is computed, `out.T = b.T @ a.T`.
    tile_m, tile_n
        Of that product.
    pieces, piece_blocks
        The contraction is cut into `pieces` of `piece_blocks * 64` elements, the last one shorter.
    group_rows
        Order of the tiles.
    order
        How an element is summed.
    workspace_bytes
        FP32 partial sums of the pieces; 0 where there is one piece.
    """

    problem: GemmProblem
    stage: str
    swapped: bool
    tile_m: int
    tile_n: int
    pieces: int
    piece_blocks: int
    group_rows: int
    order: str
    workspace_bytes: int


def may_cut(problem: GemmProblem) -> bool:
    """Return whether the contraction may be cut: in the weight gradient's layout, where rows are not promised apart."""
    return problem.a_major == "m" and problem.b_major == "n"


def _pieces(problem: GemmProblem, tiles: int, area: int) -> int:
    """Into how many pieces the contraction is cut: as many as bring every multiprocessor the same work."""
    blocks = math.ceil(problem.k / BLOCK_K)
    most = min(MAX_PIECES, blocks // MIN_PIECE_BLOCKS)
    if not may_cut(problem) or most <= 1:
        return 1
    best, best_cost = 1, math.inf
    for pieces in range(1, most + 1):
        waves = math.ceil(tiles * pieces / DESIGN_MULTIPROCESSORS)
        # In blocks of a tile's contraction: its own, and the partial sums that are written and read.
        cost = waves * (math.ceil(blocks / pieces) + (0 if pieces == 1 else 6))
        if pieces > 1:
            cost += pieces * problem.batch * problem.m * problem.n / area / DESIGN_MULTIPROCESSORS * 8
        if cost < best_cost * 0.97:
            best, best_cost = pieces, cost
    return best


def _stage(m: int, n: int) -> str:
    if n <= 64:
        return "narrow_out"
    if m <= 64:
        return "flat_out"
    return "middle_out" if n <= 128 else "wide_out"


@lru_cache(maxsize=1024)
def plan_gemm_cuda(problem: GemmProblem, stage: str | None = None, pieces: int | None = None) -> CudaGemmPlan:
    """Return the plan of a problem; `stage` and `pieces` override what the planner would choose, for measurements."""
    swapped = problem.out_major == "m"
    m, n = (problem.n, problem.m) if swapped else (problem.m, problem.n)
    stage = stage or _stage(m, n)
    _, tile_m, tile_n = PROGRAMS[stage]
    tiles = problem.batch * math.ceil(m / tile_m) * math.ceil(n / tile_n)
    blocks = math.ceil(problem.k / BLOCK_K)
    wanted = pieces or _pieces(problem, tiles, tile_m * tile_n)
    piece_blocks = math.ceil(blocks / wanted)
    count = math.ceil(blocks / piece_blocks) if blocks else 1
    return CudaGemmPlan(
        problem=problem,
        stage=stage,
        swapped=swapped,
        tile_m=tile_m,
        tile_n=tile_n,
        pieces=count,
        piece_blocks=piece_blocks,
        group_rows=GROUP_ROWS,
        order="k ascending in FP32" + ("" if count == 1 else ", pieces ascending in FP32") + ", then the output",
        workspace_bytes=0 if count == 1 else 4 * problem.batch * count * m * (-(-n // 4) * 4),
    )
