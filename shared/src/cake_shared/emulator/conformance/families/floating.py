"""FP32, FP64, FP16 and BF16 arithmetic with every rounding mode, comparisons and selects, with NumPy references."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np

from cake_shared.emulator.conformance import rounding as rd
from cake_shared.emulator.conformance.model import widen
from cake_shared.emulator.conformance.snippets import Snippet

Array = np.ndarray
MODES = ("rn", "rz", "rm", "rp")
FORMATS = {"f32": rd.F32, "f16": rd.F16, "bf16": rd.BF16}
TO_BITS = {"f32": rd.f32_bits, "f16": rd.f16_bits, "bf16": rd.bf16_bits}


def _zero_sum_sign(result: Array, x: Array, y: Array, mode: str) -> Array:
    """An exact zero sum of terms of opposite signs is +0, or -0 when rounding down (IEEE 754)."""
    cancels = (result == 0) & (x == -y) & (np.signbit(x) != np.signbit(y))
    return np.where(cancels, -0.0 if mode == "rm" else 0.0, result)


def add_exact(x: Array, y: Array, fmt: rd.Format, mode: str) -> Array:
    """x + y rounded once."""
    high, low = rd.two_sum(x, y)
    return _zero_sum_sign(rd.round_to(high, low, fmt, mode), x, y, mode)


def fma_exact(x: Array, y: Array, z: Array, fmt: rd.Format, mode: str) -> Array:
    """x * y + z rounded once; the product of two values of at most 24 bits is exact in float64."""
    return add_exact(x * y, z, fmt, mode)


def div_exact(x: Array, y: Array, fmt: rd.Format, mode: str) -> Array:
    """x / y rounded once: the sign of the residual decides on which side of the nearest value the quotient lies."""
    quotient = x / y
    nearest = rd.round_to(quotient, 0.0, fmt, "rn")
    overflowed = np.isinf(nearest) & np.isfinite(x) & (y != 0) & np.isfinite(y)
    nearest = np.where(overflowed, quotient, nearest)
    residual = np.sign(x - nearest * y) * np.where(np.signbit(y), -1.0, 1.0)
    return rd.round_to(nearest, np.where(np.isfinite(nearest), residual * 1e-320, 0.0), fmt, mode)


def sqrt_exact(x: Array, fmt: rd.Format, mode: str) -> Array:
    """The square root rounded once."""
    nearest = rd.round_to(np.sqrt(x), 0.0, fmt, "rn")
    residual = np.sign(x - nearest * nearest)
    return rd.round_to(nearest, np.where(np.isfinite(nearest), residual * 1e-320, 0.0), fmt, mode)


def saturate(x: Array) -> Array:
    """Clamp to [+0, 1]; NaN becomes +0."""
    return np.where(np.isnan(x) | (x <= 0), 0.0, np.minimum(x, 1.0))


def relu(x: Array) -> Array:
    """Negative values become +0; NaN stays NaN."""
    return np.where(x <= 0, 0.0, x)


def lesser(x: Array, y: Array, greater: bool, propagate: bool) -> Array:
    """min or max as PTX has it: -0 below +0; NaN loses unless ``propagate``."""
    sign = -1.0 if greater else 1.0
    tie = np.where(np.signbit(x) ^ greater, x, y)
    result = np.where(x == y, tie, np.where(sign * x < sign * y, x, y))
    if propagate:
        return np.where(np.isnan(x) | np.isnan(y), np.nan, result)
    return np.where(np.isnan(x), y, np.where(np.isnan(y), x, result))


def _elementwise(kind: str, function: Callable[..., Array], ftz: bool) -> Callable[..., Array]:
    fmt = FORMATS[kind]

    def reference(*arrays: Array) -> Array:
        values = [widen(a, kind) for a in arrays]
        if ftz:
            values = [rd.flush_subnormals(v, fmt) for v in values]
        result = function(*values)
        if ftz:
            result = rd.flush_subnormals(result, fmt)
        return TO_BITS[kind](result)

    return reference


def _packed(kind: str, function: Callable[..., Array], ftz: bool) -> Callable[..., Array]:
    scalar = _elementwise(kind, function, ftz)

    def reference(*arrays: Array) -> Array:
        low = scalar(*[(a & 0xFFFF).astype(np.uint16) for a in arrays])
        high = scalar(*[(a >> 16).astype(np.uint16) for a in arrays])
        return low.astype(np.uint32) | high.astype(np.uint32) << 16

    return reference


def single() -> list[Snippet]:
    """FP32: add, sub, mul, fma, div, rcp, sqrt in every mode; min, max, abs, neg, copysign; testp."""
    rows: list[Snippet] = []

    def add(op: str, arity: int, function: Callable[..., Array], ftz: bool) -> None:
        operands = ", ".join(("{a}", "{b}", "{c}")[:arity])
        reference = _elementwise("f32", function, ftz)
        rows.append(Snippet(op, f"{op} {{d}}, {operands};", ("f32",) * arity, ("f32",), reference, "nan"))

    f = rd.F32
    for mode in MODES:
        for ftz in ("", ".ftz"):
            for sat in ("", ".sat"):
                end = f".{mode}{ftz}{sat}.f32"
                clamp = saturate if sat else (lambda v: v)
                add("add" + end, 2, lambda x, y, m=mode, c=clamp: c(add_exact(x, y, f, m)), bool(ftz))
                add("sub" + end, 2, lambda x, y, m=mode, c=clamp: c(add_exact(x, -y, f, m)), bool(ftz))
                add("mul" + end, 2, lambda x, y, m=mode, c=clamp: c(rd.round_to(x * y, 0.0, f, m)), bool(ftz))
                add("fma" + end, 3, lambda x, y, z, m=mode, c=clamp: c(fma_exact(x, y, z, f, m)), bool(ftz))
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
                        _elementwise("f32", signed, bool(ftz)),
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
    """Products just below the smallest normal number that round up to it: whether .ftz flushes, the GPU says."""

    def near(a: Array, b: Array) -> tuple[Array, Array]:
        return (a & 0x80000003) + np.uint32(0x00800000), (b & 7) ^ np.uint32(0x3F7FFFFF)

    body = "{{ .reg .b32 z; mov.b32 z, 0x80000000; fma.rn.ftz.f32 {d}, {a}, {b}, z; }}"
    return [
        Snippet("mul.rn.ftz.f32 at the edge", "mul.rn.ftz.f32 {d}, {a}, {b};", ("f32", "f32"), ("f32",), domain=near),
        Snippet("mul.rp.ftz.f32 at the edge", "mul.rp.ftz.f32 {d}, {a}, {b};", ("f32", "f32"), ("f32",), domain=near),
        Snippet("fma.rn.ftz.f32 at the edge", body, ("f32", "f32"), ("f32",), domain=near),
    ]


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
            make, type_ = (_packed, kind + "x2") if packed else (_elementwise, kind)
            reference = make(kind, function, ftz)
            body = f"{name} {{d}}, {operands};"
            rows.append(Snippet(name, body, (type_,) * arity, (type_,), reference, "nan", domain=domain))

    def tiny_to_zero(high: Array, low: Array | float, rounded: Array) -> Array:
        # An H200 flushes FP16 results that are subnormal before rounding, also those that would round up to normal.
        least = 2.0**rd.F16.min_exponent
        tiny = (np.abs(high) < least) | ((np.abs(high) == least) & (np.sign(low) * np.sign(high) < 0))
        return np.where(tiny, np.copysign(0.0, high), rounded)

    def multiply(x: Array, y: Array, f: rd.Format, ftz: bool) -> Array:
        rounded = rd.round_to(x * y, 0.0, f, "rn")
        return tiny_to_zero(x * y, 0.0, rounded) if ftz else rounded

    def fuse(x: Array, y: Array, z: Array, f: rd.Format, ftz: bool) -> Array:
        rounded = fma_exact(x, y, z, f, "rn")
        return tiny_to_zero(*rd.two_sum(x * y, z), rounded) if ftz else rounded

    same = lambda v: v  # noqa: E731
    for kind in ("f16", "bf16"):
        f = FORMATS[kind]
        ends = [(".rn", same, False)]
        if kind == "f16":
            ends = [(f".rn{z}{s}", saturate if s else same, bool(z)) for z in ("", ".ftz") for s in ("", ".sat")]
        for end, clamp, ftz in ends:
            add("add" + end, kind, 2, lambda x, y, c=clamp, f=f: c(add_exact(x, y, f, "rn")), ftz)
            add("sub" + end, kind, 2, lambda x, y, c=clamp, f=f: c(add_exact(x, -y, f, "rn")), ftz)
            add("mul" + end, kind, 2, lambda x, y, c=clamp, f=f, z=ftz: c(multiply(x, y, f, z)), ftz)
            add("fma" + end, kind, 3, lambda x, y, z, c=clamp, f=f, t=ftz: c(fuse(x, y, z, f, t)), ftz)
        for end, ftz in ((".rn.relu", False), (".rn.ftz.relu", True)):
            if kind == "bf16" and ftz:
                continue
            add("fma" + end, kind, 3, lambda x, y, z, f=f, t=ftz: relu(fuse(x, y, z, f, t)), ftz)
        for name, greater in (("min", False), ("max", True)):
            for nan in ("", ".NaN"):
                add(name + nan, kind, 2, lambda x, y, g=greater, p=bool(nan): lesser(x, y, g, p), False)
        add("abs", kind, 1, np.abs, False)
        add("neg", kind, 1, np.negative, False)
    for name, greater in (("min", False), ("max", True)):
        add(f"{name}.ftz", "f16", 2, lambda x, y, g=greater: lesser(x, y, g, False), True)
    return rows


COMPARISONS: dict[str, Callable[[Array, Array], Array]] = {
    "eq": lambda x, y: x == y,
    "ne": lambda x, y: (x != y) & ~np.isnan(x) & ~np.isnan(y),
    "lt": lambda x, y: x < y,
    "le": lambda x, y: x <= y,
    "gt": lambda x, y: x > y,
    "ge": lambda x, y: x >= y,
    "equ": lambda x, y: (x == y) | np.isnan(x) | np.isnan(y),
    "neu": lambda x, y: x != y,
    "ltu": lambda x, y: ~(x >= y),
    "leu": lambda x, y: ~(x > y),
    "gtu": lambda x, y: ~(x <= y),
    "geu": lambda x, y: ~(x < y),
    "num": lambda x, y: ~np.isnan(x) & ~np.isnan(y),
    "nan": lambda x, y: np.isnan(x) | np.isnan(y),
}
INTEGER_COMPARISONS = {
    "eq": lambda x, y: x == y,
    "ne": lambda x, y: x != y,
    "lt": lambda x, y: x < y,
    "le": lambda x, y: x <= y,
    "gt": lambda x, y: x > y,
    "ge": lambda x, y: x >= y,
    "lo": lambda x, y: x < y,
    "ls": lambda x, y: x <= y,
    "hi": lambda x, y: x > y,
    "hs": lambda x, y: x >= y,
}


def comparisons() -> list[Snippet]:
    """setp with every operator and type, two predicate results, boolean combination; set, selp, slct."""
    rows: list[Snippet] = []
    both = "selp.u32 {d}, 1, 0, p; selp.u32 {d1}, 1, 0, q;"

    def pair(result: Array) -> tuple[Array, Array]:
        return result.astype(np.uint32), (~result).astype(np.uint32)

    for kind in ("f32", "f64", "f16", "bf16"):
        for op, function in COMPARISONS.items():
            for ftz in ("", ".ftz") if kind in ("f32", "f16") else ("",):
                fmt = FORMATS.get(kind)

                def compare(a: Array, b: Array, f=function, kind=kind, ftz=ftz, fmt=fmt) -> tuple[Array, Array]:
                    x, y = widen(a, kind), widen(b, kind)
                    if ftz:
                        x, y = rd.flush_subnormals(x, fmt), rd.flush_subnormals(y, fmt)
                    return pair(f(x, y))

                name = f"setp.{op}{ftz}.{kind}"
                if kind in ("f32", "f64"):
                    body = f"{{{{ .reg .pred p, q; {name} p|q, {{a}}, {{b}}; {both} }}}}"
                    rows.append(Snippet(name, body, (kind, kind), ("u32", "u32"), compare))
                    continue
                body = f"{{{{ .reg .pred p; {name} p, {{a}}, {{b}}; selp.u32 {{d}}, 1, 0, p; }}}}"
                rows.append(Snippet(name, body, (kind, kind), ("u32",), lambda a, b, c=compare: c(a, b)[0]))

                def compare_halves(a: Array, b: Array, c=compare) -> tuple[Array, ...]:
                    return tuple(c((a >> s).astype(np.uint16), (b >> s).astype(np.uint16))[0] for s in (0, 16))

                body = f"{{{{ .reg .pred p, q; {name}x2 p|q, {{a}}, {{b}}; {both} }}}}"
                pair_kind = kind + "x2"
                rows.append(Snippet(f"{name}x2", body, (pair_kind, pair_kind), ("u32", "u32"), compare_halves))
    for kind in ("s16", "u16", "b16", "s32", "u32", "b32", "s64", "u64", "b64"):
        for op, function in INTEGER_COMPARISONS.items():
            if (kind[0] == "b" and op not in ("eq", "ne")) or (op in ("lo", "ls", "hi", "hs") and kind[0] != "u"):
                continue

            def compare_ints(a: Array, b: Array, f=function, kind=kind) -> tuple[Array, Array]:
                signed = f"int{kind[1:]}" if kind[0] == "s" else f"uint{kind[1:]}"
                return pair(f(a.view(signed), b.view(signed)))

            name = f"setp.{op}.{kind}"
            body = f"{{{{ .reg .pred p, q; {name} p|q, {{a}}, {{b}}; {both} }}}}"
            rows.append(Snippet(name, body, (kind, kind), ("u32", "u32"), compare_ints))
    for combine, function in (("and", np.logical_and), ("or", np.logical_or), ("xor", np.logical_xor)):

        def combined(a: Array, b: Array, c: Array, f=function) -> tuple[Array, Array]:
            third = (c & 1) != 0
            less = a.view(np.int32) < b.view(np.int32)
            return f(less, third).astype(np.uint32), f(~less, third).astype(np.uint32)

        body = (
            f"{{{{ .reg .pred p, q, r; .reg .b32 t; and.b32 t, {{c}}, 1; setp.ne.u32 r, t, 0; "
            f"setp.lt.{combine}.s32 p|q, {{a}}, {{b}}, r; {both} }}}}"
        )
        rows.append(Snippet(f"setp.lt.{combine}.s32", body, ("s32", "s32", "u32"), ("u32", "u32"), combined))
    for op in ("lt", "geu", "neu"):
        less = lambda a, b, f=COMPARISONS[op]: f(widen(a, "f32"), widen(b, "f32"))  # noqa: E731
        rows.append(
            Snippet(
                f"set.{op}.u32.f32",
                f"set.{op}.u32.f32 {{d}}, {{a}}, {{b}};",
                ("f32", "f32"),
                ("u32",),
                lambda a, b, f=less: np.where(f(a, b), np.uint32(0xFFFFFFFF), np.uint32(0)),
            )
        )
        rows.append(
            Snippet(
                f"set.{op}.f32.f32",
                f"set.{op}.f32.f32 {{d}}, {{a}}, {{b}};",
                ("f32", "f32"),
                ("f32",),
                lambda a, b, f=less: np.where(f(a, b), np.uint32(0x3F800000), np.uint32(0)),
            )
        )

        def set_pair(a: Array, b: Array, f=COMPARISONS[op]) -> Array:
            result = np.zeros(a.shape, np.uint32)
            for s in (0, 16):
                x, y = (widen((v >> s).astype(np.uint16), "f16") for v in (a, b))
                result |= np.where(f(x, y), np.uint32(0x3C00), np.uint32(0)) << np.uint32(s)
            return result

        name = f"set.{op}.f16x2.f16x2"
        rows.append(Snippet(name, f"{name} {{d}}, {{a}}, {{b}};", ("f16x2", "f16x2"), ("f16x2",), set_pair))
    for kind in ("b16", "b32", "b64", "f32", "f64"):
        rows.append(
            Snippet(
                f"selp.{kind}",
                f"{{{{ .reg .pred p; setp.lt.s32 p, {{c}}, 5; selp.{kind} {{d}}, {{a}}, {{b}}, p; }}}}",
                (kind, kind, "s32"),
                (kind,),
                lambda a, b, c: np.where(c.view(np.int32) < 5, a, b),
            )
        )
        if kind != "b16":
            rows.append(
                Snippet(
                    f"slct.{kind}.s32",
                    f"slct.{kind}.s32 {{d}}, {{a}}, {{b}}, {{c}};",
                    (kind, kind, "s32"),
                    (kind,),
                    lambda a, b, c: np.where(c.view(np.int32) >= 0, a, b),
                )
            )
    rows.append(
        Snippet(
            "slct.b32.f32",
            "slct.b32.f32 {d}, {a}, {b}, {c};",
            ("b32", "b32", "f32"),
            ("b32",),
            lambda a, b, c: np.where(widen(c, "f32") >= 0, a, b),
        )
    )
    return rows
