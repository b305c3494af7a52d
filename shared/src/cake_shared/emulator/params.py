"""Python values -> bytes of kernel parameters, and the memory behind pointers -> registered allocations."""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, field

import numpy as np

_INTEGERS = {
    "u8": (1, False), "b8": (1, False), "s8": (1, True),
    "u16": (2, False), "b16": (2, False), "s16": (2, True),
    "u32": (4, False), "b32": (4, False), "s32": (4, True),
    "u64": (8, False), "b64": (8, False), "s64": (8, True),
}  # fmt: skip
_FLOATS = {"f32": "<f", "f64": "<d"}


@dataclass(frozen=True)
class Param:
    """One declared parameter of a kernel: PTX type without the dot, place and size in bytes."""

    name: str
    type: str
    offset: int
    size: int
    align: int


@dataclass
class Region:
    """Memory that a launch may touch: lowest address, bytes, whether writes are faults, what has been written."""

    address: int
    size: int
    name: str
    const: bool = False
    written: np.ndarray | None = None
    owner: object = field(default=None, repr=False)


@dataclass(frozen=True)
class Marked:
    """An array with how it is registered: `const` or `uninit`."""

    array: object
    const: bool = False
    written: np.ndarray | None = None


def span_of(array: object) -> tuple[int, int]:
    """Return (lowest address, bytes) that a NumPy array or torch CPU tensor reaches through its strides.

    Raises
    ------
    TypeError
        It is neither, holds Python objects, or is a tensor that is not on the CPU.
    """
    if isinstance(array, np.ndarray):
        if array.dtype.hasobject:
            raise TypeError(
                f"an array of numbers is expected, got one of dtype {array.dtype}, which holds Python objects"
            )
        if array.size == 0:
            return array.ctypes.data, 0
        reach = [(size - 1) * stride for size, stride in zip(array.shape, array.strides, strict=True)]
        low = sum(r for r in reach if r < 0)
        return array.ctypes.data + low, sum(r for r in reach if r > 0) - low + array.itemsize
    if hasattr(array, "data_ptr") and hasattr(array, "stride"):
        if array.device.type != "cpu":
            raise TypeError(f"tensors must be on the CPU, got one on {array.device}")
        if array.numel() == 0:
            return array.data_ptr(), 0
        last = sum((size - 1) * stride for size, stride in zip(array.shape, array.stride(), strict=True))
        return array.data_ptr(), (last + 1) * array.element_size()
    raise TypeError(f"a NumPy array or a torch tensor is expected, got {type(array).__name__}")


def region_of(array: object, name: str) -> Region:
    """Return the region of an array, or of one marked as const or uninitialised; a read-only array is const."""
    marked = array if isinstance(array, Marked) else Marked(array)
    try:
        address, size = span_of(marked.array)
    except TypeError as error:
        raise TypeError(f"{name}: {error}") from None
    read_only = isinstance(marked.array, np.ndarray) and not marked.array.flags.writeable
    return Region(address, size, name, marked.const or read_only, marked.written, marked)


class _Bytes:
    """The bytes that a region's array reaches through its strides, for NumPy to compare."""

    def __init__(self, region: Region):
        array = region.owner.array
        if isinstance(array, np.ndarray):
            address, shape, strides = array.ctypes.data, array.shape, array.strides
            size = array.itemsize
        else:
            size = array.element_size()
            address, shape = array.data_ptr(), tuple(array.shape)
            strides = tuple(stride * size for stride in array.stride())
        self.__array_interface__ = {
            "data": (address, True), "shape": (*shape, size), "strides": (*strides, 1), "typestr": "|u1", "version": 3
        }  # fmt: skip


