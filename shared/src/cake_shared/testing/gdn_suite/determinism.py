"""Bits are a function of the sequence and of nothing else: every comparison here is bit for bit.

D1 run, process, moment; D2 pack; D4 heads beside; D5 way of launching.
"""

import hashlib
import subprocess
import sys
import threading

import pytest
import torch

from cake_shared.testing import assert_bitwise_equal, deterministic_fill, leave_nan_blocks
from cake_shared.testing.bits import bits_of
from cake_shared.testing.gdn_inputs import base, packed, select_heads, states
from cake_shared.testing.gdn_run import run

TOKEN_RESULTS = ("o", "dq", "dk", "dv", "dg", "dbeta")


def with_states(case, sequences):
    """The case with an initial state and a gradient of the final one for each sequence."""
    h0, ds = states(case, sequences)
    return case.with_(initial_state=h0, d_state=ds)


def assert_all_equal(results, expected):
    """Assert equal bits of all results."""
    __tracebackhide__ = True
    for name, value in expected.items():
        assert_bitwise_equal(results[name], value, name)


def digest(results):
    """SHA-256 over all results in name order."""
    sha = hashlib.sha256()
    for name in sorted(results):
        if results[name] is not None:
            sha.update(name.encode())
            sha.update(bits_of(results[name]).numpy().tobytes())
    return sha.hexdigest()


@pytest.mark.parametrize("gate", ["Gmild", "Gqwen"])
def test_U32_repeated_calls(gdn, gate):
    """D1: the same call gives the same bits again, whatever the allocator holds."""
    case = with_states(packed(base(700, 2, 4, gate=gate), (300, 400)), 2)
    expected = run(gdn.rule, case)
    for _ in range(5):
        leave_nan_blocks([case.q.shape, case.v.shape, case.g.shape, (2, 4, 128, 128)])
        assert_all_equal(run(gdn.rule, case), expected)


IN_ANOTHER_PROCESS = """
import torch; torch.set_num_threads(1)
import {package} as package
from cake_shared.testing.gdn_inputs import base, packed
from cake_shared.testing.gdn_run import run
from cake_shared.testing.gdn_suite.determinism import digest, with_states
print(digest(run(package.chunk_gated_delta_rule, with_states(packed(base(200, 2, 4), (60, 140)), 2))))
"""


def test_another_process(gdn):
    """D1: a fresh process, without poisoned memory, has the bits of this one."""
    code = IN_ANOTHER_PROCESS.format(package=gdn.name)
    other = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert other.stdout.strip() == digest(run(gdn.rule, with_states(packed(base(200, 2, 4), (60, 140)), 2)))


@pytest.mark.parametrize("place", [0, 30, 61])
def test_U35_one_sequence_among_61_others(gdn, place):
    """D2: a sequence of 130 tokens alone, first, in the middle and last of 62 has one set of bits."""
    lengths = [(37 * i) % 90 for i in range(61)]
    lengths.insert(place, 130)
    start = sum(lengths[:place])
    case = with_states(packed(base(sum(lengths), 1, 2), lengths), 62)
    alone = case.tokens(start, start + 130)
    alone = alone.with_(initial_state=case.initial_state[place : place + 1], d_state=case.d_state[place : place + 1])
    results, expected = run(gdn.rule, case), run(gdn.rule, alone)
    for name in TOKEN_RESULTS:
        assert_bitwise_equal(results[name][:, start : start + 130], expected[name], name)
    for name in ("final_state", "d_initial_state"):
        assert_bitwise_equal(results[name][place : place + 1], expected[name], name)


@pytest.mark.parametrize("first", [True, False])
def test_U35_one_sequence_beside_a_long_neighbour(gdn, first):
    """D2: a neighbour of 16384 tokens, which is cut into segments, moves no bit."""
    lengths = (130, 16384) if first else (16384, 130)
    start = 0 if first else 16384
    case = packed(base(sum(lengths), 1, 1, K=64, V=64), lengths)
    results = run(gdn.rule, case)
    expected = run(gdn.rule, case.tokens(start, start + 130))
    for name in TOKEN_RESULTS:
        assert_bitwise_equal(results[name][:, start : start + 130], expected[name], name)


@pytest.mark.parametrize("length", [8192, 8193, 12300])
def test_a_long_sequence_among_others(gdn, length):
    """D2: lengths around the limit where a sequence is cut into segments, alone and between neighbours."""
    case = packed(base(length + 150, 1, 1, K=32, V=32), (50, length, 100))
    results = run(gdn.rule, case)
    expected = run(gdn.rule, case.tokens(50, 50 + length))
    for name in TOKEN_RESULTS:
        assert_bitwise_equal(results[name][:, 50 : 50 + length], expected[name], name)


def test_padding_behind_the_pack(gdn):
    """D2: rows beyond the last offset, of any number, move no bit."""
    case = base(400, 2, 4)
    expected = run(gdn.rule, packed(case.tokens(0, 190), (100, 90)))
    for buffer in (190, 191, 256, 400):
        results = run(gdn.rule, packed(case.tokens(0, buffer), (100, 90)))
        for name in TOKEN_RESULTS:
            assert_bitwise_equal(results[name][:, :190], expected[name], name)
        assert_bitwise_equal(results["final_state"], expected["final_state"], "final_state")


