"""The CUDA backend: which program serves a problem on the tensors' device, its workspace, one call into the module."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from cake_shared.gemm.scratch import scratch
from dense_projection_det_gemm.cuda_plan import NATIVE, CudaGemmPlan, plan_gemm_cuda

if TYPE_CHECKING:
    from collections.abc import Callable

    import tvm_ffi

PACKAGE = "dense_projection_det_gemm"


def records_of(architecture: str):
    """Return the records of the GEMM's stages, in the order of `NATIVE`, then that of the sum.

    Raises
    ------
    UnsupportedArchError
        A stage has no program on the architecture.
    """
    # Here, so that importing the package does not parse what only a GPU needs.
    from cake_shared.program import program_for

    return [program_for(PACKAGE, stage, architecture) for stage in (*NATIVE, "summed_out")]


class GemmBackend:
    """Runs the BF16 GEMM through a module: that of a CUDA device, or a host module of the emulator.

    Attributes
    ----------
    module
        With `prepare_gemm`.
    architecture
        Whose records say which programs the module has.
    multiprocessors
        How many the launches count on; no bit depends on it.
    stream
        Returns the handle of the stream to launch on.
    """

    def __init__(
        self,
        module: tvm_ffi.Module,
        architecture: str,
        multiprocessors: int,
        stream: Callable[[], int],
    ):
        self.module = module
        self.architecture = architecture
        self.native = records_of(architecture)[0].kind == "native"
        self.multiprocessors = multiprocessors
        self.stream = stream
        self._prepare = module.prepare_gemm

    def prepare(
        self,
        stage: str,
        problem,
        a: torch.Tensor,
        b: torch.Tensor,
        out: torch.Tensor,
        plan=None,
    ):
        """Return the plan of a problem, `plan` where given, and a callable that runs it.

        Parameters
        ----------
        stage
            "gemm_out" with a `GemmProblem` on `[L, M, K]`, `[L, K, N]`, `[L, M, N]` tensors, or "router_out" with a
            `RouterProblem`.
        """
        if stage == "router_out":
            return self.router.prepare(problem, a, b, out)
        plan = plan or plan_gemm_cuda(problem, self.native)
        if out.numel() == 0 or (problem.k == 0 and problem.accumulate):
            return plan, _nothing
        return plan, self._launch_of(plan, a, b, out)

    def launcher(self, stage: str, problem) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]:
        """Return what launches many calls `(a, b, out)` of one problem that is not empty; `stage` as in `prepare`."""
        if stage == "router_out":
            return self.router.launcher(problem)
        plan = plan_gemm_cuda(problem, self.native)
        if plan.swapped:
            return lambda a, b, out: self._launch_of(plan, a, b, out)()
        size_bytes, choices = plan.workspace_bytes, _choices(plan, problem.a_major, problem.b_major)
        run, stream = self.module.run_gemm, self.stream

        def launch(a, b, out):
            workspace = scratch(size_bytes, out.device) if size_bytes else None
            run(a, b, out, workspace, *choices, self.multiprocessors, stream())

        return launch

    @functools.cached_property
    def router(self):
        """What runs the router's products through the same module."""
        from dense_projection_det_gemm.cuda_router import RouterBackend

        return RouterBackend(self)

    def _launch_of(self, plan: CudaGemmPlan, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> Callable[[], None]:
        problem = plan.problem
        a_major, b_major = problem.a_major, problem.b_major
        if plan.swapped:
            a, b, out = b.transpose(1, 2), a.transpose(1, 2), out.transpose(1, 2)
            a_major, b_major = b_major, a_major
        workspace = scratch(plan.workspace_bytes, out.device) if plan.workspace_bytes else None
        choices = _choices(plan, a_major, b_major)
        launch = self._prepare(a, b, out, workspace, *choices, self.multiprocessors)
        return _Launch(launch, self.stream, (a, b, out, workspace))


def _choices(plan: CudaGemmPlan, a_major: str, b_major: str) -> tuple:
    """What the module is told of a plan, after the tensors and before the multiprocessors."""
    return (
        plan.tile.number,
        a_major == "k",
        b_major == "k",
        plan.problem.accumulate,
        plan.cut.whole_units,
        plan.cut.pieces,
        plan.cut.piece_blocks,
        plan.cut.halved,
        plan.group_rows,
    )


class _Launch:
    """Launches on the current stream; holds what the launch reads and writes."""

    __slots__ = ("_held", "_launch", "_stream")

    def __init__(self, launch, stream, held):
        self._launch, self._stream, self._held = launch, stream, held

    def __call__(self):
        self._launch(self._stream())


def _nothing() -> None:
    """Launch nothing: there is nothing to write."""


_backends: dict[int, GemmBackend] = {}


def gemm_backend(device: torch.device) -> GemmBackend:
    """Return what runs the GEMM on a CUDA device: its module is found or built at the first call.

    Raises
    ------
    UnsupportedArchError
        The device's architecture lacks a program for a stage.
    BuildError
        Its module cannot be built.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    backend = _backends.get(index)
    if backend is None:
        from cake_shared import jit
        from cake_shared.target import target_of

        device = torch.device("cuda", index)
        architecture = target_of(device).name
        records_of(architecture)  # raises before anything is built
        multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        backend = _backends[index] = GemmBackend(
            jit.load(PACKAGE, architecture),
            architecture,
            multiprocessors,
            lambda: torch._C._cuda_getCurrentRawStream(index),
        )
    return backend


def prepare(stage, problem, a, b, out):
    """The plan of a problem on CUDA tensors, and a callable that runs it.

    Raises
    ------
    UnsupportedArchError
        No program serves `stage` on the device's architecture.
    BuildError
        The module cannot be built.
    """
    return gemm_backend(out.device).prepare(stage, problem, a, b, out)


def launcher(stage, problem, out):
    """What launches calls `(a, b, out)` of a problem that `prepare` has served before, looking nothing up."""
    return gemm_backend(out.device).launcher(stage, problem)
