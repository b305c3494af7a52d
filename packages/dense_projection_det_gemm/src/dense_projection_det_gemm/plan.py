"""Problem -> Plan: every choice of this package, from the shape alone, as frozen printable values.

No choice looks at the machine, the number of threads or the load, and none that can move a bit looks at the number of
rows of the output (`m`) or at its width (`n`): those set how many tiles there are, not what a tile is.
"""

from dataclasses import dataclass, field
from functools import lru_cache

from cake_shared.gemm.problem import Buffer, GemmProblem, RouterProblem, round_up

ROW_TILE = 64  # smallest tile at which FP32 products run within 5 % of their best; a short batch pads less
COL_MULTIPLE = 16  # from this width on a column's bits do not depend on how many others there are
BLOCK_ROWS = 1024  # rows that share one widened tile of b: its conversion is then below 2 % of the products
COL_TILE = 512
SLAB = 512

ROUTER_BLOCK_ROWS = 256
ROUTER_COL_TILE = 256
ROUTER_SLAB = 256
# An element is scaled to below 2**49, its last bit stays above 2**-74: products are exact above 2**-149, and sums of up
# to 2**28 of them stay below 2**127.
ROUTER_SCALE_EXPONENT = 48
ROUTER_EXPONENT_RANGE = 99


@dataclass(frozen=True)
class GemmPlan:
    """How a `GemmProblem` is computed.

    The contraction is cut into slabs of `slab` elements from its start, the last one ragged: for the weight gradient
    these are tokens. Each slab's product is taken in FP32 on tiles `[row_tile, slab] x [slab, columns padded to
    col_multiple]` and added to an FP32 total in ascending order of slabs; an accumulating output gets one addition of
    the total; a BF16 output is rounded once. `block_rows` and `col_tile` only say how many tiles share a widened
    operand. `buffers` are the parts of the workspace of `workspace_bytes`.
    """

    problem: GemmProblem
    program: str
    row_tile: int
    col_multiple: int
    block_rows: int
    col_tile: int
    slab: int
    order: str
    workspace_bytes: int
    buffers: tuple[Buffer, ...] = field(repr=False)

    @property
    def slabs(self):
        """Into how many partial sums the contraction is cut."""
        return -(-self.problem.k // self.slab)


@dataclass(frozen=True)
class RouterPlan:
    """How a `RouterProblem` is computed.

    Rows of a and columns of b are scaled by powers of two so that their largest element is of binade `scale_exponent`;
    those whose elements lie within `exponent_range` binades are split into BF16 terms, the others are computed in
    float64. `products` are the pairs of terms (1 the largest) in the order in which they are added; in each slab all
    but the last pair form one FP32 sum and the last pair another, and the two are added to a float64 total, slabs in
    ascending order. The rest as in `GemmPlan`.
    """

    problem: RouterProblem
    program: str
    row_tile: int
    col_multiple: int
    block_rows: int
    col_tile: int
    slab: int
    products: tuple[tuple[int, int], ...]
    scale_exponent: int
    exponent_range: int
    order: str
    workspace_bytes: int
    buffers: tuple[Buffer, ...] = field(repr=False)

    @property
    def slabs(self):
        """Into how many partial sums the contraction is cut."""
        return -(-self.problem.k // self.slab)


@lru_cache(maxsize=1024)
def plan_gemm(problem):
    """The plan of a `GemmProblem` on the CPU; ValueError for another target."""
    _check_target(problem)
    block_rows = min(BLOCK_ROWS, round_up(problem.m, ROW_TILE))
    col_tile = min(COL_TILE, round_up(problem.n, COL_MULTIPLE))
    buffers = (
        Buffer("a", "float32", _tile(block_rows, SLAB, problem.a_major == "k")),
        Buffer("b", "float32", _tile(col_tile, SLAB, problem.b_major == "k")),
        Buffer("total", "float32", (block_rows, col_tile)),
    )
    return GemmPlan(
        problem=problem,
        program="cpu_tiles",
        row_tile=ROW_TILE,
        col_multiple=COL_MULTIPLE,
        block_rows=block_rows,
        col_tile=col_tile,
        slab=SLAB,
        order="slabs ascending in FP32, then the output",
        workspace_bytes=_total_bytes(buffers),
        buffers=buffers,
    )


@lru_cache(maxsize=1024)
def plan_router(problem):
    """The plan of a `RouterProblem` on the CPU; ValueError for another target."""
    _check_target(problem)
    block_rows = min(ROUTER_BLOCK_ROWS, round_up(problem.m, ROW_TILE))
    col_tile = min(ROUTER_COL_TILE, round_up(problem.n, COL_MULTIPLE))
    a_depth_major, b_depth_major = problem.a_major == "k", problem.b_major == "k"
    buffers = [
        *_operand_buffers("a", "row", problem.m, block_rows, problem.a_terms, a_depth_major),
        *_operand_buffers("b", "col", problem.n, col_tile, problem.b_terms, b_depth_major),
        Buffer("sums", "float32", (block_rows, col_tile)),
        Buffer("wide", "float64", (block_rows, col_tile)),
        Buffer("total", "float64", (block_rows, col_tile)),
        Buffer("a64", "float64", _tile(ROW_TILE, ROUTER_SLAB, a_depth_major)),
        Buffer("b64", "float64", _tile(col_tile, ROUTER_SLAB, b_depth_major)),
        Buffer("acc64", "float64", (ROW_TILE, col_tile)),
        Buffer("mask", "bool", (ROW_TILE, col_tile)),
        Buffer("any", "bool", ()),
    ]
    return RouterPlan(
        problem=problem,
        program="cpu_split_tiles",
        row_tile=ROW_TILE,
        col_multiple=COL_MULTIPLE,
        block_rows=block_rows,
        col_tile=col_tile,
        slab=ROUTER_SLAB,
        products=split_products(problem.a_terms, problem.b_terms),
        scale_exponent=ROUTER_SCALE_EXPONENT,
        exponent_range=ROUTER_EXPONENT_RANGE,
        order="in a slab the small products, then the largest; slabs ascending in float64",
        workspace_bytes=_total_bytes(buffers),
        buffers=tuple(buffers),
    )


def _check_target(problem):
    if problem.target != "cpu":
        raise ValueError(f"problem.target: got {problem.target!r}, takes 'cpu': nothing else is planned yet")


def split_products(a_terms, b_terms):
    """Pairs of terms whose product is kept, smallest first: those with `i + j <= 4`, six of them for 3 and 3 terms."""
    pairs = [(i, j) for i in range(1, a_terms + 1) for j in range(1, b_terms + 1) if i + j <= 4]
    return tuple(sorted(pairs, key=lambda p: (-sum(p), -p[0])))


def _total_bytes(buffers):
    return sum(b.size_bytes for b in buffers)


def _tile(count, depth, depth_is_major):
    return (count, depth) if depth_is_major else (depth, count)


def _operand_buffers(name, side, count, step, terms, depth_is_major):
    tile = _tile(step, ROUTER_SLAB, depth_is_major)
    parts = [Buffer(name, "float32", tile)]
    if terms > 1:
        parts.append(Buffer(f"{name}_bf16", "bfloat16", tile))
        parts += [Buffer(f"{name}_term{i}", "float32", tile) for i in range(1, terms)]
    parts += [Buffer(f"{side}_{n}", "float32", (count,)) for n in ("up", "up_again")]
    parts += [Buffer(f"{side}_down", "float64", (count,)), Buffer(f"{side}_special", "bool", (count,))]
    parts += [Buffer(f"{side}_{n}", "int32", (step,)) for n in ("largest", "smallest", "found")]
    parts += [Buffer(f"{side}_{n}", "int64", (step,)) for n in ("exponent", "spread", "bound")]
    return [*parts, Buffer(f"{side}_binade", "float64", (step,)), Buffer(f"{side}_flag", "bool", (step,))]
