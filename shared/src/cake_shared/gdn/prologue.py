"""The optional transformations before the rule, on tiles, with their derivatives written out.

`q, k -> x / sqrt(sum x^2 + 1e-6)`; `g -> -exp(A_log) softplus(g + dt_bias)`; `beta -> sigmoid(beta)`, doubled under
`allow_neg_eigval`. Gates and beta are worked on in float64: they are a thousandth of the data. `torch.sigmoid` and
`softplus` are avoided, because their bits depend on an element's position in the buffer; `exp` and `log1p` do not.
"""

from dataclasses import dataclass

import torch

from cake_shared.gdn.options import L2NORM_EPS, Inputs, Options
from cake_shared.gdn.tiles import Pack, WaveIndex, gather_scalars

# Beyond it every decay has long been zero, and exp of it would soon be infinite.
_LARGEST_A_LOG = 600.0


def normalised(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `x * r` and `r = 1 / sqrt(sum x^2 + eps)` per row.

    Rows whose sum of squares overflows are scaled by their largest element first; `eps` is nothing beside them.
    """
    r = (x * x).sum(-1, keepdim=True).add_(L2NORM_EPS).rsqrt_()
    y = x * r
    if not r.all():
        large = x.abs().amax(-1, keepdim=True)
        small = x / large
        s = (small * small).sum(-1, keepdim=True).rsqrt_()
        overflown = r == 0
        y = torch.where(overflown, small * s, y)
        r = torch.where(overflown, s / large, r)
    return y, r


def normalised_backward(dy: torch.Tensor, y: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    """Return the gradient of `x` from that of `y = x * r`, reusing the memory of `dy`."""
    return dy.sub_(y * (dy * y).sum(-1, keepdim=True)).mul_(r)


def _sigmoid(x: torch.Tensor) -> torch.Tensor:
    return (1.0 + (-x).exp_()).reciprocal_()


def _softplus(x: torch.Tensor) -> torch.Tensor:
    return (-x.abs()).exp_().log1p_().add_(x.clamp(min=0))


@dataclass
class Decays:
    """Log gates `g` and `beta` of a wave `[chunks, heads, rows]` in float64, zero at padded rows.

    `raw` is `g + dt_bias` under the gate option, `rate` is `-exp(A_log)` `[heads, 1]`.
    """

    g: torch.Tensor
    beta: torch.Tensor
    raw: torch.Tensor | None = None
    rate: torch.Tensor | None = None


def load_decays(inputs: Inputs, options: Options, pack: Pack, index: WaveIndex, heads: tuple[int, int]) -> Decays:
    """Gather and transform the gates and betas of a wave's value heads."""
    f64 = torch.float64
    g = gather_scalars(inputs.g, pack, index, heads, f64)
    beta = gather_scalars(inputs.beta, pack, index, heads, f64)
    out = Decays(g, beta)
    if options.gate:
        mine = slice(heads[0], heads[0] + heads[1])
        out.raw = g if inputs.dt_bias is None else g + inputs.dt_bias[mine].to(f64).unsqueeze(-1)
        out.rate = -inputs.A_log[mine].to(f64).clamp(max=_LARGEST_A_LOG).exp().unsqueeze(-1)
        # Finite, so that a gradient of zero stays zero beside it.
        out.g = _softplus(out.raw).mul_(out.rate).clamp_(min=torch.finfo(f64).min)
        if index.mask is not None:
            out.g.masked_fill_(~index.mask, 0.0)
    if options.beta_sigmoid:
        out.beta = _sigmoid(beta)
        if options.neg_eigval:
            out.beta.mul_(2.0)
        if index.mask is not None:
            out.beta.masked_fill_(~index.mask, 0.0)
    return out


def gate_backward(dg: torch.Tensor, decays: Decays) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradient of the raw gate and, per row, that of `A_log`, from `dg` in float64."""
    return dg * decays.rate * _sigmoid(decays.raw), dg * decays.g


def beta_backward(dbeta: torch.Tensor, decays: Decays, options: Options) -> torch.Tensor:
    """Return the gradient of the raw beta from `dbeta` in float64."""
    top = 2.0 if options.neg_eigval else 1.0
    return dbeta * decays.beta * (1.0 - decays.beta / top)
