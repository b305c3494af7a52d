"""mma.sync of every type, against float64 within the bound of FP32 accumulation."""

from __future__ import annotations

import dataclasses

import numpy as np

from cake_shared.emulator.conformance import ptx_text
from cake_shared.emulator.conformance.families import fragments as fr
from cake_shared.emulator.conformance.families.tensor_copies import join
from cake_shared.emulator.conformance.model import Case, Check, Launch, Program, Ptr

Array = np.ndarray


@dataclasses.dataclass(frozen=True)
class Mma:
    """One mma.sync variant. ``text`` is the part of the mnemonic after the shape and layouts."""

    m: int
    n: int
    k: int
    a: str
    b: str
    d: str
    satfinite: bool = False

    @property
    def name(self) -> str:
        """The whole mnemonic."""
        types = f"{self.d}.{self.a}.{self.b}.{self.d}"
        sat = ".satfinite" if self.satfinite else ""
        return f"mma.sync.aligned.m{self.m}n{self.n}k{self.k}.row.col{sat}.{types}"


MMAS = [
    Mma(16, 8, 16, "f16", "f16", "f32"),
    Mma(16, 8, 8, "f16", "f16", "f32"),
    Mma(16, 8, 16, "f16", "f16", "f16"),
    Mma(16, 8, 8, "f16", "f16", "f16"),
    Mma(16, 8, 16, "bf16", "bf16", "f32"),
    Mma(16, 8, 8, "bf16", "bf16", "f32"),
    Mma(16, 8, 8, "tf32", "tf32", "f32"),
    Mma(16, 8, 4, "tf32", "tf32", "f32"),
    Mma(16, 8, 32, "e4m3", "e4m3", "f32"),
    Mma(16, 8, 32, "e4m3", "e5m2", "f32"),
    Mma(16, 8, 32, "e5m2", "e5m2", "f32"),
    Mma(16, 8, 32, "s8", "s8", "s32"),
    Mma(16, 8, 32, "u8", "s8", "s32"),
    Mma(16, 8, 32, "u8", "u8", "s32", satfinite=True),
    Mma(16, 8, 16, "s8", "u8", "s32"),
    Mma(16, 8, 4, "f64", "f64", "f64"),
    Mma(16, 8, 8, "f64", "f64", "f64"),
    Mma(16, 8, 16, "f64", "f64", "f64"),
    Mma(8, 8, 4, "f64", "f64", "f64"),
]


def _mma_kernel(name: str, mma: Mma, registers: tuple[int, int, int]) -> str:
    wide = mma.d == "f64"
    size, kind = (8, "b64") if wide else (4, "b32")
    c_kind = kind
    na, nb, nc = registers
    lines = []
    for letter, count, pointer in (("a", na, "a_in"), ("b", nb, "b_in"), ("c", nc, "c_in")):
        lines.append(f".reg .{kind} {letter}<{count}>;")
        lines.append(f"mad.wide.u32 at, lane, {size * count}, {pointer};")
        lines += [f"ld.global.{kind} {letter}{i}, [at+{size * i}];" for i in range(count)]
    operands = ", ".join(
        ptx_text.braces(letter, count) if count > 1 or not (wide and mma.m == 8) else f"{{{letter}0}}"
        for letter, count in (("d", nc), ("a", na), ("b", nb), ("c", nc))
    )
    stores = [f"st.global.{c_kind} [at+{size * i}], d{i};" for i in range(nc)]
    pointers = ("a_in", "b_in", "c_in", "d_out")
    return "\n".join(
        [
            f".visible .entry {name}({', '.join(f'.param .u64 p_{p}' for p in pointers)})",
            "{",
            ptx_text.parameters(pointers),
            ".reg .b32 lane;",
            ".reg .b64 at;",
            f".reg .{c_kind} d<{nc}>;",
            "mov.u32 lane, %laneid;",
            *lines,
            f"{mma.name} {operands};",
            f"mad.wide.u32 at, lane, {size * nc}, d_out;",
            *stores,
            "ret;",
            "}",
        ]
    )


