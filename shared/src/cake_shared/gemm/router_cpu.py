"""The FP32 router GEMM on the CPU: three BF16 terms an operand, six products, exact scaling by powers of two.

A row of a and a column of b are first scaled by a power of two that brings their largest element to
`2**plan.scale_exponent`. Where the elements of a row lie within `plan.exponent_range` binades, splitting it into BF16
terms is then exact and no product or sum leaves the normal range of FP32. Any other row (inf, NaN, a wider range) is
computed in float64 without splitting; which of the two it is depends on that row or column alone. Slabs of the
contraction are summed in FP32 and added in float64; the scale is undone there, and the result rounded once.
"""

import torch

from cake_shared.cpu_precision import ieee_products
from cake_shared.gemm.cpu import widen_cols, widen_rows
from cake_shared.gemm.problem import round_up

_LARGEST_INT = 0x7FFFFFFF


def _constants(dtype, *values):
    return torch.tensor(values, dtype=dtype, device="cpu").unbind()


# Tensors, because torch allocates one at every use of a Python number in an integer operation.
_ONE, _MAGNITUDE, _INFINITY, _FP32_FRACTION_BITS, _FP32_BIAS = _constants(
    torch.int32, 1, _LARGEST_INT, 0x7F800000, 23, 127
)
_HALVE, _FP64_FRACTION_BITS, _FP64_BIAS = _constants(torch.int64, 1, 52, 1023)


def run_router(plan, a, b, out, buffers):
    """Compute `out = a @ b` as the plan says; allocates no tensor storage.

    Parameters
    ----------
    plan : object
        A package's `RouterPlan`.
    a, b, out : torch.Tensor
        `[M, K]`, `[K, N]` FP32 or BF16 and `[M, N]` FP32.
    buffers : dict of str to torch.Tensor
        From `cake_shared.gemm.cpu.allocate(plan)`; what they hold does not matter.
    """
    problem = plan.problem
    if out.numel() == 0:
        return
    if problem.k == 0:
        out.zero_()
        return
    with ieee_products():
        _measure(plan, a, buffers, "row", problem.a_major == "k")
        _measure(plan, b.t(), buffers, "col", problem.b_major == "k")
        for row in range(0, problem.m, plan.block_rows):
            rows = slice(row, min(row + plan.block_rows, problem.m))
            for col in range(0, problem.n, plan.col_tile):
                cols = slice(col, min(col + plan.col_tile, problem.n))
                total = _block(plan, a[rows], b[:, cols], rows, cols, buffers)
                _redo_special(plan, a[rows], b[:, cols], rows, cols, total, buffers)
                out[rows, cols].copy_(total)


def _measure(plan, operand, buffers, side, depth_is_major):
    """Scale factors and the special flag of every row of `operand` `[R, K]`, into the buffers of that side."""
    raw = buffers["a" if side == "row" else "b"]
    step = plan.block_rows if side == "row" else plan.col_tile
    for start in range(0, operand.shape[0], step):
        part = operand[start : start + step]
        count = part.shape[0]
        largest, smallest, found = (buffers[f"{side}_{what}"][:count] for what in ("largest", "smallest", "found"))
        largest.zero_()
        smallest.fill_(_LARGEST_INT)
        for k in range(0, plan.problem.k, plan.slab):
            tile = widen_rows(raw, part[:, k : k + plan.slab], count, depth_is_major)
            # As integers, magnitudes sort like the numbers, with inf and NaN on top.
            bits = tile.view(torch.int32).bitwise_and_(_MAGNITUDE)
            torch.maximum(largest, torch.amax(bits, 1, out=found), out=largest)
            # Zero wraps to the largest integer and so never is the smallest magnitude.
            bits.sub_(_ONE).bitwise_and_(_MAGNITUDE)
            torch.minimum(smallest, torch.amin(bits, 1, out=found), out=smallest)
        _decide(plan, largest, smallest.add_(_ONE), {n: buffers[f"{side}_{n}"] for n in _PER_ROW}, start)


_PER_ROW = ("up", "up_again", "down", "special", "binade", "exponent", "spread", "bound", "flag")


def _decide(plan, largest, smallest, per_row, start):
    count = largest.shape[0]
    up, up_again, down, special = (per_row[n][start : start + count] for n in ("up", "up_again", "down", "special"))
    scratch = ("binade", "exponent", "spread", "bound", "flag")
    binade, exponent, spread, bound, flag = (per_row[n][:count] for n in scratch)
    for magnitudes, target in ((smallest, spread), (largest, exponent)):
        # In float64 FP32's subnormals are normal, so the exponent field is the binade; zero ends up at -149.
        binade.copy_(magnitudes.view(torch.float32))
        target.copy_(binade.view(torch.int64)).bitwise_right_shift_(_FP64_FRACTION_BITS).sub_(_FP64_BIAS).clamp_(
            -149, 127
        )
    torch.sub(exponent, spread, out=spread)
    torch.gt(spread, bound.fill_(plan.exponent_range), out=special)
    torch.ge(largest, _INFINITY, out=flag)
    special.logical_or_(flag)
    shift = bound.fill_(plan.scale_exponent).sub_(exponent)
    half = spread.copy_(shift).bitwise_right_shift_(_HALVE)
    _power_of_two(up, half)
    _power_of_two(up_again, half.neg_().add_(shift))
    down.view(torch.int64).copy_(shift.neg_().add_(_FP64_BIAS)).bitwise_left_shift_(_FP64_FRACTION_BITS)


