"""The rule on a CUDA device: allocates what the plan states and makes one call into the module per direction."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from cake_shared.check import check_offsets, dtype_name
from cake_shared.gdn.backward import Needs
from cake_shared.gdn.cuda.plan import HEAD_DIM, Problem, plan_backward, plan_forward
from cake_shared.gdn.forward import TAPE_HEAD
from cake_shared.gdn.options import Inputs, Options
from cake_shared.program import programs_of

if TYPE_CHECKING:
    from collections.abc import Callable

    import tvm_ffi

    from cake_shared.gdn.cuda.devices import ErrorWord
    from cake_shared.gdn.cuda.plan import Plan

_WAY_OUT = "; backend='cpu' serves others, with tensors in host memory"
_STATE_ELEMENTS = HEAD_DIM * HEAD_DIM

# As in enum RuleOption of cake/gdn/host/rule_call.h.
_NATIVE_PROGRAMS, _GROUNDWORK_MADE = 32, 64


def _option_bits(options: Options) -> int:
    """As enum RuleOption of cake/gdn/host/rule_call.h."""
    return (
        options.qk_l2norm
        | options.gate << 1
        | options.beta_sigmoid << 2
        | options.neg_eigval << 3
        | options.state_v_first << 4
    )


def _contiguous(x: torch.Tensor | None) -> torch.Tensor | None:
    return x if x is None or x.is_contiguous() else x.detach().contiguous()


def _repaired(rows: tuple[torch.Tensor | None, ...], misaligned: int) -> list[torch.Tensor | None]:
    """Copy the rows whose bits are set, as enum RowsOf of cake/gdn/host/rule_checks.h numbers them."""
    return [
        x.clone(memory_format=torch.contiguous_format) if misaligned >> place & 1 else x for place, x in enumerate(rows)
    ]


def _new(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Allocate a contiguous tensor that kernels write, unfilled under torch's deterministic switch too."""
    if not torch.are_deterministic_algorithms_enabled():
        return torch.empty(shape, dtype=dtype, device=device)
    size = math.prod(shape) * dtype.itemsize
    storage = torch.UntypedStorage(size, device=device)
    strides = [1] * len(shape)
    for axis in range(len(shape) - 1, 0, -1):
        strides[axis - 1] = strides[axis] * max(shape[axis], 1)
    return torch.empty(0, dtype=dtype, device=device).set_(storage, 0, shape, strides)


def _scratch(size: int, device: torch.device) -> torch.Tensor:
    return _new((size,), torch.uint8, device)


def _like(x: torch.Tensor) -> torch.Tensor:
    """Allocate a contiguous tensor of another's shape and dtype; that of a contiguous one is the quicker."""
    if x.is_contiguous() and not torch.are_deterministic_algorithms_enabled():
        return torch.empty_like(x)
    return _new(x.shape, x.dtype, x.device)


def check_problem(inputs: Inputs, value_dim: int) -> None:
    """Raise `TypeError` or `ValueError` for a dtype or a head dimension that no program serves."""
    if inputs.k.dtype is not torch.bfloat16:
        raise TypeError(f"q: got {dtype_name(inputs.k.dtype)}, takes bfloat16 on CUDA{_WAY_OUT}")
    if inputs.k.shape[3] != HEAD_DIM:
        raise ValueError(f"q: got K = {inputs.k.shape[3]}, takes K = {HEAD_DIM} on CUDA{_WAY_OUT}")
    if value_dim != HEAD_DIM:
        raise ValueError(f"v: got V = {value_dim}, takes V = {HEAD_DIM} on CUDA{_WAY_OUT}")


def _offsets_on(device: torch.device, offsets: torch.Tensor, tokens: int) -> torch.Tensor:
    """Check offsets of host memory and bring them to the device without waiting for it."""
    check_offsets("cu_seqlens", offsets.tolist(), tokens)
    if torch.cuda.is_current_stream_capturing():
        raise ValueError(f"cu_seqlens: got offsets in host memory inside a graph capture, takes them on {device} there")
    return offsets.pin_memory().to(device, non_blocking=True)


