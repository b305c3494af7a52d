"""Integer arithmetic, bit manipulation and extended-precision carries, with NumPy references."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from cake_shared.emulator.conformance.snippets import Snippet

Array = np.ndarray


def _bits(kind: str) -> int:
    return int(kind[1:])


def _signed(kind: str, values: Array) -> Array:
    """Stored bits as Python-like integers in an object-free wide type: int64, or object for 64-bit unsigned."""
    bits = _bits(kind)
    raw = values.view(f"uint{bits}")
    if kind[0] == "s":
        return raw.view(f"int{bits}").astype(object)
    return raw.astype(object)


def _wrap(kind: str, values: Array) -> Array:
    bits = _bits(kind)
    return np.array([int(v) & ((1 << bits) - 1) for v in values], dtype=f"uint{bits}")


def _exact(kind: str, function: Callable[..., int], out: str | None = None, kinds: tuple[str, ...] | None = None):
    """A reference that works elementwise on unbounded integers and wraps the result to ``out``."""

    def reference(*arrays: Array) -> Array:
        columns = [_signed(k, a) for k, a in zip(kinds or (kind,) * len(arrays), arrays, strict=True)]
        return _wrap(out or kind, np.array([function(*row) for row in zip(*columns)], dtype=object))

    return reference


def _saturate(kind: str, value: int) -> int:
    bits = _bits(kind)
    low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if kind[0] == "s" else (0, (1 << bits) - 1)
    return max(low, min(high, value))


def _trunc_div(a: int, b: int) -> int:
    quotient = abs(a) // abs(b)
    return quotient if (a < 0) == (b < 0) else -quotient


def _defined_division(kind: str):
    """Division by zero and the most negative value by -1 are left open by the ISA: replace those divisors by 3."""

    def domain(a: Array, b: Array) -> tuple[Array, Array]:
        lowest = 1 << (_bits(kind) - 1)
        undefined = b == 0
        if kind[0] == "s":
            raw_a, raw_b = a.view(f"uint{_bits(kind)}"), b.view(f"uint{_bits(kind)}")
            undefined |= (raw_a == lowest) & (raw_b == (1 << _bits(kind)) - 1)
        return a, np.where(undefined, np.array(3, b.dtype), b)

    return domain


def arithmetic() -> list[Snippet]:
    """add, sub, mul, mad, mul24, mad24, sad, div, rem, abs, neg, min, max, dp4a, dp2a on every integer type."""
    rows: list[Snippet] = []

    def add(name: str, body: str, kinds: tuple[str, ...], out: str, function: Callable[..., int], domain=None) -> None:
        rows.append(Snippet(name, body, kinds, (out,), _exact(out, function, out, kinds), domain=domain))

    for t in ("u16", "s16", "u32", "s32", "u64", "s64"):
        bits, two, three = _bits(t), (t, t), (t, t, t)
        add(f"add.{t}", f"add.{t} {{d}}, {{a}}, {{b}};", two, t, lambda a, b: a + b)
        add(f"sub.{t}", f"sub.{t} {{d}}, {{a}}, {{b}};", two, t, lambda a, b: a - b)
        add(f"mul.lo.{t}", f"mul.lo.{t} {{d}}, {{a}}, {{b}};", two, t, lambda a, b: a * b)
        add(f"mul.hi.{t}", f"mul.hi.{t} {{d}}, {{a}}, {{b}};", two, t, lambda a, b, n=bits: (a * b) >> n)
        add(f"mad.lo.{t}", f"mad.lo.{t} {{d}}, {{a}}, {{b}}, {{c}};", three, t, lambda a, b, c: a * b + c)
        hi = lambda a, b, c, n=bits: ((a * b) >> n) + c  # noqa: E731
        add(f"mad.hi.{t}", f"mad.hi.{t} {{d}}, {{a}}, {{b}}, {{c}};", three, t, hi)
        add(f"sad.{t}", f"sad.{t} {{d}}, {{a}}, {{b}}, {{c}};", three, t, lambda a, b, c: c + abs(a - b))
        domain = _defined_division(t)
        add(f"div.{t}", f"div.{t} {{d}}, {{a}}, {{b}};", two, t, _trunc_div, domain)
        rem = lambda a, b: a - b * _trunc_div(a, b)  # noqa: E731
        add(f"rem.{t}", f"rem.{t} {{d}}, {{a}}, {{b}};", two, t, rem, domain)
        add(f"min.{t}", f"min.{t} {{d}}, {{a}}, {{b}};", two, t, min)
        add(f"max.{t}", f"max.{t} {{d}}, {{a}}, {{b}};", two, t, max)
        if t[0] == "s":
            add(f"abs.{t}", f"abs.{t} {{d}}, {{a}};", (t,), t, abs)
            add(f"neg.{t}", f"neg.{t} {{d}}, {{a}};", (t,), t, lambda a: -a)
        if bits < 64:
            wide = f"{t[0]}{bits * 2}"
            add(f"mul.wide.{t}", f"mul.wide.{t} {{d}}, {{a}}, {{b}};", two, wide, lambda a, b: a * b)
            body = f"mad.wide.{t} {{d}}, {{a}}, {{b}}, {{c}};"
            add(f"mad.wide.{t}", body, (t, t, wide), wide, lambda a, b, c: a * b + c)
    for name, function in (("add", lambda a, b: a + b), ("sub", lambda a, b: a - b)):
        saturated = lambda a, b, f=function: _saturate("s32", f(a, b))  # noqa: E731
        add(f"{name}.sat.s32", f"{name}.sat.s32 {{d}}, {{a}}, {{b}};", ("s32", "s32"), "s32", saturated)
    saturated_mad = lambda a, b, c: _saturate("s32", ((a * b) >> 32) + c)  # noqa: E731
    add("mad.hi.sat.s32", "mad.hi.sat.s32 {d}, {a}, {b}, {c};", ("s32",) * 3, "s32", saturated_mad)
    for t in ("u32", "s32"):

        def low24(value: int, t: str = t) -> int:
            value &= 0xFFFFFF
            return value - (1 << 24) if t == "s32" and value >> 23 else value

        for half, shift in (("lo", 0), ("hi", 16)):
            product = lambda a, b, s=shift, f=low24: (f(a) * f(b)) >> s  # noqa: E731
            add(f"mul24.{half}.{t}", f"mul24.{half}.{t} {{d}}, {{a}}, {{b}};", (t, t), t, product)
            total = lambda a, b, c, p=product: p(a, b) + c  # noqa: E731
            add(f"mad24.{half}.{t}", f"mad24.{half}.{t} {{d}}, {{a}}, {{b}}, {{c}};", (t, t, t), t, total)
    for ta in ("u32", "s32"):
        for tb in ("u32", "s32"):
            out = "u32" if ta == tb == "u32" else "s32"
            kinds = (ta, tb, out)

            def part(value: int, bits: int, index: int, t: str) -> int:
                field = (value >> (bits * index)) & ((1 << bits) - 1)
                return field - (1 << bits) if t == "s32" and field >> (bits - 1) else field

            def dp4(a: int, b: int, c: int, ta: str = ta, tb: str = tb, part=part) -> int:
                return c + sum(part(a, 8, i, ta) * part(b, 8, i, tb) for i in range(4))

            add(f"dp4a.{ta}.{tb}", f"dp4a.{ta}.{tb} {{d}}, {{a}}, {{b}}, {{c}};", kinds, out, dp4)
            for half, base in (("lo", 0), ("hi", 2)):

                def dp2(a: int, b: int, c: int, ta: str = ta, tb: str = tb, base: int = base, part=part) -> int:
                    return c + sum(part(a, 16, i, ta) * part(b, 8, base + i, tb) for i in range(2))

                add(f"dp2a.{half}.{ta}.{tb}", f"dp2a.{half}.{ta}.{tb} {{d}}, {{a}}, {{b}}, {{c}};", kinds, out, dp2)

    def pairwise(t: str, function: Callable[[int, int], int]):
        def apply(a: int, b: int) -> int:
            result = 0
            for shift in (0, 16):
                x, y = (a >> shift) & 0xFFFF, (b >> shift) & 0xFFFF
                if t == "s16x2":
                    x, y = (v - 0x10000 if v >> 15 else v for v in (x, y))
                result |= (function(x, y) & 0xFFFF) << shift
            return result

        return apply

    for t in ("u16x2", "s16x2"):
        for name, function in (("add", lambda a, b: a + b), ("min", min), ("max", max)):
            body = f"{name}.{t} {{d}}, {{a}}, {{b}};"
            add(f"{name}.{t}", body, ("u32", "u32"), "u32", pairwise(t, function))
    relu = lambda f: lambda a, b: max(f(a, b), 0)  # noqa: E731
    for name, function in (("min", min), ("max", max)):
        body = f"{name}.relu.s32 {{d}}, {{a}}, {{b}};"
        add(f"{name}.relu.s32", body, ("s32", "s32"), "s32", relu(function))
        body = f"{name}.s16x2.relu {{d}}, {{a}}, {{b}};"
        add(f"{name}.s16x2.relu", body, ("u32", "u32"), "u32", pairwise("s16x2", relu(function)))
    return rows


def _prmt(a: int, b: int, selector: int, mode: str) -> int:
    source = [(a >> (8 * i)) & 0xFF for i in range(4)] + [(b >> (8 * i)) & 0xFF for i in range(4)]
    if mode == "":
        result = 0
        for i in range(4):
            nibble = (selector >> (4 * i)) & 0xF
            byte = source[nibble & 7]
            if nibble & 8:
                byte = 0xFF if byte & 0x80 else 0
            result |= byte << (8 * i)
        return result
    s = selector & 3
    picks = {
        "f4e": [s, s + 1, s + 2, s + 3],
        "b4e": [s, (s - 1) % 8, (s - 2) % 8, (s - 3) % 8],
        "rc8": [s] * 4,
        "ecl": [max(i, s) for i in range(4)],
        "ecr": [min(i, s) for i in range(4)],
        "rc16": [2 * (s & 1), 2 * (s & 1) + 1] * 2,
    }[mode]
    return sum(source[p] << (8 * i) for i, p in enumerate(picks))


def _lop3(a: int, b: int, c: int, table: int) -> int:
    result = 0
    for row in range(8):
        if table >> row & 1:
            term = 0xFFFFFFFF
            for bit, value in ((4, a), (2, b), (1, c)):
                term &= value if row & bit else ~value & 0xFFFFFFFF
            result |= term
    return result


def _bfind(t: str, value: int) -> int:
    if value < 0:
        value = ~value
    return value.bit_length() - 1 if value else 0xFFFFFFFF


def _field(bits: int, position: int, length: int) -> tuple[int, int]:
    """The ISA limits both operands to 0..255. An H200 takes them modulo 256 for 32 bits and saturates for 64."""
    if bits == 32:
        return position & 0xFF, length & 0xFF
    return min(position, 0xFF), min(length, 0xFF)


def _bfe(t: str, value: int, position: int, length: int) -> int:
    bits = _bits(t)
    raw = value & ((1 << bits) - 1)
    position, length = _field(bits, position, length)
    if t[0] == "u" or length == 0:
        sign = 0
    else:
        sign = raw >> min(position + length - 1, bits - 1) & 1
    result = 0
    for i in range(bits):
        bit = raw >> (position + i) & 1 if i < length and position + i < bits else sign
        result |= bit << i
    return result


def _bfi(bits: int, source: int, into: int, position: int, length: int) -> int:
    position, length = _field(bits, position, length)
    result = into
    for i in range(length):
        if position + i >= bits:
            break
        result = result & ~(1 << (position + i)) | (source >> i & 1) << (position + i)
    return result


def bit() -> list[Snippet]:
    """Logic, shifts, funnel shifts, bit fields, counts, permutes and masks."""
    rows: list[Snippet] = []

    def add(name: str, body: str, kinds: tuple[str, ...], out: str, function: Callable[..., int], domain=None) -> None:
        kinds_ref = tuple("u" + k[1:] if k[0] == "b" else k for k in kinds)
        out_ref = "u" + out[1:] if out[0] == "b" else out
        rows.append(Snippet(name, body, kinds, (out,), _exact(out_ref, function, out_ref, kinds_ref), domain=domain))

    for n in (16, 32, 64):
        t = f"b{n}"
        for name, function in (
            ("and", lambda a, b: a & b),
            ("or", lambda a, b: a | b),
            ("xor", lambda a, b: a ^ b),
        ):
            add(f"{name}.{t}", f"{name}.{t} {{d}}, {{a}}, {{b}};", (t, t), t, function)
        add(f"not.{t}", f"not.{t} {{d}}, {{a}};", (t,), t, lambda a: ~a)
        add(f"cnot.{t}", f"cnot.{t} {{d}}, {{a}};", (t,), t, lambda a: int(a == 0))
        # Shift amounts are 32-bit and clamp at the width; half of them are drawn into the interesting range.
        near = lambda a, b, n=n: (a, np.where(b % 2 == 0, b % (2 * n), b))  # noqa: E731
        add(f"shl.{t}", f"shl.{t} {{d}}, {{a}}, {{b}};", (t, "u32"), t, lambda a, b, n=n: a << b if b < n else 0, near)
        for kind in (t, f"u{n}", f"s{n}"):
            shr = lambda a, b, n=n: a >> min(b, n)  # noqa: E731
            add(f"shr.{kind}", f"shr.{kind} {{d}}, {{a}}, {{b}};", (kind, "u32"), kind, shr, near)
        if n == 16:
            continue
        add(f"popc.{t}", f"popc.{t} {{d}}, {{a}};", (t,), "u32", lambda a: a.bit_count())
        add(f"clz.{t}", f"clz.{t} {{d}}, {{a}};", (t,), "u32", lambda a, n=n: n - a.bit_length())
        reverse = lambda a, n=n: int(f"{a:0{n}b}"[::-1], 2)  # noqa: E731
        add(f"brev.{t}", f"brev.{t} {{d}}, {{a}};", (t,), t, reverse)
        field = lambda a, b, c: (a, np.where(b % 4 < 3, b % 70, b), np.where(c % 4 < 3, c % 70, c))  # noqa: E731
        for kind in (f"u{n}", f"s{n}"):
            find = lambda a, k=kind: _bfind(k, a)  # noqa: E731
            add(f"bfind.{kind}", f"bfind.{kind} {{d}}, {{a}};", (kind,), "u32", find)
            shift_amount = lambda a, k=kind, n=n: n - 1 - _bfind(k, a) if _bfind(k, a) != 0xFFFFFFFF else 0xFFFFFFFF  # noqa: E731
            add(f"bfind.shiftamt.{kind}", f"bfind.shiftamt.{kind} {{d}}, {{a}};", (kind,), "u32", shift_amount)
            extract = lambda a, b, c, k=kind: _bfe(k, a, b, c)  # noqa: E731
            add(f"bfe.{kind}", f"bfe.{kind} {{d}}, {{a}}, {{b}}, {{c}};", (kind, "u32", "u32"), kind, extract, field)
        insert = lambda a, b, c, e, n=n: _bfi(n, a, b, c, e)  # noqa: E731
        fields = lambda a, b, c, e, f=field: (a, *f(b, c, e))  # noqa: E731
        add(f"bfi.{t}", f"bfi.{t} {{d}}, {{a}}, {{b}}, {{c}}, {{e}};", (t, t, "u32", "u32"), t, insert, fields)
    for direction in ("l", "r"):
        for mode in ("wrap", "clamp"):

            def funnel(a: int, b: int, c: int, direction: str = direction, mode: str = mode) -> int:
                n = c & 31 if mode == "wrap" else min(c, 32)
                whole = b << 32 | a
                return (whole << n) >> 32 if direction == "l" else whole >> n

            name = f"shf.{direction}.{mode}.b32"
            amounts = lambda a, b, c: (a, b, np.where(c % 2 == 0, c % 40, c))  # noqa: E731
            add(name, f"{name} {{d}}, {{a}}, {{b}}, {{c}};", ("b32", "b32", "u32"), "b32", funnel, amounts)
    for table in (0x00, 0xFF, 0x80, 0xFE, 0x96, 0xE8, 0xCA, 0x1B, 0x78, 0x2D):
        function = lambda a, b, c, table=table: _lop3(a, b, c, table)  # noqa: E731
        add(f"lop3.{table:#04x}", f"lop3.b32 {{d}}, {{a}}, {{b}}, {{c}}, {table};", ("b32",) * 3, "b32", function)
    for mode in ("", "f4e", "b4e", "rc8", "ecl", "ecr", "rc16"):
        function = lambda a, b, c, mode=mode: _prmt(a, b, c, mode)  # noqa: E731
        suffix = f".{mode}" if mode else ""
        add(f"prmt.b32{suffix}", f"prmt.b32{suffix} {{d}}, {{a}}, {{b}}, {{c}};", ("b32",) * 3, "b32", function)
    for mode in ("clamp", "wrap"):

        def mask(a: int, b: int, mode: str = mode) -> int:
            if mode == "wrap":
                a, b = a & 31, b & 31
            else:
                a, b = min(a, 32), min(b, 32)
            return ((1 << b) - 1 << a) & 0xFFFFFFFF

        near = lambda a, b: (np.where(a % 4 < 3, a % 40, a), np.where(b % 4 < 3, b % 40, b))  # noqa: E731
        add(f"bmsk.{mode}.b32", f"bmsk.{mode}.b32 {{d}}, {{a}}, {{b}};", ("u32", "u32"), "b32", mask, near)
        for t in ("u32", "s32"):

            def extend(a: int, b: int, mode: str = mode, t: str = t) -> int:
                n = b & 31 if mode == "wrap" else min(b, 32)
                raw = a & 0xFFFFFFFF
                if n == 0:
                    return 0
                field = raw & ((1 << n) - 1)
                return field - (1 << n) if t == "s32" and field >> (n - 1) else field

            near_n = lambda a, b: (a, np.where(b % 4 < 3, b % 40, b))  # noqa: E731
            add(f"szext.{mode}.{t}", f"szext.{mode}.{t} {{d}}, {{a}}, {{b}};", (t, "u32"), t, extend, near_n)
    add("fns.b32", "fns.b32 {d}, {a}, {b}, {c};", ("b32", "u32", "s32"), "b32", _fns, _fns_domain)
    return rows


def _fns(mask: int, base: int, offset: int) -> int:
    """Find the n-th set bit from a base position (ISA pseudo-code of ``fns``)."""
    if offset == 0:
        return base if mask >> base & 1 else 0xFFFFFFFF
    step, remaining = (1, offset - 1) if offset > 0 else (-1, -offset - 1)
    position = base
    while 0 <= position < 32:
        if mask >> position & 1:
            if remaining == 0:
                return position
            remaining -= 1
        position += step
    return 0xFFFFFFFF


def _fns_domain(mask: Array, base: Array, offset: Array) -> tuple[Array, Array, Array]:
    small = (offset.view(np.int32) % 9 - 4).astype(np.int32)
    return mask, base % 32, small.view(offset.dtype)


def carries() -> list[Snippet]:
    """Chains of add.cc/addc, sub.cc/subc and mad.cc/madc that make multi-word results."""
    rows = []
    for n in (32, 64):
        t = f"u{n}"
        ones = (1 << n) - 1

        def split(values: list[int], words: int, n: int = n) -> tuple[Array, ...]:
            return tuple(
                np.array([v >> (n * w) & ((1 << n) - 1) for v in values], dtype=f"uint{n}") for w in range(words)
            )

        def long_add(a: Array, b: Array, c: Array, e: Array, split=split, n: int = n) -> tuple[Array, ...]:
            rows_ = zip(*(x.astype(object) for x in (a, b, c, e)))
            return split([(p | q << n) + (r | s << n) for p, q, r, s in rows_], 3)

        def long_sub(a: Array, b: Array, c: Array, e: Array, split=split, n: int = n) -> tuple[Array, ...]:
            rows_ = zip(*(x.astype(object) for x in (a, b, c, e)))
            low, high, borrow = split([(p | q << n) - (r | s << n) for p, q, r, s in rows_], 3)
            return low, high, borrow

        def long_mad(a: Array, b: Array, c: Array, e: Array, split=split, n: int = n) -> tuple[Array, ...]:
            rows_ = zip(*(x.astype(object) for x in (a, b, c, e)))
            return split([p * q + (r | s << n) for p, q, r, s in rows_], 3)

        zero = f".reg .b{n} z; mov.b{n} z, 0; "
        rows += [
            Snippet(
                f"add.cc.{t} addc.cc.{t} addc.{t}",
                f"{{{{ {zero}add.cc.{t} {{d}}, {{a}}, {{c}}; addc.cc.{t} {{d1}}, {{b}}, {{e}}; "
                f"addc.{t} {{d2}}, z, z; }}}}",
                (t,) * 4,
                (t,) * 3,
                long_add,
            ),
            Snippet(
                f"sub.cc.{t} subc.cc.{t} subc.{t}",
                f"{{{{ {zero}sub.cc.{t} {{d}}, {{a}}, {{c}}; subc.cc.{t} {{d1}}, {{b}}, {{e}}; "
                f"subc.{t} {{d2}}, z, z; }}}}",
                (t,) * 4,
                (t,) * 3,
                long_sub,
            ),
            Snippet(
                f"mad.lo.cc.{t} madc.hi.cc.{t} addc.{t}",
                f"{{{{ {zero}mad.lo.cc.{t} {{d}}, {{a}}, {{b}}, {{c}}; madc.hi.cc.{t} {{d1}}, {{a}}, {{b}}, {{e}}; "
                f"addc.{t} {{d2}}, z, z; }}}}",
                (t,) * 4,
                (t,) * 3,
                long_mad,
            ),
            Snippet(
                f"add.cc.{t} madc.lo.{t}",
                f"{{{{ .reg .b{n} s; add.cc.{t} s, {{a}}, {{b}}; madc.lo.{t} {{d}}, {{a}}, {{b}}, {{c}}; }}}}",
                (t,) * 3,
                (t,),
                _exact(t, lambda a, b, c, ones=ones: a * b + c + int(a + b > ones)),
            ),
        ]
    return rows