def _power_of_two(target, exponents):
    """`target` FP32 = 2 ** exponents, for exponents in the normal range."""
    target.view(torch.int32).copy_(exponents).add_(_FP32_BIAS).bitwise_left_shift_(_FP32_FRACTION_BITS)


def _block(plan, a, b, rows, cols, buffers):
    """Float64 `[rows, cols]` of one block by split products, the scale undone; rubbish in special rows and columns."""
    row_count, col_count = a.shape[0], b.shape[1]
    padded_rows, padded_cols = round_up(row_count, plan.row_tile), round_up(col_count, plan.col_multiple)
    total = buffers["total"][:padded_rows, :padded_cols].zero_()
    wide = buffers["wide"][:padded_rows, :padded_cols]
    sums = buffers["sums"][:padded_rows, :padded_cols]
    for k in range(0, plan.problem.k, plan.slab):
        left = widen_rows(buffers["a"], a[:, k : k + plan.slab], padded_rows, plan.problem.a_major == "k")
        for factor in ("row_up", "row_up_again"):
            left[:row_count].mul_(buffers[factor][rows, None])
        right = widen_cols(buffers["b"], b[k : k + plan.slab], padded_cols, plan.problem.b_major == "n")
        for factor in ("col_up", "col_up_again"):
            right[:, :col_count].mul_(buffers[factor][cols])
        lefts = _split(left, plan.problem.a_terms, "a", plan.problem.a_major == "k", buffers)
        rights = _split(right.t(), plan.problem.b_terms, "b", plan.problem.b_major == "k", buffers)
        *small, largest = plan.products
        for group in (small, [largest]):
            for position, (i, j) in enumerate(group):
                for r in range(0, padded_rows, plan.row_tile):
                    x, part = lefts[i - 1][r : r + plan.row_tile], sums[r : r + plan.row_tile]
                    if position == 0:
                        torch.mm(x, rights[j - 1].t(), out=part)
                    else:
                        part.addmm_(x, rights[j - 1].t())
            if group:
                total.add_(wide.copy_(sums))
    total = total[:row_count, :col_count]
    return total.mul_(buffers["row_down"][rows, None]).mul_(buffers["col_down"][cols])


def _split(tile, terms, side, depth_is_major, buffers):
    """BF16 terms of an FP32 tile `[R, depth]`, as FP32, largest first; the tile itself becomes the last one."""
    if terms == 1:
        return [tile]
    count, depth = tile.shape

    def like_tile(buffer):
        return buffer[:count, :depth] if depth_is_major else buffer[:depth, :count].t()

    rounded, split = like_tile(buffers[f"{side}_bf16"]), []
    for term in range(1, terms):
        part = like_tile(buffers[f"{side}_term{term}"]).copy_(rounded.copy_(tile))
        tile.sub_(part)
        split.append(part)
    return [*split, tile]


def _redo_special(plan, a, b, rows, cols, total, buffers):
    """Overwrite the elements of special rows and columns with plain float64 products."""
    row_special, col_special = buffers["row_special"][rows], buffers["col_special"][cols]
    every_row = bool(torch.any(col_special, out=buffers["any"]))
    padded_cols = round_up(b.shape[1], plan.col_multiple)
    acc = buffers["acc64"][:, :padded_cols]
    for r in range(0, a.shape[0], plan.row_tile):
        flags = row_special[r : r + plan.row_tile]
        if not every_row and not bool(torch.any(flags, out=buffers["any"])):
            continue
        acc.zero_()
        for k in range(0, plan.problem.k, plan.slab):
            left = widen_rows(
                buffers["a64"],
                a[r : r + plan.row_tile, k : k + plan.slab],
                plan.row_tile,
                plan.problem.a_major == "k",
            )
            right = widen_cols(buffers["b64"], b[k : k + plan.slab], padded_cols, plan.problem.b_major == "n")
            acc.addmm_(left, right)
        part = total[r : r + plan.row_tile]
        mask = buffers["mask"][: part.shape[0], : part.shape[1]]
        torch.logical_or(flags[:, None], col_special, out=mask)
        torch.where(mask, acc[: part.shape[0], : part.shape[1]], part, out=part)
