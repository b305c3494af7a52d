"""Deterministic Gated DeltaNet training kernels: a sequence's bits depend on the sequence alone."""

from cake_gdn_det_train._version import __version__

__all__ = ["__version__"]
