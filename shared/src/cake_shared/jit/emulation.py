"""The Python side of `cake/host/emulator_abi.h`: hands the launches of an emulator host module to Python functions."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import tvm_ffi


class CakeLaunch(ctypes.Structure):
    """One launch, as `struct CakeLaunch` of `cake/host/emulator_abi.h`."""

    _fields_ = (
        ("grid", ctypes.c_uint32 * 3),
        ("block", ctypes.c_uint32 * 3),
        ("cluster", ctypes.c_uint32 * 3),
        ("smem_bytes", ctypes.c_uint32),
        ("programmatic", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
        ("stream", ctypes.c_int64),
        ("error_text", ctypes.c_void_p),
        ("error_text_bytes", ctypes.c_uint64),
    )


class CakeTensor(ctypes.Structure):
    """One tensor that passed the host's checks, as `struct CakeTensor` of `cake/host/emulator_abi.h`."""

    _fields_ = (
        ("name", ctypes.c_char_p),
        ("data", ctypes.c_void_p),
        ("bytes", ctypes.c_uint64),
        ("writable", ctypes.c_uint32),
        ("reserved", ctypes.c_uint32),
    )


LaunchCallback = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_char_p, ctypes.POINTER(CakeLaunch), ctypes.c_void_p, ctypes.c_size_t
)
TensorCallback = ctypes.CFUNCTYPE(None, ctypes.POINTER(CakeTensor))

OnLaunch = Callable[[str, CakeLaunch, bytes], None]
OnTensor = Callable[[str, int, int, int], None]

# C code holds bare pointers to these: they live as long as the module that they are installed in.
_installed: dict[int, tuple] = {}


def install_emulator(module: tvm_ffi.Module, on_launch: OnLaunch | None, on_tensor: OnTensor | None = None) -> None:
    """Send the launches of a module of `build_host_for_emulator` to Python.

    Parameters
    ----------
    module
        The host module.
    on_launch
        Called with the kernel's name, the launch and the bytes of its parameter struct, whose pointers are addresses of
        this process. What it raises comes out of the host function as a RuntimeError with the same text. None removes
        both callbacks.
    on_tensor
        Called with name, lowest address, bytes and 0 for an input, 1 for an output, 2 for an output that kernels also
        read, for every tensor that passed the host's checks, before the launches of that call. It must not raise.
    """
    if on_launch is None:
        module["cake_set_emulator_callbacks"](None, None)
        _installed.pop(id(module), None)
        return

    def launched(kernel, launch, params, params_bytes):
        try:
            on_launch(kernel.decode(), launch.contents, ctypes.string_at(params, params_bytes))
        except Exception as error:  # crosses C frames as text
            text = f"{type(error).__name__}: {error}".encode()[: launch.contents.error_text_bytes - 1]
            ctypes.memmove(launch.contents.error_text, text + b"\0", len(text) + 1)
            return 1
        return 0

    def told(tensor):
        if on_tensor is not None:
            it = tensor.contents
            on_tensor(it.name.decode(), it.data or 0, it.bytes, int(it.writable))

    callbacks = (LaunchCallback(launched), TensorCallback(told))
    addresses = [ctypes.cast(callback, ctypes.c_void_p) for callback in callbacks]
    module["cake_set_emulator_callbacks"](*addresses)
    _installed[id(module)] = (module, *callbacks)
