"""The device tables of a pack: their capacities, from shapes alone, and their layout in one buffer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cake_shared.plan import CHUNK_TOKENS, SEGMENT_TOKENS

if TYPE_CHECKING:
    import torch

_STATUS_WORDS = 4
_ENTRY_WORDS = 4


@dataclass(frozen=True)
class TablePlan:
    """How large the tables of a pack can get, known without looking at offsets, and where they lie.

    One buffer of 32-bit words holds, in this order: status (4 words, the first two used), the chunk table (rows of
    sequence, segment, first token, tokens), the segment table (sequence, first token, tokens, first chunk), and the
    token, chunk and segment offsets of the sequences. `bind.cu` lays it out the same way.

    Attributes
    ----------
    sequences
        N.
    chunk_capacity, segment_capacity
        Rows of the tables. A sequence of n tokens has at most n / 64 + 1 chunks and n / 4096 + 1 segments.
    """

    sequences: int
    chunk_capacity: int
    segment_capacity: int

    @property
    def words(self) -> int:
        """32-bit words of the buffer."""
        entries = self.chunk_capacity + self.segment_capacity
        return _STATUS_WORDS + _ENTRY_WORDS * entries + 3 * (self.sequences + 1)

    def views(self, words: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the tables inside a buffer, by name, as views.

        Parameters
        ----------
        words
            int32 `[words]`.
        """
        n = self.sequences + 1
        shapes = {
            "status": (_STATUS_WORDS,),
            "chunks": (self.chunk_capacity, _ENTRY_WORDS),
            "segments": (self.segment_capacity, _ENTRY_WORDS),
            "token_offsets": (n,),
            "chunk_offsets": (n,),
            "segment_offsets": (n,),
        }
        found, at = {}, 0
        for name, shape in shapes.items():
            size = shape[0] * (shape[1] if len(shape) > 1 else 1)
            found[name] = words[at : at + size].view(shape)
            at += size
        return found


def plan_tables(batch: int, tokens: int, sequences: int | None = None) -> TablePlan:
    """Return the plan of the tables for gates `[batch, tokens, HV]`.

    Parameters
    ----------
    batch, tokens
        Shape of the token buffer.
    sequences
        N of `cu_seqlens [N + 1]`; None without offsets, where every row of the batch is a sequence.
    """
    count = batch if sequences is None else sequences
    rows = batch * tokens
    return TablePlan(count, rows // CHUNK_TOKENS + count, rows // SEGMENT_TOKENS + count)
