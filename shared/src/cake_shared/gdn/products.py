"""Batched matrix products whose bits do not depend on the batch.

Products of single precision give every matrix of a batch the same bits whatever its place and the number of its
neighbours, at any thread count tried (1 to 16). In double precision the library splits single products over three or
more threads, depending on the batch; there each matrix is multiplied by a call of its own.
"""

import torch


def _one_by_one(a: torch.Tensor) -> bool:
    return a.dtype is torch.float64 and torch.get_num_threads() > 2


def product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return `a @ b` for `[n, i, j]` and `[n, j, k]`, written to `out` where given."""
    if _one_by_one(a):
        out = a.new_empty(a.shape[0], a.shape[1], b.shape[2]) if out is None else out
        for x, y, z in zip(a, b, out):
            torch.mm(x, y, out=z)
        return out
    return torch.bmm(a, b, out=out)


def add_product(acc: torch.Tensor, a: torch.Tensor, b: torch.Tensor, alpha: float = 1.0) -> torch.Tensor:
    """Add `alpha * a @ b` to `acc` in place and return it."""
    if _one_by_one(a):
        for z, x, y in zip(acc, a, b):
            z.addmm_(x, y, alpha=alpha)
        return acc
    return acc.baddbmm_(a, b, alpha=alpha)
