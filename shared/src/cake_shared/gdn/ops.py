"""The gated delta rule as operators and as an eager autograd function, made once for each package.

In eager mode the public function goes through `cake_shared.gdn.eager` straight onto the implementation; under
torch.compile it calls the registered operator, which runs the same implementation: same bits, and neither pays for
the other.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from cake_shared.check import check_backend, check_device, check_dtype, check_flag, check_shape, check_tensor, kind_of
from cake_shared.dispatch import as_operator, has_modes, refuse_forward_ad
from cake_shared.errors import UnsupportedArchError
from cake_shared.gdn import cpu
from cake_shared.gdn.backward import Needs
from cake_shared.gdn.check import check_call, check_state
from cake_shared.gdn.eager import NO_SECOND_DERIVATIVE, BackendCall, CheckedCall, KnownCalls, Rule, inputs_of
from cake_shared.gdn.forward import TAPE_HEAD
from cake_shared.gdn.options import Inputs, Options, make_call
from cake_shared.plan import SEGMENT_THRESHOLD_TOKENS, SEGMENT_TOKENS
from cake_shared.target import target_of

_OPTIONS = (
    "float scale, bool use_qk_l2norm_in_kernel, bool use_gate_in_kernel, bool use_beta_sigmoid_in_kernel, "
    "bool allow_neg_eigval, bool state_v_first"
)
_FWD = (
    "chunk_gated_delta_rule_fwd(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? initial_state, "
    f"Tensor? A_log, Tensor? dt_bias, Tensor? cu_seqlens, {_OPTIONS}, bool output_final_state, bool save_states) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)
_BWD = (
    "chunk_gated_delta_rule_bwd(Tensor? d_o, Tensor? d_final_state, Tensor? q, Tensor k, Tensor? v, Tensor g, "
    "Tensor beta, Tensor? initial_state, Tensor? A_log, Tensor? dt_bias, Tensor? cu_seqlens, Tensor? entry_states, "
    f"Tensor? groundwork, {_OPTIONS}, SymInt value_dim, bool[] needs) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)


class Saved(NamedTuple):
    """What the forward pass hands to the backward one besides its inputs.

    `entry_states` is one-dimensional and holds the states at the entry of each segment after a sequence's first, in
    pack order; it is next to empty while T is at most 8192, because every sequence then is one segment. `groundwork`
    is one-dimensional too, bytes that a backward pass on CUDA would otherwise make again, with the same bits (about 17
    KB for 64 tokens and a value head); it may be None.
    """

    entry_states: torch.Tensor
    groundwork: torch.Tensor | None = None


class Gradients(NamedTuple):
    """Gradients like their inputs, None where there is no such input or it was not asked for."""

    q: torch.Tensor | None
    k: torch.Tensor | None
    v: torch.Tensor | None
    g: torch.Tensor | None
    beta: torch.Tensor | None
    initial_state: torch.Tensor | None
    A_log: torch.Tensor | None
    dt_bias: torch.Tensor | None


def _state_dtype(q: torch.Tensor) -> torch.dtype:
    return torch.float64 if q.dtype is torch.float64 else torch.float32


def _gradient_dtypes(k, g, beta, A_log, dt_bias) -> tuple[torch.dtype, ...]:
    per_head = (k.dtype if x is None else x.dtype for x in (A_log, dt_bias))
    return (k.dtype, k.dtype, k.dtype, g.dtype, beta.dtype, _state_dtype(k), *per_head)


def _fake_backward(
    d_o, d_final_state, q, k, v, g, beta, initial_state, A_log, dt_bias, cu_seqlens, entry_states, groundwork, *rest
):
    v_first, value_dim, needs = rest[-3:]
    batch, tokens, heads = g.shape
    sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
    state = (sequences, heads, value_dim, k.shape[3]) if v_first else (sequences, heads, k.shape[3], value_dim)
    shapes = (k.shape, k.shape, (batch, tokens, heads, value_dim), g.shape, g.shape, state, (heads,), (heads,))
    dtypes = _gradient_dtypes(k, g, beta, A_log, dt_bias)
    return tuple(k.new_empty(s if n else (0,), dtype=d) for s, d, n in zip(shapes, dtypes, needs))


def _kept(needs: Needs, options: Options, inputs: Inputs) -> tuple[torch.Tensor | None, ...]:
    """Return the input tensors in the operators' order, with None for what these gradients do not read."""
    states = needs.states
    return (
        inputs.q if needs.chain or options.qk_l2norm else None,
        inputs.k,
        inputs.v if states else None,
        inputs.g,
        inputs.beta,
        inputs.initial_state if states else None,
        inputs.A_log,
        inputs.dt_bias,
        inputs.cu_seqlens,
    )


