"""The rule called eagerly: an autograd function straight onto a call that was checked before."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, Protocol

import torch

from cake_shared.dispatch import Undifferentiable
from cake_shared.gdn.backward import Needs
from cake_shared.gdn.forward import TAPE_HEAD
from cake_shared.gdn.options import Inputs, Options

Optional = torch.Tensor | None


class CheckedCall(Protocol):
    """What runs calls of one description; their tensors come in the order of the operators, `Inputs` sorted by it."""

    normalises_rows: bool

    def forward(
        self, tensors: tuple[Optional, ...], save_states: bool, keep: bool
    ) -> tuple[torch.Tensor, Optional, Optional, Optional]:
        """Return `o` and, each or None, the final states, the tape and the groundwork for a backward pass."""

    def backward(
        self,
        tensors: tuple[Optional, ...],
        d_o: Optional,
        d_final: Optional,
        tape: Optional,
        groundwork: Optional,
        needs: Needs,
    ) -> tuple[Optional, ...]:
        """Return the gradients of the first eight tensors, None where not needed."""


def inputs_of(q, k, v, g, beta, initial_state, A_log, dt_bias, cu_seqlens) -> Inputs:
    """Sort tensors in the operators' order."""
    return Inputs(k, g, beta, q, v, initial_state, A_log, dt_bias, cu_seqlens)


class BackendCall:
    """A call through a backend with the functions of `cake_shared.gdn.cpu`."""

    def __init__(self, backend: Any, options: Options, output_final_state: bool, value_dim: int) -> None:
        self.backend, self.options = backend, options
        self.output_final_state, self.value_dim = output_final_state, value_dim
        self.normalises_rows = options.qk_l2norm

    def forward(self, tensors, save_states, keep):
        """See `CheckedCall`; no groundwork is kept."""
        results = self.backend.forward(inputs_of(*tensors), self.options, self.output_final_state, save_states)
        o, final, tape, _ = results
        return o, final if self.output_final_state else None, tape if tape.shape[0] > TAPE_HEAD else None, None

    def backward(self, tensors, d_o, d_final, tape, groundwork, needs):
        """See `CheckedCall`."""
        return self.backend.backward(
            inputs_of(*tensors), self.options, d_o, d_final, tape, groundwork, needs, self.value_dim
        )


class Wanted(NamedTuple):
    """Which gradients a recorded call wants, and what they read."""

    needs: Needs
    states: bool
    queries: bool


@functools.lru_cache(maxsize=256)
def wanted(needs: tuple[bool, ...]) -> Wanted:
    """Return what these gradients read: `queries` is whether they read q even where it is used as given."""
    needs = Needs(*needs)
    return Wanted(needs, needs.states, needs.chain)


class Rule(torch.autograd.Function):
    """One recorded call."""

    @staticmethod
    def forward(ctx, call, q, k, v, g, beta, initial_state, A_log, dt_bias, cu_seqlens):
        """Run the forward pass and keep what the wanted gradients read."""
        needs, states, queries = wanted(ctx.needs_input_grad[1:9])
        tensors = (q, k, v, g, beta, initial_state, A_log, dt_bias, cu_seqlens)
        o, final, tape, groundwork = call.forward(tensors, states, True)
        ctx.set_materialize_grads(False)
        ctx.call, ctx.needs = call, needs
        if not (queries or call.normalises_rows):
            q = None
        if not states:
            v = initial_state = None
        ctx.save_for_backward(q, k, v, g, beta, initial_state, A_log, dt_bias, cu_seqlens, tape, groundwork)
        return o, final

    @staticmethod
    def backward(ctx, d_o, d_final):
        """Run the backward pass; under create_graph its results refuse to be differentiated again."""
        *tensors, tape, groundwork = ctx.saved_tensors
        if not torch.is_grad_enabled():
            return None, *ctx.call.backward(tensors, d_o, d_final, tape, groundwork, ctx.needs), None

        def run(d_o, d_final, *tensors):
            return ctx.call.backward(tensors, d_o, d_final, tape, groundwork, ctx.needs)

        return None, *Undifferentiable.apply(NO_SECOND_DERIVATIVE, run, d_o, d_final, *tensors), None


NO_SECOND_DERIVATIVE = (
    "chunk_gated_delta_rule: its gradients have none of their own (no double backward); detach them, or write the "
    "recurrence in torch operations where second derivatives are needed"
)

_KNOWN_CALLS = 1024


class KnownCalls:
    """Calls whose description passed every check before, so that the next one like it need not be checked again.

    A description is all that checks look at: kinds, shapes, dtypes, devices and layouts of the tensors, and the values
    of everything else.
    """

    def __init__(self) -> None:
        self._calls: dict[tuple, CheckedCall] = {}

    @staticmethod
    def describe(tensors: tuple[Any, ...], scale: Any, flags: tuple[Any, ...], backend: Any) -> tuple | None:
        """Return the description of a call, or None where an argument has none, which the checks will then name."""
        for flag in flags:
            if flag is not True and flag is not False:
                return None
        q, k, v, g, beta, *others = tensors
        try:
            needed = (
                type(q), q.shape, q.dtype, q.device, q.layout, type(k), k.shape, k.dtype, k.device, k.layout,
                type(v), v.shape, v.dtype, v.device, v.layout, type(g), g.shape, g.dtype, g.device, g.layout,
                type(beta), beta.shape, beta.dtype, beta.device, beta.layout, type(scale), scale, flags, backend,
            )  # fmt: skip
            for place, x in enumerate(others):
                if x is not None:
                    needed += place, type(x), x.shape, x.dtype, x.device, x.layout
        except (AttributeError, RuntimeError):
            return None
        return needed

    def get(self, description: tuple | None) -> CheckedCall | None:
        """Return the call of a description, or None."""
        try:
            return self._calls.get(description)
        except TypeError:  # an argument that cannot be hashed
            return None

    def add(self, description: tuple | None, call: CheckedCall) -> None:
        """Remember a call."""
        if description is None:
            return
        if len(self._calls) >= _KNOWN_CALLS:
            self._calls.clear()
        self._calls[description] = call
