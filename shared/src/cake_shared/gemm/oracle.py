"""The GEMMs in float64, as plain as they can be written: what every program is compared with."""

import torch


def product(a, b):
    """`a @ b` in float64; a `[..., M, K]`, b `[..., K, N]` of any floating dtype."""
    return torch.matmul(a.detach().double(), b.detach().double())


def forward(x, w):
    """`x @ w.T` in float64; x `[..., K]`, w `[N, K]`, result `[..., N]`."""
    return product(x, w.t())


def dgrad(g, w):
    """Gradient of `forward` with respect to x, `g @ w` in float64; g `[..., N]`, w `[N, K]`, result `[..., K]`."""
    return product(g, w)


def wgrad(g, x):
    """Gradient of `forward` with respect to w, `sum over rows of outer(g, x)` in float64, `[N, K]`."""
    g, x = g.detach().double(), x.detach().double()
    return torch.einsum("tn,tk->nk", g.reshape(-1, g.shape[-1]), x.reshape(-1, x.shape[-1]))


def magnitude(a, b):
    """`|a| @ |b|` in float64: the scale of the summands, against which rounding errors are judged."""
    return product(a.detach().abs(), b.detach().abs())
