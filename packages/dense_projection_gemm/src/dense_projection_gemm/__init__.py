"""Projection and router GEMMs of a training step, split-K and stream-K form."""

from dense_projection_gemm._version import __version__

__all__ = ["__version__"]
