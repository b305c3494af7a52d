"""The BF16 GEMM on the CPU: walks a package's plan in fixed-shape FP32 tiles.

torch's FP32 product changes bits with the shape it is called on, so it is only ever called on tiles of the plan's
shape, ragged ones padded with zeros: `[row_tile, slab] x [slab, cols]`, where `slab` is cut by the contraction length
alone and `cols` is padded to a multiple of 16. An element's bits then depend on its row of a, its column of b, the
contraction length and the layout. BF16 tiles are widened into a bounded workspace, never the whole operand.
"""

import torch

from cake_shared.cpu_precision import ieee_products
from cake_shared.gemm.problem import round_up


def allocate(plan):
    """The plan's named buffers, uninitialised."""
    return {b.name: torch.empty(b.shape, dtype=getattr(torch, b.dtype), device="cpu") for b in plan.buffers}


def run_gemm(plan, a, b, out, buffers):
    """Compute `out (+)= a @ b` as the plan says; allocates no tensor storage.

    Parameters
    ----------
    plan : object
        A package's `GemmPlan`.
    a, b, out : torch.Tensor
        `[L, M, K]`, `[L, K, N]` BF16 and `[L, M, N]` BF16 or FP32, any strides that `GemmProblem` names.
    buffers : dict of str to torch.Tensor
        From `allocate(plan)`; what they hold does not matter.
    """
    problem = plan.problem
    if out.numel() == 0:
        return
    if problem.k == 0:
        if not problem.accumulate:
            out.zero_()
        return
    with ieee_products():
        for index in range(problem.batch):
            a_one, b_one, out_one = a[index], b[index], out[index]
            for row in range(0, problem.m, plan.block_rows):
                rows = min(plan.block_rows, problem.m - row)
                a_rows, out_rows = part(a_one, 0, row, rows), part(out_one, 0, row, rows)
                for col in range(0, problem.n, plan.col_tile):
                    cols = min(plan.col_tile, problem.n - col)
                    total = _block(plan, a_rows, part(b_one, 1, col, cols), rows, cols, buffers)
                    target = part(out_rows, 1, col, cols)
                    if problem.accumulate:
                        target.add_(total)
                    else:
                        target.copy_(total)


def _block(plan, a, b, rows, cols, buffers):
    """FP32 `[rows, cols]` of one block of row tiles: the slabs of the contraction in ascending order."""
    problem = plan.problem
    padded_rows, padded_cols = round_up(rows, plan.row_tile), round_up(cols, plan.col_multiple)
    total = part(part(buffers["total"], 0, 0, padded_rows), 1, 0, padded_cols)
    tiles = range(0, padded_rows, plan.row_tile)
    totals = [part(total, 0, r, plan.row_tile) for r in tiles]
    for start in range(0, problem.k, plan.slab):
        depth = min(plan.slab, problem.k - start)
        left = widen_rows(buffers["a"], part(a, 1, start, depth), padded_rows, problem.a_major == "k")
        right = widen_cols(buffers["b"], part(b, 0, start, depth), padded_cols, problem.b_major == "n")
        for r, tile_total in zip(tiles, totals):
            if start == 0:
                torch.mm(part(left, 0, r, plan.row_tile), right, out=tile_total)
            else:
                tile_total.addmm_(part(left, 0, r, plan.row_tile), right)
    return part(part(total, 0, 0, rows), 1, 0, cols)


def part(tensor, axis, start, count):
    """`count` entries of an axis from `start`; the tensor itself where that is all of it, as a view costs time."""
    return tensor if count == tensor.shape[axis] else tensor.narrow(axis, start, count)


def widen_rows(buffer, source, padded_rows, depth_is_major):
    """`source` `[rows, depth]` in the buffer's dtype, zero rows below it, in the source's own major order."""
    rows, depth = source.shape
    if depth_is_major:
        tile = part(part(buffer, 0, 0, padded_rows), 1, 0, depth)
    else:
        tile = part(part(buffer, 0, 0, depth), 1, 0, padded_rows).t()
    return _fill(tile, 0, source, rows, padded_rows)


def widen_cols(buffer, source, padded_cols, cols_are_major):
    """`source` `[depth, cols]` in the buffer's dtype, zero columns beside it, in the source's own major order."""
    depth, cols = source.shape
    if cols_are_major:
        tile = part(part(buffer, 0, 0, depth), 1, 0, padded_cols)
    else:
        tile = part(part(buffer, 0, 0, padded_cols), 1, 0, depth).t()
    return _fill(tile, 1, source, cols, padded_cols)


def _fill(tile, axis, source, count, padded):
    if count == padded:
        return tile.copy_(source)
    tile.narrow(axis, 0, count).copy_(source)
    tile.narrow(axis, count, padded - count).zero_()
    return tile
