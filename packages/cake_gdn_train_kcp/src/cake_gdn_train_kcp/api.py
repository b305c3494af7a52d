"""The public function of cake_gdn_train_kcp: the gated delta rule with the sequence axis sharded over ranks."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from cake_gdn_train import Needs, Saved
from cake_gdn_train import chunk_gated_delta_rule as single_rank_rule
from cake_gdn_train_kcp.plan import Shard, plan_shards
from cake_gdn_train_kcp.sharded import Place, Tape, backward, forward
from cake_shared.check import check_backend, kind_of
from cake_shared.gdn.check import check_call
from cake_shared.gdn.options import Inputs, Options, make_call


def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    scale: float | None = None,
    *,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    use_gate_in_kernel: bool = False,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    use_beta_sigmoid_in_kernel: bool = False,
    allow_neg_eigval: bool = False,
    state_v_first: bool = False,
    cu_seqlens: torch.Tensor | None = None,
    backend: str | None = None,
    group: dist.ProcessGroup | None = None,
    shards: Sequence[Shard] | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute the gated delta rule over a pack whose tokens are spread over the ranks of `group`.

    Every rank calls with its own tokens and the offsets of the whole pack, and gets the outputs of its own tokens. A
    sequence may be cut anywhere and span any number of ranks. One all-gather of a pair `[HV, K, K + V]` in the states'
    dtype is made in the forward pass and one in the backward pass, none when no sequence is cut. A collective needs
    every rank: where one rank computes gradients all must, a rank without tokens included (its output takes part in
    autograd; `0 * o.sum()` will do).

    The rule and all arguments not listed here are those of `cake_gdn_train.chunk_gated_delta_rule`; so are the dtypes.
    The gradients of q, k, v, g, beta and initial_state are those of the sum of all ranks' losses. The gradients of
    A_log and dt_bias are this rank's part of them, the terms of its own tokens: the all-reduce (sum) over `group` that
    data-parallel training makes for every parameter completes them.

    Parameters
    ----------
    q, k, v, g, beta
        This rank's tokens: `[1, T, H, K]`, `[1, T, H, K]`, `[1, T, HV, V]`, `[1, T, HV]`, `[1, T, HV]`, with T at least
        the tokens of its shard. Rows beyond them give zeros, in the output and in every gradient.
    initial_state
        FP32 `[n, HV, K, V]`, n the local sequences (`shard.sequences`): row i is the state before local sequence i. The
        row of a sequence that continues from an earlier rank is not used and its gradient is zero.
    output_final_state
        Whether the states after the last local token of each local sequence are returned: the final state of a
        sequence that ends here, the state at the cut of one that continues. All are differentiable.
    cu_seqlens
        Offsets of the whole pack, the same on every rank: int32 or int64 `[N + 1]` in host memory, from 0 to the number
        of tokens of all ranks together. May be left out when `shards` are given.
    backend
        As in `cake_gdn_train`.
    group
        The ranks that share the pack. None: no sharding; the call is `cake_gdn_train.chunk_gated_delta_rule` on this
        process alone, `cu_seqlens` then being optional and local.
    shards
        What `plan_shards` returned for the same offsets and the group's size; planned here with its defaults when None.

    Returns
    -------
    tuple
        `o` `[1, T, HV, V]` in the dtype of v, and the states `[n, HV, K, V]` of the local sequences, or None unless
        `output_final_state`.

    Raises
    ------
    TypeError, ValueError
        For an argument of the wrong kind, dtype, shape, device or value, before any communication; the message names
        it, what it got and takes. The other ranks cannot see that and wait for this one until the group's timeout.
    UnsupportedArchError
        For CUDA, which cake_gdn_train does not serve yet.
    """
    if group is None:
        if shards is not None:
            raise ValueError(f"shards: got {kind_of(shards)} without group, takes None then")
        return single_rank_rule(
            q,
            k,
            v,
            g,
            beta,
            scale,
            initial_state=initial_state,
            output_final_state=output_final_state,
            use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel,
            use_gate_in_kernel=use_gate_in_kernel,
            A_log=A_log,
            dt_bias=dt_bias,
            use_beta_sigmoid_in_kernel=use_beta_sigmoid_in_kernel,
            allow_neg_eigval=allow_neg_eigval,
            state_v_first=state_v_first,
            cu_seqlens=cu_seqlens,
            backend=backend,
        )
    place = _place(group, cu_seqlens, shards)
    local_offsets = torch.tensor(place.shard.cu_seqlens, dtype=torch.int64)
    inputs, options = make_call(
        q,
        k,
        v,
        g,
        beta,
        scale,
        initial_state,
        A_log,
        dt_bias,
        local_offsets,
        use_qk_l2norm_in_kernel,
        use_gate_in_kernel,
        use_beta_sigmoid_in_kernel,
        allow_neg_eigval,
        state_v_first,
    )
    check_call(inputs, options)
    _check_local(inputs, place, backend)
    return _Sharded.apply(
        place, options, bool(output_final_state), local_offsets, q, k, v, g, beta, initial_state, A_log, dt_bias
    )


