"""The router's products on a CUDA device: workspace, one call into the module, a launch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dense_projection_det_gemm.cuda_router_plan import PROGRAMS, CudaRouterPlan, plan_router_cuda

if TYPE_CHECKING:
    from collections.abc import Callable

    from cake_shared.gemm.problem import RouterProblem
    from dense_projection_det_gemm.cuda import GemmBackend

STAGES = ("router_terms", *PROGRAMS, "router_special")


class RouterBackend:
    """Runs the router's products through the module of a `GemmBackend`, counting with its multiprocessors."""

    def __init__(self, backend: GemmBackend):
        from cake_shared.program import program_for

        records = [program_for("dense_projection_det_gemm", stage, backend.architecture) for stage in STAGES]
        self._backend = backend
        self._prepare = backend.module["prepare_router"]
        self.native = records[1].kind == "native"

    def prepare(
        self,
        problem: RouterProblem,
        a: torch.Tensor,
        b: torch.Tensor,
        out: torch.Tensor,
        plan: CudaRouterPlan | None = None,
    ) -> tuple[CudaRouterPlan, Callable[[], object]]:
        """Return the plan of `out = a @ b`, `plan` where given, and a callable that runs it.

        Parameters
        ----------
        problem
            What is computed, on `[M, K]`, `[K, N]` FP32 or BF16 and `[M, N]` FP32 tensors.

        Raises
        ------
        UnsupportedArchError
            A stage has no program on the architecture (at the first use of `GemmBackend.router`).
        """
        multiprocessors = self._backend.multiprocessors
        plan = plan or plan_router_cuda(problem, multiprocessors, self.native)
        if out.numel() == 0:
            return plan, lambda: None
        if problem.k == 0:
            return plan, out.zero_
        p, q, d = (b.t(), a, out.t()) if plan.streamed == "b" else (a, b.t(), out)
        p_depth_major = (problem.b_major if plan.streamed == "b" else problem.a_major) == "k"
        q_depth_major = (problem.a_major if plan.streamed == "b" else problem.b_major) == "k"
        workspace = torch.empty(plan.workspace_bytes, dtype=torch.uint8, device=out.device)
        launch = self._prepare(
            p,
            q,
            d,
            workspace,
            PROGRAMS[plan.stage] if self.native else 0,
            p_depth_major,
            q_depth_major,
            plan.blocks,
            plan.part_steps,
            plan.units,
            plan.units_per_tile,
            multiprocessors,
        )
        stream, held = self._backend.stream, (p, q, d, workspace)

        def run(held: tuple = held) -> None:
            launch(stream())

        return plan, run
