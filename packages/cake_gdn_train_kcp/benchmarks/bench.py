"""Measures what sharding costs on one rank: `python -m cake_shared.bench run cake-gdn-train-kcp`."""

import functools
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import cake_gdn_train
import cake_gdn_train_kcp
from cake_shared.bench import Suite
from cake_shared.bench.gdn import cells
from cake_shared.bench.host import import_table

PACKAGE = "cake_gdn_train_kcp"
NOTES = [
    "B = 1, T = 2048, H = 2, HV = 4, K = V = 128, mild gates, one sequence on one rank of a gloo group: the price of "
    "planning and of the sharded form where nothing travels."
]


def sharded(q, k, v, g, beta, scale=None, *, cu_seqlens=None, **options):
    """The package's function in a group of one rank."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    if cu_seqlens is None:
        cu_seqlens = torch.tensor([0, q.shape[1]])
    return cake_gdn_train_kcp.chunk_gated_delta_rule(
        q, k, v, g, beta, scale, cu_seqlens=cu_seqlens, group=dist.group.WORLD, **options
    )


ARMS = {"ours": sharded, "cake_gdn_train": cake_gdn_train.chunk_gated_delta_rule}

if __name__ == "__main__":
    timed = cells(ARMS, tuple(ARMS), tokens=2048, heads=2, value_heads=4)
    findings = [functools.partial(import_table, PACKAGE)]
    status = Suite(PACKAGE, Path(__file__), timed, findings=findings, notes=NOTES).main()
    if dist.is_initialized():
        dist.destroy_process_group()
    sys.exit(status)
