import math

import pytest
import torch

from cake_shared.testing import GuardBand, assert_bitwise_equal, assert_near, relative_l2, same_bits


def test_equal_bits_pass_whatever_the_strides():
    x = torch.randn(3, 5).bfloat16()
    assert_bitwise_equal(x, x.t().contiguous().t(), "x")
    assert same_bits(x, x.clone())
    assert_bitwise_equal(None, None)


def test_signs_of_zero_differ():
    with pytest.raises(
        AssertionError, match=r"1 of 2 elements differ.*first at \[1\]: 0.0 \(0x00000000\) against -0.0 \(0x80000000\)"
    ):
        assert_bitwise_equal(torch.tensor([1.0, 0.0]), torch.tensor([1.0, -0.0]))


def test_nan_payloads_differ_and_the_same_nan_is_equal():
    quiet = torch.tensor([0x7FC00000], dtype=torch.int32).view(torch.float32)
    other = torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert same_bits(quiet, quiet.clone())
    assert not same_bits(quiet, other)
    with pytest.raises(AssertionError, match=r"0x7fc00000.*0x7fc00001"):
        assert_bitwise_equal(quiet, other)


def test_first_differing_index_is_reported_in_row_major_order():
    x = torch.zeros(2, 3, 4)
    y = x.clone()
    y[1, 2, 3] = 5.0
    y[1, 0, 2] = 2.0
    with pytest.raises(
        AssertionError, match=r"dq: 2 of 24 elements differ in bits; first at \[1, 0, 2\].*difference 5.000e\+00"
    ):
        assert_bitwise_equal(x, y, "dq")


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (torch.zeros(2), torch.zeros(3)),
        (torch.zeros(2), torch.zeros(2).bfloat16()),
        (torch.zeros(2), None),
        (None, torch.zeros(2)),
    ],
)
def test_shape_dtype_and_presence_count(left, right):
    assert not same_bits(left, right)
    with pytest.raises(AssertionError, match="against"):
        assert_bitwise_equal(left, right)


def test_every_width_and_complex_values():
    for dtype in (torch.uint8, torch.bool, torch.float16, torch.float64, torch.int64, torch.complex64):
        x = torch.ones(4, dtype=dtype)
        y = torch.ones(4, dtype=dtype)
        assert same_bits(x, y)
        y[2] = 0
        assert not same_bits(x, y)
        with pytest.raises(AssertionError, match="1 of"):
            assert_bitwise_equal(x, y)


def test_relative_l2_values():
    assert relative_l2(torch.tensor([3.0, 5.0]), torch.tensor([3.0, 4.0])) == pytest.approx(0.2)
    assert relative_l2(torch.tensor([3.0, 4.0]), torch.zeros(2)) == pytest.approx(5.0)
    assert relative_l2(torch.zeros(0), torch.zeros(0)) == 0.0
    assert relative_l2(torch.tensor([math.nan]), torch.tensor([1.0])) == math.inf
    with pytest.raises(ValueError, match="shape"):
        relative_l2(torch.zeros(2), torch.zeros(3))
    assert_near(torch.ones(2), torch.ones(2), 0.0)
    with pytest.raises(AssertionError, match=r"o: relative L2 error 1.000e\+00, limit 5.000e-01"):
        assert_near(torch.zeros(2), torch.ones(2), 0.5, "o")
    with pytest.raises(AssertionError, match="inf"):
        assert_near(torch.tensor([math.inf]), torch.ones(1), 1e9)


def test_guard_bands_see_every_side():
    values = torch.randn(3, 4, 5)
    for offset in (-1, 60, -256):
        band = GuardBand.around(values)
        band.check()
        torch.testing.assert_close(band.tensor, values)
        band.tensor.add_(1.0)
        band.check()
        band._buffer[256 + offset] = 0.0
        with pytest.raises(AssertionError, match=rf"x: 1 elements.*first at element offset {offset}, last at {offset}"):
            band.check("x")


def test_guard_bands_between_rows():
    band = GuardBand((2, 3), torch.bfloat16, row_margin=2)
    assert band.tensor.stride() == (5, 1)
    assert bool(torch.isnan(band.tensor).all())
    band.tensor.zero_()
    band.check()
    band.tensor.as_strided((1,), (1,), band.tensor.storage_offset() + 3).zero_()
    with pytest.raises(AssertionError, match="offset 3"):
        band.check()
