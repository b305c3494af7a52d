"""The CUDA side of a call: allocates what the plan states, fetches the module, makes one call into it."""

from __future__ import annotations

import ctypes
import threading
from typing import TYPE_CHECKING, NamedTuple

import torch

from cake_gdn_det_train.tables import TablePlan, plan_tables
from cake_shared.errors import MalformedPackError
from cake_shared.plan import CHUNK_TOKENS
from cake_shared.program import program_for, require_programs
from cake_shared.target import target_of

if TYPE_CHECKING:
    import tvm_ffi

    from cake_gdn_det_train.cuda_rule import RuleBackend

PACKAGE = "cake_gdn_det_train"

# As enum PackFault of csrc/params.h.
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


_error_words: dict[int, ErrorWord] = {}
_modules: dict[int, tvm_ffi.Module] = {}
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


def _module_of(device: torch.device) -> tvm_ffi.Module:
    """The module for a CUDA device with an index; what it needs is looked up once a device, not once a call."""
    module = _modules.get(device.index)
    if module is None:
        from cake_shared import jit

        architecture = target_of(device).name
        for stage in ("pack_offsets", "pack_tables", "gate_sums"):
            program_for(PACKAGE, stage, architecture)
        module = _modules[device.index] = jit.load(PACKAGE, architecture)
    return module


class GateStage(NamedTuple):
    """What the gate stage wrote: see `TablePlan` for the tables and `cake_shared.gdn.gate_reference` for the sums."""

    plan: TablePlan
    tables: torch.Tensor
    sums: torch.Tensor


def gate_sums(g: torch.Tensor, cu_seqlens: torch.Tensor | None = None) -> GateStage:
    """Make the tables of a pack and the cumulative gates of its chunks on the device, without waiting for anything.

    Parameters
    ----------
    g
        Gates `[B, T, HV]`, FP32 or BF16, any strides, on a CUDA device.
    cu_seqlens
        int32 or int64 `[N + 1]` on the same device, for B = 1; None: every row of the batch is a sequence.

    Raises
    ------
    UnsupportedArchError
        The device's architecture has no program for these stages.
    BuildError
        Its module cannot be built.
    MalformedPackError
        An earlier call on the device was given malformed offsets.
    ValueError, TypeError
        An argument has another device, dtype or shape than stated.
    """
    device = g.device
    if device.type != "cuda":
        raise ValueError(f"g: got a tensor on {device}, takes one on a CUDA device")
    module = _module_of(device)
    error_word = error_word_of(device)
    error_word.raise_pending()
    return launch_gate_sums(module, g, cu_seqlens, error_word, torch.cuda.current_stream(device).cuda_stream)


def launch_gate_sums(
    module: tvm_ffi.Module, g: torch.Tensor, cu_seqlens: torch.Tensor | None, error_word: ErrorWord, stream: int
) -> GateStage:
    """Allocate for the gate stage and launch it through a module: a CUDA one, or a host module of the emulator."""
    if g.dim() != 3:
        raise ValueError(f"g: got shape {list(g.shape)}, takes [B, T, HV]")
    if cu_seqlens is not None and (cu_seqlens.dim() != 1 or cu_seqlens.numel() < 1):
        raise ValueError(f"cu_seqlens: got shape {list(cu_seqlens.shape)}, takes [N + 1]")
    batch, tokens, heads = g.shape
    plan = plan_tables(batch, tokens, None if cu_seqlens is None else cu_seqlens.numel() - 1)
    tables = torch.empty(plan.words, dtype=torch.int32, device=g.device)
    sums = torch.empty(plan.chunk_capacity, heads, CHUNK_TOKENS, dtype=torch.float32, device=g.device)
    module.gate_sums(g, cu_seqlens, tables, sums, error_word.tensor, stream)
    return GateStage(plan, tables, sums)


_backends: dict[int, RuleBackend] = {}


def rule_backend(device: torch.device) -> RuleBackend:
    """Return what runs the rule on a CUDA device: its module is found or built at the first call.

    Raises
    ------
    UnsupportedArchError
        The device's architecture lacks a program for a stage of the rule.
    BuildError
        Its module cannot be built.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    backend = _backends.get(index)
    if backend is None:
        from cake_gdn_det_train.cuda_rule import RuleBackend
        from cake_shared import jit

        device = torch.device("cuda", index)
        architecture = target_of(device).name
        require_programs(PACKAGE, architecture)
        module = jit.load(PACKAGE, architecture)
        multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        backend = _backends[index] = RuleBackend(
            module, error_word_of(device), multiprocessors, lambda: torch.cuda.current_stream(index).cuda_stream
        )
    return backend
