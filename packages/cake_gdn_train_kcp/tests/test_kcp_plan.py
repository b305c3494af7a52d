import dataclasses
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cake_gdn_train_kcp import Shard, plan_shards
from cake_gdn_train_kcp.exchange import is_cut, sink_ranks, source_ranks


def offsets_of(lengths):
    offsets = [0]
    for length in lengths:
        offsets.append(offsets[-1] + length)
    return offsets


packs = st.lists(st.one_of(st.integers(0, 3), st.integers(0, 500), st.integers(8000, 20000)), max_size=6)


@given(packs, st.integers(1, 9), st.data())
def test_shards_hold_every_token_and_every_sequence(lengths, world_size, data):
    offsets = offsets_of(lengths)
    cuts = None
    if data.draw(st.booleans()):
        cuts = sorted(
            data.draw(st.lists(st.integers(0, offsets[-1]), min_size=world_size - 1, max_size=world_size - 1))
        )
    shards = plan_shards(offsets, world_size, cuts=cuts)
    assert [s.rank for s in shards] == list(range(world_size))
    assert shards[0].start == 0
    assert shards[-1].stop == offsets[-1]
    assert all(a.stop == b.start for a, b in itertools.pairwise(shards))
    tokens, empty = [0] * len(lengths), []
    for shard in shards:
        assert shard.cu_seqlens[0] == 0
        assert shard.cu_seqlens[-1] == shard.tokens
        for i in range(shard.sequences):
            sequence = shard.first_sequence + i
            a, b = shard.cu_seqlens[i : i + 2]
            tokens[sequence] += b - a
            if lengths[sequence] == 0:
                empty.append(sequence)
                continue
            assert a < b
            before, after = shard.start + a > offsets[sequence], shard.start + b < offsets[sequence + 1]
            assert before == (i == 0 and shard.continues_from_previous)
            assert after == (i == shard.sequences - 1 and shard.continues_to_next)
    assert tokens == lengths
    assert empty == [s for s, length in enumerate(lengths) if length == 0]


@given(packs, st.integers(1, 9))
def test_sources_and_sinks_mirror_each_other(lengths, world_size):
    shards = plan_shards(offsets_of(lengths), world_size)
    for shard in shards:
        sources, sinks = source_ranks(shards, shard.rank), sink_ranks(shards, shard.rank)
        assert bool(sources) == shard.continues_from_previous
        assert bool(sinks) == shard.continues_to_next
        for source in sources:
            assert shard.rank in sink_ranks(shards, source)
        for sink in sinks:
            assert shard.rank in source_ranks(shards, sink)
    assert is_cut(shards) == any(source_ranks(shards, r) for r in range(world_size))


@given(packs, st.integers(1, 9))
def test_planned_loads_are_even(lengths, world_size):
    share = sum(lengths) / world_size
    for shard in plan_shards(offsets_of(lengths), world_size):
        assert abs(shard.tokens - share) <= share / 8 + 64 + 1


def test_cuts_prefer_borders():
    # Of sequences, a sixteenth of a share away.
    assert [s.start for s in plan_shards([0, 1050, 2000], 2)] == [0, 1050]
    assert not is_cut(plan_shards([0, 1050, 2000], 2))
    # Of segments in a long sequence, of chunks in a short one or where the segment is too far.
    assert [s.start for s in plan_shards([0, 16500], 2)] == [0, 8192]
    assert [s.start for s in plan_shards([0, 12289], 2)] == [0, 6144]
    assert [s.start for s in plan_shards([0, 10, 1000], 2)] == [0, 10 + 512]


def test_given_cuts_are_taken_as_they_are():
    first, second, third = plan_shards([0, 100, 100, 300], 3, cuts=[50, 100])
    assert first == Shard(0, 0, 50, (0, 50), 0, False, True)
    assert second == Shard(1, 50, 100, (0, 50), 0, True, False)
    assert third == Shard(2, 100, 300, (0, 0, 200), 1, False, False)
    with pytest.raises(dataclasses.FrozenInstanceError):
        first.start = 3


def test_empty_shards_and_empty_packs():
    assert plan_shards([0], 2) == (Shard(0, 0, 0, (0,), 0, False, False), Shard(1, 0, 0, (0,), 0, False, False))
    first, second = plan_shards([0, 0], 2)
    assert (first.sequences, second.sequences) == (0, 1)
    inside = plan_shards([0, 90], 3, cuts=[30, 30])[1]
    assert inside == Shard(1, 30, 30, (0,), 1, False, False)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_offsets_may_be_a_tensor(dtype):
    assert plan_shards(torch.tensor([0, 70, 200], dtype=dtype), 2) == plan_shards([0, 70, 200], 2)


BAD = [
    ({"cu_seqlens": None}, TypeError, "cu_seqlens: got NoneType, takes"),
    ({"cu_seqlens": "0,3"}, TypeError, "cu_seqlens: got str, takes"),
    ({"cu_seqlens": [0, 2.5]}, TypeError, "cu_seqlens: got float among its values, takes int"),
    ({"cu_seqlens": torch.tensor([0.0, 3.0])}, TypeError, "cu_seqlens: got float among its values, takes int"),
    ({"cu_seqlens": torch.zeros(2, dtype=torch.int64, device="meta")}, ValueError, "cu_seqlens: got a tensor on meta"),
    ({"cu_seqlens": []}, ValueError, r"cu_seqlens: got \[\] at its start, takes"),
    ({"cu_seqlens": [1, 3]}, ValueError, r"cu_seqlens: got \[1\] at its start, takes"),
    ({"cu_seqlens": [0, 5, 3]}, ValueError, "cu_seqlens: got 3 after 5 at place 2, takes"),
    ({"world_size": 0}, ValueError, "world_size: got 0, takes at least 1"),
    ({"world_size": 2.0}, TypeError, "world_size: got float, takes an int"),
    ({"world_size": True}, TypeError, "world_size: got bool, takes an int"),
    ({"cuts": [10]}, ValueError, "cuts: got 1 of them, takes world_size - 1 = 2"),
    ({"cuts": [10, 5]}, ValueError, r"cuts: got \[10, 5\], takes tokens from 0 to 100"),
    ({"cuts": [-1, 5]}, ValueError, r"cuts: got \[-1, 5\], takes"),
    ({"cuts": [5, 101]}, ValueError, r"cuts: got \[5, 101\], takes"),
    ({"cuts": 5}, TypeError, "cuts: got int, takes a sequence of int"),
    ({"cuts": [1.5, 2]}, TypeError, "cuts: got float among its values, takes int"),
]


@pytest.mark.parametrize(("changes", "kind", "message"), BAD, ids=[str(row[0]) for row in BAD])
def test_bad_arguments(changes, kind, message):
    arguments = {"cu_seqlens": [0, 40, 100], "world_size": 3, "cuts": None, **changes}
    with pytest.raises(kind, match=message):
        plan_shards(arguments["cu_seqlens"], arguments["world_size"], cuts=arguments["cuts"])
