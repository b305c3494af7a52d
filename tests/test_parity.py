import pytest

from cake_shared.testing.parity import PAIRS, report


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: pair.free)
def test_twins_agree_with_float64_and_each_other(pair):
    lines = []
    assert report(pair, lines.append) == []
    assert "same program" in lines[0]
    assert len(lines) > 10
