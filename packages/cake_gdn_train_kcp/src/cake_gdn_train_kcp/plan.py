"""Which rank holds which tokens of a pack: pure integer arithmetic, no torch, the same on every rank.

The choice of the cuts never changes a result beyond rounding. It decides how even the load is and how many sequences
have to be handed from rank to rank.
"""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from cake_shared.plan import CHUNK_TOKENS, SEGMENT_THRESHOLD_TOKENS, SEGMENT_TOKENS

# A cut moves to a border of sequences or segments that is at most this part of a rank's share away.
SNAP_PART = 16


@dataclass(frozen=True)
class Shard:
    """The tokens of one rank, and the sequences in them.

    Attributes
    ----------
    rank : int
        Rank in the group.
    start, stop : int
        Token range `[start, stop)` in the whole pack.
    cu_seqlens : tuple of int
        Local offsets of the local sequences: from 0 to `stop - start`. A sequence that is cut counts as a local
        sequence on every rank that holds tokens of it. An empty sequence belongs to the rank with
        `start <= offset < stop`, or to the last rank where its offset is the end of the pack.
    first_sequence : int
        Index in the whole pack of local sequence 0; local sequence `i` is `first_sequence + i`.
    continues_from_previous, continues_to_next : bool
        Whether local sequence 0 has tokens on an earlier rank, and the last local sequence on a later one.
    """

    rank: int
    start: int
    stop: int
    cu_seqlens: tuple[int, ...]
    first_sequence: int
    continues_from_previous: bool
    continues_to_next: bool

    @property
    def tokens(self) -> int:
        """Tokens of this rank."""
        return self.stop - self.start

    @property
    def sequences(self) -> int:
        """Local sequences, empty ones and parts of cut ones included."""
        return len(self.cu_seqlens) - 1

    @property
    def passes_through(self) -> bool:
        """Whether this rank holds nothing but a middle part of one sequence."""
        return self.sequences == 1 and self.continues_from_previous and self.continues_to_next


def plan_shards(cu_seqlens: Sequence[int], world_size: int, *, cuts: Sequence[int] | None = None) -> tuple[Shard, ...]:
    """Cut a pack into one range of tokens per rank.

    Without `cuts` every rank gets an equal share of the tokens, and then each cut moves to the nearest border of two
    sequences, else to the nearest segment border (every 4096 tokens of a sequence longer than 8192), where one is
    within a sixteenth of a share, else to the nearest chunk border (every 64 tokens) of the sequence that it falls
    into. A rank's load is thus within an eighth of a share and 64 tokens of the mean.

    Parameters
    ----------
    cu_seqlens : sequence of int, or integer torch.Tensor in host memory
        The `N + 1` offsets of the whole pack: from 0, never decreasing.
    world_size : int
        Number of ranks, at least 1.
    cuts : sequence of int, optional
        The `world_size - 1` cuts to use instead, anywhere in the pack: tokens, never decreasing. Rank r gets the tokens
        from cut `r - 1` to cut `r`; two equal cuts leave a rank without tokens.

    Returns
    -------
    tuple of Shard
        One for each rank, in rank order; together they hold every token once.

    Raises
    ------
    TypeError, ValueError
        For arguments of the wrong kind or value; the message names the argument, what it got and takes.
    """
    offsets = _offsets(cu_seqlens)
    if isinstance(world_size, bool) or not isinstance(world_size, int):
        raise TypeError(f"world_size: got {type(world_size).__name__}, takes an int")
    if world_size < 1:
        raise ValueError(f"world_size: got {world_size}, takes at least 1")
    borders = [0, *(_balanced_cuts(offsets, world_size) if cuts is None else _given_cuts(cuts, offsets, world_size))]
    borders.append(offsets[-1])
    return tuple(_shard(rank, borders, offsets) for rank in range(world_size))


def _integers(name: str, values: object) -> list[int]:
    if hasattr(values, "tolist"):
        if str(getattr(values, "device", "cpu")) != "cpu":
            raise ValueError(f"{name}: got a tensor on {values.device}, takes integers in host memory")
        values = values.tolist()
    if isinstance(values, (str, bytes)) or not isinstance(values, Sequence):
        raise TypeError(f"{name}: got {type(values).__name__}, takes a sequence of int")
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int):
            raise TypeError(f"{name}: got {type(value).__name__} among its values, takes int")
    return list(values)


def _offsets(cu_seqlens: object) -> list[int]:
    offsets = _integers("cu_seqlens", cu_seqlens)
    if not offsets or offsets[0] != 0:
        raise ValueError(f"cu_seqlens: got {offsets[:1]} at its start, takes N + 1 offsets of which the first is 0")
    for place, (a, b) in enumerate(pairwise(offsets), 1):
        if b < a:
            raise ValueError(f"cu_seqlens: got {b} after {a} at place {place}, takes offsets that never decrease")
    return offsets


def _given_cuts(cuts: Sequence[int], offsets: list[int], world_size: int) -> list[int]:
    cuts = _integers("cuts", cuts)
    if len(cuts) != world_size - 1:
        raise ValueError(f"cuts: got {len(cuts)} of them, takes world_size - 1 = {world_size - 1}")
    for before, cut in zip([0, *cuts], [*cuts, offsets[-1]]):
        if cut < before:
            raise ValueError(f"cuts: got {cuts}, takes tokens from 0 to {offsets[-1]} that never decrease")
    return cuts


def _balanced_cuts(offsets: list[int], world_size: int) -> list[int]:
    cuts = []
    for rank in range(1, world_size):
        cut = _snapped(rank * offsets[-1] // world_size, offsets, offsets[-1] // (world_size * SNAP_PART))
        cuts.append(max(cut, cuts[-1]) if cuts else cut)
    return cuts


def _snapped(at: int, offsets: list[int], reach: int) -> int:
    after = bisect_left(offsets, at)
    begin, end = offsets[max(after - 1, 0)], offsets[after]
    nearest = min((begin, end), key=lambda x: (abs(x - at), x))
    if abs(nearest - at) <= reach:
        return nearest
    if end - begin > SEGMENT_THRESHOLD_TOKENS:
        border = _nearest_multiple(at - begin, SEGMENT_TOKENS) + begin
        if abs(border - at) <= reach:
            return border
    return min(_nearest_multiple(at - begin, CHUNK_TOKENS) + begin, end)


def _nearest_multiple(x: int, step: int) -> int:
    return (x + step // 2) // step * step


def _shard(rank: int, borders: list[int], offsets: list[int]) -> Shard:
    start, stop, end = borders[rank], borders[rank + 1], offsets[-1]
    is_last = rank == len(borders) - 2

    def is_local(first_token: int, next_token: int) -> bool:
        if first_token < next_token:
            return max(first_token, start) < min(next_token, stop)
        return start <= first_token < stop or (is_last and first_token == end)

    local = [s for s, (a, b) in enumerate(pairwise(offsets)) if is_local(a, b)]
    if not local:
        return Shard(rank, start, stop, (0,), bisect_left(offsets, start, hi=len(offsets) - 1), False, False)
    first, last = local[0], local[-1]
    cu_seqlens = tuple(min(max(x, start), stop) - start for x in offsets[first : last + 2])
    continues = offsets[first] < start, offsets[last + 1] > stop
    return Shard(rank, start, stop, cu_seqlens, first, *continues)