class PreparedCall:
    """Calls of one description on one device, see `cake_shared.gdn.eager.CheckedCall`: all that their shapes decide.

    Parameters
    ----------
    backend
        Whose module runs them.
    inputs, options, output_final_state, value_dim
        Of the first such call, checked; q and v may be missing. No tensor is kept.

    Raises
    ------
    TypeError, ValueError
        For a dtype or a head dimension that no program serves.
    """

    def __init__(
        self, backend: RuleBackend, inputs: Inputs, options: Options, output_final_state: bool, value_dim: int
    ) -> None:
        check_problem(inputs, value_dim)
        k, cu_seqlens = inputs.k, inputs.cu_seqlens
        self._backend = backend
        self._device = k.device
        self._keys_shape = k.shape
        self._values_shape = (*inputs.g.shape, HEAD_DIM)
        sequences = None if cu_seqlens is None else cu_seqlens.shape[0] - 1
        self._states_shape = (
            k.shape[0] if sequences is None else sequences, inputs.g.shape[2], HEAD_DIM, HEAD_DIM
        )  # fmt: skip
        self._problem = (*k.shape[:3], inputs.g.shape[2], sequences, options.qk_l2norm, options.gate)
        self._offsets_in_host_memory = cu_seqlens is not None and cu_seqlens.device != k.device
        self._output_final_state = output_final_state
        self._flags = _option_bits(options) | (_NATIVE_PROGRAMS if backend.native else 0)
        self._scale = options.scale
        self.normalises_rows = options.qk_l2norm
        self._plans: dict[tuple, Plan] = {}

    def _plan(self, make: Callable[[Problem, bool], Plan], choice: bool) -> Plan:
        multiprocessors = self._backend.multiprocessors
        plan = self._plans.get((make, choice, multiprocessors))
        if plan is None:
            plan = self._plans[make, choice, multiprocessors] = make(
                Problem(*self._problem, multiprocessors, self._backend.native), choice
            )
        return plan

    def _offsets(self, cu_seqlens: torch.Tensor | None) -> torch.Tensor | None:
        if self._offsets_in_host_memory:
            return _offsets_on(self._device, cu_seqlens, self._keys_shape[1])
        return _contiguous(cu_seqlens)

    def forward(self, tensors: tuple[torch.Tensor | None, ...], save_states: bool, keep: bool):
        """Return `o` and, each or None, final states, the tape of the segments' entry states, and the groundwork.

        With `keep` the groundwork is returned; `save_states` asks for the tape.

        Raises
        ------
        MalformedPackError
            An earlier call on the device was given malformed offsets.
        """
        q, k, v, g, beta, initial_state, a_log, dt_bias, cu_seqlens = tensors
        backend, device = self._backend, self._device
        backend.error_word.raise_pending()
        plan = self._plan(plan_forward, save_states)
        out = _like(v)
        final = tape = None
        if self._output_final_state:
            final = _new(self._states_shape, torch.float32, device)
        if save_states and plan.slots:
            elements = plan.slots * self._states_shape[1] * _STATE_ELEMENTS
            tape = _new((TAPE_HEAD + elements,), torch.float32, device)
        groundwork = _scratch(plan.groundwork_bytes, device)
        others = (
            g, beta, _contiguous(initial_state), a_log, dt_bias, self._offsets(cu_seqlens), out, final,
            None if tape is None else tape[TAPE_HEAD:], groundwork, self._workspace(plan), backend.error_tensor,
            self._flags, self._scale, plan.warps, backend.stream(), backend.multiprocessors,
        )  # fmt: skip
        misaligned = backend.run_forward(q, k, v, *others)
        if misaligned:
            backend.run_forward(*_repaired((q, k, v), misaligned), *others)
        return out, final, tape, groundwork if keep else None

    def _workspace(self, plan: Plan) -> torch.Tensor | None:
        return _scratch(plan.workspace_bytes, self._device) if plan.workspace_bytes else None

    def backward(
        self,
        tensors: tuple[torch.Tensor | None, ...],
        d_o: torch.Tensor | None,
        d_final: torch.Tensor | None,
        tape: torch.Tensor | None,
        groundwork: torch.Tensor | None,
        needs: Needs,
    ) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of q, k, v, g, beta, initial_state, A_log and dt_bias, None where not needed.

        Without the forward pass's groundwork it is made again, with the same bits. Errors are those of `forward`.
        """
        q, k, v, g, beta, initial_state, a_log, dt_bias, cu_seqlens = tensors
        backend, device = self._backend, self._device
        backend.error_word.raise_pending()
        token_gradients = needs.states
        plan = self._plan(plan_backward, token_gradients)
        dv = _new(self._values_shape, torch.bfloat16, device) if v is None else _like(v)
        dq = dk = dg = dbeta = d_initial = d_a_log = d_dt_bias = zeros = saved = None
        if token_gradients:
            dq, dk, dg, dbeta = _like(k), _like(k), _like(g), _like(beta)
            if tape is not None and tape.shape[0] > TAPE_HEAD:
                saved = tape[TAPE_HEAD:]
        else:
            v = initial_state = None
        if needs.initial_state:
            d_initial = _new(self._states_shape, torch.float32, device)
        if a_log is not None and needs.A_log:
            d_a_log = _like(a_log)
        if dt_bias is not None and needs.dt_bias:
            d_dt_bias = _like(dt_bias)
        if d_o is None:
            zeros = torch.zeros(HEAD_DIM, dtype=torch.bfloat16, device=device)
        if q is None:
            q = k  # nothing that reads it is wanted
        flags = self._flags
        if groundwork is None:
            groundwork = _scratch(plan.groundwork_bytes, device)
        else:
            flags |= _GROUNDWORK_MADE
        others = (
            _contiguous(d_final), g, beta, _contiguous(initial_state), a_log, dt_bias, self._offsets(cu_seqlens), saved,
            dv, d_initial, dq, dk, dg, dbeta, d_a_log, d_dt_bias, zeros, groundwork, self._workspace(plan),
            backend.error_tensor, flags, self._scale, plan.warps, backend.stream(), backend.multiprocessors,
            plan.wave_key_heads, plan.wave_halves, plan.wave_warps,
        )  # fmt: skip
        misaligned = backend.run_backward(q, k, v, d_o, *others)
        if misaligned:
            backend.run_backward(*_repaired((q, k, v, d_o), misaligned), *others)
        return (
            dq if needs.q else None, dk if needs.k else None, dv if needs.v else None, dg if needs.g else None,
            dbeta if needs.beta else None, d_initial, d_a_log, d_dt_bias,
        )  # fmt: skip


class RuleBackend:
    """Runs the rule through one loaded module, with the functions of `cake_shared.gdn.cpu`.

    Parameters
    ----------
    module
        The package's module: of the device's architecture, or the host module of the emulator.
    error_word
        Where the device reports malformed packs.
    multiprocessors
        How many the plan counts with. It moves no bits.
    stream
        Returns the handle of the stream to launch on.
    native
        Whether the architecture's records name native programs, see `uses_native`.
    """

    def __init__(
        self,
        module: tvm_ffi.Module,
        error_word: ErrorWord,
        multiprocessors: int,
        stream: Callable[[], int],
        native: bool = False,
    ) -> None:
        self.run_forward = module["rule_forward"]
        self.run_backward = module["rule_backward"]
        self.error_word = error_word
        self.error_tensor = error_word.tensor
        self.stream = stream
        self.native = native
        self.multiprocessors = multiprocessors

    def prepared(self, inputs: Inputs, options: Options, output_final_state: bool, value_dim: int) -> PreparedCall:
        """Return what runs calls like this one; see `PreparedCall`."""
        return PreparedCall(self, inputs, options, output_final_state, value_dim)

    def forward(
        self, inputs: Inputs, options: Options, output_final_state: bool, save_states: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return `o`, final states (no rows unless asked for), the tape of entry states and the groundwork.

        The last two are next to empty unless `save_states` asks for what a backward pass can use.

        Raises
        ------
        TypeError, ValueError
            For a dtype or a head dimension that no program serves.
        MalformedPackError
            An earlier call on the device was given malformed offsets.
        """
        call = self.prepared(inputs, options, output_final_state, inputs.v.shape[3])
        out, final, tape, groundwork = call.forward(_in_order(inputs), save_states, save_states)
        if final is None:
            final = out.new_empty((0, inputs.v.shape[2], HEAD_DIM, HEAD_DIM), dtype=torch.float32)
        if tape is None:
            tape = out.new_zeros(TAPE_HEAD, dtype=torch.float32)
        if groundwork is None:
            groundwork = out.new_zeros(TAPE_HEAD, dtype=torch.uint8)
        return out, final, tape, groundwork

    def backward(
        self,
        inputs: Inputs,
        options: Options,
        d_out: torch.Tensor | None,
        d_final: torch.Tensor | None,
        tape: torch.Tensor | None,
        groundwork: torch.Tensor | None,
        needs: Needs,
        value_dim: int,
    ) -> tuple[torch.Tensor | None, ...]:
        """Return the gradients of q, k, v, g, beta, initial_state, A_log and dt_bias, None where not needed.

        Errors are those of `forward`.
        """
        call = self.prepared(inputs, options, d_final is not None, value_dim)
        if groundwork is not None and groundwork.shape[0] <= TAPE_HEAD:
            groundwork = None
        return call.backward(_in_order(inputs), d_out, d_final, tape, groundwork, needs)


def uses_native(package: str, architecture: str) -> bool:
    """Return whether a package's records for an architecture name native programs."""
    return any(record.kind == "native" for record in programs_of(package).records_for(architecture))


def _in_order(inputs: Inputs) -> tuple[torch.Tensor | None, ...]:
    i = inputs
    return i.q, i.k, i.v, i.g, i.beta, i.initial_state, i.A_log, i.dt_bias, i.cu_seqlens
