"""The backward pass on the CPU, written out; equations in the docstrings, notation of `intra`.

Each group is walked segment by segment from its last one: the states of the segment's chunks are recomputed from its
entry state, then its waves are walked backward with the gradient of the state as carry.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from cake_shared.gdn.forward import TAPE_HEAD, entry_states, k_first, scores
from cake_shared.gdn.intra import (
    apply_in_two_terms,
    by_key_head,
    crossing,
    run_chain,
    scaled_rows,
    split_terms,
    sum_over_group,
)
from cake_shared.gdn.options import Inputs, Options
from cake_shared.gdn.products import add_product, product
from cake_shared.gdn.prologue import beta_backward, gate_backward, normalised_backward
from cake_shared.gdn.tiles import load_states, new_rows, rows_of, scatter
from cake_shared.gdn.walk import Walk, WaveData, load_queries, load_values, load_wave, make_walk
from cake_shared.plan import Group, Round, WorkBudget, extra_segment_capacity


class Needs(NamedTuple):
    """Which gradients are wanted."""

    q: bool = True
    k: bool = True
    v: bool = True
    g: bool = True
    beta: bool = True
    initial_state: bool = True
    A_log: bool = True
    dt_bias: bool = True

    @property
    def gates(self) -> bool:
        """Whether the gradient of the log gates is needed for anything."""
        return self.g or self.A_log or self.dt_bias

    @property
    def chain(self) -> bool:
        """Whether anything but the gradient of q is wanted: that one alone needs no backward chain."""
        return self.k or self.v or self.beta or self.gates or self.initial_state

    @property
    def states(self) -> bool:
        """Whether any gradient depends on the values and states of the forward pass."""
        return self.q or self.k or self.beta or self.gates


@dataclass
class Gradients:
    """Rows `[batch * tokens + 1, heads, width]` and states that the walk fills; None where not wanted."""

    q: torch.Tensor | None = None
    k: torch.Tensor | None = None
    v: torch.Tensor | None = None
    g: torch.Tensor | None = None
    beta: torch.Tensor | None = None
    initial_state: torch.Tensor | None = None
    A_log: torch.Tensor | None = None
    dt_bias: torch.Tensor | None = None


@dataclass
class Stash:
    """A wave of the segment at hand with its forward state: `x`, `V'` and entry states, or None where not needed."""

    data: WaveData
    x: torch.Tensor | None
    written: torch.Tensor | None
    states: torch.Tensor | None


@dataclass
class Cotangents:
    """Per chunk and value head, flattened: `d_written` (`dV'`), `d_right` (`dR`), `d_next` (`dS1`)."""

    d_out: torch.Tensor
    d_written: torch.Tensor | None
    d_right: torch.Tensor | None
    d_next: torch.Tensor | None


def run_chain_backward(
    data: WaveData, q: torch.Tensor, pair: torch.Tensor, d_out: torch.Tensor, carry: torch.Tensor, scale: float
) -> Cotangents:
    """Walk the gradients of the states of a wave backward.

    `dV' = P^T dO + (e K) dS1`, `dR = T^T dV'`, `dS0 = gamma_last dS1 + scale (gamma Q)^T dO - (beta gamma K)^T dR`,
    where `pair` (`P`) already carries the scale. `carry` holds the gradients of the states at the wave's end and, on
    return, at its entry; sequences that end inside the wave find theirs in it.
    """
    chunks = data.chunks
    gates = chunks.gates
    counts = data.index.counts
    heads = chunks.shape[1]
    sizes = [n * heads for n in counts]
    d_written = product(pair.mT, d_out)
    into = product(scaled_rows(q, gates.gamma * scale).mT, d_out)
    d_right = torch.empty_like(d_written)
    d_next = torch.empty_like(into)
    solve = split_terms(chunks.inverse.flatten(0, 1).mT, d_written.dtype, sizes)
    tailed = scaled_rows(chunks.k, gates.tail).split(sizes)
    decayed = scaled_rows(chunks.k, gates.gamma * chunks.beta).mT.split(sizes)
    last = gates.last.reshape(-1, 1, 1).split(sizes)
    ws, rs, ns, qs = d_written.split(sizes), d_right.split(sizes), d_next.split(sizes), into.split(sizes)
    end = len(sizes) - 1
    ns[end].copy_(carry[: sizes[end]])
    for i in range(end, -1, -1):
        add_product(ws[i], tailed[i], ns[i])
        apply_in_two_terms(solve[i], ws[i], rs[i])
        target = ns[i - 1][: sizes[i]] if i else carry[: sizes[0]]
        torch.addcmul(qs[i], ns[i], last[i], out=target)
        add_product(target, decayed[i], rs[i], -1.0)
        if i and sizes[i - 1] > sizes[i]:
            ns[i - 1][sizes[i] :].copy_(carry[sizes[i] : sizes[i - 1]])
    return Cotangents(d_out, d_written, d_right, d_next)


def _row_dots(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return (a * b).sum(-1)


def _gate_gradient(
    pairs: torch.Tensor, entering: torch.Tensor, leaving: torch.Tensor, through: torch.Tensor
) -> torch.Tensor:
    """Return `dg_t = sum_{i>=t>j} pairs_ij + sum_{i>=t} entering_i + sum_{j<t} leaving_j + through`.

    Only the terms that gate `t` scales are added, so that nothing cancels under strong decay. `pairs` `[c, h, rows,
    rows]` must be zero on and above the diagonal; `entering`, `leaving` are `[c, h, rows]`, `through` is `[c, h]`.
    """
    rows = pairs.shape[-1]
    before = crossing(rows, pairs.dtype)
    flat = pairs.flatten(0, 1)
    crossed = product(flat, before.expand_as(flat)).view_as(pairs).add_(entering.unsqueeze(-1)).tril_()
    dg = crossed.sum(-2).add_(through.unsqueeze(-1))
    # Not an inclusive sum minus the last term: that term may be all there is of it.
    dg[..., 1:] += leaving[..., :-1].cumsum(-1)
    return dg


def _wave_gradients(
    walk: Walk,
    group: Group,
    stash: Stash,
    q: torch.Tensor,
    q_scale: torch.Tensor | None,
    cot: Cotangents,
    qk: torch.Tensor,
    options: Options,
    needs: Needs,
    out: Gradients,
) -> None:
    """Form and store the gradients of one wave from its forward and backward chains.

    `M = -strict_lower(dR V'^T) beta Gamma`, `dP = (dO V'^T) Gamma`, `dQ = scale (gamma (dO S0^T) + dP K)`,
    `dK = (M + M^T) K + scale dP^T Q - beta gamma (dR S0^T) + e (V' dS1^T)`, `dV = beta dR`,
    `dbeta = rowsum(dR X) - rowsum(strict_lower(dR V'^T) Gamma K K^T)`; `qk` carries the scale.
    """
    data, index = stash.data, stash.data.index
    chunks, gates = data.chunks, data.chunks.gates
    values, keys = walk.value_range(group), walk.key_range(group)
    count, heads, rows, _ = chunks.shape
    key_heads = keys[1]
    tile = (count, heads, rows, -1)
    if needs.v:
        scatter(cot.d_right.view(tile) * chunks.beta.unsqueeze(-1), out.v, index, values)
    if not needs.states:
        return
    kk, k = chunks.kk, chunks.k
    states_t = stash.states.mT
    deep = needs.q or needs.k or needs.gates
    if needs.chain:
        weighted = product(cot.d_right, stash.written.mT).view_as(gates.pair).mul_(gates.pair)
        kk_weighted = (by_key_head(weighted, key_heads) * kk.unsqueeze(2)).view_as(weighted)
    if needs.beta:
        dbeta = _row_dots(cot.d_right, stash.x).view(count, heads, rows).sub_(kk_weighted.sum(-1)).double()
        if options.beta_sigmoid:
            dbeta = beta_backward(dbeta, data.decays, options)
        scatter(dbeta.unsqueeze(-1), out.beta, index, values)
    if not deep:
        return
    scale = options.scale
    dp = product(cot.d_out, stash.written.mT).view_as(gates.pair).mul_(gates.pair)
    dq_in = product(cot.d_out, states_t).view(tile).mul_((gates.gamma * scale).unsqueeze(-1))
    if needs.k or needs.gates:
        dk_in = product(cot.d_right, states_t).view(tile).mul_((gates.gamma * chunks.beta).unsqueeze(-1))
        dk_end = product(stash.written, cot.d_next.mT).view(tile).mul_(gates.tail.unsqueeze(-1))
    if needs.gates:
        q_rows, k_rows = q.unsqueeze(2), k.unsqueeze(2)
        entering = _row_dots(by_key_head(dq_in, key_heads), q_rows)
        entering = entering.sub_(_row_dots(by_key_head(dk_in, key_heads), k_rows)).flatten(1, 2)
        leaving = _row_dots(by_key_head(dk_end, key_heads), k_rows).flatten(1, 2)
        through = (cot.d_next * stash.states).sum((-1, -2)).view(count, heads).mul_(gates.last)
        pairs = (by_key_head(dp, key_heads) * qk.unsqueeze(2)).view_as(dp)
        pairs.sub_(kk_weighted.mul_(chunks.beta.unsqueeze(-1))).tril_(-1)
        dg = _gate_gradient(pairs, entering, leaving, through).double()
        _store_gate_gradient(dg, data, values, options, needs, out)
    dp_sum = sum_over_group(dp, key_heads).flatten(0, 1)
    k_flat = k.flatten(0, 1)
    if needs.q:
        dq = sum_over_group(dq_in, key_heads).flatten(0, 1)
        dq = add_product(dq, dp_sum, k_flat, scale).view_as(k)
        if q_scale is not None:
            dq = normalised_backward(dq, q, q_scale)
        scatter(dq, out.q, index, keys)
    if needs.k:
        m = sum_over_group(weighted.mul_(chunks.beta.unsqueeze(-1)).tril_(-1), key_heads).flatten(0, 1)
        dk = sum_over_group(dk_end.sub_(dk_in), key_heads).flatten(0, 1)
        dk = add_product(dk, dp_sum.mT, q.flatten(0, 1), scale)
        dk = add_product(dk, m + m.mT, k_flat, -1.0).view_as(k)
        if data.k_scale is not None:
            dk = normalised_backward(dk, k, data.k_scale)
        scatter(dk, out.k, index, keys)


def _store_gate_gradient(
    dg: torch.Tensor, data: WaveData, values: tuple[int, int], options: Options, needs: Needs, out: Gradients
) -> None:
    index = data.index
    mine = slice(values[0], values[0] + values[1])
    if options.gate:
        dg, d_log = gate_backward(dg, data.decays)
        if needs.A_log:
            out.A_log[index.chunk_ids, mine] = d_log.sum(-1)
        if needs.dt_bias:
            own = dg if index.mask is None else dg.masked_fill(~index.mask, 0.0)
            out.dt_bias[index.chunk_ids, mine] = own.sum(-1)
    if needs.g:
        scatter(dg.unsqueeze(-1), out.g, index, values)


def _sum_parameters(partials: torch.Tensor, walk: Walk, dtype: torch.dtype) -> torch.Tensor:
    """Add float64 partials of chunks sequence by sequence, then the sequences in pack order."""
    if partials.shape[0] == 0:
        return torch.zeros(partials.shape[1], dtype=dtype)
    counts = torch.tensor([c for c in walk.plan.chunk_counts if c])
    sums = torch.segment_reduce(partials, "sum", lengths=counts)
    return sums.cumsum(0)[-1].to(dtype)


@torch.no_grad()
def backward(
    inputs: Inputs,
    options: Options,
    d_out: torch.Tensor | None,
    d_final: torch.Tensor | None,
    tape: torch.Tensor | None,
    needs: Needs,
    value_shape: tuple[int, int],
    budget: WorkBudget | None = None,
) -> Gradients:
    """Compute the gradients that `needs` names.

    Parameters
    ----------
    inputs, options
        The call; `inputs.v` may be None where no needed gradient depends on the states.
    d_out, d_final
        Gradients of the output and of the final states, None for zero.
    tape
        Segment-entry states as the forward pass saved them; needed where a sequence has several segments and a gradient
        depends on states.
    needs
        Which gradients are wanted.
    value_shape
        Value heads and value width.
    budget
        Bounds of the work batches; no bit depends on it.
    """
    heads, width = value_shape
    walk = make_walk(inputs, heads, width, budget)
    pack = walk.pack
    k = inputs.k
    key_dim = k.shape[3]
    rows = Gradients()
    if needs.q:
        rows.q = new_rows(pack, walk.plan.problem.key_heads, key_dim, k.dtype)
    if needs.k:
        rows.k = new_rows(pack, walk.plan.problem.key_heads, key_dim, k.dtype)
    if needs.v:
        rows.v = new_rows(pack, heads, width, k.dtype)
    if needs.g:
        rows.g = new_rows(pack, heads, 1, inputs.g.dtype)
    if needs.beta:
        rows.beta = new_rows(pack, heads, 1, inputs.beta.dtype)
    chunks = walk.plan.first_chunk[-1]
    if needs.A_log:
        rows.A_log = torch.empty(chunks, heads, dtype=torch.float64)
    if needs.dt_bias:
        rows.dt_bias = torch.empty(chunks, heads, dtype=torch.float64)
    d_final = k_first(d_final, options)
    if needs.initial_state:
        rows.initial_state = torch.zeros(pack.sequences, heads, key_dim, width, dtype=walk.dtype)
        if d_final is not None and 0 in pack.lengths:
            rows.initial_state.copy_(d_final)
    entries = _saved_entries(walk, tape, needs)
    for group in walk.groups:
        _backward_group(walk, group, inputs, options, d_out, d_final, entries, needs, rows)

    def shaped(x: torch.Tensor | None, like: tuple[int, ...]) -> torch.Tensor | None:
        return None if x is None else rows_of(x, like)

    per_head = (pack.batch, pack.tokens, heads)
    out = Gradients(
        shaped(rows.q, tuple(k.shape)),
        shaped(rows.k, tuple(k.shape)),
        shaped(rows.v, (*per_head, width)),
        shaped(rows.g, per_head),
        shaped(rows.beta, per_head),
    )
    if needs.initial_state:
        dh0 = rows.initial_state
        out.initial_state = dh0.mT.contiguous() if options.state_v_first else dh0
    if needs.A_log:
        out.A_log = _sum_parameters(rows.A_log, walk, inputs.A_log.dtype)
    if needs.dt_bias:
        out.dt_bias = _sum_parameters(rows.dt_bias, walk, inputs.dt_bias.dtype)
    return out


def _saved_entries(walk: Walk, tape: torch.Tensor | None, needs: Needs) -> torch.Tensor | None:
    """View a tape as segment-entry states; raise `ValueError` where it is not that of a forward pass of this call."""
    problem, pack = walk.plan.problem, walk.pack
    state = (problem.value_heads, problem.key_dim, problem.value_dim)
    wanted = walk.plan.first_extra_segment[-1] if needs.states else 0
    full = TAPE_HEAD + extra_segment_capacity(pack.batch, pack.tokens) * math.prod(state)
    length = TAPE_HEAD if tape is None else tape.shape[0]
    if wanted and length <= TAPE_HEAD:
        raise ValueError(
            f"saved: got no states, takes those of the {wanted} segments after a sequence's first (of a forward pass "
            "under save_states=True): all gradients but those of v and initial_state depend on them"
        )
    if length > TAPE_HEAD and length != full:
        raise ValueError(
            f"saved: got {length} elements, takes the {full} that a forward pass saves for arguments of these shapes"
        )
    return entry_states(tape, state)


def _entry_states(
    walk: Walk, group: Group, rnd: Round, h0: torch.Tensor | None, entries: torch.Tensor | None
) -> torch.Tensor:
    n = len(rnd.tokens)
    slots = list(group.sequences[:n])
    source = h0
    if rnd.segment:
        slots = [walk.plan.first_extra_segment[s] + rnd.segment - 1 for s in slots]
        source = entries
    return load_states(source, torch.tensor(slots), walk.value_range(group), walk.state_shape, walk.dtype).flatten(0, 1)


def load_d_out(walk: Walk, group: Group, data: WaveData, d_out: torch.Tensor | None) -> torch.Tensor:
    """Gather a wave's tiles of the gradient of the outputs, `[chunks * value heads, rows, padded width]`."""
    if d_out is None:
        count, heads, rows, _ = data.chunks.shape
        return torch.zeros(count * heads, rows, walk.state_shape[1], dtype=walk.dtype)
    return load_values(walk, group, data.index, d_out)