class RuleOps:
    """The rule's operators of one package and the core of its public functions.

    Parameters
    ----------
    package
        Import name: the operators' namespace, and what errors name.
    cuda_backend
        `cuda_backend(device)` returns what runs the rule on a CUDA device, a
        `cake_shared.gdn.cuda.rule.RuleBackend`, or raises `UnsupportedArchError`.
    """

    def __init__(self, package: str, cuda_backend: Callable[[torch.device], Any]) -> None:
        self.package = package
        self._cuda_backend = cuda_backend
        self._known = KnownCalls()
        self.library = torch.library.Library(package, "DEF")
        for schema, implementation, fake in (
            (_FWD, self._op_forward, self._fake_forward),
            (_BWD, self._op_backward, _fake_backward),
        ):
            name = schema.split("(", 1)[0]
            self.library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
            self.library.impl(name, implementation, "CompositeExplicitAutograd")
            torch.library.register_fake(f"{package}::{name}", fake, lib=self.library)
        namespace = getattr(torch.ops, package)
        self.fwd_op = namespace.chunk_gated_delta_rule_fwd
        self.bwd_op = namespace.chunk_gated_delta_rule_bwd
        torch.library.register_autograd(
            f"{package}::chunk_gated_delta_rule_fwd", self._op_gradient, setup_context=_op_context, lib=self.library
        )
        torch.library.register_autograd(
            f"{package}::chunk_gated_delta_rule_bwd", _no_second_derivative, lib=self.library
        )

    def backend(self, device: torch.device, name: str | None = None) -> Any:
        """Return what runs the rule for tensors on `device`, where the caller asked for the backend `name`.

        Raises
        ------
        ValueError, TypeError
            For a backend that does not exist or is not that of the device, or a device that has none.
        UnsupportedArchError
            For "cuda" with tensors elsewhere, or a device of an architecture that lacks a program.
        """
        _check_backend_of(device, name)
        return self._cuda_backend(device) if device.type == "cuda" else cpu

    def _backend_for(self, device: torch.device, name: str | None) -> Any:
        """Return `backend`; for a call that is being compiled check the names alone, its operator finds the rest."""
        if torch.compiler.is_compiling():
            _check_backend_of(device, name)
            return None
        return self.backend(device, name)

    def _fake_forward(self, q, k, v, g, beta, initial_state, A_log, dt_bias, cu_seqlens, *rest):
        v_first, output_final_state, save_states = rest[-3:]
        heads, key, value = v.shape[2], q.shape[3], v.shape[3]
        batch, tokens = q.shape[0], q.shape[1]
        sequences = batch if cu_seqlens is None else cu_seqlens.shape[0] - 1
        shape = (heads, value, key) if v_first else (heads, key, value)
        final = q.new_empty((sequences if output_final_state else 0, *shape), dtype=_state_dtype(q))
        # Written without a comparison, so that the length does not become a guard of the compiled graph.
        is_long = torch.sym_min(1, tokens // (SEGMENT_THRESHOLD_TOKENS + 1))
        capacity = batch * (tokens // SEGMENT_TOKENS) * is_long if save_states else 0
        tape = q.new_empty((TAPE_HEAD + capacity * heads * key * value,), dtype=_state_dtype(q))
        size = TAPE_HEAD
        if save_states and q.device.type == "cuda":
            from cake_shared.gdn.cuda.plan import groundwork_bytes
            from cake_shared.gdn.cuda.rule import uses_native

            normalises, native = rest[1], uses_native(self.package, target_of(q.device).name)
            packed = None if cu_seqlens is None else sequences
            size = groundwork_bytes(batch, tokens, q.shape[2], heads, packed, normalises, native)
        groundwork = q.new_empty((size,), dtype=torch.uint8)
        return torch.empty_like(v, memory_format=torch.contiguous_format), final, tape, groundwork

    def _op_forward(self, q, k, v, g, beta, initial_state, A_log, dt_bias, cu_seqlens, *rest):
        inputs = inputs_of(q, k, v, g, beta, initial_state, A_log, dt_bias, cu_seqlens)
        return self.backend(q.device).forward(inputs, Options(*rest[:6]), *rest[6:])

    def _op_backward(self, d_o, d_final_state, q, k, v, g, beta, initial_state, A_log, dt_bias, cu_seqlens, *rest):
        inputs = inputs_of(q, k, v, g, beta, initial_state, A_log, dt_bias, cu_seqlens)
        entry_states, groundwork, *flags, value_dim, needs = rest
        grads = self.backend(k.device).backward(
            inputs, Options(*flags), d_o, d_final_state, entry_states, groundwork, Needs(*needs), value_dim
        )
        dtypes = _gradient_dtypes(k, g, beta, A_log, dt_bias)
        return tuple(k.new_empty(0, dtype=d) if x is None else x for x, d in zip(grads, dtypes))

    def _op_gradient(self, ctx, d_o, d_final_state, d_tape, d_groundwork):
        *kept, tape, groundwork = ctx.saved_tensors
        if not ctx.output_final_state:
            d_final_state = None
        if d_o is None and d_final_state is None:
            return (None,) * 17
        grads = self.bwd_op(d_o, d_final_state, *kept, tape, groundwork, *ctx.flags, ctx.value_dim, list(ctx.needs))
        return (*(x if n else None for x, n in zip(grads, ctx.needs)), *(None,) * 9)

    def call(
        self, q, k, v, g, beta, scale, initial_state, A_log, dt_bias, cu_seqlens, flags, output_final_state, backend
    ) -> tuple:
        """Check a call and run it with gradients; returns `(o, final_state or None)`.

        `flags` are the switches of `Options` after the scale. A call like one before on a CUDA device skips the checks.
        """
        tensors = (q, k, v, g, beta, initial_state, A_log, dt_bias, cu_seqlens)
        description = None
        if not (torch.compiler.is_compiling() or has_modes()):
            description = KnownCalls.describe(tensors, scale, (*flags, output_final_state), backend)
            call = self._known.get(description)
            if call is not None:
                return _run_eagerly(call, tensors)
        inputs, options = make_call(q, k, v, g, beta, scale, initial_state, A_log, dt_bias, cu_seqlens, *flags)
        return self.rule(inputs, options, output_final_state, backend, description)

    def rule(
        self,
        inputs: Inputs,
        options: Options,
        output_final_state: bool,
        backend: str | None,
        description: tuple | None = None,
    ) -> tuple:
        """Check a call and run it with gradients; returns `(o, final_state or None)`."""
        check_call(inputs, options, output_final_state)
        leaves = (
            inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta, inputs.initial_state, inputs.A_log, inputs.dt_bias
        )  # fmt: skip
        chosen = self._backend_for(inputs.q.device, backend)
        refuse_forward_ad(**dict(zip(Gradients._fields, leaves)))
        if as_operator(*leaves, inputs.cu_seqlens):
            records = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in leaves)
            o, final, *_ = self.fwd_op(*leaves, inputs.cu_seqlens, *_flags(options), output_final_state, records)
            return o, final if output_final_state else None
        call = _checked_call(chosen, inputs, options, output_final_state)
        if chosen is not cpu:
            self._known.add(description, call)
        return _run_eagerly(call, (*leaves, inputs.cu_seqlens))

    def fwd(
        self, inputs: Inputs, options: Options, output_final_state: bool, save_states: bool, backend: str | None
    ) -> tuple[torch.Tensor, torch.Tensor | None, Saved]:
        """Check a call and run its forward pass alone."""
        check_call(inputs, options, output_final_state)
        check_flag("save_states", save_states)
        self._backend_for(inputs.q.device, backend)
        tensors = (
            inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta, inputs.initial_state, inputs.A_log, inputs.dt_bias,
            inputs.cu_seqlens,
        )  # fmt: skip
        refuse_forward_ad(**dict(zip(Gradients._fields, tensors)))
        run = self.fwd_op if as_operator(*tensors) else self._op_forward
        with torch.no_grad():
            o, final, *saved = run(*tensors, *_flags(options), output_final_state, save_states)
        return o, final if output_final_state else None, Saved(*saved)

    def bwd(
        self,
        d_o: torch.Tensor | None,
        d_final_state: torch.Tensor | None,
        saved: Saved,
        inputs: Inputs,
        options: Options,
        needs: Needs | None,
        backend: str | None,
    ) -> Gradients:
        """Check a call and run its backward pass alone."""
        check_call(inputs, options)
        _check_saved(saved, inputs.q)
        if needs is not None and not isinstance(needs, Needs):
            raise TypeError(f"needs: got {kind_of(needs)}, takes None or a Needs")
        given = (inputs.initial_state is not None, inputs.A_log is not None, inputs.dt_bias is not None)
        needs = needs or Needs(True, True, True, True, True, *given)
        self._backend_for(inputs.q.device, backend)
        for name, wanted, there in zip(("initial_state", "A_log", "dt_bias"), needs[5:], given):
            if wanted and not there:
                raise ValueError(f"needs: got {name}=True without {name} given, takes it only for a given input")
        if d_o is not None:
            _check_d_o(d_o, inputs.v)
        if d_final_state is not None:
            sequences = inputs.q.shape[0] if inputs.cu_seqlens is None else inputs.cu_seqlens.shape[0] - 1
            check_state("d_final_state", d_final_state, inputs.q, inputs.v, sequences, options)
        tensors = _kept(needs, options, inputs)
        refuse_forward_ad(d_o=d_o, d_final_state=d_final_state, **dict(zip(Gradients._fields, tensors)))
        run = self.bwd_op if as_operator(d_o, d_final_state, *tensors) else self._op_backward
        with torch.no_grad():
            grads = run(d_o, d_final_state, *tensors, *saved, *_flags(options), inputs.v.shape[3], list(needs))
        return Gradients(*(x if n else None for x, n in zip(grads, needs)))


def _check_backend_of(device: torch.device, name: str | None) -> None:
    check_backend(name)
    if device.type == "cuda" or name == "cuda":
        if name == "cpu":
            raise ValueError(f"backend: got 'cpu' with tensors on {device}, takes None or 'cuda' for them")
        if device.type != "cuda":
            raise UnsupportedArchError(
                f"backend: got 'cuda' with tensors on {device}, takes tensors on a CUDA device for it: move them "
                "with .cuda(), or take backend='cpu' (or None)"
            )
    elif device.type != "cpu":
        raise ValueError(f"q: got a tensor on {device}, takes one on a CPU or a CUDA device")


def _checked_call(backend: Any, inputs: Inputs, options: Options, output_final_state: bool) -> CheckedCall:
    if backend is cpu:
        return BackendCall(backend, options, output_final_state, inputs.v.shape[3])
    return backend.prepared(inputs, options, output_final_state, inputs.v.shape[3])


def _run_eagerly(call: CheckedCall, tensors: tuple[torch.Tensor | None, ...]) -> tuple:
    if torch.is_grad_enabled():
        for x in tensors:
            if x is not None and x.requires_grad:
                return Rule.apply(call, *tensors)
    o, final, *_ = call.forward(tensors, False, False)
    return o, final


def _check_saved(saved: Any, q: torch.Tensor) -> None:
    takes = "takes what the forward pass returned"
    if not isinstance(saved, Saved) or not isinstance(saved.entry_states, torch.Tensor):
        got = kind_of(saved) if not isinstance(saved, Saved) else f"Saved({kind_of(saved.entry_states)})"
        raise TypeError(f"saved: got {got}, {takes}")
    states = saved.entry_states
    check_dtype("saved", states, (_state_dtype(q),), ", the dtype of states")
    check_device("saved", states, q.device, "q")
    if states.dim() != 1:
        raise ValueError(f"saved: got shape {list(states.shape)}, {takes}")
    if saved.groundwork is None:
        return
    if not isinstance(saved.groundwork, torch.Tensor):
        raise TypeError(f"saved: got groundwork of {kind_of(saved.groundwork)}, {takes}")
    check_dtype("saved", saved.groundwork, (torch.uint8,), ", the dtype of groundwork")
    check_device("saved", saved.groundwork, q.device, "q")
    if saved.groundwork.dim() != 1:
        raise ValueError(f"saved: got shape {list(saved.groundwork.shape)}, {takes}")


def _no_second_derivative(ctx, *gradients) -> None:
    raise RuntimeError(NO_SECOND_DERIVATIVE)


def _check_d_o(d_o: Any, v: torch.Tensor) -> None:
    check_tensor("d_o", d_o)
    check_dtype("d_o", d_o, (v.dtype,), ", the dtype of v")
    check_device("d_o", d_o, v.device, "v")
    check_shape("d_o", d_o, v.shape, "[B, T, HV, V] of v")


def _flags(options: Options) -> tuple:
    o = options
    return (o.scale, o.qk_l2norm, o.gate, o.beta_sigmoid, o.neg_eigval, o.state_v_first)


def _op_context(ctx, inputs, output) -> None:
    tensors, flags = inputs[:9], inputs[9:15]
    v = tensors[2]
    needs = Needs(*ctx.needs_input_grad[:8])
    options = Options(*flags)
    ctx.set_materialize_grads(False)
    ctx.needs, ctx.flags, ctx.value_dim = ctx.needs_input_grad[:8], flags, v.shape[3]
    ctx.output_final_state = inputs[15]
    ctx.save_for_backward(*_kept(needs, options, inputs_of(*tensors)), *output[2:])