def _some_of_any_bits(rng: np.random.Generator, bits: Array, share: float) -> Array:
    """The same bits, some of them replaced by any: subnormals, infinities and NaN among them."""
    drawn = rng.integers(0, 1 << 8 * bits.itemsize, bits.shape, dtype=bits.dtype)
    return np.where(rng.random(bits.shape) < share, drawn, bits)


def build_mma(rows: list[Mma] = MMAS, any_bits: float = 0.0) -> Case:
    """Every row on one warp, operands loaded from memory in fragment order; ``any_bits`` of the elements are any."""
    rng = np.random.default_rng(51)
    entries, launches, checks = [], [], []
    inputs, plans, position = [], [], 0
    for mma in rows:
        a_bits, a = fr.matrix(rng, (mma.m, mma.k), mma.a)
        b_bits, b = fr.matrix(rng, (mma.k, mma.n), mma.b)
        c_bits, c = fr.accumulator(rng, (mma.m, mma.n), mma.d)
        if mma.m == 8:  # m8n8k4: one element of A and B a lane
            ar, ac = fr.GROUP[:, None], fr.THREAD[:, None]
            br, bc = fr.THREAD[:, None], fr.GROUP[:, None]
            cr = np.broadcast_to(fr.GROUP[:, None], (32, 2))
            cc = 2 * fr.THREAD[:, None] + np.arange(2)
        else:
            ar, ac = fr.a_fragment(fr.ELEMENT_BYTES[mma.a], mma.k)
            br, bc = fr.b_fragment(fr.ELEMENT_BYTES[mma.b], mma.k)
            cr, cc = fr.c_fragment(mma.n)
        if any_bits:
            a_bits, b_bits, c_bits = (_some_of_any_bits(rng, x, any_bits) for x in (a_bits, b_bits, c_bits))
        fragments = [fr.words(a_bits[ar, ac]), fr.words(b_bits[br, bc]), fr.words(c_bits[cr, cc])]
        exact = a @ b + c
        bound = fr.sum_bound(a, b, c, mma.a, mma.d)
        plans.append((mma, fragments, exact[cr, cc], bound[cr, cc]))
        inputs += [f.reshape(-1).view(np.uint8) for f in fragments]
    joined, offsets = join(inputs)
    outs = [np.zeros(fragments[2].nbytes, np.uint8) for _, fragments, _, _ in plans]
    out, out_offsets = join(outs)
    for i, (mma, fragments, exact, bound) in enumerate(plans):
        entries.append(_mma_kernel(f"mma{i}", mma, tuple(f.shape[1] for f in fragments)))
        args = (*(Ptr("in", offsets[3 * i + j], const=True) for j in range(3)), Ptr("out", out_offsets[i]))
        launches.append(Launch(f"mma{i}", (1, 1, 1), (32, 1, 1), args))
        position = out_offsets[i]
        count = exact.size
        if any_bits:
            checks.append(Check(f"{i} {mma.name}", "out", mma.d, count, position))
        elif mma.d == "s32":
            expected = exact.reshape(-1).astype(np.int64).astype(np.int32).view(np.uint32)
            checks.append(Check(mma.name, "out", "s32", count, position, "bits", expected))
        else:
            same = mma.d in ("f32", "f64") and mma.a in fr.SAME_BITS
            sums = exact.reshape(-1), bound.reshape(-1)
            checks.append(Check(mma.name, "out", mma.d, count, position, "bound", *sums, same_bits=same))
    return Case(lambda: ptx_text.module(*entries), {"in": joined, "out": out}, launches, checks)


def _any_bits() -> Case:
    """Sums that only the GPU can judge: a little of everything, then of anything."""
    rows = [mma for mma in MMAS if mma.d == "f32"]
    return build_mma(rows * 8, any_bits=0.02)


PROGRAMS = [
    Program("mma.sync", "mma.sync", build_mma),
    Program("mma.sync on any bits", "mma.sync", _any_bits),
]
