"""Runs a Case in the emulator."""

from __future__ import annotations

import numpy as np

from cake_shared.emulator.conformance.model import Case, MapArg, Ptr, Struct


def run_case(
    case: Case,
    *,
    target: str = "sm_90a",
    options: object | None = None,
    name: str = "case.ptx",
    reports: list | None = None,
) -> dict:
    """Run every launch of ``case`` in order in the emulator; ``reports`` takes the report of each.

    Returns ``{buffer name: contents as uint8}`` after the last launch. Raises whatever the emulator's detectors raise.
    """
    from cake_shared.emulator import Module, Options, Stream, tensor_map

    modules = {unit: Module.from_ptx(text, target=target, name=name) for unit, text in case.units().items()}
    data = {key: _aligned_copy(value) for key, value in case.buffers.items()}
    stream = Stream(options if options is not None else Options())

    def encoded(arg: MapArg) -> bytes:
        return tensor_map(
            data[arg.buffer][arg.offset_bytes :],
            arg.box,
            swizzle="none" if not arg.swizzle_bytes else f"{arg.swizzle_bytes}B",
            dims=arg.dims,
            strides_bytes=arg.strides_bytes,
            element_strides=arg.element_strides,
            fill="nan" if arg.fill_nan else "zero",
            dtype=arg.dtype,
        )

    for launch in case.launches:
        module = modules[launch.unit]
        params, allocations = [], []
        for arg in launch.args:
            if isinstance(arg, Ptr):
                view = data[arg.buffer][arg.offset_bytes :]
                params.append(module.const(view) if arg.const else view)
            elif isinstance(arg, MapArg):
                params.append(encoded(arg))
                allocations.append(data[arg.buffer][arg.offset_bytes :])
            elif isinstance(arg, Struct):
                params.append(arg.placed({key: value.ctypes.data for key, value in data.items()}, encoded))
                used = {buffer for _, buffer, _ in arg.pointers} | {m.buffer for _, m in arg.maps}
                allocations += [data[buffer] for buffer in sorted(used)]
            else:
                params.append(arg)
        stream.launch(
            module,
            launch.kernel,
            grid=launch.grid,
            block=launch.block,
            cluster=launch.cluster,
            smem_bytes=launch.shared_bytes,
            params=params,
            allocations=allocations,
            programmatic=launch.programmatic,
        )
    stream.synchronize()
    if reports is not None:
        reports += stream.reports
    return data


def _aligned_copy(array: np.ndarray) -> np.ndarray:
    """A uint8 copy at a 256-byte boundary, as the driver's allocations are."""
    source = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    raw = np.empty(source.size + 256, np.uint8)
    start = -raw.ctypes.data % 256
    copy = raw[start : start + source.size]
    copy[:] = source
    return copy
