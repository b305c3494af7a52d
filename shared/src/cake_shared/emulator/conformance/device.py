"""Runs a Case on a GPU through the CUDA driver: the driver assembles the same PTX text that the emulator executes."""

from __future__ import annotations

import ctypes

import numpy as np

from cake_shared.emulator.conformance.model import Case, Launch, MapArg, Ptr, Struct

_CLUSTER_DIMENSION = 4
_PROGRAMMATIC_STREAM_SERIALIZATION = 6
_MAX_DYNAMIC_SHARED_BYTES = 8
_DATA_TYPES = {
    "u8": 0, "u16": 1, "u32": 2, "s32": 3, "u64": 4, "s64": 5, "f16": 6, "f32": 7, "f64": 8, "bf16": 9, "tf32": 11,
}  # fmt: skip
_SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}


class DriverError(RuntimeError):
    """A CUDA driver call failed; the message names the call and the driver's own name for the error."""


class _LaunchAttribute(ctypes.Structure):
    _fields_ = [("id", ctypes.c_uint32), ("pad", ctypes.c_uint32), ("value", ctypes.c_uint32 * 16)]


class _LaunchConfig(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("shared_bytes", ctypes.c_uint32),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_LaunchAttribute)),
        ("attribute_count", ctypes.c_uint32),
    ]


