"""FP32, FP64, FP16 and BF16 arithmetic with every rounding mode, with NumPy references."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np

from cake_shared.emulator.conformance import rounding as rd
from cake_shared.emulator.conformance.families.references import (
    FORMATS,
    MODES,
    Array,
    add_exact,
    div_exact,
    elementwise,
    fuse,
    in_pairs,
    lesser,
    multiply,
    relu,
    saturate,
    sqrt_exact,
)
from cake_shared.emulator.conformance.model import widen
from cake_shared.emulator.conformance.snippets import Snippet


def single() -> list[Snippet]:
    """FP32: add, sub, mul, fma, div, rcp, sqrt in every mode; min, max, abs, neg, copysign; testp."""
    rows: list[Snippet] = []

    def add(op: str, arity: int, function: Callable[..., Array], ftz: bool) -> None:
        operands = ", ".join(("{a}", "{b}", "{c}")[:arity])
        reference = elementwise("f32", function, ftz)
        rows.append(Snippet(op, f"{op} {{d}}, {operands};", ("f32",) * arity, ("f32",), reference, "nan"))

    f = rd.F32
    for mode in MODES:
        for ftz in ("", ".ftz"):
            for sat in ("", ".sat"):
                end = f".{mode}{ftz}{sat}.f32"
                clamp = saturate if sat else (lambda v: v)
                add("add" + end, 2, lambda x, y, m=mode, c=clamp: c(add_exact(x, y, f, m)), bool(ftz))
                add("sub" + end, 2, lambda x, y, m=mode, c=clamp: c(add_exact(x, -y, f, m)), bool(ftz))
                add("mul" + end, 2, lambda x, y, m=mode, c=clamp, t=ftz: c(multiply(x, y, f, m, t)), bool(ftz))
                add("fma" + end, 3, lambda x, y, z, m=mode, c=clamp, t=ftz: c(fuse(x, y, z, f, m, t)), bool(ftz))
            end = f".{mode}{ftz}.f32"
            add("div" + end, 2, lambda x, y, m=mode: div_exact(x, y, f, m), bool(ftz))
            add("rcp" + end, 1, lambda x, m=mode: div_exact(np.ones_like(x), x, f, m), bool(ftz))
            add("sqrt" + end, 1, lambda x, m=mode: sqrt_exact(x, f, m), bool(ftz))
    for ftz in ("", ".ftz"):
        for name, greater in (("min", False), ("max", True)):
            for nan in ("", ".NaN"):
                plain = lambda x, y, g=greater, p=bool(nan): lesser(x, y, g, p)  # noqa: E731
                add(f"{name}{ftz}{nan}.f32", 2, plain, bool(ftz))

                def signed(x: Array, y: Array, g: bool = greater, p: bool = bool(nan)) -> Array:
                    magnitude = lesser(np.abs(x), np.abs(y), g, p)
                    return np.where(np.signbit(x) ^ np.signbit(y), -magnitude, magnitude)

                # The sign of a NaN operand takes part in the xor, which NumPy cannot see after widening: leave NaN out.
                rows.append(
                    Snippet(
                        f"{name}{ftz}{nan}.xorsign.abs.f32",
                        f"{name}{ftz}{nan}.xorsign.abs.f32 {{d}}, {{a}}, {{b}};",
                        ("f32", "f32"),
                        ("f32",),
                        elementwise("f32", signed, bool(ftz)),
                        "nan",
                        domain=lambda a, b: tuple(
                            np.where(np.isnan(v.view(np.float32)), 0x40000000, v) for v in (a, b)
                        ),
                    )
                )
        add(f"abs{ftz}.f32", 1, np.abs, bool(ftz))
        add(f"neg{ftz}.f32", 1, np.negative, bool(ftz))
    rows += _edge_of_flushing()
    copysign = lambda a, b: (a & 0x80000000) | (b & 0x7FFFFFFF)  # noqa: E731
    rows.append(Snippet("copysign.f32", "copysign.f32 {d}, {a}, {b};", ("f32", "f32"), ("f32",), copysign, "nan"))
    return rows + _testp("f32")


def _edge_of_flushing() -> list[Snippet]:
    """Products just below the smallest normal number that round up to it: .ftz flushes them."""

    def near(a: Array, b: Array) -> tuple[Array, Array]:
        return (a & 0x80000003) + np.uint32(0x00800000), (b & 7) ^ np.uint32(0x3F7FFFFF)

    body = "{{ .reg .b32 z; mov.b32 z, 0x80000000; fma.rn.ftz.f32 {d}, {a}, {b}, z; }}"
    two, one = ("f32", "f32"), ("f32",)

    def product(mode: str) -> Callable[..., Array]:
        return lambda a, b: rd.f32_bits(multiply(widen(a, "f32"), widen(b, "f32"), rd.F32, mode, True))

    def fused(a: Array, b: Array) -> Array:
        return rd.f32_bits(fuse(widen(a, "f32"), widen(b, "f32"), np.full(a.shape, -0.0), rd.F32, "rn", True))

    rows = [
        Snippet(
            f"mul.{m}.ftz.f32 at the edge", f"mul.{m}.ftz.f32 {{d}}, {{a}}, {{b}};", two, one, product(m), domain=near
        )
        for m in ("rn", "rp")
    ]
    return [*rows, Snippet("fma.rn.ftz.f32 at the edge", body, two, one, fused, domain=near)]


def _testp(kind: str) -> list[Snippet]:
    smallest = {"f32": float(np.finfo(np.float32).tiny), "f64": float(np.finfo(np.float64).tiny)}[kind]
    classes = {
        "finite": np.isfinite,
        "infinite": np.isinf,
        "number": lambda x: ~np.isnan(x),
        "notanumber": np.isnan,
        "normal": lambda x: np.isfinite(x) & ((np.abs(x) >= smallest) | (x == 0)),
        "subnormal": lambda x: (np.abs(x) < smallest) & (x != 0),
    }
    return [
        Snippet(
            f"testp.{name}.{kind}",
            f"{{{{ .reg .pred p; testp.{name}.{kind} p, {{a}}; selp.u32 {{d}}, 1, 0, p; }}}}",
            (kind,),
            ("u32",),
            lambda a, f=function: f(widen(a, kind)).astype(np.uint32),
        )
        for name, function in classes.items()
    ]


def _round_fraction(value: Fraction, mode: str) -> float:
    """An exact rational number rounded to FP64."""
    if value == 0:
        return 0.0
    try:
        nearest = value.numerator / value.denominator  # Python rounds a quotient of integers correctly
    except OverflowError:
        nearest = math.inf if value > 0 else -math.inf
    if mode == "rn":
        return nearest
    if math.isinf(nearest):
        below = nearest > 0
    else:
        below = Fraction(nearest) > value
        if Fraction(nearest) == value:
            return nearest
    down = math.nextafter(nearest, -math.inf) if below else nearest
    up = nearest if below else math.nextafter(nearest, math.inf)
    if mode == "rz":
        return down if value > 0 else up
    return down if mode == "rm" else up


def _double_reference(function: Callable[..., Fraction], ieee: Callable[..., Array], mode: str, is_sum: bool):
    """Round ``function`` exactly where all operands are finite, elsewhere take IEEE's answer from NumPy."""

    def reference(*arrays: Array) -> Array:
        values = [widen(a, "f64") for a in arrays]
        special = np.array(ieee(*values), np.float64)
        result = special.copy()
        for i, row in enumerate(zip(*[v.tolist() for v in values])):
            if all(math.isfinite(v) for v in row):
                try:
                    exact = function(*[Fraction(v) for v in row])
                except ZeroDivisionError:
                    continue
                if exact != 0:
                    rounded = _round_fraction(exact, mode)
                    result[i] = rounded if rounded else (-0.0 if exact < 0 else 0.0)
                elif is_sum:
                    first = row[0] * row[1] if len(row) == 3 else row[0]
                    if len(row) == 3 and row[0] != 0 and row[1] != 0:
                        first = math.copysign(1.0, row[0]) * math.copysign(1.0, row[1])
                    same = math.copysign(1.0, first) == math.copysign(1.0, row[-1])
                    result[i] = math.copysign(0.0, first) if same else (-0.0 if mode == "rm" else 0.0)
        return result.view(np.uint64)

    return reference


