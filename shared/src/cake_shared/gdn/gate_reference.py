"""The gate stage of the CUDA path, restated on the CPU: the same tables and the same sums, bit for bit.

`cake_shared.plan.pack_tables` states the tables; `gate_sums` here states the sums that the program `gate_sums_any`
writes, in the same arithmetic and order. It is what a GPU and the emulator are compared with, not a backend.
"""

from __future__ import annotations

import torch

from cake_shared.plan import CHUNK_TOKENS, PackTables

# exp(-128) is 0 in FP32: nothing of the past survives a gate below it.
GATE_FLOOR = -128.0


def gate_sums(g: torch.Tensor, tables: PackTables, chunk_capacity: int) -> torch.Tensor:
    """Return the inclusive cumulative gates of every chunk and value head.

    Every gate is clamped from below at -128, where `exp` is 0 in FP32. A chunk's gates are added in the order of its
    tokens into two FP32 words by exact two-sums, and each prefix is rounded once. So a sum is off by at most half a
    unit in its last place, and since it cannot fall below -8192, a difference of two sums by at most 2^-11.

    Parameters
    ----------
    g
        Gates `[B, T, HV]`, FP32 or BF16, any strides.
    tables
        Of the pack, over the rows of `[B * T]`.
    chunk_capacity
        Rows of the result, at least the number of chunks.

    Returns
    -------
    torch.Tensor
        FP32 `[chunk_capacity, HV, 64]`. Rows past a chunk's last token repeat its last sum; unused chunks are 0.
    """
    batch, tokens, heads = g.shape
    chunks = len(tables.chunk_tokens)
    sums = torch.zeros(chunk_capacity, heads, CHUNK_TOKENS)
    if chunks == 0 or heads == 0:
        return sums
    gates = g.reshape(batch * tokens, heads).float()
    gates = torch.where(gates < GATE_FLOOR, GATE_FLOOR, gates)
    place = torch.arange(CHUNK_TOKENS)
    token = torch.tensor(tables.chunk_first_token)[:, None] + place
    inside = place < torch.tensor(tables.chunk_tokens)[:, None]
    high = torch.zeros(chunks, heads)
    low = torch.zeros(chunks, heads)
    for i in range(CHUNK_TOKENS):
        term = gates[torch.where(inside[:, i], token[:, i], 0)]
        total = high + term
        taken = total - high
        lost = (high - (total - taken)) + (term - taken)
        more = inside[:, i, None]
        high = torch.where(more, total, high)
        low = torch.where(more, low + lost, low)
        sums[:chunks, :, i] = high + low
    return sums
