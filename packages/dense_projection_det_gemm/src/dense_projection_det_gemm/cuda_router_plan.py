"""RouterProblem -> CudaRouterPlan: every choice of the router's CUDA path, pure and printable, made without a GPU.

The product is seen as `D = P @ Q.T`: P `[rows, depth]` is streamed and split into its BF16 terms on the way to the
tensor cores, Q `[columns, depth]` is split beforehand. Which operand is which, and how the contraction is cut into
segments, depends on the layout and on shapes alone; in every layout but the weight gradient's (a has unit stride on m,
b on n) the cut looks at the depth alone, so that a row's bits do not depend on how many rows there are.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from math import ceil

from cake_shared.gemm.problem import Buffer, RouterProblem
from dense_projection_det_gemm.plan import split_products

# As enum RouterProgram of csrc/router_host.h; every stage's portable program is 0.
PROGRAMS = {"router_out": 1, "router_bf16_out": 2, "router_narrow_out": 3}

# As csrc/router_work.h and csrc/router_params.h.
ROWS = 128  # of a CTA's part of a tile
CLUSTER = 2  # CTAs that share a tile in the native programs; the portable one has one
WARPS = 8  # that add up a CTA's products
BLOCK_COLUMNS = 64
STEP = 16
TERMS = 3
TERMS_STEPS = 4

WIDE_BLOCKS = 4
NARROW_COLUMNS = 128  # up to here in tiles of one block
PART_STEPS = 96  # K = 6144 is four parts: 4096 rows then fill 128 multiprocessors
AT_ONCE = 132  # CTAs among which the weight gradient is cut; a constant, so that other devices get the same bits
RANGE_STEPS = 16  # of one, at least
WHOLE_STEPS = 32  # a contraction this short is not cut
WHOLE_ROUNDS = 4  # nor are tiles that keep those CTAs busy as often as this


@dataclass(frozen=True)
class CudaRouterPlan:
    """How a `RouterProblem` is computed on CUDA.

    Attributes
    ----------
    problem
        What is computed.
    stage
        Whose program runs.
    streamed
        "a" or "b": the operand that is split on the way; the other one is Q.
    products
        Pairs of terms (of a, of b; 1 the largest) in the order in which they are added within a step of 16.
    ctas
        CTAs that share a tile, 128 rows each.
    blocks
        Blocks of 64 columns of a tile.
    part_steps
        Steps of a segment at most.
    units
        Pieces of work, dealt out to the CTAs.
    units_per_tile
        1: a CTA adds up a tile's segments; more: each is a unit, and the last to come to a tile adds them (in the
        portable program its end), with the same bits; 0: units are ranges of all tiles' steps, added at the end.
    order
        How an element is summed.
    workspace_bytes, buffers
        What the launches need beside the operands.
    """

    problem: RouterProblem
    stage: str
    streamed: str
    products: tuple[tuple[int, int], ...]
    ctas: int
    blocks: int
    part_steps: int
    units: int
    units_per_tile: int
    order: str
    workspace_bytes: int
    buffers: tuple[Buffer, ...] = field(repr=False)


def _range_cut(tiles: int, steps: int, at_once: int) -> tuple[int, int, int]:
    """Part steps, units, units per tile: from the shape alone."""
    if steps <= WHOLE_STEPS or tiles >= WHOLE_ROUNDS * at_once:
        return steps, tiles, 1
    return steps, min(at_once, max(1, tiles * steps // RANGE_STEPS)), 0


def _part_cut(tiles: int, steps: int, at_once: int) -> tuple[int, int, int]:
    """Part steps, units, units per tile: segments from the depth alone, who adds them up from the load."""
    parts = ceil(steps / PART_STEPS)
    alone = ceil(tiles / at_once) * parts
    spread = ceil(tiles * parts / at_once)
    # Spreading writes and reads partial sums: it must save a fifth.
    if spread * 5 < alone * 4:
        return PART_STEPS, tiles * parts, parts
    return min(PART_STEPS, steps), tiles, 1


def _buffers(
    rows: int, columns: int, steps: int, ctas: int, blocks: int, units: int, units_per_tile: int
) -> tuple[Buffer, ...]:
    row_tiles, width = ceil(rows / (ctas * ROWS)), blocks * BLOCK_COLUMNS
    column_tiles = ceil(columns / width)
    padded = column_tiles * width
    slots = {0: 2 * units, 1: 0}.get(units_per_tile, units)
    arrivals, joined = (row_tiles * column_tiles, slots) if units_per_tile > 1 else (0, 0)
    return (
        Buffer("planes", "bfloat16", (column_tiles, steps, blocks, TERMS, BLOCK_COLUMNS * STEP)),
        Buffer("exponents", "int32", (padded,)),
        Buffer("factors", "float32", (padded,)),
        Buffer("flags", "bool", (ceil(steps / TERMS_STEPS), padded)),
        Buffer("any_redo", "int32", (1,)),
        Buffer("arrivals", "int32", (arrivals, ctas, WARPS, blocks)),
        Buffer("row_exponents", "int32", (row_tiles * ctas * ROWS,)),
        Buffer("slots", "float32", (slots, ctas, ROWS * width)),
        Buffer("slot_tiny", "bool", (slots, ctas, ROWS)),
        Buffer("joined", "bool", (joined, ctas, WARPS)),
    )


@lru_cache(maxsize=1024)
def plan_router_cuda(
    problem: RouterProblem, multiprocessors: int, native: bool = True, *, spread: bool | None = None
) -> CudaRouterPlan:
    """Return the plan of a problem.

    Parameters
    ----------
    problem
        What is computed.
    multiprocessors
        Of the device. No bit depends on it.
    native
        Whether the architecture has the native programs; else the portable one runs.
    spread
        Whether segments of a tile are units of their own, where that moves no bit, instead of what the planner would
        choose: for tests and measurements.
    """
    streams_b = problem.a_major == "m" and problem.b_major == "n"
    rows, columns = (problem.n, problem.m) if streams_b else (problem.m, problem.n)
    bf16 = (problem.b_terms if streams_b else problem.a_terms) == 1
    blocks = WIDE_BLOCKS if columns > NARROW_COLUMNS else 1
    steps = ceil(problem.k / STEP)
    ctas = CLUSTER if native else 1
    tiles = ceil(rows / (ctas * ROWS)) * ceil(columns / (blocks * BLOCK_COLUMNS))
    if streams_b:
        part_steps, units, units_per_tile = _range_cut(tiles, steps, AT_ONCE // ctas)
    else:
        part_steps, units, units_per_tile = _part_cut(tiles, steps, max(1, multiprocessors // ctas))
        parts = ceil(steps / PART_STEPS)
        if spread is not None and parts > 1:
            part_steps, units, units_per_tile = PART_STEPS, tiles * parts if spread else tiles, parts if spread else 1
    buffers = _buffers(rows, columns, steps, ctas, blocks, units, units_per_tile)
    pairs = split_products(1 if bf16 else TERMS, TERMS)
    return CudaRouterPlan(
        problem=problem,
        stage="router_narrow_out" if blocks == 1 else "router_bf16_out" if bf16 else "router_out",
        streamed="b" if streams_b else "a",
        products=tuple((j, i) for i, j in pairs) if streams_b else pairs,
        ctas=ctas,
        blocks=blocks,
        part_steps=part_steps,
        units=units,
        units_per_tile=units_per_tile,
        order="products of a step of 16, steps ascending in FP32, segments ascending in FP32, then the scale",
        workspace_bytes=sum(-(-b.size_bytes // 256) * 256 for b in buffers),
        buffers=buffers,
    )
