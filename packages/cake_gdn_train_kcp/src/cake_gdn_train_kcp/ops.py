"""The sharded rule as an eager autograd function and as operators, on the same two passes.

In eager mode the public function goes through `torch.autograd.Function` straight onto the passes; under torch.compile
it calls the registered operator. A graph then holds no offsets and no plan: both are read when the operator runs.
"""

from typing import Any

import torch

from cake_gdn_train import Needs, Saved
from cake_gdn_train_kcp.check import check_rank, make_place
from cake_gdn_train_kcp.sharded import Place, Tape, backward, forward
from cake_shared.dispatch import Undifferentiable
from cake_shared.gdn.eager import NO_SECOND_DERIVATIVE
from cake_shared.gdn.options import Inputs, Options

_TENSORS = (
    "Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? initial_state, Tensor? A_log, Tensor? dt_bias, "
    "Tensor cu_seqlens, SymInt[]? cuts, str group_name"
)
_OPTIONS = (
    "float scale, bool use_qk_l2norm_in_kernel, bool use_gate_in_kernel, bool use_beta_sigmoid_in_kernel, "
    "bool allow_neg_eigval, bool state_v_first"
)
_FWD = (
    f"chunk_gated_delta_rule_fwd({_TENSORS}, {_OPTIONS}, bool output_final_state, bool save) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_BWD = (
    f"chunk_gated_delta_rule_bwd(Tensor? d_o, Tensor? d_final_state, {_TENSORS}, Tensor entry, Tensor transfer, "
    f"Tensor tape, {_OPTIONS}, bool[] needs) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
_INPUTS = 8


class _Sharded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, place, options, output_final_state, *tensors):
        needs = Needs(*ctx.needs_input_grad[3:])
        inputs = _inside(tensors, place, options)
        o, final, tape = forward(inputs, options, place, output_final_state, any(needs))
        ctx.set_materialize_grads(False)
        ctx.place, ctx.options, ctx.needs = place, options, needs
        ctx.save_for_backward(*tensors, tape.entry, tape.transfer, *tape.saved)
        return o, _layout(final, options)

    @staticmethod
    def backward(ctx, d_o, d_final):
        tensors = ctx.saved_tensors
        entry, transfer, *saved = tensors[_INPUTS:]
        tape, options = Tape(Saved(*saved), entry, transfer), ctx.options

        def run(d_o, d_final, *tensors):
            inputs = _inside(tensors, ctx.place, options)
            grads = backward(inputs, options, ctx.place, d_o, _layout(d_final, options), tape, ctx.needs)
            return tuple(grads._replace(initial_state=_layout(grads.initial_state, options)))

        operands = (d_o, d_final, *tensors[:_INPUTS])
        if torch.is_grad_enabled():
            return None, None, None, *Undifferentiable.apply(NO_SECOND_DERIVATIVE, run, *operands)
        return None, None, None, *run(*operands)


def run_eager(place: Place, inputs: Inputs, options: Options, output_final_state: bool) -> tuple:
    """Run a checked call with gradients; returns `(o, states or None)`."""
    tensors = (
        *(inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta),
        *(inputs.initial_state, inputs.A_log, inputs.dt_bias),
    )
    return _Sharded.apply(place, options, output_final_state, *tensors)


def run_operator(
    inputs: Inputs, options: Options, output_final_state: bool, cuts: list[int] | None, group_name: str
) -> tuple:
    """Call the operator, which checks and plans when it runs; returns `(o, states or None)`."""
    tensors = (
        *(inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta),
        *(inputs.initial_state, inputs.A_log, inputs.dt_bias),
    )
    save = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)
    o, final, *_ = torch.ops.cake_gdn_train_kcp.chunk_gated_delta_rule_fwd(
        *tensors, inputs.cu_seqlens, cuts, group_name, *_flags(options), output_final_state, save
    )
    return o, final if output_final_state else None


def _flags(options: Options) -> tuple:
    o = options
    return o.scale, o.qk_l2norm, o.gate, o.beta_sigmoid, o.neg_eigval, o.state_v_first


def _layout(states: torch.Tensor | None, options: Options) -> torch.Tensor | None:
    """States between the call's layout and `[N, HV, K, V]`, in either direction."""
    return states.mT.contiguous() if states is not None and options.state_v_first else states


def _inside(tensors: tuple, place: Place, options: Options) -> Inputs:
    q, k, v, g, beta, initial_state, A_log, dt_bias = tensors
    return Inputs(k, g, beta, q, v, _layout(initial_state, options), A_log, dt_bias, place.local_offsets())


def _checked(tensors: tuple, cu_seqlens, cuts, group_name: str, options: Options) -> Place:
    # The registry of groups by name is the one that torch's own functional collectives use.
    group = torch.distributed.distributed_c10d._resolve_process_group(group_name)
    place = make_place(group, cu_seqlens, cuts)
    q, k, v, g, beta, initial_state, A_log, dt_bias = tensors
    check_rank(Inputs(k, g, beta, q, v, initial_state, A_log, dt_bias), options, place, None)
    return place


def _state_size(q: torch.Tensor, v: torch.Tensor) -> tuple[int, int, int]:
    return v.shape[2], q.shape[3], v.shape[3]


