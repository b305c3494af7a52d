"""wgmma: every operand type, layout and form, against float64 within the bound of FP32 accumulation."""

from __future__ import annotations

import dataclasses

import numpy as np

from cake_shared.emulator.conformance import ptx_text
from cake_shared.emulator.conformance.families import fragments as fr
from cake_shared.emulator.conformance.families.tensor_copies import join
from cake_shared.emulator.conformance.model import Case, Check, Launch, Program, Ptr

Array = np.ndarray


@dataclasses.dataclass(frozen=True)
class Wgmma:
    """One wgmma variant: m64 x n over ``steps`` instructions along k; layouts by swizzle span and major-ness."""

    n: int
    a: str
    b: str
    d: str
    a_registers: bool = False
    a_span: int = 128
    b_span: int = 128
    a_mn: bool = False
    b_mn: bool = False
    steps: int = 1
    negate_a: bool = False
    negate_b: bool = False
    accumulate: bool = True
    padding: int = 0

    @property
    def step_k(self) -> int:
        """Elements along k of one instruction."""
        return 32 // fr.ELEMENT_BYTES[self.a]

    @property
    def k(self) -> int:
        """Elements along k of the whole product."""
        return self.step_k * self.steps

    @property
    def opcode(self) -> str:
        """The whole mnemonic."""
        return f"wgmma.mma_async.sync.aligned.m64n{self.n}k{self.step_k}.{self.d}.{self.a}.{self.b}"

    @property
    def name(self) -> str:
        """Mnemonic, steps, operand layouts and what is special."""
        a = "registers" if self.a_registers else f"{'MN' if self.a_mn else 'K'}/{self.a_span}B"
        flags = "".join(
            text
            for flag, text in (
                (self.negate_a, " -A"),
                (self.negate_b, " -B"),
                (not self.accumulate, " scale-d=0"),
                (self.padding, " padded strides"),
            )
            if flag
        )
        return f"{self.opcode} x{self.steps} A {a} B {'MN' if self.b_mn else 'K'}/{self.b_span}B{flags}"


