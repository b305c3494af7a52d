"""Operands that fit a form of the table of instructions, as text."""

from __future__ import annotations

import re

# Registers: %h 16 bits, %r 32, %d 64, %q 128, %p predicates; %i of .s32 and %f of .f32 for operands that shall not fit.
DECLARED = {
    "h": ".reg .b16 %h<9>;",
    "r": ".reg .b32 %r<260>;",
    "d": ".reg .b64 %d<20>;",
    "q": ".reg .b128 %q<9>;",
    "p": ".reg .pred %p<9>;",
    "i": ".reg .s32 %i<4>;",
    "f": ".reg .f32 %f<4>;",
    "b": ".reg .b8 %b<9>;",
}
_BYTES = {"pred": 0, "b128": 16} | dict.fromkeys(("u8", "s8", "b8", "e4m3", "e5m2"), 1)
_BYTES |= dict.fromkeys(("u16", "s16", "b16", "f16", "bf16", "e4m3x2", "e5m2x2"), 2)
_BYTES |= dict.fromkeys(("u32", "s32", "b32", "f32", "f16x2", "bf16x2", "tf32", "u16x2", "s16x2"), 4)
_BYTES |= dict.fromkeys(("u64", "s64", "b64", "f64", "f32x2"), 8)
_BANKS = {0: "p", 1: "h", 2: "h", 4: "r", 8: "d", 16: "q"}
_SHARED = ("shared", "shared::cta", "shared::cluster")


def _types(parts: tuple[str, ...]) -> list[str]:
    return [part for part in parts if part in _BYTES]


def _braces(bank: str, count: int) -> str:
    return "{" + ", ".join(f"%{bank}{k}" for k in range(count)) + "}"


def _scalar(name: str, types: list[str], at: int) -> str:
    name = {"$": types[-1] if types else "", "$$": types[-2] if len(types) > 1 else ""}.get(name, name)
    if name == "w$":
        name = f"{types[-1][0]}{2 * int(types[-1][1:])}"
    return f"%{_BANKS[_BYTES[name]]}{at % 4 + 1}"


def _constant(base: str) -> str:
    return {"cp": "16", "setmaxnreg": "40", "discard": "128", "applypriority": "128", "fence": "128"}.get(base, "1")


def _copy_addresses(parts: tuple[str, ...]) -> list[str]:
    """Addresses of cp: in shared memory 32 bits wide, in global memory 64."""
    where = [part for part in parts if part in ("global", *_SHARED)]
    if "tensor" in parts:
        rank = int(next(part for part in parts if re.fullmatch(r"[1-5]d", part))[0])
        wanted = f"[%d1, {_braces('r', rank)}]"
        if "prefetch" in parts:
            return [wanted]
        return [wanted, "[%r1]"] if where[0] == "global" else ["[%r1]", wanted, "[%r2]"]
    if "mbarrier" in parts:
        return ["[%r1]" if where else "[%d1]"]
    return [*("[%d1]" if part == "global" else "[%r1]" for part in where), "[%r2]"]


def _addresses(base: str, parts: tuple[str, ...]) -> list[str]:
    if base == "cp":
        return _copy_addresses(parts)
    if base == "ld" and any(part.startswith("param") for part in parts):
        return ["[parameter]"]
    shared = any(part in _SHARED for part in parts)
    tensor_memory = base == "tcgen05" and parts[0] not in ("alloc", "commit")
    return ["[%r1]" if shared or tensor_memory else "[%d1]"] * 3


def _vector_length(base: str, parts: tuple[str, ...]) -> int:
    for part in parts:
        if re.fullmatch(r"v[248]", part):
            return int(part[1:])
        if re.fullmatch(r"x\d+", part):
            per = {"16x128b": 2, "16x256b": 4}
            return int(part[1:]) * max(per.get(other, 1) for other in parts)
    return {"cta_group::1": 4, "cta_group::2": 8}.get(parts[1], 0) if base == "tcgen05" else 0


