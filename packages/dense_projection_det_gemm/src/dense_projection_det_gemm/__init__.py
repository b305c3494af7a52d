"""Deterministic projection and router GEMMs of a training step."""

from dense_projection_det_gemm._version import __version__

__all__ = ["__version__"]
