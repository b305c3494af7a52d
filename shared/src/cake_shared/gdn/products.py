"""Batched matrix products whose bits do not depend on the batch.

Products of single precision give every matrix of a batch the same bits whatever its place and the number of its
neighbours, at any thread count tried (1 to 16). In double precision a batch smaller than the number of threads makes
the library split a single product over threads, which moves bits; such a batch is therefore filled up.
"""

import torch


def _is_thin(a: torch.Tensor) -> bool:
    return a.dtype is torch.float64 and a.shape[0] < torch.get_num_threads()


def _filled(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x, x[:1].expand(torch.get_num_threads() - x.shape[0], -1, -1)])


def product(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Return `a @ b` for `[n, i, j]` and `[n, j, k]`, written to `out` where given."""
    if _is_thin(a):
        full = torch.bmm(_filled(a), _filled(b))[: a.shape[0]]
        return full if out is None else out.copy_(full)
    return torch.bmm(a, b, out=out)


def add_product(acc: torch.Tensor, a: torch.Tensor, b: torch.Tensor, alpha: float = 1.0) -> torch.Tensor:
    """Add `alpha * a @ b` to `acc` in place and return it."""
    if _is_thin(a):
        return acc.copy_(torch.baddbmm(_filled(acc), _filled(a), _filled(b), alpha=alpha)[: a.shape[0]])
    return acc.baddbmm_(a, b, alpha=alpha)
