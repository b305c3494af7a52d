"""Runs of chunks collapsed to affine maps of the state, for sequences that several ranks hold in pieces.

Both chains are affine: a piece of a sequence maps its entry state to `S_out = M S_in + N` and, given the gradient of
its outputs, the gradient of its exit state to `dS_in = M^T dS_out + Y`. M is K x K, N and Y are K x V whatever the
length, so pieces can be reduced side by side, composed in sequence order, and run again from their true entry states.
"""

from typing import NamedTuple

import torch

from cake_shared.gdn.backward import load_d_out, run_chain_backward
from cake_shared.gdn.forward import scores
from cake_shared.gdn.intra import run_chain
from cake_shared.gdn.isolation import isolated
from cake_shared.gdn.options import Inputs, Options
from cake_shared.gdn.plan import padded
from cake_shared.gdn.products import product
from cake_shared.gdn.walk import Walk, load_queries, load_values, load_wave, make_walk
from cake_shared.plan import Group


class StateMap(NamedTuple):
    """The affine map `S -> linear @ S + constant`: `[N, HV, K, K]` and `[N, HV, K, V]`, one map for each piece."""

    linear: torch.Tensor
    constant: torch.Tensor

    def __call__(self, state: torch.Tensor) -> torch.Tensor:
        """Apply the maps to states `[N, HV, K, V]`."""
        return _matmul(self.linear, state).add_(self.constant)

    def then(self, later: "StateMap") -> "StateMap":
        """Return the map of this piece followed by a later one."""
        return StateMap(_matmul(later.linear, self.linear), later(self.constant))


def _matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return product(a.flatten(0, 1).contiguous(), b.flatten(0, 1).contiguous()).unflatten(0, a.shape[:2])


@isolated
@torch.no_grad()
def forward_maps(inputs: Inputs, options: Options) -> StateMap:
    """Reduce every sequence of a pack, or piece of one, to the map from its entry state to its exit state.

    Parameters
    ----------
    inputs
        k, v, g, beta and, where used, A_log, dt_bias and cu_seqlens of a checked call; q and initial_state are unused.
    options
        Of the call. States are in the K x V layout whatever `state_v_first`.

    Returns
    -------
    StateMap
        FP32 (FP64 for FP64 data); the identity for an empty sequence.
    """
    heads, width = inputs.v.shape[2:]
    walk = make_walk(inputs, heads, width)
    key = walk.plan.problem.key_dim
    count = walk.pack.sequences
    linear = torch.eye(key, dtype=walk.dtype).expand(count, heads, key, key).clone()
    constant = torch.zeros(count, heads, key, width, dtype=walk.dtype)
    for group in walk.groups:
        _forward_group(walk, group, inputs, options, linear, constant)
    return StateMap(linear, constant)


def _forward_group(
    walk: Walk, group: Group, inputs: Inputs, options: Options, linear: torch.Tensor, constant: torch.Tensor
) -> None:
    first, count = walk.value_range(group)
    wide = padded(walk.plan.problem.key_dim)
    states = len(group.sequences) * count
    shift = torch.zeros(states, *walk.state_shape, dtype=walk.dtype)
    turn = torch.eye(wide, dtype=walk.dtype).expand(states, wide, wide).clone()
    for rnd in group.rounds:
        for index in walk.indices(group, rnd):
            chunks = load_wave(walk, group, index, inputs, options).chunks
            run_chain(chunks, index.counts, load_values(walk, group, index, inputs.v), shift)
            nothing = shift.new_zeros(index.chunks * count, index.rows, wide)
            run_chain(chunks, index.counts, nothing, turn)
    sequences, mine = torch.tensor(group.sequences), slice(first, first + count)
    key = walk.plan.problem.key_dim
    linear[sequences, mine] = turn.view(-1, count, wide, wide)[:, :, :key, :key]
    constant[sequences, mine] = walk.unpadded(group, shift)


@isolated
@torch.no_grad()
def backward_constants(inputs: Inputs, options: Options, d_out: torch.Tensor | None, value_dim: int) -> torch.Tensor:
    """Return Y of every sequence of a pack, or piece of one: its entry state's gradient where its exit state has none.

    With M of `forward_maps`, the gradient of the entry state is `M^T dS_out + Y`, the map
    `StateMap(M.mT, Y)` of the gradient of the exit state.

    Parameters
    ----------
    inputs
        q, k, g, beta and, where used, A_log, dt_bias and cu_seqlens; v and initial_state are not read.
    options
        Of the call.
    d_out
        Gradient of the outputs `[B, T, HV, V]`, any strides; None for zero.
    value_dim
        V.

    Returns
    -------
    torch.Tensor
        `[N, HV, K, V]`, FP32 (FP64 for FP64 data), zero for an empty sequence.
    """
    heads = inputs.g.shape[2]
    walk = make_walk(inputs, heads, value_dim)
    result = torch.zeros(walk.pack.sequences, heads, walk.plan.problem.key_dim, value_dim, dtype=walk.dtype)
    if d_out is None:
        return result
    for group in walk.groups:
        first, count = walk.value_range(group)
        carry = torch.zeros(len(group.sequences) * count, *walk.state_shape, dtype=walk.dtype)
        for rnd in reversed(group.rounds):
            for index in reversed(list(walk.indices(group, rnd))):
                data = load_wave(walk, group, index, inputs, options)
                q, _ = load_queries(walk, group, index, inputs, options)
                _, pair = scores(data, q, options.scale)
                d_rows = load_d_out(walk, group, data, d_out)
                run_chain_backward(data, q, pair, d_rows, carry, options.scale)
        result[torch.tensor(group.sequences), first : first + count] = walk.unpadded(group, carry)
    return result
