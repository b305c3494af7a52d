"""Cuts and work batches: pure arithmetic, checked over many packs."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cake_shared.gdn.plan import Problem, padded, plan_rule
from cake_shared.plan import (
    CHUNK_TOKENS,
    SEGMENT_THRESHOLD_TOKENS,
    SEGMENT_TOKENS,
    WorkBudget,
    ceil_div,
    extra_segment_capacity,
    pack_tables,
    plan_work,
    segment_count,
    segment_lengths,
    tile_rows,
)

LENGTHS = st.lists(st.one_of(st.integers(0, 200), st.integers(0, 30000), st.just(8192), st.just(8193)), max_size=12)


@pytest.mark.parametrize(
    ("length", "cut"),
    [(0, ()), (1, (1,)), (8192, (8192,)), (8193, (4096, 4096, 1)), (12288, (4096,) * 3), (9000, (4096, 4096, 808))],
)
def test_segment_rule(length, cut):
    assert segment_lengths(length) == cut
    assert segment_count(length) == len(cut)


@given(LENGTHS)
def test_tables_cover_every_token_once(lengths):
    """Chunks tile segments, segments tile sequences, in order, and their indices point at each other."""
    offsets = [0]
    for n in lengths:
        offsets.append(offsets[-1] + n)
    tables = pack_tables(offsets)
    assert [c for chunk in tables.chunks for c in range(chunk.first_token, chunk.first_token + chunk.tokens)] == list(
        range(offsets[-1])
    )
    for i, segment in enumerate(tables.segments):
        chunks = tables.chunks[segment.first_chunk : segment.first_chunk + segment.chunks]
        assert {c.segment for c in chunks} == {i}
        assert sum(c.tokens for c in chunks) == segment.tokens
        assert all(c.tokens == CHUNK_TOKENS for c in chunks[:-1])
    for s, n in enumerate(lengths):
        mine = tables.segments[tables.sequence_first_segment[s] : tables.sequence_first_segment[s + 1]]
        assert tuple(x.tokens for x in mine) == segment_lengths(n)
        assert tables.sequence_first_chunk[s + 1] - tables.sequence_first_chunk[s] == ceil_div(n, CHUNK_TOKENS)


@given(LENGTHS)
def test_a_cut_depends_on_its_sequence_alone(lengths):
    """The chunks of the last sequence are those that it has alone, moved."""
    offsets = [0]
    for n in lengths:
        offsets.append(offsets[-1] + n)
    whole, alone = pack_tables(offsets), pack_tables([0, *lengths[-1:]])
    count = len(alone.chunk_tokens)
    assert whole.chunk_tokens[len(whole.chunk_tokens) - count :] == alone.chunk_tokens


@pytest.mark.parametrize("offsets", [[], [1, 2], [0, 5, 3]])
def test_bad_offsets(offsets):
    with pytest.raises(ValueError, match="offsets: got"):
        pack_tables(offsets)


@given(LENGTHS, st.integers(1, 5), st.integers(1, 4), st.integers(1, 1 << 22), st.integers(1, 1 << 22))
def test_work_holds_every_piece_once_and_keeps_its_bounds(lengths, key_heads, ratio, wave_bytes, group_bytes):
    """Each sequence and key head is in one group; rounds shrink along a group; waves and groups keep to the budget."""
    groups = plan_work(lengths, key_heads, ratio, 16, 32, 4, WorkBudget(wave_bytes, group_bytes))
    held = [
        (s, h) for g in groups for s in g.sequences for h in range(g.first_key_head, g.first_key_head + g.key_heads)
    ]
    assert sorted(held) == [(s, h) for s, n in enumerate(lengths) if n for h in range(key_heads)]
    for group in groups:
        assert {tile_rows(lengths[s]) for s in group.sequences} == {group.rows}
        tokens = dict.fromkeys(group.sequences, 0)
        for rnd in group.rounds:
            assert list(rnd.tokens) == sorted(rnd.tokens, reverse=True)
            for s, n in zip(group.sequences, rnd.tokens):
                tokens[s] += n
            steps = [n for wave in rnd.waves for n in wave.active]
            assert steps == [sum(t > step * group.rows for t in rnd.tokens) for step in range(len(steps))]
            assert len(steps) == ceil_div(rnd.tokens[0], group.rows)
            heads = group.key_heads * ratio
            unit = max(group.rows * 32, 16 * 32 // 2) * 4
            for wave in rnd.waves:
                assert sum(wave.active) * heads * unit <= wave_bytes or len(wave.active) == 1
            tiles = sum(steps) * heads
            assert tiles * unit <= group_bytes or (len(rnd.tokens) == 1 and group.key_heads == 1)
        assert tokens == {s: lengths[s] for s in group.sequences}


@given(LENGTHS, st.integers(0, 300))
def test_capacity_from_the_shape_is_enough(lengths, rest):
    extra = sum(max(0, segment_count(n) - 1) for n in lengths)
    assert extra <= extra_segment_capacity(1, sum(lengths) + rest)


def test_plan_is_frozen_printable_and_repeatable():
    problem = Problem(1, 20000, (12000, 4000, 3900, 100), 4, 8, 100, 128)
    plan = plan_rule(problem)
    assert plan == plan_rule(problem)
    with pytest.raises(dataclasses.FrozenInstanceError):
        plan.program = ""
    text = str(plan)
    for word in (plan.program, "chunk_state", "4096", "8192", "HV=8", str(plan.tape_bytes), "pack order"):
        assert word in text
    assert (plan.key_width, plan.value_width) == (112, 128)
    assert plan.first_extra_segment == (0, 2, 2, 2, 2)
    assert plan.chunk_counts == (188, 63, 61, 2)
    assert padded(1) == 16
    assert SEGMENT_THRESHOLD_TOKENS == 2 * SEGMENT_TOKENS
