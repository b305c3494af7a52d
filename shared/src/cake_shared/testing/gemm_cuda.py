"""Cases of the BF16 GEMM for CUDA programs, on a GPU or in the emulator: any layout inside guarded buffers."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch

from cake_shared.gemm import oracle
from cake_shared.testing.bits import bits_of, relative_l2

BF16, FP32 = torch.bfloat16, torch.float32


def normal(*shape, seed=0, dtype=BF16, device="cuda"):
    """Normal numbers of a fixed seed, drawn on the device."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.randn(*shape, generator=generator, device=device).to(dtype)


def assert_rounded_once(actual, a, b, prior=0.0):
    """Assert, element by element, FP32 accumulation over K terms and then one rounding to the dtype of the result.

    A tensor core cuts what it adds below the last bit of the largest term instead of rounding it: up to two units of
    FP32 in a step, which the bound takes for every term of a random walk, and always towards zero, which makes the
    relative error of random sums grow with K (1.9e-5 at 16384, as cuBLAS's).
    """
    __tracebackhide__ = True
    exact = oracle.product(a, b) + prior
    depth = max(a.shape[-1], 1)
    accumulation = 2.0**-22 * (4 + depth**0.5) * (oracle.magnitude(a, b) + abs(prior))
    rounding = exact.abs() * (2.0**-8 if actual.dtype == BF16 else 2.0**-24)
    excess = (actual.double() - exact).abs() - (1.01 * rounding + accumulation)
    bad = bool((excess > 0).any() or torch.isnan(actual).any())
    assert not bad, f"beyond the bound by {excess.max().item():.3e}"
    limit = 2.5e-3 if actual.dtype == BF16 else fp32_limit(depth)
    if actual.numel() and depth > 1:
        error = relative_l2(actual, exact)
        assert error <= limit, f"relative L2 error {error:.2e}, limit {limit:.1e}"


def fp32_limit(depth):
    """Relative L2 error that random sums of `depth` terms may have in FP32 on a tensor core."""
    return 2e-6 + 2e-9 * depth


def guarded(batch, rows, cols, pad, dtype, device, values=None):
    """A `[batch, rows, cols]` view inside wider rows of NaN, and the buffer that it lies in."""
    pitch = -(-cols // 8) * 8 + 8 * pad
    buffer = torch.full((batch, rows, pitch), float("nan"), dtype=dtype, device=device)
    view = buffer[:, :, :cols]
    if values is not None:
        view.copy_(values)
    return view, buffer


@dataclass(frozen=True)
class GemmCase:
    """One problem and the layout of its operands; `pad` widens every row by that many granules of 8 elements."""

    m: int
    n: int
    k: int
    a_major: str = "k"
    b_major: str = "k"
    out_dtype: torch.dtype = BF16
    out_major: str = "n"
    accumulate: bool = False
    batch: int = 1
    pad: int = 0
    seed: int = 0

    def operands(self, device):
        """a `[L, M, K]` and b `[L, K, N]` as views, values by seed; what lies beside them is NaN."""
        extents = ((self.m, self.k, self.a_major == "k"), (self.k, self.n, self.b_major == "n"))
        made = []
        for index, (rows, cols, by_rows) in enumerate(extents):
            shape = (rows, cols) if by_rows else (cols, rows)
            values = normal(self.batch, *shape, seed=self.seed + index, device=device)
            view, _ = guarded(self.batch, *shape, self.pad, BF16, device, values)
            made.append(view if by_rows else view.transpose(1, 2))
        return made

    def output(self, device):
        """`out` as a view, and the buffer around it; NaN, or what is to be added to."""
        shape = (self.m, self.n) if self.out_major == "n" else (self.n, self.m)
        values = normal(self.batch, *shape, seed=self.seed + 7, dtype=FP32, device=device) if self.accumulate else None
        view, buffer = guarded(self.batch, *shape, self.pad, self.out_dtype, device, values)
        return (view if self.out_major == "n" else view.transpose(1, 2)), buffer

    def check(self, gemm, device="cuda"):
        """Run `gemm(a, b, out, transposed_out, accumulate)`; values, untouched neighbours, untouched operands."""
        __tracebackhide__ = True
        a, b = self.operands(device)
        out, buffer = self.output(device)
        prior = out.double() if self.accumulate else 0.0
        before = bits_of(a).clone(), bits_of(b).clone()
        outside = torch.ones_like(buffer, dtype=torch.bool)
        outside[:, :, : self.n if self.out_major == "n" else self.m] = False
        gemm(a, b, out, self.out_major == "m", self.accumulate)
        assert_rounded_once(out, a, b, prior)
        assert bool(torch.isnan(buffer[outside]).all()), "wrote beside the output"
        for name, operand, was in zip("ab", (a, b), before):
            assert torch.equal(bits_of(operand), was), f"wrote into {name}"
        return out


def layout_cases(m, n, k, **keywords):
    """Every combination of unit strides, result dtype and accumulation of one problem."""
    for a_major, b_major, out_major, (out_dtype, accumulate) in itertools.product(
        "km", "kn", "nm", ((BF16, False), (FP32, False), (FP32, True))
    ):
        yield GemmCase(m, n, k, a_major, b_major, out_dtype, out_major, accumulate, **keywords)


# Extents around the borders of tiles of 64 to 256 rows or columns and of slabs of 32 to 128 of the contraction.
RAGGED = tuple(
    GemmCase(m, n, k, a_major, b_major, out_dtype, batch=batch, pad=pad)
    for m, n, k, a_major, b_major, out_dtype, batch, pad in (
        (1, 8, 1, "k", "k", BF16, 1, 0),
        (1, 8, 8, "m", "n", FP32, 1, 1),
        (63, 72, 65, "k", "k", BF16, 1, 1),
        (64, 64, 64, "k", "n", FP32, 1, 0),
        (65, 8, 127, "m", "n", BF16, 2, 1),
        (127, 136, 33, "k", "n", BF16, 1, 0),
        (128, 128, 128, "m", "k", FP32, 1, 0),
        (129, 264, 63, "m", "n", FP32, 1, 2),
        (2, 256, 257, "k", "k", FP32, 3, 0),
        (255, 40, 7, "k", "n", BF16, 1, 1),
        (257, 48, 130, "m", "k", BF16, 1, 0),
        (3, 520, 31, "m", "n", FP32, 2, 1),
    )
)
