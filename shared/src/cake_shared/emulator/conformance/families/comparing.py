"""Comparisons and selects of every type, with NumPy references."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from cake_shared.emulator.conformance import rounding as rd
from cake_shared.emulator.conformance.families.references import FORMATS, Array
from cake_shared.emulator.conformance.model import widen
from cake_shared.emulator.conformance.snippets import Snippet

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


def flushing_selects() -> list[Snippet]:
    """slct.ftz: a subnormal selector counts as zero of its sign, which is not below zero."""
    return [
        Snippet(
            f"slct.ftz.{kind}.f32",
            f"slct.ftz.{kind}.f32 {{d}}, {{a}}, {{b}}, {{c}};",
            (kind, kind, "f32"),
            (kind,),
            lambda a, b, c: np.where(rd.flush_subnormals(widen(c, "f32"), rd.F32) >= 0, a, b),
        )
        for kind in ("b32", "b64")
    ]