def double() -> list[Snippet]:
    """FP64: add, sub, mul, fma, div, rcp, sqrt in every mode; min, max, abs, neg, copysign; testp."""
    rows: list[Snippet] = []

    def add(op: str, arity: int, reference: Callable[..., Array]) -> None:
        operands = ", ".join(("{a}", "{b}", "{c}")[:arity])
        rows.append(Snippet(op, f"{op} {{d}}, {operands};", ("f64",) * arity, ("f64",), reference, "nan"))

    def subtract(reference: Callable[..., Array]) -> Callable[..., Array]:
        return lambda a, b: reference(a, b ^ np.uint64(1 << 63))

    for mode in MODES:
        total = _double_reference(lambda x, y: x + y, lambda x, y: x + y, mode, True)
        add(f"add.{mode}.f64", 2, total)
        add(f"sub.{mode}.f64", 2, subtract(total))
        add(f"mul.{mode}.f64", 2, _double_reference(lambda x, y: x * y, lambda x, y: x * y, mode, False))
        fused = _double_reference(lambda x, y, z: x * y + z, lambda x, y, z: x * y + z, mode, True)
        add(f"fma.{mode}.f64", 3, fused)
        add(f"div.{mode}.f64", 2, _double_reference(lambda x, y: x / y, lambda x, y: x / y, mode, False))
        add(f"rcp.{mode}.f64", 1, _double_reference(lambda x: 1 / x, lambda x: 1 / x, mode, False))

        def root(a: Array, mode: str = mode) -> Array:
            x = widen(a, "f64")
            result = np.sqrt(x)
            if mode != "rn":
                for i, (value, nearest) in enumerate(zip(x.tolist(), result.tolist())):
                    if math.isfinite(nearest) and nearest > 0:
                        excess = Fraction(nearest) ** 2 - Fraction(value)
                        if excess > 0 and mode in ("rz", "rm"):
                            result[i] = math.nextafter(nearest, -math.inf)
                        elif excess < 0 and mode == "rp":
                            result[i] = math.nextafter(nearest, math.inf)
            return result.view(np.uint64)

        add(f"sqrt.{mode}.f64", 1, root)
    for name, greater in (("min", False), ("max", True)):

        def pick(a: Array, b: Array, g: bool = greater) -> Array:
            return lesser(widen(a, "f64"), widen(b, "f64"), g, False).view(np.uint64)

        add(f"{name}.f64", 2, pick)
    add("abs.f64", 1, lambda a: a & np.uint64((1 << 63) - 1))
    add("neg.f64", 1, lambda a: a ^ np.uint64(1 << 63))
    sign = np.uint64(1 << 63)
    add("copysign.f64", 2, lambda a, b: (a & sign) | (b & ~sign))
    return rows + _testp("f64")


