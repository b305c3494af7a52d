"""The forward pass on the CPU: group by group, segment by segment, wave by wave."""

import torch

from cake_shared.gdn.intra import by_key_head, run_chain, scaled_rows
from cake_shared.gdn.options import Inputs, Options
from cake_shared.gdn.products import add_product, product
from cake_shared.gdn.tiles import load_states, new_rows, rows_of, scatter
from cake_shared.gdn.walk import Walk, WaveData, load_queries, load_values, load_wave, make_walk
from cake_shared.plan import Group, WorkBudget, extra_segment_capacity

# Elements at the head of a tape of entry states, never read: no shape of it has a size of 0 or 1, which a compiled
# graph would take as a special case.
TAPE_HEAD = 2


def entry_states(tape: torch.Tensor | None, state: tuple[int, int, int]) -> torch.Tensor | None:
    """View a tape as the states `[segments, *state]` that it holds, or None where it holds none."""
    if tape is None or tape.shape[0] <= TAPE_HEAD:
        return None
    return tape[TAPE_HEAD:].view(-1, *state)


def k_first(states: torch.Tensor | None, options: Options) -> torch.Tensor | None:
    """View states as `[N, HV, K, V]` whatever the layout of the call."""
    return states.mT if states is not None and options.state_v_first else states


def scores(data: WaveData, q: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return `scale Q K^T` of the key heads `[c, key heads, rows, rows]`, and it times `Gamma` of the value heads."""
    k = data.chunks.k
    qk = product(q.flatten(0, 1), k.flatten(0, 1).mT).mul_(scale).view(*k.shape[:3], k.shape[2])
    pair = by_key_head(data.chunks.gates.pair, k.shape[1]) * qk.unsqueeze(2)
    return qk, pair.flatten(0, 2)


def _outputs(
    data: WaveData, q: torch.Tensor, written: torch.Tensor, states: torch.Tensor, scale: float
) -> torch.Tensor:
    _, pair = scores(data, q, scale)
    out = product(scaled_rows(q, data.chunks.gates.gamma * scale), states)
    add_product(out, pair, written)
    return out.view(*data.chunks.beta.shape, -1)


@torch.no_grad()
def forward(
    inputs: Inputs,
    options: Options,
    output_final_state: bool,
    save_states: bool,
    budget: WorkBudget | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Compute the outputs of the gated delta rule.

    Parameters
    ----------
    inputs, options
        The call, already checked.
    output_final_state, save_states
        Whether final states and segment-entry states are wanted.
    budget
        Bounds of the work batches; no bit depends on it.

    Returns
    -------
    tuple of torch.Tensor
        `o` like `v`; final states, shaped as the call wants them (no elements unless asked for); a tape of the entry
        states of every segment after a sequence's first, in pack order, behind `TAPE_HEAD` elements.
    """
    v = inputs.v
    heads, width = v.shape[2:]
    walk = make_walk(inputs, heads, width, budget)
    pack = walk.pack
    key_dim = inputs.k.shape[3]
    out = new_rows(pack, heads, width, v.dtype)
    h0 = k_first(inputs.initial_state, options)
    final = torch.empty(pack.sequences if output_final_state else 0, heads, key_dim, width, dtype=walk.dtype)
    if output_final_state and 0 in pack.lengths:
        final.zero_() if h0 is None else final.copy_(h0)
    capacity = extra_segment_capacity(pack.batch, pack.tokens) if save_states else 0
    tape = torch.zeros(TAPE_HEAD + capacity * heads * key_dim * width, dtype=walk.dtype)
    entries = entry_states(tape, (heads, key_dim, width))
    for group in walk.groups:
        _forward_group(walk, group, inputs, options, h0, out, final if output_final_state else None, entries)
    if output_final_state and options.state_v_first:
        final = final.mT.contiguous()
    return rows_of(out, (pack.batch, pack.tokens, heads, width)), final, tape


def _forward_group(
    walk: Walk,
    group: Group,
    inputs: Inputs,
    options: Options,
    h0: torch.Tensor | None,
    out: torch.Tensor,
    final: torch.Tensor | None,
    entries: torch.Tensor | None,
) -> None:
    heads = walk.value_range(group)
    mine = slice(heads[0], heads[0] + heads[1])
    sequences = torch.tensor(group.sequences)
    carry = load_states(h0, sequences, heads, walk.state_shape, walk.dtype).flatten(0, 1)
    for rnd in group.rounds:
        if rnd.segment and entries is not None:
            n = len(rnd.tokens)
            slots = torch.tensor([walk.plan.first_extra_segment[s] + rnd.segment - 1 for s in group.sequences[:n]])
            entries[slots, mine] = walk.unpadded(group, carry)[:n]
        for index in walk.indices(group, rnd):
            data = load_wave(walk, group, index, inputs, options)
            x = load_values(walk, group, index, inputs.v)
            written, states = run_chain(data.chunks, index.counts, x, carry)
            q, _ = load_queries(walk, group, index, inputs, options)
            scatter(_outputs(data, q, written, states, options.scale), out, index, heads)
    if final is not None:
        final[sequences, mine] = walk.unpadded(group, carry)
