"""Projection and router GEMMs of a training step, split-K and stream-K form."""

from dense_projection_gemm._version import __version__
from dense_projection_gemm.api import (
    dense_projection_gemm,
    prepare_backward,
    prepare_dgrad,
    prepare_forward,
    prepare_gemm,
    prepare_router_dgrad,
    prepare_router_forward,
    prepare_router_wgrad,
    prepare_wgrad,
    projection_backward,
    projection_dgrad,
    projection_forward,
    projection_wgrad,
    router_dgrad,
    router_forward,
    router_wgrad,
)
from dense_projection_gemm.modules import DenseProjection, RouterGate

__all__ = [
    "DenseProjection",
    "RouterGate",
    "__version__",
    "dense_projection_gemm",
    "prepare_backward",
    "prepare_dgrad",
    "prepare_forward",
    "prepare_gemm",
    "prepare_router_dgrad",
    "prepare_router_forward",
    "prepare_router_wgrad",
    "prepare_wgrad",
    "projection_backward",
    "projection_dgrad",
    "projection_forward",
    "projection_wgrad",
    "router_dgrad",
    "router_forward",
    "router_wgrad",
]
