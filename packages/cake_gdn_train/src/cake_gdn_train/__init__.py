"""Gated DeltaNet training kernels, the non-deterministic twin of cake-gdn-det-train."""

from cake_gdn_train._version import __version__

__all__ = ["__version__"]