class Device:
    """The first GPU of the machine, its primary context current on the calling thread."""

    def __init__(self) -> None:
        try:
            self._cuda = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise DriverError(f"no CUDA driver on this machine: {error}") from None
        self.call("cuInit", 0)
        self._device = ctypes.c_int()
        self.call("cuDeviceGet", ctypes.byref(self._device), 0)
        self._context = ctypes.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), self._device)
        self.call("cuCtxSetCurrent", self._context)

    def call(self, name: str, *args: object) -> None:
        """Call a driver function; raise DriverError unless it returns success."""
        status = getattr(self._cuda, name)(*args)
        if status:
            text = ctypes.c_char_p()
            self._cuda.cuGetErrorName(status, ctypes.byref(text))
            raise DriverError(f"{name}: {text.value.decode() if text.value else status}")

    def describe(self) -> dict:
        """Name, compute capability, multiprocessors and driver version of the device."""
        name = ctypes.create_string_buffer(256)
        self.call("cuDeviceGetName", name, 256, self._device)
        values = {}
        for key, attribute in (("multiprocessors", 16), ("major", 75), ("minor", 76)):
            value = ctypes.c_int()
            self.call("cuDeviceGetAttribute", ctypes.byref(value), attribute, self._device)
            values[key] = value.value
        version = ctypes.c_int()
        self.call("cuDriverGetVersion", ctypes.byref(version))
        return {
            "gpu": name.value.decode(),
            "compute_capability": f"{values['major']}.{values['minor']}",
            "multiprocessors": values["multiprocessors"],
            "cuda_driver": f"{version.value // 1000}.{version.value % 1000 // 10}",
        }

    def run_case(self, case: Case) -> dict[str, np.ndarray]:
        """Run every launch of ``case`` in order; returns ``{buffer name: contents as uint8}``."""
        modules = {unit: self._load(text) for unit, text in case.units().items()}
        addresses, sizes = {}, {}
        for key, value in case.buffers.items():
            source = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
            address = ctypes.c_uint64()
            self.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(max(source.size, 1)))
            self.call("cuMemcpyHtoD_v2", address, ctypes.c_void_p(source.ctypes.data), ctypes.c_size_t(source.size))
            addresses[key], sizes[key] = address, source.size
        following = [launch.programmatic for launch in case.launches[1:]] + [False]
        for launch, overlapped in zip(case.launches, following, strict=True):
            self._launch(modules[launch.unit], launch, addresses)
            if not overlapped:
                try:
                    self.call("cuCtxSynchronize")
                except DriverError as error:
                    raise DriverError(f"{error} after {launch}") from None
        result = {}
        for key, address in addresses.items():
            result[key] = np.empty(sizes[key], np.uint8)
            self.call("cuMemcpyDtoH_v2", ctypes.c_void_p(result[key].ctypes.data), address, ctypes.c_size_t(sizes[key]))
            self.call("cuMemFree_v2", address)
        for module in modules.values():
            self.call("cuModuleUnload", module)
        return result

    def _load(self, ptx: str) -> ctypes.c_void_p:
        module = ctypes.c_void_p()
        log = ctypes.create_string_buffer(16384)
        options = (ctypes.c_uint32 * 2)(5, 6)  # CU_JIT_ERROR_LOG_BUFFER and its size in bytes
        values = (ctypes.c_void_p * 2)(ctypes.cast(log, ctypes.c_void_p), len(log))
        try:
            self.call("cuModuleLoadDataEx", ctypes.byref(module), ptx.encode(), 2, options, values)
        except DriverError as error:
            raise DriverError(f"{error}\n{log.value.decode(errors='replace')}") from None
        return module

    def _launch(self, module: ctypes.c_void_p, launch: Launch, addresses: dict[str, ctypes.c_uint64]) -> None:
        function = ctypes.c_void_p()
        self.call("cuModuleGetFunction", ctypes.byref(function), module, launch.kernel.encode())
        if launch.shared_bytes > 48 * 1024:
            self.call("cuFuncSetAttribute", function, _MAX_DYNAMIC_SHARED_BYTES, launch.shared_bytes)
        values = [self._argument(arg, addresses) for arg in launch.args]
        pointers = (ctypes.c_void_p * max(len(values), 1))(*[ctypes.addressof(value) for value in values])
        attributes = (_LaunchAttribute * 2)()
        count = 0
        if launch.cluster != (1, 1, 1):
            attributes[count].id = _CLUSTER_DIMENSION
            attributes[count].value[0:3] = launch.cluster
            count += 1
        if launch.programmatic:
            attributes[count].id = _PROGRAMMATIC_STREAM_SERIALIZATION
            attributes[count].value[0] = 1
            count += 1
        config = _LaunchConfig(
            (ctypes.c_uint32 * 3)(*launch.grid),
            (ctypes.c_uint32 * 3)(*launch.block),
            launch.shared_bytes,
            None,
            attributes,
            count,
        )
        self.call("cuLaunchKernelEx", ctypes.byref(config), function, pointers, None)

    def _argument(self, arg: object, addresses: dict[str, ctypes.c_uint64]) -> object:
        if isinstance(arg, Ptr):
            return ctypes.c_uint64(addresses[arg.buffer].value + arg.offset_bytes)
        if isinstance(arg, MapArg):
            return self._tensor_map(arg, addresses[arg.buffer].value + arg.offset_bytes)
        if isinstance(arg, Struct):
            places = {name: address.value for name, address in addresses.items()}
            arg = arg.placed(places, lambda m: bytes(self._tensor_map(m, places[m.buffer] + m.offset_bytes)))
        data = arg if isinstance(arg, bytes) else np.asarray(arg).tobytes()
        return (ctypes.c_uint8 * len(data)).from_buffer_copy(data)

    def _tensor_map(self, arg: MapArg, address: int) -> object:
        raw = (ctypes.c_uint8 * 256)()
        result = (ctypes.c_uint8 * 128).from_buffer(raw, -ctypes.addressof(raw) % 128)
        rank = len(arg.dims)
        self.call(
            "cuTensorMapEncodeTiled",
            result,
            _DATA_TYPES[arg.dtype],
            rank,
            ctypes.c_void_p(address),
            (ctypes.c_uint64 * rank)(*arg.dims),
            (ctypes.c_uint64 * max(rank - 1, 1))(*arg.strides_bytes),
            (ctypes.c_uint32 * rank)(*arg.box),
            (ctypes.c_uint32 * rank)(*(arg.element_strides or (1,) * rank)),
            0,
            _SWIZZLES[arg.swizzle_bytes],
            0,
            1 if arg.fill_nan else 0,
        )
        return result
