"""From a call's shapes to everything that the CUDA path decides: a pure function, printable, made without a GPU.

Nothing here can move a bit of a result. Which warps run a value column, how many CTAs share the columns of a head and
where the workspace lies follow the load; how a sequence is cut into chunks and segments is `cake_shared.plan`'s rule of
its length alone.
"""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass

from cake_shared.gdn.cuda.tables import TablePlan, plan_tables
from cake_shared.plan import CHUNK_TOKENS, SEGMENT_THRESHOLD_TOKENS, SEGMENT_TOKENS, ceil_div

HEAD_DIM = 128

_REGION_BYTES = 1024
_SQUARE_TILE_BYTES = CHUNK_TOKENS * CHUNK_TOKENS * 2
_TOKEN_TILE_BYTES = CHUNK_TOKENS * HEAD_DIM * 2
_STATE_TILE_BYTES = HEAD_DIM * HEAD_DIM * 2
_STATE_BYTES = HEAD_DIM * HEAD_DIM * 4
_SCALAR_BYTES = 4 * CHUNK_TOKENS * 4
_WAVE_RECORD_BYTES = 2 * _STATE_TILE_BYTES + _TOKEN_TILE_BYTES  # of a native backward pass: S0, dS1 and V'

# Three launches a wave cost a host more than so much memory is worth.
ONE_WAVE_BYTES = 64 << 20

# Chunks of one colour in a row, as kHalfRun of cake/gdn/wave_part.h.
HALF_RUN_CHUNKS = 16


@dataclass(frozen=True)
class Problem:
    """The shapes and switches of a call that its plan depends on.

    Attributes
    ----------
    batch, tokens
        Shape `[B, T]` of the token buffer.
    key_heads, value_heads
        H and HV.
    sequences
        N of `cu_seqlens`, or None: every row is a sequence.
    normalises_rows, makes_gate
        Whether q and k are normalised, and whether gates are made from raw ones.
    multiprocessors
        Of the device.
    native
        Whether native programs run: they keep neither P, nor residuals X, nor gradients of residuals, and the backward
        pass runs in waves of heads or of halves of segments.
    """

    batch: int
    tokens: int
    key_heads: int
    value_heads: int
    sequences: int | None
    normalises_rows: bool
    makes_gate: bool
    multiprocessors: int
    native: bool = False


@dataclass(frozen=True)
class Region:
    """A named part of the workspace."""

    name: str
    bytes: int


@dataclass(frozen=True)
class Plan:
    """What one direction of a call allocates and how its chains are spread.

    Attributes
    ----------
    tables
        Capacities and layout of the pack's tables.
    slots
        Matrices `[HV, 128, 128]` kept at the borders of segments; 0 where no sequence can have two.
    warps
        Of a CTA of the output and reverse chains: 4 (two CTAs share a head's value columns) or 8 (one has all).
    groundwork
        What the stages up to wy make, in order, in a buffer that a forward pass may keep for the backward one.
    regions
        The workspace, in order. Each region of the two buffers starts at a multiple of 1024 bytes.
    wave_key_heads, wave_halves, wave_warps
        Key heads whose gradients of the backward pass are made at once, in a workspace that serves all waves; 2 where
        those of the later halves of all segments are made before those of the earlier halves, else 1; and the warps of
        a CTA of their chains.
    """

    tables: TablePlan
    slots: int
    warps: int
    groundwork: tuple[Region, ...]
    regions: tuple[Region, ...]
    wave_key_heads: int
    wave_halves: int
    wave_warps: int

    @functools.cached_property
    def groundwork_bytes(self) -> int:
        """Bytes of the groundwork."""
        return _bytes_of(self.groundwork)

    @functools.cached_property
    def workspace_bytes(self) -> int:
        """Bytes of the workspace; 0 for none."""
        return _bytes_of(self.regions)


@dataclass(frozen=True)
class Wave:
    """What a wave of the backward pass has at once: of these chunks all or about half, and these value heads."""

    chunks: int
    value_heads: int
    halves: int

    @property
    def records(self) -> int:
        """Chunks and value heads whose tiles are in the workspace."""
        return (half_chunks(self.chunks) if self.halves == 2 else self.chunks) * self.value_heads


def _bytes_of(regions: tuple[Region, ...]) -> int:
    return sum(ceil_div(region.bytes, _REGION_BYTES) * _REGION_BYTES for region in regions)


def slots_per_row(tokens: int) -> int:
    """Return how many segment borders a row of the token buffer can hold: one a stretch of 4096 tokens."""
    return tokens // SEGMENT_TOKENS if tokens > SEGMENT_THRESHOLD_TOKENS else 0


def chain_warps(segments: int, value_heads: int, multiprocessors: int) -> int:
    """Return the warps of a chain's CTA: 4, two CTAs sharing a head, while all of those fit on the device at once.

    A chain is bound by its latency while multiprocessors are idle, and halving its columns halves most of that; once
    they are not, one CTA that reads K, Q, T and P for all columns moves fewer bytes.
    """
    return 4 if 2 * segments * value_heads <= multiprocessors else 8


def half_chunks(chunks: int) -> int:
    """Return the most chunks that the half of a pack's chunks has, as half_chunks of cake/gdn/wave_part.h."""
    periods, rest = divmod(chunks, 2 * HALF_RUN_CHUNKS)
    return periods * HALF_RUN_CHUNKS + min(rest, HALF_RUN_CHUNKS)


