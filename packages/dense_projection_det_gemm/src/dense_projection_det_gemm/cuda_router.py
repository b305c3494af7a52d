"""The router's products on a CUDA device: workspace, one call into the module, a launch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cake_shared.gemm.scratch import scratch
from dense_projection_det_gemm.cuda_router_plan import PROGRAMS, CudaRouterPlan, plan_router_cuda

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

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
        self._run = backend.module["run_router"]
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
        plan = plan or self.plan(problem)
        if out.numel() == 0:
            return plan, lambda: None
        if problem.k == 0:
            return plan, out.zero_
        operands = self._operands(plan, a, b, out)
        launch = self._prepare(*operands, *self._choices(plan), self._backend.multiprocessors)
        stream = self._backend.stream

        def run(held: tuple = operands) -> None:
            launch(stream())

        return plan, run

    def launcher(self, problem: RouterProblem) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]:
        """Return what launches many calls `(a, b, out)` of one problem that is not empty."""
        plan = self.plan(problem)
        if problem.k == 0:
            return lambda a, b, out: out.zero_()
        choices = self._choices(plan)

        def run(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> None:
            backend = self._backend
            self._run(*self._operands(plan, a, b, out), *choices, backend.multiprocessors, backend.stream())

        return run

    def plan(self, problem: RouterProblem) -> CudaRouterPlan:
        """Return the plan of a problem."""
        return plan_router_cuda(problem, self._backend.multiprocessors, self.native)

    def _operands(
        self, plan: CudaRouterPlan, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """P, Q and D of the product, and a workspace."""
        workspace = scratch(plan.workspace_bytes, out.device)
        return (b.t(), a, out.t(), workspace) if plan.streamed == "b" else (a, b.t(), out, workspace)

    def _choices(self, plan: CudaRouterPlan) -> tuple:
        """What the module is told of a plan, after the tensors and before the multiprocessors."""
        majors = plan.problem.a_major == "k", plan.problem.b_major == "k"
        program = PROGRAMS[plan.stage] if self.native else 0
        p_depth_major, q_depth_major = reversed(majors) if plan.streamed == "b" else majors
        return program, p_depth_major, q_depth_major, plan.blocks, plan.part_steps, plan.units, plan.units_per_tile
