"""Times, checks and memory of gated delta rules on one GPU: workload by workload, every arm beside the others.

A case is a workload, a dtype of beta, an operation (fwd, fwd+bwd, ckpt) and a way to launch:

graph   replay of a captured call
eager   a call with a new `cu_seqlens` tensor each time, as a training step makes it
same    a call with one and the same `cu_seqlens` tensor, for peers that key their tables on its identity

In graph replay the sample lies between two CUDA events. Eager, the device is idle and the cache cold when the call
starts: its events hold every launch and every wait of the call, and the wall time goes from the call to the device's
end.
"""

import gc
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from cake_shared.bench.gdn_peers import GdnArm
from cake_shared.bench.gpu import Flush
from cake_shared.bench.timing import SAME_ARM
from cake_shared.testing import deterministic_fill
from cake_shared.workloads import GdnWorkload

OPERATIONS = ("fwd", "fwd+bwd", "ckpt")
LAUNCHES = ("graph", "eager", "same")
BETAS = {"FP32": torch.float32, "BF16": torch.bfloat16}


def title(workload: GdnWorkload) -> str:
    """A workload with its heads, as a row of a table."""
    return f"{workload.name}, {workload.h}/{workload.hv}"


@dataclass
class Tensors:
    """Inputs of one workload: q, k, v, g, beta that gather gradients, dO, and the offsets in each dtype."""

    inputs: list[torch.Tensor]
    do: torch.Tensor
    offsets: dict[torch.dtype, torch.Tensor]

    @property
    def gradient_bytes(self) -> int:
        """Of the five gradients."""
        return sum(x.numel() * x.element_size() for x in self.inputs)


def make_tensors(workload: GdnWorkload, beta: torch.dtype, seed: int = 0, device: str = "cuda") -> Tensors:
    """Unit-norm q and k, normal v and dO, mild gates, beta sigmoid(normal); made on the device."""
    rng = torch.Generator(device).manual_seed(seed)
    tokens, h, hv, dim = workload.tokens, workload.h, workload.hv, workload.head_dim

    def normal(*shape):
        return torch.randn(1, tokens, *shape, generator=rng, device=device)

    q, k = (F.normalize(normal(h, dim), dim=-1).bfloat16() for _ in range(2))
    v, do = (normal(hv, dim).bfloat16() for _ in range(2))
    inputs = [q, k, v, F.logsigmoid(normal(hv)) / 16, normal(hv).sigmoid().to(beta)]
    offsets = {t: torch.tensor(workload.cu_seqlens, dtype=t, device=device) for t in (torch.int32, torch.int64)}
    return Tensors([x.requires_grad_() for x in inputs], do, offsets)


class Call:
    """One operation of one arm as a call; `renew` gives it a new tensor of offsets."""

    def __init__(self, arm: GdnArm, operation: str, tensors: Tensors, deterministic: bool = False):
        self._rule, self._tensors, self._deterministic = arm.rule, tensors, deterministic
        self._scale = tensors.inputs[0].shape[-1] ** -0.5
        self._first = self._offsets = tensors.offsets[arm.offsets_dtype]
        self._run = {"fwd": self._forward, "fwd+bwd": self._both, "ckpt": self._checkpointed}[operation]

    def renew(self):
        """A new tensor of the same offsets, as the next step of a training brings."""
        self._offsets = self._first.clone()

    def reuse(self):
        """The first tensor of offsets again."""
        self._offsets = self._first

    def surroundings(self) -> AbstractContextManager:
        """What the call runs in: torch's deterministic switch where this arm is about it."""
        return deterministic_fill() if self._deterministic else nullcontext()

    def __call__(self):
        """Enqueue the operation; returns its results."""
        return self._run()

    def _o(self, *inputs):
        return self._rule(*inputs, self._scale, cu_seqlens=self._offsets)[0]

    def _forward(self):
        with torch.no_grad():
            return self._o(*self._tensors.inputs)

    def _both(self):
        o = self._o(*self._tensors.inputs)
        return (o.detach(), *torch.autograd.grad(o, self._tensors.inputs, self._tensors.do))

    def _checkpointed(self):
        o = checkpoint(self._o, *self._tensors.inputs, use_reentrant=False, preserve_rng_state=False)
        return (o.detach(), *torch.autograd.grad(o, self._tensors.inputs, self._tensors.do))


def peak_bytes(arm: GdnArm, tensors: Tensors) -> int:
    """Peak of allocated memory over forward+backward beyond the inputs, less the gradients that stay."""
    call = Call(arm, "fwd+bwd", tensors)
    call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    results = call()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    del results
    return peak - tensors.gradient_bytes


def sample_eager(calls: dict[str, Call], groups: int, reverse: bool, flush: Flush, fresh: bool) -> tuple[dict, dict]:
    """Milliseconds between the events and of wall time of each call, in turn; ours runs twice in every group."""
    first = next(iter(calls))
    names = [first, SAME_ARM, *list(calls)[1:]]
    calls = {**calls, SAME_ARM: calls[first]}
    if reverse:
        names.reverse()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    events: dict[str, list[float]] = {name: [] for name in names}
    walls: dict[str, list[float]] = {name: [] for name in names}
    for group in range(1 + groups):
        for name in names:
            call = calls[name]
            call.renew() if fresh else call.reuse()
            with call.surroundings():
                flush()
                torch.cuda.synchronize()
                started = time.perf_counter_ns()
                begin.record()
                call()
                end.record()
                torch.cuda.synchronize()
                wall = (time.perf_counter_ns() - started) / 1e6
            if group:
                events[name].append(begin.elapsed_time(end))
                walls[name].append(wall)
    return events, walls


def release():
    """Give unused memory back, so that the next workload finds it whole."""
    gc.collect()
    torch.cuda.empty_cache()
