"""The BF16 GEMM on the CPU: walks a package's plan in fixed-shape FP32 tiles.

torch's FP32 product changes bits with the shape it is called on, so it is only ever called on tiles of the plan's
shape, ragged ones padded with zeros: `[row_tile, slab] x [slab, cols]`, where `slab` is cut by the contraction length
alone and `cols` is padded to a multiple of 16. An element's bits then depend on its row of a, its column of b, the
contraction length and the layout. BF16 tiles are widened into a bounded workspace, never the whole operand.
"""

import torch

from cake_shared.gemm.precision import ieee_products
from cake_shared.gemm.problem import round_up


def carve(plan, workspace):
    """The plan's named buffers as views of one flat uint8 workspace."""
    buffers, start = {}, 0
    for spec in plan.buffers:
        stop = start + spec.size_bytes
        dtype = getattr(torch, spec.dtype)
        count = 1
        for extent in spec.shape:
            count *= extent
        buffers[spec.name] = workspace[start:stop].view(dtype)[:count].view(spec.shape)
        start = stop
    return buffers


def allocate(plan):
    """A workspace for `carve`, uninitialised."""
    return torch.empty(plan.workspace_bytes, dtype=torch.uint8, device="cpu")


def run_gemm(plan, a, b, out, workspace):
    """Compute `out (+)= a @ b` as the plan says; allocates no tensor storage.

    Parameters
    ----------
    plan : object
        A package's `GemmPlan`.
    a, b, out : torch.Tensor
        `[L, M, K]`, `[L, K, N]` BF16 and `[L, M, N]` BF16 or FP32, any strides that `GemmProblem` names.
    workspace : torch.Tensor
        Flat uint8 of at least `plan.workspace_bytes`; what it holds does not matter.
    """
    problem = plan.problem
    if out.numel() == 0:
        return
    if problem.k == 0:
        if not problem.accumulate:
            out.zero_()
        return
    buffers = carve(plan, workspace)
    with ieee_products():
        for index in range(problem.batch):
            for row in range(0, problem.m, plan.block_rows):
                rows = min(plan.block_rows, problem.m - row)
                for col in range(0, problem.n, plan.col_tile):
                    cols = min(plan.col_tile, problem.n - col)
                    total = _block(plan, a[index, row : row + rows], b[index, :, col : col + cols], rows, cols, buffers)
                    target = out[index, row : row + rows, col : col + cols]
                    if problem.accumulate:
                        target.add_(total)
                    else:
                        target.copy_(total)


def _block(plan, a, b, rows, cols, buffers):
    """FP32 `[rows, cols]` of one block of row tiles: the slabs of the contraction in ascending order."""
    padded_rows, padded_cols = round_up(rows, plan.row_tile), round_up(cols, plan.col_multiple)
    total = buffers["total"][:padded_rows, :padded_cols]
    tiles = range(0, padded_rows, plan.row_tile)
    totals = [total[r : r + plan.row_tile] for r in tiles]
    for start in range(0, plan.problem.k, plan.slab):
        depth = min(plan.slab, plan.problem.k - start)
        left = widen_rows(buffers["a"], a[:, start : start + depth], padded_rows, plan.problem.a_major == "k")
        right = widen_cols(buffers["b"], b[start : start + depth], padded_cols, plan.problem.b_major == "n")
        for r, part in zip(tiles, totals):
            if start == 0:
                torch.mm(left[r : r + plan.row_tile], right, out=part)
            else:
                part.addmm_(left[r : r + plan.row_tile], right)
    return total[:rows, :cols]


def widen_rows(buffer, source, padded_rows, depth_is_major):
    """`source` `[rows, depth]` in the buffer's dtype, zero rows below it, in the source's own major order."""
    rows, depth = source.shape
    tile = buffer[:padded_rows, :depth] if depth_is_major else buffer[:depth, :padded_rows].t()
    tile[:rows].copy_(source)
    tile[rows:].zero_()
    return tile


def widen_cols(buffer, source, padded_cols, cols_are_major):
    """`source` `[depth, cols]` in the buffer's dtype, zero columns beside it, in the source's own major order."""
    depth, cols = source.shape
    tile = buffer[:depth, :padded_cols] if cols_are_major else buffer[:padded_cols, :depth].t()
    tile[:, :cols].copy_(source)
    tile[:, cols:].zero_()
    return tile
