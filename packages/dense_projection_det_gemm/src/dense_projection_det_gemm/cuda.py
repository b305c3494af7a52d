"""The CUDA backend: which program serves a problem on the tensors' device, its workspace, one call into the module."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from cake_shared.gemm.scratch import scratch
from dense_projection_det_gemm.cuda_backward_plan import CudaBackwardPlan, plan_backward_cuda
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
        With `prepare_gemm`, `prepare_pair`, and `run_` instead of `prepare_` for single launches.
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
        if not _writes(problem):
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

    def prepare_backward(self, dgrad, wgrad, plan: CudaBackwardPlan | None = None):
        """Return the plan of a projection's two gradients, `plan` where given, and a callable that runs them.

        Parameters
        ----------
        dgrad, wgrad
            A `GemmProblem`, then a, b and out as in `prepare`.
        """
        plan = plan or plan_backward_cuda(dgrad[0], wgrad[0], self.native)
        if not (_writes(dgrad[0]) and _writes(wgrad[0])):
            _, run_dgrad = self.prepare("gemm_out", *dgrad, plan.dgrad)
            _, run_wgrad = self.prepare("gemm_out", *wgrad, plan.wgrad)
            return plan, lambda: (run_dgrad(), run_wgrad())
        arguments = self._pair_of(plan)(*dgrad[1:], *wgrad[1:])
        return plan, _Launch(self.module.prepare_pair(*arguments), self.stream, arguments)

    def backward_launcher(self, dgrad, wgrad) -> Callable[..., object]:
        """Return what launches many calls `(a, b, out, a, b, out)` of two problems that are not empty."""
        pair = self._pair_of(plan_backward_cuda(dgrad, wgrad, self.native))
        run, stream = self.module.run_pair, self.stream
        return lambda *tensors: run(*pair(*tensors), stream())

    def _pair_of(self, plan: CudaBackwardPlan) -> Callable[..., tuple]:
        """Return what makes the module's arguments of both products' a, b and out."""
        dgrad, wgrad = self._product_of(plan.dgrad), self._product_of(plan.wgrad)

        def pair(a, b, out, wgrad_a, wgrad_b, wgrad_out):
            products = dgrad(a, b, out), wgrad(wgrad_a, wgrad_b, wgrad_out)
            first, second = products if plan.dgrad_first else products[::-1]
            return (*first, *second, plan.beside)

        return pair

    def _product_of(self, plan: CudaGemmPlan) -> Callable[..., tuple]:
        from tvm_ffi import Shape

        a_major, b_major = plan.problem.a_major, plan.problem.b_major
        if plan.swapped:
            a_major, b_major = b_major, a_major
        numbers = Shape([int(choice) for choice in (*_choices(plan, a_major, b_major), self.multiprocessors)])

        def product(a, b, out):
            if plan.swapped:
                a, b, out = b.transpose(1, 2), a.transpose(1, 2), out.transpose(1, 2)
            workspace = scratch(plan.workspace_bytes, out.device) if plan.workspace_bytes else None
            return a, b, out, workspace, numbers

        return product

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


def _writes(problem) -> bool:
    """Whether there is anything to compute, be it zeros."""
    return problem.batch * problem.m * problem.n > 0 and not (problem.k == 0 and problem.accumulate)


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


def prepare_backward(dgrad, wgrad):
    """The plan of both gradients of a projection, and a callable that runs them; see `GemmBackend.prepare_backward`.

    Raises
    ------
    UnsupportedArchError
        The device's architecture lacks a program for a stage.
    BuildError
        The module cannot be built.
    """
    return gemm_backend(dgrad[3].device).prepare_backward(dgrad, wgrad)


def backward_launcher(dgrad, wgrad, out):
    """What launches calls `(a, b, out, a, b, out)` of two problems that `prepare_backward` has served before."""
    return gemm_backend(out.device).backward_launcher(dgrad, wgrad)
