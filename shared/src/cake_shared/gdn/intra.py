"""The algebra inside a chunk, batched over all chunks and heads of a wave.

Source: Yang et al., *Gated Delta Networks* (arXiv 2412.06464) and *Parallelizing Linear Transformers with the Delta
Rule* (arXiv 2406.06484). Notation for one chunk entered with state `S`: `b` the cumulative log gates, `gamma =
exp(b)`, `Gamma_ij = exp(b_i - b_j)` on and below the diagonal, `e = exp(b_last - b)`, `A = strict_lower(beta_i
Gamma_ij k_i.k_j)`, `T = (I + A)^-1`, `X = V - gamma K S`, `V' = T (beta X)`, `S_next = gamma_last S + (e K)^T V'`.
"""

from dataclasses import dataclass
from functools import lru_cache

import torch

from cake_shared.gdn.products import add_product, product

# exp of a gate below this is zero in double precision too; larger magnitudes would only cost the sum its digits.
GATE_FLOOR = -1024.0


@lru_cache(maxsize=16)
def _upper(rows: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full((rows, rows), float("-inf"), dtype=dtype).triu_(1)


@lru_cache(maxsize=16)
def _identity(rows: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.eye(rows, dtype=dtype)


@lru_cache(maxsize=16)
def crossing(rows: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the 0/1 matrix with ones where row < column: right multiplication sums the columns before each one."""
    return torch.ones(rows, rows, dtype=dtype).triu_(1)


def unit_lower_inverse(a: torch.Tensor) -> torch.Tensor:
    """Return `(I + strict_lower(a))^-1` of `[n, rows, rows]` by forward substitution.

    Substitution stays at rounding level for the tame inverses of identical keys and beta up to 2, where a sum of
    powers of `a` would pass through huge intermediates.
    """
    eye = _identity(a.shape[-1], a.dtype)
    # X (I + A) = I rather than (I + A) X = I: for identical keys at beta = 2 its error is a quarter of the other's.
    return torch.linalg.solve_triangular(a, eye, upper=False, left=False, unitriangular=True)


@dataclass
class Gates:
    """Decays of a wave's chunks.

    `gamma` and `tail` (`e`) are `[c, h, rows]`, `last` `[c, h]`, `pair` (`Gamma`) `[c, h, rows, rows]`.
    """

    gamma: torch.Tensor
    tail: torch.Tensor
    last: torch.Tensor
    pair: torch.Tensor


def make_gates(g: torch.Tensor, dtype: torch.dtype) -> Gates:
    """Return the decays of float64 log gates `[chunks, heads, rows]`: only differences of sums are exponentiated."""
    b = g.clamp(min=GATE_FLOOR).cumsum(-1)
    last = b[..., -1:]
    pair = torch.empty(*b.shape, b.shape[-1], dtype=dtype)
    torch.sub(b.unsqueeze(-1), b.unsqueeze(-2), out=pair)
    pair.add_(_upper(b.shape[-1], dtype)).exp_()
    return Gates(b.exp().to(dtype), (last - b).exp_().to(dtype), last[..., 0].exp().to(dtype), pair)


@dataclass
class Chunks:
    """What both passes need of a wave: `[chunks, heads, rows, ...]` tensors, heads of values unless said otherwise."""

    k: torch.Tensor  # key heads
    kk: torch.Tensor  # key heads, strictly lower part of K K^T
    beta: torch.Tensor
    gates: Gates
    inverse: torch.Tensor  # float64

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Chunks, value heads, rows, padded key width."""
        return (*self.beta.shape, self.k.shape[-1])


def make_chunks(k: torch.Tensor, beta: torch.Tensor, gates: Gates) -> Chunks:
    """Form `K K^T` once per key head and the chunk inverse per value head."""
    chunks, heads, rows, _ = k.shape
    flat = k.flatten(0, 1)
    kk = product(flat, flat.mT).tril_(-1).view(chunks, heads, rows, rows)
    a = gates.pair * beta.double().unsqueeze(-1)
    by_key_head(a, heads).mul_(kk.unsqueeze(2))
    return Chunks(k, kk, beta, gates, unit_lower_inverse(a.flatten(0, 1)).view_as(a))


def in_two_terms(matrix: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return a float64 matrix rounded to `dtype` and, unless that is exact, what the rounding left out.

    Under a constant gate a whole diagonal of the inverse is one number, by which older values leave the state. One
    rounding of it repeats in every row, and over a chunk its errors add up instead of averaging out.
    """
    if dtype is matrix.dtype:
        return matrix, None
    high = matrix.to(dtype)
    return high, (matrix - high).to(dtype)


def split_terms(
    matrices: torch.Tensor, dtype: torch.dtype, sizes: list[int]
) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    """Split float64 `[n, rows, rows]` matrices in two terms and into the steps of a chain."""
    high, low = in_two_terms(matrices, dtype)
    return list(zip(high.split(sizes), [None] * len(sizes) if low is None else low.split(sizes)))


def apply_in_two_terms(
    matrix: tuple[torch.Tensor, torch.Tensor | None], x: torch.Tensor, out: torch.Tensor
) -> torch.Tensor:
    """Write the product of a matrix of `in_two_terms` and `x` to `out`."""
    high, low = matrix
    product(high, x, out=out)
    return out if low is None else add_product(out, low, x)


def by_key_head(x: torch.Tensor, key_heads: int) -> torch.Tensor:
    """View `[chunks, value heads, ...]` as `[chunks, key heads, heads per key head, ...]`."""
    return x.unflatten(1, (key_heads, -1))


def scaled_rows(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Return tiles of key heads times a factor per value head and row: `[chunks * value heads, rows, width]`."""
    return (x.unsqueeze(2) * by_key_head(factor, x.shape[1]).unsqueeze(-1)).flatten(0, 2)


def sum_over_group(x: torch.Tensor, key_heads: int) -> torch.Tensor:
    """Add the value heads of each key head in head order: `[c, value heads, ...]` to `[c, key heads, ...]`."""
    parts = by_key_head(x, key_heads).unbind(2)
    if len(parts) == 1:
        return parts[0]
    total = parts[0] + parts[1]
    for part in parts[2:]:
        total += part
    return total


def run_chain(
    chunks: Chunks, counts: tuple[int, ...], x: torch.Tensor, carry: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Walk the states of a wave forward.

    Parameters
    ----------
    chunks, counts
        The wave, and how many sequences each of its steps has.
    x
        `V` on entry, `X = V - gamma K S` on return, `[chunks * heads, rows, width]`.
    carry
        States `[n * heads, key width, width]` at the wave's entry, at its end on return. A sequence that ends inside
        the wave leaves its final state there.

    Returns
    -------
    tuple
        `V'` like `x`, and the entry states of all chunks `[chunks * heads, key width, width]`.
    """
    heads = chunks.shape[1]
    sizes = [n * heads for n in counts]
    written = torch.empty_like(x)
    states = x.new_empty(x.shape[0], carry.shape[1], x.shape[2])
    solve = split_terms((chunks.inverse * chunks.beta.unsqueeze(-2)).flatten(0, 1), x.dtype, sizes)
    decayed = scaled_rows(chunks.k, chunks.gates.gamma).split(sizes)
    tailed = scaled_rows(chunks.k, chunks.gates.tail).mT.split(sizes)
    last = chunks.gates.last.reshape(-1, 1, 1).split(sizes)
    xs, ws, ss = x.split(sizes), written.split(sizes), states.split(sizes)
    ss[0].copy_(carry[: sizes[0]])
    end = len(sizes) - 1
    for i, size in enumerate(sizes):
        add_product(xs[i], decayed[i], ss[i], -1.0)
        apply_in_two_terms(solve[i], xs[i], ws[i])
        goes_on = i < end and sizes[i + 1] == size
        target = ss[i + 1] if goes_on else carry[:size]
        torch.mul(ss[i], last[i], out=target)
        add_product(target, tailed[i], ws[i])
        if i < end and not goes_on:
            ss[i + 1].copy_(target[: sizes[i + 1]])
    return written, states