def _backward_group(
    walk: Walk,
    group: Group,
    inputs: Inputs,
    options: Options,
    d_out: torch.Tensor | None,
    d_final: torch.Tensor | None,
    entries: torch.Tensor | None,
    needs: Needs,
    rows: Gradients,
) -> None:
    heads = walk.value_range(group)
    sequences = torch.tensor(group.sequences)
    carry = load_states(d_final, sequences, heads, walk.state_shape, walk.dtype).flatten(0, 1)
    h0 = k_first(inputs.initial_state, options)
    for rnd in reversed(group.rounds):
        stashes = []
        if needs.states:
            state = _entry_states(walk, group, rnd, h0, entries)
        for index in walk.indices(group, rnd):
            data = load_wave(walk, group, index, inputs, options)
            if needs.states:
                x = load_values(walk, group, index, inputs.v)
                stashes.append(Stash(data, x, *run_chain(data.chunks, index.counts, x, state)))
            else:
                stashes.append(Stash(data, None, None, None))
        while stashes:
            stash = stashes.pop()
            index = stash.data.index
            do = load_d_out(walk, group, stash.data, d_out)
            q = q_scale = qk = None
            if inputs.q is not None:
                q, q_scale = load_queries(walk, group, index, inputs, options)
            if needs.chain:
                qk, pair = scores(stash.data, q, options.scale)
                cot = run_chain_backward(stash.data, q, pair, do, carry, options.scale)
            else:
                cot = Cotangents(do, None, None, None)
            _wave_gradients(walk, group, stash, q, q_scale, cot, qk, options, needs, rows)
    if needs.initial_state:
        rows.initial_state[sequences, heads[0] : heads[0] + heads[1]] = walk.unpadded(group, carry)
