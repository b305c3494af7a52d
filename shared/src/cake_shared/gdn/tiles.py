"""From strided token rows to zero-padded tiles of fixed shape and back, without a copy made by the caller.

A tile holds `rows` tokens of one chunk for one head: `[chunks, heads, rows, width]`, chunks ordered step by step
along the chain and, within a step, longest sequence first. Widths are rounded up to `LANES` so that every matrix
starts at the same alignment whatever its place. Padded rows and columns are zero.
"""

from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise

import torch

from cake_shared.gdn.plan import padded
from cake_shared.plan import Group, Round, Wave


@dataclass(frozen=True)
class WaveIndex:
    """Where the rows of a wave's tiles live: `[chunks, 1, rows]` coordinates, or one run of tokens of one sequence.

    `row` is `batch_index * tokens + token`; padded places read row 0 and write the spare row `batch * tokens`.
    """

    chunks: int
    rows: int
    counts: tuple[int, ...]
    run: tuple[int, int] | None
    read: torch.Tensor | None
    write: torch.Tensor | None
    mask: torch.Tensor | None
    pads: tuple[torch.Tensor, torch.Tensor] | None
    chunk_ids: torch.Tensor


@dataclass(frozen=True)
class Pack:
    """Sequences of a `[batch, tokens]` buffer as ranges of its flattened rows."""

    batch: int
    tokens: int
    starts: tuple[int, ...]
    lengths: tuple[int, ...]

    @property
    def sequences(self) -> int:
        """The number of sequences, empty ones included."""
        return len(self.lengths)

    @property
    def spare_row(self) -> int:
        """The row that takes what padded places would write."""
        return self.batch * self.tokens

    @property
    def end(self) -> int:
        """The first flattened row that belongs to no sequence and to no later one."""
        return self.starts[-1] + self.lengths[-1] if self.lengths else 0


def make_pack(batch: int, tokens: int, offsets: tuple[int, ...] | None) -> Pack:
    """Return the pack of a `[batch, tokens]` buffer, whose rows are sequences where `offsets` is None."""
    if offsets is None:
        return Pack(
            batch, tokens, tuple(range(0, batch * tokens, tokens)) if tokens else (0,) * batch, (tokens,) * batch
        )
    return Pack(batch, tokens, tuple(offsets[:-1]), tuple(b - a for a, b in pairwise(offsets)))


def wave_index(
    pack: Pack, group: Group, rnd: Round, wave: Wave, round_first: int, chunk_base: tuple[int, ...]
) -> WaveIndex:
    """Return the coordinates of one wave; `round_first` is the round's first token within its sequences."""
    rows = group.rows
    starts = [pack.starts[s] + round_first for s in group.sequences[: wave.active[0]]]
    first, ids = [], []
    counts = []
    step_chunk = round_first // rows
    for i, n in enumerate(wave.active):
        at = (wave.first_step + i) * rows
        first += [start + at for start in starts[:n]]
        counts += [min(rows, t - at) for t in rnd.tokens[:n]]
        chunk = step_chunk + wave.first_step + i
        ids += [chunk_base[s] + chunk for s in group.sequences[:n]]
    chunks = len(first)
    mask = pads = read = write = None
    lane = torch.arange(rows)
    if min(counts) < rows:
        mask = lane < torch.tensor(counts)[:, None]
        pads = tuple((~mask).nonzero(as_tuple=True))
    run = None
    if wave.active[0] == 1:
        run = (first[0], sum(counts))
    else:
        row = torch.tensor(first)[:, None] + lane
        read = row if mask is None else row.masked_fill(~mask, 0)
        write = row if mask is None else row.masked_fill(~mask, pack.spare_row)
        read, write = read[:, None], write[:, None]
    if mask is not None:
        mask = mask[:, None]
    return WaveIndex(chunks, rows, wave.active, run, read, write, mask, pads, torch.tensor(ids))


@lru_cache(maxsize=32)
def _heads(first: int, count: int) -> torch.Tensor:
    return torch.arange(first, first + count)[:, None]


