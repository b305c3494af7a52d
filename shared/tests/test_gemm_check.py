"""Layout rule, overlap of views, repair copies, and the guard of FP32 products."""

import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cake_shared.cpu_precision import ieee_products
from cake_shared.gemm import check, layout
from cake_shared.gemm.problem import Buffer, round_up

BF16 = torch.bfloat16


@pytest.mark.parametrize(
    ("shape", "stride", "expected"),
    [
        ((4, 16), (16, 1), "k"),
        ((4, 16), (1, 8), "m"),
        ((4, 16), (24, 1), "k"),
        ((4, 16), (17, 1), None),
        ((4, 16), (0, 1), None),
        ((4, 16), (32, 2), None),
        ((1, 13), (13, 1), "k"),
        ((1, 16), (1, 8), "m"),
        ((5, 1), (1, 1), "m"),
        ((5, 1), (8, 1), "k"),
        ((1, 1), (3, 7), "k"),
        ((2, 4, 16), (64, 16, 1), "k"),
        ((2, 4, 16), (0, 16, 1), "k"),
        ((2, 4, 16), (65, 16, 1), None),
        ((1, 4, 16), (65, 16, 1), "k"),
    ],
)
def test_major_axis(shape, stride, expected):
    tensor = torch.zeros(2000, dtype=BF16).as_strided(shape, stride)
    assert layout.major_axis(tensor, "m", "k") == expected


@given(
    rows=st.integers(0, 9),
    cols=st.integers(0, 20),
    offset=st.integers(0, 9),
    row_stride=st.integers(0, 40),
    col_stride=st.integers(0, 40),
    dtype=st.sampled_from([BF16, torch.float32]),
)
def test_readable_keeps_values_and_ends_legal(rows, cols, offset, row_stride, col_stride, dtype):
    base = torch.arange(1200).to(dtype)
    tensor = base.as_strided((rows, cols), (row_stride, col_stride), offset)
    result = layout.readable(tensor)
    assert torch.equal(result, tensor)
    assert result.numel() == 0 or layout.require_major("x", result, "m", "k") in "mk"
    legal = layout.major_axis(tensor, "m", "k") is not None and layout.is_aligned(tensor)
    assert (result is tensor) == (legal or tensor.numel() == 0)


@given(
    start=st.integers(0, 40),
    shape=st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 9)),
    other_start=st.integers(0, 40),
    other_shape=st.tuples(st.integers(1, 3), st.integers(1, 4), st.integers(1, 9)),
    pitch=st.integers(8, 24),
)
def test_overlap_is_never_missed(start, shape, other_start, other_shape, pitch):
    """Against the sets of elements themselves; the check may refuse what is apart, never pass what meets."""
    base = torch.zeros(600)

    def view(start, shape):
        return base.as_strided(shape, (pitch * 4, pitch, 1), start)

    def elements(start, shape):
        grid = torch.arange(600).as_strided(shape, (pitch * 4, pitch, 1), start)
        return set(grid.flatten().tolist())

    meets = bool(elements(start, shape) & elements(other_start, other_shape))
    try:
        check.check_no_overlap("out", view(start, shape), a=view(other_start, other_shape))
        passed = True
    except ValueError:
        passed = False
    assert not (meets and passed)


def test_disjoint_columns_pass_and_meeting_ones_do_not():
    buffer = torch.zeros(6, 64)
    check.check_no_overlap("out", buffer[:, 16:32], a=buffer[:, :16], b=buffer[:, 32:])
    for start, stop in ((15, 31), (0, 64), (17, 20)):
        with pytest.raises(ValueError, match="out: shares memory with a"):
            check.check_no_overlap("out", buffer[:, 16:32], a=buffer[:, start:stop])
    with pytest.raises(ValueError, match=r"out: .*elements share memory"):
        check.check_no_overlap("out", torch.zeros(1, 8).expand(4, 8))


@pytest.fixture
def bf16_products():
    torch.set_float32_matmul_precision("medium")
    yield
    torch.set_float32_matmul_precision("highest")


@pytest.mark.usefixtures("bf16_products")
def test_guard_is_counted_and_restored():
    """Nested and threaded use leaves oneDNN as it was found."""
    assert torch.backends.mkldnn.enabled
    inside, release = threading.Event(), threading.Event()

    def hold():
        with ieee_products():
            inside.set()
            release.wait(10)

    holder = threading.Thread(target=hold)
    with ieee_products():
        holder.start()
        assert inside.wait(10)
        assert not torch.backends.mkldnn.enabled
    assert not torch.backends.mkldnn.enabled
    release.set()
    holder.join()
    assert torch.backends.mkldnn.enabled
    with pytest.raises(KeyError), ieee_products():
        raise KeyError
    assert torch.backends.mkldnn.enabled


def test_guard_touches_nothing_under_full_precision():
    with ieee_products():
        assert torch.backends.mkldnn.enabled


def test_sizes():
    assert [round_up(n, 64) for n in (0, 1, 64, 65)] == [0, 64, 64, 128]
    assert Buffer("x", "bfloat16", (3, 5)).size_bytes == 64
    assert Buffer("x", "float64", (8, 2)).size_bytes == 128
    assert Buffer("x", "bool", ()).size_bytes == 64