def _operand_layout(rows: int, k: int, size: int, span: int, mn: bool, padding: int) -> tuple[int, int, int]:
    """(leading, stride, total bytes) of a packed canonical layout, strides enlarged by ``padding`` bytes."""
    if not mn:
        if span == 0:
            stride = 128 + padding
            leading = rows // 8 * stride
            return leading, stride, k * size // 16 * leading
        # The span holds one row's worth of k; longer rows repeat whole panels, which the kernel addresses itself.
        return 16, 8 * span + padding, rows // 8 * (8 * span + padding)
    if span == 0:
        chunk = 16 // size
        stride = 128 + padding
        leading = rows // chunk * stride
        return leading, stride, k // 8 * leading
    wide = span // size
    stride = 8 * span + padding
    leading = k // 8 * stride
    return leading, stride, -(-rows // wide) * leading


WGMMAS = [
    Wgmma(8, "bf16", "bf16", "f32"),
    Wgmma(64, "bf16", "bf16", "f32", steps=4),
    Wgmma(128, "bf16", "bf16", "f32", a_span=64, b_span=64, steps=2),
    Wgmma(256, "bf16", "bf16", "f32", a_span=32, b_span=32),
    Wgmma(24, "bf16", "bf16", "f32", a_span=0, b_span=0, steps=2),
    Wgmma(40, "bf16", "bf16", "f32", a_span=0, b_span=0, padding=32),
    Wgmma(64, "bf16", "bf16", "f32", a_mn=True, b_mn=True, steps=2),
    Wgmma(128, "bf16", "bf16", "f32", a_mn=True, b_mn=True, a_span=64, b_span=64),
    Wgmma(32, "bf16", "bf16", "f32", a_mn=True, b_mn=True, a_span=32, b_span=32, steps=2),
    Wgmma(64, "bf16", "bf16", "f32", a_mn=True, b_mn=True, a_span=0, b_span=0, steps=2),
    Wgmma(128, "bf16", "bf16", "f32", a_mn=False, b_mn=True, steps=4),
    Wgmma(64, "bf16", "bf16", "f32", a_registers=True, steps=4),
    Wgmma(96, "bf16", "bf16", "f32", a_registers=True, b_mn=True, steps=2),
    Wgmma(64, "bf16", "bf16", "f32", negate_a=True),
    Wgmma(64, "bf16", "bf16", "f32", negate_b=True, a_registers=True),
    Wgmma(64, "bf16", "bf16", "f32", accumulate=False),
    Wgmma(64, "f16", "f16", "f32", steps=2),
    Wgmma(64, "f16", "f16", "f16", steps=2),
    Wgmma(16, "f16", "f16", "f16", a_registers=True, b_span=64),
    Wgmma(64, "tf32", "tf32", "f32", steps=2),
    Wgmma(32, "tf32", "tf32", "f32", a_registers=True, b_span=32),
    Wgmma(64, "e4m3", "e4m3", "f32", steps=2),
    Wgmma(32, "e5m2", "e4m3", "f32", a_registers=True, b_span=64),
    Wgmma(64, "e4m3", "e5m2", "f16"),
    Wgmma(64, "s8", "s8", "s32", steps=4),
    Wgmma(96, "u8", "s8", "s32", a_span=32, b_span=32),
    Wgmma(32, "s8", "u8", "s32", a_registers=True),
]
_LAYOUT_CODE = {0: 0, 128: 1, 64: 2, 32: 3}


def _step_bytes(rows_layout: tuple[int, int, int], step_k: int, size: int, span: int, mn: bool) -> int:
    """How far a descriptor's start moves for the next step along k."""
    leading, stride, _ = rows_layout
    if not mn:
        return step_k * size if span else step_k * size // 16 * leading
    return step_k // 8 * (stride if span else leading)


def _wgmma_kernel(name: str, case: Wgmma, a_layout: tuple[int, int, int], b_layout: tuple[int, int, int]) -> str:
    size = fr.ELEMENT_BYTES[case.a]
    registers = case.n // 2 if case.d != "f16" else case.n // 4
    a_bytes = 0 if case.a_registers else -(-a_layout[2] // 1024) * 1024
    b_bytes = -(-b_layout[2] // 1024) * 1024
    pointers = ("image", "a_in", "c_in", "d_out")
    body = [
        f".visible .entry {name}({', '.join(f'.param .u64 p_{p}' for p in pointers)})",
        "{",
        ptx_text.parameters(pointers),
        ".reg .b32 data, thread, start;",
        ".reg .b64 at, base_a, base_b, desc_a, desc_b;",
        ".reg .pred yes;",
        f".reg .b32 d<{registers}>;",
        "mov.u32 data, dynamic;",
        "mov.u32 thread, %tid.x;",
        ptx_text.copy_in("image", "data", a_bytes + b_bytes, 128),
        "fence.proxy.async.shared::cta;",
        "bar.sync 0;",
        f"mad.wide.u32 at, thread, {4 * registers}, c_in;",
        *[f"ld.global.b32 d{i}, [at+{4 * i}];" for i in range(registers)],
    ]
    if case.a_registers:
        count = 4 * case.steps
        body.append(f".reg .b32 a<{count}>;")
        body.append(f"mad.wide.u32 at, thread, {4 * count}, a_in;")
        body += [f"ld.global.b32 a{i}, [at+{4 * i}];" for i in range(count)]
    for letter, layout, span, offset in (("a", a_layout, case.a_span, 0), ("b", b_layout, case.b_span, a_bytes)):
        high = (layout[0] >> 4) << 16 | (layout[1] >> 4) << 32 | _LAYOUT_CODE[span] << 62
        body += [
            f"add.u32 start, data, {offset};",
            "shr.u32 start, start, 4;",
            "and.b32 start, start, 0x3fff;",
            f"cvt.u64.u32 base_{letter}, start;",
            f"or.b64 base_{letter}, base_{letter}, {high:#x};",
        ]
    body += [
        f"setp.eq.u32 yes, {int(case.accumulate)}, 1;",
        "wgmma.fence.sync.aligned;",
    ]
    for step in range(case.steps):
        operands = [ptx_text.braces("d", registers)]
        if case.a_registers:
            operands.append(ptx_text.braces("a", 4, 4 * step))
        else:
            offset = _step_bytes(a_layout, case.step_k, size, case.a_span, case.a_mn) * step
            body.append(f"add.u64 desc_a, base_a, {offset >> 4};")
            operands.append("desc_a")
        offset = _step_bytes(b_layout, case.step_k, size, case.b_span, case.b_mn) * step
        body.append(f"add.u64 desc_b, base_b, {offset >> 4};")
        operands.append("desc_b")
        operands.append("yes")
        if case.d != "s32":
            operands += ["-1" if case.negate_a else "1", "-1" if case.negate_b else "1"]
            if size == 2:
                operands += [str(int(case.b_mn))] if case.a_registers else [str(int(case.a_mn)), str(int(case.b_mn))]
        body.append(f"{case.opcode} {', '.join(operands)};")
        body.append("setp.eq.u32 yes, 0, 0;")
    body += [
        "wgmma.commit_group.sync.aligned;",
        "wgmma.wait_group.sync.aligned 0;",
        f"mad.wide.u32 at, thread, {4 * registers}, d_out;",
        *[f"st.global.b32 [at+{4 * i}], d{i};" for i in range(registers)],
        "ret;",
        "}",
    ]
    return "\n".join(body)


def _warpgroup_fragment(columns: int) -> tuple[Array, Array]:
    """(row, column), each [128 threads, elements], of a 64 x columns accumulator."""
    row, column = fr.c_fragment(columns)
    return np.concatenate([row + 16 * w for w in range(4)]), np.concatenate([column] * 4)


def build_wgmma() -> Case:
    """Every row of ``WGMMAS``: operands laid out by Python, descriptors built by the kernel."""
    rng = np.random.default_rng(61)
    entries, launches, checks, plans, images = [], [], [], [], []
    for i, case in enumerate(WGMMAS):
        size = fr.ELEMENT_BYTES[case.a]
        a_bits, a = fr.matrix(rng, (64, case.k), case.a)
        b_bits, b = fr.matrix(rng, (case.n, case.k), case.b)
        c_bits, c = fr.accumulator(rng, (64, case.n), case.d)
        a_layout = _operand_layout(64, case.k, size, case.a_span, case.a_mn, case.padding)
        b_layout = _operand_layout(case.n, case.k, size, case.b_span, case.b_mn, case.padding)
        parts = []
        for bits, rows, layout, span, mn, used in (
            (a_bits, 64, a_layout, case.a_span, case.a_mn, not case.a_registers),
            (b_bits, case.n, b_layout, case.b_span, case.b_mn, True),
        ):
            if used:
                image = np.zeros(-(-layout[2] // 1024) * 1024, np.uint8)
                where = fr.shared_offsets(rows, case.k, size, span, mn, layout[0], layout[1])
                image[(where[..., None] + np.arange(size)).reshape(-1)] = (
                    np.ascontiguousarray(bits).view(np.uint8).reshape(-1)
                )
                parts.append(image)
        image = np.concatenate(parts)
        fragment = np.zeros((128, 4 * case.steps), np.uint32)
        if case.a_registers:
            row, column = fr.a_fragment(size, case.step_k)
            for step in range(case.steps):
                for warp in range(4):
                    words = fr.words(a_bits[row + 16 * warp, column + case.step_k * step])
                    fragment[32 * warp : 32 * warp + 32, 4 * step : 4 * step + 4] = words
        row, column = _warpgroup_fragment(case.n)
        accumulator = fr.words(c_bits[row, column])
        signed_a, signed_b = (-a if case.negate_a else a), (-b if case.negate_b else b)
        base = c if case.accumulate else np.zeros_like(c)
        exact = signed_a @ signed_b.T + base
        bound = fr.sum_bound(a, b.T, base, case.a, case.d)
        plans.append((case, exact[row, column].reshape(-1), bound[row, column].reshape(-1)))
        images += [image, fragment.reshape(-1).view(np.uint8), accumulator.reshape(-1).view(np.uint8)]
        entries.append(_wgmma_kernel(f"wgmma{i}", case, a_layout, b_layout))
    joined, offsets = join(images)
    out, out_offsets = join([np.zeros(images[3 * i + 2].size, np.uint8) for i in range(len(WGMMAS))])
    for i, (case, exact, bound) in enumerate(plans):
        args = (*(Ptr("in", offsets[3 * i + j], const=True) for j in range(3)), Ptr("out", out_offsets[i]))
        shared_bytes = images[3 * i].size
        launches.append(Launch(f"wgmma{i}", (1, 1, 1), (128, 1, 1), args, shared_bytes=shared_bytes))
        if case.d == "s32":
            expected = exact.astype(np.int64).astype(np.int32).view(np.uint32)
            checks.append(Check(case.name, "out", "s32", exact.size, out_offsets[i], "bits", expected))
        else:
            same = case.d == "f32" and case.a in fr.SAME_BITS
            checks.append(
                Check(case.name, "out", case.d, exact.size, out_offsets[i], "bound", exact, bound, same_bits=same)
            )
    return Case(lambda: ptx_text.module(*entries), {"in": joined, "out": out}, launches, checks)


PROGRAMS = [Program("wgmma", "wgmma", build_wgmma)]
