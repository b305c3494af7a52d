"""Deterministic Gated DeltaNet training kernels: a sequence's bits depend on the sequence alone."""

from cake_gdn_det_train._version import __version__
from cake_gdn_det_train.api import chunk_gated_delta_rule, chunk_gated_delta_rule_bwd, chunk_gated_delta_rule_fwd
from cake_shared.gdn.backward import Needs
from cake_shared.gdn.ops import Gradients, Saved

__all__ = [
    "Gradients",
    "Needs",
    "Saved",
    "__version__",
    "chunk_gated_delta_rule",
    "chunk_gated_delta_rule_bwd",
    "chunk_gated_delta_rule_fwd",
]
