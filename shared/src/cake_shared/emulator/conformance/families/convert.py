"""Conversions between every pair of types with every rounding mode, and the approximate functions."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from cake_shared.emulator.conformance import rounding as rd
from cake_shared.emulator.conformance.families.references import FORMATS, TO_BITS, relu, saturate
from cake_shared.emulator.conformance.model import STORAGE, widen
from cake_shared.emulator.conformance.snippets import Snippet

Array = np.ndarray
INTEGERS = ("u8", "s8", "u16", "s16", "u32", "s32", "u64", "s64")


def _limits(kind: str) -> tuple[int, int]:
    bits = int(kind[1:])
    return (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if kind[0] == "s" else (0, (1 << bits) - 1)


def _values(kind: str, raw: Array) -> list[int]:
    return raw.view(STORAGE[kind]).tolist()


def _stored(kind: str, values: list[int]) -> Array:
    bits = int(kind[1:])
    return np.array([v & ((1 << bits) - 1) for v in values], dtype=f"uint{bits}").view(STORAGE[kind])


def integers() -> list[Snippet]:
    """cvt between integer types, wrapping and saturating; cvt.pack."""
    rows = []
    for source in INTEGERS:
        for target in INTEGERS:
            if source == target:
                continue
            for sat in ("", ".sat"):
                low, high = _limits(target)
                source_low, source_high = _limits(source)
                if sat and low <= source_low and source_high <= high:
                    continue  # the assembler refuses .sat where nothing can saturate

                def convert(a: Array, s: str = source, t: str = target, sat: str = sat) -> Array:
                    low, high = _limits(t)
                    values = _values(s, a)
                    return _stored(t, [max(low, min(high, v)) for v in values] if sat else values)

                name = f"cvt{sat}.{target}.{source}"
                rows.append(Snippet(name, f"{name} {{d}}, {{a}};", (source,), (target,), convert))
    for target in ("u16", "s16"):

        def pack16(a: Array, b: Array, t: str = target) -> Array:
            low, high = _limits(t)
            clamp = lambda raw: np.clip(raw.view(np.int32).astype(np.int64), low, high).astype(np.uint32) & 0xFFFF  # noqa: E731
            return clamp(a) << 16 | clamp(b)

        name = f"cvt.pack.sat.{target}.s32"
        rows.append(Snippet(name, f"{name} {{d}}, {{a}}, {{b}};", ("s32", "s32"), ("b32",), pack16))
    for target in ("u8", "s8"):

        def pack8(a: Array, b: Array, c: Array, t: str = target) -> Array:
            low, high = _limits(t)
            clamp = lambda raw: np.clip(raw.view(np.int32).astype(np.int64), low, high).astype(np.uint32) & 0xFF  # noqa: E731
            return (clamp(a) << 8 | clamp(b)) | (c.view(np.uint32) << 16)

        name = f"cvt.pack.sat.{target}.s32.b32"
        rows.append(Snippet(name, f"{name} {{d}}, {{a}}, {{b}}, {{c}};", ("s32", "s32", "b32"), ("b32",), pack8))
    return rows


def _to_float(kind: str, values: list[int], mode: str) -> Array:
    if kind == "f64":
        from fractions import Fraction

        from cake_shared.emulator.conformance.families.floating import _round_fraction

        return np.array([_round_fraction(Fraction(v), mode) for v in values], np.float64).view(np.uint64)
    high = np.array([float(v) for v in values])
    low = np.array([float(v - int(h)) for v, h in zip(values, high)])
    return TO_BITS[kind](rd.round_to(high, low, FORMATS[kind], mode))


def _to_integer(source: Array, kind: str, mode: str) -> Array:
    rounders = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
    low, high = _limits(kind)
    rounded = rounders[mode](source)
    values = [
        high if v == np.inf else low if v == -np.inf else max(low, min(high, int(v))) if v == v else 0
        for v in rounded.tolist()
    ]
    return _stored(kind, values)


def _without_nan(kind: str) -> Callable[[Array], tuple[Array]]:
    one = {"f32": 0x3F800000, "f64": 0x3FF0000000000000, "f16": 0x3C00, "bf16": 0x3F80}[kind]
    return lambda a: (np.where(np.isnan(widen(a, kind)), np.array(one, a.dtype), a),)


def _only_nan(kind: str) -> Callable[[Array], tuple[Array]]:
    nan = {"f32": 0x7FC00000, "f64": 0x7FF8000000000000, "f16": 0x7E00, "bf16": 0x7FC0}[kind]
    sign = {"f32": 31, "f64": 63, "f16": 15, "bf16": 15}[kind]
    return lambda a: (np.where(a % 2 == 0, np.array(nan, a.dtype), np.array(nan | 1 << sign, a.dtype)),)


def floats_and_integers() -> list[Snippet]:
    """cvt between integers and FP32, FP64, FP16, BF16 in every rounding mode.

    What becomes of a NaN differs by source and target type and is not written down for all: those rows have no
    reference, the GPU alone says.
    """
    rows = []
    for kind in ("f32", "f64", "f16", "bf16"):
        for integer in INTEGERS:
            for mode in ("rn", "rz", "rm", "rp"):
                if kind == "bf16" and integer in ("u8", "s8"):
                    continue
                name = f"cvt.{mode}.{kind}.{integer}"
                convert = lambda a, k=kind, i=integer, m=mode: _to_float(k, _values(i, a), m)  # noqa: E731
                rows.append(Snippet(name, f"{name} {{d}}, {{a}};", (integer,), (kind,), convert, "nan"))
            for mode in ("rni", "rzi", "rmi", "rpi"):
                if kind == "bf16" and integer in ("u8", "s8"):
                    continue
                name = f"cvt.{mode}.{integer}.{kind}"
                back = lambda a, k=kind, i=integer, m=mode: _to_integer(widen(a, k), i, m)  # noqa: E731
                body = f"{name} {{d}}, {{a}};"
                rows.append(Snippet(name, body, (kind,), (integer,), back, domain=_without_nan(kind)))
            if kind == "bf16" and integer in ("u8", "s8"):
                continue
            name = f"cvt.rzi.{integer}.{kind}"
            body = f"{name} {{d}}, {{a}};"
            rows.append(Snippet(f"{name} of NaN", body, (kind,), (integer,), domain=_only_nan(kind)))
    for mode in ("rni", "rzi", "rmi", "rpi"):
        name = f"cvt.{mode}.ftz.s32.f32"

        def flushed(a: Array, m: str = mode) -> Array:
            return _to_integer(rd.flush_subnormals(widen(a, "f32")), "s32", m)

        body = f"{name} {{d}}, {{a}};"
        rows.append(Snippet(name, body, ("f32",), ("s32",), flushed, domain=_without_nan("f32")))
    return rows


def _round_integral(value: Array, mode: str) -> Array:
    rounded = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}[mode](value)
    return np.copysign(rounded, value)


def _tf32_bits(value: Array) -> Array:
    return rd.f32_bits(value)


def _fp8_bits(value: Array, fmt: rd.Format) -> Array:
    """Saturating conversion of float64 values to 8 bits: overflow and infinity become the largest finite value."""
    rounded = rd.round_to(np.clip(value, -fmt.max_finite, fmt.max_finite), 0.0, fmt, "rn")
    mantissa_bits = fmt.precision - 1
    magnitude = np.abs(np.where(np.isnan(rounded), 0.0, rounded))
    _, exponent = np.frexp(magnitude)
    exponent = np.where(magnitude == 0, fmt.min_exponent, np.maximum(exponent - 1, fmt.min_exponent))
    units = np.ldexp(magnitude, mantissa_bits - exponent).astype(np.int64)
    code = units + ((exponent - fmt.min_exponent) << mantissa_bits)
    sign = np.where(np.signbit(value), 0x80, 0)
    return np.where(np.isnan(value), 0x7F, code | sign).astype(np.uint32)


def _fp8_values(raw: Array, fmt: rd.Format) -> Array:
    raw = raw.astype(np.int64)
    mantissa_bits = fmt.precision - 1
    field, mantissa = (raw & 0x7F) >> mantissa_bits, raw & ((1 << mantissa_bits) - 1)
    value = np.where(
        field == 0,
        np.ldexp(mantissa.astype(np.float64), fmt.min_exponent - mantissa_bits),
        np.ldexp((mantissa + (1 << mantissa_bits)).astype(np.float64), field + fmt.min_exponent - 1 - mantissa_bits),
    )
    if fmt is rd.E4M3:
        value = np.where((raw & 0x7F) == 0x7F, np.nan, value)
    else:
        value = np.where((raw & 0x7C) == 0x7C, np.where(mantissa == 0, np.inf, np.nan), value)
    return np.where(raw & 0x80, -value, value)


def floats() -> list[Snippet]:
    """cvt among FP32, FP64, FP16, BF16, TF32, E4M3, E5M2: every rounding, .ftz, .sat, .relu, .satfinite, packed."""
    rows: list[Snippet] = []

    def add(name: str, sources: tuple[str, ...], out: str, reference: Callable[..., Array], rule: str = "nan") -> None:
        operands = ", ".join(("{a}", "{b}")[: len(sources)])
        rows.append(Snippet(name, f"{name} {{d}}, {operands};", sources, (out,), reference, rule))

    f32, f16 = rd.F32, rd.F16
    for mode in ("rn", "rz", "rm", "rp"):
        add(
            f"cvt.{mode}.f32.f64",
            ("f64",),
            "f32",
            lambda a, m=mode: rd.f32_bits(rd.round_to(widen(a, "f64"), 0, f32, m)),
        )
        add(
            f"cvt.{mode}.f16.f32",
            ("f32",),
            "f16",
            lambda a, m=mode: rd.f16_bits(rd.round_to(widen(a, "f32"), 0, f16, m)),
        )
        add(
            f"cvt.{mode}.f16.f64",
            ("f64",),
            "f16",
            lambda a, m=mode: rd.f16_bits(rd.round_to(widen(a, "f64"), 0, f16, m)),
        )
        add(
            f"cvt.{mode}.sat.f16.f32",
            ("f32",),
            "f16",
            lambda a, m=mode: rd.f16_bits(saturate(rd.round_to(widen(a, "f32"), 0, f16, m))),
        )
    add("cvt.f32.f16", ("f16",), "f32", lambda a: rd.f32_bits(widen(a, "f16")))
    add("cvt.f64.f16", ("f16",), "f64", lambda a: widen(a, "f16").view(np.uint64))
    add("cvt.f64.f32", ("f32",), "f64", lambda a: widen(a, "f32").view(np.uint64))
    add("cvt.ftz.f64.f32", ("f32",), "f64", lambda a: rd.flush_subnormals(widen(a, "f32")).view(np.uint64))
    add("cvt.f32.bf16", ("bf16",), "f32", lambda a: rd.f32_bits(widen(a, "bf16")))
    add("cvt.sat.f32.f32", ("f32",), "f32", lambda a: rd.f32_bits(saturate(widen(a, "f32"))))
    for mode in ("rni", "rzi", "rmi", "rpi"):
        for kind in ("f32", "f64"):
            name = f"cvt.{mode}.{kind}.{kind}"
            whole = lambda a, k=kind, m=mode: _round_integral(widen(a, k), m)  # noqa: E731
            if kind == "f32":
                add(name, (kind,), kind, lambda a, w=whole: rd.f32_bits(w(a)))
            else:
                add(name, (kind,), kind, lambda a, w=whole: w(a).view(np.uint64))
    for mode in ("rn", "rz"):
        for clamp, function in (("", lambda v: v), (".relu", relu)):
            for half, fmt, bits in (("f16", rd.F16, rd.f16_bits), ("bf16", rd.BF16, rd.bf16_bits)):
                one = lambda a, m=mode, f=function, fmt=fmt, bits=bits: bits(  # noqa: E731
                    f(rd.round_to(widen(a, "f32"), 0, fmt, m))
                )
                if half == "bf16" or clamp:
                    add(f"cvt.{mode}{clamp}.{half}.f32", ("f32",), half, one)
                pair = lambda a, b, o=one: o(b).astype(np.uint32) | o(a).astype(np.uint32) << 16  # noqa: E731
                add(f"cvt.{mode}{clamp}.{half}x2.f32", ("f32", "f32"), half + "x2", pair)
            # The NaN that a TF32 conversion makes is not specified: the rule lets any NaN pass.
            to_tf32 = lambda a, m=mode, f=function: _tf32_bits(f(rd.round_to(widen(a, "f32"), 0, rd.TF32, m)))  # noqa: E731
            add(f"cvt.{mode}{clamp}.tf32.f32", ("f32",), "f32", to_tf32)
    add("cvt.rna.tf32.f32", ("f32",), "f32", lambda a: _tf32_bits(rd.round_to(widen(a, "f32"), 0, rd.TF32, "rna")))
    for eight, fmt in (("e4m3", rd.E4M3), ("e5m2", rd.E5M2)):
        for clamp, function in (("", lambda v: v), (".relu", relu)):
            pack = lambda a, b, f=function, fmt=fmt: (  # noqa: E731
                _fp8_bits(f(widen(b, "f32")), fmt) | _fp8_bits(f(widen(a, "f32")), fmt) << 8
            )
            add(f"cvt.rn.satfinite{clamp}.{eight}x2.f32", ("f32", "f32"), "b16", pack, "bits")

            def narrow(a: Array, f=function, fmt=fmt) -> Array:
                halves = [widen((a >> s).astype(np.uint16), "f16") for s in (0, 16)]
                return _fp8_bits(f(halves[0]), fmt) | _fp8_bits(f(halves[1]), fmt) << 8

            add(f"cvt.rn.satfinite{clamp}.{eight}x2.f16x2", ("f16x2",), "b16", narrow, "bits")

            def spread(a: Array, f=function, fmt=fmt) -> Array:
                halves = [rd.f16_bits(f(_fp8_values(a >> s & 0xFF, fmt))).astype(np.uint32) for s in (0, 8)]
                return halves[0] | halves[1] << 16

            add(f"cvt.rn{clamp}.f16x2.{eight}x2", ("b16",), "f16x2", spread)
    return rows


def approximate() -> list[Snippet]:
    """Approximate functions, each within the error that the PTX ISA documents for it."""
    rows: list[Snippet] = []

    def ulp(value: Array) -> Array:
        with np.errstate(all="ignore"):
            magnitude = np.abs(np.where(np.isfinite(value), value, 1.0))
            return np.exp2(np.floor(np.log2(np.maximum(magnitude, 2.0**-126))) - 23)

    def add(
        name: str, function: Callable[..., Array], bound: Callable[..., Array], arity: int = 1, domain=None
    ) -> None:
        ftz = ".ftz" in name
        operands = ", ".join(("{a}", "{b}")[:arity])

        def reference(*arrays: Array) -> Array:
            values = [widen(a, "f32") for a in arrays]
            if ftz:
                values = [rd.flush_subnormals(v) for v in values]
            exact = function(*values)
            with np.errstate(all="ignore"):
                return np.where(np.abs(exact) >= 2.0**128, np.copysign(np.inf, exact), exact)

        # Under .ftz a subnormal result is flushed: the smallest normal bounds that error.
        floor = 2.0**-126 if ftz else 2.0**-149
        limit = lambda *args: np.maximum(bound(*args), floor)  # noqa: E731
        rows.append(
            Snippet(name, f"{name} {{d}}, {operands};", ("f32",) * arity, ("f32",), reference, "bound", limit, domain)
        )

    def moderate(a: Array) -> tuple[Array]:
        x = widen(a, "f32")
        with np.errstate(all="ignore"):
            tame = np.where(np.isfinite(x), np.fmod(x, 2 * np.pi), 0.5).astype(np.float32)
        return (tame.view(np.uint32),)

    def divisor(a: Array, b: Array) -> tuple[Array, Array]:
        x = np.abs(widen(b, "f32"))
        fine = ~np.isfinite(x) | (x == 0) | ((x >= 2.0**-126) & (x <= 2.0**126))
        return a, np.where(fine, b, np.uint32(0x40490FDB))

    def no_overflow_at_top(a: Array) -> tuple[Array]:
        # 2^x rounds to infinity or to the largest finite value within one ulp of 2^128: leave that sliver out.
        x = widen(a, "f32")
        return (np.where((x > 127.9) & (x < 128.1), np.uint32(0x42FA0000), a),)

    for ftz in ("", ".ftz"):
        add(f"ex2.approx{ftz}.f32", np.exp2, lambda a, y: 2 * ulp(y), domain=no_overflow_at_top)
        # Absolute 2^-22 on (0.5, 2), relative elsewhere; the tables of older ISAs say 2^-22.6, kept within this.
        add(f"lg2.approx{ftz}.f32", np.log2, lambda a, y: 2.0**-22 * np.maximum(1.0, np.abs(np.nan_to_num(y))))
        add(f"sin.approx{ftz}.f32", np.sin, lambda a, y: np.full(a.shape, 2.0**-20.5), domain=moderate)
        add(f"cos.approx{ftz}.f32", np.cos, lambda a, y: np.full(a.shape, 2.0**-20.5), domain=moderate)
        add(f"rcp.approx{ftz}.f32", lambda x: 1 / x, lambda a, y: ulp(y))
        add(f"rsqrt.approx{ftz}.f32", lambda x: 1 / np.sqrt(x), lambda a, y: 2.0**-22.9 * np.abs(np.nan_to_num(y)))
        add(f"sqrt.approx{ftz}.f32", np.sqrt, lambda a, y: 2.0**-22.9 * np.abs(np.nan_to_num(y)))
        quotient = lambda x, y: x / y  # noqa: E731
        add(f"div.approx{ftz}.f32", quotient, lambda a, b, y: 2 * ulp(y), 2, divisor)
        add(f"div.full{ftz}.f32", quotient, lambda a, b, y: 2 * ulp(y), 2, divisor)
    add("tanh.approx.f32", np.tanh, lambda a, y: 2.0**-11 * np.abs(np.nan_to_num(y)) + 2.0**-126)
    halves = (
        ("ex2.approx.f16", "f16", np.exp2, lambda a, y: 2.0**-9.9 * np.abs(y) + 2.0**-24),
        ("ex2.approx.ftz.bf16", "bf16", np.exp2, lambda a, y: 2.0**-7 * np.abs(y) + 2.0**-126),
        ("tanh.approx.f16", "f16", np.tanh, lambda a, y: np.full(a.shape, 2.0**-10.987)),
        ("tanh.approx.bf16", "bf16", np.tanh, lambda a, y: np.full(a.shape, 2.0**-8)),
    )
    for name, kind, function, bound in halves:

        def reference16(a: Array, f=function, kind=kind) -> Array:
            exact = f(widen(a, kind))
            limit = {"f16": 65520.0, "bf16": 2.0**128}[kind]
            return np.where(np.abs(exact) >= limit, np.copysign(np.inf, exact), exact)

        finite = lambda a, y, b=bound: np.where(np.isfinite(y), b(a, np.where(np.isfinite(y), y, 0.0)), 0.0)  # noqa: E731
        rows.append(Snippet(name, f"{name} {{d}}, {{a}};", (kind,), (kind,), reference16, "bound", finite))
    return rows
