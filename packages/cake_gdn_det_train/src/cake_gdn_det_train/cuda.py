"""The CUDA side of this package: the rule's programs of `cake_shared.gdn.cuda` under this package's records."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cake_shared.gdn.cuda import gate
from cake_shared.gdn.cuda.devices import ErrorWord, PackageOnCuda, error_word_of
from cake_shared.gdn.cuda.gate import GateStage, launch_gate_sums

if TYPE_CHECKING:
    import torch

__all__ = ["PACKAGE", "ErrorWord", "GateStage", "error_word_of", "gate_sums", "launch_gate_sums", "rule_backend"]

PACKAGE = "cake_gdn_det_train"

_on_cuda = PackageOnCuda(PACKAGE)
rule_backend = _on_cuda.rule_backend


def gate_sums(g: torch.Tensor, cu_seqlens: torch.Tensor | None = None) -> GateStage:
    """Make the tables of a pack and the cumulative gates of its chunks; see `cake_shared.gdn.cuda.gate.gate_sums`."""
    return gate.gate_sums(_on_cuda, g, cu_seqlens)
