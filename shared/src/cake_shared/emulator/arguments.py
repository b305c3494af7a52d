"""What `--arg` says on the command line: numbers, arrays, structures of both."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field

import numpy as np

_DTYPES = {
    "f16": "float16", "f32": "float32", "f64": "float64", "i8": "int8", "i16": "int16", "i32": "int32", "i64": "int64",
    "u8": "uint8", "u16": "uint16", "u32": "uint32", "u64": "uint64", "bf16": "uint16",
}  # fmt: skip
_ARRAY = "DTYPE:COUNT[:zeros|ones|arange|normal|FILE]"
SYNTAX = (
    f"one a parameter, in order: a number; DTYPE=NUMBER for one of that type; {_ARRAY} for a pointer; "
    "'(MEMBER,...)' for a struct, its members of the last two kinds, laid out as C++ does"
)


@dataclass
class Argument:
    """One argument: what a launch takes, and the arrays that it brings, by the name that `--dump` gives them."""

    value: object
    arrays: dict[str, Array] = field(default_factory=dict)


@dataclass
class Array:
    """Memory behind a pointer; BF16 is kept as bits."""

    data: np.ndarray
    is_bf16: bool = False

    def shown(self, first: int, count: int) -> str:
        """Text of `count` elements from `first` on."""
        part = self.data[first : first + count]
        values = (part.astype(np.uint32) << 16).view(np.float32) if self.is_bf16 else part
        text = np.array2string(values, threshold=max(part.size, 1))
        return f"{part.size} of {self.data.size} elements from {first} on: {text}"


def _bits_of_bf16(values: np.ndarray) -> np.ndarray:
    bits = values.astype(np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(values), 0x7FFF, rounded).astype(np.uint16)


def _array(name: str, spec: str, rng: np.random.Generator) -> Array:
    parts = spec.split(":")
    if parts[0] not in _DTYPES or len(parts) not in (2, 3) or not parts[1].isdecimal():
        raise ValueError(f"{name}: takes {_ARRAY}, DTYPE of {', '.join(_DTYPES)}; got {spec!r}")
    dtype, count, fill = np.dtype(_DTYPES[parts[0]]), int(parts[1]), parts[2] if len(parts) == 3 else "zeros"
    room = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if count * max(dtype.itemsize, 8) > room:
        raise ValueError(f"{name}: {count} elements of {parts[0]} do not fit into this machine's {room} bytes")
    fills = {"zeros": np.zeros, "ones": np.ones, "arange": np.arange, "normal": rng.standard_normal}
    if fill not in fills:
        try:
            loaded = np.load(fill).reshape(-1) if fill.endswith(".npy") else np.fromfile(fill, dtype)
        except (OSError, ValueError) as error:
            raise ValueError(f"{name}: {fill} cannot be read: {error}") from None
        if loaded.size != count:
            raise ValueError(f"{name}: {fill} has {loaded.size} elements, {count} are asked for")
        is_bits = parts[0] == "bf16" and loaded.dtype.kind == "f"
        return Array(_bits_of_bf16(loaded) if is_bits else loaded.astype(dtype), parts[0] == "bf16")
    if parts[0] == "bf16":
        return Array(_bits_of_bf16(fills[fill](count)), True)
    return Array(fills[fill](count).astype(dtype))


def _number(name: str, spec: str) -> int | float:
    whole = re.fullmatch(r"[+-]?(0x[0-9a-fA-F]+|\d+)", spec)
    try:
        return int(spec, 16 if "x" in spec else 10) if whole else float(spec)
    except ValueError:
        raise ValueError(f"{name}: takes a number, DTYPE=NUMBER, DTYPE:COUNT or (MEMBER,...), got {spec!r}") from None


def _scalar(name: str, spec: str) -> bytes:
    kind, _, text = spec.partition("=")
    if kind not in _DTYPES:
        raise ValueError(f"{name}: takes DTYPE=NUMBER, DTYPE of {', '.join(_DTYPES)}; got {spec!r}")
    number = _number(name, text)
    if kind == "bf16":
        return _bits_of_bf16(np.array([number], np.float64)).tobytes()
    dtype = np.dtype(_DTYPES[kind])
    if dtype.kind in "iu":
        bounds = np.iinfo(dtype)
        if number != int(number) or not bounds.min <= number <= bounds.max:
            raise ValueError(f"{name}: {kind} takes whole numbers from {bounds.min} to {bounds.max}, got {text}")
        return np.array([int(number)], dtype).tobytes()
    with np.errstate(over="ignore"):
        value = np.array([number], np.float64).astype(dtype)
    if np.isinf(value[0]) and not np.isinf(np.float64(number)):
        raise ValueError(f"{name}: {kind} cannot hold {text}")
    return value.tobytes()


def _struct(name: str, position: int, spec: str, rng: np.random.Generator) -> Argument:
    data, arrays, align = b"", {}, 1
    for index, member in enumerate(part.strip() for part in spec[1:-1].split(",")):
        where = f"{name}, member {index}"
        if ":" in member:
            array = arrays[f"{position}.{index}"] = _array(where, member, rng)
            piece = array.data.ctypes.data.to_bytes(8, "little")
        else:
            piece = _scalar(where, member)
        align = max(align, len(piece))
        data += bytes(-len(data) % len(piece)) + piece
    return Argument(data + bytes(-len(data) % align), arrays)


def parse(position: int, spec: str, rng: np.random.Generator) -> Argument:
    """Return the argument that `--arg SPEC` in a place stands for.

    Raises
    ------
    ValueError
        It stands for none; the message names its place.
    """
    name = f"--arg {position}"
    if spec.startswith("(") and spec.endswith(")"):
        return _struct(name, position, spec, rng)
    if ":" in spec:
        array = _array(name, spec, rng)
        return Argument(array.data, {str(position): array})
    return Argument(_scalar(name, spec) if "=" in spec else _number(name, spec))
