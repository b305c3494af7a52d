"""What travels between ranks: one pair of a chunk-state map and a chunk state each, gathered once per pass.

The state after a run of tokens is affine in the state before it, `S_out = M S_in + N`, and the gradient of the state
before is `dS_in = M^T dS_out + Y` (Yang et al., *Parallelizing Linear Transformers with the Delta Rule*, arXiv
2406.06484, for the chunk form). Whatever the length of the run, `(M, N)` and `(M^T, Y)` have K x K and K x V elements
for each value head.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist

from cake_gdn_train_kcp.plan import Shard


def source_ranks(shards: Sequence[Shard], rank: int) -> list[int]:
    """Ranks, in order, that hold the earlier tokens of the sequence that this rank continues; none if there is none.

    The first of them holds the sequence's beginning; the others hold nothing but a middle part of it. Ranks without
    tokens in between are left out.
    """
    return _chain(shards, rank, -1)[::-1] if shards[rank].continues_from_previous else []


def sink_ranks(shards: Sequence[Shard], rank: int) -> list[int]:
    """Ranks, in order, that hold the later tokens of this rank's last sequence; empty if it ends here."""
    return _chain(shards, rank, 1) if shards[rank].continues_to_next else []


def _chain(shards: Sequence[Shard], rank: int, step: int) -> list[int]:
    found = []
    at = rank + step
    while True:
        if shards[at].tokens:
            found.append(at)
            if not shards[at].passes_through:
                return found
        at += step


def is_cut(shards: Sequence[Shard]) -> bool:
    """Whether any sequence has tokens on two ranks: only then do ranks communicate."""
    return any(shard.continues_to_next for shard in shards)


def gather_pairs(pair: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Gather every rank's pair `[HV, K, K + V]`; returns `[world_size, HV, K, K + V]` in rank order."""
    gathered = pair.new_empty((dist.get_world_size(group), *pair.shape))
    if pair.device.type == "cpu":
        dist.all_gather(list(gathered.unbind(0)), pair, group=group)
    else:
        dist.all_gather_into_tensor(gathered, pair, group=group)
    return gathered


def compose_states(pairs: torch.Tensor, ranks: Sequence[int]) -> torch.Tensor:
    """State after the tokens of `ranks`: the first gives its own, each further one maps it, in rank order.

    Composed in FP64, which no setting of torch rounds to less, and rounded once.

    Parameters
    ----------
    pairs : torch.Tensor
        `[world_size, HV, K, K + V]`, `M` in the first K columns and `N` in the others.
    ranks : sequence of int
        As `source_ranks` gives them.

    Returns
    -------
    torch.Tensor
        `[HV, K, V]`.
    """
    width = pairs.shape[2]
    state = pairs[ranks[0], :, :, width:]
    if len(ranks) == 1:
        return state
    state = state.double()
    for rank in ranks[1:]:
        pair = pairs[rank].double()
        state = torch.baddbmm(pair[..., width:], pair[..., :width], state)
    return state.to(pairs.dtype)


def compose_gradients(pairs: torch.Tensor, ranks: Sequence[int]) -> torch.Tensor:
    """Gradient of the state before the tokens of `ranks`: the last gives its own, each earlier one maps it.

    Parameters
    ----------
    pairs : torch.Tensor
        `[world_size, HV, K, K + V]`, `M^T` in the first K columns and `Y` in the others.
    ranks : sequence of int
        As `sink_ranks` gives them.

    Returns
    -------
    torch.Tensor
        `[HV, K, V]`.
    """
    return compose_states(pairs, ranks[::-1])
