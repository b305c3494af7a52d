"""Context-parallel Gated DeltaNet training kernels: ranks pass chunk states."""

from cake_gdn_train_kcp._version import __version__

__all__ = ["__version__"]
