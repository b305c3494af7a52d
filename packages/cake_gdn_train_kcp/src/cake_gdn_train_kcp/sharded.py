"""The two passes of one rank: reduce what continues to a pair, exchange, run every local sequence from its true state.

Inside, states are `[N, HV, K, V]` whatever the layout of the call.
"""

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from cake_gdn_train import Gradients, Needs, Saved, chunk_gated_delta_rule_bwd, chunk_gated_delta_rule_fwd
from cake_gdn_train_kcp.exchange import (
    compose_gradients,
    compose_states,
    gather_pairs,
    is_cut,
    sink_ranks,
    source_ranks,
)
from cake_gdn_train_kcp.plan import Shard
from cake_shared.gdn.isolation import isolated
from cake_shared.gdn.options import Inputs, Options
from cake_shared.gdn.segments import forward_maps

ONLY_INITIAL_STATE = Needs(False, False, False, False, False, True, False, False)


@dataclass(frozen=True)
class Place:
    """One rank of a plan: the group that it talks to, the shards of all ranks, and its own number."""

    group: dist.ProcessGroup
    shards: tuple[Shard, ...]
    rank: int

    @property
    def shard(self) -> Shard:
        """This rank's shard."""
        return self.shards[self.rank]

    def local_offsets(self) -> torch.Tensor:
        """Offsets of the local sequences as a tensor `[n + 1]`, int64, in host memory."""
        return torch.tensor(self.shard.cu_seqlens, dtype=torch.int64, device="cpu")


@dataclass(frozen=True)
class Tape:
    """What the backward pass needs besides the inputs: the local run's own tape, and what this rank received and sent.

    `entry` `[HV, K, V]` is the state that arrived (None where no sequence continues here), `transfer` `[HV, K, K]` the
    map `M` of a rank that holds nothing but a middle part of one sequence (None elsewhere).
    """

    saved: Saved
    entry: torch.Tensor | None
    transfer: torch.Tensor | None


def _keywords(options: Options, inputs: Inputs) -> dict:
    return {
        "scale": options.scale,
        "use_qk_l2norm_in_kernel": options.qk_l2norm,
        "use_gate_in_kernel": options.gate,
        "use_beta_sigmoid_in_kernel": options.beta_sigmoid,
        "allow_neg_eigval": options.neg_eigval,
        "A_log": inputs.A_log,
        "dt_bias": inputs.dt_bias,
    }


def _tensors(inputs: Inputs) -> tuple[torch.Tensor, ...]:
    return inputs.q, inputs.k, inputs.v, inputs.g, inputs.beta


def _state_dtype(inputs: Inputs) -> torch.dtype:
    return torch.float64 if inputs.q.dtype is torch.float64 else torch.float32


def _state_shape(inputs: Inputs) -> tuple[int, int, int]:
    return inputs.v.shape[2], inputs.k.shape[3], inputs.v.shape[3]


def _tokens(inputs: Inputs, start: int, stop: int) -> Inputs:
    """The inputs of one run of tokens, taken as one sequence."""
    q, k, v, g, beta = (x[:, start:stop] for x in _tensors(inputs))
    return Inputs(k, g, beta, q, v, None, inputs.A_log, inputs.dt_bias, None)


def _local_states(inputs: Inputs, shard: Shard, entry: torch.Tensor | None) -> torch.Tensor | None:
    """Initial states of the local sequences: the caller's, with the one that arrived in place of row 0."""
    if entry is None:
        return inputs.initial_state
    if inputs.initial_state is None:
        states = entry.new_zeros((shard.sequences, *entry.shape))
    else:
        states = inputs.initial_state.to(entry.dtype, copy=True)
    states[0] = entry
    return states


def _run(inputs: Inputs, options: Options, states: torch.Tensor | None, want_final: bool, save: bool):
    return chunk_gated_delta_rule_fwd(
        *_tensors(inputs),
        initial_state=states,
        output_final_state=want_final,
        save_states=save,
        cu_seqlens=inputs.cu_seqlens,
        **_keywords(options, inputs),
    )


def _exit_state(piece: Inputs, options: Options, initial: torch.Tensor | None) -> torch.Tensor:
    """The state `[HV, K, V]` after a run of tokens."""
    return _run(piece, options, initial, True, False)[1][0]


def _maps(piece: Inputs, options: Options) -> tuple[torch.Tensor, torch.Tensor]:
    """The pair of a run of tokens, M `[HV, K, K]` and N `[HV, K, V]`.

    A GPU has no program for the pair alone: without values the states evolve by M, so that the identity becomes it.
    """
    if piece.k.device.type == "cpu":
        maps = forward_maps(piece, options)
        return maps.linear[0], maps.constant[0]
    heads, key_dim, _ = _state_shape(piece)
    identity = torch.eye(key_dim, dtype=_state_dtype(piece), device=piece.k.device).expand(1, heads, -1, -1)
    constant = _exit_state(piece, options, None)
    return _exit_state(replace(piece, v=torch.zeros_like(piece.v)), options, identity), constant