def half() -> list[Snippet]:
    """FP16 and BF16, scalar and packed pairs: add, sub, mul, fma with .ftz .sat .relu; min, max, abs, neg."""
    rows: list[Snippet] = []

    def add(op: str, kind: str, arity: int, function: Callable[..., Array], ftz: bool, domain=None) -> None:
        operands = ", ".join(("{a}", "{b}", "{c}")[:arity])
        for packed in (False, True):
            name = f"{op}.{kind}{'x2' if packed else ''}"
            make, type_ = (in_pairs, kind + "x2") if packed else (elementwise, kind)
            reference = make(kind, function, ftz)
            body = f"{name} {{d}}, {operands};"
            rows.append(Snippet(name, body, (type_,) * arity, (type_,), reference, "nan", domain=domain))

    same = lambda v: v  # noqa: E731
    for kind in ("f16", "bf16"):
        f = FORMATS[kind]
        ends = [(".rn", same, False)]
        if kind == "f16":
            ends = [(f".rn{z}{s}", saturate if s else same, bool(z)) for z in ("", ".ftz") for s in ("", ".sat")]
        for end, clamp, ftz in ends:
            add("add" + end, kind, 2, lambda x, y, c=clamp, f=f: c(add_exact(x, y, f, "rn")), ftz)
            add("sub" + end, kind, 2, lambda x, y, c=clamp, f=f: c(add_exact(x, -y, f, "rn")), ftz)
            add("mul" + end, kind, 2, lambda x, y, c=clamp, f=f, t=ftz: c(multiply(x, y, f, "rn", t)), ftz)
            add("fma" + end, kind, 3, lambda x, y, z, c=clamp, f=f, t=ftz: c(fuse(x, y, z, f, "rn", t)), ftz)
        for end, ftz in ((".rn.relu", False), (".rn.ftz.relu", True)):
            if kind == "bf16" and ftz:
                continue
            add("fma" + end, kind, 3, lambda x, y, z, f=f, t=ftz: relu(fuse(x, y, z, f, "rn", t)), ftz)
        for name, greater in (("min", False), ("max", True)):
            for nan in ("", ".NaN"):
                add(name + nan, kind, 2, lambda x, y, g=greater, p=bool(nan): lesser(x, y, g, p), False)
        add("abs", kind, 1, np.abs, False)
        add("neg", kind, 1, np.negative, False)
    for name, greater in (("min", False), ("max", True)):
        add(f"{name}.ftz", "f16", 2, lambda x, y, g=greater: lesser(x, y, g, False), True)
    return rows