def _op_forward(*arguments: Any) -> tuple[torch.Tensor, ...]:
    tensors, (cu_seqlens, cuts, group_name), rest = arguments[:8], arguments[8:11], arguments[11:]
    options, (output_final_state, save) = Options(*rest[:6]), rest[6:]
    place = _checked(tensors, cu_seqlens, cuts, group_name, options)
    o, final, tape = forward(_inside(tensors, place, options), options, place, output_final_state, save)
    q, v = tensors[0], tensors[2]
    heads, key, value = _state_size(q, v)
    dtype = torch.float64 if q.dtype is torch.float64 else torch.float32
    if final is None:
        final = q.new_empty((0, heads, key, value), dtype=dtype)
    entry = q.new_zeros((heads, key, value), dtype=dtype) if tape.entry is None else tape.entry.contiguous()
    transfer = q.new_zeros((heads, key, key), dtype=dtype) if tape.transfer is None else tape.transfer.contiguous()
    # The groundwork's size follows the number of local sequences, which a graph does not know: it is made again.
    return o, _layout(final, options), entry, transfer, tape.saved.entry_states


def _op_backward(*arguments: Any) -> tuple[torch.Tensor, ...]:
    d_o, d_final, *tensors = arguments[:10]
    (cu_seqlens, cuts, group_name), (entry, transfer, saved), rest = arguments[10:13], arguments[13:16], arguments[16:]
    options, needs = Options(*rest[:6]), Needs(*rest[6])
    place = _checked(tuple(tensors), cu_seqlens, cuts, group_name, options)
    shard = place.shard
    tape = Tape(
        Saved(saved),
        entry if shard.continues_from_previous else None,
        transfer if shard.passes_through else None,
    )
    # An output that was not asked for has no rows, and so has a gradient made for it.
    d_final = None if d_final is None or d_final.shape[0] < shard.sequences else _layout(d_final, options)
    grads = backward(_inside(tuple(tensors), place, options), options, place, d_o, d_final, tape, needs)
    grads = grads._replace(initial_state=_layout(grads.initial_state, options))
    none = tensors[0].new_empty
    return tuple(
        none(0, dtype=tensors[0].dtype if like is None else like.dtype) if x is None else x
        for x, like in zip(grads, tensors)
    )


def _fake_forward(*arguments: Any) -> tuple[torch.Tensor, ...]:
    q, v = arguments[0], arguments[2]
    output_final_state, save = arguments[17:]
    # Outputs and tape are those of the single-rank operator on the local tokens.
    o, final, tape, _ = torch.ops.cake_gdn_train.chunk_gated_delta_rule_fwd(
        *arguments[:5], None, *arguments[6:8], None, *arguments[11:17], output_final_state, save
    )
    if output_final_state:
        # How many sequences a rank has is in the offsets' values, which a graph does not know.
        final = final.new_empty((torch.library.get_ctx().new_dynamic_size(), *final.shape[1:]))
    heads, key, value = _state_size(q, v)
    entry, transfer = (tape.new_empty((heads, key, width)) for width in (value, key))
    return o, final, entry, transfer, tape


def _fake_backward(*arguments: Any) -> tuple[torch.Tensor, ...]:
    tensors, needs = arguments[2:10], arguments[22]
    return tuple(
        tensors[0].new_empty((0,), dtype=tensors[0].dtype if like is None else like.dtype)
        if like is None or not needed
        else torch.empty_like(like, memory_format=torch.contiguous_format)
        for like, needed in zip(tensors, needs)
    )


def _setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
    ctx.set_materialize_grads(False)
    ctx.plan, ctx.flags, ctx.needs = inputs[9:11], inputs[11:17], list(ctx.needs_input_grad[:_INPUTS])
    ctx.save_for_backward(*inputs[:9], *output[2:])


def _gradient(ctx: Any, d_o: torch.Tensor | None, d_final: torch.Tensor | None, *unused: None) -> tuple:
    *tensors, entry, transfer, tape = ctx.saved_tensors
    grads = torch.ops.cake_gdn_train_kcp.chunk_gated_delta_rule_bwd(
        d_o, d_final, *tensors, *ctx.plan, entry, transfer, tape, *ctx.flags, ctx.needs
    )
    return (*(x if needed else None for x, needed in zip(grads, ctx.needs)), *(None,) * 11)


def _no_second_derivative(ctx: Any, *gradients: torch.Tensor | None) -> None:
    raise RuntimeError(NO_SECOND_DERIVATIVE)


def _register() -> torch.library.Library:
    library = torch.library.Library("cake_gdn_train_kcp", "DEF")
    for schema, implementation, fake in ((_FWD, _op_forward, _fake_forward), (_BWD, _op_backward, _fake_backward)):
        name = schema.split("(", 1)[0]
        library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
        library.impl(name, implementation, "CompositeExplicitAutograd")
        torch.library.register_fake(f"cake_gdn_train_kcp::{name}", fake, lib=library)
    torch.library.register_autograd(
        "cake_gdn_train_kcp::chunk_gated_delta_rule_fwd", _gradient, setup_context=_setup_context, lib=library
    )
    torch.library.register_autograd(
        "cake_gdn_train_kcp::chunk_gated_delta_rule_bwd", _no_second_derivative, lib=library
    )
    return library


# The operators live as long as this object.
_LIBRARY = _register()
