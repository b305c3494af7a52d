"""The published workloads by name: packs of sequences for the gated delta rule, rows of the projection GEMMs.

Pure data, without torch. Benches, plans and tests name a workload instead of repeating its numbers.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class GdnWorkload:
    """A pack of sequences and the heads that read it; head dims are 128 unless stated.

    Attributes
    ----------
    name : str
        As published.
    h, hv : int
        Key heads and value heads.
    seqlens_tokens : tuple of int
        Lengths in pack order.
    head_dim : int
        K = V.
    """

    name: str
    h: int
    hv: int
    seqlens_tokens: tuple[int, ...]
    head_dim: int = 128

    @property
    def tokens(self):
        """Tokens of the whole pack."""
        return sum(self.seqlens_tokens)

    @property
    def cu_seqlens(self):
        """Offsets of the sequences as a tuple of N + 1 integers from 0 to `tokens`."""
        offsets = [0]
        for length in self.seqlens_tokens:
            offsets.append(offsets[-1] + length)
        return tuple(offsets)


@dataclass(frozen=True)
class ProjectionWorkload:
    """A dense projection `[T, d_in] -> [T, d_out]` of a training step, in forward, dgrad and wgrad."""

    tokens: int
    d_in: int
    d_out: int

    @property
    def name(self):
        """`d_in -> d_out, T tokens`."""
        return f"{self.d_in} -> {self.d_out}, {self.tokens} tokens"


@dataclass(frozen=True)
class HeadProjectionWorkload:
    """A projection batched over heads: `[T, heads, d_in] x [heads, d_in, d_out] -> [T, heads, d_out]`."""

    tokens: int
    heads: int
    d_in: int
    d_out: int

    @property
    def name(self):
        """`[T, heads, d_in] x [heads, d_in, d_out]` with the numbers in."""
        return f"[{self.tokens}, {self.heads}, {self.d_in}] x [{self.heads}, {self.d_in}, {self.d_out}]"


@dataclass(frozen=True)
class RouterWorkload:
    """An FP32 router gate `[T, d_in] -> [T, experts]`."""

    tokens: int
    d_in: int
    experts: int

    @property
    def name(self):
        """`router d_in -> experts, T tokens`."""
        return f"router {self.d_in} -> {self.experts}, {self.tokens} tokens"


_PACK_15 = (4301, 4210, 4333, 4419, 4177, 4280, 4395, 4126, 4352, 4263, 4448, 4190, 4317, 4239, 4370)
_PACK_LONG = (11000, 12000, 9768)

GDN = (
    GdnWorkload("4 x 4096", 8, 16, (4096,) * 4),
    GdnWorkload("3 x ~4.25k (real pack)", 8, 16, (4253, 4097, 4411)),
    GdnWorkload("8 x 4096", 8, 16, (4096,) * 8),
    GdnWorkload("7 x ~4.3k (real pack)", 8, 16, _PACK_15[:7]),
    GdnWorkload("16 x 4096", 8, 16, (4096,) * 16),
    GdnWorkload("15 x ~4.3k (real pack)", 8, 16, _PACK_15),
    GdnWorkload("1 x 16384", 8, 16, (16384,)),
    GdnWorkload("4 x 4096", 16, 32, (4096,) * 4),
    GdnWorkload("16 x 4096", 16, 32, (4096,) * 16),
    GdnWorkload("1 x 16384", 16, 32, (16384,)),
    GdnWorkload("131071 + 87531 + 43385", 2, 6, (131071, 87531, 43385)),
    GdnWorkload("2 seqs, 259174 tokens", 2, 6, (131071, 128103)),
    GdnWorkload("6 seqs, 241817 tokens", 2, 6, (65521, 43385, 40009, 38917, 32768, 21217)),
    GdnWorkload("64 x 4096", 2, 6, (4096,) * 64),
    GdnWorkload("11000 + 12000 + 9768", 16, 48, _PACK_LONG),
    GdnWorkload("11000 + 12000 + 9768", 8, 24, _PACK_LONG),
    GdnWorkload("11000 + 12000 + 9768", 4, 12, _PACK_LONG),
    GdnWorkload("11000 + 12000 + 9768", 2, 6, _PACK_LONG),
    GdnWorkload("11000 + 12000 + 9768", 1, 3, _PACK_LONG),
)

PROJECTION_TOKENS = (16172, 16231, 16384)
PROJECTION_WIDTHS = {4096: (32, 48, 64, 512, 1024, 4096), 5120: (48, 64, 512, 1024, 5120)}

PROJECTIONS = tuple(
    ProjectionWorkload(tokens, d_in, d_out)
    for d_in, widths in PROJECTION_WIDTHS.items()
    for d_out in widths
    for tokens in PROJECTION_TOKENS
)

HEAD_PROJECTIONS = tuple(
    HeadProjectionWorkload(tokens, 64, d_in, d_out)
    for d_in, d_out in ((192, 512), (512, 256))
    for tokens in PROJECTION_TOKENS
)

ROUTERS = (RouterWorkload(16384, 6144, 256), RouterWorkload(4096, 6144, 256))


def gdn_workload(name, hv=None):
    """The GDN workload of that name, and of that number of value heads where several share the name.

    Parameters
    ----------
    name : str
        As in `GDN`.
    hv : int, optional
        Value heads; needed only where the name alone is ambiguous.

    Raises
    ------
    ValueError
        When no workload, or more than one, fits; the message lists the choices.
    """
    found = [w for w in GDN if w.name == name and hv in (None, w.hv)]
    if len(found) != 1:
        fits = "no workload fits" if not found else f"{len(found)} workloads fit, with hv {[w.hv for w in found]}"
        names = sorted({w.name for w in GDN})
        raise ValueError(f"name={name!r}, hv={hv}: {fits}; takes one of {names} and the hv where it is ambiguous")
    return found[0]