def gather(x: torch.Tensor, pack: Pack, index: WaveIndex, heads: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """Return the tiles `[chunks, heads, rows, padded(width)]` of `x` `[batch, tokens, heads, width]` in `dtype`."""
    first, count = heads
    width, rows = x.shape[3], index.rows
    wide = padded(width)
    if index.run is not None:
        row, tokens = index.run
        b, t = divmod(row, pack.tokens)
        out = torch.empty(index.chunks, count, rows, wide, dtype=dtype)
        src = x[b, t : t + tokens, first : first + count]
        full = tokens // rows
        if wide > width:
            out[..., width:] = 0
        out[:full, ..., :width].copy_(src[: full * rows].unflatten(0, (full, rows)).transpose(1, 2))
        if full < index.chunks:
            rest = tokens - full * rows
            out[full, :, :rest, :width].copy_(src[full * rows :].transpose(0, 1))
            out[full, :, rest:] = 0
        return out
    head = _heads(first, count)
    if pack.batch == 1:
        tile = x[0][index.read, head]
    else:
        tile = x[index.read // pack.tokens, index.read % pack.tokens, head]
    tile = tile.to(dtype)
    if wide > width:
        tile = torch.nn.functional.pad(tile, (0, wide - width))
    if index.pads is not None:
        chunk, row = index.pads
        tile[chunk, :, row] = 0
    return tile


def gather_scalars(
    x: torch.Tensor, pack: Pack, index: WaveIndex, heads: tuple[int, int], dtype: torch.dtype
) -> torch.Tensor:
    """Return the tiles `[chunks, heads, rows]` of `x` `[batch, tokens, heads]` in `dtype`, zero at padded rows."""
    first, count = heads
    if index.run is None:
        head = _heads(first, count)
        if pack.batch == 1:
            tile = x[0][index.read, head].to(dtype)
        else:
            tile = x[index.read // pack.tokens, index.read % pack.tokens, head].to(dtype)
        if index.mask is not None:
            tile.masked_fill_(~index.mask, 0)
        return tile
    row, tokens = index.run
    b, t = divmod(row, pack.tokens)
    src = x[b, t : t + tokens, first : first + count].to(dtype)
    missing = index.chunks * index.rows - tokens
    if missing:
        src = torch.nn.functional.pad(src, (0, 0, 0, missing))
    return src.unflatten(0, (index.chunks, index.rows)).transpose(1, 2).contiguous()


def scatter(tile: torch.Tensor, out: torch.Tensor, index: WaveIndex, heads: tuple[int, int]) -> None:
    """Write tiles to the rows of `out` `[batch * tokens + 1, heads, width]`, rounding once to its dtype."""
    first, count = heads
    width, rows = out.shape[2], index.rows
    tile = tile[..., :width]
    if index.run is not None:
        row, tokens = index.run
        dst = out[row : row + tokens, first : first + count]
        full = tokens // rows
        dst[: full * rows].unflatten(0, (full, rows)).transpose(1, 2).copy_(tile[:full])
        if full < index.chunks:
            dst[full * rows :].transpose(0, 1).copy_(tile[full, :, : tokens - full * rows])
        return
    out[index.write, _heads(first, count)] = tile.to(out.dtype)


def new_rows(pack: Pack, heads: int, width: int, dtype: torch.dtype) -> torch.Tensor:
    """Allocate output rows plus the spare one; rows of no sequence are zero, the others are still to be written."""
    out = torch.empty(pack.spare_row + 1, heads, width, dtype=dtype)
    out[pack.end :] = 0
    return out


def rows_of(out: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the rows of `new_rows` without the spare one, in the shape of a result.

    For autograd it is no view: one made inside a custom function could not be modified in place by the caller.
    """
    return out[:-1].view(shape).data


def load_states(
    states: torch.Tensor | None,
    sequences: torch.Tensor,
    heads: tuple[int, int],
    shape: tuple[int, int],
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return `[n, heads, padded K, padded V]` states of some sequences; zeros where `states` is None.

    `states` is `[N, HV, K, V]` (a transposed view of it will do); `shape` is the padded one.
    """
    first, count = heads
    out = torch.zeros(sequences.shape[0], count, *shape, dtype=dtype)
    if states is not None:
        out[..., : states.shape[2], : states.shape[3]] = states[sequences, first : first + count]
    return out
