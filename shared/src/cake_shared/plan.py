"""How packed sequences are cut into chunks, segments and work batches: pure integer arithmetic, no torch.

Two kinds of rule live here and must not be mixed. The *cut* of a sequence (chunk, segment, tile height) depends on
that sequence's length alone: the bits of its results hang on it. The *grouping* of cut pieces into work batches
follows load and memory, and may change freely, because no result depends on which pieces are worked on together.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

CHUNK_TOKENS = 64
SEGMENT_TOKENS = 4096
SEGMENT_THRESHOLD_TOKENS = 8192
SHORT_SEQUENCE_TOKENS = 16


def ceil_div(a: int, b: int) -> int:
    """Return the smallest integer not below `a / b`, for `a >= 0` and `b > 0`."""
    return -(-a // b)


def segment_count(length_tokens: int) -> int:
    """Return into how many segments a sequence of `length_tokens` is cut; an empty one has none.

    A sequence of at most `SEGMENT_THRESHOLD_TOKENS` tokens is one segment; a longer one is cut every `SEGMENT_TOKENS`.
    """
    if length_tokens > SEGMENT_THRESHOLD_TOKENS:
        return ceil_div(length_tokens, SEGMENT_TOKENS)
    return 1 if length_tokens > 0 else 0


def segment_lengths(length_tokens: int) -> tuple[int, ...]:
    """Return the token counts of the segments of a sequence of `length_tokens`, first to last."""
    count = segment_count(length_tokens)
    if count <= 1:
        return (length_tokens,) * count
    return (SEGMENT_TOKENS,) * (count - 1) + (length_tokens - SEGMENT_TOKENS * (count - 1),)


def extra_segment_capacity(batch: int, tokens: int) -> int:
    """Return a bound on the segments after the first of all sequences in a `[batch, tokens]` buffer, from its shape
    alone.

    It sizes the buffer of segment-entry states without looking at offsets: a sequence of `n` tokens has at most
    `(n - 1) // SEGMENT_TOKENS` of them, and none unless `n > SEGMENT_THRESHOLD_TOKENS`.
    """
    return batch * (tokens // SEGMENT_TOKENS) if tokens > SEGMENT_THRESHOLD_TOKENS else 0


def tile_rows(length_tokens: int) -> int:
    """Return how many rows the padded tiles of a sequence have on the CPU: 16 for short sequences, else 64."""
    return SHORT_SEQUENCE_TOKENS if length_tokens <= SHORT_SEQUENCE_TOKENS else CHUNK_TOKENS


@dataclass(frozen=True)
class Chunk:
    """Up to `CHUNK_TOKENS` consecutive tokens of one sequence, inside one segment."""

    sequence: int
    segment: int
    first_token: int
    tokens: int


@dataclass(frozen=True)
class Segment:
    """A run of chunks of one sequence; `first_chunk` and `chunks` index the chunk table."""

    sequence: int
    first_token: int
    tokens: int
    first_chunk: int
    chunks: int


@dataclass(frozen=True)
class PackTables:
    """Chunk and segment table of a pack, sequence after sequence, as columns of integers.

    `sequence_first_chunk` and `sequence_first_segment` have one entry more than there are sequences, so that sequence
    `s` owns the half-open ranges `[x[s], x[s + 1])`; an empty sequence owns nothing.
    """

    chunk_sequence: tuple[int, ...]
    chunk_segment: tuple[int, ...]
    chunk_first_token: tuple[int, ...]
    chunk_tokens: tuple[int, ...]
    segment_sequence: tuple[int, ...]
    segment_first_token: tuple[int, ...]
    segment_tokens: tuple[int, ...]
    segment_first_chunk: tuple[int, ...]
    segment_chunks: tuple[int, ...]
    sequence_first_chunk: tuple[int, ...]
    sequence_first_segment: tuple[int, ...]

    @property
    def chunks(self) -> tuple[Chunk, ...]:
        """The chunk table as rows."""
        columns = (self.chunk_sequence, self.chunk_segment, self.chunk_first_token, self.chunk_tokens)
        return tuple(Chunk(*row) for row in zip(*columns))

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The segment table as rows."""
        columns = (
            self.segment_sequence,
            self.segment_first_token,
            self.segment_tokens,
            self.segment_first_chunk,
            self.segment_chunks,
        )
        return tuple(Segment(*row) for row in zip(*columns))


def check_offsets(offsets: Sequence[int]) -> None:
    """Raise `ValueError` unless `offsets` start at 0 and never decrease."""
    if len(offsets) < 1 or offsets[0] != 0:
        raise ValueError(f"offsets: got {list(offsets[:4])}..., takes a sequence that starts at 0")
    for i, (a, b) in enumerate(pairwise(offsets)):
        if b < a:
            raise ValueError(f"offsets: got {b} after {a} at place {i + 1}, takes offsets that never decrease")


