"""What a package has for a CUDA device: its module, found or built at the first call, and the device's error word."""

from __future__ import annotations

import ctypes
import functools
import threading
from typing import TYPE_CHECKING

import torch

from cake_shared.errors import MalformedPackError
from cake_shared.program import program_for, require_programs
from cake_shared.target import target_of

if TYPE_CHECKING:
    import tvm_ffi

    from cake_shared.gdn.cuda.rule import RuleBackend

# As enum PackFault of cake/gdn/params.h.
_FAULTS = {1: "its first offset is not 0", 2: "its offsets decrease", 4: "its last offset is beyond the token buffer"}


class ErrorWord:
    """One word of host memory in which kernels on one device report a malformed pack, read without waiting for them."""

    def __init__(self, tensor: torch.Tensor):
        self.tensor = tensor
        self._word = ctypes.c_int32.from_address(tensor.data_ptr())

    def raise_pending(self) -> None:
        """Raise what kernels have reported since the last time, once.

        Raises
        ------
        MalformedPackError
            An earlier call was given malformed `cu_seqlens`; what that call returned is NaN.
        """
        faults = self._word.value
        if faults:
            self._word.value = 0
            reasons = ", ".join(text for bit, text in _FAULTS.items() if faults & bit)
            raise MalformedPackError(
                f"cu_seqlens: an earlier call on this device got a malformed pack ({reasons}); its results are NaN"
            )


# The handle alone, without a Stream object.
_current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)

_error_words: dict[int, ErrorWord] = {}
_first_use = threading.Lock()


def error_word_of(device: torch.device) -> ErrorWord:
    """Return the error word of a CUDA device, made at its first use (which must not be inside a graph capture)."""
    index = torch.cuda.current_device() if device.index is None else device.index
    word = _error_words.get(index)
    if word is None:
        with _first_use:
            word = _error_words.get(index)
            if word is None:
                word = _error_words[index] = ErrorWord(torch.zeros(1, dtype=torch.int32, pin_memory=True))
    return word


class PackageOnCuda:
    """The CUDA side of one package that has the programs of the rule.

    Parameters
    ----------
    package
        Import name.
    """

    def __init__(self, package: str) -> None:
        self.package = package
        self._gate_modules: dict[int, tvm_ffi.Module] = {}
        self._backends: dict[int, RuleBackend] = {}

    def gate_module(self, device: torch.device) -> tvm_ffi.Module:
        """Return the module for a CUDA device with an index, where its architecture has the stages of the gates.

        Raises
        ------
        UnsupportedArchError
            The device's architecture has no program for these stages.
        BuildError
            Its module cannot be built.
        """
        module = self._gate_modules.get(device.index)
        if module is None:
            from cake_shared import jit

            architecture = target_of(device).name
            for stage in ("pack_offsets", "prologue"):
                program_for(self.package, stage, architecture)
            module = self._gate_modules[device.index] = jit.load(self.package, architecture)
        return module

    def rule_backend(self, device: torch.device) -> RuleBackend:
        """Return what runs the rule on a CUDA device: its module is found or built at the first call.

        Raises
        ------
        UnsupportedArchError
            The device's architecture lacks a program for a stage of the rule.
        BuildError
            Its module cannot be built.
        """
        index = torch.cuda.current_device() if device.index is None else device.index
        backend = self._backends.get(index)
        if backend is None:
            from cake_shared import jit
            from cake_shared.gdn.cuda.rule import RuleBackend, uses_native

            device = torch.device("cuda", index)
            architecture = target_of(device).name
            require_programs(self.package, architecture)
            module = jit.load(self.package, architecture)
            multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
            backend = self._backends[index] = RuleBackend(
                module,
                error_word_of(device),
                multiprocessors,
                functools.partial(_current_stream, index),
                uses_native(self.package, architecture),
            )
        return backend
