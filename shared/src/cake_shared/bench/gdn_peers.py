"""The peers of the gated delta rule on a GPU, each with the signature of `chunk_gated_delta_rule`."""

import os
from collections.abc import Callable
from dataclasses import dataclass

import torch

from cake_shared.bench.environment import version_of


@dataclass(frozen=True)
class GdnArm:
    """One implementation to measure.

    Attributes
    ----------
    name : str
        As tables show it.
    rule : callable
        `rule(q, k, v, g, beta, scale, *, initial_state, output_final_state, cu_seqlens)`.
    offsets_dtype : torch.dtype
        Of the `cu_seqlens` it takes.
    version : str
        Of its distribution.
    sparing : bool
        Time it in graph replay with FP32 beta only: enough for a twin of the same programs.
    """

    name: str
    rule: Callable
    offsets_dtype: torch.dtype = torch.int64
    version: str = ""
    sparing: bool = False


def fla() -> GdnArm:
    """Flash Linear Attention's own kernels; raises `ImportError` where it is not installed."""
    # Otherwise it hands the call to FlashQLA where that is installed.
    os.environ.setdefault("FLA_FLASH_QLA", "0")
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    def rule(q, k, v, g, beta, scale=None, *, initial_state=None, output_final_state=False, cu_seqlens=None):
        return chunk_gated_delta_rule(
            q, k, v, g, beta, scale=scale, initial_state=initial_state, output_final_state=output_final_state,
            cu_seqlens=cu_seqlens,
        )  # fmt: skip

    return GdnArm("FLA", rule, torch.int64, version_of("fla-core"))


def flash_qla() -> GdnArm:
    """FlashQLA; raises `ImportError` where it is not installed, whatever its own import raises on other GPUs."""
    from flash_qla import chunk_gated_delta_rule

    def rule(q, k, v, g, beta, scale=None, *, initial_state=None, output_final_state=False, cu_seqlens=None):
        return chunk_gated_delta_rule(
            q, k, v, g, beta, scale=scale, initial_state=initial_state, output_final_state=output_final_state,
            cu_seqlens=cu_seqlens,
        )  # fmt: skip

    return GdnArm("FlashQLA", rule, torch.int32, version_of("flash-qla"))


PEERS = {"FLA": fla, "FlashQLA": flash_qla}


def installed_peers(names: tuple[str, ...] = tuple(PEERS)) -> tuple[list[GdnArm], list[str]]:
    """The peers that can be imported here, and a sentence for each that cannot."""
    found, missing = [], []
    for name in names:
        try:
            found.append(PEERS[name]())
        except Exception as problem:  # an import may raise anything: what it says goes into the result
            missing.append(f"{name} is not measured: {type(problem).__name__}: {' '.join(str(problem).split())[:200]}")
    return found, missing
