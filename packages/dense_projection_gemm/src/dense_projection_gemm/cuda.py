"""The CUDA backend of `deterministic=False`: a split program where it has been measured to pay, else the other's."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dense_projection_det_gemm import cuda as det
from dense_projection_gemm.cuda_plan import SplitPlan, plan_measured

if TYPE_CHECKING:
    from collections.abc import Callable

    import tvm_ffi

PACKAGE = "dense_projection_gemm"


class SplitBackend:
    """Runs the split programs through a module: that of a CUDA device, or a host module of the emulator.

    Attributes
    ----------
    module
        With `prepare_split`.
    multiprocessors
        How many the launches count on.
    stream
        Returns the handle of the stream to launch on.
    """

    def __init__(self, module: tvm_ffi.Module, multiprocessors: int, stream: Callable[[], int]):
        self.module = module
        self.multiprocessors = multiprocessors
        self.stream = stream
        self._prepare = module.prepare_split

    def prepare(self, plan: SplitPlan, a: torch.Tensor, b: torch.Tensor, out: torch.Tensor) -> Callable[[], None]:
        """Return a callable that runs a plan on `[L, M, K]`, `[L, K, N]`, `[L, M, N]` tensors, none of them empty."""
        problem = plan.problem
        a_k_major, b_k_major = problem.a_major == "k", problem.b_major == "k"
        if plan.swapped:
            a, b, out = b.transpose(1, 2), a.transpose(1, 2), out.transpose(1, 2)
            a_k_major, b_k_major = b_k_major, a_k_major
        sums = None
        if plan.workspace_bytes:
            sums = torch.empty(plan.workspace_bytes // 4, dtype=torch.float32, device=out.device)
        launch = self._prepare(
            a,
            b,
            out,
            sums,
            plan.stage == "split_slim",
            a_k_major,
            b_k_major,
            problem.accumulate,
            plan.whole_units,
            plan.clusters,
            plan.pieces,
            plan.group_rows,
            self.multiprocessors,
        )
        return _Launch(launch, self.stream, (a, b, out, sums))


class _Launch:
    """Launches on the current stream; holds what the launch reads and writes."""

    __slots__ = ("_held", "_launch", "_stream")

    def __init__(self, launch, stream, held):
        self._launch, self._stream, self._held = launch, stream, held

    def __call__(self):
        self._launch(self._stream())


_backends: dict[int, SplitBackend] = {}
_facts: dict[int, tuple[str, int]] = {}


def split_backend(device: torch.device) -> SplitBackend:
    """Return what runs the split programs on a CUDA device: their module is found or built at the first call.

    Raises
    ------
    UnsupportedArchError
        The device's architecture has no split program.
    BuildError
        Its module cannot be built.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    backend = _backends.get(index)
    if backend is None:
        from cake_shared import jit
        from cake_shared.program import require_programs

        architecture, multiprocessors = _facts_of(index)
        require_programs(PACKAGE, architecture)
        backend = _backends[index] = SplitBackend(
            jit.load(PACKAGE, architecture), multiprocessors, lambda: torch._C._cuda_getCurrentRawStream(index)
        )
    return backend


def _facts_of(index: int) -> tuple[str, int]:
    facts = _facts.get(index)
    if facts is None:
        from cake_shared.target import target_of

        device = torch.device("cuda", index)
        architecture = target_of(device).name
        facts = _facts[index] = architecture, torch.cuda.get_device_properties(device).multi_processor_count
    return facts


def prepare(stage, problem, a, b, out):
    """The plan of a problem on CUDA tensors, and a callable that runs it.

    Raises
    ------
    UnsupportedArchError
        No program serves `stage` on the device's architecture.
    BuildError
        The module cannot be built.
    """
    if stage == "gemm_out":
        plan = plan_measured(problem, *_facts_of(out.device.index))
        if plan is not None:
            return plan, split_backend(out.device).prepare(plan, a, b, out)
    return det.prepare(stage, problem, a, b, out)


def launcher(stage, problem, out):
    """What launches calls `(a, b, out)` of a problem that `prepare` has served before, looking nothing up."""
    plan = plan_measured(problem, *_facts_of(out.device.index)) if stage == "gemm_out" else None
    if plan is None:
        return det.launcher(stage, problem, out)
    backend = split_backend(out.device)
    return lambda a, b, out: backend.prepare(plan, a, b, out)()


def prepare_backward(dgrad, wgrad):
    """Both gradients by the deterministic programs, which side by side are faster than a split one and another."""
    return det.prepare_backward(dgrad, wgrad)


def backward_launcher(dgrad, wgrad, out):
    """What launches calls `(a, b, out, a, b, out)` of two problems that `prepare_backward` has served before."""
    return det.backward_launcher(dgrad, wgrad, out)
