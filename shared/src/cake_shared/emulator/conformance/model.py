"""What a conformance program is: one PTX text, named buffers, launches in order, and how each result is judged."""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Callable, Sequence

import numpy as np

CU_DIRECTORY = pathlib.Path(__file__).parent / "cu"


@dataclasses.dataclass(frozen=True)
class Ptr:
    """A kernel argument: the address of a buffer plus a byte offset; ``const``: the kernel must not write it."""

    buffer: str
    offset_bytes: int = 0
    const: bool = False


@dataclasses.dataclass(frozen=True)
class MapArg:
    """A kernel argument: a tiled tensor map over a buffer, passed by value.

    The parameter is a ``__grid_constant__`` of 128 bytes at a multiple of 128.

    ``dims`` and ``box`` are in elements, innermost first; ``strides_bytes`` leaves out the innermost dimension.
    ``swizzle_bytes`` is 0, 32, 64 or 128; ``fill_nan`` asks for NaN instead of zero outside the tensor.
    """

    buffer: str
    dtype: str
    dims: tuple[int, ...]
    strides_bytes: tuple[int, ...]
    box: tuple[int, ...]
    swizzle_bytes: int = 0
    element_strides: tuple[int, ...] | None = None
    fill_nan: bool = False
    offset_bytes: int = 0


@dataclasses.dataclass(frozen=True)
class Struct:
    """A kernel argument: a struct by value, as a host filled it for memory that lay elsewhere.

    ``pointers`` are (byte, buffer, offset in it), ``maps`` (byte, tensor map): what to put there instead.
    """

    data: bytes
    pointers: tuple[tuple[int, str, int], ...] = ()
    maps: tuple[tuple[int, MapArg], ...] = ()

    def placed(self, addresses: dict[str, int], encode: Callable[[MapArg], bytes]) -> bytes:
        """The struct for buffers at these addresses; ``encode`` makes a runner's tensor maps."""
        data = bytearray(self.data)
        for at, buffer, offset in self.pointers:
            data[at : at + 8] = (addresses[buffer] + offset).to_bytes(8, "little")
        for at, tensor_map in self.maps:
            encoded = encode(tensor_map)
            data[at : at + len(encoded)] = encoded
        return bytes(data)


@dataclasses.dataclass(frozen=True)
class Launch:
    """One kernel launch. ``args`` holds Ptr, MapArg, Struct, NumPy scalars or bytes, the latter two passed by value."""

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    args: tuple[object, ...]
    cluster: tuple[int, int, int] = (1, 1, 1)
    shared_bytes: int = 0
    programmatic: bool = False
    unit: str = ""  # which text holds the kernel, where a case has several


@dataclasses.dataclass(frozen=True)
class Check:
    """A slice of a buffer after the last launch, and how it is judged.

    ``rule`` is ``bits`` (every bit), ``nan`` (every bit, but any NaN equals any NaN) or ``bound``: the difference from
    ``expected`` is at most ``bound`` elementwise on the GPU and in the emulator. ``expected`` comes from NumPy and is
    None only where just the GPU can say.
    """

    name: str
    buffer: str
    dtype: str
    count: int
    offset_bytes: int = 0
    rule: str = "bits"
    expected: np.ndarray | None = None
    bound: np.ndarray | float | None = None
    same_bits: bool = False  # within a bound of NumPy, but the emulator gives the GPU's bits
    # Of the emulator's differences from the GPU: their root mean square, over that of the values, at most this.
    spread: float | None = None

    def at(self, buffer: str, offset_bytes: int) -> Check:
        """The same check of another slice."""
        return dataclasses.replace(self, buffer=buffer, offset_bytes=offset_bytes)

    def view(self, data: np.ndarray) -> np.ndarray:
        """The slice of ``data`` (a uint8 copy of the whole buffer) as this check's dtype."""
        itemsize = np.dtype(STORAGE[self.dtype]).itemsize
        return data[self.offset_bytes : self.offset_bytes + self.count * itemsize].view(STORAGE[self.dtype])


@dataclasses.dataclass(frozen=True)
class Refusal:
    """What a program ends with that is wrong on purpose: the emulator's error class and the driver's error name."""

    emulator: str
    device: str


@dataclasses.dataclass
class Case:
    """A program with its inputs. ``buffers`` are the initial contents; the runners work on copies.

    ``ptx`` gives one text, or one a unit.
    """

    ptx: Callable[[], str | dict[str, str]]
    buffers: dict[str, np.ndarray]
    launches: Sequence[Launch]
    checks: Sequence[Check]
    refusal: Refusal | None = None

    def units(self) -> dict[str, str]:
        """The texts by unit; a single text is the unit of no name."""
        texts = self.ptx()
        return {"": texts} if isinstance(texts, str) else texts


@dataclasses.dataclass(frozen=True)
class Program:
    """A named conformance program of one instruction family; ``build`` makes the same Case every time."""

    name: str
    family: str
    build: Callable[[], Case]


# How a value of each type lies in a buffer. bf16, tf32 and the 8-bit floats have no NumPy type: they are judged as bits
# or widened by ``widen``.
STORAGE = {
    "u8": "uint8", "s8": "int8", "u16": "uint16", "s16": "int16", "u32": "uint32", "s32": "int32", "u64": "uint64",
    "s64": "int64", "f16": "uint16", "bf16": "uint16", "f32": "uint32", "f64": "uint64", "f16x2": "uint32",
    "bf16x2": "uint32", "e4m3": "uint8", "e5m2": "uint8", "b8": "uint8", "b16": "uint16", "b32": "uint32",
    "b64": "uint64",
}  # fmt: skip


def widen(bits: np.ndarray, dtype: str) -> np.ndarray:
    """Bit patterns of a float type as float64 values of the same shape (packed pairs are not taken)."""
    with np.errstate(invalid="ignore"):  # signalling NaN raise the flag
        return _widen(bits, dtype)


def _widen(bits: np.ndarray, dtype: str) -> np.ndarray:
    if dtype == "f32":
        return bits.view(np.float32).astype(np.float64)
    if dtype == "f64":
        return bits.view(np.float64)
    if dtype == "f16":
        return bits.view(np.float16).astype(np.float64)
    if dtype == "bf16":
        return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if STORAGE.get(dtype, "").lstrip("u").startswith("int"):
        return bits.astype(np.float64)
    raise ValueError(f"dtype: got {dtype!r}, takes f16, bf16, f32, f64 or an integer type")


def is_nan_bits(bits: np.ndarray, dtype: str) -> np.ndarray:
    """Which bit patterns are NaN; for packed pairs the answer per element says whether either half is."""
    if dtype in ("f16x2", "bf16x2"):
        half = dtype[:-2]
        return is_nan_bits((bits & 0xFFFF).astype(np.uint16), half) | is_nan_bits((bits >> 16).astype(np.uint16), half)
    if dtype == "e4m3":
        return (bits & 0x7F) == 0x7F
    if dtype == "e5m2":
        return (bits & 0x7F) > 0x7C
    return np.isnan(widen(bits, dtype))