def cut_slots(chunks: int) -> int:
    """Return how many segments of a pack can have chunks in both halves, as cut_slots of cake/gdn/wave_part.h."""
    return max(chunks - 1, 0) // HALF_RUN_CHUNKS


def backward_waves(
    chunks: int, segments: int, key_heads: int, value_heads: int, multiprocessors: int
) -> tuple[int, int]:
    """Return the key heads and the halves of segments of the waves of a native backward pass.

    The workspace of a wave is the peak of a step's memory; two waves halve it. Two of heads have half of the chains
    each, all of their length: where forward and reverse chains of all heads fit on the device at once, the latency of
    one is paid twice. Two of halves have all chains, of half their length, but the forward ones run the earlier halves
    twice. Small calls have one wave, and so have those of one key head.
    """
    if chunks * value_heads * _WAVE_RECORD_BYTES <= ONE_WAVE_BYTES or key_heads == 1:
        return key_heads, 1
    if 2 * segments * value_heads <= multiprocessors:
        return key_heads, 2
    return ceil_div(key_heads, 2), 1


def plan_groundwork(
    batch: int,
    tokens: int,
    key_heads: int,
    value_heads: int,
    sequences: int | None,
    normalises_rows: bool,
    native: bool,
) -> tuple[Region, ...]:
    """Return the groundwork's regions, from what `Problem` says of a call; sizes may be symbolic."""
    tables = plan_tables(batch, tokens, sequences)
    records, rows = tables.chunk_capacity * value_heads, batch * tokens * key_heads
    regions = [Region("tables", 4 * tables.words)]
    if normalises_rows:
        for name in ("q", "k"):
            regions.append(Region(f"normalised {name}", rows * HEAD_DIM * 2))
            regions.append(Region(f"reciprocal norms of {name}", rows * 4))
    regions.append(Region("cumulative gates", records * CHUNK_TOKENS * 4))
    regions.append(Region("inverses", records * _SQUARE_TILE_BYTES))
    if not native:
        regions.append(Region("attention", records * _SQUARE_TILE_BYTES))
    return (*regions, Region("scalars", records * _SCALAR_BYTES))


def groundwork_bytes(
    batch: int,
    tokens: int,
    key_heads: int,
    value_heads: int,
    sequences: int | None,
    normalises_rows: bool,
    native: bool,
) -> int:
    """Return the size of the buffer that a forward pass keeps for the backward one; sizes may be symbolic."""
    return _bytes_of(plan_groundwork(batch, tokens, key_heads, value_heads, sequences, normalises_rows, native))


def _plan(problem: Problem, regions_of) -> Plan:
    p = problem
    tables = plan_tables(p.batch, p.tokens, p.sequences)
    slots = p.batch * slots_per_row(p.tokens)
    segments = max(tables.sequences, p.batch * p.tokens // SEGMENT_TOKENS)
    warps = chain_warps(segments, p.value_heads, p.multiprocessors)
    groundwork = plan_groundwork(*dataclasses.astuple(p)[:6], p.native)
    chunks = tables.chunk_capacity
    wave_key_heads, wave_halves = p.key_heads, 1
    if p.native:
        wave_key_heads, wave_halves = backward_waves(chunks, segments, p.key_heads, p.value_heads, p.multiprocessors)
    wave = Wave(chunks, wave_key_heads * (p.value_heads // p.key_heads), wave_halves)
    regions = tuple(regions_of(p, wave, slots * p.value_heads * _STATE_BYTES))
    # A wave's reverse and forward chains run side by side.
    whole = wave_key_heads == p.key_heads and wave_halves == 1
    wave_warps = warps if whole else chain_warps(2 * segments, wave.value_heads, p.multiprocessors)
    return Plan(tables, slots, warps, groundwork, regions, wave_key_heads, wave_halves, wave_warps)


@functools.lru_cache(maxsize=256)
def plan_forward(problem: Problem, saves_entries: bool) -> Plan:
    """Return the plan of the forward pass; entry states of segments are in the workspace unless they are saved."""

    def regions_of(problem: Problem, wave: Wave, border_bytes: int) -> list[Region]:
        regions = [Region("segment factors", border_bytes)]
        return regions if saves_entries else [*regions, Region("segment entries", border_bytes)]

    return _plan(problem, regions_of)


@functools.lru_cache(maxsize=256)
def plan_backward(problem: Problem, token_gradients: bool) -> Plan:
    """Return the plan of the backward pass; without `token_gradients` it ends at those of v and initial states."""

    def regions_of(problem: Problem, wave: Wave, border_bytes: int) -> list[Region]:
        records = wave.records
        regions = [
            Region("segment exits", border_bytes),
            Region("segment factors, then exit gradients", max(border_bytes, records * _STATE_TILE_BYTES)),
        ]
        if not problem.native:
            regions.append(Region("residual gradients", records * _TOKEN_TILE_BYTES))
        if wave.halves == 2:
            regions.append(Region("gradients at cuts", cut_slots(wave.chunks) * wave.value_heads * _STATE_BYTES))
        if token_gradients:
            regions.append(Region("entry states", records * _STATE_TILE_BYTES))
            if not problem.native:
                regions.append(Region("residuals", records * _TOKEN_TILE_BYTES))
            regions.append(Region("writes", records * _TOKEN_TILE_BYTES))
            if problem.makes_gate:
                regions.append(Region("gate partial sums", wave.chunks * problem.value_heads * 16))
        return regions

    return _plan(problem, regions_of)