@pytest.mark.parametrize("tokens", [63, 64, 130])
def test_batch_against_packed(gdn, tokens):
    """D2: `[B, T]` and the packed `[1, B*T]` have the same bits."""
    batch = with_states(base(tokens, 2, 4, B=3), 3)
    flat = {
        name: getattr(batch, name).reshape(1, 3 * tokens, *getattr(batch, name).shape[2:])
        for name in ("q", "k", "v", "g", "beta", "do")
    }
    results = run(gdn.rule, packed(batch.with_(**flat), (tokens,) * 3))
    expected = run(gdn.rule, batch)
    for name in TOKEN_RESULTS:
        assert_bitwise_equal(results[name].reshape(expected[name].shape), expected[name], name)
    for name in ("final_state", "d_initial_state"):
        assert_bitwise_equal(results[name], expected[name], name)


@pytest.mark.parametrize("key_heads", [(0,), (3,), (1, 2), (3, 0)])
def test_heads_of_a_tensor_parallel_rank(gdn, key_heads):
    """D4: some key heads with their value heads, in any order, have the bits of the whole model."""
    case = with_states(packed(base(200, 4, 12, gate="Gqwen"), (70, 130)), 2)
    values = [3 * h + i for h in key_heads for i in range(3)]
    whole, rank = run(gdn.rule, case), run(gdn.rule, select_heads(case, key_heads))
    for name in ("dq", "dk"):
        assert_bitwise_equal(rank[name], whole[name][:, :, list(key_heads)], name)
    for name in ("o", "dv", "dg", "dbeta"):
        assert_bitwise_equal(rank[name], whole[name][:, :, values], name)
    for name in ("final_state", "d_initial_state"):
        assert_bitwise_equal(rank[name], whole[name][:, values], name)


def test_the_size_of_a_value_group_moves_only_key_gradients(gdn):
    """Scope: o, states, dv, dg and dbeta of a value head do not depend on how many share its key head."""
    case = with_states(base(200, 2, 6), 1)
    wide = case.with_(q=case.q.repeat_interleave(3, 2), k=case.k.repeat_interleave(3, 2))
    grouped, separate = run(gdn.rule, case), run(gdn.rule, wide)
    for name in ("o", "final_state", "dv", "dg", "dbeta", "d_initial_state"):
        assert_bitwise_equal(separate[name], grouped[name], name)


def test_another_thread(gdn):
    """D5: a call from another thread, while this one computes too, has the same bits."""
    case = with_states(packed(base(400, 2, 4), (150, 250)), 2)
    expected = run(gdn.rule, case)
    results = []
    worker = threading.Thread(target=lambda: results.extend(run(gdn.rule, case) for _ in range(3)))
    worker.start()
    here = [run(gdn.rule, case) for _ in range(3)]
    worker.join()
    assert len(results) == 3
    for result in results + here:
        assert_all_equal(result, expected)


def test_grad_mode_moves_no_bit(gdn):
    """D5: inference, `no_grad` and training forwards have the same output bits."""
    case = with_states(packed(base(200, 2, 4), (60, 140)), 2)
    expected = run(gdn.rule, case)
    with torch.no_grad():
        silent = run(gdn.rule, case, wrt=())
    with torch.inference_mode():
        inference = run(gdn.rule, case, wrt=())
    for results in (silent, inference, run(gdn.rule, case, wrt=("v",))):
        for name in ("o", "final_state"):
            assert_bitwise_equal(results[name], expected[name], name)


def test_deterministic_algorithms_are_accepted(gdn):
    """`torch.use_deterministic_algorithms(True)`, which fills every allocation with NaN: same bits."""
    case = with_states(packed(base(200, 2, 4, gate="Gqwen"), (60, 90)), 2)
    expected = run(gdn.rule, case)
    with deterministic_fill():
        results = run(gdn.rule, case)
    assert_all_equal(results, expected)


@pytest.mark.parametrize("threads", [1, 2])
def test_bits_hold_at_a_fixed_thread_count(gdn, threads):
    """On the CPU the pack moves no bit at one and at two threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        case = packed(base(500, 1, 2), (130, 300, 70))
        results = run(gdn.rule, case)
        for start, stop in ((0, 130), (130, 430), (430, 500)):
            expected = run(gdn.rule, case.tokens(start, stop))
            for name in TOKEN_RESULTS:
                assert_bitwise_equal(results[name][:, start:stop], expected[name], name)
    finally:
        torch.set_num_threads(before)


def test_gate_parameter_gradients_repeat(gdn):
    """dA_log and ddt_bias have the same bits in repeated calls and per head of a tensor-parallel rank."""
    case = packed(base(200, 2, 4, K=64, V=64), (60, 140))
    parameters = {"A_log": torch.linspace(-1, 1, 4), "dt_bias": torch.linspace(0, 1, 4)}
    whole = run(gdn.rule, case, use_gate_in_kernel=True, **parameters)
    again = run(gdn.rule, case, use_gate_in_kernel=True, **parameters)
    shard = {name: x[2:] for name, x in parameters.items()}
    rank = run(gdn.rule, select_heads(case, (1,)), use_gate_in_kernel=True, **shard)
    for name in ("dA_log", "ddt_bias"):
        assert_bitwise_equal(again[name], whole[name], name)
        assert_bitwise_equal(rank[name], whole[name][2:], name)
