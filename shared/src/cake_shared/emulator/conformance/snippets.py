"""A generator of PTX kernels that apply single instructions to arrays: thread ``i`` reads element ``i`` of each input.

A Snippet is a few lines of PTX over the registers ``{a} {b} {c} {e}`` (inputs) and ``{d} {d1} {d2}`` (outputs), with
the NumPy function that gives the right answer. Many snippets share one kernel, so that one launch tests a whole family.
Registers are untyped (``.b16 .b32 .b64``), which PTX accepts for any instruction type of that size.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Sequence

import numpy as np

from cake_shared.emulator.conformance.model import STORAGE, Case, Check, Launch, Ptr

BLOCK = 128
INPUT_NAMES = ("a", "b", "c", "e", "f")
OUTPUT_NAMES = ("d", "d1", "d2", "d3")


@dataclasses.dataclass(frozen=True)
class Snippet:
    """One instruction under test.

    ``reference`` takes the inputs as bit patterns (unsigned NumPy arrays in the types' storage) and returns the outputs
    as bit patterns, or float64 values where ``rule`` is ``bound``. ``bound`` takes (inputs..., expected) and returns
    the largest allowed absolute error; infinities and NaN must then agree exactly. ``domain`` may repair inputs, for
    operations that the ISA leaves undefined somewhere. ``None`` as reference: only GPU and emulator are compared.
    """

    name: str
    body: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    reference: Callable[..., object] | None = None
    rule: str = "bits"
    bound: Callable[..., np.ndarray] | None = None
    domain: Callable[..., tuple[np.ndarray, ...]] | None = None


def _specials(kind: str) -> np.ndarray:
    storage = np.dtype(STORAGE[kind])
    if kind in ("f16x2", "bf16x2"):
        half = _specials(kind[:-2]).astype(np.uint32)
        return half | (np.roll(half, 5) << 16)
    if kind in ("f32", "f64", "f16", "bf16"):
        return _float_specials(kind)
    bits = storage.itemsize * 8
    ones = (1 << bits) - 1
    values = {0, 1, 2, 3, 5, 7, 8, 15, 16, 17, 24, 31, 32, 33, 63, 64, 65, 100, 127, 128, 255, 256}
    values |= {ones, ones - 1, ones >> 1, (ones >> 1) + 1, (ones >> 1) - 1, (ones >> 1) + 2}
    values |= {
        0x5555555555555555 & ones,
        0xAAAAAAAAAAAAAAAA & ones,
        0x0123456789ABCDEF & ones,
        0xFEDCBA9876543210 & ones,
    }
    values |= {ones - 6, ones - 31, ones - 254, (1 << (bits // 2)) - 1, 1 << (bits // 2), ones << (bits // 2) & ones}
    return np.array(sorted(v & ones for v in values), dtype=np.dtype(f"uint{bits}")).view(storage)


def _float_specials(kind: str) -> np.ndarray:
    values = [0.0, 1.0, 2.0, 3.0, 0.5, 1.5, 2.5, 3.5, 0.1, 1 / 3, np.pi, 10.0, 100.0, 127.0, 128.0, 255.0, 256.0]
    values += [32767.0, 32768.0, 65504.0, 65519.0, 65520.0, 65535.0, 65536.0, 2.0**23, 2.0**24 + 2, 2.0**31, 2.0**32]
    values += [
        2.0**63,
        2.0**64,
        447.0,
        448.0,
        480.0,
        2.0**-9,
        2.0**-14,
        2.0**-24,
        2.0**-25,
        2.0**-126,
        57344.0,
        61440.0,
    ]
    if kind == "f32":
        bits = np.array(values, np.float32).view(np.uint32)
        extra = [1, 2, 0x007FFFFF, 0x00800000, 0x00800001, 0x3F800001, 0x3F7FFFFF, 0x7F7FFFFF, 0x7F800000, 0x7FC00000]
        extra += [0x7FFFFFFF, 0x7FA00001, 0x3F808000, 0x3F818000, 0x3F80FFFF, 0x3F801000, 0x3F803000, 0x4EFFFFFF]
        sign = np.uint32(0x80000000)
    elif kind == "f64":
        bits = np.array(values, np.float64).view(np.uint64)
        extra = [1, 0x000FFFFFFFFFFFFF, 0x0010000000000000, 0x3FF0000000000001, 0x3FEFFFFFFFFFFFFF, 0x7FEFFFFFFFFFFFFF]
        extra += [0x7FF0000000000000, 0x7FF8000000000000, 0x36A0000000000000, 0x3690000000000000, 0x47EFFFFFF0000000]
        extra += [0x3810000000000000, 0x380FFFFFFFFFFFFF, 0x3FF0000010000000, 0x41DFFFFFFFE00000]
        sign = np.uint64(1 << 63)
    elif kind == "f16":
        with np.errstate(over="ignore"):
            bits = np.array(values, np.float64).astype(np.float16).view(np.uint16)
        extra = [1, 2, 0x03FF, 0x0400, 0x3C01, 0x3BFF, 0x7BFF, 0x7C00, 0x7E00, 0x7FFF]
        sign = np.uint16(0x8000)
    else:
        bits = (np.array(values, np.float32).view(np.uint32) >> 16).astype(np.uint16)
        extra = [1, 2, 0x007F, 0x0080, 0x3F81, 0x3F7F, 0x7F7F, 0x7F80, 0x7FC0, 0x7FFF]
        sign = np.uint16(0x8000)
    bits = np.concatenate([bits, np.array(extra, bits.dtype)])
    return np.unique(np.concatenate([bits, bits ^ sign]))


def draw(kind: str, count: int, rng: np.random.Generator) -> np.ndarray:
    """``count`` values of ``kind`` as stored bits: special values, random bit patterns and ordinary magnitudes."""
    storage = np.dtype(STORAGE[kind])
    special = _specials(kind)
    raw = rng.integers(0, 256, count * storage.itemsize, dtype=np.uint8).view(storage)
    # No power function: the last bit of NumPy's differs between processors, and hashes of a GPU's results are kept.
    scale = np.ldexp(1 + rng.random(count), rng.integers(-6, 6, count))
    normal = rng.normal(size=count) * scale
    if kind == "f32":
        ordinary = normal.astype(np.float32).view(storage)
    elif kind == "f64":
        ordinary = normal.view(storage)
    elif kind == "f16":
        ordinary = normal.astype(np.float16).view(storage)
    elif kind == "bf16":
        ordinary = (normal.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    elif kind in ("f16x2", "bf16x2"):
        low, high = (draw(kind[:-2], count, rng).astype(np.uint32) for _ in range(2))
        ordinary = low | high << 16
    else:
        ordinary = rng.integers(-64, 64, count).astype(np.int64).astype(storage)
    pick = rng.random(count)
    return np.where(pick < 0.45, special[rng.integers(0, len(special), count)], np.where(pick < 0.7, raw, ordinary))


def draw_inputs(snippet: Snippet, count: int, seed: int = 0) -> tuple[np.ndarray, ...]:
    """The seeded inputs of a snippet; they depend on its name, ``count`` and ``seed`` alone."""
    rng = np.random.default_rng([zlib.crc32(snippet.name.encode()), count, seed])
    arrays = tuple(draw(kind, count, rng) for kind in snippet.inputs)
    return tuple(snippet.domain(*arrays)) if snippet.domain else arrays


def _register_type(kind: str) -> str:
    return {1: "b16", 2: "b16", 4: "b32", 8: "b64"}[np.dtype(STORAGE[kind]).itemsize]


def _memory_type(kind: str) -> str:
    return f"b{np.dtype(STORAGE[kind]).itemsize * 8}"


@dataclasses.dataclass(frozen=True)
class Layout:
    """Byte offsets of every snippet's inputs and outputs in the two buffers of a snippet kernel."""

    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[tuple[int, ...], ...]
    input_bytes: int
    output_bytes: int


def layout(snippets: Sequence[Snippet], count: int) -> Layout:
    """Place arrays of ``count`` elements one after the other, 16-byte aligned."""

    def place(kinds_of: Callable[[Snippet], tuple[str, ...]]) -> tuple[tuple[tuple[int, ...], ...], int]:
        offset, all_offsets = 0, []
        for snippet in snippets:
            offsets = []
            for kind in kinds_of(snippet):
                offsets.append(offset)
                offset += -(-count * np.dtype(STORAGE[kind]).itemsize // 16) * 16
            all_offsets.append(tuple(offsets))
        return tuple(all_offsets), max(offset, 16)

    inputs, input_bytes = place(lambda s: s.inputs)
    outputs, output_bytes = place(lambda s: s.outputs)
    return Layout(inputs, outputs, input_bytes, output_bytes)


def generate(snippets: Sequence[Snippet], count: int, target: str = "sm_90a") -> str:
    """The PTX of one kernel ``snippets(in, out)``: every snippet on ``count`` elements, a multiple of 32."""
    where = layout(snippets, count)
    lines = [
        ".version 8.7" if target in ("sm_90a", "sm_100a") else ".version 9.0",
        f".target {target}",
        ".address_size 64",
        ".visible .entry snippets(.param .u64 p_in, .param .u64 p_out)",
        "{",
        ".reg .b32 %thread, %block, %width;",
        ".reg .b64 %in<9>, %out<9>;",
        "mov.u32 %thread, %tid.x;",
        "mov.u32 %block, %ctaid.x;",
        "mov.u32 %width, %ntid.x;",
        "mad.lo.u32 %thread, %block, %width, %thread;",
        "ld.param.u64 %in0, [p_in];",
        "ld.param.u64 %out0, [p_out];",
        "cvta.to.global.u64 %in0, %in0;",
        "cvta.to.global.u64 %out0, %out0;",
    ]
    for size in (1, 2, 4, 8):
        lines.append(f"mad.wide.u32 %in{size}, %thread, {size}, %in0;")
        lines.append(f"mad.wide.u32 %out{size}, %thread, {size}, %out0;")
    for snippet, in_offsets, out_offsets in zip(snippets, where.inputs, where.outputs, strict=True):
        names = dict(zip(INPUT_NAMES, (f"%{n}" for n in INPUT_NAMES)))
        names |= dict(zip(OUTPUT_NAMES, (f"%{n}" for n in OUTPUT_NAMES)))
        lines.append(f"// {snippet.name}")
        lines.append("{")
        for name, kind in zip(INPUT_NAMES, snippet.inputs):
            lines.append(f".reg .{_register_type(kind)} %{name};")
        for name, kind in zip(OUTPUT_NAMES, snippet.outputs):
            lines.append(f".reg .{_register_type(kind)} %{name};")
        for name, kind, offset in zip(INPUT_NAMES, snippet.inputs, in_offsets):
            size = np.dtype(STORAGE[kind]).itemsize
            lines.append(f"ld.global.{_memory_type(kind)} %{name}, [%in{size}+{offset}];")
        lines.append(snippet.body.format(**names))
        for name, kind, offset in zip(OUTPUT_NAMES, snippet.outputs, out_offsets):
            size = np.dtype(STORAGE[kind]).itemsize
            lines.append(f"st.global.{_memory_type(kind)} [%out{size}+{offset}], %{name};")
        lines.append("}")
    lines += ["ret;", "}", ""]
    return "\n".join(lines)


def pack_inputs(snippets: Sequence[Snippet], count: int, inputs: Sequence[tuple[np.ndarray, ...]]) -> np.ndarray:
    """The input buffer (uint8) of a snippet kernel."""
    where = layout(snippets, count)
    buffer = np.zeros(where.input_bytes, np.uint8)
    for arrays, offsets in zip(inputs, where.inputs, strict=True):
        for array, offset in zip(arrays, offsets, strict=True):
            data = np.ascontiguousarray(array).view(np.uint8)
            buffer[offset : offset + data.size] = data
    return buffer


def reference_outputs(snippet: Snippet, inputs: tuple[np.ndarray, ...]) -> tuple[np.ndarray, ...] | None:
    """What NumPy says about a snippet: one array per output, or None when it has no reference."""
    if snippet.reference is None:
        return None
    with np.errstate(all="ignore"):
        result = snippet.reference(*inputs)
    return result if isinstance(result, tuple) else (result,)


def build_case(snippets: Sequence[Snippet], count: int, target: str = "sm_90a", seed: int = 0) -> Case:
    """A Case that runs all snippets on seeded inputs, with one Check per output of each snippet."""
    names = [snippet.name for snippet in snippets]
    if len(set(names)) != len(names):
        raise ValueError(f"snippets: got repeated names {sorted({n for n in names if names.count(n) > 1})}")
    inputs = [draw_inputs(snippet, count, seed) for snippet in snippets]
    where = layout(snippets, count)
    checks = []
    for snippet, arrays, offsets in zip(snippets, inputs, where.outputs, strict=True):
        expected = reference_outputs(snippet, arrays)
        for index, (kind, offset) in enumerate(zip(snippet.outputs, offsets, strict=True)):
            value = None if expected is None else expected[index]
            bound = None
            if snippet.rule == "bound":
                with np.errstate(all="ignore"):
                    bound = snippet.bound(*arrays, value)
            elif value is not None:
                value = np.ascontiguousarray(value).astype(STORAGE[kind], casting="unsafe")
            suffix = "" if index == 0 else f".{OUTPUT_NAMES[index]}"
            checks.append(Check(snippet.name + suffix, "out", kind, count, offset, snippet.rule, value, bound))
    args = (Ptr("in", const=True), Ptr("out"))
    return Case(
        ptx=lambda: generate(snippets, count, target),
        buffers={"in": pack_inputs(snippets, count, inputs), "out": np.zeros(where.output_bytes, np.uint8)},
        launches=[Launch("snippets", (-(-count // BLOCK), 1, 1), (min(count, BLOCK), 1, 1), args)],
        checks=checks,
    )