def pack_tables(offsets: Sequence[int]) -> PackTables:
    """Return the chunk and segment tables of a pack.

    Parameters
    ----------
    offsets
        `N + 1` token offsets, the first 0, never decreasing; sequence `s` is `[offsets[s], offsets[s + 1])`.

    Raises
    ------
    ValueError
        When the offsets do not start at 0 or decrease.
    """
    check_offsets(offsets)
    chunks: list[tuple[int, int, int, int]] = []
    segments: list[tuple[int, int, int, int, int]] = []
    first_chunk, first_segment = [0], [0]
    for sequence, (begin, end) in enumerate(pairwise(offsets)):
        token = begin
        for tokens in segment_lengths(end - begin):
            stop = token + tokens
            segments.append((sequence, token, tokens, len(chunks), ceil_div(tokens, CHUNK_TOKENS)))
            segment = len(segments) - 1
            chunks.extend(
                (sequence, segment, at, min(CHUNK_TOKENS, stop - at)) for at in range(token, stop, CHUNK_TOKENS)
            )
            token = stop
        first_chunk.append(len(chunks))
        first_segment.append(len(segments))
    chunk_columns = tuple(zip(*chunks)) or ((),) * 4
    segment_columns = tuple(zip(*segments)) or ((),) * 5
    return PackTables(*chunk_columns, *segment_columns, tuple(first_chunk), tuple(first_segment))


@dataclass(frozen=True)
class Wave:
    """Consecutive chain steps that are worked on together; `active[i]` sequences take part in step `first_step + i`."""

    first_step: int
    active: tuple[int, ...]


@dataclass(frozen=True)
class Round:
    """The `segment`-th segment of the sequences of a group that have one.

    They are a prefix of the group's sequences, and their `tokens` never increase along it.
    """

    segment: int
    tokens: tuple[int, ...]
    waves: tuple[Wave, ...]


@dataclass(frozen=True)
class Group:
    """Sequences (longest first, all of one tile height) and a range of key heads whose tensors are alive together."""

    rows: int
    sequences: tuple[int, ...]
    first_key_head: int
    key_heads: int
    rounds: tuple[Round, ...]


@dataclass(frozen=True)
class WorkBudget:
    """Bounds of the CPU's work batches, in bytes of the largest tensor kind that they hold."""

    wave_bytes: int = 4 << 20
    group_bytes: int = 32 << 20


def _plan_round(segment: int, tokens: tuple[int, ...], rows: int, wave_chunks: int) -> Round:
    chunks = [ceil_div(n, rows) for n in tokens]
    waves: list[Wave] = []
    active: list[int] = []
    first, held, alive = 0, 0, len(tokens)
    for step in range(chunks[0]):
        while chunks[alive - 1] <= step:
            alive -= 1
        if active and held + alive > wave_chunks:
            waves.append(Wave(first, tuple(active)))
            active, held, first = [], 0, step
        active.append(alive)
        held += alive
    waves.append(Wave(first, tuple(active)))
    return Round(segment, tokens, tuple(waves))


def _plan_group(
    sequences: list[int], lengths: Sequence[int], heads: tuple[int, int], rows: int, wave_chunks: int
) -> Group:
    cuts = [segment_lengths(lengths[s]) for s in sequences]
    rounds = []
    for segment in range(len(cuts[0])):
        tokens = tuple(c[segment] for c in cuts if len(c) > segment)
        rounds.append(_plan_round(segment, tokens, rows, wave_chunks))
    return Group(rows, tuple(sequences), heads[0], heads[1], tuple(rounds))


def plan_work(
    lengths: Sequence[int],
    key_heads: int,
    group_heads: int,
    key_dim: int,
    value_dim: int,
    itemsize_bytes: int,
    budget: WorkBudget = WorkBudget(),
) -> tuple[Group, ...]:
    """Group the sequences of a pack into work batches of bounded memory.

    Parameters
    ----------
    lengths
        Tokens of each sequence; empty ones appear in no group.
    key_heads, group_heads
        Key heads, and value heads per key head.
    key_dim, value_dim, itemsize_bytes
        Head dimensions and bytes of one element of the arithmetic: they size a tile and a state.
    budget
        Bytes of the largest tensor kind in a wave and in a group.

    Returns
    -------
    tuple of Group
        Every non-empty sequence and key head in exactly one group. Sequences that are cut into segments never share a
        group with ones that are not, so that within a round the number of chunks falls along the group.
    """
    classes: dict[tuple[int, bool], list[int]] = {}
    for s, n in enumerate(lengths):
        if n > 0:
            classes.setdefault((tile_rows(n), n > SEGMENT_THRESHOLD_TOKENS), []).append(s)
    groups: list[Group] = []
    for (rows, _), members in sorted(classes.items()):
        members.sort(key=lambda s: (-lengths[s], s))
        unit = max(rows * max(key_dim, value_dim), key_dim * value_dim // 2) * itemsize_bytes
        group_tiles = max(1, budget.group_bytes // unit)
        wave_tiles = max(1, budget.wave_bytes // unit)
        at = 0
        while at < len(members):
            chunks = ceil_div(segment_lengths(lengths[members[at]])[0], rows)
            heads = min(key_heads, max(1, group_tiles // (chunks * group_heads)))
            room = group_tiles // (heads * group_heads) - chunks
            stop = at + 1
            while stop < len(members):
                room -= ceil_div(segment_lengths(lengths[members[stop]])[0], rows)
                if room < 0:
                    break
                stop += 1
            for first in range(0, key_heads, heads):
                count = min(heads, key_heads - first)
                wave_chunks = max(1, wave_tiles // (count * group_heads))
                groups.append(_plan_group(members[at:stop], lengths, (first, count), rows, wave_chunks))
            at = stop
    return tuple(groups)
