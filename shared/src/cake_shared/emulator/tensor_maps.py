"""Tensor maps for the emulator: what `cuTensorMapEncodeTiled` makes for a device, in the emulator's own encoding."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence

from cake_shared.emulator import native
from cake_shared.emulator.params import span_of

# In the order of the driver's CUtensorMapDataType.
_TYPES = ("u8", "u16", "u32", "s32", "u64", "s64", "f16", "f32", "f64", "bf16", "f32_ftz", "tf32", "tf32_ftz")
_ALIASES = {
    "uint8": "u8", "uint16": "u16", "uint32": "u32", "int32": "s32", "uint64": "u64", "int64": "s64",
    "float16": "f16", "float32": "f32", "float64": "f64", "bfloat16": "bf16",
}  # fmt: skip
_SWIZZLES = {"none": 0, "32B": 1, "64B": 2, "128B": 3}
_FILLS = {"zero": 0, "nan": 1}
# struct TensorMap of cpp/tensor_map.h.
_ENCODING = struct.Struct("<I4BQ5Q4Q5H5B25x")
_MAGIC = 0x4D54454B


def _one_of(name: str, value: str, table: dict[str, int]) -> int:
    if value not in table:
        raise ValueError(f"{name}: got {value!r}, takes one of {', '.join(table)}")
    return table[value]


def decode(data: bytes) -> dict | None:
    """Return what `tensor_map` encoded, by the names of a conformance case's `MapArg`; None for other bytes."""
    if len(data) != _ENCODING.size:
        return None
    magic, dtype, rank, swizzle, nan, address, *rest = _ENCODING.unpack(data)
    if magic != _MAGIC:
        return None
    dims, strides, box, steps = rest[:5], rest[5:9], rest[9:14], rest[14:19]
    return {
        "address": address,
        "dtype": _TYPES[dtype],
        "dims": tuple(dims[:rank]),
        "strides_bytes": tuple(strides[: rank - 1]),
        "box": tuple(box[:rank]),
        "swizzle_bytes": swizzle,
        "element_strides": tuple(steps[:rank]),
        "fill_nan": bool(nan),
    }


def tensor_map(
    array: object,
    box: Sequence[int],
    swizzle: str = "none",
    dims: Sequence[int] | None = None,
    strides_bytes: Sequence[int] | None = None,
    element_strides: Sequence[int] | None = None,
    interleave: str = "none",
    fill: str = "zero",
    dtype: str | None = None,
) -> bytes:
    """Encode a tiled tensor map over an array.

    Parameters
    ----------
    array
        NumPy array or torch CPU tensor, whose memory must be registered with the launch (as a parameter or under
        `allocations`).
    box
        Elements that one copy takes along each dimension, innermost first, 1 to 256 each.
    swizzle
        `"none"`, `"32B"`, `"64B"` or `"128B"`.
    dims
        Elements of the tensor, innermost first; by default the array's shape reversed.
    strides_bytes
        Bytes from one index to the next of dimensions 1 and up, multiples of 16; by default the array's own.
    element_strides
        Steps of the box along each dimension, 1 to 8; by default 1.
    interleave
        `"none"` only.
    fill
        What elements outside of the tensor read as: `"zero"` or `"nan"`.
    dtype
        `"u8" "u16" "u32" "s32" "u64" "s64" "f16" "f32" "f64" "bf16" "tf32"`; by default the array's.

    Returns
    -------
    bytes
        128 bytes for a `__grid_constant__ CUtensorMap` parameter.

    Raises
    ------
    ValueError
        What `cuTensorMapEncodeTiled` refuses, with the name of the argument.
    """
    if interleave != "none":
        raise ValueError(f"interleave: got {interleave!r}, takes 'none'")
    name = str(array.dtype).removeprefix("torch.") if dtype is None else dtype
    name = _ALIASES.get(name, name)
    if name not in _TYPES:
        raise ValueError(f"dtype: got {name!r}, takes one of {', '.join(_TYPES)}")
    shape = tuple(array.shape)[::-1] if dims is None else tuple(dims)
    if not 1 <= len(shape) <= 5:
        raise ValueError(f"dims: got a tensor of rank {len(shape)}, takes 1 to 5")
    if strides_bytes is None:
        steps = array.stride() if hasattr(array, "stride") else tuple(s // array.itemsize for s in array.strides)
        size = array.element_size() if hasattr(array, "element_size") else array.itemsize
        if steps[-1] != 1:
            raise ValueError(f"array: got an innermost stride of {steps[-1]} elements, takes 1")
        strides_bytes = [s * size for s in steps[::-1][1:]]
    element_strides = (1,) * len(shape) if element_strides is None else tuple(element_strides)
    for argument, value, length in (
        ("box", box, len(shape)),
        ("element_strides", element_strides, len(shape)),
        ("strides_bytes", strides_bytes, len(shape) - 1),
    ):
        if len(value) != length:
            raise ValueError(f"{argument}: got {len(value)} numbers, takes {length} for a tensor of rank {len(shape)}")
    address, _ = span_of(array)
    result = ctypes.create_string_buffer(128)
    library = native.library()
    library.cake_emu_tensor_map.restype = ctypes.c_void_p
    wrong = library.cake_emu_tensor_map(
        result,
        ctypes.c_uint32(_TYPES.index(name)),
        ctypes.c_uint32(len(shape)),
        ctypes.c_uint64(address),
        (ctypes.c_uint64 * 5)(*shape),
        (ctypes.c_uint64 * 5)(*strides_bytes),
        (ctypes.c_uint32 * 5)(*box),
        (ctypes.c_uint32 * 5)(*element_strides),
        ctypes.c_uint32(_one_of("swizzle", swizzle, _SWIZZLES)),
        ctypes.c_uint32(_one_of("fill", fill, _FILLS)),
    )
    if wrong:
        raise ValueError(native.take_text(ctypes.c_void_p(wrong)))
    return result.raw
