"""The gate stage alone: tables of a pack and cumulative gates."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from cake_shared.gdn.cuda.devices import ErrorWord, PackageOnCuda, error_word_of
from cake_shared.gdn.cuda.tables import TablePlan, plan_tables
from cake_shared.plan import CHUNK_TOKENS

if TYPE_CHECKING:
    import tvm_ffi


class GateStage(NamedTuple):
    """What the gate stage wrote: see `TablePlan` for the tables and `cake_shared.gdn.gate_reference` for the sums."""

    plan: TablePlan
    tables: torch.Tensor
    sums: torch.Tensor


def gate_sums(package: PackageOnCuda, g: torch.Tensor, cu_seqlens: torch.Tensor | None = None) -> GateStage:
    """Make the tables of a pack and the cumulative gates of its chunks on the device, without waiting for anything.

    Parameters
    ----------
    package
        Whose programs run.
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
    module = package.gate_module(device)
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