@isolated
def forward(inputs: Inputs, options: Options, place: Place, want_final: bool, save: bool):
    """Outputs of this rank's tokens, final states of its local sequences or None, and the tape.

    A rank that starts fresh runs first and sends its last state. A rank that continues a sequence reduces its last one,
    waits for the exchange, and then runs from what arrived.
    """
    shard = place.shard
    if not is_cut(place.shards):
        o, final, saved = _run(inputs, options, inputs.initial_state, want_final, save)
        return o, final, Tape(saved, None, None)
    heads, key_dim, value_dim = _state_shape(inputs)
    pair = torch.zeros(heads, key_dim, key_dim + value_dim, dtype=_state_dtype(inputs), device=inputs.q.device)
    results = entry = transfer = None
    if not shard.continues_from_previous:
        results = _run(inputs, options, inputs.initial_state, want_final or shard.continues_to_next, save)
        if shard.continues_to_next:
            pair[..., key_dim:] = results[1][-1]
    elif shard.continues_to_next:
        tail = _tokens(inputs, *shard.cu_seqlens[-2:])
        if shard.passes_through:
            transfer, pair[..., key_dim:] = _maps(tail, options)
            pair[..., :key_dim] = transfer
        else:
            initial = None if inputs.initial_state is None else inputs.initial_state[-1:].to(pair.dtype)
            pair[..., key_dim:] = _exit_state(tail, options, initial)
    pairs = gather_pairs(pair, place.group)
    if results is None:
        entry = compose_states(pairs, source_ranks(place.shards, place.rank))
        results = _run(inputs, options, _local_states(inputs, shard, entry), want_final, save)
    o, final, saved = results
    return o, final if want_final else None, Tape(saved, entry, transfer if save else None)


def _run_back(inputs, options, states, d_o, d_final, saved, needs) -> Gradients:
    return chunk_gated_delta_rule_bwd(
        d_o,
        d_final,
        saved,
        *_tensors(inputs),
        initial_state=states,
        cu_seqlens=inputs.cu_seqlens,
        needs=needs,
        **_keywords(options, inputs),
    )


@isolated
def backward(
    inputs: Inputs,
    options: Options,
    place: Place,
    d_o: torch.Tensor | None,
    d_final: torch.Tensor | None,
    tape: Tape,
    needs: Needs,
) -> Gradients:
    """Gradients of this rank's inputs: the forward pass mirrored, from the last rank of a sequence to its first.

    `needs` is what the caller wants. Row 0 of the initial states' gradient is zero where their sequence continues,
    since the caller's row was not used.
    """
    shard = place.shard
    states = _local_states(inputs, shard, tape.entry)
    if not is_cut(place.shards):
        return _run_back(inputs, options, states, d_o, d_final, tape.saved, needs)
    heads, key_dim, value_dim = _state_shape(inputs)
    zeros = torch.zeros(heads, key_dim, key_dim + value_dim, dtype=_state_dtype(inputs), device=inputs.q.device)
    pair, grads = zeros, None
    local_needs = needs._replace(initial_state=True) if tape.entry is not None else needs
    if not shard.continues_to_next:
        grads = _run_back(inputs, options, states, d_o, d_final, tape.saved, local_needs)
        if shard.continues_from_previous:
            pair[..., key_dim:] = grads.initial_state[0]
    elif shard.continues_from_previous:
        head = _tokens(inputs, *shard.cu_seqlens[:2])
        stop = shard.cu_seqlens[1]
        nothing = Saved(states.new_empty(0))
        pair[..., key_dim:] = _run_back(
            head,
            options,
            states[:1],
            None if d_o is None else d_o[:, :stop],
            None if d_final is None else d_final[:1],
            nothing,
            ONLY_INITIAL_STATE,
        ).initial_state[0]
        if shard.passes_through:
            pair[..., :key_dim] = tape.transfer.mT
    pairs = gather_pairs(pair, place.group)
    if grads is None:
        arrived = compose_gradients(pairs, sink_ranks(place.shards, place.rank))
        ends = (
            arrived.new_zeros((shard.sequences, *arrived.shape))
            if d_final is None
            else d_final.to(arrived.dtype, copy=True)
        )
        ends[-1] += arrived
        grads = _run_back(inputs, options, states, d_o, ends, tape.saved, local_needs)
    if tape.entry is not None:
        grads = grads._replace(initial_state=_without_row_0(grads.initial_state) if needs.initial_state else None)
    return grads


def _without_row_0(gradient: torch.Tensor) -> torch.Tensor:
    gradient = gradient.clone()
    gradient[0] = 0
    return gradient