def _fragments(parts: tuple[str, ...]) -> list[str]:
    """Operands of mma: D, A, B, C in as many registers as their shape takes."""
    m, n, k = map(int, re.fullmatch(r"m(\d+)n(\d+)k(\d+)", next(p for p in parts if p.startswith("m"))).groups())
    types = _types(parts)
    bank, width = ("d", 8) if types[1] == "f64" else ("r", 4)
    size = 4 if types[1] == "tf32" else _BYTES[types[1]]
    accumulators = m * n // 32 // (2 if types[0] == "f16" else 1)
    counts = (accumulators, m * k * size // 32 // width, n * k * size // 32 // width, accumulators)
    return [_braces(bank, count) for count in counts]


def _wgmma(parts: tuple[str, ...], listed: list[str]) -> list[list[str]]:
    """A from shared memory and from registers, with the transpositions that each takes."""
    n = int(re.search(r"n(\d+)k", next(part for part in parts if part.startswith("m64")))[1])
    types = _types(parts)
    listed = [_braces("r", n // (4 if types[0] == "f16" else 2)), *listed[1:]]
    halves = types[1] in ("f16", "bf16")
    found = []
    if not halves or len(listed) == 8:
        found.append([listed[0], "%d1", *listed[2:]])
    if not halves or len(listed) == 7:
        found.append([listed[0], _braces("r", 4), *listed[2:]])
    return found


def _one(base: str, parts: tuple[str, ...], token: str, at: int) -> list[str]:
    """Texts of one operand."""
    written, types = token.startswith("="), _types(parts)
    token = token.lstrip("=")
    pair = "must" if token.endswith("||p") else "may" if token.endswith("|p") else ""
    token = re.sub(r"\|+p$", "", token)
    if token == "_":
        return ["_"]
    token = token.lstrip("_")
    vector = token.startswith("{") and not token.startswith("{}")
    name = token.removesuffix("[]").removesuffix("{}").lstrip("{}").rstrip("+")
    if name == "i":
        return [_constant(base)]
    if name == "*":
        return [{"mov": "{%r1, %r2}", "bra": "label", "brx": "table"}.get(base, "%d1")]
    text = f"%p{at + 1}" if name == "p" else _scalar(name, types, at)
    count = _vector_length(base, parts) if token.startswith("{") else 0
    if count or vector:
        text = "{" + ", ".join(f"{text[:2]}{k}" for k in range(count)) + "}"
    if not pair:
        return [text]
    return [f"{text}|%p0"] if pair == "must" else [text, f"{text}|%p0"] if written else [text]


def operand_lists(base: str, parts: tuple[str, ...], operands: str) -> list[list[str]]:
    """Lists of operands that fit a form; empty for calls, which need functions around them."""
    if base == "call":
        return []
    addresses = iter(_addresses(base, parts) * 2)
    lists: list[list[str]] = [[]]
    for at, token in enumerate(operands.split()):
        optional, token = token.endswith("?"), token.rstrip("?")
        if token == "hint":
            texts = ["%d9"] if "L2::cache_hint" in parts else []
            if not texts:
                continue
        elif token in ("[]", "[,]"):
            texts = [next(addresses)]
        else:
            texts = _one(base, parts, token, at)
        lists = [*(lists if optional else []), *([*listed, text] for listed in lists for text in texts)]
    if base == "mma":
        return [_fragments(parts)]
    if base == "mov" and "{*" in operands:
        size = {"b32": "h", "b64": "r", "b128": "d"}[parts[-1]]
        return [[_braces(size, 2) if text == "{%r1, %r2}" else text for text in listed] for listed in lists]
    if base == "wgmma" and parts[0] == "mma_async":
        return [found for listed in lists for found in _wgmma(parts, listed)]
    if base == "tcgen05" and parts[0] == "mma":
        return [[listed[0], a, *listed[2:]] for listed in lists for a in ("%d1", "[%r2]")]
    return lists
