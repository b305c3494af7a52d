"""The committed measurement of the emulator's speed: what it says, and that EMULATOR.md quotes it."""

import json
from pathlib import Path

import pytest

from cake_shared.emulator import speed

PAGE = Path(__file__).parents[2] / "EMULATOR.md"


@pytest.fixture
def result():
    return json.loads(speed.RESULTS.read_text())


def test_the_committed_measurement_meets_the_demands(result):
    assert speed.shortfalls(result) == []
    assert set(result["kernels"]) == {"arithmetic", "shared_tile"}


def test_the_page_quotes_it(result):
    quoted = PAGE.read_text().partition(speed.BEGIN)[2].partition(speed.END)[0]
    assert quoted.strip() == speed.markdown(result).strip()


def test_what_is_too_slow_is_named(result):
    slow = json.loads(json.dumps(result))
    slow["kernels"]["arithmetic"]["cheap"] = 29.9
    slow["build_seconds"]["wall"] = 41.0
    assert len(speed.shortfalls(slow)) == 2


def test_rates_are_measured():
    rates = speed.kernel_rates()
    assert all(rate > 0 for by_detectors in rates.values() for rate in by_detectors.values())