def _place(group: object, cu_seqlens: object, shards: object) -> Place:
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group: got {kind_of(group)}, takes a torch.distributed.ProcessGroup or None")
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if rank < 0:
        raise ValueError("group: got one that this process is not a rank of, takes one that it belongs to")
    if shards is None:
        if cu_seqlens is None:
            raise ValueError("cu_seqlens: got None with a group, takes the offsets of the whole pack")
        _check_offsets(cu_seqlens)
        return Place(group, plan_shards(cu_seqlens, size), rank)
    if not isinstance(shards, Sequence) or not all(isinstance(shard, Shard) for shard in shards):
        raise TypeError(f"shards: got {kind_of(shards)}, takes a sequence of Shard, as plan_shards makes it")
    shards = tuple(shards)
    if [shard.rank for shard in shards] != list(range(size)):
        raise ValueError(
            f"shards: got ranks {[shard.rank for shard in shards]}, takes one for each of {size} ranks in order"
        )
    if isinstance(cu_seqlens, torch.Tensor) and cu_seqlens.device.type == "cpu":
        _check_offsets(cu_seqlens)
        cuts = [shard.start for shard in shards[1:]]
        if plan_shards(cu_seqlens, size, cuts=cuts) != shards:
            raise ValueError(
                f"shards: got a plan of {shards[-1].stop} tokens with cuts {cuts} that does not belong to cu_seqlens, "
                "takes what plan_shards makes of the same offsets"
            )
    return Place(group, shards, rank)


def _check_offsets(cu_seqlens: object) -> None:
    if not isinstance(cu_seqlens, torch.Tensor):
        raise TypeError(f"cu_seqlens: got {kind_of(cu_seqlens)}, takes a torch.Tensor")
    if cu_seqlens.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"cu_seqlens: got {str(cu_seqlens.dtype).removeprefix('torch.')}, takes int32 or int64")
    if cu_seqlens.dim() != 1:
        raise ValueError(f"cu_seqlens: got shape {list(cu_seqlens.shape)}, takes [N + 1] with N >= 0")


def _check_local(inputs: Inputs, place: Place, backend: object) -> None:
    check_backend(backend)
    device = inputs.q.device
    if backend is not None and backend != device.type:
        raise ValueError(f"backend: got {backend!r} with tensors on {device}, takes None or that of the device")
    tokens = place.shard.tokens
    if inputs.q.shape[1] < tokens:
        raise ValueError(
            f"q: got T = {inputs.q.shape[1]} tokens, takes at least the {tokens} of rank {place.rank}'s shard"
        )


class _Sharded(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, place, options, output_final_state, local_offsets, q, k, v, g, beta, initial_state, A_log, dt_bias
    ):
        needs = Needs(*ctx.needs_input_grad[4:])
        inside = _inside(q, k, v, g, beta, initial_state, A_log, dt_bias, local_offsets, options)
        o, final, tape = forward(inside, options, place, output_final_state, any(needs))
        ctx.set_materialize_grads(False)
        ctx.place, ctx.options, ctx.needs = place, options, needs
        ctx.save_for_backward(
            q, k, v, g, beta, initial_state, A_log, dt_bias, local_offsets, tape.entry, tape.transfer, *tape.saved
        )
        return o, _layout(final, options)

    @staticmethod
    @once_differentiable
    def backward(ctx, d_o, d_final):
        *inputs, local_offsets, entry, transfer, entry_states = ctx.saved_tensors
        inside = _inside(*inputs, local_offsets, ctx.options)
        tape = Tape(Saved(entry_states), entry, transfer)
        grads = backward(inside, ctx.options, ctx.place, d_o, _layout(d_final, ctx.options), tape, ctx.needs)
        grads = grads._replace(initial_state=_layout(grads.initial_state, ctx.options))
        return (None,) * 4 + tuple(grads)


def _layout(states: torch.Tensor | None, options: Options) -> torch.Tensor | None:
    """States between the call's layout and `[N, HV, K, V]`, in either direction."""
    return states.mT.contiguous() if states is not None and options.state_v_first else states


def _inside(q, k, v, g, beta, initial_state, A_log, dt_bias, local_offsets, options) -> Inputs:
    return Inputs(k, g, beta, q, v, _layout(initial_state, options), A_log, dt_bias, local_offsets)
