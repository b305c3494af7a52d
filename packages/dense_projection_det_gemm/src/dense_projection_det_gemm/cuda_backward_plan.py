"""Two GemmProblems of one g -> CudaBackwardPlan: how the gradients of a projection share a device. Pure and printable.

No bit depends on it: each product has the plan that it has alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from dense_projection_det_gemm.cuda_plan import CudaGemmPlan, plan_gemm_cuda

if TYPE_CHECKING:
    from cake_shared.gemm.problem import GemmProblem

# With so few columns of g dgrad does nothing but write dx, and comes second: its stores fill the end of wgrad's reads.
STREAMED_COLUMNS = 64


@dataclass(frozen=True)
class CudaBackwardPlan:
    """How both gradients are computed.

    Attributes
    ----------
    dgrad, wgrad
        The plans of the products.
    beside
        They run side by side: the second starts on what multiprocessors the first does not use, or no longer. Else one
        after the other.
    dgrad_first
        Which of them is launched first.
    """

    dgrad: CudaGemmPlan
    wgrad: CudaGemmPlan
    beside: bool
    dgrad_first: bool


@lru_cache(maxsize=1024)
def plan_backward_cuda(dgrad: GemmProblem, wgrad: GemmProblem, native: bool = True) -> CudaBackwardPlan:
    """Return the plan of the two problems of a projection's backward."""
    plans = plan_gemm_cuda(dgrad, native), plan_gemm_cuda(wgrad, native)
    return CudaBackwardPlan(*plans, beside=native, dgrad_first=dgrad.k > STREAMED_COLUMNS)