def refuse_const_aliases(regions: list[Region]) -> None:
    """Raise where bytes belong to a const region and to one that is not: the kernel may write them, or may not.

    Raises
    ------
    ValueError
        The message names both.
    """
    for const in (region for region in regions if region.const):
        for other in (region for region in regions if not region.const):
            apart = const.address + const.size <= other.address or other.address + other.size <= const.address
            owned = isinstance(const.owner, Marked) and isinstance(other.owner, Marked)
            if apart or (owned and not np.shares_memory(np.asarray(_Bytes(const)), np.asarray(_Bytes(other)))):
                continue
            raise ValueError(
                f"{const.name} is const, and {other.name} in the same memory is not: mark both as const, or neither"
            )


def _address_of(array: object) -> int:
    inner = array.array if isinstance(array, Marked) else array
    return inner.ctypes.data if isinstance(inner, np.ndarray) else inner.data_ptr()


def _is_array(value: object) -> bool:
    if isinstance(value, (Marked, np.ndarray)):
        return not (isinstance(value, np.ndarray) and value.ndim == 0)
    return hasattr(value, "data_ptr")


def short_name(parameter: str) -> str:
    """Return `param_3` for what nvcc calls `<mangled kernel>_param_3`, other names as they are."""
    return re.sub(r"^.+_(param_\d+)$", r"\1", parameter)


def _scalar(param: Param, value: object, position: int) -> bytes:
    what = f"parameter {position} ({short_name(param.name)}, .{param.type}, {param.size} bytes)"
    if isinstance(value, (bytes, bytearray, memoryview)):
        data = bytes(value)
        if len(data) != param.size:
            raise TypeError(f"{what} takes {param.size} bytes, got {len(data)}")
        return data
    if isinstance(value, (np.generic, np.ndarray)):
        data = value.tobytes()
        if len(data) != param.size:
            raise TypeError(f"{what} takes {param.size} bytes, got {type(value).__name__} of {len(data)}")
        return data
    if isinstance(value, (bool, int, float)):
        if param.type in _FLOATS and param.size == struct.calcsize(_FLOATS[param.type]):
            try:
                return struct.pack(_FLOATS[param.type], value)
            except OverflowError:
                raise TypeError(f"{what} cannot hold {value}") from None
        if isinstance(value, float) and not value.is_integer():
            raise TypeError(f"{what} takes an integer, got {value!r}")
        if param.type in _INTEGERS and _INTEGERS[param.type][0] == param.size:
            number = int(value)
            bits = param.size * 8
            if not -(1 << (bits - 1)) <= number < (1 << bits):
                raise TypeError(f"{what} cannot hold {number}")
            return (number & ((1 << bits) - 1)).to_bytes(param.size, "little")
        raise TypeError(f"{what} takes bytes or a NumPy scalar of its size, got {value!r}")
    raise TypeError(f"{what} takes an array, a number or bytes, got {type(value).__name__}")


def pack(params: tuple[Param, ...], values: list | tuple) -> tuple[bytes, list[Region]]:
    """Return the parameter bytes of a launch and the regions behind its pointers.

    Raises
    ------
    TypeError
        A value does not fit its parameter; the message names position, name and what it takes.
    """
    if len(values) != len(params):
        declared = ", ".join(f".{p.type}[{p.size}] {short_name(p.name)}" for p in params)
        raise TypeError(f"the kernel takes {len(params)} parameters ({declared}), got {len(values)}")
    size = max((p.offset + p.size for p in params), default=0)
    buffer, regions = bytearray(size), []
    for position, (param, value) in enumerate(zip(params, values, strict=True)):
        if _is_array(value):
            if param.size != 8:
                raise TypeError(
                    f"parameter {position} ({short_name(param.name)}, .{param.type}) is no pointer, got an array"
                )
            regions.append(region_of(value, f"parameter {position} ({short_name(param.name)})"))
            data = _address_of(value).to_bytes(8, "little")
        elif value is None and param.size == 8:
            data = bytes(8)
        else:
            data = _scalar(param, value, position)
        buffer[param.offset : param.offset + param.size] = data
    return bytes(buffer), regions
