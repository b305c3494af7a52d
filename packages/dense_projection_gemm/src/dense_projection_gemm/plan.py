"""Problem -> Plan of the non-deterministic form.

This package plans by the machine where a measurement shows that it pays. On the CPU none does: the form
`deterministic=False` runs the deterministic package's program under its own plan, and the plan's `program` says so.
"""

from dataclasses import replace
from functools import lru_cache

import dense_projection_det_gemm.plan as det

GemmPlan, RouterPlan = det.GemmPlan, det.RouterPlan


@lru_cache(maxsize=1024)
def plan_gemm(problem):
    """The plan of a `GemmProblem`; `program` names the deterministic program that it runs."""
    return _same_program(det.plan_gemm(problem))


@lru_cache(maxsize=1024)
def plan_router(problem):
    """The plan of a `RouterProblem`; `program` names the deterministic program that it runs."""
    return _same_program(det.plan_router(problem))


def _same_program(plan):
    return replace(plan, program=f"dense_projection_det_gemm.{plan.program}")
