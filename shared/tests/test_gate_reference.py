"""The CPU statement of the gate stage against exact arithmetic, and the device's cutting rule against the plan's."""

import ctypes
import shutil
import subprocess
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cake_shared import plan
from cake_shared.gdn.gate_reference import GATE_FLOOR, gate_sums
from cake_shared.program import package_directory
from cake_shared.testing.gate_cases import GATE_CASES, differences, expected

FAR = 2**24


def sums_of(gates: list[float]) -> list[float]:
    g = torch.tensor(gates).view(1, -1, 1)
    tables = plan.pack_tables([0, len(gates)])
    return gate_sums(g, tables, len(tables.chunk_tokens)).view(-1)[: len(gates)].tolist()


@given(st.lists(st.floats(-(2.0**100), 0, width=32, allow_nan=False), min_size=1, max_size=64))
def test_every_sum_is_the_exact_one_rounded_once(gates):
    exact = Fraction(0)
    for gate, got in zip(gates, sums_of(gates)):
        exact += Fraction(max(gate, GATE_FLOOR))
        half_a_unit = Fraction(float(np.spacing(np.float32(abs(got))))) / 2
        # The second word is itself rounded, 2^24 times finer.
        assert abs(Fraction(got) - exact) <= half_a_unit * Fraction(1001, 1000), (got, float(exact))


def test_a_difference_of_sums_stays_within_two_to_the_minus_11():
    # The worst that a chunk can hold: strong gates in front, then the same mild one again and again.
    for strong in (0, 1, 8, 32, 40, 62):
        mild = float(torch.tensor(-0.01))
        sums = sums_of([-1e6] * strong + [mild] * (64 - strong))
        for i in range(strong, 64):
            for j in range(strong, i):
                exact = mild * (i - j)
                assert abs(sums[i] - sums[j] - exact) <= 2.0**-11


def test_clamped_gates_still_forget_everything():
    assert torch.exp(torch.tensor(GATE_FLOOR)) == 0.0
    sums = sums_of([0.0, float("-inf"), -1e-3])
    assert sums == [0.0, GATE_FLOOR, float(torch.tensor(GATE_FLOOR) + torch.tensor(-1e-3))]


def test_a_nan_gate_reaches_every_later_sum_of_its_chunk_and_no_other():
    gates = [-1.0] * 130
    gates[70] = float("nan")
    sums = torch.tensor(sums_of(gates))
    assert sums.isnan().nonzero().flatten().tolist() == list(range(70, 128))


def test_the_cases_hold_together():
    assert len({case.name for case in GATE_CASES}) == len(GATE_CASES)
    for case in GATE_CASES[:6]:
        want = expected(case, 70, 70)
        assert differences(want, want) == []
        for name in ("chunks", "segments", "token_offsets", "chunk_offsets", "segment_offsets", "status", "sums"):
            off = {**want, name: want[name].clone()}
            off[name].view(-1)[-1] += 1
            assert [line.split(":")[0] for line in differences(off, want)] == [name]
    shorter = {**want, "sums": want["sums"][:-1]}
    assert differences(shorter, want)[0].startswith("sums: got torch.float32 [69,")


@pytest.fixture(scope="module")
def device_rule(tmp_path_factory):
    """`cake/work/chunks.h`, the code that kernels run, compiled for the CPU."""
    cxx = shutil.which("c++") or shutil.which("g++")
    if cxx is None:
        pytest.skip("a C++ compiler is what this needs: none on PATH")
    source = tmp_path_factory.mktemp("rule") / "rule.cpp"
    source.write_text(
        '#include "cake/work/chunks.h"\n'
        'extern "C" int chunks_of(int n) { return cake::work::chunks_of(n); }\n'
        'extern "C" int segments_of(int n) { return cake::work::segments_of(n); }\n'
        'extern "C" int segment_chunks_of(int n) { return cake::work::segment_chunks_of(n); }\n'
        'extern "C" int range_of(const int* o, int n, int i) { return cake::work::range_of(o, n, i); }\n'
    )
    include = package_directory("cake_shared") / "include"
    library = source.with_suffix(".so")
    subprocess.run([cxx, "-std=c++17", "-shared", "-fPIC", "-I", include, source, "-o", library], check=True)
    return ctypes.CDLL(str(library))


def test_device_code_cuts_a_sequence_as_the_plan_does(device_rule):
    lengths = [*range(200), 4095, 4096, 4097, 8191, 8192, 8193, 12287, 12288, 12289, 100_000, FAR - 1, FAR, FAR + 1]
    for tokens in lengths:
        segments = plan.segment_lengths(tokens)
        assert device_rule.chunks_of(tokens) == plan.ceil_div(tokens, plan.CHUNK_TOKENS)
        assert device_rule.segments_of(tokens) == plan.segment_count(tokens) == len(segments)
        if segments:
            assert device_rule.segment_chunks_of(tokens) == plan.ceil_div(segments[0], plan.CHUNK_TOKENS)
        assert sum(plan.ceil_div(n, plan.CHUNK_TOKENS) for n in segments) == device_rule.chunks_of(tokens)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40))
def test_device_code_finds_the_range_of_every_item(device_rule, counts):
    offsets = [sum(counts[:i]) for i in range(len(counts) + 1)]
    array = (ctypes.c_int * len(offsets))(*offsets)
    for item in range(offsets[-1]):
        at = device_rule.range_of(array, len(counts), item)
        assert offsets[at] <= item < offsets[at + 1]
