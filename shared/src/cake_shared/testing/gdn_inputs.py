"""Inputs of the gated delta rule in named gate and beta regimes, each from a seeded CPU generator."""

import math
from dataclasses import dataclass, field, replace

import torch
import torch.nn.functional as F

GATES = ("G0", "G0.5", "Gmild", "Gqwen", "Gtiny", "Gspike0", "Gspike31", "Gspike63")
BETAS = ("b0", "b1", "b2", "brand", "bsat")


@dataclass(frozen=True)
class GdnCase:
    """The tensors of one call and the gradients that come back into it.

    q, k `[B, T, H, K]`, v and do `[B, T, HV, V]`, g and beta `[B, T, HV]`, initial_state and d_state `[N, HV, K, V]` or
    None, cu_seqlens `[N + 1]` or None. `options` holds the other keywords of `chunk_gated_delta_rule` (A_log and
    dt_bias are tensors `[HV]` among them).
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    g: torch.Tensor
    beta: torch.Tensor
    scale: float | None
    do: torch.Tensor
    initial_state: torch.Tensor | None = None
    d_state: torch.Tensor | None = None
    cu_seqlens: torch.Tensor | None = None
    options: dict = field(default_factory=dict)

    def with_(self, **changes):
        """A copy with some fields replaced."""
        return replace(self, **changes)

    def tokens(self, start, stop):
        """The case cut to tokens [start, stop), without offsets."""
        names = ("q", "k", "v", "g", "beta", "do")
        return replace(self, cu_seqlens=None, **{name: getattr(self, name)[:, start:stop] for name in names})


def generator(seed):
    """A CPU generator with that seed."""
    return torch.Generator().manual_seed(seed)


def gates(regime, shape, seed=0):
    """Log decays `<= 0` of a regime, FP32, of shape `[..., T, HV]`.

    G0 all zero; G0.5 like Gmild with a seeded half exactly zero; Gmild `logsigmoid(normal) / 16`; Gqwen
    `-A softplus(x + 1)`, x normal, A spread evenly over (0, 16] along the heads; Gtiny -26 everywhere; Gspike0,
    Gspike31, Gspike63 zero except -100 at that position of every chunk of 64 tokens.
    """
    rng = generator(seed)
    tokens, heads = shape[-2:]
    if regime == "G0":
        return torch.zeros(shape)
    if regime in ("Gmild", "G0.5"):
        g = F.logsigmoid(torch.randn(shape, generator=rng)) / 16
        if regime == "G0.5":
            g = torch.where(torch.rand(shape, generator=rng) < 0.5, torch.zeros(()), g)
        return g
    if regime == "Gqwen":
        strength = torch.arange(1, heads + 1) * (16.0 / heads)
        return -strength * F.softplus(torch.randn(shape, generator=rng) + 1.0)
    if regime == "Gtiny":
        return torch.full(shape, -26.0)
    if regime.startswith("Gspike"):
        g = torch.zeros(shape)
        g[..., torch.arange(tokens) % 64 == int(regime[len("Gspike") :]), :] = -100.0
        return g
    raise ValueError(f"regime={regime!r}: takes one of {GATES}")


def betas(regime, shape, seed=0):
    """Write strengths of a regime, FP32: b0, b1, b2 exactly 0, 1, 2; brand `sigmoid(normal)`; bsat `sigmoid(8)`."""
    constants = {"b0": 0.0, "b1": 1.0, "b2": 2.0}
    if regime in constants:
        return torch.full(shape, constants[regime])
    if regime == "brand":
        return torch.sigmoid(torch.randn(shape, generator=generator(seed)))
    if regime == "bsat":
        return torch.sigmoid(torch.full(shape, 8.0))
    raise ValueError(f"regime={regime!r}: takes one of {BETAS}")


def unit(x):
    """Rows scaled to norm 1 in FP32."""
    return x / x.norm(dim=-1, keepdim=True)


def base(T, H, HV, *, K=128, V=128, B=1, gate="Gmild", beta="brand", seed=0, dtype=torch.bfloat16):
    """The input that the cases share: unit-norm q and k, normal v and do, g and beta of a regime in FP32.

    Parameters
    ----------
    T, H, HV, K, V, B : int
        Tokens, key heads, value heads, key and value dims, batch.
    gate, beta : str
        A regime of `gates` and one of `betas`.
    seed : int
        Another seed, other numbers.
    dtype : torch.dtype
        Of q, k, v and do.

    Returns
    -------
    GdnCase
        With `scale = K ** -0.5`, no states and no offsets.
    """
    rng = generator(seed)
    q, k = (unit(torch.randn(B, T, H, K, generator=rng)).to(dtype) for _ in range(2))
    v, do = (torch.randn(B, T, HV, V, generator=rng).to(dtype) for _ in range(2))
    gate_values, beta_values = gates(gate, (B, T, HV), seed + 1), betas(beta, (B, T, HV), seed + 2)
    return GdnCase(q, k, v, gate_values, beta_values, K**-0.5, do)


def states(case, sequences, seed=7):
    """Normal FP32 `initial_state` and `d_state` for a case of that many sequences: `[N, HV, K, V]` each."""
    rng = generator(seed)
    shape = (sequences, case.v.shape[2], case.q.shape[3], case.v.shape[3])
    return torch.randn(shape, generator=rng), torch.randn(shape, generator=rng)


def packed(case, lengths, dtype=torch.int64):
    """The case with `cu_seqlens` of those lengths over its first tokens; B must be 1."""
    offsets = [0]
    for length in lengths:
        offsets.append(offsets[-1] + length)
    if case.q.shape[0] != 1 or offsets[-1] > case.q.shape[1]:
        raise ValueError(f"lengths={list(lengths)}: takes B = 1 and a sum of at most {case.q.shape[1]} tokens")
    return case.with_(cu_seqlens=torch.tensor(offsets, dtype=dtype))


def select_heads(case, key_heads):
    """The case of a rank that holds those key heads with all of their value heads, in the given order."""
    ratio = case.v.shape[2] // case.q.shape[2]
    value_heads = [h * ratio + i for h in key_heads for i in range(ratio)]
    changes = {name: getattr(case, name)[:, :, list(key_heads)] for name in ("q", "k")}
    changes.update({name: getattr(case, name)[:, :, value_heads] for name in ("v", "g", "beta", "do")})
    for name in ("initial_state", "d_state"):
        if getattr(case, name) is not None:
            changes[name] = getattr(case, name)[:, value_heads]
    return case.with_(**changes)


def fading(size, powers):
    """Three segments of one head, behind each of whose gates 2^powers is left of a state.

    Half of the key columns are never written, so that gates alone reduce what they hold. States at both ends are of
    that size. With powers above -100 what a segment adds is as large as what is left, else a thousand times larger.
    """
    case = base(12288, 1, 1)
    k = case.k.float()
    k[..., 64:] = 0
    added = size * 2.0 ** (powers if powers > -100 else -92)
    h0, ds = (size * x for x in states(case, 1))
    return case.with_(
        k=unit(k).to(case.k.dtype),
        v=(added * case.v.float()).to(case.v.dtype),
        do=(added * case.do.float()).to(case.do.dtype),
        g=torch.full_like(case.g, powers * math.log(2) / 4096),
        initial_state=h0,
        d_state=ds,
    )
