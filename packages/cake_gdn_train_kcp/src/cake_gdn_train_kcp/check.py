"""Checks of the sharded rule: what the single-rank rule does not know. Each raises before any communication."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from cake_gdn_train.api import check_served
from cake_gdn_train_kcp.plan import Shard, plan_shards
from cake_gdn_train_kcp.sharded import Place
from cake_shared.check import check_dtype, check_tensor, kind_of
from cake_shared.gdn.check import check_call
from cake_shared.gdn.cuda.rule import check_problem
from cake_shared.gdn.options import Inputs, Options


def cuts_of(shards: Any) -> list[int] | None:
    """The cuts that make these shards, or None for None."""
    if shards is None:
        return None
    if not isinstance(shards, Sequence) or not all(isinstance(shard, Shard) for shard in shards):
        raise TypeError(f"shards: got {kind_of(shards)}, takes a sequence of Shard, as plan_shards makes it")
    if not shards:
        raise ValueError("shards: got none, takes one for each of the group's ranks")
    if [shard.rank for shard in shards] != list(range(len(shards))):
        raise ValueError(f"shards: got ranks {[shard.rank for shard in shards]}, takes one Shard a rank, in rank order")
    return [shard.start for shard in shards[1:]]


def make_place(group: Any, cu_seqlens: Any, cuts: Sequence[int] | None, shards: Sequence[Shard] | None = None) -> Place:
    """Plan for this process's rank; `shards`, where given, must be what the plan comes to."""
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group: got {kind_of(group)}, takes a torch.distributed.ProcessGroup or None")
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if rank < 0:
        raise ValueError("group: got one that this process is no rank of, takes one that it belongs to")
    if cu_seqlens is None:
        raise ValueError("cu_seqlens: got None with a group, takes the offsets of the whole pack")
    check_tensor("cu_seqlens", cu_seqlens)
    check_dtype("cu_seqlens", cu_seqlens, (torch.int32, torch.int64))
    if cu_seqlens.dim() != 1:
        raise ValueError(f"cu_seqlens: got shape {list(cu_seqlens.shape)}, takes [N + 1] with N >= 0")
    if cuts is not None and len(cuts) != size - 1:
        raise ValueError(f"shards: got {len(cuts) + 1} of them, takes one for each of the group's {size} ranks")
    (whole,) = plan_shards(cu_seqlens, 1)
    if shards is not None and (shards[0].start, shards[-1].stop) != (0, whole.stop):
        raise ValueError(
            f"shards: got tokens {shards[0].start} to {shards[-1].stop}, takes a plan of the {whole.stop} tokens of "
            "cu_seqlens"
        )
    planned = plan_shards(cu_seqlens, size, cuts=cuts)
    if shards is not None and planned != tuple(shards):
        raise ValueError("shards: got a plan of other sequences, takes what plan_shards makes of these cu_seqlens")
    return Place(group, planned, rank)


def check_exchange(group: dist.ProcessGroup, device: torch.device) -> None:
    """Raise `ValueError` where a group would exchange a device's tensors by way of the host, or not at all."""
    try:
        name = group._get_backend(device).name()
    except RuntimeError:
        name = "no backend"
    if name in ("gloo", "no backend"):
        raise ValueError(f"group: got one with {name} for tensors on {device}, takes one with nccl for them")


def check_rank(inputs: Inputs, options: Options, place: Place, backend: Any) -> None:
    """Check one rank's tensors against its shard."""
    check_call(replace(inputs, cu_seqlens=place.local_offsets()), options)
    device = inputs.q.device
    check_served(device, backend)
    if device.type == "cuda":
        check_problem(inputs, inputs.v.shape[3])
        check_exchange(place.group, device)
    if inputs.q.shape[1] < place.shard.tokens:
        raise ValueError(
            f"q: got T = {inputs.q.shape[1]} tokens, takes at least the {place.shard.tokens} of the shard of rank "
            f"{place.rank}"
        )
